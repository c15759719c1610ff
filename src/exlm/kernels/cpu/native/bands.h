/* A packed matrix in bands of 32 outputs, as products of whole numbers want it.

   Inputs stand in slots of sixteen, a slot in four quads of four inputs. A word has what four inputs of one output
   need, a byte for each; a row of a band is 32 words, one for each output, and a register takes half of it. A code of
   8 bits is a byte. Codes of 4 bits share a row between two quads, those of 2 bits between all four, the first in
   the lowest bits; 6 bits are rows of 4 and a row of 2, 5 bits rows of 4 and, for two slots, a row of single bits, and
   3 bits rows of 2 and such a row. Tables of factors are (bands, groups, 32). */

#ifndef EXLM_BANDS_H
#define EXLM_BANDS_H

#include "lanes.h"

enum { BAND = 32, SIDES = 2, ROW_BYTES = 128, QUADS = 4, AHEAD_BYTES = 4096 };

/* Bytes of a slot's codes in a band; of two slots where they share a row. */
INLINE int block_bytes(int bits) { return bits * 64 << (bits & 1); }

#if defined(__AVX512VNNI__)

INLINE const uint8_t *band_codes(const Run *run, int band) {
    return run->codes + (long)band * run->blocks * block_bytes(run->bits);
}

/* The codes of a slot as bytes, of sixteen outputs; `band` points to that half of its rows. */
INLINE void slot_codes(const uint8_t *band, int bits, int slot, Whole *quads) {
    int odd = bits & 1, second = slot & odd, wide = bits == 8 ? 8 : bits >= 4 ? 4 : 2, rows = wide / 2;
    const uint8_t *at = band + (long)(slot >> odd) * block_bytes(bits);
#pragma GCC unroll 4
    for (int q = 0; q < QUADS; q++) {
        Whole row = w_words(at + (second * rows + q * rows / QUADS) * ROW_BYTES);
        int up = q * wide % 8;
        quads[q] = wide == 8 ? row : w_and(up ? w_right(row, up) : row, _mm512_set1_epi8((1 << wide) - 1));
    }
    if (bits == wide) return;
    Whole more = w_words(at + (rows << odd) * ROW_BYTES), mask = _mm512_set1_epi8(bits == 6 ? 0x30 : 1 << wide);
    if (second) more = w_right(more, 4);
#pragma GCC unroll 4
    for (int q = 0; q < QUADS; q++) {
        int up = bits == 6 ? 4 - 2 * q : wide - q;
        Whole moved = up > 0 ? w_left(more, up) : up < 0 ? w_right(more, -up) : more;
        quads[q] = _mm512_ternarylogic_epi32(quads[q], moved, mask, 0xf8); /* or (and) */
    }
}

/* A single code: of output `lane` of the band, input `place` of the slot. */
static int single_code(const uint8_t *band, int bits, int slot, int lane, int place) {
    int odd = bits & 1, second = slot & odd, wide = bits == 8 ? 8 : bits >= 4 ? 4 : 2, rows = wide / 2, q = place / 4;
    const uint8_t *at = band + (long)(slot >> odd) * block_bytes(bits) + lane * 4 + place % 4;
    int code = at[(second * rows + q * rows / QUADS) * ROW_BYTES] >> q * wide % 8 & ((1 << wide) - 1);
    if (bits == wide) return code;
    int more = at[(rows << odd) * ROW_BYTES];
    return code | (bits == 6 ? more >> 2 * q & 3 : more >> (4 * second + q) & 1) << wide;
}

INLINE Real sixteen_factors(const Factors *f, long band, int groups, int group, int side) {
    long at = (band * groups + group) * BAND + side * LANES;
    Real values;
    if (f->kind == HALVES) values = r_halves((const uint16_t *)f->table + at);
    else if (f->kind == FLOATS) values = r_load((const float *)f->table + at);
    else if (f->kind == SMALL_CODES) values = r_from(w_bytes((const uint8_t *)f->table + at));
    else values = r_from(w_signed((const int8_t *)f->table + at));
    if (!f->supers) return values;
    return r_mul(values, r_halves(f->supers + (band * f->many + group / f->each) * BAND + side * LANES));
}

#endif
#endif
