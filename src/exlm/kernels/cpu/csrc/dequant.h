/* From a span's int32 sums to floats: y += dot * delta * scale - sum(x) * minimum. Zero points are taken off in
   integers: the sum of (code - zero) * q is dot - zero * int_sum. */

#ifndef EXLM_DEQUANT_H
#define EXLM_DEQUANT_H

#include "quantize_act.h"

/* Signed byte dot products (sdot) take 8-bit codes, and codebook bytes, minus 128; the zero point moves with them. */
#if defined(__ARM_FEATURE_DOTPROD) && !defined(EXLM_PORTABLE)
#define SIGN_OFFSET(segment) ((segment)->bits == 8 || (segment)->codebook ? 128 : 0)
#else
#define SIGN_OFFSET(segment) 0
#endif

/* The factors of one group in a panel. Only what has_zeros and has_minima announce is set. */
typedef struct {
    f32v scale[PANEL_REGS], minimum[PANEL_REGS];
    i32v zero[PANEL_REGS];
    int has_zeros, has_minima, shared_zero; /* shared_zero: of all outputs, if not has_zeros */
} GroupFactors;

/* Kernels are specialised for float16 scales alone, with float16 minima, or with uint8 zero points. */
enum { DEQUANT_ANY, DEQUANT_SCALE, DEQUANT_SCALE_MIN, DEQUANT_SCALE_ZERO };

static int dequant_mode(const Segment *segment) {
    int minima = segment->minima.dtype, zeros = segment->zeros.dtype;
    if (segment->scales.dtype != F16) return DEQUANT_ANY;
    if (!minima && !zeros) return DEQUANT_SCALE;
    if (!zeros && minima == F16) return DEQUANT_SCALE_MIN;
    return !minima && zeros == U8 ? DEQUANT_SCALE_ZERO : DEQUANT_ANY;
}

INLINE void load_group_factors_reg(GroupFactors *out, const Segment *segment, int mode, Panel panel, int group, int v) {
    int has_zeros = segment->zeros.dtype, has_minima = segment->minima.dtype, offset = SIGN_OFFSET(segment);
    if (mode) {
        has_zeros = mode == DEQUANT_SCALE_ZERO;
        has_minima = mode == DEQUANT_SCALE_MIN;
    }
    out->has_zeros = has_zeros;
    out->has_minima = has_minima;
    out->shared_zero = segment->zero - offset;
    if (mode) {
        long at = table_offset(panel, segment->groups, group) + v * VLEN;
        out->scale[v] = f32_load_f16((const uint16_t *)segment->scales.table + at);
        if (has_minima) out->minimum[v] = f32_load_f16((const uint16_t *)segment->minima.table + at);
        if (has_zeros) out->zero[v] = i32_load_u8((const uint8_t *)segment->zeros.table + at);
    } else {
        out->scale[v] = load_factors(&segment->scales, panel, segment->groups, group, v);
        if (has_minima) out->minimum[v] = load_factors(&segment->minima, panel, segment->groups, group, v);
        if (has_zeros) out->zero[v] = i32_from_f32(load_factors(&segment->zeros, panel, segment->groups, group, v));
    }
    if (has_zeros && offset) out->zero[v] = i32_add(out->zero[v], i32_set1(-offset));
}

INLINE void load_group_factors(GroupFactors *out, const Segment *segment, int mode, Panel panel, int group) {
    int regs = panel.tiles * LANE_REGS;
    if (mode) {
        EACH_REG(v) load_group_factors_reg(out, segment, mode, panel, group, v);
        return;
    }
    int offset = SIGN_OFFSET(segment);
    out->has_zeros = segment->zeros.dtype;
    out->has_minima = segment->minima.dtype;
    out->shared_zero = segment->zero - offset;
    load_factor_row(&segment->scales, panel, segment->groups, group, out->scale);
    if (out->has_minima) load_factor_row(&segment->minima, panel, segment->groups, group, out->minimum);
    if (!out->has_zeros) return;
    f32v zeros[PANEL_REGS];
    load_factor_row(&segment->zeros, panel, segment->groups, group, zeros);
    EACH_REG(v) out->zero[v] = i32_add(i32_from_f32(zeros[v]), i32_set1(-offset));
}

/* What is added to a dot product for the zero points. */
INLINE i32v zero_correction(const GroupFactors *g, int v, const ActScale *act_scale) {
    if (g->has_zeros) return i32_mul(g->zero[v], i32_set1(-act_scale->int_sum));
    return i32_set1((int)((uint32_t)-g->shared_zero * (uint32_t)act_scale->int_sum));
}

INLINE f32v add_dequantized(f32v sum, i32v dot, const GroupFactors *g, int v, const ActScale *act_scale) {
    sum = f32_fma(sum, f32_mul(f32_from_i32(dot), f32_set1(act_scale->delta)), g->scale[v]);
    return g->has_minima ? f32_fnma(sum, g->minimum[v], f32_set1(act_scale->sum)) : sum;
}

#endif
