/* Decode attention (up to MAX_DECODE_TOKENS new tokens of a row) over float32 or float16 pages. New tokens, too, are
   read as they are stored; float16 becomes float32 in registers and all sums are float32.

   All query heads that share a kv head go over its keys together, DECODE_BLOCK tokens at a time as they lie in memory.
   A score is sixteen sums over the head in order, added up in one order; an output sums over tokens in order. */

#ifndef EXLM_ATTN_DECODE_H
#define EXLM_ATTN_DECODE_H

#include "attn_common.h"

enum { DECODE_BLOCK = 8, PREFETCH_BLOCKS = 4 };

/* dots (DOT_KEYS): each key's sixteen sums, added up. */
INLINE void sum_keys(f32v (*sums)[LANE_REGS], float *dots) {
    f32x16 lanes[DOT_KEYS];
    memcpy(lanes, sums, sizeof lanes);
#if defined(__AVX512F__)
    sum16_x4(lanes[0], lanes[1], lanes[2], lanes[3], dots);
#else
    EACH_KEY(k) dots[k] = sum16(lanes[k]);
#endif
}

/* scores (heads, count) of up to DOT_KEYS keys. */
INLINE void qk_heads(const float *q, const char *const *keys, int valid, int dim, int heads, int kv_f16, float scale,
                     float *scores, int64_t count) {
    f32v sum[DOT_HEADS][DOT_KEYS][LANE_REGS];
    EACH_HEAD(h)
        EACH_KEY(k)
            EACH_LANE_REG(reg) sum[h][k][reg] = f32_set1(0);
    for (int d = 0; d < dim; d += LANES)
        EACH_LANE_REG(reg) {
            int at = d + reg * VLEN;
            f32v key[DOT_KEYS];
            EACH_KEY(k) key[k] = load_kv(keys[k], at, kv_f16);
            EACH_HEAD(h)
                EACH_KEY(k) sum[h][k][reg] = f32_fma(sum[h][k][reg], key[k], f32_load(q + h * dim + at));
        }
    EACH_HEAD(h) {
        float dots[DOT_KEYS];
        sum_keys(sum[h], dots);
        EACH_KEY(k) dots[k] *= scale;
        if (valid == DOT_KEYS)
            memcpy(scores + h * count, dots, DOT_KEYS * sizeof(float));
        else
            memcpy(scores + h * count, dots, valid * sizeof(float));
    }
}

/* scores (heads_per_kv, count) of n_keys keys, `width` numbers apart; the same number of tokens from `prefetch` on is
   prefetched into L2. */
INLINE void qk_block(const float *q, const char *key, const char *prefetch, int64_t n_keys, int dim, long width,
                     int heads_per_kv, int kv_f16, float scale, float *scores, int64_t count) {
    long step = kv_bytes(width, kv_f16), head_bytes = kv_bytes(dim, kv_f16);
    for (int64_t n = 0; n < n_keys; n += DOT_KEYS) {
        int valid = n_keys - n < DOT_KEYS ? (int)(n_keys - n) : DOT_KEYS;
        const char *keys[DOT_KEYS];
        for (int k = 0; k < DOT_KEYS; k++) keys[k] = key + (n + (k < valid ? k : 0)) * step;
        for (int k = 0; k < DOT_KEYS; k++)
            for (long at = 0; at < head_bytes; at += CACHE_LINE)
                __builtin_prefetch(prefetch + (n + k) * step + at, 0, 2);
        for (int h = 0; h < heads_per_kv; h += DOT_HEADS) {
#define QK(heads) qk_heads(q + h * dim, keys, valid, dim, heads, kv_f16, scale, scores + h * count + n, count)
            SWITCH_HEADS(heads_per_kv - h, QK);
#undef QK
        }
    }
}

