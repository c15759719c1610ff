/* A packed matrix in bands of 48 outputs, the last one or two of 32, as products of whole numbers want it.

   Inputs stand in slots of sixteen, a slot in four quads of four inputs. A word has what four inputs of one output
   need, a byte for each; a row of a band is 48 words, one for each output, in sides of sixteen; a register takes a side
   or a part of it. A code of 8 bits is a byte. Codes of 4 bits share a row between two quads, those of 2 bits between
   all four, the first in the lowest bits; 6 bits are rows of 4 and a row of 2, 5 bits rows of 4 and, for two slots, a
   row of single bits, and 3 bits rows of 2 and such a row. Tables of factors are (groups, 48 or 32), band by band. */

#ifndef EXLM_BANDS_H
#define EXLM_BANDS_H

#include "simd.h"

enum { PANEL_N = 48, PANEL_TILES = 3, QUADS = 4, PREFETCH_BYTES = 4096 };
enum { PANEL_REGS = PANEL_TILES * LANE_REGS, REG_BYTES = VLEN * 4 }; /* registers of a wide band's row, and their bytes */

/* Where a band begins, in sides, and how many it has. */
typedef struct {
    int first, tiles;
} Panel;

/* Outputs are filled up to 32, so that their sides are threes and at most two pairs. */
INLINE int panel_count(int outputs) { return ((outputs + 31) / 32 * 2 + 2) / 3; }

INLINE Panel panel_at(int outputs, int number) {
    int tiles = (outputs + 31) / 32 * 2, panels = panel_count(outputs), threes = tiles - 2 * panels;
    if (number < threes) return (Panel){3 * number, 3};
    return (Panel){2 * number + threes, 2};
}

/* Bytes of a slot's codes in a side; of two slots where they share a row. */
INLINE int pack_bytes(int bits) { return bits * 32 << (bits & 1); }

INLINE const uint8_t *panel_codes(const Segment *segment, Panel panel) {
    return segment->codes + (long)panel.first * segment->packs * pack_bytes(segment->bits);
}

/* A register of each quad of a slot's codes as bytes; `band` points to it in the first row. */
INLINE void unpack_kblock(const uint8_t *panel, int bits, int tiles, int kblock, i32v *quads) {
    int odd = bits & 1, second = kblock & odd, base_bits = bits == 8 ? 8 : bits >= 4 ? 4 : 2, rows = base_bits / 2;
    const uint8_t *at = panel + (long)(kblock >> odd) * pack_bytes(bits) * tiles;
#pragma GCC unroll 4
    for (int q = 0; q < QUADS; q++) {
        i32v row = i32_load(at + (second * rows + q * rows / QUADS) * 64 * tiles);
        int up = q * base_bits % 8;
        quads[q] = base_bits == 8 ? row : i32_and(up ? i32_shr(row, up) : row, i8_set1((1 << base_bits) - 1));
    }
    if (bits == base_bits) return;
    i32v more = i32_load(at + (rows << odd) * 64 * tiles), mask = i8_set1(bits == 6 ? 0x30 : 1 << base_bits);
    if (second) more = i32_shr(more, 4);
#pragma GCC unroll 4
    for (int q = 0; q < QUADS; q++) {
        int up = bits == 6 ? 4 - 2 * q : base_bits - q;
        i32v has_zeros = up > 0 ? i32_shl(more, up) : up < 0 ? i32_shr(more, -up) : more;
        quads[q] = i32_or_and(quads[q], has_zeros, mask);
    }
}

#define EACH_REG _Pragma("GCC unroll 6") for (int v = 0; v < regs; v++)
#define EACH_QUAD _Pragma("GCC unroll 4") for (int q = 0; q < QUADS; q++)

/* What is taken off codes before they are multiplied, where products are of signed bytes and codes need eight bits. */
#if defined(__ARM_FEATURE_DOTPROD) && !defined(EXLM_PORTABLE)
#define SIGN_OFFSET(segment) ((segment)->bits == 8 || (segment)->codebook ? 128 : 0)
#else
#define SIGN_OFFSET(segment) 0
#endif

/* The numbers that the codes of 4 bits stand for, in every sixteen bytes of a register. */
INLINE i32v load_codebook(const Segment *segment) { return i8_load16(segment->codebook); }

INLINE void lookup_quads(i32v codebook, i32v *quads) {
    EACH_QUAD quads[q] = i8_lookup16(codebook, quads[q]);
}

/* The same of codes of any width. */
static void unpack_kblock_any(const Segment *segment, const uint8_t *panel, int tiles, int kblock, i32v *quads) {
#define OWN(own) case own: unpack_kblock(panel, own, tiles, kblock, quads); break;
    switch (segment->bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) OWN(8) }
#undef OWN
    if (segment->codebook) lookup_quads(load_codebook(segment), quads);
}

/* Where the factors of a band's group begin, in a table of so many groups. */
INLINE long table_offset(Panel panel, int groups, int group) {
    return ((long)panel.first * groups + group * panel.tiles) * LANES;
}

INLINE f32v load_factors(const FactorTable *f, Panel panel, int groups, int group, int v) {
    long at = table_offset(panel, groups, group) + v * VLEN;
    f32v values;
    if (f->kind == F16) values = f32_load_f16((const uint16_t *)f->table + at);
    else if (f->kind == F32) values = f32_load((const float *)f->table + at);
    else if (f->kind == U8) values = f32_from_i32(i32_load_u8((const uint8_t *)f->table + at));
    else values = f32_from_i32(i32_load_i8((const int8_t *)f->table + at));
    if (!f->super_scales) return values;
    return f32_mul(values, f32_load_f16(f->super_scales + table_offset(panel, f->super_groups, group / f->groups_per_super) + v * VLEN));
}

#endif
