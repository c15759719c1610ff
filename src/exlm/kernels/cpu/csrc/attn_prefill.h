/* Prefill attention (more than MAX_DECODE_TOKENS new tokens): for each kv head, keys and values are copied to blocks of
   ATTN_BLOCK_N tokens once, then ATTN_BLOCK_M queries at a time go over the blocks with an online softmax: the sums so
   far are rescaled when a higher score comes. A query's blocks begin at multiples of ATTN_BLOCK_N and are added in
   order. Over float pages new tokens are read as they are stored, over quantised pages unquantised.

     block of keys    (head_dim, 64)   d 0: token 0 ... 63 | d 1: token 0 ... 63 | ...   a register: d of some keys
     block of values  (64, head_dim)   token 0: d 0, 1, ... | token 1: d 0, 1, ...       a register: part of a value */

#ifndef EXLM_ATTN_PREFILL_H
#define EXLM_ATTN_PREFILL_H

#include "kv_quant.h"

/* Queries, and registers of keys or of a value's numbers, whose sums fit. */
#if defined(__AVX512F__) || (defined(__aarch64__) && !defined(EXLM_PORTABLE))
enum { ATTN_BLOCK_M = 6, ATTN_REGS = 4 };
#elif defined(__AVX2__)
enum { ATTN_BLOCK_M = 4, ATTN_REGS = 2 };
#else
enum { ATTN_BLOCK_M = 2, ATTN_REGS = 4 };
#endif
enum { ATTN_BLOCK_N = 64 };                       /* keys of a block */
enum { BLOCKS_PER_CHUNK = 8, APPEND_CHUNK = 16 }; /* blocks of queries; new tokens */

#define EACH_QUERY(r) _Pragma("GCC unroll 6") for (int r = 0; r < ATTN_BLOCK_M; r++)

typedef struct {
    const AttnArgs *args;
    float *new_keys;          /* of quantised pages: the new keys after RoPE, unquantised */
    int row, head;            /* kv head */
    int64_t count, queries;   /* keys that any query sees; queries of the kv head: tokens * heads_per_kv */
    float *q, *keys, *values; /* (queries, dim); blocks of (dim, ATTN_BLOCK_N); (blocks * ATTN_BLOCK_N, dim) */
    float *work;              /* of quantised pages: a token's heads for each chunk of new tokens */
} PrefillJob;

static void append_chunk(void *job, int chunk) {
    const PrefillJob *p = job;
    const AttnArgs *args = p->args;
    float *work = p->work + (long)chunk * args->params->kv_heads * args->params->head_dim;
    for (int i = chunk * APPEND_CHUNK; i < (chunk + 1) * APPEND_CHUNK && i < args->rows * args->tokens; i++) {
        if (args->quant_keys.bits)
            append_kv_quant(args, i, p->new_keys, work);
        else
            append_kv(args, i);
    }
}

/* Key and value of any token, of quantised pages. */
static void load_kv_head_quant(const PrefillJob *p, int64_t pos, float *key, float *value) {
    const AttnArgs *args = p->args;
    int dim = args->params->head_dim, width = args->params->kv_heads * dim, interleave = (int)args->hadamard_interleave;
    int64_t past = args->past_lens[p->row];
    if (pos >= past) {
        int64_t at = ((int64_t)p->row * args->tokens + (pos - past)) * width + p->head * dim;
        memcpy(key, p->new_keys + at, dim * sizeof(float));
        memcpy(value, args->v + at, dim * sizeof(float));
        return;
    }
    int64_t at = kv_slot(args, p->row, pos) * width + p->head * dim;
    dequantize_head(&args->quant_keys, at, dim, interleave, key);
    dequantize_head(&args->quant_values, at, dim, interleave, value);
}

/* Key and value of any token, of float pages. */
INLINE void load_kv_head(const PrefillJob *p, int64_t pos, int kv_f16, float *key, float *value) {
    const AttnArgs *args = p->args;
    const char *stored_key = kv_pointer(args, args->keys, p->row, pos, p->head, kv_f16);
    const char *stored_value = kv_pointer(args, args->values, p->row, pos, p->head, kv_f16);
    for (int d = 0; d < args->params->head_dim; d += VLEN) {
        f32v k = load_kv(stored_key, d, kv_f16), v = load_kv(stored_value, d, kv_f16);
        f32_store(key + d, k);
        f32_store(value + d, v);
    }
}

INLINE void pack_kv_block(const PrefillJob *p, int64_t block, int quantised, int kv_f16) {
    int dim = p->args->params->head_dim;
    float *keys = p->keys + block * ATTN_BLOCK_N * dim, *value = p->values + block * ATTN_BLOCK_N * dim;
    float key[MAX_HEAD_DIM];
    for (int n = 0; n < ATTN_BLOCK_N; n++, value += dim) {
        int64_t pos = block * ATTN_BLOCK_N + n;
        if (pos >= p->count) {
            memset(key, 0, dim * sizeof(float));
            memset(value, 0, dim * sizeof(float));
        } else if (quantised)
            load_kv_head_quant(p, pos, key, value);
        else
            load_kv_head(p, pos, kv_f16, key, value);
        for (int d = 0; d < dim; d++) keys[d * ATTN_BLOCK_N + n] = key[d];
    }
}

