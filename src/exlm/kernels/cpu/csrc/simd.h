/* The one SIMD layer: everything below this header is written once for all instruction sets.

   f32v, i32v   one native register of VLEN floats or 32-bit integers (AVX-512: 16, AVX2: 8, NEON and SSE2: 4).
                LANE_REGS of them make sixteen lanes. Functions are named by lane type: f32_fma, i32_and, i16_madd.
   f32n, i32n   the same register as a GNU vector (i32n signed), where operators and comparisons read better.
   f32x16       sixteen floats in any instruction set. Reductions over it add in one fixed order, so a sum has the
                same bits everywhere.
   f16          float16 is only stored: f16_to_f32 / f16_from_f32 for one number, f32_load_f16 / f32_store_f16 /
                f32_round_f16 for a register. Rounding is to nearest even.

   EXLM_PORTABLE leaves NEON and SSE2 out, so that tests can run the portable code on any machine. */

#ifndef EXLM_SIMD_H
#define EXLM_SIMD_H

#include <stdint.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vector arguments never cross the library's boundary */

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* Keeps a value in a register: without it the compiler loads it again for each use. */
#if defined(__x86_64__)
#define KEEP_IN_REG(a) __asm__("" : "+v"(a))
#elif defined(__aarch64__)
#define KEEP_IN_REG(a) __asm__("" : "+w"(a))
#else
#define KEEP_IN_REG(a) ((void)0)
#endif

/* Unrolled loops over register blocks. Their bounds, `regs` and `rows`, are compile-time constants of the function. */
#define EACH_REG(v) _Pragma("GCC unroll 8") for (int v = 0; v < regs; v++)
#define EACH_ROW(r) _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define EACH_LANE_REG(reg) _Pragma("GCC unroll 4") for (int reg = 0; reg < LANE_REGS; reg++)

#if defined(__AVX512F__)
#include <immintrin.h>

enum { LANES = 16, VLEN = 16, LANE_REGS = LANES / VLEN };
typedef __m512 f32v;
typedef __m512i i32v;

#define i32_load(p) _mm512_loadu_si512(p)
#define i32_load_u16(p) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define i32_load_u8(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define i32_load_i8(p) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define i32_set1(n) _mm512_set1_epi32(n)
#define i32_and(a, b) _mm512_and_si512(a, b)
#define i32_or(a, b) _mm512_or_si512(a, b)
#define i32_or_and(a, b, c) _mm512_ternarylogic_epi32(a, b, c, 0xf8)
#define i32_bitselect(which, a, b) _mm512_ternarylogic_epi32(a, which, b, 0xe2)
#define i32_shl(a, n) _mm512_slli_epi32(a, n)
#define i32_shr(a, n) _mm512_srli_epi32(a, n)
#define i32_add(a, b) _mm512_add_epi32(a, b)
#define i32_mul(a, b) _mm512_mullo_epi32(a, b)
#define i32_from_f32(a) _mm512_cvtps_epi32(a)
#define i32_reduce_add(a) _mm512_reduce_add_epi32(a)
#define u32_max(a, b) _mm512_max_epu32(a, b)
#define u32_reduce_max(a) _mm512_reduce_max_epu32(a)
#define i8_set1(n) _mm512_set1_epi8(n)
#define i8_load16(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p)))
#define i8_lookup16(table, index) _mm512_shuffle_epi8(table, index)
#define f32_set1(a) _mm512_set1_ps(a)
#define f32_load(p) _mm512_loadu_ps(p)
#define f32_store(p, a) _mm512_storeu_ps(p, a)
#define f32_from_i32(a) _mm512_cvtepi32_ps(a)
#define f32_mul(a, b) _mm512_mul_ps(a, b)
#define f32_sub(a, b) _mm512_sub_ps(a, b)
#define f32_fma(a, b, c) _mm512_fmadd_ps(b, c, a)   /* a + b * c */
#define f32_fnma(a, b, c) _mm512_fnmadd_ps(b, c, a) /* a - b * c */
#define f32_load_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define f32_store_f16(p, a) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT))
#define f32_round_f16(a) _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT))
#define f16_to_f32(bits) _cvtsh_ss(bits)
#define f16_from_f32(a) _cvtss_sh(a, _MM_FROUND_TO_NEAREST_INT)

