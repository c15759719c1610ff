/* Decode attention over quantised pages (kv_quant.h). New tokens are quantised bit for bit as the cache defines it, but
   attention reads them unquantised. Old ones are read without undoing the transform: H is symmetric, so
   q . Hx = Hq . x. The query is transformed once and so is the output; over codes of 4 bits both are in packed order.
   The centre of the codes, 2^(bits - 1), is subtracted by group: sum q * (code - centre) = sum q * code -
   centre * sum q.

   Products are rounded before they are added, in the same order as if every head and token were computed by itself. */

#ifndef EXLM_ATTN_DECODE_QUANT_H
#define EXLM_ATTN_DECODE_QUANT_H

#include "attn_decode.h"
#include "kv_quant.h"

enum { PREFETCH_TOKENS = 32 };

/* Tokens of one kv head that lie side by side, token_stride numbers apart. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales;
    int64_t token_stride, n_tokens;
    int dim, bits;
} QuantTokens;

INLINE QuantTokens quant_tokens(const QuantKV *from, int64_t slot, int64_t n_tokens, int dim, int width, int head) {
    int64_t at = slot * width + (int64_t)head * dim;
    int bits = (int)from->bits;
    return (QuantTokens){from->codes + at * bits / 8, from->scales + at / KV_GROUP, width, n_tokens, dim, bits};
}

INLINE void prefetch_tokens(const QuantTokens *t, int64_t n, int count) {
    for (int k = 0; k < count; k++)
        __builtin_prefetch(t->codes + (n + k + PREFETCH_TOKENS) * t->token_stride * t->bits / 8, 0, 2);
}

/* scores (heads, count) of up to DOT_KEYS tokens from n on. q (heads, dim) is transformed and in packed order;
   center_q (heads, groups) is centre * sum q. */
INLINE void qk_heads_quant(const QuantTokens *t, int64_t n, int heads, int bits, const float *q, const float *center_q,
                           float scale, float *scores, int64_t count) {
    int valid = t->n_tokens - n < DOT_KEYS ? (int)(t->n_tokens - n) : DOT_KEYS, groups = t->dim / KV_GROUP;
    f32v sum[DOT_HEADS][DOT_KEYS][LANE_REGS];
    float centers[DOT_HEADS][DOT_KEYS] = {0};
    EACH_HEAD(h)
        EACH_KEY(k)
            EACH_LANE_REG(reg) sum[h][k][reg] = f32_set1(0);
    for (int g = 0; g < groups; g++) {
        const uint8_t *group[DOT_KEYS];
        float factor[DOT_KEYS];
        EACH_KEY(k) {
            int64_t at = (n + (k < valid ? k : 0)) * t->token_stride;
            group[k] = t->codes + (at + g * KV_GROUP) * bits / 8;
            factor[k] = f16_to_f32(t->scales[at / KV_GROUP + g]);
        }
        EACH_HEAD(h)
            EACH_KEY(k) centers[h][k] += center_q[h * groups + g] * factor[k];
        EACH_LANE_REG(reg) {
            f32v low[DOT_KEYS], high[DOT_KEYS];
            EACH_KEY(k) {
                unpack_group_reg(group[k], bits, reg, low + k, high + k);
                low[k] = f32_mul(low[k], f32_set1(factor[k]));
                high[k] = f32_mul(high[k], f32_set1(factor[k]));
            }
            EACH_HEAD(h) {
                const float *group_q = q + h * t->dim + g * KV_GROUP + reg * VLEN;
                f32v a = f32_load(group_q), b = f32_load(group_q + LANES);
                EACH_KEY(k) sum[h][k][reg] = sum[h][k][reg] + f32_mul(a, low[k]) + f32_mul(b, high[k]);
            }
        }
    }
    EACH_HEAD(h) {
        float dots[DOT_KEYS];
        sum_keys(sum[h], dots);
        for (int k = 0; k < valid; k++) scores[h * count + n + k] = (dots[k] - centers[h][k]) * scale;
    }
}

/* sums (heads, dim), in packed order, += probs (heads, count) times values; center_sums (heads, groups) += the factors
   of the centre. */
INLINE void pv_heads_quant(const QuantTokens *t, int heads, int bits, const float *probs, int64_t count, float *sums,
                           float *center_sums) {
    int groups = t->dim / KV_GROUP;
    for (int g = 0; g < groups; g++)
        EACH_LANE_REG(reg) {
            f32v low[DOT_HEADS], high[DOT_HEADS];
            float centers[DOT_HEADS];
            EACH_HEAD(h) {
                const float *from = sums + h * t->dim + g * KV_GROUP + reg * VLEN;
                low[h] = f32_load(from);
                high[h] = f32_load(from + LANES);
                centers[h] = center_sums[h * groups + g];
            }
            for (int64_t n = 0; n < t->n_tokens; n++) {
                f32v a, b;
                float factor = f16_to_f32(t->scales[n * t->token_stride / KV_GROUP + g]);
                unpack_group_reg(t->codes + (n * t->token_stride + g * KV_GROUP) * bits / 8, bits, reg, &a, &b);
                EACH_HEAD(h) {
                    float weight = factor * probs[h * count + n];
                    low[h] = low[h] + f32_mul(a, f32_set1(weight));
                    high[h] = high[h] + f32_mul(b, f32_set1(weight));
                    centers[h] += weight;
                }
            }
            EACH_HEAD(h) {
                float *to = sums + h * t->dim + g * KV_GROUP + reg * VLEN;
                f32_store(to, low[h]);
                f32_store(to + LANES, high[h]);
                if (reg == LANE_REGS - 1) center_sums[h * groups + g] = centers[h];
            }
        }
}

