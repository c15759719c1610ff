/* Activations as integers of two bytes or one: within a span, x[k] = delta * q[k]. A row's integers depend on that row
   alone. A matrix says which it takes (Matrix.act_bytes), for any number of rows.

   Two-byte activations: |q| <= 32640, and delta is the smallest power of two that allows it. vpdpbusd and sdot multiply
   bytes, so q = 256 * high + low with two signed bytes, and

     sum code * q = 256 * (sum code * high) + (sum code * low)

   Both sums are int32 and added once for each span, of at most 256 products (MAX_SPAN kblocks). With codes up to 255
   the total is at most 256 * 255 * 32640 < 2^31: it cannot overflow.

   One-byte activations: |q| <= 127 and delta = max |x| / 127, of spans of up to 32 k. Byte dot products take half as
   many instructions; 16-bit multiply-add takes the same integers and as many instructions as before.

   The qact of a span: its kblocks one after the other, each qact_bytes() long, in the order in which the microkernel
   multiplies them.

                         byte 0                            byte 16                           byte 32
     byte dot products   [ high(k0) high(k1) ... high(k15) | low(k0) low(k1) ... low(k15)   ]
       one byte          [ k0 k1 ... k15                   ]
     16-bit multiply-add [ k0 k2 k1 k3 | k4 k6 k5 k7       | k8 k10 k9 k11 | k12 k14 k13 k15 ]
                           q as int16; even k first, because the even bytes of a quad of codes become 16-bit lanes first

   A matrix's qact: span by span, in each the rows. */

#ifndef EXLM_QUANTIZE_ACT_H
#define EXLM_QUANTIZE_ACT_H

#include "norm_act.h"
#include "w_panels.h"

/* Bytes of a kblock of quantised activations. */
#if defined(__AVX512VNNI__) || (defined(__ARM_FEATURE_DOTPROD) && !defined(EXLM_PORTABLE))
#define HAS_BYTE_DOT /* products of one byte take fewer instructions than those of two */
INLINE int qact_bytes(int act_bytes) { return act_bytes * KBLOCK; }
#else
INLINE int qact_bytes(int act_bytes) {
    (void)act_bytes;
    return 2 * KBLOCK;
}
#endif

/* A span of one row. */
typedef struct {
    float delta, sum; /* sum: delta * int_sum, what minima are multiplied with */
    int32_t int_sum;  /* of q: what zero points are multiplied with */
} ActScale;

/* A block of rows times one matrix. */
typedef struct {
    const Matrix *matrix;
    const RmsNorm *norm;   /* computes the rows of x just before they are quantised; or NULL */
    const float *x;        /* (rows, inputs) */
    const float *residual; /* (rows, outputs) is added to y; or NULL */
    float *y;              /* (rows, outputs) */
    uint8_t *qact;         /* of each span (rows, kblocks, qact_bytes) */
    ActScale *act_scales;  /* (spans, rows) */
    int first_row, rows;   /* first_row: number of the block's first row; the norm counts all rows */
    int panels, per_chunk; /* panels of the matrix; rows of a chunk */
} GemmArgs;

#if defined(__AVX512VNNI__)

INLINE void store_qact(const i32v *q, int act_bytes, uint8_t *to) {
    if (act_bytes == 2) {
        i32v high = _mm512_srai_epi32(_mm512_add_epi32(*q, i32_set1(128)), 8);
        _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(high));
        to += KBLOCK;
    }
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(*q));
}

#elif defined(__ARM_FEATURE_DOTPROD) && !defined(EXLM_PORTABLE)

INLINE int8x16_t lowest_bytes(const int32x4_t *ints) {
    int16x8_t a = vcombine_s16(vmovn_s32(ints[0]), vmovn_s32(ints[1]));
    int16x8_t b = vcombine_s16(vmovn_s32(ints[2]), vmovn_s32(ints[3]));
    return vcombine_s8(vmovn_s16(a), vmovn_s16(b));
}