/* Lays out one block of keys and values, and an equal share of the queries, rotated and scaled. */
static void pack_kv_chunk(void *job, int chunk) {
    const PrefillJob *p = job;
    const AttnArgs *args = p->args;
    const AttnParams *params = args->params;
    int64_t blocks = (p->count + ATTN_BLOCK_N - 1) / ATTN_BLOCK_N, first = p->queries * chunk / blocks;
    int heads_per_kv = params->heads / params->kv_heads;
    if (args->quant_keys.bits)
        pack_kv_block(p, chunk, 1, 0);
    else if (args->kv_f16)
        pack_kv_block(p, chunk, 0, 1);
    else
        pack_kv_block(p, chunk, 0, 0);
    for (int64_t n = first; n < p->queries * (chunk + 1) / blocks; n++) {
        int64_t token = (int64_t)p->row * args->tokens + n / heads_per_kv;
        int64_t head = token * params->heads + p->head * heads_per_kv + n % heads_per_kv;
        float *to = p->q + n * params->head_dim;
        rope(params, args->q + head * params->head_dim, args->positions[token], to);
        for (int d = 0; d < params->head_dim; d += LANES) store16(to + d, load16(to + d) * params->scale);
    }
}

/* scores (ATTN_BLOCK_M, ATTN_BLOCK_N). */
INLINE void qk_tile(const float *const *q, const float *keys, int dim, float *scores) {
    enum { regs = ATTN_REGS };
    for (int at = 0; at < ATTN_BLOCK_N; at += ATTN_REGS * VLEN) {
        f32v sum[ATTN_BLOCK_M][ATTN_REGS];
        EACH_QUERY(r)
            EACH_REG(v) sum[r][v] = f32_set1(0);
        for (int d = 0; d < dim; d++) {
            f32v key[ATTN_REGS];
            EACH_REG(v) key[v] = f32_load(keys + d * ATTN_BLOCK_N + at + v * VLEN);
            EACH_QUERY(r) {
                f32v number = f32_set1(q[r][d]);
                EACH_REG(v) sum[r][v] = f32_fma(sum[r][v], key[v], number);
            }
        }
        EACH_QUERY(r)
            EACH_REG(v) f32_store(scores + r * ATTN_BLOCK_N + at + v * VLEN, sum[r][v]);
    }
}

/* outs += probs (ATTN_BLOCK_M, ATTN_BLOCK_N) times `count` values, in `regs` registers from number `at` on. */
INLINE void pv_tile(const float *probs, const float *values, int count, int dim, float *const *outs, int at,
                    int regs) {
    f32v sum[ATTN_BLOCK_M][ATTN_REGS];
    EACH_QUERY(r)
        EACH_REG(v) sum[r][v] = f32_load(outs[r] + at + v * VLEN);
    for (int n = 0; n < count; n++) {
        f32v value[ATTN_REGS];
        EACH_REG(v) value[v] = f32_load(values + (long)n * dim + at + v * VLEN);
        EACH_QUERY(r) {
            f32v prob = f32_set1(probs[r * ATTN_BLOCK_N + n]);
            EACH_REG(v) sum[r][v] = f32_fma(sum[r][v], value[v], prob);
        }
    }
    EACH_QUERY(r)
        EACH_REG(v) f32_store(outs[r] + at + v * VLEN, sum[r][v]);
}

/* A query's running maximum and sum of exponentials. */
typedef struct {
    float max, sum;
} SoftmaxState;

/* The scores of a block, of which `low` to before `high` are seen, become exponentials; `out` is rescaled. */
static void online_softmax(float *scores, int low, int high, SoftmaxState *softmax, float *out, int dim) {
    if (low >= high) {
        memset(scores, 0, ATTN_BLOCK_N * sizeof(float));
        return;
    }
    for (int n = 0; n < low; n++) scores[n] = -__builtin_inff();
    for (int n = high; n < ATTN_BLOCK_N; n++) scores[n] = -__builtin_inff();
    f32x16 largest = load16(scores), sum = {0};
    for (int n = LANES; n < ATTN_BLOCK_N; n += LANES) largest = max16(load16(scores + n), largest);
    float new_max = softmax->max, rescale = 1;
    for (int n = 0; n < LANES; n++) new_max = largest[n] > new_max ? largest[n] : new_max;
    if (new_max > softmax->max) {
        rescale = exp16((f32x16){0} + (softmax->max - new_max))[0];
        for (int d = 0; d < dim; d += LANES) store16(out + d, load16(out + d) * rescale);
        softmax->max = new_max;
    }
    for (int n = 0; n < ATTN_BLOCK_N; n += LANES) {
        f32x16 prob = exp16(load16(scores + n) - new_max);
        store16(scores + n, prob);
        sum += prob;
    }
    softmax->sum = softmax->sum * rescale + sum16(sum);
}

