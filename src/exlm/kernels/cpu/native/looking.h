/* The two loops of attention: scores of keys, and values times their shares. Keys and values are float32 or float16,
   which becomes float32 in registers; `narrow` says which and is always known when this is compiled.

   A score is sixteen sums over the head in order, added up in one order; a value's sums are over the tokens in order.
   How many heads and keys are computed side by side changes nothing. */

#ifndef EXLM_LOOKING_H
#define EXLM_LOOKING_H

#include "lanes.h"
#include "vectors.h"

/* Heads and keys at a time: their sums, sixteen numbers each, fit the registers. */
#if defined(__AVX512F__)
enum { KEYS = 4 };
#elif defined(__AVX2__) || (defined(__aarch64__) && !defined(EXLM_PORTABLE))
enum { KEYS = 2 };
#else
enum { KEYS = 1 };
#endif
enum { HEADS = 3, REALS = 4, LINE = 64 };

INLINE long bytes_of(int64_t numbers, int narrow) { return (long)numbers << (narrow ? 1 : 2); }

INLINE Real recalled(const char *p, int64_t at, int narrow) {
    return narrow ? r_halves((const uint16_t *)p + at) : r_load((const float *)p + at);
}

/* Sixteen floats as float16; those beyond its range become its largest, and what is no number stays none. */
INLINE void put_halves(uint16_t *p, Sixteen x) {
    Sixteen top = (Sixteen){0} + 65504.0f;
    x = where(x > top, top, where(x < -top, -top, x));
    Real parts[PARTS];
    memcpy(parts, &x, sizeof x);
    for (int part = 0; part < PARTS; part++) {
        Real own = r_rounded(parts[part]);
        r_put_halves(p + part * WIDTH, own);
    }
}

/* Scores (heads, count) of up to KEYS keys. */
INLINE void score_heads(const float *q, const char *const *keys, int many, int dim, int heads, int narrow, float scale,
                        float *scores, int64_t count) {
    Real sum[HEADS][KEYS][PARTS];
#define EACH                                                                                                     \
    _Pragma("GCC unroll 3") for (int h = 0; h < heads; h++)                                                      \
        _Pragma("GCC unroll 4") for (int k = 0; k < KEYS; k++)
    EACH
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) sum[h][k][part] = r_all(0);
    for (int d = 0; d < dim; d += WIDE) {
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            int at = d + part * WIDTH;
            Real own[KEYS];
#pragma GCC unroll 4
            for (int k = 0; k < KEYS; k++) own[k] = recalled(keys[k], at, narrow);
            EACH sum[h][k][part] = r_more(sum[h][k][part], own[k], r_load(q + h * dim + at));
        }
    }
#pragma GCC unroll 3
    for (int h = 0; h < heads; h++) {
        float found[4];
        Sixteen whole[KEYS];
        memcpy(whole, sum[h], sizeof whole);
#if defined(__AVX512F__)
        four_totals(whole[0], whole[1], whole[2], whole[3], found);
#else
#pragma GCC unroll 4
        for (int k = 0; k < KEYS; k++) found[k] = total(whole[k]);
#endif
#pragma GCC unroll 4
        for (int k = 0; k < KEYS; k++) found[k] *= scale;
        if (many == KEYS) memcpy(scores + h * count, found, KEYS * sizeof(float));
        else memcpy(scores + h * count, found, many * sizeof(float));
    }
#undef EACH
}

/* Scores (shared, count) of some keys, one after the other every `width` numbers. `soon` is what will be needed later,
   as many tokens, which are asked for into the second cache. */
INLINE void score_keys(const float *q, const char *key, const char *soon, int64_t some, int dim, long width,
                       int shared, int narrow, float scale, float *scores, int64_t count) {
    long step = bytes_of(width, narrow), wide = bytes_of(dim, narrow);
    for (int64_t n = 0; n < some; n += KEYS) {
        int many = some - n < KEYS ? (int)(some - n) : KEYS;
        const char *own[KEYS];
        for (int k = 0; k < KEYS; k++) own[k] = key + (n + (k < many ? k : 0)) * step;
        for (int k = 0; k < KEYS; k++)
            for (long at = 0; at < wide; at += LINE) __builtin_prefetch(soon + (n + k) * step + at, 0, 2);
        for (int h = 0; h < shared; h += HEADS) {
#define SCORE(heads) score_heads(q + h * dim, own, many, dim, heads, narrow, scale, scores + h * count + n, count)
            if (shared - h > 2) SCORE(3);
            else if (shared - h == 2) SCORE(2);
            else SCORE(1);
#undef SCORE
        }
    }
}

/* sums (heads, dim) += shares (heads, count) · some values, `wide` vectors of them. */
INLINE void add_values(const char *value, const char *soon, int64_t some, long width, const float *shares,
                       int64_t count, int heads, int wide, int narrow, int dim, float *sums) {
    Real sum[HEADS][REALS];
    long step = bytes_of(width, narrow), whole = bytes_of(wide * WIDTH, narrow);
#define EACH                                                                                                     \
    _Pragma("GCC unroll 3") for (int h = 0; h < heads; h++)                                                      \
        _Pragma("GCC unroll 4") for (int d = 0; d < wide; d++)
    EACH sum[h][d] = r_load(sums + h * dim + d * WIDTH);
    for (int64_t n = 0; n < some; n++, value += step, soon += step) {
        Real own[REALS];
#pragma GCC unroll 4
        for (int d = 0; d < wide; d++) own[d] = recalled(value, d * WIDTH, narrow);
#pragma GCC unroll 4
        for (long at = 0; at < whole; at += LINE) __builtin_prefetch(soon + at, 0, 2);
        EACH sum[h][d] = r_more(sum[h][d], own[d], r_all(shares[h * count + n]));
    }
    EACH r_store(sums + h * dim + d * WIDTH, sum[h][d]);
#undef EACH
}

/* The same of any number of heads and vectors. */
INLINE void add_all_values(const char *value, const char *soon, int64_t some, long width, const float *shares,
                           int64_t count, int shared, int narrow, int dim, float *sums) {
    for (int h = 0; h < shared; h += HEADS)
        for (int d = 0, wide; d < dim; d += wide * WIDTH) {
            int heads = shared - h < HEADS ? shared - h : HEADS;
            const char *own = value + bytes_of(d, narrow), *next = soon + bytes_of(d, narrow);
            float *at = sums + h * dim + d;
            wide = dim - d < REALS * WIDTH ? 1 : REALS;
#define SOME(heads, wide)                                                                                        \
    add_values(own, next, some, width, shares + (h + one) * count, count, heads, wide, narrow, dim, at + one * dim)
            int one = 0;
            if (wide == REALS && heads == 3) SOME(3, REALS);
            else if (wide == REALS && heads == 2) SOME(2, REALS);
            else if (wide == REALS) SOME(1, REALS);
            else
                for (; one < heads; one++) SOME(1, 1);
#undef SOME
        }
}

#endif
