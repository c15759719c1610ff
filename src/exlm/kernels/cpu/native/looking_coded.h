/* The two loops of attention over codes of 4 or 8 bits, a float16 scale for each 32: what looking.h is for floats.

   A group's codes become floats once for all query heads that share them. Products are rounded before they are added,
   and sums have the same order as if every head and token were computed by itself. */

#ifndef EXLM_LOOKING_CODED_H
#define EXLM_LOOKING_CODED_H

#include "looking.h"

enum { GROUP = 32, TOKENS_AHEAD = 32 };

/* Numbers kept as codes: (tokens of all pages, kv_heads, head_dim · bits / 8), and their scales. */
typedef struct {
    uint8_t *codes;
    uint16_t *scales; /* (…, head_dim / 32) */
    int64_t bits;
} Codes;

/* Tokens of one key head that lie side by side; `gap` numbers from one to the next. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales;
    int64_t gap, some;
    int dim, bits;
} CodedTokens;

INLINE CodedTokens coded_tokens(const Codes *from, int64_t first, int64_t some, int dim, int width, int head) {
    int64_t at = first * width + (int64_t)head * dim;
    int bits = (int)from->bits;
    return (CodedTokens){from->codes + at * bits / 8, from->scales + at / GROUP, width, some, dim, bits};
}

INLINE float one_half(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    return half(bits);
#endif
}

/* A part of a group's codes as floats: places 0 to 15 and 16 to 31 of 8 bits, even and odd places of 4. */
INLINE void unfold_part(const uint8_t *group, int bits, int part, Real *low, Real *high) {
    Whole bytes = w_bytes(group + part * WIDTH);
    *low = r_from(bits == 4 ? w_and(bytes, w_all(15)) : bytes);
    *high = r_from(bits == 4 ? w_right(bytes, 4) : w_bytes(group + LANES + part * WIDTH));
}

INLINE void ask_for_tokens(const CodedTokens *t, int64_t n, int many) {
    for (int k = 0; k < many; k++) __builtin_prefetch(t->codes + (n + k + TOKENS_AHEAD) * t->gap * t->bits / 8, 0, 2);
}

#define EACH_HEAD _Pragma("GCC unroll 3") for (int h = 0; h < heads; h++)
#define EACH_KEY _Pragma("GCC unroll 4") for (int k = 0; k < KEYS; k++)
#define EACH_PART _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)

/* Scores (heads, count) of up to KEYS tokens from n on. `q` (heads, dim) is turned and folded, `sums` (heads, groups)
   has each group's sum times the centre. */
INLINE void score_some_codes(const CodedTokens *t, int64_t n, int heads, int bits, const float *q, const float *sums,
                             float scale, float *scores, int64_t count) {
    int many = t->some - n < KEYS ? (int)(t->some - n) : KEYS, groups = t->dim / GROUP;
    Real sum[HEADS][KEYS][PARTS];
    float taken[HEADS][KEYS] = {0};
    EACH_HEAD EACH_KEY EACH_PART sum[h][k][part] = r_all(0);
    for (int g = 0; g < groups; g++) {
        const uint8_t *group[KEYS];
        float factor[KEYS];
        EACH_KEY {
            int64_t at = (n + (k < many ? k : 0)) * t->gap;
            group[k] = t->codes + (at + g * GROUP) * bits / 8;
            factor[k] = one_half(t->scales[at / GROUP + g]);
        }
        EACH_HEAD EACH_KEY taken[h][k] += sums[h * groups + g] * factor[k];
        EACH_PART {
            Real low[KEYS], high[KEYS];
            EACH_KEY {
                unfold_part(group[k], bits, part, low + k, high + k);
                low[k] = r_mul(low[k], r_all(factor[k])), high[k] = r_mul(high[k], r_all(factor[k]));
            }
            EACH_HEAD {
                const float *own = q + h * t->dim + g * GROUP + part * WIDTH;
                Real a = r_load(own), b = r_load(own + LANES);
                EACH_KEY sum[h][k][part] = sum[h][k][part] + r_mul(a, low[k]) + r_mul(b, high[k]);
            }
        }
    }
    EACH_HEAD {
        float found[4] = {0};
        Sixteen whole[4] = {{0}};
        memcpy(whole, sum[h], KEYS * sizeof *whole);
        if (KEYS == 4) four_totals(whole[0], whole[1], whole[2], whole[3], found);
        else
            EACH_KEY found[k] = total(whole[k]);
        for (int k = 0; k < many; k++) scores[h * count + n + k] = (found[k] - taken[h][k]) * scale;
    }
}