/* x[index] in each lane, 0 where the index is negative. */
INLINE f32v f32_gather(const float *x, i32v index) {
    __mmask16 present = _mm512_cmpge_epi32_mask(index, i32_set1(0));
    return _mm512_mask_i32gather_ps(f32_set1(0), present, index, x, 4);
}

#elif defined(__AVX2__)
#include <immintrin.h>

enum { LANES = 16, VLEN = 8, LANE_REGS = LANES / VLEN };
typedef __m256 f32v;
typedef __m256i i32v;

#define i32_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define i32_load_u16(p) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define i32_load_u8(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define i32_load_i8(p) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define i32_set1(n) _mm256_set1_epi32(n)
#define i32_and(a, b) _mm256_and_si256(a, b)
#define i32_or(a, b) _mm256_or_si256(a, b)
#define i32_or_and(a, b, c) i32_or(a, i32_and(b, c))
#define i32_bitselect(which, a, b) i32_or(i32_and(which, a), _mm256_andnot_si256(which, b))
#define i32_shl(a, n) _mm256_slli_epi32(a, n)
#define i32_shr(a, n) _mm256_srli_epi32(a, n)
#define i32_add(a, b) _mm256_add_epi32(a, b)
#define i32_mul(a, b) _mm256_mullo_epi32(a, b)
#define i32_from_f32(a) _mm256_cvtps_epi32(a)
#define u32_max(a, b) _mm256_max_epu32(a, b)
#define u16_shr(a, n) _mm256_srli_epi16(a, n)
#define i16_madd(a, b) _mm256_madd_epi16(a, b) /* products of 16-bit integers, neighbours added */
#define i8_set1(n) _mm256_set1_epi8(n)
#define i8_load16(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)))
#define i8_lookup16(table, index) _mm256_shuffle_epi8(table, index)
#define f32_set1(a) _mm256_set1_ps(a)
#define f32_load(p) _mm256_loadu_ps(p)
#define f32_store(p, a) _mm256_storeu_ps(p, a)
#define f32_from_i32(a) _mm256_cvtepi32_ps(a)
#define f32_mul(a, b) _mm256_mul_ps(a, b)
#define f32_sub(a, b) _mm256_sub_ps(a, b)
#define f32_fma(a, b, c) _mm256_fmadd_ps(b, c, a)
#define f32_fnma(a, b, c) _mm256_fnmadd_ps(b, c, a)
#define f32_load_f16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define f32_store_f16(p, a) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT))
#define f32_round_f16(a) _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT))
#define f16_to_f32(bits) _cvtsh_ss(bits)
#define f16_from_f32(a) _cvtss_sh(a, _MM_FROUND_TO_NEAREST_INT)

INLINE f32v f32_gather(const float *x, i32v index) {
    i32v present = _mm256_cmpgt_epi32(index, i32_set1(-1));
    return _mm256_mask_i32gather_ps(f32_set1(0), x, index, _mm256_castsi256_ps(present), 4);
}

#define REDUCE(name, op)                                                              \
    INLINE int32_t name(i32v a) {                                                     \
        __m128i half = op(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)); \
        half = op(half, _mm_shuffle_epi32(half, 0x4e));                               \
        return _mm_cvtsi128_si32(op(half, _mm_shuffle_epi32(half, 0xb1)));            \
    }
REDUCE(i32_reduce_add, _mm_add_epi32)
REDUCE(u32_reduce_max, _mm_max_epu32)
#undef REDUCE