/* sums (heads, dim) += probs (heads, count) times n_values values, in `regs` registers of their numbers. */
INLINE void pv_heads(const char *value, const char *prefetch, int64_t n_values, long width, const float *probs,
                     int64_t count, int heads, int regs, int kv_f16, int dim, float *sums) {
    f32v sum[DOT_HEADS][DOT_REGS];
    long step = kv_bytes(width, kv_f16), bytes = kv_bytes(regs * VLEN, kv_f16);
    EACH_HEAD(h)
        EACH_REG(v) sum[h][v] = f32_load(sums + h * dim + v * VLEN);
    for (int64_t n = 0; n < n_values; n++, value += step, prefetch += step) {
        f32v numbers[DOT_REGS];
        EACH_REG(v) numbers[v] = load_kv(value, v * VLEN, kv_f16);
#pragma GCC unroll 4
        for (long at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch(prefetch + at, 0, 2);
        EACH_HEAD(h)
            EACH_REG(v) sum[h][v] = f32_fma(sum[h][v], numbers[v], f32_set1(probs[h * count + n]));
    }
    EACH_HEAD(h)
        EACH_REG(v) f32_store(sums + h * dim + v * VLEN, sum[h][v]);
}

/* sums (heads_per_kv, dim) += probs (heads_per_kv, count) times n_values values. */
INLINE void pv_block(const char *value, const char *prefetch, int64_t n_values, long width, const float *probs,
                     int64_t count, int heads_per_kv, int kv_f16, int dim, float *sums) {
    for (int h = 0; h < heads_per_kv; h += DOT_HEADS)
        for (int d = 0, regs; d < dim; d += regs * VLEN) {
            int heads = heads_per_kv - h < DOT_HEADS ? heads_per_kv - h : DOT_HEADS;
            const char *part = value + kv_bytes(d, kv_f16), *next = prefetch + kv_bytes(d, kv_f16);
            const float *p = probs + h * count;
            float *to = sums + h * dim + d;
            regs = dim - d < DOT_REGS * VLEN ? 1 : DOT_REGS;
            if (regs == 1)
                for (int n = 0; n < heads; n++)
                    pv_heads(part, next, n_values, width, p + n * count, count, 1, 1, kv_f16, dim, to + n * dim);
            else {
#define PV(heads) pv_heads(part, next, n_values, width, p, count, heads, DOT_REGS, kv_f16, dim, to)
                SWITCH_HEADS(heads, PV);
#undef PV
            }
        }
}

typedef struct {
    const AttnArgs *args;
    float *scratch; /* (rows * tokens * kv_heads, scratch_size) */
    int64_t scratch_size;
    int kv_heads_per_chunk;
    int append_in_chunk; /* chunks are whole tokens, one a row: each stores its own */
} DecodeJob;

/* The address read PREFETCH_BLOCKS blocks after block n: a row's keys are followed by its values, then by the next
   row's keys. */
INLINE const char *prefetch_target(const AttnArgs *args, int row, int64_t first, int64_t count, int64_t n, int head,
                                   int kv_f16) {
    int64_t blocks = (count + DECODE_BLOCK - 1) / DECODE_BLOCK;
    n += PREFETCH_BLOCKS;
    if (n < blocks) return kv_pointer(args, args->keys, row, first + n * DECODE_BLOCK, head, kv_f16);
    if (n < 2 * blocks) return kv_pointer(args, args->values, row, first + (n - blocks) * DECODE_BLOCK, head, kv_f16);
    if (row + 1 < args->rows) row++;
    first = window_start(args->params, args->past_lens[row]);
    n = first + (n - 2 * blocks) * DECODE_BLOCK;
    return kv_pointer(args, args->keys, row, n < args->past_lens[row] ? n : first, head, kv_f16);
}

/* One token and the query heads of some kv heads. */
INLINE void decode_token(const DecodeJob *job, int chunk, int kv_f16) {
    const AttnArgs *args = job->args;
    const AttnParams *params = args->params;
    int heads_per_kv = params->heads / params->kv_heads;
    int kv_heads = job->kv_heads_per_chunk, heads = kv_heads * heads_per_kv;
    int chunks_per_token = params->kv_heads / kv_heads, dim = params->head_dim, width = params->kv_heads * dim;
    int i = chunk / chunks_per_token, row = i / args->tokens, kv_head = chunk % chunks_per_token * kv_heads;
    long first_head = (long)i * params->heads + kv_head * heads_per_kv, head_bytes = kv_bytes(dim, kv_f16);
    int64_t pos = args->past_lens[row] + i % args->tokens, first = window_start(params, pos), count = pos - first + 1;
    int64_t in_page, block = 0;
    float *q = job->scratch + (int64_t)chunk * kv_heads * job->scratch_size;
    float *denominators = q + heads * dim, *scores = denominators + heads, *out = args->out + first_head * dim;
    if (job->append_in_chunk) append_kv(args, i);
    for (int h = 0; h < heads; h++) rope(params, args->q + (first_head + h) * dim, args->positions[i], q + h * dim);
    for (int64_t j = 0; j < count; j += in_page) {
        page_run(args, row, first + j, count - j < DECODE_BLOCK ? count - j : DECODE_BLOCK, &in_page);
        const char *key = kv_pointer(args, args->keys, row, first + j, kv_head, kv_f16);
        const char *prefetch = prefetch_target(args, row, first, count, block++, kv_head, kv_f16);
        for (int h = 0; h < heads; h += heads_per_kv, key += head_bytes, prefetch += head_bytes)
            qk_block(q + h * dim, key, prefetch, in_page, dim, width, heads_per_kv, kv_f16, params->scale,
                     scores + h * count + j, count);
    }
    memset(out, 0, heads * dim * sizeof(float));
    for (int h = 0; h < heads; h++) denominators[h] = softmax_numerators(scores + h * count, count);
    for (int64_t j = 0; j < count; j += in_page) {
        page_run(args, row, first + j, count - j < DECODE_BLOCK ? count - j : DECODE_BLOCK, &in_page);
        const char *value = kv_pointer(args, args->values, row, first + j, kv_head, kv_f16);
        const char *prefetch = prefetch_target(args, row, first, count, block++, kv_head, kv_f16);
        for (int h = 0; h < heads; h += heads_per_kv, value += head_bytes, prefetch += head_bytes)
            pv_block(value, prefetch, in_page, width, scores + h * count + j, count, heads_per_kv, kv_f16, dim,
                     out + h * dim);
    }
    for (int h = 0; h < heads; h++)
        for (int d = 0; d < dim; d += LANES) store16(out + h * dim + d, load16(out + h * dim + d) / denominators[h]);
}

static void decode_chunk(void *job, int chunk) {
    if (((const DecodeJob *)job)->args->kv_f16)
        decode_token(job, chunk, 1);
    else
        decode_token(job, chunk, 0);
}

/* Returns 0, or 1 if there is no memory. */
static int attn_decode(const AttnArgs *args, int64_t longest, int threads) {
    DecodeJob job = {.args = args};
    const AttnParams *params = args->params;
    int tokens = args->rows * args->tokens, heads = tokens * params->kv_heads;
    if (longest * heads < 512) threads = 1;
    job.kv_heads_per_chunk = tokens < 2 * threads && threads > 1 ? 1 : params->kv_heads;
    job.scratch_size = (int64_t)(params->heads / params->kv_heads) * (params->head_dim + 1 + longest) + LANES;
    job.scratch = malloc(heads * job.scratch_size * sizeof(float));
    if (!job.scratch) return 1;
    job.append_in_chunk = args->tokens == 1 && job.kv_heads_per_chunk == params->kv_heads;
    for (int i = 0; i < tokens && !job.append_in_chunk; i++) append_kv(args, i);
    parallel_for(decode_chunk, &job, heads / job.kv_heads_per_chunk, threads);
    free(job.scratch);
    return 0;
}

#endif