INLINE int clamp_to_block(int64_t n) { return n < 0 ? 0 : n < ATTN_BLOCK_N ? (int)n : ATTN_BLOCK_N; }

/* ATTN_BLOCK_M queries from `first` on, over all blocks that one of them sees. */
static void prefill_block(const PrefillJob *p, int64_t first) {
    const AttnArgs *args = p->args;
    const AttnParams *params = args->params;
    int heads_per_kv = params->heads / params->kv_heads, dim = params->head_dim;
    float scores[ATTN_BLOCK_M * ATTN_BLOCK_N] __attribute__((aligned(64))), discard[MAX_HEAD_DIM];
    const float *q[ATTN_BLOCK_M];
    float *outs[ATTN_BLOCK_M];
    int64_t start[ATTN_BLOCK_M], stop[ATTN_BLOCK_M]; /* keys that each query sees */
    int64_t from = p->count, until = 0;              /* keys that any of them sees */
    SoftmaxState softmax[ATTN_BLOCK_M];
    for (int r = 0; r < ATTN_BLOCK_M; r++) {
        int present = first + r < p->queries;
        int64_t n = present ? first + r : p->queries - 1, token = n / heads_per_kv;
        int64_t kv_head = ((int64_t)p->row * args->tokens + token) * params->kv_heads + p->head;
        int64_t last = present ? args->past_lens[p->row] + token + 1 : 0;
        q[r] = p->q + n * dim;
        outs[r] = discard;
        if (present) outs[r] = args->out + (kv_head * heads_per_kv + n % heads_per_kv) * dim;
        stop[r] = last;
        start[r] = params->window && last > params->window ? last - params->window : 0;
        if (last && start[r] < from) from = start[r];
        if (last > until) until = last;
        softmax[r] = (SoftmaxState){-__builtin_inff(), 0};
        memset(outs[r], 0, dim * sizeof(float));
    }
    for (int64_t at = from / ATTN_BLOCK_N * ATTN_BLOCK_N; at < until; at += ATTN_BLOCK_N) {
        int count = clamp_to_block(until - at), d = 0;
        const float *values = p->values + at * dim;
        qk_tile(q, p->keys + at * dim, dim, scores);
        for (int r = 0; r < ATTN_BLOCK_M; r++)
            online_softmax(scores + r * ATTN_BLOCK_N, clamp_to_block(start[r] - at), clamp_to_block(stop[r] - at),
                           softmax + r, outs[r], dim);
        for (; d + ATTN_REGS * VLEN <= dim; d += ATTN_REGS * VLEN)
            pv_tile(scores, values, count, dim, outs, d, ATTN_REGS);
        for (; d < dim; d += VLEN) pv_tile(scores, values, count, dim, outs, d, 1);
    }
    for (int r = 0; r < ATTN_BLOCK_M && first + r < p->queries; r++)
        for (int d = 0; d < dim; d += LANES) store16(outs[r] + d, load16(outs[r] + d) / softmax[r].sum);
}

static void prefill_chunk(void *job, int chunk) {
    const PrefillJob *p = job;
    for (int64_t n = 0, first = (int64_t)chunk * BLOCKS_PER_CHUNK * ATTN_BLOCK_M;
         n < BLOCKS_PER_CHUNK && first < p->queries; n++, first += ATTN_BLOCK_M)
        prefill_block(p, first);
}

/* Returns 0, or 1 if there is no memory. */
static int attn_prefill(const AttnArgs *args, int64_t longest, int threads) {
    const AttnParams *params = args->params;
    int chunk_queries = ATTN_BLOCK_M * BLOCKS_PER_CHUNK;
    PrefillJob p = {.args = args, .queries = (int64_t)args->tokens * (params->heads / params->kv_heads)};
    int64_t room = (longest + ATTN_BLOCK_N - 1) / ATTN_BLOCK_N * ATTN_BLOCK_N * params->head_dim;
    int new_tokens = args->rows * args->tokens, append_chunks = (new_tokens + APPEND_CHUNK - 1) / APPEND_CHUNK;
    int64_t width = args->quant_keys.bits ? (int64_t)params->kv_heads * params->head_dim : 0;
    p.keys = malloc((2 * room + p.queries * params->head_dim + (new_tokens + append_chunks) * width) * sizeof(float));
    if (!p.keys) return 1;
    p.values = p.keys + room;
    p.q = p.values + room;
    p.new_keys = p.q + p.queries * params->head_dim;
    p.work = p.new_keys + new_tokens * width;
    parallel_for(append_chunk, &p, append_chunks, threads);
    for (p.row = 0; p.row < args->rows; p.row++)
        for (p.head = 0; p.head < params->kv_heads; p.head++) {
            p.count = args->past_lens[p.row] + args->tokens;
            parallel_for(pack_kv_chunk, &p, (int)((p.count + ATTN_BLOCK_N - 1) / ATTN_BLOCK_N), threads);
            parallel_for(prefill_chunk, &p, (int)((p.queries + chunk_queries - 1) / chunk_queries), threads);
        }
    free(p.keys);
    return 0;
}

#undef EACH_QUERY

#endif