INLINE void store_qact(const i32v *q, int act_bytes, uint8_t *to) {
    int32x4_t low[LANE_REGS], high[LANE_REGS];
    EACH_LANE_REG(reg) {
        low[reg] = vreinterpretq_s32_u32(q[reg]);
        high[reg] = vshrq_n_s32(vaddq_s32(low[reg], vdupq_n_s32(128)), 8);
    }
    if (act_bytes == 2) {
        vst1q_s8((int8_t *)to, lowest_bytes(high));
        to += KBLOCK;
    }
    vst1q_s8((int8_t *)to, lowest_bytes(low));
}

#elif defined(__AVX2__)

INLINE void store_qact(const i32v *q, int act_bytes, uint8_t *to) {
    (void)act_bytes;
    i32v first = _mm256_shuffle_epi32(q[0], 0xd8), second = _mm256_shuffle_epi32(q[1], 0xd8);
    i32v packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    _mm256_storeu_si256((i32v *)to, packed);
}

#else

INLINE void store_qact(const i32v *q, int act_bytes, uint8_t *to) {
    (void)act_bytes;
    for (int reg = 0; reg < LANE_REGS; reg++) { /* registers of four lanes: a quad each */
        int16_t quad[] = {(int16_t)q[reg][0], (int16_t)q[reg][2], (int16_t)q[reg][1], (int16_t)q[reg][3]};
        memcpy(to + reg * sizeof quad, quad, sizeof quad);
    }
}

#endif

/* delta and 1 / delta for the largest |x| of a span, given by its bits. Above 32639 the high byte would overflow, hence
   1.00398 = 32768 / 32639 + rounding. A span that is not finite makes the row NaN; one below 2^-100 counts as zero. */
INLINE float power_of_two_scale(uint32_t largest, float *inverse) {
    float size, delta;
    *inverse = 0;
    if (largest >= 0x7f800000) return __builtin_nanf("");
    if (largest < 27u << 23) return 0;
    memcpy(&size, &largest, sizeof size);
    size *= 1.00398f;
    memcpy(&largest, &size, sizeof size);
    uint32_t exponent = (largest >> 23) + 1 - 15, bits = exponent << 23, inverse_bits = (254 - exponent) << 23;
    memcpy(&delta, &bits, sizeof delta);
    memcpy(inverse, &inverse_bits, sizeof inverse_bits);
    return delta;
}

/* The same for one-byte activations: |x| / delta is at most 127. */
INLINE float byte_scale(uint32_t largest, float *inverse) {
    float size;
    *inverse = 0;
    if (largest >= 0x7f800000) return __builtin_nanf("");
    if (largest < 27u << 23) return 0;
    memcpy(&size, &largest, sizeof size);
    *inverse = 127 / size;
    return size / 127;
}

INLINE void quantize_span(const int32_t *input_of_k, const float *x, int k, int kblocks, int act_bytes, uint8_t *qact,
                          ActScale *act_scale) {
    f32v values[MAX_SPAN * LANE_REGS];
    i32v largest = i32_set1(0), sum = i32_set1(0);
    for (int n = 0; n < kblocks * LANE_REGS; n++) {
        int at = k + n * VLEN;
        values[n] = input_of_k ? f32_gather(x, i32_load(input_of_k + at)) : f32_load(x + at);
        largest = u32_max(largest, i32_and((i32v)values[n], i32_set1(0x7fffffff)));
    }
    float inverse;
    uint32_t size = (uint32_t)u32_reduce_max(largest);
    act_scale->delta = act_bytes == 1 ? byte_scale(size, &inverse) : power_of_two_scale(size, &inverse);
    for (int kblock = 0; kblock < kblocks; kblock++, qact += qact_bytes(act_bytes)) {
        i32v q[LANE_REGS];
        for (int reg = 0; reg < LANE_REGS; reg++) {
            f32v scaled = f32_mul(values[kblock * LANE_REGS + reg], f32_set1(inverse));
            q[reg] = inverse ? i32_from_f32(scaled) : i32_set1(0);
            sum = i32_add(sum, q[reg]);
        }
        store_qact(q, act_bytes, qact);
    }
    act_scale->int_sum = i32_reduce_add(sum);
    act_scale->sum = act_scale->delta * (float)act_scale->int_sum;
}

