/* What the sums of a span become: scaled, moved and lowered. */

#ifndef EXLM_MEANING_H
#define EXLM_MEANING_H

#include "quantize_act.h"

/* What the codes of a span's group are multiplied with, moved and lowered by. */
typedef struct {
    f32v scale[PANEL_REGS], minimum[PANEL_REGS];
    i32v zero[PANEL_REGS];
    int has_zeros, has_minima, shared_zero; /* moved: each output by its own zero point, else all by the shared one */
} Dequant;

/* The usual ways have code of their own: float16 scales alone, with float16 minima, or with zero points. */
enum { DEQUANT_ANY, DEQUANT_SCALE, DEQUANT_SCALE_MIN, DEQUANT_SCALE_ZERO };

static int dequant_mode(const Segment *segment) {
    int has_minima = segment->minima.kind, has_zeros = segment->zeros.kind;
    if (segment->scales.kind != F16) return DEQUANT_ANY;
    if (!has_minima && !has_zeros) return DEQUANT_SCALE;
    return !has_zeros && has_minima == F16 ? DEQUANT_SCALE_MIN : !has_minima && has_zeros == U8 ? DEQUANT_SCALE_ZERO : DEQUANT_ANY;
}

/* Of one register of outputs. What is not used stays as it is: this is done for every span. */
INLINE void load_dequant_reg(Dequant *out, const Segment *segment, int mode, Panel panel, int group, int v) {
    int has_zeros = segment->zeros.kind, has_minima = segment->minima.kind;
    if (mode) has_zeros = mode == DEQUANT_SCALE_ZERO, has_minima = mode == DEQUANT_SCALE_MIN;
    out->has_zeros = has_zeros, out->has_minima = has_minima, out->shared_zero = segment->zero - SIGN_OFFSET(segment);
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
    if (has_zeros && SIGN_OFFSET(segment)) out->zero[v] = i32_add(out->zero[v], i32_set1(-SIGN_OFFSET(segment)));
}

INLINE void load_dequant(Dequant *out, const Segment *segment, int mode, Panel panel, int group) {
    int regs = panel.tiles * LANE_REGS;
    EACH_REG load_dequant_reg(out, segment, mode, panel, group, v);
}

/* What the zero points take off, to begin with. */
INLINE i32v zero_correction(const Dequant *g, int v, const ActScale *act_scale) {
    if (g->has_zeros) return i32_mul(g->zero[v], i32_set1(-act_scale->int_sum));
    return i32_set1((int)((uint32_t)-g->shared_zero * (uint32_t)act_scale->int_sum));
}

/* sum + what a span adds to it. */
INLINE f32v add_dequantized(f32v sum, i32v dot, const Dequant *g, int v, const ActScale *act_scale) {
    sum = f32_fma(sum, f32_mul(f32_from_i32(dot), f32_set1(act_scale->delta)), g->scale[v]);
    return g->has_minima ? f32_fnma(sum, g->minimum[v], f32_set1(act_scale->sum)) : sum;
}

#endif
