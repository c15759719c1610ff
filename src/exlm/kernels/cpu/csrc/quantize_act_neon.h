/* Digits for products of bytes: 256 · high + low, two signed bytes, sixteen high ones and then as many low. */

#ifndef EXLM_DIGITS_NEON_H
#define EXLM_DIGITS_NEON_H

/* The lowest bytes of sixteen numbers. */
INLINE int8x16_t lowest_bytes(const int32x4_t *ints) {
    int16x8_t a = vcombine_s16(vmovn_s32(ints[0]), vmovn_s32(ints[1]));
    int16x8_t b = vcombine_s16(vmovn_s32(ints[2]), vmovn_s32(ints[3]));
    return vcombine_s8(vmovn_s16(a), vmovn_s16(b));
}

INLINE void store_qact(const i32v *ints, uint8_t *to) {
    int32x4_t low[LANE_REGS], high[LANE_REGS];
    for (int reg = 0; reg < LANE_REGS; reg++) {
        low[reg] = vreinterpretq_s32_u32(ints[reg]);
        high[reg] = vshrq_n_s32(vaddq_s32(low[reg], vdupq_n_s32(128)), 8);
    }
    vst1q_s8((int8_t *)to, lowest_bytes(high));
    vst1q_s8((int8_t *)to + LANES, lowest_bytes(low));
}

#endif
