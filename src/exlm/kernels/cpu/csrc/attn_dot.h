/* The two loops of attention: scores of keys, and values times their shares. Keys and values are float32 or float16,
   which becomes float32 in registers; `narrow` says which and is always known when this is compiled.

   A score is sixteen sums over the head in order, added up in one order; a value's sums are over the tokens in order.
   How many heads and keys are computed side by side changes nothing. */

#ifndef EXLM_LOOKING_H
#define EXLM_LOOKING_H

#include "simd.h"
#include "simd16.h"

/* Heads and keys at a time: their sums, sixteen numbers each, fit the registers. */
#if defined(__AVX512F__)
enum { DOT_KEYS = 4 };
#elif defined(__AVX2__) || (defined(__aarch64__) && !defined(EXLM_PORTABLE))
enum { DOT_KEYS = 2 };
#else
enum { DOT_KEYS = 1 };
#endif
enum { DOT_HEADS = 3, DOT_REGS = 4, CACHE_LINE = 64 };

INLINE long kv_bytes(int64_t numbers, int kv_f16) { return (long)numbers << (kv_f16 ? 1 : 2); }

INLINE f32v load_kv(const char *p, int64_t at, int kv_f16) {
    return kv_f16 ? f32_load_f16((const uint16_t *)p + at) : f32_load((const float *)p + at);
}

/* Sixteen floats as float16; those beyond its range become its largest, and what is no number stays none. */
INLINE void store_f16x16(uint16_t *p, f32x16 x) {
    f32x16 top = (f32x16){0} + 65504.0f;
    x = select16(x > top, top, select16(x < -top, -top, x));
    f32v parts[LANE_REGS];
    memcpy(parts, &x, sizeof x);
    for (int reg = 0; reg < LANE_REGS; reg++) {
        f32v own = f32_round_f16(parts[reg]);
        f32_store_f16(p + reg * VLEN, own);
    }
}

/* Scores (heads, count) of up to KEYS keys. */
INLINE void qk_heads(const float *q, const char *const *keys, int valid, int dim, int heads, int kv_f16, float scale,
                        float *scores, int64_t count) {
    f32v sum[DOT_HEADS][DOT_KEYS][LANE_REGS];
#define EACH                                                                                                     \
    _Pragma("GCC unroll 3") for (int h = 0; h < heads; h++)                                                      \
        _Pragma("GCC unroll 4") for (int k = 0; k < DOT_KEYS; k++)
    EACH
#pragma GCC unroll 4
        for (int reg = 0; reg < LANE_REGS; reg++) sum[h][k][reg] = f32_set1(0);
    for (int d = 0; d < dim; d += LANES) {
#pragma GCC unroll 4
        for (int reg = 0; reg < LANE_REGS; reg++) {
            int at = d + reg * VLEN;
            f32v own[DOT_KEYS];
#pragma GCC unroll 4
            for (int k = 0; k < DOT_KEYS; k++) own[k] = load_kv(keys[k], at, kv_f16);
            EACH sum[h][k][reg] = f32_fma(sum[h][k][reg], own[k], f32_load(q + h * dim + at));
        }
    }
#pragma GCC unroll 3
    for (int h = 0; h < heads; h++) {
        float found[4];
        f32x16 whole[DOT_KEYS];
        memcpy(whole, sum[h], sizeof whole);
#if defined(__AVX512F__)
        sum16_x4(whole[0], whole[1], whole[2], whole[3], found);
#else
#pragma GCC unroll 4
        for (int k = 0; k < DOT_KEYS; k++) found[k] = sum16(whole[k]);
#endif
#pragma GCC unroll 4
        for (int k = 0; k < DOT_KEYS; k++) found[k] *= scale;
        if (valid == DOT_KEYS) memcpy(scores + h * count, found, DOT_KEYS * sizeof(float));
        else memcpy(scores + h * count, found, valid * sizeof(float));
    }
#undef EACH
}

/* Scores (shared, count) of some keys, one after the other every `width` numbers. `soon` is what will be needed later,
   as many tokens, which are asked for into the second cache. */
