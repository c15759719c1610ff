/* Quantised pages: codes of 8 or 4 bits, a float16 scale for each 32 (KV_GROUP), of numbers after a Hadamard transform;
   or FP8 E5M2, the upper bytes of float16.

     codes  (pages, page_size, kv_heads, head_dim)   8 bits: a byte each      [x0] [x1] [x2] ... [x31]
                                                     4 bits: two to a byte    [x1:4 x0:4] [x3:4 x2:4] ... [x31:4 x30:4]
     scales (pages, page_size, kv_heads, head_dim / 32)                       x = (code - 2^(bits - 1)) * scale

   Unpacked codes of 4 bits are in packed order: of each group x0, x2, ... x30, x1, x3, ... x31, because the low and the
   high nibbles of 16 bytes are a vector each. */

#ifndef EXLM_KV_QUANT_H
#define EXLM_KV_QUANT_H

#include "attn_common.h"

/* Hadamard-transforms runs of KV_GROUP * interleave numbers in place, `interleave` transforms in each, not normalised.
   round_each: rounds to float16 after each step, as the cache defines it. */
static void hadamard(float *x, int count, int interleave, int round_each) {
    for (int stride = interleave; stride < KV_GROUP * interleave; stride *= 2) {
        for (int at = 0; at < count; at += 2 * stride) {
            for (int i = at; i < at + stride; i++) {
                float a = x[i], b = x[i + stride];
                x[i] = a + b;
                x[i + stride] = a - b;
            }
        }
        for (int i = 0; round_each && i < count; i += LANES) store16(x + i, round16_f16(load16(x + i)));
    }
}

/* Quantises a token's heads, `count` numbers; x is overwritten. */
static void quantize_token(float *x, int count, int interleave, const QuantKV *to, int64_t slot) {
    int center = 1 << (to->bits - 1);
    uint8_t *codes = to->codes + slot * count * to->bits / 8;
    uint16_t *scales = to->scales + slot * (count / KV_GROUP);
    for (int i = 0; i < count; i += LANES) store16(x + i, round16_f16(load16(x + i)));
    hadamard(x, count, interleave, 1);
    for (int g = 0; g < count / KV_GROUP; g++, x += KV_GROUP) {
        float max_abs = 0;
        int code[KV_GROUP];
        for (int i = 0; i < KV_GROUP; i++) max_abs = fabsf(x[i]) > max_abs ? fabsf(x[i]) : max_abs;
        scales[g] = f16_from_f32(max_abs / (float)center);
        for (int i = 0; i < KV_GROUP; i += LANES) {
            f32x16 ratio = round16_f16(load16(x + i) / (max_abs > 0 ? max_abs : 1.0f));
            f32x16 level = round16_f16(ratio * (float)center + (float)center);
            level = (level + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
            for (int n = 0; n < LANES; n++) code[i + n] = level[n] > 2 * center - 1 ? 2 * center - 1 : (int)level[n];
        }
        for (int i = 0; i < KV_GROUP; i++) code[i] = max_abs > 0 ? code[i] : 0;
        if (to->bits == 8)
            for (int i = 0; i < KV_GROUP; i++) *codes++ = (uint8_t)code[i];
        else
            for (int i = 0; i < KV_GROUP; i += 2) *codes++ = (uint8_t)(code[i] | code[i + 1] << 4);
    }
}

/* The upper bytes of a token's heads as float16. */
static void store_token_fp8(const float *x, int count, const QuantKV *to, int64_t slot) {
    uint8_t *codes = to->codes + slot * count;
    for (int i = 0; i < count; i += LANES) {
        uint16_t halves[LANES];
        store16_f16(halves, load16(x + i));
        for (int n = 0; n < LANES; n++) codes[i + n] = (uint8_t)(halves[n] >> 8);
    }
}

static void store_kv_quant(float *x, int count, int interleave, const QuantKV *to, int64_t slot) {
    if (to->bits == FP8_E5M2)
        store_token_fp8(x, count, to, slot);
    else
        quantize_token(x, count, interleave, to, slot);
}

/* Stores new token i. new_keys (rows * tokens, kv_heads, head_dim) keeps its keys unquantised, after RoPE; work has
   room for one token. */
static void append_kv_quant(const AttnArgs *args, int i, float *new_keys, float *work) {
    const AttnParams *params = args->params;
    int width = params->kv_heads * params->head_dim, interleave = (int)args->hadamard_interleave;
    int64_t slot = kv_slot(args, i / args->tokens, args->past_lens[i / args->tokens] + i % args->tokens);
    float *key = new_keys + (long)i * width;
    for (int n = 0; n < width; n += params->head_dim)
        rope(params, args->k + (long)i * width + n, args->positions[i], key + n);
    memcpy(work, key, width * sizeof(float));
    store_kv_quant(work, width, interleave, &args->quant_keys, slot);
    memcpy(work, args->v + (long)i * width, width * sizeof(float));
    store_kv_quant(work, width, interleave, &args->quant_values, slot);
}

/* One register of a group's codes as floats: places 0 to 15 and 16 to 31 of 8 bits, even and odd places of 4. */
INLINE void unpack_group_reg(const uint8_t *group, int bits, int reg, f32v *low, f32v *high) {
    i32v bytes = i32_load_u8(group + reg * VLEN);
    *low = f32_from_i32(bits == 4 ? i32_and(bytes, i32_set1(15)) : bytes);
    *high = f32_from_i32(bits == 4 ? i32_shr(bytes, 4) : i32_load_u8(group + LANES + reg * VLEN));
}

static int packed_place(int bits, int i) { return bits == 4 ? i % 2 * LANES + i / 2 : i; }

static void to_packed_order(const float *from, int count, int bits, float *to) {
    for (int at = 0; at < count; at += KV_GROUP)
        for (int i = 0; i < KV_GROUP; i++) to[at + packed_place(bits, i)] = from[at + i];
}

static void from_packed_order(const float *from, int count, int bits, float *to) {
    for (int at = 0; at < count; at += KV_GROUP)
        for (int i = 0; i < KV_GROUP; i++) to[at + i] = from[at + packed_place(bits, i)];
}

/* One head of an old token; `at` is the index of its first number in all pages. */
static void dequantize_head(const QuantKV *from, int64_t at, int dim, int interleave, float *out) {
    int bits = (int)from->bits;
    if (bits == FP8_E5M2) {
        for (int d = 0; d < dim; d++) out[d] = f16_to_f32((uint16_t)(from->codes[at + d] << 8));
        return;
    }
    float packed[MAX_HEAD_DIM];
    f32v center = f32_set1((float)(1 << (bits - 1)));
    for (int g = 0; g < dim / KV_GROUP; g++) {
        const uint8_t *codes = from->codes + (at + g * KV_GROUP) * bits / 8;
        f32v scale = f32_set1(f16_to_f32(from->scales[at / KV_GROUP + g]) / (float)KV_GROUP);
        EACH_LANE_REG(reg) {
            float *to = packed + g * KV_GROUP + reg * VLEN;
            f32v low, high;
            unpack_group_reg(codes, bits, reg, &low, &high);
            low = f32_mul(f32_sub(low, center), scale);
            high = f32_mul(f32_sub(high, center), scale);
            f32_store(to, low);
            f32_store(to + LANES, high);
        }
    }
    from_packed_order(packed, dim, bits, out);
    hadamard(out, dim, interleave, 0);
}

#endif
