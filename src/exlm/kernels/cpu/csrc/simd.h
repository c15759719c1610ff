/* The few operations the kernels are made of, in the instruction set this library is compiled for.

   Real and Whole are vectors of WIDTH floats and of 32-bit whole numbers, PARTS of them for sixteen lanes.
   EXLM_PORTABLE leaves NEON out, for tests: every 64-bit ARM has it. */

#ifndef EXLM_LANES_H
#define EXLM_LANES_H

#include <stdint.h>
#include <string.h>

#include "packed.h"

/* Keeps the compiler from loading a number again each time it is used. */
#if defined(__x86_64__)
#define KEEP_IN_REG(a) __asm__("" : "+v"(a))
#elif defined(__aarch64__)
#define KEEP_IN_REG(a) __asm__("" : "+w"(a))
#else
#define KEEP_IN_REG(a) ((void)0)
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE float f16_to_f32(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    float out;
    if (rest < 0x0400) return (sign ? -1.0f : 1.0f) * (float)rest * 0x1p-24f;
    wide = sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + (112u << 23));
    memcpy(&out, &wide, sizeof out);
    return out;
}

#if defined(__AVX512F__)
#include <immintrin.h>

enum { LANE_REGS = 1, VLEN = 16 };

typedef __m512 f32v;
typedef __m512i i32v;
#define i32_load(p) _mm512_loadu_si512(p)
#define i32_load_u16(p) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define i32_load_u8(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define i32_load_i8(p) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define i32_set1(n) _mm512_set1_epi32(n)
#define i32_and(a, b) _mm512_and_si512(a, b)
#define i32_or(a, b) _mm512_or_si512(a, b)
#define i32_bitselect(which, a, b) _mm512_ternarylogic_epi32(a, which, b, 0xe2)
#define i32_shl(a, n) _mm512_slli_epi32(a, n)
#define i32_shr(a, n) _mm512_srli_epi32(a, n)
#define i32_add(a, b) _mm512_add_epi32(a, b)
#define i32_mul(a, b) _mm512_mullo_epi32(a, b)
#define u32_max(a, b) _mm512_max_epu32(a, b)
#define i8_set1(n) _mm512_set1_epi8(n)
#define i32_or_and(a, b, c) _mm512_ternarylogic_epi32(a, b, c, 0xf8)
#define u32_reduce_max(a) _mm512_reduce_max_epu32(a)
#define i32_reduce_add(a) _mm512_reduce_add_epi32(a)
#define f32_set1(a) _mm512_set1_ps(a)
#define f32_load(p) _mm512_loadu_ps(p)
#define f32_store(p, a) _mm512_storeu_ps(p, a)
#define f32_from_i32(a) _mm512_cvtepi32_ps(a)
#define f32_load_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define f32_mul(a, b) _mm512_mul_ps(a, b)
#define f32_sub(a, b) _mm512_sub_ps(a, b)
#define f32_fma(a, b, c) _mm512_fmadd_ps(b, c, a)
#define f32_fnma(a, b, c) _mm512_fnmadd_ps(b, c, a)
#define i32_from_f32(a) _mm512_cvtps_epi32(a)
#define f32_fms(a, b, c) _mm512_fmsub_ps(b, c, a)
#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define f32_round_f16(a) _mm512_cvtph_ps(_mm512_cvtps_ph(a, NEAREST))
#define f32_store_f16(p, a) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(a, NEAREST))

#define i8_lookup16(table, index) _mm512_shuffle_epi8(table, index)
#define i8_load16(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p)))

/* The floats at sixteen places, 0 where there is none. */
INLINE f32v f32_gather(const float *x, i32v from) {
    return _mm512_mask_i32gather_ps(f32_set1(0), _mm512_cmpge_epi32_mask(from, i32_set1(0)), from, x, 4);
}

#elif defined(__AVX2__)
#include <immintrin.h>

enum { LANE_REGS = 2, VLEN = 8 };

