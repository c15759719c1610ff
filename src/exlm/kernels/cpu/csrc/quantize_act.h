/* Activations as digits: within a span, a row's x is a whole number of up to 16 bits times a power of two, the least
   that lets the largest fit. How its bits lie is the instruction set's business. A row's digits depend on nothing but
   the row. */

#ifndef EXLM_DIGITS_H
#define EXLM_DIGITS_H

#include "w_panels.h"
#include "norm_act.h"

enum { QACT_BYTES = 32, MAX_SPAN = 16 }; /* bytes of a slot's digits; slots of a span */

/* What a row's span is worth: the power of two, the sum of the whole numbers, and that of the floats. */
typedef struct {
    float delta, sum;
    int32_t int_sum;
} ActScale;

typedef struct {
    const Matrix *matrix;
    const RmsNorm *norm; /* what x comes from, or none: it is then made on the way */
    const float *x, *residual;
    float *y;
    uint8_t *qact; /* of each span: (rows, slots, 32) */
    ActScale *act_scales;   /* (spans, rows) */
    int first, rows, panels, per_chunk; /* first: which of the norm's rows is the first here */
} GemmArgs;

#if defined(__AVX512VNNI__)
#include "quantize_act_vnni.h"
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(EXLM_PORTABLE)

/* The lowest bytes of sixteen numbers. */
INLINE int8x16_t lowest_bytes(const int32x4_t *ints) {
    int16x8_t a = vcombine_s16(vmovn_s32(ints[0]), vmovn_s32(ints[1]));
    int16x8_t b = vcombine_s16(vmovn_s32(ints[2]), vmovn_s32(ints[3]));
    return vcombine_s8(vmovn_s16(a), vmovn_s16(b));
}

/* Two signed bytes, 256 * high + low: sixteen high ones, then as many low. */
INLINE void store_qact(const i32v *ints, uint8_t *to) {
    int32x4_t low[LANE_REGS], high[LANE_REGS];
    for (int reg = 0; reg < LANE_REGS; reg++) {
        low[reg] = vreinterpretq_s32_u32(ints[reg]);
        high[reg] = vshrq_n_s32(vaddq_s32(low[reg], vdupq_n_s32(128)), 8);
    }
    vst1q_s8((int8_t *)to, lowest_bytes(high));
    vst1q_s8((int8_t *)to + LANES, lowest_bytes(low));
}
#elif defined(__AVX2__)

/* 16-bit numbers; of four neighbours the first comes before the third, then the second and the fourth, as pairs of
   codes do. */
INLINE void store_qact(const i32v *ints, uint8_t *to) {
    i32v first = _mm256_shuffle_epi32(ints[0], 0xd8), second = _mm256_shuffle_epi32(ints[1], 0xd8);
    i32v all = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    _mm256_storeu_si256((i32v *)to, all);
}
#else
INLINE void store_qact(const i32v *ints, uint8_t *to) {
    for (int q = 0; q < QUADS; q++) {
        int16_t four[] = {(int16_t)ints[q][0], (int16_t)ints[q][2], (int16_t)ints[q][1], (int16_t)ints[q][3]};
        memcpy(to + q * sizeof four, four, sizeof four);
    }
}
#endif

/* The exponent's bits of the largest number decide: above 32639 a high digit would not fit. What is not finite makes
   the whole row so; what is tiny is nothing. */
INLINE float power_of_two_scale(uint32_t largest, float *inverse) {
    float size, delta;
    *inverse = 0;
    if (largest >= 0x7f800000) return __builtin_nanf("");
    if (largest < 27u << 23) return 0;
    memcpy(&size, &largest, sizeof size);
    size *= 1.00398f;
    memcpy(&largest, &size, sizeof size);
    uint32_t exponent = (largest >> 23) + 1 - 15, one = exponent << 23, other = (254 - exponent) << 23;
    memcpy(&delta, &one, sizeof delta);
    memcpy(inverse, &other, sizeof other);
    return delta;
}

static void quantize_span(const int32_t *input_of_k, const float *x, int k, int kblocks, uint8_t *qact,
                           ActScale *act_scale) {
    f32v x_regs[MAX_SPAN * LANE_REGS];
    i32v largest = i32_set1(0), sum = i32_set1(0);
    for (int n = 0; n < kblocks * LANE_REGS; n++) {
        int at = k + n * VLEN;
        x_regs[n] = input_of_k ? f32_gather(x, i32_load(input_of_k + at)) : f32_load(x + at);
        largest = u32_max(largest, i32_and((i32v)x_regs[n], i32_set1(0x7fffffff)));
    }
    float inverse;
    act_scale->delta = power_of_two_scale((uint32_t)u32_reduce_max(largest), &inverse);
    for (int s = 0; s < kblocks; s++, qact += QACT_BYTES) {
        i32v int_sum[LANE_REGS];
        for (int reg = 0; reg < LANE_REGS; reg++) {
            int_sum[reg] = inverse ? i32_from_f32(f32_mul(x_regs[s * LANE_REGS + reg], f32_set1(inverse))) : i32_set1(0);
            sum = i32_add(sum, int_sum[reg]);
        }
        store_qact(int_sum, qact);
    }
    act_scale->int_sum = i32_reduce_add(sum);
    act_scale->sum = act_scale->delta * (float)act_scale->int_sum;
}

INLINE i32v broadcast_quad(const uint8_t *at) {
    int32_t four;
    memcpy(&four, at, sizeof four);
    return i32_set1(four);
}

/* Digits of rows, of all runs, span by span: those of neighbouring rows lie side by side. Groups of 32 are usual, and
   are taken four at a time. */
static void quantize_rows(const GemmArgs *p, long first, long end) {
    const Matrix *m = p->matrix;
    for (const Segment *segment = m->segments; segment < m->segments + m->segment_count; segment++)
        for (int n = 0, some; n < segment->span_count; n += some) {
            const GroupSpan *span = segment->spans + n;
            int k = segment->first_k + span->kblock * LANES, kblocks = span->kblocks;
            ActScale *act_scales = p->act_scales + (long)(segment->first_span + n) * p->rows;
            uint8_t *qact = p->qact + 2l * k * p->rows;
            some = 1;
#if defined(__AVX512VNNI__)
            if (!m->input_of_k && n + 4 <= segment->span_count && are_four_pairs(span)) {
                for (long row = first; row < end; row++)
                    quantize_four_spans(p->x + row * m->inputs + k, qact + row * 2 * QACT_BYTES, 2l * QACT_BYTES * p->rows,
                                   act_scales + row, p->rows);
                some = 4;
                continue;
            }
#endif
            for (long row = first; row < end; row++)
                quantize_span(m->input_of_k, p->x + row * m->inputs, k, kblocks, qact + row * kblocks * QACT_BYTES,
                               act_scales + row);
        }
}

static void quantize_chunk(void *job, int chunk) {
    const GemmArgs *p = job;
    long first = chunk * p->per_chunk, end = first + p->per_chunk < p->rows ? first + p->per_chunk : p->rows;
    for (long row = first; p->norm && row < end; row++) rms_norm_row(p->norm, p->first + (int)row);
    quantize_rows(p, first, end);
}

#endif
