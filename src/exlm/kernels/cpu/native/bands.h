/* A packed matrix in bands of 48 outputs, the last one or two of 32, as products of whole numbers want it.

   Inputs stand in slots of sixteen, a slot in four quads of four inputs. A word has what four inputs of one output
   need, a byte for each; a row of a band is 48 words, one for each output, in sides of sixteen; a register takes a side
   or a part of it. A code of 8 bits is a byte. Codes of 4 bits share a row between two quads, those of 2 bits between
   all four, the first in the lowest bits; 6 bits are rows of 4 and a row of 2, 5 bits rows of 4 and, for two slots, a
   row of single bits, and 3 bits rows of 2 and such a row. Tables of factors are (groups, 48 or 32), band by band. */

#ifndef EXLM_BANDS_H
#define EXLM_BANDS_H

#include "lanes.h"

enum { BAND = 48, SIDES = 3, QUADS = 4, AHEAD_BYTES = 4096 };
enum { VECTORS = SIDES * PARTS, VECTOR = WIDTH * 4 }; /* registers of a wide band's row, and their bytes */

/* Where a band begins, in sides, and how many it has. */
typedef struct {
    int first, sides;
} Band;

/* Outputs are filled up to 32, so that their sides are threes and at most two pairs. */
INLINE int bands_of(int outputs) { return ((outputs + 31) / 32 * 2 + 2) / 3; }

INLINE Band band_of(int outputs, int number) {
    int sides = (outputs + 31) / 32 * 2, bands = bands_of(outputs), threes = sides - 2 * bands;
    if (number < threes) return (Band){3 * number, 3};
    return (Band){2 * number + threes, 2};
}

/* Bytes of a slot's codes in a side; of two slots where they share a row. */
INLINE int block_bytes(int bits) { return bits * 32 << (bits & 1); }

#if defined(WHOLE_NUMBERS)

INLINE const uint8_t *band_codes(const Run *run, Band band) {
    return run->codes + (long)band.first * run->blocks * block_bytes(run->bits);
}

/* A register of each quad of a slot's codes as bytes; `band` points to it in the first row. */
INLINE void slot_codes(const uint8_t *band, int bits, int sides, int slot, Whole *quads) {
    int odd = bits & 1, second = slot & odd, wide = bits == 8 ? 8 : bits >= 4 ? 4 : 2, rows = wide / 2;
    const uint8_t *at = band + (long)(slot >> odd) * block_bytes(bits) * sides;
#pragma GCC unroll 4
    for (int q = 0; q < QUADS; q++) {
        Whole row = w_words(at + (second * rows + q * rows / QUADS) * 64 * sides);
        int up = q * wide % 8;
        quads[q] = wide == 8 ? row : w_and(up ? w_right(row, up) : row, w_every_byte((1 << wide) - 1));
    }
    if (bits == wide) return;
    Whole more = w_words(at + (rows << odd) * 64 * sides), mask = w_every_byte(bits == 6 ? 0x30 : 1 << wide);
    if (second) more = w_right(more, 4);
#pragma GCC unroll 4
    for (int q = 0; q < QUADS; q++) {
        int up = bits == 6 ? 4 - 2 * q : wide - q;
        Whole moved = up > 0 ? w_left(more, up) : up < 0 ? w_right(more, -up) : more;
        quads[q] = w_or_and(quads[q], moved, mask);
    }
}

/* The same of codes of any width. */
static void any_codes(const uint8_t *band, int bits, int sides, int slot, Whole *quads) {
#define OWN(own) case own: slot_codes(band, own, sides, slot, quads); break;
    switch (bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) OWN(8) }
#undef OWN
}

#define EACH_VECTOR _Pragma("GCC unroll 6") for (int v = 0; v < vectors; v++)
#define EACH_QUAD _Pragma("GCC unroll 4") for (int q = 0; q < QUADS; q++)

/* Where the factors of a band's group begin, in a table of so many groups. */
INLINE long factors_at(Band band, int groups, int group) {
    return ((long)band.first * groups + group * band.sides) * LANES;
}

INLINE Real some_factors(const Factors *f, Band band, int groups, int group, int v) {
    long at = factors_at(band, groups, group) + v * WIDTH;
    Real values;
    if (f->kind == HALVES) values = r_halves((const uint16_t *)f->table + at);
    else if (f->kind == FLOATS) values = r_load((const float *)f->table + at);
    else if (f->kind == SMALL_CODES) values = r_from(w_bytes((const uint8_t *)f->table + at));
    else values = r_from(w_signed((const int8_t *)f->table + at));
    if (!f->supers) return values;
    return r_mul(values, r_halves(f->supers + factors_at(band, f->many, group / f->each) + v * WIDTH));
}

#endif
#endif