typedef __m256 f32v;
typedef __m256i i32v;
#define i32_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define i32_load_u16(p) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define i32_load_u8(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define i32_load_i8(p) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define i32_set1(n) _mm256_set1_epi32(n)
#define i32_and(a, b) _mm256_and_si256(a, b)
#define i32_or(a, b) _mm256_or_si256(a, b)
#define i32_bitselect(which, a, b) i32_or(i32_and(which, a), _mm256_andnot_si256(which, b))
#define i32_shl(a, n) _mm256_slli_epi32(a, n)
#define i32_shr(a, n) _mm256_srli_epi32(a, n)
#define i32_add(a, b) _mm256_add_epi32(a, b)
#define i32_mul(a, b) _mm256_mullo_epi32(a, b)
#define u32_max(a, b) _mm256_max_epu32(a, b)
#define i8_set1(n) _mm256_set1_epi8(n)
#define i32_or_and(a, b, c) i32_or(a, i32_and(b, c))
#define f32_set1(a) _mm256_set1_ps(a)
#define f32_load(p) _mm256_loadu_ps(p)
#define f32_store(p, a) _mm256_storeu_ps(p, a)
#define f32_from_i32(a) _mm256_cvtepi32_ps(a)
#define f32_load_f16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define f32_mul(a, b) _mm256_mul_ps(a, b)
#define f32_sub(a, b) _mm256_sub_ps(a, b)
#define f32_fma(a, b, c) _mm256_fmadd_ps(b, c, a)
#define f32_fnma(a, b, c) _mm256_fnmadd_ps(b, c, a)
#define i32_from_f32(a) _mm256_cvtps_epi32(a)
#define f32_fms(a, b, c) _mm256_fmsub_ps(b, c, a)
#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define f32_round_f16(a) _mm256_cvtph_ps(_mm256_cvtps_ph(a, NEAREST))
#define f32_store_f16(p, a) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(a, NEAREST))

#define i8_lookup16(table, index) _mm256_shuffle_epi8(table, index)
#define i8_load16(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)))
#define u16_shr(a, n) _mm256_srli_epi16(a, n)
#define i16_madd(a, b) _mm256_madd_epi16(a, b)

INLINE f32v f32_gather(const float *x, i32v from) {
    i32v there = _mm256_cmpgt_epi32(from, i32_set1(-1));
    return _mm256_mask_i32gather_ps(f32_set1(0), x, from, _mm256_castsi256_ps(there), 4);
}

#define FOLD(name, op)                                                                                         \
    INLINE int32_t name(i32v a) {                                                                               \
        __m128i half = op(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));                            \
        half = op(half, _mm_shuffle_epi32(half, 0x4e));                                                          \
        return _mm_cvtsi128_si32(op(half, _mm_shuffle_epi32(half, 0xb1)));                                       \
    }
FOLD(i32_reduce_add, _mm_add_epi32)
FOLD(u32_reduce_max, _mm_max_epu32)
#undef FOLD

#elif defined(__aarch64__) && !defined(EXLM_PORTABLE)
#include <arm_neon.h>

enum { LANE_REGS = 4, VLEN = 4 };

typedef float32x4_t f32v;
typedef uint32x4_t i32v;

INLINE uint8x8_t load_four_bytes(const void *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vcreate_u8(four);
}

#define i32_load(p) vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)(p)))
#define i32_load_u16(p) vmovl_u16(vld1_u16((const uint16_t *)(p)))
#define i32_load_u8(p) vmovl_u16(vget_low_u16(vmovl_u8(load_four_bytes(p))))
#define i32_load_i8(p) \
    vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four_bytes(p))))))
#define i32_set1(n) vdupq_n_u32((uint32_t)(n))
#define i32_and(a, b) vandq_u32(a, b)
#define i32_or(a, b) vorrq_u32(a, b)
#define i32_bitselect(which, a, b) vbslq_u32(which, a, b)
#define i32_shl(a, n) ((a) << (n))
#define i32_shr(a, n) ((a) >> (n))
#define i32_add(a, b) vaddq_u32(a, b)
#define i32_mul(a, b) vmulq_u32(a, b)
#define u32_max(a, b) vmaxq_u32(a, b)
#define i8_set1(n) vreinterpretq_u32_u8(vdupq_n_u8(n))
#define i32_or_and(a, b, c) i32_or(a, i32_and(b, c))
#define u32_reduce_max(a) vmaxvq_u32(a)
#define i32_reduce_add(a) ((int32_t)vaddvq_u32(a))
#define f32_set1(a) vdupq_n_f32(a)
#define f32_load(p) vld1q_f32(p)
#define f32_store(p, a) vst1q_f32(p, a)
#define f32_from_i32(a) vcvtq_f32_s32(vreinterpretq_s32_u32(a))
#define f32_load_f16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define f32_mul(a, b) vmulq_f32(a, b)
#define f32_sub(a, b) vsubq_f32(a, b)
#define f32_fma(a, b, c) vfmaq_f32(a, b, c)
#define f32_fnma(a, b, c) vfmsq_f32(a, b, c)
#define i32_from_f32(a) vreinterpretq_u32_s32(vcvtnq_s32_f32(a))
#define f32_fms(a, b, c) vfmaq_f32(vnegq_f32(a), b, c)
#define f32_round_f16(a) vcvt_f32_f16(vcvt_f16_f32(a))
#define f32_store_f16(p, a) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)))

