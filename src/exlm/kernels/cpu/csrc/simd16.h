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

#include "packed.h"

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors stay within this library */

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));

/* What one register holds. The compiler cuts sums and products of longer vectors well, comparisons of them number by
   number. */
#if defined(__AVX512F__)
enum { NATIVE_BYTES = 64 };
#elif defined(__AVX2__)
enum { NATIVE_BYTES = 32 };
#else
enum { NATIVE_BYTES = 16 };
#endif
typedef float f32n __attribute__((vector_size(NATIVE_BYTES)));
typedef int32_t i32n __attribute__((vector_size(NATIVE_BYTES)));
#define EACH_NATIVE_REG _Pragma("GCC unroll 4") for (int n = 0; n < 64 / NATIVE_BYTES; n++)

static inline f32x16 load16(const float *p) {
    f32x16 out;
    memcpy(&out, p, sizeof out);
    return out;
}

/* What is left behind the last whole sixteen, then zeros. */
static inline f32x16 load16_tail(const float *p, int count) {
    f32x16 out = {0};
    memcpy(&out, p, count * sizeof(float));
    return out;
}

static inline void store16(float *p, f32x16 a) { memcpy(p, &a, sizeof a); }

static inline float sum16(f32x16 a) {
    f32x8 halves[2];
    f32x4 quarters[2];
    memcpy(halves, &a, sizeof a);
    f32x8 half = halves[0] + halves[1];
    memcpy(quarters, &half, sizeof half);
    f32x4 last = quarters[0] + quarters[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

/* The totals of four, which cost little more than one's. */
static inline void sum16_x4(f32x16 a, f32x16 b, f32x16 c, f32x16 d, float *out) {
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
    out[0] = sum16(a), out[1] = sum16(b), out[2] = sum16(c), out[3] = sum16(d);
#endif
}

/* a + b · c, rounded once where the processor can. */
static inline f32x16 more(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)b, (__m512)c, (__m512)a);
#elif defined(__AVX2__)
    __m256 own[3][2];
    f32x16 out;
    memcpy(own[0], &a, sizeof a), memcpy(own[1], &b, sizeof b), memcpy(own[2], &c, sizeof c);
    own[0][0] = _mm256_fmadd_ps(own[1][0], own[2][0], own[0][0]);
    own[0][1] = _mm256_fmadd_ps(own[1][1], own[2][1], own[0][1]);
    memcpy(&out, own[0], sizeof out);
    return out;
#elif defined(__aarch64__) && !defined(EXLM_PORTABLE)
    float32x4_t own[3][4];
    f32x16 out;
    memcpy(own[0], &a, sizeof a), memcpy(own[1], &b, sizeof b), memcpy(own[2], &c, sizeof c);
    for (int n = 0; n < 4; n++) own[0][n] = vfmaq_f32(own[0][n], own[1][n], own[2][n]);
    memcpy(&out, own[0], sizeof out);
    return out;
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    for (int n = 0; n < LANES; n++) a[n] = __builtin_fmaf(b[n], c[n], a[n]);
    return a;
#else
    return a + b * c;
#endif
}

static inline f32x16 select16(i32x16 condition, f32x16 a, f32x16 b) {
    return (f32x16)((condition & (i32x16)a) | (~condition & (i32x16)b));
}

static inline f32n select_native(i32n condition, f32n a, f32n b) {
    return (f32n)((condition & (i32n)a) | (~condition & (i32n)b));
}

/* The larger of each two; the second where one is not a number. */
static inline f32x16 max16(f32x16 a, f32x16 b) {
    f32n one[64 / NATIVE_BYTES], other[64 / NATIVE_BYTES];
    memcpy(one, &a, sizeof a), memcpy(other, &b, sizeof b);
    EACH_NATIVE_REG other[n] = select_native(one[n] > other[n], one[n], other[n]);
    memcpy(&b, other, sizeof b);
    return b;
}

/* e to the power of each, to 2e-7: 2^n times a polynomial on ±ln 2 / 2. Below -87 it is 0, above 88 infinite. */
static inline f32n exp_native(f32n x) {
    f32n top = {0}, low = top - 87.0f;
    i32n small = x < low, big = x > top + 88.0f, odd = x != x;
    f32n held = select_native(small, low, select_native(big, top + 88.0f, select_native(odd, top, x)));
    f32n has_zeros = held * 1.44269504f + 12582912.0f; /* 1.5 · 2^23: the lowest bits are the rounded number */
    i32n n = (i32n)has_zeros - 0x4b400000;
    f32n turns = has_zeros - 12582912.0f;
    f32n r = held - turns * 0.693359375f;
    r = r + turns * 2.12194440e-4f;
    f32n p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    f32n out = (f32n)((i32n)p + (n << 23));
    return select_native(odd, x, select_native(small, top, select_native(big, top + __builtin_inff(), out)));
}

static inline f32x16 exp16(f32x16 x) {
    f32n own[64 / NATIVE_BYTES];
    memcpy(own, &x, sizeof x);
    EACH_NATIVE_REG own[n] = exp_native(own[n]);
    memcpy(&x, own, sizeof x);
    return x;
}

#endif
