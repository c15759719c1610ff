/* Digits for products of 16-bit numbers: each is one. Of four neighbours the first comes before the third, then the
   second and the fourth, as pairs of codes do. */

#ifndef EXLM_DIGITS_AVX2_H
#define EXLM_DIGITS_AVX2_H

INLINE void store_qact(const i32v *ints, uint8_t *to) {
    i32v first = _mm256_shuffle_epi32(ints[0], 0xd8), second = _mm256_shuffle_epi32(ints[1], 0xd8);
    i32v all = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    _mm256_storeu_si256((i32v *)to, all);
}

#endif