/* sums (heads, dim) += shares (heads, count) · values; `taken` (heads, groups) is what each group's centre is to be
   multiplied with. */
INLINE void add_some_codes(const CodedTokens *t, int heads, int bits, const float *shares, int64_t count, float *sums,
                           float *taken) {
    int groups = t->dim / GROUP;
    for (int g = 0; g < groups; g++) {
        EACH_PART {
            Real low[HEADS], high[HEADS];
            float all[HEADS];
            EACH_HEAD {
                const float *own = sums + h * t->dim + g * GROUP + part * WIDTH;
                low[h] = r_load(own), high[h] = r_load(own + LANES), all[h] = taken[h * groups + g];
            }
            for (int64_t n = 0; n < t->some; n++) {
                Real a, b;
                float factor = one_half(t->scales[n * t->gap / GROUP + g]);
                unfold_part(t->codes + (n * t->gap + g * GROUP) * bits / 8, bits, part, &a, &b);
                EACH_HEAD {
                    float share = factor * shares[h * count + n];
                    low[h] = low[h] + r_mul(a, r_all(share)), high[h] = high[h] + r_mul(b, r_all(share));
                    all[h] += share;
                }
            }
            EACH_HEAD {
                float *own = sums + h * t->dim + g * GROUP + part * WIDTH;
                r_store(own, low[h]);
                r_store(own + LANES, high[h]);
                if (part == PARTS - 1) taken[h * groups + g] = all[h];
            }
        }
    }
}

#undef EACH_HEAD
#undef EACH_KEY
#undef EACH_PART

/* Scores (shared, count) of some old tokens, of every query head that shares the key head. */
static void score_codes(CodedTokens t, int shared, const float *q, const float *sums, float scale, float *scores,
                        int64_t count) {
#define SCORE(heads, bits)                                                                                       \
    score_some_codes(&t, n, heads, bits, q + h * t.dim, sums + h * (t.dim / GROUP), scale, scores + h * count, count)
#define OWN(heads) t.bits == 4 ? SCORE(heads, 4) : SCORE(heads, 8)
    for (int64_t n = 0; n < t.some; n += KEYS) {
        ask_for_tokens(&t, n, KEYS);
        for (int h = 0; h < shared; h += HEADS) shared - h > 2 ? OWN(3) : shared - h == 2 ? OWN(2) : OWN(1);
    }
#undef OWN
#undef SCORE
}

/* sums (shared, dim), turned and folded, += shares (shared, count) · some old tokens' values. */
static void add_codes(CodedTokens t, int shared, const float *shares, int64_t count, float *sums, float *taken) {
#define ADD(heads, bits)                                                                                         \
    add_some_codes(&some, heads, bits, shares + h * count + n, count, sums + h * t.dim, taken + h * (t.dim / GROUP))
#define OWN(heads) t.bits == 4 ? ADD(heads, 4) : ADD(heads, 8)
    CodedTokens some = t;
    for (int64_t n = 0; n < t.some; n += some.some) {
        some.some = t.some - n < TOKENS_AHEAD ? t.some - n : TOKENS_AHEAD;
        some.codes = t.codes + n * t.gap * t.bits / 8, some.scales = t.scales + n * t.gap / GROUP;
        ask_for_tokens(&some, 0, (int)some.some);
        for (int h = 0; h < shared; h += HEADS) shared - h > 2 ? OWN(3) : shared - h == 2 ? OWN(2) : OWN(1);
    }
#undef OWN
#undef ADD
}

#endif
