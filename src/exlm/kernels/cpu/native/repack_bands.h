/* From the packed form's bit streams, down each column, to bands. */

#ifndef EXLM_REPACK_BANDS_H
#define EXLM_REPACK_BANDS_H

#include "bands.h"
#include "repack.h"

/* A byte for each of a slot's codes, of sixteen columns: four inputs to a word. Loops stay loops: unrolled, they take
   seconds to build. */
INLINE void slot_bytes(const Repacking *p, const int32_t *places, int stored, int first, int width, Words *quads) {
#pragma GCC unroll 1
    for (int q = 0; q < QUADS; q++, places += 4)
#pragma GCC unroll 1
        for (int b = 0; b < 4; b++)
            if (places[b] >= 0) quads[q] |= codes_of(p, places[b], stored, first, width) << (8 * b);
}

/* The same of 4 and 8 bits, where words are whole quads or pairs of them. */
INLINE void slot_words(const Repacking *p, int place, int stored, int first, Words *quads) {
    const uint32_t *at = p->codes + (long)place * stored / 32 * p->columns + first;
    for (int w = 0; w < stored / 2; w++, at += p->columns) {
        Words word = some_words(at, SIDE);
        if (stored == 8) quads[w] = word;
        for (int half = 0; stored == 4 && half < 2; half++, word >>= 16) {
            Words two = ((word & 0xffff) | word << 8) & 0x00ff00ff;
            quads[2 * w + half] = (two | two << 4) & 0x0f0f0f0f;
        }
    }
}

/* A slot's share of the block at `out`, sixteen columns wide. */
INLINE void put_slot(const Words *quads, int bits, int sides, int second, uint8_t *out) {
    int wide = bits == 8 ? 8 : bits >= 4 ? 4 : 2, rows = wide / 2, each = QUADS / rows;
    uint32_t mask = 0x01010101u * ((1u << wide) - 1);
    for (int row = 0; row < rows; row++) {
        Words all = {0};
        for (int n = 0; n < each; n++) all |= (quads[row * each + n] & mask) << (n * wide);
        memcpy(out + (second * rows + row) * 64 * sides, &all, sizeof all);
    }
    if (bits == wide) return;
    uint8_t *last = out + (rows << (bits & 1)) * 64 * sides;
    int narrow = bits - wide;
    Words more = {0};
    if (second) memcpy(&more, last, sizeof more);
    mask = 0x01010101u * ((1u << narrow) - 1);
    for (int q = 0; q < QUADS; q++) more |= (quads[q] >> wide & mask) << (4 * second + q * narrow);
    memcpy(last, &more, sizeof more);
}

/* A band. */
static void band_repack_chunk(void *job, int number) {
    const Repacking *p = job;
    Band band = band_of(p->columns, number);
    int bits = p->bits, odd = bits & 1, size = block_bytes(bits) * band.sides;
    uint8_t *out = p->out + (long)band.first * p->blocks * block_bytes(bits);
    for (int slot = 0; slot < p->blocks << odd; slot++) {
        const int32_t *places = p->places + slot * LANES;
        for (int side = 0; side < band.sides; side++) {
            int first = (band.first + side) * SIDE, width = p->columns - first < SIDE ? p->columns - first : SIDE;
            int plain = width == SIDE && *places >= 0 && *places % 8 == 0 && places[LANES - 1] - *places == LANES - 1;
            Words quads[QUADS] = {{0}};
            ask_for(p, *places, (p->stored + 1) / 2, width > 0 ? first : 0);
#define OWN(own) case own: slot_bytes(p, places, own, first, SIDE, quads); break;
            if (plain && p->stored == 4) slot_words(p, *places, 4, first, quads);
            else if (plain && p->stored == 8) slot_words(p, *places, 8, first, quads);
            else if (width == SIDE)
                switch (p->stored) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) OWN(7) OWN(8) }
            else if (width > 0) slot_bytes(p, places, p->stored, first, width, quads);
#undef OWN
            put_slot(quads, bits, band.sides, slot & odd, out + (slot >> odd) * (long)size + side * 64);
        }
    }
}

/* Codes of `stored` bits, of rows `places` (-1: none) of each column → band by band, (blocks, bytes of a block). */
EXPORT void exlm_repack_bands(const uint32_t *codes, int columns, int stored, int bits, const int32_t *places,
                              int blocks, uint8_t *out, int threads) {
    Repacking job = {codes, places, out, columns, stored, bits, blocks};
    share(band_repack_chunk, &job, bands_of(columns), threads);
}

#endif