/* scores (heads_per_kv, count) of old tokens. */
static void qk_block_quant(const QuantTokens *t, int heads_per_kv, const float *q, const float *center_q, float scale,
                           float *scores, int64_t count) {
    int groups = t->dim / KV_GROUP;
    for (int64_t n = 0; n < t->n_tokens; n += DOT_KEYS) {
        prefetch_tokens(t, n, DOT_KEYS);
        for (int h = 0; h < heads_per_kv; h += DOT_HEADS) {
            const float *block_q = q + h * t->dim, *centers = center_q + h * groups;
            float *to = scores + h * count;
#define QK4(heads) qk_heads_quant(t, n, heads, 4, block_q, centers, scale, to, count)
#define QK8(heads) qk_heads_quant(t, n, heads, 8, block_q, centers, scale, to, count)
            if (t->bits == 4) {
                SWITCH_HEADS(heads_per_kv - h, QK4);
            } else {
                SWITCH_HEADS(heads_per_kv - h, QK8);
            }
#undef QK4
#undef QK8
        }
    }
}

/* sums (heads_per_kv, dim) and center_sums (heads_per_kv, groups) += probs (heads_per_kv, count) times old values. */
static void pv_block_quant(const QuantTokens *t, int heads_per_kv, const float *probs, int64_t count, float *sums,
                           float *center_sums) {
    int groups = t->dim / KV_GROUP;
    QuantTokens part = *t;
    for (int64_t n = 0; n < t->n_tokens; n += part.n_tokens) {
        part.n_tokens = t->n_tokens - n < PREFETCH_TOKENS ? t->n_tokens - n : PREFETCH_TOKENS;
        part.codes = t->codes + n * t->token_stride * t->bits / 8;
        part.scales = t->scales + n * t->token_stride / KV_GROUP;
        prefetch_tokens(&part, 0, (int)part.n_tokens);
        for (int h = 0; h < heads_per_kv; h += DOT_HEADS) {
            const float *p = probs + h * count + n;
            float *to = sums + h * t->dim, *centers = center_sums + h * groups;
#define PV4(heads) pv_heads_quant(&part, heads, 4, p, count, to, centers)
#define PV8(heads) pv_heads_quant(&part, heads, 8, p, count, to, centers)
            if (t->bits == 4) {
                SWITCH_HEADS(heads_per_kv - h, PV4);
            } else {
                SWITCH_HEADS(heads_per_kv - h, PV8);
            }
#undef PV4
#undef PV8
        }
    }
}

typedef struct {
    const AttnArgs *args;
    float *new_keys, *work; /* (rows * tokens, kv_heads, head_dim) each */
    float *scratch;         /* (chunks, scratch_size) */
    int64_t scratch_size;
} QuantDecodeJob;

static void append_quant_chunk(void *arg, int i) {
    const QuantDecodeJob *job = arg;
    const AttnParams *params = job->args->params;
    append_kv_quant(job->args, i, job->new_keys, job->work + (long)i * params->kv_heads * params->head_dim);
}

/* The tokens of a kv head that the query heads of a token see: `count` from `first` on, of which `old` are codes. */
typedef struct {
    int row, head, heads_per_kv;
    int64_t first, old, count;
} KvView;

/* One query head's sum over old values, still transformed and in packed order, becomes its output. */
static void finish_head_quant(const QuantDecodeJob *job, const KvView *view, const float *probs, float denominator,
                              float *sum, const float *center_sums, float *out) {
    const AttnArgs *args = job->args;
    const AttnParams *params = args->params;
    int dim = params->head_dim, width = params->kv_heads * dim, bits = (int)args->quant_values.bits;
    float plain[MAX_HEAD_DIM], center = (float)(1 << (bits - 1));
    for (int g = 0; g < dim / KV_GROUP; g++)
        for (int n = 0; n < KV_GROUP; n++) sum[g * KV_GROUP + n] -= center_sums[g] * center;
    from_packed_order(sum, dim, bits, plain);
    hadamard(plain, dim, (int)args->hadamard_interleave, 0);
    for (int d = 0; d < dim; d++) plain[d] /= (float)KV_GROUP;
    for (int64_t j = view->old; j < view->count; j++) {
        long token = (long)view->row * args->tokens + (view->first + j - args->past_lens[view->row]);
        const float *value = args->v + token * width + view->head * dim;
        for (int d = 0; d < dim; d++) plain[d] += value[d] * probs[j];
    }
    for (int d = 0; d < dim; d++) out[d] = plain[d] / denominator;
}

