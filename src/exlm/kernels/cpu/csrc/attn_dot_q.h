/* The two loops of attention over codes of 4 or 8 bits, a float16 scale for each 32: what looking.h is for floats.

   A group's codes become floats once for all query heads that share them. Products are rounded before they are added,
   and sums have the same order as if every head and token were computed by itself. */

#ifndef EXLM_LOOKING_CODED_H
#define EXLM_LOOKING_CODED_H

#include "attn_dot.h"

enum { KV_GROUP = 32, PREFETCH_TOKENS = 32 };

/* Numbers kept as codes: (tokens of all pages, kv_heads, head_dim · bits / 8), and their scales. */
typedef struct {
    uint8_t *codes;
    uint16_t *scales; /* (…, head_dim / 32) */
    int64_t bits;
} QuantKV;

/* Tokens of one key head that lie side by side; `gap` numbers from one to the next. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales;
    int64_t token_stride, n_tokens;
    int dim, bits;
} QuantTokens;

INLINE QuantTokens quant_tokens(const QuantKV *from, int64_t first, int64_t n_tokens, int dim, int width, int head) {
    int64_t at = first * width + (int64_t)head * dim;
    int bits = (int)from->bits;
    return (QuantTokens){from->codes + at * bits / 8, from->scales + at / KV_GROUP, width, n_tokens, dim, bits};
}

INLINE float load_f16_scalar(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    return f16_to_f32(bits);
#endif
}

/* A part of a group's codes as floats: places 0 to 15 and 16 to 31 of 8 bits, even and odd places of 4. */
INLINE void unpack_group_reg(const uint8_t *group, int bits, int reg, f32v *low, f32v *high) {
    i32v bytes = i32_load_u8(group + reg * VLEN);
    *low = f32_from_i32(bits == 4 ? i32_and(bytes, i32_set1(15)) : bytes);
    *high = f32_from_i32(bits == 4 ? i32_shr(bytes, 4) : i32_load_u8(group + LANES + reg * VLEN));
}

INLINE void prefetch_tokens(const QuantTokens *t, int64_t n, int valid) {
    for (int k = 0; k < valid; k++) __builtin_prefetch(t->codes + (n + k + PREFETCH_TOKENS) * t->token_stride * t->bits / 8, 0, 2);
}

#define EACH_HEAD _Pragma("GCC unroll 3") for (int h = 0; h < heads; h++)
#define EACH_KEY _Pragma("GCC unroll 4") for (int k = 0; k < DOT_KEYS; k++)
#define EACH_LANE_REG _Pragma("GCC unroll 4") for (int reg = 0; reg < LANE_REGS; reg++)

/* Scores (heads, count) of up to KEYS tokens from n on. `q` (heads, dim) is turned and folded, `sums` (heads, groups)
   has each group's sum times the centre. */
INLINE void qk_heads_q(const QuantTokens *t, int64_t n, int heads, int bits, const float *q, const float *sums,
                             float scale, float *scores, int64_t count) {
    int valid = t->n_tokens - n < DOT_KEYS ? (int)(t->n_tokens - n) : DOT_KEYS, groups = t->dim / KV_GROUP;
    f32v sum[DOT_HEADS][DOT_KEYS][LANE_REGS];
    float center_sums[DOT_HEADS][DOT_KEYS] = {0};
    EACH_HEAD EACH_KEY EACH_LANE_REG sum[h][k][reg] = f32_set1(0);
    for (int g = 0; g < groups; g++) {
        const uint8_t *group[DOT_KEYS];
        float factor[DOT_KEYS];
        EACH_KEY {
            int64_t at = (n + (k < valid ? k : 0)) * t->token_stride;
            group[k] = t->codes + (at + g * KV_GROUP) * bits / 8;
            factor[k] = load_f16_scalar(t->scales[at / KV_GROUP + g]);
        }
        EACH_HEAD EACH_KEY center_sums[h][k] += sums[h * groups + g] * factor[k];
        EACH_LANE_REG {
            f32v low[DOT_KEYS], high[DOT_KEYS];
            EACH_KEY {
                unpack_group_reg(group[k], bits, reg, low + k, high + k);
                low[k] = f32_mul(low[k], f32_set1(factor[k])), high[k] = f32_mul(high[k], f32_set1(factor[k]));
            }
            EACH_HEAD {
                const float *own = q + h * t->dim + g * KV_GROUP + reg * VLEN;
                f32v a = f32_load(own), b = f32_load(own + LANES);
                EACH_KEY sum[h][k][reg] = sum[h][k][reg] + f32_mul(a, low[k]) + f32_mul(b, high[k]);
            }
        }
    }
    EACH_HEAD {
        float found[4] = {0};
        f32x16 whole[4] = {{0}};
        memcpy(whole, sum[h], DOT_KEYS * sizeof *whole);
        if (DOT_KEYS == 4) sum16_x4(whole[0], whole[1], whole[2], whole[3], found);
        else
            EACH_KEY found[k] = sum16(whole[k]);
        for (int k = 0; k < valid; k++) scores[h * count + n + k] = (found[k] - center_sums[h][k]) * scale;
    }
}

