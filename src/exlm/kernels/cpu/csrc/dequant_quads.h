/* From codes to weights: the numbers a format defines, bit for bit.

   A group of up to 5 bits is a table of its weights, made once and looked up; wider codes are computed one by
   one, with the same operations. */

#ifndef EXLM_UNPACK_H
#define EXLM_UNPACK_H

#include "simd.h"

enum { SLICE_FACTORS = SLICE_KBLOCKS * OUT4 + LANES, PREFETCH_QUADS = 4096 }; /* bytes that are asked for before they are needed */

/* Some blocks of a run, at most a panel of them, in a quad of outputs. */
typedef struct {
    const Segment *segment;
    int quad, pack, packs, round_f16; /* rounded: weights are float16 */
} QuadSlice;

/* What its groups are multiplied with, moved and lowered by, (groups, QUAD). */
typedef struct {
    float scale[SLICE_FACTORS], zero[SLICE_FACTORS], minimum[SLICE_FACTORS];
} SliceFactors;

/* What happens to a number besides its scale. JOINED: it is scaled and lowered in one step, because the product needs
   no rounding; a zero point is then lowered by zero · scale. */
enum { HAS_ZERO = 1, HAS_MINIMUM = 2, ROUND_F16 = 4, FUSED_MINIMUM = 8 };

/* The factors of a few groups as floats. Reads and writes up to 15 behind them. */
INLINE void widen_factors(const FactorTable *f, long quad, int groups, int first, int count, float *out) {
    long at = (quad * groups + first) * OUT4;
    for (int i = 0; i < count * OUT4; i += VLEN) {
        f32v values;
        if (f->kind == F16) values = f32_load_f16((const uint16_t *)f->table + at + i);
        else if (f->kind == F32) values = f32_load((const float *)f->table + at + i);
        else if (f->kind == U8) values = f32_from_i32(i32_load_u8((const uint8_t *)f->table + at + i));
        else values = f32_from_i32(i32_load_i8((const int8_t *)f->table + at + i));
        f32_store(out + i, values);
        __builtin_prefetch((const char *)f->table + (at + i) * 2 + PREFETCH_QUADS / 4);
    }
    if (!f->super_scales) return;
    const uint16_t *super_scales = f->super_scales + quad * f->super_groups * OUT4;
    for (int i = 0; i < count; i++)
        for (int n = 0; n < OUT4; n++) out[i * OUT4 + n] *= f16_to_f32(super_scales[(first + i) / f->groups_per_super * OUT4 + n]);
}

/* Fills in the factors and answers what happens to numbers. */
static int load_slice_factors(const QuadSlice *p, SliceFactors *g) {
    const Segment *segment = p->segment;
    const int32_t *owner = segment->group_of_kblock + p->pack * kblocks_per_pack(segment->bits);
    int first = *owner, count = owner[p->packs * kblocks_per_pack(segment->bits) - 1] - first + 1;
    int round_f16 = p->round_f16 ? ROUND_F16 : 0, lowered = segment->minima.kind ? HAS_MINIMUM : 0;
    int moved = segment->zeros.kind || !has_lut(segment->bits) ? HAS_ZERO : 0; /* a table's shared zero point is in its book */
    widen_factors(&segment->scales, p->quad, segment->groups, first, count, g->scale);
    if (lowered) widen_factors(&segment->minima, p->quad, segment->groups, first, count, g->minimum);
    if (lowered && !moved && (segment->scales.kind == F16 || segment->scales.super_scales)) return FUSED_MINIMUM | round_f16;
    if (segment->zeros.kind) widen_factors(&segment->zeros, p->quad, segment->groups, first, count, g->zero);
    else if (moved)
        for (int at = 0; at < count * OUT4; at++) g->zero[at] = (float)segment->zero;
    if (lowered || !moved || segment->scales.kind != F16) return moved | lowered | round_f16;
    for (int at = 0; at < count * OUT4; at += VLEN) {
        f32v less = f32_mul(f32_load(g->zero + at), f32_load(g->scale + at));
        f32_store(g->minimum + at, less);
    }
    return FUSED_MINIMUM | round_f16;
}

/* What plain numbers stand for in a group of one output. */
INLINE f32v dequant(const SliceFactors *g, int at, f32v plain, int mode) {
    if (mode & HAS_ZERO) plain = f32_sub(plain, f32_set1(g->zero[at]));
    if (mode & FUSED_MINIMUM) plain = f32_fms(f32_set1(g->minimum[at]), plain, f32_set1(g->scale[at]));
    else plain = f32_mul(plain, f32_set1(g->scale[at]));
    if (mode & HAS_MINIMUM) plain = f32_sub(plain, f32_set1(g->minimum[at]));
    return mode & ROUND_F16 ? f32_round_f16(plain) : plain;
}

/* A group's tables, put down: code for every slot of the wider blocks would take the compiler seconds. */
static __attribute__((noinline)) void build_luts(const SliceFactors *g, int at, const float *codebook, int parts, int mode,
                                                  f32v *out) {
    for (int n = 0; n < QUAD_NR; n++)
        for (int i = 0; i < parts; i++) out[n * LUT_REGS + i] = dequant(g, at + n, f32_load(codebook + i * VLEN), mode);
}

INLINE void load_lanes(const uint8_t *at, int stream, int reg, i32v *words) {
    int lane = reg * VLEN;
    if (stream & 4) words[0] = i32_load(at + 4 * lane);
    if (stream == 1) words[0] = i32_load_u8(at + lane);
    if (stream == 5) words[1] = i32_load_u8(at + 4 * LANES + lane);
    if (stream == 3) words[0] = i32_or(i32_load_u16(at + 2 * lane), i32_shl(i32_load_u8(at + 2 * LANES + lane), 16));
}

