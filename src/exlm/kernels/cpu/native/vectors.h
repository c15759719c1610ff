/* Sixteen floats at a time, in any instruction set: sums have the same order everywhere. */

#ifndef EXLM_VECTORS_H
#define EXLM_VECTORS_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(EXLM_PORTABLE)
#include <arm_neon.h>
#endif

enum { WIDE = 16 };

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors stay within this library */

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t Sixteen_whole __attribute__((vector_size(64)));

static inline Sixteen get(const float *p) {
    Sixteen out;
    memcpy(&out, p, sizeof out);
    return out;
}

/* What is left behind the last whole sixteen, then zeros. */
static inline Sixteen get_some(const float *p, int count) {
    Sixteen out = {0};
    memcpy(&out, p, count * sizeof(float));
    return out;
}

static inline void put(float *p, Sixteen a) { memcpy(p, &a, sizeof a); }

static inline float total(Sixteen a) {
    Eight halves[2];
    Four quarters[2];
    memcpy(halves, &a, sizeof a);
    Eight half = halves[0] + halves[1];
    memcpy(quarters, &half, sizeof half);
    Four last = quarters[0] + quarters[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

/* The totals of four, which cost little more than one's. */
static inline void four_totals(Sixteen a, Sixteen b, Sixteen c, Sixteen d, float *out) {
#if defined(__AVX512F__)
#define HALVES_OF(a, b, which) _mm512_shuffle_f32x4((__m512)(a), (__m512)(b), which)
    __m512 ab = _mm512_add_ps(HALVES_OF(a, b, 0x44), HALVES_OF(a, b, 0xee));
    __m512 cd = _mm512_add_ps(HALVES_OF(c, d, 0x44), HALVES_OF(c, d, 0xee));
    __m512 all = _mm512_add_ps(HALVES_OF(ab, cd, 0x88), HALVES_OF(ab, cd, 0xdd));
#undef HALVES_OF
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    __m512i every_fourth = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(every_fourth, all)));
#else
    out[0] = total(a), out[1] = total(b), out[2] = total(c), out[3] = total(d);
#endif
}

/* a + b · c, rounded once where the processor can. */
static inline Sixteen more(Sixteen a, Sixteen b, Sixteen c) {
#if defined(__AVX512F__)
    return (Sixteen)_mm512_fmadd_ps((__m512)b, (__m512)c, (__m512)a);
#elif defined(__AVX2__)
    __m256 own[3][2];
    Sixteen out;
    memcpy(own[0], &a, sizeof a), memcpy(own[1], &b, sizeof b), memcpy(own[2], &c, sizeof c);
    own[0][0] = _mm256_fmadd_ps(own[1][0], own[2][0], own[0][0]);
    own[0][1] = _mm256_fmadd_ps(own[1][1], own[2][1], own[0][1]);
    memcpy(&out, own[0], sizeof out);
    return out;
#elif defined(__aarch64__) && !defined(EXLM_PORTABLE)
    float32x4_t own[3][4];
    Sixteen out;
    memcpy(own[0], &a, sizeof a), memcpy(own[1], &b, sizeof b), memcpy(own[2], &c, sizeof c);
    for (int n = 0; n < 4; n++) own[0][n] = vfmaq_f32(own[0][n], own[1][n], own[2][n]);
    memcpy(&out, own[0], sizeof out);
    return out;
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    for (int n = 0; n < WIDE; n++) a[n] = __builtin_fmaf(b[n], c[n], a[n]);
    return a;
#else
    return a + b * c;
#endif
}

static inline Sixteen where(Sixteen_whole condition, Sixteen a, Sixteen b) {
    return (Sixteen)((condition & (Sixteen_whole)a) | (~condition & (Sixteen_whole)b));
}

/* e to the power of each, to 2e-7: 2^n times a polynomial on ±ln 2 / 2. Below -87 it is 0, above 88 infinite. */
static inline Sixteen power(Sixteen x) {
    Sixteen top = {0}, low = top - 87.0f;
    Sixteen_whole small = x < low, big = x > top + 88.0f, odd = x != x;
    Sixteen held = where(small, low, where(big, top + 88.0f, where(odd, top, x)));
    Sixteen moved = held * 1.44269504f + 12582912.0f; /* 1.5 · 2^23: the lowest bits are the rounded number */
    Sixteen_whole n = (Sixteen_whole)moved - 0x4b400000;
    Sixteen turns = moved - 12582912.0f;
    Sixteen r = held - turns * 0.693359375f;
    r = r + turns * 2.12194440e-4f;
    Sixteen p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Sixteen out = (Sixteen)((Sixteen_whole)p + (n << 23));
    return where(odd, x, where(small, top, where(big, top + __builtin_inff(), out)));
}

#endif