/* sums (heads, dim) += shares (heads, count) · values; `taken` (heads, groups) is what each group's centre is to be
   multiplied with. */
INLINE void pv_heads_q(const QuantTokens *t, int heads, int bits, const float *probs, int64_t count, float *sums,
                           float *center_sums) {
    int groups = t->dim / KV_GROUP;
    for (int g = 0; g < groups; g++) {
        EACH_LANE_REG {
            f32v low[DOT_HEADS], high[DOT_HEADS];
            float all[DOT_HEADS];
            EACH_HEAD {
                const float *own = sums + h * t->dim + g * KV_GROUP + reg * VLEN;
                low[h] = f32_load(own), high[h] = f32_load(own + LANES), all[h] = center_sums[h * groups + g];
            }
            for (int64_t n = 0; n < t->n_tokens; n++) {
                f32v a, b;
                float factor = load_f16_scalar(t->scales[n * t->token_stride / KV_GROUP + g]);
                unpack_group_reg(t->codes + (n * t->token_stride + g * KV_GROUP) * bits / 8, bits, reg, &a, &b);
                EACH_HEAD {
                    float weight = factor * probs[h * count + n];
                    low[h] = low[h] + f32_mul(a, f32_set1(weight)), high[h] = high[h] + f32_mul(b, f32_set1(weight));
                    all[h] += weight;
                }
            }
            EACH_HEAD {
                float *own = sums + h * t->dim + g * KV_GROUP + reg * VLEN;
                f32_store(own, low[h]);
                f32_store(own + LANES, high[h]);
                if (reg == LANE_REGS - 1) center_sums[h * groups + g] = all[h];
            }
        }
    }
}

#undef EACH_HEAD
#undef EACH_KEY
#undef EACH_LANE_REG

/* Scores (shared, count) of some old tokens, of every query head that shares the key head. */
static void qk_block_q(QuantTokens t, int heads_per_kv, const float *q, const float *sums, float scale, float *scores,
                        int64_t count) {
#define SCORE(heads, bits)                                                                                       \
    qk_heads_q(&t, n, heads, bits, q + h * t.dim, sums + h * (t.dim / KV_GROUP), scale, scores + h * count, count)
#define OWN(heads) t.bits == 4 ? SCORE(heads, 4) : SCORE(heads, 8)
    for (int64_t n = 0; n < t.n_tokens; n += DOT_KEYS) {
        prefetch_tokens(&t, n, DOT_KEYS);
        for (int h = 0; h < heads_per_kv; h += DOT_HEADS) heads_per_kv - h > 2 ? OWN(3) : heads_per_kv - h == 2 ? OWN(2) : OWN(1);
    }
#undef OWN
#undef SCORE
}

/* sums (shared, dim), turned and folded, += shares (shared, count) · some old tokens' values. */
static void pv_block_q(QuantTokens t, int heads_per_kv, const float *probs, int64_t count, float *sums, float *center_sums) {
#define ADD(heads, bits)                                                                                         \
    pv_heads_q(&n_tokens, heads, bits, probs + h * count + n, count, sums + h * t.dim, center_sums + h * (t.dim / KV_GROUP))
#define OWN(heads) t.bits == 4 ? ADD(heads, 4) : ADD(heads, 8)
    QuantTokens n_tokens = t;
    for (int64_t n = 0; n < t.n_tokens; n += n_tokens.n_tokens) {
        n_tokens.n_tokens = t.n_tokens - n < PREFETCH_TOKENS ? t.n_tokens - n : PREFETCH_TOKENS;
        n_tokens.codes = t.codes + n * t.token_stride * t.bits / 8, n_tokens.scales = t.scales + n * t.token_stride / KV_GROUP;
        prefetch_tokens(&n_tokens, 0, (int)n_tokens.n_tokens);
        for (int h = 0; h < heads_per_kv; h += DOT_HEADS) heads_per_kv - h > 2 ? OWN(3) : heads_per_kv - h == 2 ? OWN(2) : OWN(1);
    }
#undef OWN
#undef ADD
}

#endif
