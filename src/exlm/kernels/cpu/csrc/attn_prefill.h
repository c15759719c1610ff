/* Attention of many new tokens over pages of floats or codes, a key head at a time: keys and values are laid out
   once for all of its queries, then each crew of queries goes over spans of keys, and what it has seen fades as a higher
   score comes. A query's spans begin at multiples of SPAN and are added up in order: its answer depends neither on its
   company nor on threads. Over floats all tokens are seen as they are stored, over codes new ones as they came. */

#ifndef EXLM_PROMPTS_H
#define EXLM_PROMPTS_H

#include "attn_decode_q.h"

/* Queries of a crew and vectors of keys, or of numbers, whose sums fit the registers. */
#if defined(__AVX512F__)
enum { ATTN_BLOCK_M = 6, ATTN_REGS = 4 };
#elif defined(__aarch64__) && !defined(EXLM_PORTABLE)
enum { ATTN_BLOCK_M = 6, ATTN_REGS = 4 };
#elif defined(__AVX2__)
enum { ATTN_BLOCK_M = 4, ATTN_REGS = 2 };
#else
enum { ATTN_BLOCK_M = 2, ATTN_REGS = 4 };
#endif
enum { ATTN_BLOCK_N = 64, BLOCKS_PER_CHUNK = 8, STORE_CHUNK = 16, MAX_KV_WIDTH = 16384 }; /* keys of a span; crews and tokens of a chunk */

typedef struct {
    const AttnArgs *attn;
    const QuantAttnArgs *quant; /* none: pages are of floats */
    const float *turned;    /* the new keys as they came, of codes */
    int row, head;
    int64_t count, queries;  /* keys that anybody sees; queries of the key head */
    float *q, *keys, *values; /* (queries, dim); of each span (dim, SPAN); (spans · SPAN, dim) */
} PrefillJob;

static void append_chunk(void *job, int chunk) {
    const PrefillJob *p = job;
    const AttnArgs *c = p->attn;
    float work[MAX_KV_WIDTH];
    for (int i = chunk * STORE_CHUNK; i < (chunk + 1) * STORE_CHUNK && i < c->rows * c->tokens; i++) {
        if (p->quant) append_kv_q(p->quant, i, (float *)p->turned, work);
        else append_kv(c, i);
    }
}

/* One head of an old token, out of the space of codes; `at`: which number of all is its first. */
static void dequantize_head(const QuantKV *from, int64_t at, int dim, int interleave, float *out) {
    int bits = (int)from->bits;
    float packed[MAX_HEAD_DIM], center = (float)(1 << (bits - 1));
    for (int d = 0; d < dim && bits == TRUNCATED_F16; d++) out[d] = f16_to_f32((uint16_t)(from->codes[at + d] << 8));
    if (bits == TRUNCATED_F16) return;
    for (int g = 0; g < dim / KV_GROUP; g++) {
        f32x16 low, high;
        float scale = f16_from_bits(from->scales[at / KV_GROUP + g]) / (float)KV_GROUP;
        unpack_group(from->codes + (at + g * KV_GROUP) * bits / 8, bits, &low, &high);
        store16(packed + g * KV_GROUP, (low - center) * scale);
        store16(packed + g * KV_GROUP + LANES, (high - center) * scale);
    }
    from_packed_order(packed, dim, bits, out);
    hadamard(out, dim, interleave, 0);
}

/* The same of any token that there is, key and value. */
static void load_kv_head(const PrefillJob *p, int64_t pos, float *key, float *value) {
    const AttnArgs *c = p->attn;
    const QuantAttnArgs *quant = p->quant;
    int dim = c->params->head_dim, width = c->params->kv_heads * dim;
    if (pos >= c->past_lens[p->row]) {
        long at = ((long)p->row * c->tokens + (pos - c->past_lens[p->row])) * width + p->head * dim;
        memcpy(key, p->turned + at, dim * sizeof(float));
        memcpy(value, c->v + at, dim * sizeof(float));
        return;
    }
    int64_t at = kv_slot(c, p->row, pos) * width + p->head * dim;
    dequantize_head(&quant->keys, at, dim, (int)quant->interleave, key);
    dequantize_head(&quant->values, at, dim, (int)quant->interleave, value);
}