INLINE void qk_block(const float *q, const char *key, const char *prefetch, int64_t some, int dim, long width,
                       int heads_per_kv, int kv_f16, float scale, float *scores, int64_t count) {
    long step = kv_bytes(width, kv_f16), head_bytes = kv_bytes(dim, kv_f16);
    for (int64_t n = 0; n < some; n += DOT_KEYS) {
        int valid = some - n < DOT_KEYS ? (int)(some - n) : DOT_KEYS;
        const char *own[DOT_KEYS];
        for (int k = 0; k < DOT_KEYS; k++) own[k] = key + (n + (k < valid ? k : 0)) * step;
        for (int k = 0; k < DOT_KEYS; k++)
            for (long at = 0; at < head_bytes; at += CACHE_LINE) __builtin_prefetch(prefetch + (n + k) * step + at, 0, 2);
        for (int h = 0; h < heads_per_kv; h += DOT_HEADS) {
#define SCORE(heads) qk_heads(q + h * dim, own, valid, dim, heads, kv_f16, scale, scores + h * count + n, count)
            if (heads_per_kv - h > 2) SCORE(3);
            else if (heads_per_kv - h == 2) SCORE(2);
            else SCORE(1);
#undef SCORE
        }
    }
}

/* sums (heads, dim) += shares (heads, count) · some values, `wide` vectors of them. */
INLINE void pv_heads(const char *value, const char *prefetch, int64_t some, long width, const float *probs,
                       int64_t count, int heads, int head_bytes, int kv_f16, int dim, float *sums) {
    f32v sum[DOT_HEADS][DOT_REGS];
    long step = kv_bytes(width, kv_f16), whole = kv_bytes(head_bytes * VLEN, kv_f16);
#define EACH                                                                                                     \
    _Pragma("GCC unroll 3") for (int h = 0; h < heads; h++)                                                      \
        _Pragma("GCC unroll 4") for (int d = 0; d < head_bytes; d++)
    EACH sum[h][d] = f32_load(sums + h * dim + d * VLEN);
    for (int64_t n = 0; n < some; n++, value += step, prefetch += step) {
        f32v own[DOT_REGS];
#pragma GCC unroll 4
        for (int d = 0; d < head_bytes; d++) own[d] = load_kv(value, d * VLEN, kv_f16);
#pragma GCC unroll 4
        for (long at = 0; at < whole; at += CACHE_LINE) __builtin_prefetch(prefetch + at, 0, 2);
        EACH sum[h][d] = f32_fma(sum[h][d], own[d], f32_set1(probs[h * count + n]));
    }
    EACH f32_store(sums + h * dim + d * VLEN, sum[h][d]);
#undef EACH
}

/* The same of any number of heads and vectors. */
INLINE void pv_block(const char *value, const char *prefetch, int64_t some, long width, const float *probs,
                           int64_t count, int heads_per_kv, int kv_f16, int dim, float *sums) {
    for (int h = 0; h < heads_per_kv; h += DOT_HEADS)
        for (int d = 0, head_bytes; d < dim; d += head_bytes * VLEN) {
            int heads = heads_per_kv - h < DOT_HEADS ? heads_per_kv - h : DOT_HEADS;
            const char *own = value + kv_bytes(d, kv_f16), *next = prefetch + kv_bytes(d, kv_f16);
            float *at = sums + h * dim + d;
            head_bytes = dim - d < DOT_REGS * VLEN ? 1 : DOT_REGS;
#define SOME(heads, head_bytes)                                                                                        \
    pv_heads(own, next, some, width, probs + (h + one) * count, count, heads, head_bytes, kv_f16, dim, at + one * dim)
            int one = 0;
            if (head_bytes == DOT_REGS && heads == 3) SOME(3, DOT_REGS);
            else if (head_bytes == DOT_REGS && heads == 2) SOME(2, DOT_REGS);
            else if (head_bytes == DOT_REGS) SOME(1, DOT_REGS);
            else
                for (; one < heads; one++) SOME(1, 1);
#undef SOME
        }
}

#endif