/* The next slot's codes, in the lowest bits. */
INLINE i32v kblock_codes(const i32v *words, int bits, int kblock) {
    int bit = kblock * bits;
    if (bit + bits <= 32) return bit ? i32_shr(words[0], bit) : words[0];
    if (bit >= 32) return bit > 32 ? i32_shr(words[1], bit - 32) : words[1];
    return i32_or(i32_shr(words[0], bit), i32_shl(words[1], 32 - bit));
}

/* Outputs `from` to `from + TOGETHER` of a panel. Without x, the weights go to `out` (QUAD, PANEL); with it, sums
   `out` (QUAD, 16) grow by x · weights. */
INLINE void quad_kernel(const QuadSlice *p, int bits, int mode, int with_x, const SliceFactors *g, int from, const float *x,
                 float *out) {
    const Segment *segment = p->segment;
    int kblocks = kblocks_per_pack(bits), stream = lane_bytes(bits), use_lut = has_lut(bits);
    int parts = 1 << bits > VLEN ? (1 << bits) / VLEN : 1;
    int current_group = -1, group = from - OUT4;
    const int32_t *owner = segment->group_of_kblock + p->pack * kblocks, *end = owner + p->packs * kblocks;
    const uint8_t *at = segment->codes + (((long)p->quad * segment->packs + p->pack) * OUT4 + from) * stream * LANES;
    f32v table[QUAD_NR][LUT_REGS], sum[QUAD_NR][LANE_REGS];
    out += from * (with_x ? LANES : SLICE_K);
#define EACH_OUTPUT _Pragma("GCC unroll 4") for (int n = 0; n < QUAD_NR; n++)
#define EACH_LANE_REG _Pragma("GCC unroll 4") for (int reg = 0; reg < LANE_REGS; reg++)
    EACH_OUTPUT EACH_LANE_REG sum[n][reg] = with_x ? f32_load(out + n * LANES + reg * VLEN) : f32_set1(0);
    for (; owner < end; owner += kblocks, at += OUT4 * stream * LANES) {
        i32v words[QUAD_NR][LANE_REGS][2];
        EACH_OUTPUT __builtin_prefetch(at + n * stream * LANES + PREFETCH_QUADS);
        EACH_OUTPUT EACH_LANE_REG load_lanes(at + n * stream * LANES, stream, reg, words[n][reg]);
#pragma GCC unroll 8
        for (int kblock = 0; kblock < kblocks; kblock++) {
            if (owner[kblock] != current_group) {
                current_group = owner[kblock], group += OUT4;
                if (bits == 4)
                    EACH_OUTPUT
#pragma GCC unroll 8
                    for (int i = 0; i < parts; i++)
                        table[n][i] = dequant(g, group + n, f32_load(segment->codebook + i * VLEN), mode);
                else if (use_lut) build_luts(g, group, segment->codebook, parts, mode, table[0]);
            }
            EACH_LANE_REG {
                f32v own = f32_set1(0);
                if (with_x) own = f32_load(x + reg * VLEN);
                EACH_OUTPUT {
                    i32v code = kblock_codes(words[n][reg], bits, kblock);
                    f32v found;
                    if (use_lut) found = lut_f32(table[n], code, bits);
                    else {
                        found = f32_from_i32(bits == 8 ? code : i32_and(code, i32_set1((1 << bits) - 1)));
                        found = dequant(g, group + n, found, mode);
                    }
                    if (with_x) sum[n][reg] = f32_fma(sum[n][reg], found, own);
                    else f32_store(out + n * SLICE_K + reg * VLEN, found);
                }
            }
            if (with_x) x += LANES;
            else out += LANES;
        }
    }
    EACH_OUTPUT EACH_LANE_REG if (with_x) f32_store(out + n * LANES + reg * VLEN, sum[n][reg]);
}

/* The usual ways have code of their own. */
#define BY_MODE(ANY, OWN)                                                                                          \
    switch (mode << 4 | p->segment->bits) {                                                                            \
        OWN(4, 0) OWN(4, FUSED_MINIMUM) OWN(4, ROUND_F16) OWN(4, FUSED_MINIMUM | ROUND_F16) OWN(8, FUSED_MINIMUM)                          \
    default:                                                                                                      \
        switch (p->segment->bits) { ANY(2) ANY(3) ANY(4) ANY(5) ANY(6) ANY(8) }                                       \
    }

/* weights (QUAD, PANEL) of a panel. */
static void dequantize_slice(const QuadSlice *p, float *weights) {
    SliceFactors g;
    int mode = load_slice_factors(p, &g);
#define ANY(bits) case bits: quad_kernel(p, bits, mode, 0, &g, from, NULL, weights); break;
#define OWN(bits, own) case (own) << 4 | bits: quad_kernel(p, bits, own, 0, &g, from, NULL, weights); break;
    for (int from = 0; from < OUT4; from += QUAD_NR) BY_MODE(ANY, OWN)
#undef ANY
#undef OWN
}

/* sums (QUAD, 16) += x · weights: one row, whose weights are never put down. */
static void gemv_slice(const QuadSlice *p, const float *x, float *sums) {
    SliceFactors g;
    int mode = load_slice_factors(p, &g);
#define ANY(bits) case bits: quad_kernel(p, bits, mode, 1, &g, from, x, sums); break;
#define OWN(bits, own) case (own) << 4 | bits: quad_kernel(p, bits, own, 1, &g, from, x, sums); break;
    for (int from = 0; from < OUT4; from += QUAD_NR) BY_MODE(ANY, OWN)
#undef ANY
#undef OWN
}

#endif
