/* How quantised weights lie in memory: panels of 48 outputs (the last one or two: 32 outputs).

   The 48 outputs are three tiles of 16. Along k, one 32-bit word holds four consecutive k of one output, a byte each:
   a quad, the operand of vpdpbusd and sdot. A kblock (16 k) is four quads. A row of the panel is one quad of all
   outputs, 48 words, and loads straight into registers:

               tile 0            tile 1            tile 2
        n:  0   1  ...  15   16  17 ...  31   32  33 ...  47
          +---+---+---+---+ +---+---+---+---+ +---+---+---+---+
   quad 0 | k0..k3 of n   | |               | |               |   one word: byte b is the code of k = 4 * quad + b
   quad 1 | k4..k7        | |               | |               |
   quad 2 | k8..k11       | |               | |               |
   quad 3 | k12..k15      | |               | |               |
          +---------------+ +---------------+ +---------------+
          | next kblock   | ...                                   down to the segment's last pack, then the next panel

   Codes of fewer bits share rows. One byte of each row of a pack (q: a code of that quad, bits 7 to 0 from the left;
   a pack is two kblocks, a and b, where the width is odd):

   8 bits   [q0] [q1] [q2] [q3]
   4 bits   [q1:4 q0:4] [q3:4 q2:4]
   2 bits   [q3:2 q2:2 q1:2 q0:2]
   6 bits   the 2 rows of the codes' lower 4 bits, then their upper 2 bits as a row of 2 bits
   5 bits   2 rows of a's lower 4 bits, 2 rows of b's, then [b3:1 b2:1 b1:1 b0:1 a3:1 a2:1 a1:1 a0:1], the upper bits
   3 bits   1 row of a's lower 2 bits, 1 row of b's, then a row of the upper bits as with 5 bits

   The k axis is outermost within a panel and a panel is contiguous: a thread streams through it once. Factor tables
   (scales, minima, zero points) are cut the same way:

     panel 0: group 0: n 0 ... 47 | group 1: n 0 ... 47 | ...    panel 1: group 0: n 48 ... 95 | ...

   repack_panels.h writes panels, unpack_kblock reads them; exlm_cpu.c draws what comes before and after. */

#ifndef EXLM_W_PANELS_H
#define EXLM_W_PANELS_H

#include "matrix.h"
#include "simd.h"

enum { KBLOCK = 16, QUADS = KBLOCK / 4, TILE_N = 16, PANEL_TILES = 3, PANEL_N = PANEL_TILES * TILE_N };
enum { ROW_BYTES = TILE_N * 4, REG_BYTES = VLEN * 4 }; /* of a tile's row, and of a register: one in AVX-512 */
enum { PANEL_REGS = PANEL_TILES * LANE_REGS };         /* registers of a full panel's row */

#define EACH_QUAD(q) _Pragma("GCC unroll 4") for (int q = 0; q < QUADS; q++)

/* Runs CALL(width) with the width of the codes as a constant, so that the code for each width is compiled apart. */
#define SWITCH_BITS(bits, CALL) \
    switch (bits) {             \
    case 2:                     \
        CALL(2);                \
        break;                  \
    case 3:                     \
        CALL(3);                \
        break;                  \
    case 4:                     \
        CALL(4);                \
        break;                  \
    case 5:                     \
        CALL(5);                \
        break;                  \
    case 6:                     \
        CALL(6);                \
        break;                  \
    default:                    \
        CALL(8);                \
    }

/* Tiles of one panel: number of the first, and how many (3 or 2). */
typedef struct {
    int first, tiles;
} Panel;

/* Outputs are padded to 32: their tiles are split into threes and at most two pairs. */
INLINE int panel_count(int outputs) { return ((outputs + 31) / 32 * 2 + 2) / 3; }

INLINE Panel panel_at(int outputs, int index) {
    int tiles = (outputs + 31) / 32 * 2, panels = panel_count(outputs), full = tiles - 2 * panels;
    if (index < full) return (Panel){3 * index, 3};
    return (Panel){2 * index + full, 2};
}

/* Bytes of a pack in one tile. */
INLINE int pack_bytes(int bits) { return bits * 32 << (bits & 1); }

INLINE const uint8_t *panel_codes(const Segment *segment, Panel panel) {
    return segment->codes + (long)panel.first * segment->packs * pack_bytes(segment->bits);
}

/* One register of each quad of a kblock, a byte for each code. `codes` points to that register in the panel's first
   row. Everything but kblock is known when this is compiled. */
