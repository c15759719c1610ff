/* Activations as digits: within a span, a row's x is a whole number of up to 16 bits times a power of two, the least
   that lets the largest fit. 256 · high + low, two signed bytes. A row's digits depend on nothing but the row. */

#ifndef EXLM_DIGITS_H
#define EXLM_DIGITS_H

#include "bands.h"
#include "small.h"

#if defined(__AVX512VNNI__)

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
    uint8_t *digits; /* of each span: (rows, slots, 16 high and 16 low) */
    Level *levels;   /* (spans, rows) */
    int first, rows, bands, each; /* first: which of the norm's rows is the first here */
} Banded;

INLINE Real placed(const int32_t *source, const float *x, int place) {
    if (!source) return r_load(x + place);
    Whole from = w_words(source + place);
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

static void digits_of_span(const int32_t *source, const float *x, int place, int slots, uint8_t *digits,
                           Level *level) {
    Real own[MOST_SPAN];
    Whole largest = w_all(0), sum = w_all(0);
    for (int s = 0; s < slots; s++) {
        own[s] = placed(source, x, place + s * LANES);
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

#define QUARTERS(a, b, which) _mm512_shuffle_i32x4(a, b, which)

/* The larger ones, or the sums, of four spans' sixteen each: a quarter holds one span's, four times. */
INLINE Whole join(Whole a, Whole b, int adds) { return adds ? _mm512_add_epi32(a, b) : _mm512_max_epu32(a, b); }

INLINE Whole joined(const Whole *v, int adds) {
    Whole ab = join(QUARTERS(v[0], v[1], 0x44), QUARTERS(v[0], v[1], 0xee), adds);
    Whole cd = join(QUARTERS(v[2], v[3], 0x44), QUARTERS(v[2], v[3], 0xee), adds);
    Whole all = join(QUARTERS(ab, cd, 0x88), QUARTERS(ab, cd, 0xdd), adds);
    all = join(all, _mm512_shuffle_epi32(all, 0x4e), adds);
    return join(all, _mm512_shuffle_epi32(all, 0xb1), adds);
}

/* unit_of, of sixteen. */
INLINE Whole units_of(Whole largest, Whole *inverse) {
    Whole exponent = _mm512_sub_epi32(w_right((Whole)r_mul((Real)largest, r_all(1.00398f)), 23), w_all(14));
    __mmask16 finite = _mm512_cmplt_epu32_mask(largest, w_all(0x7f800000));
    __mmask16 some = finite & _mm512_cmpge_epu32_mask(largest, w_all(27 << 23));
    *inverse = _mm512_maskz_slli_epi32(some, _mm512_sub_epi32(w_all(254), exponent), 23);
    return _mm512_mask_mov_epi32(_mm512_maskz_slli_epi32(some, exponent, 23), ~finite, w_all(0x7fc00000));
}

/* digits_of_span, of four neighbours of two slots each. `step`: from one's digits to the next's; `rows`: from one's
   level to the next's. */
static void digits_of_four(const float *x, uint8_t *digits, long step, Level *level, int rows) {
    const Whole order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
    Whole largest[4], sums[4], inverse, unit, whole;
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        Whole a = (Whole)r_load(x + n * 32), b = (Whole)r_load(x + n * 32 + LANES), size = w_all(0x7fffffff);
        largest[n] = _mm512_max_epu32(w_and(a, size), w_and(b, size));
    }
    unit = units_of(joined(largest, 0), &inverse);
    Whole factors[4] = {QUARTERS(inverse, inverse, 0x00), QUARTERS(inverse, inverse, 0x55),
                        QUARTERS(inverse, inverse, 0xaa), QUARTERS(inverse, inverse, 0xff)};
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++, digits += step) {
        __mmask16 some = _mm512_test_epi32_mask(factors[n], factors[n]);
        Whole a = _mm512_maskz_cvtps_epi32(some, r_mul(r_load(x + n * 32), (Real)factors[n]));
        Whole b = _mm512_maskz_cvtps_epi32(some, r_mul(r_load(x + n * 32 + LANES), (Real)factors[n]));
        Whole both = _mm512_packs_epi32(a, b), low = w_and(both, _mm512_set1_epi16(255));
        Whole high = _mm512_srli_epi16(_mm512_add_epi16(both, _mm512_set1_epi16(128)), 8);
        _mm512_storeu_si512(digits, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(high, low)));
        sums[n] = _mm512_add_epi32(a, b);
    }
    whole = joined(sums, 1);
    float units[LANES], totals[LANES];
    int32_t wholes[LANES];
    _mm512_storeu_si512(units, unit);
    _mm512_storeu_si512(wholes, whole);
    r_store(totals, r_mul((Real)unit, r_from(whole)));
    for (int n = 0; n < LANES; n += 4, level += rows) *level = (Level){units[n], totals[n], wholes[n]};
}

/* Whether four spans from here on are neighbours of two slots each. */
static int four_pairs(const Span *span) {
    int found = 1;
    for (int n = 0; n < 4; n++) found &= span[n].slots == 2 && span[n].slot == span->slot + 2 * n;
    return found;
}

/* A row's digits, of all runs. Groups of 32 are usual, and are taken four at a time. */
static void digits_of_row(const Banded *p, long row) {
    const Matrix *m = p->matrix;
    const float *x = p->x + row * m->inputs;
    for (const Run *run = m->runs; run < m->runs + m->count; run++) {
        Level *level = p->levels + (long)run->span * p->rows + row;
        for (int n = 0, some; n < run->count; n += some, level += some * p->rows) {
            const Span *span = run->spans + n;
            int place = run->first + span->slot * LANES, slots = span->slots;
            uint8_t *digits = p->digits + 2l * place * p->rows + row * slots * DIGITS;
            some = !m->source && n + 4 <= run->count && four_pairs(span) ? 4 : 1;
            if (some == 4) digits_of_four(x + place, digits, 2l * DIGITS * p->rows, level, p->rows);
            else digits_of_span(m->source, x, place, slots, digits, level);
        }
    }
}

#undef QUARTERS

static void digits_chunk(void *job, int chunk) {
    const Banded *p = job;
    for (long row = chunk * p->each; row < (long)(chunk + 1) * p->each && row < p->rows; row++) {
        if (p->norm) norm_row(p->norm, p->first + (int)row);
        digits_of_row(p, row);
    }
}

#endif
#endif
