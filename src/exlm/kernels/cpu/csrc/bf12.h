/* Matrices of floats with eight significant bits, as bfloat16 has them, in twelve bits a number and without loss.

   An output's numbers differ little in size: four bits of an exponent are enough for fifteen powers of two up to the
   largest and for zero, and what the largest is stands apart, once for each output. The few numbers that are smaller
   still are listed; their codes are zero.

   Words of sixteen bits are such floats without the upper half of their exponents: sign, four bits to spare, exponent,
   seven bits. The spare bits of three words hold a fourth number. So a row is blocks of eight slots: 16 lanes of three
   times two words, the lower one first, for the slots 0 to 5, in their spare bits 6 and 7. Behind the last whole block
   may be half a block: 16 lanes of two words, then 16 of one.

   As they are, words are floats near 2^-112. What they are multiplied with is 2^64 times as large as it should be, and
   sums are brought to size at the end: powers of two change no rounding. */

#ifndef EXLM_LEAN_H
#define EXLM_LEAN_H

#include "simd.h"

enum { BF12_KBLOCKS = 8, BF12_BLOCK_BYTES = BF12_KBLOCKS * LANES * BF12_BITS / 8, LEAN_WORDS = BF12_KBLOCKS / 2 };
#define BF12_UP 0x1p64f

/* Pairs of words: those of eight slots in the lanes of a part, or of the last four. */
INLINE void bf12_unpack_pairs(const uint8_t *at, int kblocks, int reg, i32v *pairs) {
    int lane = reg * VLEN;
    i32v a = i32_load(at + 4 * lane), b, c, last;
    KEEP_IN_REG(a);
    last = i32_bitselect(i32_set1(0x80008000), i32_shl(a, 1), i32_shr(a, 3));
    if (kblocks == BF12_KBLOCKS) {
        b = i32_load(at + 4 * (LANES + lane)), c = i32_load(at + 4 * (2 * LANES + lane));
        KEEP_IN_REG(b);
        KEEP_IN_REG(c);
        last = i32_bitselect(i32_set1(0x87008700), last, i32_shr(b, 7));
        last = i32_bitselect(i32_set1(0x87f087f0), last, i32_shr(c, 11));
        pairs[0] = a, pairs[1] = b, pairs[2] = c, pairs[3] = last;
    } else {
        b = i32_load_u16(at + 4 * LANES + 2 * lane);
        last = i32_bitselect(i32_set1(0x8700), last, i32_shr(a, 23));
        last = i32_bitselect(i32_set1(0x87f0), last, i32_shr(b, 11));
        pairs[0] = a, pairs[1] = i32_or(b, i32_shl(last, 16));
    }
}

/* One word of a pair as floats. */
INLINE f32v bf12_to_f32(i32v pair, int kblock) {
    return (f32v)i32_and(kblock % 2 ? pair : i32_shl(pair, 16), i32_set1(0x87ff0000));
}

/* The numbers of some slots of a part, as their words have them. */
INLINE void bf12_store(const uint8_t *at, int kblocks, int reg, float *out) {
    i32v pairs[BF12_KBLOCKS / 2];
    bf12_unpack_pairs(at, kblocks, reg, pairs);
    for (int kblock = 0; kblock < kblocks; kblock++) {
        f32v found = bf12_to_f32(pairs[kblock / 2], kblock);
        f32_store(out + kblock * LANES + reg * VLEN, found);
    }
}

/* The numbers of one output, as they were. */
static void bf12_column(const Matrix *m, long output, float *out) {
    const Bf12 *bf12 = m->bf12;
    const uint8_t *at = m->segments->codes + output * m->inputs * BF12_BITS / 8;
    for (int left = m->inputs / LANES, i = 0; left > 0; left -= BF12_KBLOCKS, i += BF12_KBLOCKS * LANES, at += BF12_BLOCK_BYTES)
        for (int reg = 0; reg < LANE_REGS; reg++) {
            if (left < BF12_KBLOCKS) bf12_store(at, BF12_KBLOCKS / 2, reg, out + i);
            else bf12_store(at, BF12_KBLOCKS, reg, out + i);
        }
    for (int i = 0; i < m->inputs; i++) out[i] = out[i] * BF12_UP * bf12->units[output];
    for (int i = bf12->outlier_begin[output]; i < bf12->outlier_begin[output + 1]; i++) out[bf12->inputs[i]] = bf12->values[i];
}

#endif