#define i8_lookup16(table, index) vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(index)))
#define i8_load16(p) i32_load(p)
#define u16_shr(a, n) vreinterpretq_u32_u16(vreinterpretq_u16_u32(a) >> (n))

/* Products of 16-bit numbers, neighbours added up. */
INLINE i32v i16_madd(i32v a, i32v b) {
    int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
    int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return vreinterpretq_u32_s32(vpaddq_s32(low, high));
}

INLINE f32v f32_gather(const float *x, i32v from) {
    f32v out = f32_set1(0);
    for (int n = 0; n < VLEN; n++) out[n] = (int32_t)from[n] < 0 ? 0 : x[from[n]];
    return out;
}

#else /* what the compiler makes of short vectors */

enum { LANE_REGS = 4, VLEN = 4 };

typedef float f32v __attribute__((vector_size(16)));
typedef uint32_t i32v __attribute__((vector_size(16)));

#define AT(type, p, i) ((uint32_t)((const type *)(p))[i])
#define FOUR(type, p) ((i32v){AT(type, p, 0), AT(type, p, 1), AT(type, p, 2), AT(type, p, 3)})

INLINE i32v load_words(const void *p) {
    i32v out;
    memcpy(&out, p, sizeof out);
    return out;
}

INLINE i32v load_shorts(const void *p) {
    uint16_t four[4];
    memcpy(four, p, sizeof four);
    return FOUR(uint16_t, four);
}

INLINE f32v load_floats(const float *p) {
    f32v out;
    memcpy(&out, p, sizeof out);
    return out;
}

INLINE f32v floats_from_ints(i32v a) {
    typedef int32_t Signed __attribute__((vector_size(16)));
    return __builtin_convertvector((Signed)a, f32v);
}

/* What four float16 are: below 2^-14 multiples of 2^-24; those that are not finite stay so. */
INLINE f32v floats_from_halves(const void *p) {
    i32v bits = load_shorts(p), rest = bits & 0x7fff, small = (i32v)(rest < 0x0400);
    i32v wide = (rest << 13) + (112u << 23) + ((i32v)(rest >= 0x7c00) & (112u << 23));
    i32v tiny = (i32v)(floats_from_ints(rest) * 0x1p-24f);
    return (f32v)((small & tiny) | (~small & wide) | (bits & 0x8000) << 16);
}

/* The nearest float16, ties to even. */
INLINE float round_f16_scalar(float a) {
    uint32_t bits, sign;
    memcpy(&bits, &a, sizeof bits);
    sign = bits & 0x80000000, bits ^= sign;
    if (bits < 0x38800000) { /* below 2^-14 float16 counts in steps of 2^-24, as float32 does above 1/2 */
        memcpy(&a, &bits, sizeof a);
        a = (a + 0.5f) - 0.5f;
        memcpy(&bits, &a, sizeof bits);
    } else if (bits < 0x7f800000) {
        bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
        if (bits >= 0x47800000) bits = 0x7f800000;
    }
    bits |= sign;
    memcpy(&a, &bits, sizeof a);
    return a;
}

/* The bits of a float16 that equals a float. */
INLINE uint16_t f16_from_f32(float a) {
    uint32_t bits, rest;
    memcpy(&bits, &a, sizeof bits);
    rest = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000), more = (uint16_t)(rest >> 13 & 0x3ff);
    if (rest >= 0x7f800000) return sign | 0x7c00 | more;
    if (rest < 0x38800000) return sign | (uint16_t)((a < 0 ? -a : a) * 0x1p24f);
    return (uint16_t)(sign | ((rest >> 13) - (112u << 10)));
}

