/* From the packed form's bit streams, down each column, to bands. */

#ifndef EXLM_REPACK_BANDS_H
#define EXLM_REPACK_BANDS_H

#include "w_panels.h"
#include "threadpool.h"

enum { REPACK_COLUMNS = 16, NEXT = 2 }; /* blocks that are asked for before they are needed */

typedef uint32_t u32x16 __attribute__((vector_size(64))); /* one of each of sixteen columns */

typedef struct {
    const uint32_t *codes;
    const int32_t *row_of_k;
    uint8_t *out;
    int columns, stored_bits, bits, packs;
} RepackArgs;

/* Some columns' words; zeros for those that are not there. */
INLINE u32x16 load_columns(const uint32_t *at, int count) {
    u32x16 out = {0};
    if (count == REPACK_COLUMNS) memcpy(&out, at, sizeof out);
    else memcpy(&out, at, count * sizeof(uint32_t));
    return out;
}

/* A row's codes. */
INLINE u32x16 row_codes(const RepackArgs *p, long row, int stored_bits, int first, int width) {
    long bit = row * stored_bits;
    int shift = (int)(bit & 31);
    const uint32_t *at = p->codes + (bit >> 5) * p->columns + first;
    u32x16 codes = load_columns(at, width) >> shift;
    if (32 % stored_bits && shift + stored_bits > 32) codes |= load_columns(at + p->columns, width) << (32 - shift);
    return codes & ((1u << stored_bits) - 1);
}

/* Every row is a page of its own, which no processor foresees. */
INLINE void prefetch_rows(const RepackArgs *p, int row, int words, int first) {
    long word = (long)(row < 0 ? 0 : row) * p->stored_bits / 32 + NEXT * words;
    uintptr_t at = (uintptr_t)p->codes + (word * p->columns + first) * 4;
    for (int w = 0; w < words; w++) __builtin_prefetch((const void *)(at + (long)w * p->columns * 4));
}

/* A byte for each of a slot's codes, of sixteen columns: four inputs to a word. Loops stay loops: unrolled, they take
   seconds to build. */
INLINE void gather_kblock(const RepackArgs *p, const int32_t *row_of_k, int stored_bits, int first, int width, u32x16 *quads) {
#pragma GCC unroll 1
    for (int q = 0; q < QUADS; q++, row_of_k += 4)
#pragma GCC unroll 1
        for (int b = 0; b < 4; b++)
            if (row_of_k[b] >= 0) quads[q] |= row_codes(p, row_of_k[b], stored_bits, first, width) << (8 * b);
}

/* The same of 4 and 8 bits, where words are whole quads or pairs of them. */
INLINE void gather_kblock_words(const RepackArgs *p, int row, int stored_bits, int first, u32x16 *quads) {
    const uint32_t *at = p->codes + (long)row * stored_bits / 32 * p->columns + first;
    for (int w = 0; w < stored_bits / 2; w++, at += p->columns) {
        u32x16 word = load_columns(at, REPACK_COLUMNS);
        if (stored_bits == 8) quads[w] = word;
        for (int half = 0; stored_bits == 4 && half < 2; half++, word >>= 16) {
            u32x16 two = ((word & 0xffff) | word << 8) & 0x00ff00ff;
            quads[2 * w + half] = (two | two << 4) & 0x0f0f0f0f;
        }
    }
}

/* A slot's share of the block at `out`, sixteen columns wide. */
INLINE void store_kblock(const u32x16 *quads, int bits, int tiles, int second, uint8_t *out) {
    int base_bits = bits == 8 ? 8 : bits >= 4 ? 4 : 2, rows = base_bits / 2, quads_per_row = QUADS / rows;
    uint32_t mask = 0x01010101u * ((1u << base_bits) - 1);
    for (int row = 0; row < rows; row++) {
        u32x16 all = {0};
        for (int n = 0; n < quads_per_row; n++) all |= (quads[row * quads_per_row + n] & mask) << (n * base_bits);
        memcpy(out + (second * rows + row) * 64 * tiles, &all, sizeof all);
    }
    if (bits == base_bits) return;
    uint8_t *last = out + (rows << (bits & 1)) * 64 * tiles;
    int extra_bits = bits - base_bits;
    u32x16 more = {0};
    if (second) memcpy(&more, last, sizeof more);
    mask = 0x01010101u * ((1u << extra_bits) - 1);
    for (int q = 0; q < QUADS; q++) more |= (quads[q] >> base_bits & mask) << (4 * second + q * extra_bits);
    memcpy(last, &more, sizeof more);
}

/* A band. */
static void repack_panel_chunk(void *job, int index) {
    const RepackArgs *p = job;
    Panel panel = panel_at(p->columns, index);
    int bits = p->bits, odd = bits & 1, size = pack_bytes(bits) * panel.tiles;
    uint8_t *out = p->out + (long)panel.first * p->packs * pack_bytes(bits);
    for (int kblock = 0; kblock < p->packs << odd; kblock++) {
        const int32_t *row_of_k = p->row_of_k + kblock * LANES;
        for (int tile = 0; tile < panel.tiles; tile++) {
            int first = (panel.first + tile) * REPACK_COLUMNS, width = p->columns - first < REPACK_COLUMNS ? p->columns - first : REPACK_COLUMNS;
            int plain = width == REPACK_COLUMNS && *row_of_k >= 0 && *row_of_k % 8 == 0 && row_of_k[LANES - 1] - *row_of_k == LANES - 1;
            u32x16 quads[QUADS] = {{0}};
            prefetch_rows(p, *row_of_k, (p->stored_bits + 1) / 2, width > 0 ? first : 0);
#define OWN(own) case own: gather_kblock(p, row_of_k, own, first, REPACK_COLUMNS, quads); break;
            if (plain && p->stored_bits == 4) gather_kblock_words(p, *row_of_k, 4, first, quads);
            else if (plain && p->stored_bits == 8) gather_kblock_words(p, *row_of_k, 8, first, quads);
            else if (width == REPACK_COLUMNS)
                switch (p->stored_bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) OWN(7) OWN(8) }
            else if (width > 0) gather_kblock(p, row_of_k, p->stored_bits, first, width, quads);
#undef OWN
            store_kblock(quads, bits, panel.tiles, kblock & odd, out + (kblock >> odd) * (long)size + tile * 64);
        }
    }
}

/* Codes of `stored` bits, of rows `places` (-1: none) of each column → band by band, (blocks, bytes of a block). */
EXPORT void exlm_repack_panels(const uint32_t *codes, int columns, int stored_bits, int bits, const int32_t *row_of_k,
                              int packs, uint8_t *out, int threads) {
    RepackArgs job = {codes, row_of_k, out, columns, stored_bits, bits, packs};
    parallel_for(repack_panel_chunk, &job, panel_count(columns), threads);
}

#endif