#elif defined(__aarch64__) && !defined(EXLM_PORTABLE)
#include <arm_neon.h>

enum { LANES = 16, VLEN = 4, LANE_REGS = LANES / VLEN };
typedef float32x4_t f32v;
typedef uint32x4_t i32v;

INLINE uint8x8_t load_4_bytes(const void *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return vcreate_u8(word);
}

#define i32_load(p) vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)(p)))
#define i32_load_u16(p) vmovl_u16(vld1_u16((const uint16_t *)(p)))
#define i32_load_u8(p) vmovl_u16(vget_low_u16(vmovl_u8(load_4_bytes(p))))
#define i32_load_i8(p) vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_4_bytes(p))))))
#define i32_set1(n) vdupq_n_u32((uint32_t)(n))
#define i32_and(a, b) vandq_u32(a, b)
#define i32_or(a, b) vorrq_u32(a, b)
#define i32_or_and(a, b, c) i32_or(a, i32_and(b, c))
#define i32_bitselect(which, a, b) vbslq_u32(which, a, b)
#define i32_shl(a, n) ((a) << (n))
#define i32_shr(a, n) ((a) >> (n))
#define i32_add(a, b) vaddq_u32(a, b)
#define i32_mul(a, b) vmulq_u32(a, b)
#define i32_from_f32(a) vreinterpretq_u32_s32(vcvtnq_s32_f32(a))
#define i32_reduce_add(a) ((int32_t)vaddvq_u32(a))
#define u32_max(a, b) vmaxq_u32(a, b)
#define u32_reduce_max(a) vmaxvq_u32(a)
#define u16_shr(a, n) vreinterpretq_u32_u16(vreinterpretq_u16_u32(a) >> (n))
#define i8_set1(n) vreinterpretq_u32_u8(vdupq_n_u8(n))
#define i8_load16(p) i32_load(p)
#define i8_lookup16(table, index) \
    vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(index)))
#define f32_set1(a) vdupq_n_f32(a)
#define f32_load(p) vld1q_f32(p)
#define f32_store(p, a) vst1q_f32(p, a)
#define f32_from_i32(a) vcvtq_f32_s32(vreinterpretq_s32_u32(a))
#define f32_mul(a, b) vmulq_f32(a, b)
#define f32_sub(a, b) vsubq_f32(a, b)
#define f32_fma(a, b, c) vfmaq_f32(a, b, c)
#define f32_fnma(a, b, c) vfmsq_f32(a, b, c)
#define f32_load_f16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define f32_store_f16(p, a) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)))
#define f32_round_f16(a) vcvt_f32_f16(vcvt_f16_f32(a))

INLINE float f16_to_f32(uint16_t bits) {
    __fp16 half;
    memcpy(&half, &bits, sizeof half);
    return half;
}