static void pack_kv_block_q(const PrefillJob *p, int64_t block) {
    int dim = p->attn->params->head_dim;
    float *keys = p->keys + block * ATTN_BLOCK_N * dim, *values = p->values + block * ATTN_BLOCK_N * dim, own[MAX_HEAD_DIM];
    for (int n = 0; n < ATTN_BLOCK_N; n++) {
        memset(own, 0, sizeof own);
        if (block * ATTN_BLOCK_N + n < p->count) load_kv_head(p, block * ATTN_BLOCK_N + n, own, values + n * dim);
        else memset(values + n * dim, 0, dim * sizeof(float));
        for (int d = 0; d < dim; d++) keys[d * ATTN_BLOCK_N + n] = own[d];
    }
}

INLINE void pack_kv_block(const PrefillJob *p, int64_t block, int kv_f16) {
    const AttnArgs *c = p->attn;
    int dim = c->params->head_dim;
    float *keys = p->keys + block * ATTN_BLOCK_N * dim, *values = p->values + block * ATTN_BLOCK_N * dim, own[MAX_HEAD_DIM];
    for (int n = 0; n < ATTN_BLOCK_N; n++) {
        int64_t pos = block * ATTN_BLOCK_N + n;
        int there = pos < p->count;
        const char *key = there ? kv_pointer(c, c->keys, p->row, pos, p->head, kv_f16) : NULL;
        const char *value = there ? kv_pointer(c, c->values, p->row, pos, p->head, kv_f16) : NULL;
        for (int d = 0; d < dim; d += VLEN) {
            f32v one = there ? load_kv(key, d, kv_f16) : f32_set1(0), other = there ? load_kv(value, d, kv_f16) : f32_set1(0);
            f32_store(own + d, one);
            f32_store(values + n * dim + d, other);
        }
        for (int d = 0; d < dim; d++) keys[d * ATTN_BLOCK_N + n] = own[d];
    }
}

/* Keys and values of a span, and as large a part of the queries, turned. */
static void pack_kv_chunk(void *job, int chunk) {
    const PrefillJob *p = job;
    const AttnArgs *c = p->attn;
    const AttnParams *l = c->params;
    int64_t blocks = (p->count + ATTN_BLOCK_N - 1) / ATTN_BLOCK_N, first = p->queries * chunk / blocks;
    int heads_per_kv = l->heads / l->kv_heads;
    if (p->quant) pack_kv_block_q(p, chunk);
    else if (c->kv_f16) pack_kv_block(p, chunk, 1);
    else pack_kv_block(p, chunk, 0);
    for (int64_t n = first; n < p->queries * (chunk + 1) / blocks; n++) {
        int64_t token = (int64_t)p->row * c->tokens + n / heads_per_kv;
        float *to = p->q + n * l->head_dim;
        rope(l, c->q + (token * l->heads + p->head * heads_per_kv + n % heads_per_kv) * l->head_dim, c->positions[token], to);
        for (int d = 0; d < l->head_dim; d += LANES) store16(to + d, load16(to + d) * l->scale);
    }
}