INLINE void unpack_kblock(const uint8_t *codes, int bits, int tiles, int kblock, i32v *quads) {
    int odd = bits & 1, second = kblock & odd, base_bits = bits == 8 ? 8 : bits >= 4 ? 4 : 2, rows = base_bits / 2;
    const uint8_t *pack = codes + (long)(kblock >> odd) * pack_bytes(bits) * tiles;
    EACH_QUAD(q) {
        i32v row = i32_load(pack + (second * rows + q * rows / QUADS) * ROW_BYTES * tiles);
        int shift = q * base_bits % 8;
        quads[q] = base_bits == 8 ? row : i32_and(shift ? i32_shr(row, shift) : row, i8_set1((1 << base_bits) - 1));
    }
    if (bits == base_bits) return;
    i32v upper = i32_load(pack + (rows << odd) * ROW_BYTES * tiles), mask = i8_set1(bits == 6 ? 0x30 : 1 << base_bits);
    if (second) upper = i32_shr(upper, 4);
    EACH_QUAD(q) {
        int shift = bits == 6 ? 4 - 2 * q : base_bits - q;
        i32v moved = shift > 0 ? i32_shl(upper, shift) : shift < 0 ? i32_shr(upper, -shift) : upper;
        quads[q] = i32_or_and(quads[q], moved, mask);
    }
}

/* IQ4: a byte shuffle (vpshufb, tbl) turns each code of 4 bits into the byte it stands for. */
INLINE i32v load_codebook(const Segment *segment) { return i8_load16(segment->codebook); }

INLINE void lookup_quads(i32v codebook, i32v *quads) {
    EACH_QUAD(q) quads[q] = i8_lookup16(codebook, quads[q]);
}

/* For single columns: unpack_kblock of the segment's width, and the codebook lookup. */
static void unpack_kblock_any(const Segment *segment, const uint8_t *codes, int tiles, int kblock, i32v *quads) {
#define UNPACK(bits) unpack_kblock(codes, bits, tiles, kblock, quads)
    SWITCH_BITS(segment->bits, UNPACK)
#undef UNPACK
    if (segment->codebook) lookup_quads(load_codebook(segment), quads);
}

/* Where a group's factors begin in a panel of a table with this number of groups. */
INLINE long table_offset(Panel panel, int groups, int group) {
    return ((long)panel.first * groups + group * panel.tiles) * TILE_N;
}

/* A register of factors. */
INLINE f32v load_factors(const FactorTable *f, Panel panel, int groups, int group, int v) {
    long at = table_offset(panel, groups, group) + v * VLEN;
    f32v values;
    if (f->dtype == F16)
        values = f32_load_f16((const uint16_t *)f->table + at);
    else if (f->dtype == F32)
        values = f32_load((const float *)f->table + at);
    else if (f->dtype == U8)
        values = f32_from_i32(i32_load_u8((const uint8_t *)f->table + at));
    else
        values = f32_from_i32(i32_load_i8((const int8_t *)f->table + at));
    if (!f->super_scales) return values;
    long super_at = table_offset(panel, f->super_groups, group / f->groups_per_super) + v * VLEN;
    return f32_mul(values, f32_load_f16(f->super_scales + super_at));
}

/* A group's factors for a whole panel. */
INLINE void load_factor_row(const FactorTable *f, Panel panel, int groups, int group, f32v *out) {
    int regs = panel.tiles * LANE_REGS;
    long at = table_offset(panel, groups, group);
    if (f->dtype == F16)
        EACH_REG(v) out[v] = f32_load_f16((const uint16_t *)f->table + at + v * VLEN);
    else if (f->dtype == F32)
        EACH_REG(v) out[v] = f32_load((const float *)f->table + at + v * VLEN);
    else if (f->dtype == U8)
        EACH_REG(v) out[v] = f32_from_i32(i32_load_u8((const uint8_t *)f->table + at + v * VLEN));
    else
        EACH_REG(v) out[v] = f32_from_i32(i32_load_i8((const int8_t *)f->table + at + v * VLEN));
    if (!f->super_scales) return;
    at = table_offset(panel, f->super_groups, group / f->groups_per_super);
    EACH_REG(v) out[v] = f32_mul(out[v], f32_load_f16(f->super_scales + at + v * VLEN));
}

/* Hints that a pack's worth of codes, `ahead` bytes later, will be needed: into L2, because a core can wait for few
   lines when it asks for L1. The hardware prefetcher sees streams of 8-bit codes better by itself. */
INLINE void prefetch_codes(const uint8_t *codes, int bits, int kblock, int ahead) {
    const uint8_t *at = codes + (long)kblock * bits * PANEL_N * 2 + ahead;
#pragma GCC unroll 12
    for (int line = 0; line < (bits * PANEL_N * 2 + 63) / 64; line++) __builtin_prefetch(at + line * 64, 0, 2);
}

INLINE void prefetch_factors(const FactorTable *f, Panel panel, int groups, int group, int count) {
    int size = f->dtype == F16 ? 2 : f->dtype == F32 ? 4 : 1;
    const char *at = (const char *)f->table + table_offset(panel, groups, group) * size;
    for (int byte = 0; byte < count * panel.tiles * TILE_N * size; byte += 64) __builtin_prefetch(at + byte);
}

#endif
