/* The few operations the product is made of, in the instruction set this library is compiled for.

   Whole and Real are vectors of 32-bit whole numbers and of floats, VECTORS of them for a tile's 16 lanes. */

#ifndef EXLM_LANES_H
#define EXLM_LANES_H

#include <stdint.h>
#include <string.h>

static inline int32_t both(const int16_t *pair) {
    int32_t out;
    memcpy(&out, pair, sizeof out);
    return out;
}

static inline float half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    float out;
    if (rest < 0x0400) return (sign ? -1.0f : 1.0f) * (float)rest * 0x1p-24f;
    wide = sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + (112u << 23));
    memcpy(&out, &wide, sizeof out);
    return out;
}

#if defined(__AVX512VNNI__)
#include <immintrin.h>

enum { VECTORS = 1, MOST_ROWS = 8 };

#define Whole __m512i
#define Real __m512
#define w_load(p) _mm512_loadu_si512(p)
#define w_all(n) _mm512_set1_epi32(n)
#define w_add(a, b) _mm512_add_epi32(a, b)
#define w_and(a, b) _mm512_and_si512(a, b)
#define w_or(a, b) _mm512_or_si512(a, b)
#define w_left(a, n) _mm512_slli_epi32(a, n)
#define w_right(a, n) _mm512_srli_epi32(a, n)
#define w_dot(sum, codes, x) _mm512_dpwssd_epi32(sum, codes, _mm512_set1_epi32(both(x)))
#define r_all(a) _mm512_set1_ps(a)
#define r_load(p) _mm512_loadu_ps(p)
#define r_store(p, a) _mm512_storeu_ps(p, a)
#define r_from(a) _mm512_cvtepi32_ps(a)
#define r_more(a, b, c) _mm512_fmadd_ps(b, c, a)
#define r_less(a, b, c) _mm512_fnmadd_ps(b, c, a)
#define r_halves(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define r_bytes(p) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))

#elif defined(__AVX2__)
#include <immintrin.h>

enum { VECTORS = 2, MOST_ROWS = 4 };

#define Whole __m256i
#define Real __m256
#define w_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define w_all(n) _mm256_set1_epi32(n)
#define w_add(a, b) _mm256_add_epi32(a, b)
#define w_and(a, b) _mm256_and_si256(a, b)
#define w_or(a, b) _mm256_or_si256(a, b)
#define w_left(a, n) _mm256_slli_epi32(a, n)
#define w_right(a, n) _mm256_srli_epi32(a, n)
#define w_dot(sum, codes, x) _mm256_add_epi32(sum, _mm256_madd_epi16(codes, _mm256_set1_epi32(both(x))))
#define r_all(a) _mm256_set1_ps(a)
#define r_load(p) _mm256_loadu_ps(p)
#define r_store(p, a) _mm256_storeu_ps(p, a)
#define r_from(a) _mm256_cvtepi32_ps(a)
#define r_more(a, b, c) _mm256_fmadd_ps(b, c, a)
#define r_less(a, b, c) _mm256_fnmadd_ps(b, c, a)
#define r_halves(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define r_bytes(p) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))

#else /* what the compiler makes of short vectors; on ARM that is NEON */

enum { VECTORS = 4, MOST_ROWS = 4 };

typedef int32_t Whole4 __attribute__((vector_size(16)));
typedef float Real4 __attribute__((vector_size(16)));

static inline Whole4 whole_load(const int32_t *p) {
    Whole4 out;
    memcpy(&out, p, sizeof out);
    return out;
}

static inline Real4 real_load(const float *p) {
    Real4 out;
    memcpy(&out, p, sizeof out);
    return out;
}

#define Whole Whole4
#define Real Real4
#define w_load(p) whole_load(p)
#define w_all(n) ((Whole4){n, n, n, n})
#define w_add(a, b) ((a) + (b))
#define w_and(a, b) ((a) & (b))
#define w_or(a, b) ((a) | (b))
#define w_left(a, n) ((a) << (n))
#define w_right(a, n) ((a) >> (n))
#define w_dot(sum, codes, x) ((sum) + ((codes) & 0xffff) * (x)[0] + ((codes) >> 16) * (x)[1])
#define r_all(a) ((Real4){a, a, a, a})
#define r_load(p) real_load(p)
#define r_store(p, a) memcpy(p, &(a), sizeof(Real4))
#define r_from(a) __builtin_convertvector(a, Real4)
#define r_more(a, b, c) ((a) + (b) * (c))
#define r_less(a, b, c) ((a) - (b) * (c))
#define r_halves(p) ((Real4){half(*(p)), half((p)[1]), half((p)[2]), half((p)[3])})
#define r_bytes(p) ((Real4){*(p), (p)[1], (p)[2], (p)[3]})

#endif
#endif