/* scores (CREW, SPAN) of the queries. */
INLINE void qk_tile(const float *const *q, const float *keys, int dim, float *scores) {
    for (int at = 0; at < ATTN_BLOCK_N; at += ATTN_REGS * VLEN) {
        f32v sum[ATTN_BLOCK_M][ATTN_REGS];
#define EACH                                                                                                     \
    _Pragma("GCC unroll 6") for (int r = 0; r < ATTN_BLOCK_M; r++)                                                       \
        _Pragma("GCC unroll 4") for (int c = 0; c < ATTN_REGS; c++)
        EACH sum[r][c] = f32_set1(0);
        for (int d = 0; d < dim; d++) {
            f32v own[ATTN_REGS];
#pragma GCC unroll 4
            for (int c = 0; c < ATTN_REGS; c++) own[c] = f32_load(keys + d * ATTN_BLOCK_N + at + c * VLEN);
#pragma GCC unroll 6
            for (int r = 0; r < ATTN_BLOCK_M; r++) {
                f32v number = f32_set1(q[r][d]);
#pragma GCC unroll 4
                for (int c = 0; c < ATTN_REGS; c++) sum[r][c] = f32_fma(sum[r][c], own[c], number);
            }
        }
        EACH f32_store(scores + r * ATTN_BLOCK_N + at + c * VLEN, sum[r][c]);
#undef EACH
    }
}

/* outs += shares (CREW, SPAN) · `count` values, in `cols` vectors of their numbers. */
INLINE void pv_tile(const float *probs, const float *values, int count, int dim, float *const *outs, int at, int cols) {
    f32v sum[ATTN_BLOCK_M][ATTN_REGS];
#define EACH                                                                                                     \
    _Pragma("GCC unroll 6") for (int r = 0; r < ATTN_BLOCK_M; r++)                                                       \
        _Pragma("GCC unroll 4") for (int c = 0; c < cols; c++)
    EACH sum[r][c] = f32_load(outs[r] + at + c * VLEN);
    for (int n = 0; n < count; n++) {
        f32v own[ATTN_REGS];
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) own[c] = f32_load(values + (long)n * dim + at + c * VLEN);
#pragma GCC unroll 6
        for (int r = 0; r < ATTN_BLOCK_M; r++) {
            f32v prob = f32_set1(probs[r * ATTN_BLOCK_N + n]);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) sum[r][c] = f32_fma(sum[r][c], own[c], prob);
        }
    }
    EACH f32_store(outs[r] + at + c * VLEN, sum[r][c]);
#undef EACH
}

/* What a query has seen so far. */
typedef struct {
    float max, sum;
} SoftmaxState;

/* Scores of a span, of which those from `low` to before `high` are seen, become shares; `out` fades accordingly. */
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

/* A crew's queries, from `first` on, over all spans that one of them sees. */
static void prefill_block(const PrefillJob *p, int64_t first) {
    const AttnArgs *c = p->attn;
    const AttnParams *l = c->params;
    int heads_per_kv = l->heads / l->kv_heads, dim = l->head_dim;
    float scores[ATTN_BLOCK_M * ATTN_BLOCK_N] __attribute__((aligned(64))), discard[MAX_HEAD_DIM];
    const float *q[ATTN_BLOCK_M];
    float *outs[ATTN_BLOCK_M];
    int64_t start[ATTN_BLOCK_M], stop[ATTN_BLOCK_M], from = p->count, until = 0; /* keys that each sees, and anybody */
    SoftmaxState softmax[ATTN_BLOCK_M];
    for (int r = 0; r < ATTN_BLOCK_M; r++) {
        int64_t n = first + r < p->queries ? first + r : p->queries - 1, token = n / heads_per_kv;
        int64_t last = c->past_lens[p->row] + token + 1;
        q[r] = p->q + n * dim;
        outs[r] = c->out + (((int64_t)p->row * c->tokens + token) * l->heads + p->head * heads_per_kv + n % heads_per_kv) * dim;
        if (first + r >= p->queries) outs[r] = discard, last = 0;
        stop[r] = last, start[r] = l->window && last > l->window ? last - l->window : 0;
        if (last && start[r] < from) from = start[r];
        if (last > until) until = last;
        softmax[r] = (SoftmaxState){-__builtin_inff(), 0};
        memset(outs[r], 0, dim * sizeof(float));
    }
    for (int64_t block = from / ATTN_BLOCK_N; block * ATTN_BLOCK_N < until; block++) {
        int64_t at = block * ATTN_BLOCK_N, count = until - at < ATTN_BLOCK_N ? until - at : ATTN_BLOCK_N;
        const float *values = p->values + at * dim;
        qk_tile(q, p->keys + at * dim, dim, scores);
        for (int r = 0; r < ATTN_BLOCK_M; r++) {
            int64_t low = start[r] - at, high = stop[r] - at;
            online_softmax(scores + r * ATTN_BLOCK_N, low > 0 ? low < ATTN_BLOCK_N ? (int)low : ATTN_BLOCK_N : 0,
                       high < ATTN_BLOCK_N ? high > 0 ? (int)high : 0 : ATTN_BLOCK_N, softmax + r, outs[r], dim);
        }
        int d = 0;
        for (; d + ATTN_REGS * VLEN <= dim; d += ATTN_REGS * VLEN) pv_tile(scores, values, (int)count, dim, outs, d, ATTN_REGS);
        for (; d < dim; d += VLEN) pv_tile(scores, values, (int)count, dim, outs, d, 1);
    }
    for (int r = 0; r < ATTN_BLOCK_M && first + r < p->queries; r++)
        for (int d = 0; d < dim; d += LANES) store16(outs[r] + d, load16(outs[r] + d) / softmax[r].sum);
}