#if defined(__AVX512VNNI__)

#define QUARTERS(a, b, which) _mm512_shuffle_i32x4(a, b, which)

INLINE i32v reduce_step(i32v a, i32v b, int add) { return add ? _mm512_add_epi32(a, b) : _mm512_max_epu32(a, b); }

/* The maxima or sums of four vectors: quarter n of the result holds that of vector n, four times. */
INLINE i32v reduce4(const i32v *v, int add) {
    i32v ab = reduce_step(QUARTERS(v[0], v[1], 0x44), QUARTERS(v[0], v[1], 0xee), add);
    i32v cd = reduce_step(QUARTERS(v[2], v[3], 0x44), QUARTERS(v[2], v[3], 0xee), add);
    i32v all = reduce_step(QUARTERS(ab, cd, 0x88), QUARTERS(ab, cd, 0xdd), add);
    all = reduce_step(all, _mm512_shuffle_epi32(all, 0x4e), add);
    return reduce_step(all, _mm512_shuffle_epi32(all, 0xb1), add);
}

/* power_of_two_scale in sixteen lanes. */
INLINE i32v power_of_two_scales(i32v largest, i32v *inverse) {
    i32v exponent = _mm512_sub_epi32(i32_shr((i32v)f32_mul((f32v)largest, f32_set1(1.00398f)), 23), i32_set1(14));
    __mmask16 finite = _mm512_cmplt_epu32_mask(largest, i32_set1(0x7f800000));
    __mmask16 nonzero = finite & _mm512_cmpge_epu32_mask(largest, i32_set1(27 << 23));
    *inverse = _mm512_maskz_slli_epi32(nonzero, _mm512_sub_epi32(i32_set1(254), exponent), 23);
    return _mm512_mask_mov_epi32(_mm512_maskz_slli_epi32(nonzero, exponent, 23), ~finite, i32_set1(0x7fc00000));
}

/* byte_scale in sixteen lanes. */
INLINE i32v byte_scales(i32v largest, i32v *inverse) {
    __mmask16 finite = _mm512_cmplt_epu32_mask(largest, i32_set1(0x7f800000));
    __mmask16 nonzero = finite & _mm512_cmpge_epu32_mask(largest, i32_set1(27 << 23));
    *inverse = (i32v)_mm512_maskz_div_ps(nonzero, f32_set1(127), (f32v)largest);
    i32v delta = (i32v)_mm512_maskz_div_ps(nonzero, (f32v)largest, f32_set1(127));
    return _mm512_mask_mov_epi32(delta, ~finite, i32_set1(0x7fc00000));
}

/* quantize_span of four neighbouring spans of two kblocks (groups of 32, the usual size). `step` is from the qact of
   one to the next, `rows` from one ActScale to the next. */