INLINE uint16_t f16_from_f32(float a) {
    __fp16 half = (__fp16)a;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

INLINE i32v i16_madd(i32v a, i32v b) {
    int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
    int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return vreinterpretq_u32_s32(vpaddq_s32(low, high));
}

INLINE f32v f32_gather(const float *x, i32v index) {
    f32v out = f32_set1(0);
    for (int n = 0; n < VLEN; n++) out[n] = (int32_t)index[n] < 0 ? 0 : x[index[n]];
    return out;
}

#else /* GNU vectors: SSE2, and any processor a compiler knows */
#if defined(__SSE2__) && !defined(EXLM_PORTABLE)
#include <emmintrin.h>
#endif

enum { LANES = 16, VLEN = 4, LANE_REGS = LANES / VLEN };
typedef float f32v __attribute__((vector_size(16)));
typedef uint32_t i32v __attribute__((vector_size(16)));
typedef int32_t s32v __attribute__((vector_size(16)));
typedef uint16_t u16v __attribute__((vector_size(16)));
typedef uint8_t u8v __attribute__((vector_size(16)));

INLINE i32v i32_load(const void *p) {
    i32v out;
    memcpy(&out, p, sizeof out);
    return out;
}

INLINE i32v i32_load_u16(const void *p) {
    uint16_t a[VLEN];
    memcpy(a, p, sizeof a);
    return (i32v){a[0], a[1], a[2], a[3]};
}

INLINE i32v i32_load_u8(const uint8_t *a) { return (i32v){a[0], a[1], a[2], a[3]}; }

INLINE i32v i32_load_i8(const int8_t *a) {
    return (i32v){(uint32_t)a[0], (uint32_t)a[1], (uint32_t)a[2], (uint32_t)a[3]};
}

INLINE f32v f32_load(const float *p) {
    f32v out;
    memcpy(&out, p, sizeof out);
    return out;
}

INLINE f32v f32_from_i32(i32v a) { return __builtin_convertvector((s32v)a, f32v); }

#define i32_set1(n) ((i32v){(uint32_t)(n), (uint32_t)(n), (uint32_t)(n), (uint32_t)(n)})
#define i32_and(a, b) ((a) & (b))
#define i32_or(a, b) ((a) | (b))
#define i32_or_and(a, b, c) ((a) | ((b) & (c)))
#define i32_bitselect(which, a, b) (((which) & (a)) | (~(which) & (b)))
#define i32_shl(a, n) ((a) << (n))
#define i32_shr(a, n) ((a) >> (n))
#define i32_add(a, b) ((a) + (b))
#define i32_mul(a, b) ((a) * (b))
#define i32_reduce_add(a) ((int32_t)((a)[0] + (a)[1] + (a)[2] + (a)[3]))
#define u16_shr(a, n) ((i32v)((u16v)(a) >> (n)))
#define i8_set1(n) i32_set1((n) * 0x01010101u)
#define i8_load16(p) i32_load(p)
#define f32_set1(a) ((f32v){a, a, a, a})
#define f32_store(p, a) memcpy(p, &(a), sizeof(f32v))
#define f32_mul(a, b) ((a) * (b))
#define f32_sub(a, b) ((a) - (b))

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FMA_LANE(a, b, c, n) __builtin_fmaf((b)[n], (c)[n], (a)[n])
INLINE f32v f32_fma(f32v a, f32v b, f32v c) {
    return (f32v){FMA_LANE(a, b, c, 0), FMA_LANE(a, b, c, 1), FMA_LANE(a, b, c, 2), FMA_LANE(a, b, c, 3)};
}
#undef FMA_LANE
#else
#define f32_fma(a, b, c) ((a) + (b) * (c)) /* rounds twice: only this instruction set's sums may differ from others' */
#endif
#define f32_fnma(a, b, c) f32_fma(a, -(b), c)

/* The nearest integer, ties to even, of floats below 2^22: adding 1.5 * 2^23 moves it into the lowest bits. */
INLINE i32v i32_from_f32(f32v a) { return (i32v)(a + 12582912.0f) - 0x4b400000u; }

INLINE i32v u32_max(i32v a, i32v b) { return i32_bitselect((i32v)(a > b), a, b); }

INLINE uint32_t u32_reduce_max(i32v a) {
    uint32_t out = a[0];
    for (int n = 1; n < VLEN; n++) out = a[n] > out ? a[n] : out;
    return out;
}

INLINE i32v i8_lookup16(i32v table, i32v index) {
    u8v entries = (u8v)table, at = (u8v)index, out = {0};
    for (int n = 0; n < 16; n++) out[n] = entries[at[n]];
    return (i32v)out;
}

#if defined(__SSE2__) && !defined(EXLM_PORTABLE)
#define i16_madd(a, b) ((i32v)_mm_madd_epi16((__m128i)(a), (__m128i)(b)))
#else
INLINE i32v i16_madd(i32v a, i32v b) {
    s32v x = (s32v)a, y = (s32v)b;
    return (i32v)((x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16));
}
#endif

INLINE f32v f32_gather(const float *x, i32v index) {
    f32v out = f32_set1(0);
    for (int n = 0; n < VLEN; n++) out[n] = (int32_t)index[n] < 0 ? 0 : x[index[n]];
    return out;
}

/* Below 2^-14 float16 counts in steps of 2^-24; infinity and NaN keep an exponent of all ones. */
INLINE f32v f32_load_f16(const void *p) {
    i32v bits = i32_load_u16(p), size = bits & 0x7fff, is_subnormal = (i32v)(size < 0x0400);
    i32v normal = (size << 13) + (112u << 23) + ((i32v)(size >= 0x7c00) & (112u << 23));
    i32v subnormal = (i32v)(f32_from_i32(size) * 0x1p-24f);
    return (f32v)((is_subnormal & subnormal) | (~is_subnormal & normal) | (bits & 0x8000) << 16);
}

INLINE float f16_to_f32(uint16_t bits) { return f32_load_f16((const uint16_t[VLEN]){bits})[0]; }

INLINE uint16_t f16_from_f32(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits < 0x38800000) { /* 0.5 + size rounds to a multiple of 2^-24 */
        memcpy(&a, &bits, sizeof a);
        return sign | (uint16_t)(((a + 0.5f) - 0.5f) * 0x1p24f);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)(bits >= 0x47800000 ? 0x7c00 : (bits >> 13) - (112u << 10));
}

