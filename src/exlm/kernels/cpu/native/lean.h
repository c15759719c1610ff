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

#include "lanes.h"

enum { LEAN_SLOTS = 8, LEAN_BYTES = LEAN_SLOTS * LANES * LEAN_BITS / 8, LEAN_WORDS = LEAN_SLOTS / 2 };
#define LEAN_RAISED 0x1p64f

/* Pairs of words: those of eight slots in the lanes of a part, or of the last four. */
INLINE void lean_pairs(const uint8_t *at, int slots, int part, Whole *pairs) {
    int lane = part * WIDTH;
    Whole a = w_words(at + 4 * lane), b, c, last;
    HOLD(a);
    last = w_select(w_all(0x80008000), w_left(a, 1), w_right(a, 3));
    if (slots == LEAN_SLOTS) {
        b = w_words(at + 4 * (LANES + lane)), c = w_words(at + 4 * (2 * LANES + lane));
        HOLD(b);
        HOLD(c);
        last = w_select(w_all(0x87008700), last, w_right(b, 7));
        last = w_select(w_all(0x87f087f0), last, w_right(c, 11));
        pairs[0] = a, pairs[1] = b, pairs[2] = c, pairs[3] = last;
    } else {
        b = w_shorts(at + 4 * LANES + 2 * lane);
        last = w_select(w_all(0x8700), last, w_right(a, 23));
        last = w_select(w_all(0x87f0), last, w_right(b, 11));
        pairs[0] = a, pairs[1] = w_or(b, w_left(last, 16));
    }
}

/* One word of a pair as floats. */
INLINE Real lean_floats(Whole pair, int slot) {
    return (Real)w_and(slot % 2 ? pair : w_left(pair, 16), w_all(0x87ff0000));
}

/* The numbers of some slots of a part, as their words have them. */
INLINE void put_lean(const uint8_t *at, int slots, int part, float *out) {
    Whole pairs[LEAN_SLOTS / 2];
    lean_pairs(at, slots, part, pairs);
    for (int slot = 0; slot < slots; slot++) {
        Real found = lean_floats(pairs[slot / 2], slot);
        r_store(out + slot * LANES + part * WIDTH, found);
    }
}

/* The numbers of one output, as they were. */
static void lean_column(const Matrix *m, long output, float *out) {
    const Lean *lean = m->lean;
    const uint8_t *at = m->runs->codes + output * m->inputs * LEAN_BITS / 8;
    for (int left = m->inputs / LANES, i = 0; left > 0; left -= LEAN_SLOTS, i += LEAN_SLOTS * LANES, at += LEAN_BYTES)
        for (int part = 0; part < PARTS; part++) {
            if (left < LEAN_SLOTS) put_lean(at, LEAN_SLOTS / 2, part, out + i);
            else put_lean(at, LEAN_SLOTS, part, out + i);
        }
    for (int i = 0; i < m->inputs; i++) out[i] = out[i] * LEAN_RAISED * lean->units[output];
    for (int i = lean->begins[output]; i < lean->begins[output + 1]; i++) out[lean->inputs[i]] = lean->values[i];
}

#endif
