/* The parts that decode and prefill attention share: arguments, RoPE, the paged KV cache, softmax.

   Keys and values are float32, float16 or quantised (kv_quant.h): codes of 8 or 4 bits after a Hadamard transform, with
   a float16 scale for each 32 (KV_GROUP), or FP8 E5M2. Every head of every token is computed by itself and over its
   keys in order, so its bits depend neither on the batch nor on threads. */

#ifndef EXLM_ATTN_COMMON_H
#define EXLM_ATTN_COMMON_H

#include <math.h>
#include <stdlib.h>

#include "simd.h"
#include "threadpool.h"

enum { MAX_HEAD_DIM = 512, MAX_DECODE_TOKENS = 8, KV_GROUP = 32, FP8_E5M2 = 1 };

/* A layer. */
typedef struct {
    const float *cos, *sin; /* (positions, rope_dim / 2) */
    int32_t heads, kv_heads, head_dim;
    int32_t rope_dim, interleaved; /* interleaved: RoPE rotates neighbours (GPT-J), not halves (NeoX) */
    int32_t window;                /* keys that a query sees, itself included; 0: all */
    float scale;
} AttnParams;

/* Quantised keys or values: (pages, page_size, kv_heads, head_dim) codes. */
typedef struct {
    uint8_t *codes;
    uint16_t *scales; /* (pages, page_size, kv_heads, head_dim / KV_GROUP) */
    int64_t bits;     /* 8, 4, or FP8_E5M2: the upper bytes of float16, which decode does not read */
} QuantKV;

/* A call: `tokens` new tokens of each of `rows` sequences. */
typedef struct {
    const AttnParams *params;
    const float *q, *k, *v;                       /* (rows, tokens, heads or kv_heads, head_dim), before RoPE */
    void *keys, *values;                          /* (pages, page_size, kv_heads, head_dim) floats, if not quantised */
    QuantKV quant_keys, quant_values;             /* bits 0: not quantised */
    const int64_t *pages, *past_lens, *positions; /* (rows, page_stride), (rows), (rows, tokens) */
    float *out;                                   /* (rows, tokens, heads, head_dim) */
    int64_t hadamard_interleave;                  /* 1; or 2: even and odd numbers of each 64 are transformed apart */
    int32_t rows, tokens, page_size, page_stride;
    int32_t kv_f16; /* float pages are float16 */
} AttnArgs;

INLINE void rope(const AttnParams *params, const float *x, int64_t position, float *out) {
    int half = params->rope_dim / 2, vector_end = params->interleaved ? 0 : half / LANES * LANES;
    int step = params->interleaved ? 2 : 1, b_at = params->interleaved ? 1 : half;
    const float *cos = params->cos + position * half, *sin = params->sin + position * half;
    for (int i = 0; i < vector_end; i += LANES) {
        f32x16 a = load16(x + i), b = load16(x + half + i), c = load16(cos + i), s = load16(sin + i);
        store16(out + i, a * c - b * s);
        store16(out + half + i, b * c + a * s);
    }
    for (int i = vector_end; i < half; i++) {
        float a = x[i * step], b = x[i * step + b_at];
        out[i * step] = a * cos[i] - b * sin[i];
        out[i * step + b_at] = b * cos[i] + a * sin[i];
    }
    memcpy(out + params->rope_dim, x + params->rope_dim, (params->head_dim - params->rope_dim) * sizeof(float));
}

typedef struct {
    const AttnParams *params;
    const float *x;
    const int64_t *positions;
    float *out;
    int tokens, heads;
} RopeJob;

enum { ROPE_CHUNK = 16 }; /* tokens */

static void rope_chunk(void *job, int chunk) {
    const RopeJob *r = job;
    long last = (chunk + 1l) * ROPE_CHUNK, dim = r->params->head_dim;
    for (long i = (long)chunk * ROPE_CHUNK; i < last && i < r->tokens; i++)
        for (long at = i * r->heads * dim, end = at + r->heads * dim; at < end; at += dim)
            rope(r->params, r->x + at, r->positions[i], r->out + at);
}

/* out (tokens, heads, head_dim) = x rotated to its positions. */
EXPORT void exlm_rope(const AttnParams *params, const float *x, const int64_t *positions, int tokens, int heads,
                      float *out, int threads) {
    RopeJob job = {params, x, positions, out, tokens, heads};
    parallel_for(rope_chunk, &job, (tokens + ROPE_CHUNK - 1) / ROPE_CHUNK, threads);
}

