/* Activations as digits: within a span, a row's x is a whole number of up to 16 bits times a power of two, the least
   that lets the largest fit. 256 · high + low, two signed bytes. A row's digits depend on nothing but the row. */

#ifndef EXLM_DIGITS_H
#define EXLM_DIGITS_H

#include "bands.h"

#if defined(__AVX512VNNI__)

enum { DIGITS = 32, MOST_SPAN = 16 }; /* bytes of a slot's digits; slots of a span */

/* What a row's span is worth: the power of two, the sum of the whole numbers, and that of the floats. */
typedef struct {
    float unit, sum;
    int32_t whole;
} Level;

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *y;
    uint8_t *digits; /* of each span: (rows, slots, 16 high and 16 low) */
    Level *levels;   /* (spans, rows) */
    int rows, bands, each;
} Banded;

INLINE Real placed(const Matrix *m, const float *x, int place) {
    if (!m->source) return r_load(x + place);
    Whole from = w_words(m->source + place);
    return _mm512_mask_i32gather_ps(r_all(0), _mm512_cmpge_epi32_mask(from, w_all(0)), from, x, 4);
}

/* The exponent's bits of the largest number decide: above 32639 a high digit would not fit. What is not finite makes
   the whole row so; what is tiny is nothing. */
INLINE float unit_of(uint32_t largest, float *inverse) {
    float size, unit;
    *inverse = 0;
    if (largest >= 0x7f800000) return __builtin_nanf("");
    if (largest < 27u << 23) return 0;
    memcpy(&size, &largest, sizeof size);
    size *= 1.00398f;
    memcpy(&largest, &size, sizeof size);
    uint32_t exponent = (largest >> 23) + 1 - 15, one = exponent << 23, other = (254 - exponent) << 23;
    memcpy(&unit, &one, sizeof unit);
    memcpy(inverse, &other, sizeof other);
    return unit;
}

static void digits_of_span(const Matrix *m, const float *x, int place, int slots, uint8_t *digits, Level *level) {
    Real own[MOST_SPAN];
    Whole largest = w_all(0), sum = w_all(0);
    for (int s = 0; s < slots; s++) {
        own[s] = placed(m, x, place + s * LANES);
        largest = _mm512_max_epu32(largest, w_and((Whole)own[s], w_all(0x7fffffff)));
    }
    float inverse;
    level->unit = unit_of(_mm512_reduce_max_epu32(largest), &inverse);
    for (int s = 0; s < slots; s++, digits += DIGITS) {
        Whole whole = inverse ? _mm512_cvtps_epi32(r_mul(own[s], r_all(inverse))) : w_all(0);
        Whole high = _mm512_srai_epi32(_mm512_add_epi32(whole, w_all(128)), 8);
        _mm_storeu_si128((__m128i *)digits, _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i *)(digits + LANES), _mm512_cvtepi32_epi8(whole));
        sum = _mm512_add_epi32(sum, whole);
    }
    level->whole = _mm512_reduce_add_epi32(sum);
    level->sum = level->unit * (float)level->whole;
}

INLINE Whole four_digits(const uint8_t *at) {
    int32_t four;
    memcpy(&four, at, sizeof four);
    return w_all(four);
}

static void digits_chunk(void *job, int chunk) {
    const Banded *p = job;
    const Matrix *m = p->matrix;
    for (long row = chunk * p->each; row < (long)(chunk + 1) * p->each && row < p->rows; row++)
        for (const Run *run = m->runs; run < m->runs + m->count; run++)
            for (int n = 0; n < run->count; n++) {
                int place = run->first + run->spans[n].slot * LANES;
                int slots = run->spans[n].slots;
                digits_of_span(m, p->x + row * m->inputs, place, slots,
                               p->digits + 2l * place * p->rows + row * slots * DIGITS,
                               p->levels + (long)(run->span + n) * p->rows + row);
            }
}

#endif
#endif
