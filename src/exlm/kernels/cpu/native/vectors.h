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

/* What one register holds. The compiler cuts sums and products of longer vectors well, comparisons of them number by
   number. */
#if defined(__AVX512F__)
enum { NATIVE = 64 };
#elif defined(__AVX2__)
enum { NATIVE = 32 };
#else
enum { NATIVE = 16 };
#endif
typedef float Native __attribute__((vector_size(NATIVE)));
typedef int32_t Native_whole __attribute__((vector_size(NATIVE)));
#define EACH_NATIVE _Pragma("GCC unroll 4") for (int n = 0; n < 64 / NATIVE; n++)

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

static inline Native native_where(Native_whole condition, Native a, Native b) {
    return (Native)((condition & (Native_whole)a) | (~condition & (Native_whole)b));
}

/* The larger of each two; the second where one is not a number. */
static inline Sixteen larger(Sixteen a, Sixteen b) {
    Native one[64 / NATIVE], other[64 / NATIVE];
    memcpy(one, &a, sizeof a), memcpy(other, &b, sizeof b);
    EACH_NATIVE other[n] = native_where(one[n] > other[n], one[n], other[n]);
    memcpy(&b, other, sizeof b);
    return b;
}

/* e to the power of each, to 2e-7: 2^n times a polynomial on ±ln 2 / 2. Below -87 it is 0, above 88 infinite. */
static inline Native native_power(Native x) {
    Native top = {0}, low = top - 87.0f;
    Native_whole small = x < low, big = x > top + 88.0f, odd = x != x;
    Native held = native_where(small, low, native_where(big, top + 88.0f, native_where(odd, top, x)));
    Native moved = held * 1.44269504f + 12582912.0f; /* 1.5 · 2^23: the lowest bits are the rounded number */
    Native_whole n = (Native_whole)moved - 0x4b400000;
    Native turns = moved - 12582912.0f;
    Native r = held - turns * 0.693359375f;
    r = r + turns * 2.12194440e-4f;
    Native p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Native out = (Native)((Native_whole)p + (n << 23));
    return native_where(odd, x, native_where(small, top, native_where(big, top + __builtin_inff(), out)));
}

static inline Sixteen power(Sixteen x) {
    Native own[64 / NATIVE];
    memcpy(own, &x, sizeof x);
    EACH_NATIVE own[n] = native_power(own[n]);
    memcpy(&x, own, sizeof x);
    return x;
}

#endif