INLINE void f32_store_f16(uint16_t *p, f32v a) {
    for (int n = 0; n < VLEN; n++) p[n] = f16_from_f32(a[n]);
}

INLINE f32v f32_round_f16(f32v a) {
    uint16_t halves[VLEN];
    f32_store_f16(halves, a);
    return f32_load_f16(halves);
}

#endif

/* Sixteen lanes in any instruction set. */

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));

/* Compilers cut sums and products of long vectors into registers well, but comparisons lane by lane: those are written
   for one register, as signed integers. */
typedef float f32n __attribute__((vector_size(4 * VLEN)));
typedef int32_t i32n __attribute__((vector_size(4 * VLEN)));

INLINE f32x16 load16(const float *p) {
    f32x16 out;
    memcpy(&out, p, sizeof out);
    return out;
}

/* The first `count` floats, then zeros. */
INLINE f32x16 load16_tail(const float *p, int count) {
    f32x16 out = {0};
    memcpy(&out, p, count * sizeof(float));
    return out;
}

INLINE void store16(float *p, f32x16 a) { memcpy(p, &a, sizeof a); }

/* A tree: halves, quarters, then (0 + 2) + (1 + 3). */
INLINE float sum16(f32x16 a) {
    f32x8 halves[2];
    f32x4 quarters[2];
    memcpy(halves, &a, sizeof a);
    f32x8 half = halves[0] + halves[1];
    memcpy(quarters, &half, sizeof half);
    f32x4 last = quarters[0] + quarters[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

/* sum16 of four vectors, for little more than the cost of one. */
INLINE void sum16_x4(f32x16 a, f32x16 b, f32x16 c, f32x16 d, float *out) {
#if defined(__AVX512F__)
#define QUARTERS(a, b, which) _mm512_shuffle_f32x4((__m512)(a), (__m512)(b), which)
    __m512 ab = _mm512_add_ps(QUARTERS(a, b, 0x44), QUARTERS(a, b, 0xee));
    __m512 cd = _mm512_add_ps(QUARTERS(c, d, 0x44), QUARTERS(c, d, 0xee));
    __m512 all = _mm512_add_ps(QUARTERS(ab, cd, 0x88), QUARTERS(ab, cd, 0xdd));
#undef QUARTERS
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    __m512i every_fourth = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(every_fourth, all)));
#else
    out[0] = sum16(a);
    out[1] = sum16(b);
    out[2] = sum16(c);
    out[3] = sum16(d);
#endif
}