INLINE void quantize_four_spans(const float *x, int act_bytes, uint8_t *qact, long step, ActScale *act_scale,
                                int rows) {
    const i32v order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
    const i32v byte_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    i32v largest[4], sums[4], inverse, delta, ints;
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        i32v a = (i32v)f32_load(x + n * 32), b = (i32v)f32_load(x + n * 32 + KBLOCK), size = i32_set1(0x7fffffff);
        largest[n] = _mm512_max_epu32(i32_and(a, size), i32_and(b, size));
    }
    largest[0] = reduce4(largest, 0);
    delta = act_bytes == 1 ? byte_scales(largest[0], &inverse) : power_of_two_scales(largest[0], &inverse);
    i32v factors[4] = {QUARTERS(inverse, inverse, 0x00), QUARTERS(inverse, inverse, 0x55),
                       QUARTERS(inverse, inverse, 0xaa), QUARTERS(inverse, inverse, 0xff)};
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++, qact += step) {
        __mmask16 nonzero = _mm512_test_epi32_mask(factors[n], factors[n]);
        i32v a = _mm512_maskz_cvtps_epi32(nonzero, f32_mul(f32_load(x + n * 32), (f32v)factors[n]));
        i32v b = _mm512_maskz_cvtps_epi32(nonzero, f32_mul(f32_load(x + n * 32 + KBLOCK), (f32v)factors[n]));
        i32v both = _mm512_packs_epi32(a, b), low = i32_and(both, _mm512_set1_epi16(255));
        if (act_bytes == 1) {
            i32v packed = _mm512_permutexvar_epi32(byte_order, _mm512_packus_epi16(low, low));
            _mm256_storeu_si256((__m256i *)qact, _mm512_castsi512_si256(packed));
        } else {
            i32v high = _mm512_srli_epi16(_mm512_add_epi16(both, _mm512_set1_epi16(128)), 8);
            _mm512_storeu_si512(qact, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(high, low)));
        }
        sums[n] = _mm512_add_epi32(a, b);
    }
    ints = reduce4(sums, 1);
    float deltas[LANES], float_sums[LANES];
    int32_t int_sums[LANES];
    _mm512_storeu_si512(deltas, delta);
    _mm512_storeu_si512(int_sums, ints);
    f32_store(float_sums, f32_mul((f32v)delta, f32_from_i32(ints)));
    for (int n = 0; n < LANES; n += 4, act_scale += rows)
        *act_scale = (ActScale){deltas[n], float_sums[n], int_sums[n]};
}

#undef QUARTERS

static int are_four_pairs(const GroupSpan *span) {
    int found = 1;
    for (int n = 0; n < 4; n++) found &= span[n].kblocks == 2 && span[n].kblock == span->kblock + 2 * n;
    return found;
}

#endif

/* Rows `first` to before `end`, segment by segment and span by span; act_bytes is known when this is compiled. */
INLINE void quantize_rows(const GemmArgs *p, int act_bytes, long first, long end) {
    const Matrix *m = p->matrix;
    long size = qact_bytes(act_bytes);
    for (const Segment *segment = m->segments; segment < m->segments + m->segment_count; segment++)
        for (int n = 0, done; n < segment->span_count; n += done) {
            const GroupSpan *span = segment->spans + n;
            int k = segment->first_k + span->kblock * KBLOCK, kblocks = span->kblocks;
            ActScale *act_scales = p->act_scales + (long)(segment->first_span + n) * p->rows;
            uint8_t *qact = p->qact + size / KBLOCK * k * p->rows;
            done = 1;
#if defined(__AVX512VNNI__)
            if (!m->input_of_k && n + 4 <= segment->span_count && are_four_pairs(span)) {
                for (long row = first; row < end; row++)
                    quantize_four_spans(p->x + row * m->inputs + k, act_bytes, qact + row * 2 * size,
                                        2 * size * p->rows, act_scales + row, p->rows);
                done = 4;
                continue;
            }
#endif
            for (long row = first; row < end; row++)
                quantize_span(m->input_of_k, p->x + row * m->inputs, k, kblocks, act_bytes,
                              qact + row * kblocks * size, act_scales + row);
        }
}

static void quantize_chunk(void *job, int chunk) {
    const GemmArgs *p = job;
    long first = chunk * p->per_chunk, end = first + p->per_chunk < p->rows ? first + p->per_chunk : p->rows;
    for (long row = first; p->norm && row < end; row++) rms_norm_row(p->norm, p->first_row + (int)row);
    if (p->matrix->act_bytes == 1)
        quantize_rows(p, 1, first, end);
    else
        quantize_rows(p, 2, first, end);
}

/* Four bytes of activations in every lane of a register. */
INLINE i32v broadcast_quad(const uint8_t *at) {
    int32_t quad;
    memcpy(&quad, at, sizeof quad);
    return i32_set1(quad);
}

#endif
