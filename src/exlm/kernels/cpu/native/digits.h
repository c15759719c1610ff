/* Activations as digits: within a span, a row's x is a whole number of up to 16 bits times a power of two, the least
   that lets the largest fit. How its bits lie is the instruction set's business. A row's digits depend on nothing but
   the row. */

#ifndef EXLM_DIGITS_H
#define EXLM_DIGITS_H

#include "bands.h"
#include "small.h"

#if defined(WHOLE_NUMBERS)

enum { DIGITS = 32, MOST_SPAN = 16 }; /* bytes of a slot's digits; slots of a span */

/* What a row's span is worth: the power of two, the sum of the whole numbers, and that of the floats. */
typedef struct {
    float unit, sum;
    int32_t whole;
} Level;

typedef struct {
    const Matrix *matrix;
    const Norm *norm; /* what x comes from, or none: it is then made on the way */
    const float *x, *residual;
    float *y;
    uint8_t *digits; /* of each span: (rows, slots, 32) */
    Level *levels;   /* (spans, rows) */
    int first, rows, bands, each; /* first: which of the norm's rows is the first here */
} Banded;

#if defined(__AVX512VNNI__)
#include "digits_avx512.h"
#elif defined(__AVX2__)
#include "digits_avx2.h"
#else
#include "digits_neon.h"
#endif

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

static void digits_of_span(const int32_t *source, const float *x, int place, int slots, uint8_t *digits,
                           Level *level) {
    Real own[MOST_SPAN * PARTS];
    Whole largest = w_all(0), sum = w_all(0);
    for (int n = 0; n < slots * PARTS; n++) {
        int at = place + n * WIDTH;
        own[n] = source ? r_gather(x, w_words(source + at)) : r_load(x + at);
        largest = w_larger(largest, w_and((Whole)own[n], w_all(0x7fffffff)));
    }
    float inverse;
    level->unit = unit_of((uint32_t)w_most(largest), &inverse);
    for (int s = 0; s < slots; s++, digits += DIGITS) {
        Whole whole[PARTS];
        for (int part = 0; part < PARTS; part++) {
            whole[part] = inverse ? r_whole(r_mul(own[s * PARTS + part], r_all(inverse))) : w_all(0);
            sum = w_add(sum, whole[part]);
        }
        put_digits(whole, digits);
    }
    level->whole = w_total(sum);
    level->sum = level->unit * (float)level->whole;
}

INLINE Whole four_digits(const uint8_t *at) {
    int32_t four;
    memcpy(&four, at, sizeof four);
    return w_all(four);
}

/* Digits of rows, of all runs, span by span: those of neighbouring rows lie side by side. Groups of 32 are usual, and
   are taken four at a time. */
static void digits_of_rows(const Banded *p, long first, long end) {
    const Matrix *m = p->matrix;
    for (const Run *run = m->runs; run < m->runs + m->count; run++)
        for (int n = 0, some; n < run->count; n += some) {
            const Span *span = run->spans + n;
            int place = run->first + span->slot * LANES, slots = span->slots;
            Level *levels = p->levels + (long)(run->span + n) * p->rows;
            uint8_t *digits = p->digits + 2l * place * p->rows;
            some = 1;
#if defined(__AVX512VNNI__)
            if (!m->source && n + 4 <= run->count && four_pairs(span)) {
                for (long row = first; row < end; row++)
                    digits_of_four(p->x + row * m->inputs + place, digits + row * 2 * DIGITS, 2l * DIGITS * p->rows,
                                   levels + row, p->rows);
                some = 4;
                continue;
            }
#endif
            for (long row = first; row < end; row++)
                digits_of_span(m->source, p->x + row * m->inputs, place, slots, digits + row * slots * DIGITS,
                               levels + row);
        }
}

static void digits_chunk(void *job, int chunk) {
    const Banded *p = job;
    long first = chunk * p->each, end = first + p->each < p->rows ? first + p->each : p->rows;
    for (long row = first; p->norm && row < end; row++) norm_row(p->norm, p->first + (int)row);
    digits_of_rows(p, first, end);
}

#endif
#endif
