/* Digits for products of bytes: 256 · high + low, two signed bytes, sixteen high ones and then as many low. */

#ifndef EXLM_DIGITS_AVX512_H
#define EXLM_DIGITS_AVX512_H

INLINE void store_qact(const i32v *ints, uint8_t *to) {
    i32v high = _mm512_srai_epi32(_mm512_add_epi32(*ints, i32_set1(128)), 8);
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)(to + LANES), _mm512_cvtepi32_epi8(*ints));
}

#define QUARTERS(a, b, which) _mm512_shuffle_i32x4(a, b, which)

/* The larger ones, or the sums, of four spans' sixteen each: a quarter holds one span's, four times. */
INLINE i32v reduce_step(i32v a, i32v b, int add) { return add ? _mm512_add_epi32(a, b) : _mm512_max_epu32(a, b); }

INLINE i32v reduce4(const i32v *v, int add) {
    i32v ab = reduce_step(QUARTERS(v[0], v[1], 0x44), QUARTERS(v[0], v[1], 0xee), add);
    i32v cd = reduce_step(QUARTERS(v[2], v[3], 0x44), QUARTERS(v[2], v[3], 0xee), add);
    i32v all = reduce_step(QUARTERS(ab, cd, 0x88), QUARTERS(ab, cd, 0xdd), add);
    all = reduce_step(all, _mm512_shuffle_epi32(all, 0x4e), add);
    return reduce_step(all, _mm512_shuffle_epi32(all, 0xb1), add);
}

/* unit_of, of sixteen. */
INLINE i32v power_of_two_scales(i32v largest, i32v *inverse) {
    i32v exponent = _mm512_sub_epi32(i32_shr((i32v)f32_mul((f32v)largest, f32_set1(1.00398f)), 23), i32_set1(14));
    __mmask16 finite = _mm512_cmplt_epu32_mask(largest, i32_set1(0x7f800000));
    __mmask16 some = finite & _mm512_cmpge_epu32_mask(largest, i32_set1(27 << 23));
    *inverse = _mm512_maskz_slli_epi32(some, _mm512_sub_epi32(i32_set1(254), exponent), 23);
    return _mm512_mask_mov_epi32(_mm512_maskz_slli_epi32(some, exponent, 23), ~finite, i32_set1(0x7fc00000));
}

/* digits_of_span, of four neighbours of two slots each. `step`: from one's digits to the next's; `rows`: from one's
   level to the next's. */
static void quantize_four_spans(const float *x, uint8_t *qact, long step, ActScale *act_scale, int rows) {
    const i32v order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
    i32v largest[4], sums[4], inverse, delta, ints;
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        i32v a = (i32v)f32_load(x + n * 32), b = (i32v)f32_load(x + n * 32 + LANES), size = i32_set1(0x7fffffff);
        largest[n] = _mm512_max_epu32(i32_and(a, size), i32_and(b, size));
    }
    delta = power_of_two_scales(reduce4(largest, 0), &inverse);
    i32v factors[4] = {QUARTERS(inverse, inverse, 0x00), QUARTERS(inverse, inverse, 0x55),
                        QUARTERS(inverse, inverse, 0xaa), QUARTERS(inverse, inverse, 0xff)};
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++, qact += step) {
        __mmask16 some = _mm512_test_epi32_mask(factors[n], factors[n]);
        i32v a = _mm512_maskz_cvtps_epi32(some, f32_mul(f32_load(x + n * 32), (f32v)factors[n]));
        i32v b = _mm512_maskz_cvtps_epi32(some, f32_mul(f32_load(x + n * 32 + LANES), (f32v)factors[n]));
        i32v both = _mm512_packs_epi32(a, b), low = i32_and(both, _mm512_set1_epi16(255));
        i32v high = _mm512_srli_epi16(_mm512_add_epi16(both, _mm512_set1_epi16(128)), 8);
        _mm512_storeu_si512(qact, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(high, low)));
        sums[n] = _mm512_add_epi32(a, b);
    }
    ints = reduce4(sums, 1);
    float scales[LANES], totals[LANES];
    int32_t int_sums[LANES];
    _mm512_storeu_si512(scales, delta);
    _mm512_storeu_si512(int_sums, ints);
    f32_store(totals, f32_mul((f32v)delta, f32_from_i32(ints)));
    for (int n = 0; n < LANES; n += 4, act_scale += rows) *act_scale = (ActScale){scales[n], totals[n], int_sums[n]};
}

#undef QUARTERS

/* Whether four spans from here on are neighbours of two slots each. */
static int are_four_pairs(const GroupSpan *span) {
    int found = 1;
    for (int n = 0; n < 4; n++) found &= span[n].kblocks == 2 && span[n].kblock == span->kblock + 2 * n;
    return found;
}

#endif