static void prefill_chunk(void *job, int chunk) {
    const PrefillJob *p = job;
    for (int64_t n = (int64_t)chunk * BLOCKS_PER_CHUNK; n < (chunk + 1) * BLOCKS_PER_CHUNK && n * ATTN_BLOCK_M < p->queries; n++)
        prefill_block(p, n * ATTN_BLOCK_M);
}

/* Returns 0, or 1 if there is no memory. */
static int attn_prefill(const AttnArgs *c, const QuantAttnArgs *quant, int64_t longest, int threads) {
    const AttnParams *l = c->params;
    PrefillJob p = {.attn = c, .quant = quant, .queries = (int64_t)c->tokens * (l->heads / l->kv_heads)};
    int64_t room = (longest + ATTN_BLOCK_N - 1) / ATTN_BLOCK_N * ATTN_BLOCK_N * l->head_dim;
    int64_t new_values = quant ? (int64_t)c->rows * c->tokens * l->kv_heads * l->head_dim : 0;
    p.keys = malloc((2 * room + p.queries * l->head_dim + new_values) * sizeof(float));
    if (!p.keys) return 1;
    p.values = p.keys + room, p.q = p.values + room, p.turned = p.q + p.queries * l->head_dim;
    parallel_for(append_chunk, &p, (c->rows * c->tokens + STORE_CHUNK - 1) / STORE_CHUNK, threads);
    for (p.row = 0; p.row < c->rows; p.row++)
        for (p.head = 0; p.head < l->kv_heads; p.head++) {
            p.count = c->past_lens[p.row] + c->tokens;
            parallel_for(pack_kv_chunk, &p, (int)((p.count + ATTN_BLOCK_N - 1) / ATTN_BLOCK_N), threads);
            parallel_for(prefill_chunk, &p, (int)((p.queries + ATTN_BLOCK_M * BLOCKS_PER_CHUNK - 1) / (ATTN_BLOCK_M * BLOCKS_PER_CHUNK)), threads);
        }
    free(p.keys);
    return 0;
}

/* Attention of any number of new tokens, over floats and over codes. Returns 0, or 1 if there is no memory. */
EXPORT int exlm_attention(const AttnArgs *args, int64_t longest, int threads) {
    if (args->tokens > MAX_DECODE_TOKENS) return attn_prefill(args, NULL, longest, threads);
    return attn_decode(args, longest, threads);
}

EXPORT int exlm_attention_q(const QuantAttnArgs *args, int64_t longest, int threads) {
    const AttnParams *l = args->attn.params;
    int wide = l->kv_heads * l->head_dim > MAX_KV_WIDTH; /* of a token's keys */
    if (args->attn.tokens > MAX_DECODE_TOKENS && !wide) return attn_prefill(&args->attn, args, longest, threads);
    return attn_decode_q(args, longest, threads);
}

#endif