/* From scores (heads_per_kv, count), with room for as many denominators behind them, to outputs. sums (heads_per_kv,
   dim) and center_sums (heads_per_kv, groups) are scratch. */
static void finish_heads_quant(const QuantDecodeJob *job, const KvView *view, float *scores, float *sums,
                               float *center_sums, float *out) {
    const AttnArgs *args = job->args;
    int dim = args->params->head_dim, width = args->params->kv_heads * dim, groups = dim / KV_GROUP;
    int heads = view->heads_per_kv;
    int64_t count = view->count, in_page;
    float *denominators = scores + heads * count;
    for (int h = 0; h < heads; h++) denominators[h] = softmax_numerators(scores + h * count, count);
    memset(sums, 0, heads * dim * sizeof(float));
    memset(center_sums, 0, heads * groups * sizeof(float));
    for (int64_t j = 0; j < view->old; j += in_page) {
        int64_t slot = page_run(args, view->row, view->first + j, view->old - j, &in_page);
        QuantTokens values = quant_tokens(&args->quant_values, slot, in_page, dim, width, view->head);
        pv_block_quant(&values, heads, scores + j, count, sums, center_sums);
    }
    for (int h = 0; h < heads; h++)
        finish_head_quant(job, view, scores + h * count, denominators[h], sums + h * dim, center_sums + h * groups,
                          out + h * dim);
}

/* One token and the query heads of one kv head. */
static void decode_quant_chunk(void *arg, int chunk) {
    const QuantDecodeJob *job = arg;
    const AttnArgs *args = job->args;
    const AttnParams *params = args->params;
    int heads = params->heads / params->kv_heads;
    int dim = params->head_dim, groups = dim / KV_GROUP, width = params->kv_heads * dim;
    int head = chunk % params->kv_heads, i = chunk / params->kv_heads, row = i / args->tokens;
    int bits = (int)args->quant_keys.bits, interleave = (int)args->hadamard_interleave;
    long first_head = (long)i * params->heads + head * heads;
    int64_t past = args->past_lens[row], pos = past + i % args->tokens, first = window_start(params, pos);
    int64_t count = pos - first + 1, old = past > first ? past - first : 0, in_page;
    KvView view = {row, head, heads, first, old, count};
    float *q = job->scratch + chunk * job->scratch_size, *transformed = q + heads * dim;
    float *center_q = transformed + heads * dim, *scores = center_q + heads * groups, center = (float)(1 << (bits - 1));
    for (int h = 0; h < heads; h++) {
        float *head_q = q + h * dim, work[MAX_HEAD_DIM];
        rope(params, args->q + (first_head + h) * dim, args->positions[i], head_q);
        memcpy(work, head_q, dim * sizeof(float));
        hadamard(work, dim, interleave, 0);
        to_packed_order(work, dim, bits, transformed + h * dim);
        for (int g = 0; g < groups; g++) {
            float sum = 0;
            for (int n = 0; n < KV_GROUP; n++) sum += work[g * KV_GROUP + n];
            center_q[h * groups + g] = sum * center;
        }
    }
    for (int64_t j = 0; j < old; j += in_page) {
        int64_t slot = page_run(args, row, first + j, old - j, &in_page);
        QuantTokens keys = quant_tokens(&args->quant_keys, slot, in_page, dim, width, head);
        qk_block_quant(&keys, heads, transformed, center_q, params->scale / (float)KV_GROUP, scores + j, count);
    }
    for (int64_t j = old; j < count; j++) {
        const float *key = job->new_keys + ((long)row * args->tokens + (first + j - past)) * width + head * dim;
        for (int h = 0; h < heads; h++) {
            f32x16 sum = {0};
            for (int d = 0; d < dim; d += LANES) sum += load16(q + h * dim + d) * load16(key + d);
            scores[h * count + j] = sum16(sum) * params->scale;
        }
    }
    finish_heads_quant(job, &view, scores, transformed, center_q, args->out + first_head * dim);
}

/* Returns 0, or 1 if there is no memory. */
static int attn_decode_quant(const AttnArgs *args, int64_t longest, int threads) {
    const AttnParams *params = args->params;
    int chunks = args->rows * args->tokens * params->kv_heads, heads = params->heads / params->kv_heads;
    long new_numbers = (long)args->rows * args->tokens * params->kv_heads * params->head_dim;
    QuantDecodeJob job = {.args = args};
    job.scratch_size = (int64_t)heads * (2 * params->head_dim + params->head_dim / KV_GROUP + longest + 1) + LANES;
    job.new_keys = malloc((2 * new_numbers + chunks * job.scratch_size) * sizeof(float));
    if (!job.new_keys) return 1;
    job.work = job.new_keys + new_numbers;
    job.scratch = job.work + new_numbers;
    parallel_for(append_quant_chunk, &job, args->rows * args->tokens, threads);
    parallel_for(decode_quant_chunk, &job, chunks, longest * chunks < 512 ? 1 : threads);
    free(job.new_keys);
    return 0;
}

#endif