#define i32_load(p) load_words(p)
#define i32_load_u16(p) load_shorts(p)
#define i32_load_u8(p) FOUR(uint8_t, p)
#define i32_load_i8(p) FOUR(int8_t, p)
#define i32_set1(n) ((i32v){n, n, n, n})
#define i32_and(a, b) ((a) & (b))
#define i32_or(a, b) ((a) | (b))
#define i32_bitselect(which, a, b) (((which) & (a)) | (~(which) & (b)))
#define i32_shl(a, n) ((a) << (n))
#define i32_shr(a, n) ((a) >> (n))
#define f32_set1(a) ((f32v){a, a, a, a})
#define f32_load(p) load_floats(p)
#define f32_store(p, a) memcpy(p, &(a), sizeof(f32v))
#define f32_from_i32(a) floats_from_ints(a)
#define f32_load_f16(p) floats_from_halves(p)
#define f32_mul(a, b) ((a) * (b))
#define f32_sub(a, b) ((a) - (b))
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FMA_LANE(a, b, c, n) __builtin_fmaf((b)[n], (c)[n], (a)[n])
#define f32_fma(a, b, c) ((f32v){FMA_LANE(a, b, c, 0), FMA_LANE(a, b, c, 1), FMA_LANE(a, b, c, 2), FMA_LANE(a, b, c, 3)})
#else
#define f32_fma(a, b, c) ((a) + (b) * (c))
#endif
#define f32_fms(a, b, c) f32_fma(-(a), b, c)
#define f32_fnma(a, b, c) f32_fma(a, -(b), c)
#define i32_add(a, b) ((a) + (b))
#define i32_mul(a, b) ((a) * (b))
#define i8_set1(n) i32_set1((n) * 0x01010101u)
#define i32_or_and(a, b, c) ((a) | ((b) & (c)))
#define i8_load16(p) load_words(p)

/* Nearest whole numbers, ties to even, of floats below 2^22: adding 1.5 * 2^23 puts them into the lowest bits. */
INLINE i32v i32_from_f32(f32v a) { return (i32v)(a + 12582912.0f) - 0x4b400000u; }

INLINE i32v u32_max(i32v a, i32v b) { return i32_bitselect((i32v)(a > b), a, b); }

INLINE uint32_t u32_reduce_max(i32v a) {
    uint32_t out = a[0];
    for (int n = 1; n < VLEN; n++) out = a[n] > out ? a[n] : out;
    return out;
}

INLINE int32_t i32_reduce_add(i32v a) { return (int32_t)(a[0] + a[1] + a[2] + a[3]); }

INLINE f32v f32_gather(const float *x, i32v from) {
    f32v out = f32_set1(0);
    for (int n = 0; n < VLEN; n++) out[n] = (int32_t)from[n] < 0 ? 0 : x[from[n]];
    return out;
}

INLINE i32v i8_lookup16(i32v table, i32v index) {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    Bytes entries = (Bytes)table, at = (Bytes)index, out = {0};
    for (int n = 0; n < 16; n++) out[n] = entries[at[n]];
    return (i32v)out;
}

INLINE i32v u16_shr(i32v a, int n) {
    typedef uint16_t Shorts __attribute__((vector_size(16)));
    return (i32v)((Shorts)a >> n);
}

/* Products of 16-bit numbers, neighbours added up. */
#if defined(__SSE2__) && !defined(EXLM_PORTABLE)
#include <emmintrin.h>
#define i16_madd(a, b) ((i32v)_mm_madd_epi16((__m128i)(a), (__m128i)(b)))
#else
INLINE i32v i16_madd(i32v a, i32v b) {
    typedef int32_t Signed __attribute__((vector_size(16)));
    Signed x = (Signed)a, y = (Signed)b;
    return (i32v)((x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16));
}
#endif
#define f32_round_f16(a) ((f32v){round_f16_scalar((a)[0]), round_f16_scalar((a)[1]), round_f16_scalar((a)[2]), round_f16_scalar((a)[3])})
#define f32_store_f16(p, a) for (int n = 0; n < VLEN; n++) (p)[n] = f16_from_f32((a)[n])

#endif
#endif