/* The slot of a row's token in all pages laid end to end. */
static int64_t kv_slot(const AttnArgs *args, int row, int64_t pos) {
    int64_t page = args->pages[(int64_t)row * args->page_stride + pos / args->page_size];
    return page * args->page_size + pos % args->page_size;
}

/* The slot of a row's token; `count`: how many tokens follow from there on in the same page, at most max_count. */
static int64_t page_run(const AttnArgs *args, int row, int64_t pos, int64_t max_count, int64_t *count) {
    int64_t rest = args->page_size - pos % args->page_size;
    *count = rest < max_count ? rest : max_count;
    return kv_slot(args, row, pos);
}

/* The first key that the query at a position sees. */
INLINE int64_t window_start(const AttnParams *params, int64_t pos) {
    return params->window && pos >= params->window ? pos - params->window + 1 : 0;
}

INLINE long kv_bytes(int64_t numbers, int kv_f16) { return (long)numbers << (kv_f16 ? 1 : 2); }

INLINE f32v load_kv(const char *p, int64_t at, int kv_f16) {
    return kv_f16 ? f32_load_f16((const uint16_t *)p + at) : f32_load((const float *)p + at);
}

/* Where a token's key or value begins in float pages, from a kv head on. */
INLINE const char *kv_pointer(const AttnArgs *args, const void *pages, int row, int64_t pos, int head, int kv_f16) {
    const AttnParams *params = args->params;
    int64_t first_head = kv_slot(args, row, pos) * params->kv_heads;
    return (const char *)pages + kv_bytes((first_head + head) * params->head_dim, kv_f16);
}

static void store_kv(const AttnArgs *args, void *pages, int64_t at, const float *x, int count) {
    if (!args->kv_f16)
        memcpy((float *)pages + at, x, count * sizeof(float));
    else
        for (int n = 0; n < count; n += LANES) store16_f16((uint16_t *)pages + at + n, load16(x + n));
}

/* Stores new token i (of rows * tokens) in float pages. */
static void append_kv(const AttnArgs *args, int i) {
    const AttnParams *params = args->params;
    int dim = params->head_dim, width = params->kv_heads * dim;
    int64_t at = kv_slot(args, i / args->tokens, args->past_lens[i / args->tokens] + i % args->tokens) * width;
    float key[MAX_HEAD_DIM];
    for (int n = 0; n < width; n += dim) {
        rope(params, args->k + (long)i * width + n, args->positions[i], key);
        store_kv(args, args->keys, at + n, key, dim);
    }
    store_kv(args, args->values, at, args->v + (long)i * width, width);
}

/* scores = exp(scores - max); returns their sum. */
static float softmax_numerators(float *scores, int64_t count) {
    int64_t vector_end = count / LANES * LANES;
    int rest = (int)(count - vector_end);
    f32x16 sum = {0}, largest = sum + scores[0];
    for (int64_t j = 0; j < vector_end; j += LANES) largest = max16(load16(scores + j), largest);
    float max = scores[0];
    for (int n = 0; n < LANES; n++) max = largest[n] > max ? largest[n] : max;
    for (int64_t j = vector_end; j < count; j++) max = scores[j] > max ? scores[j] : max;
    for (int64_t j = 0; j < vector_end; j += LANES) {
        f32x16 prob = exp16(load16(scores + j) - max);
        store16(scores + j, prob);
        sum += prob;
    }
    if (rest) {
        f32x16 prob = exp16(load16_tail(scores + vector_end, rest) - max);
        memcpy(scores + vector_end, &prob, rest * sizeof(float));
        sum += load16_tail(scores + vector_end, rest);
    }
    return sum16(sum);
}

/* Heads and keys whose sums, sixteen lanes each, fit the registers of a decode microkernel. */
#if defined(__AVX512F__)
enum { DOT_KEYS = 4 };
#elif defined(__AVX2__) || (defined(__aarch64__) && !defined(EXLM_PORTABLE))
enum { DOT_KEYS = 2 };
#else
enum { DOT_KEYS = 1 };
#endif
enum { DOT_HEADS = 3, DOT_REGS = 4, CACHE_LINE = 64 };

/* Runs CALL(heads) with the next block's number of heads, at most DOT_HEADS, as a constant. */
#define SWITCH_HEADS(heads_left, CALL) \
    if ((heads_left) >= 3)             \
        CALL(3);                       \
    else if ((heads_left) == 2)        \
        CALL(2);                       \
    else                               \
        CALL(1)

#define EACH_HEAD(h) _Pragma("GCC unroll 3") for (int h = 0; h < heads; h++)
#define EACH_KEY(k) _Pragma("GCC unroll 4") for (int k = 0; k < DOT_KEYS; k++)

#endif
