/* Digits for products of bytes: 256 · high + low, two signed bytes, sixteen high ones and then as many low. */

#ifndef EXLM_DIGITS_AVX512_H
#define EXLM_DIGITS_AVX512_H

INLINE void put_digits(const Whole *whole, uint8_t *to) {
    Whole high = _mm512_srai_epi32(_mm512_add_epi32(*whole, w_all(128)), 8);
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)(to + LANES), _mm512_cvtepi32_epi8(*whole));
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

#undef QUARTERS

/* Whether four spans from here on are neighbours of two slots each. */
static int four_pairs(const Span *span) {
    int found = 1;
    for (int n = 0; n < 4; n++) found &= span[n].slots == 2 && span[n].slot == span->slot + 2 * n;
    return found;
}

#endif