INLINE f32x16 select16(i32x16 condition, f32x16 a, f32x16 b) {
    return (f32x16)((condition & (i32x16)a) | (~condition & (i32x16)b));
}

INLINE f32n select_reg(i32n condition, f32n a, f32n b) {
    return (f32n)((condition & (i32n)a) | (~condition & (i32n)b));
}

/* The larger of each two; b where one is NaN. */
INLINE f32x16 max16(f32x16 a, f32x16 b) {
    f32n x[LANE_REGS], y[LANE_REGS];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    EACH_LANE_REG(reg) y[reg] = select_reg(x[reg] > y[reg], x[reg], y[reg]);
    memcpy(&b, y, sizeof b);
    return b;
}

/* e^x to 2e-7, by 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. 0 below -87, infinite above 88, NaN stays NaN. */
INLINE f32n exp_reg(f32n x) {
    f32n zero = {0}, low = zero - 87.0f, high = zero + 88.0f;
    i32n is_small = x < low, is_large = x > high, is_nan = x != x;
    f32n clamped = select_reg(is_small, low, select_reg(is_large, high, select_reg(is_nan, zero, x)));
    f32n shifted = clamped * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the lowest bits are the rounded integer */
    i32n n = (i32n)shifted - 0x4b400000;
    f32n rounded = shifted - 12582912.0f;
    f32n r = clamped - rounded * 0.693359375f;
    r = r + rounded * 2.12194440e-4f;
    f32n p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    f32n out = (f32n)((i32n)p + (n << 23));
    return select_reg(is_nan, x, select_reg(is_small, zero, select_reg(is_large, zero + __builtin_inff(), out)));
}

INLINE f32x16 exp16(f32x16 x) {
    f32n regs[LANE_REGS];
    memcpy(regs, &x, sizeof x);
    EACH_LANE_REG(reg) regs[reg] = exp_reg(regs[reg]);
    memcpy(&x, regs, sizeof x);
    return x;
}

/* ln(1 + e^x) to 3e-7: max(x, 0) + ln(1 + u) with u = e^-|x|, where ln(1 + u) = 2 atanh(s) with s = u / (2 + u), by a
   polynomial in s^2 on [0, 1/9]. NaN stays NaN. */
INLINE f32n softplus_reg(f32n x) {
    f32n zero = {0};
    i32n negative = x < zero;
    f32n u = exp_reg(select_reg(negative, x, -x)), s = u / (u + 2.0f), w = s * s;
    f32n p = w * 1.4087329e-1f + 1.3980709e-1f;
    p = p * w + 2.0012427e-1f;
    p = p * w + 3.3333158e-1f;
    p = p * w + 1.0f;
    return select_reg(negative, zero, x) + s * p * 2.0f;
}

INLINE f32x16 softplus16(f32x16 x) {
    f32n regs[LANE_REGS];
    memcpy(regs, &x, sizeof x);
    EACH_LANE_REG(reg) regs[reg] = softplus_reg(regs[reg]);
    memcpy(&x, regs, sizeof x);
    return x;
}

/* Sixteen floats as float16 and back, those beyond its range as its largest number. NaN stays NaN. */
INLINE void store16_f16(uint16_t *p, f32x16 x) {
    f32x16 largest = (f32x16){0} + 65504.0f;
    x = select16(x > largest, largest, select16(x < -largest, -largest, x));
    f32v regs[LANE_REGS];
    memcpy(regs, &x, sizeof x);
    EACH_LANE_REG(reg) f32_store_f16(p + reg * VLEN, regs[reg]);
}

INLINE f32x16 round16_f16(f32x16 x) {
    uint16_t halves[LANES];
    f32v regs[LANE_REGS];
    store16_f16(halves, x);
    EACH_LANE_REG(reg) regs[reg] = f32_load_f16(halves + reg * VLEN);
    memcpy(&x, regs, sizeof x);
    return x;
}

#endif
