/* Attention of a few new tokens over pages of float32 or float16: turn, store, look back. Each head of each token is
   computed by itself, in the order of the keys, whatever its company. All tokens, new ones too, are seen as they are
   stored; float16 becomes float32 in registers, and sums are float32 either way. */

#ifndef EXLM_ATTENTION_H
#define EXLM_ATTENTION_H

#include <stdlib.h>

#include "attn_dot.h"
#include "threadpool.h"
#include "simd16.h"

/* Tokens that are looked at together, how far ahead they are asked for, and how many new ones of a row are few. */
enum { DECODE_BLOCK = 8, PREFETCH_BLOCKS = 4, MAX_DECODE_TOKENS = 8, MAX_HEAD_DIM = 512 };

/* What a layer is. */
typedef struct {
    const float *cos, *sin; /* (positions, turned / 2) */
    int32_t heads, kv_heads, head_dim, turned, pairs, window; /* window 0: none */
    float scale;
} AttnParams;

/* What a call is given. */
typedef struct {
    const AttnParams *params;
    const float *q, *k, *v;            /* (rows, tokens, heads or kv_heads, head_dim) */
    void *keys, *values;               /* (pages, size, kv_heads, head_dim) */
    const int64_t *pages, *past_lens, *positions;
    float *out, *scratch;              /* scratch: (rows · tokens · kv_heads, room) */
    int64_t room;
    int32_t rows, tokens, page_size, page_stride; /* stride: from one row's pages to the next's */
    int32_t kv_f16;                     /* whether keys and values are float16, not float32 */
} AttnArgs;

static void rope(const AttnParams *l, const float *x, int64_t position, float *out) {
    const float *cos = l->cos + position * (l->turned / 2), *sin = l->sin + position * (l->turned / 2);
    int halves = l->turned / 2, a_step = l->pairs ? 2 : 1, b_at = l->pairs ? 1 : halves;
    int whole = l->pairs ? 0 : halves / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) {
        f32x16 a = load16(x + i), b = load16(x + halves + i), c = load16(cos + i), s = load16(sin + i);
        store16(out + i, a * c - b * s);
        store16(out + halves + i, b * c + a * s);
    }
    for (int i = whole; i < halves; i++) {
        float a = x[i * a_step], b = x[i * a_step + b_at];
        out[i * a_step] = a * cos[i] - b * sin[i];
        out[i * a_step + b_at] = b * cos[i] + a * sin[i];
    }
    memcpy(out + l->turned, x + l->turned, (l->head_dim - l->turned) * sizeof(float));
}

/* Heads of many tokens, turned. */
typedef struct {
    const AttnParams *params;
    const float *x;
    const int64_t *positions;
    float *out;
    int tokens, heads, kv_heads_per_chunk; /* `each`: tokens of a chunk */
} RopeJob;

static void rope_chunk(void *job, int chunk) {
    const RopeJob *t = job;
    long last = (long)(chunk + 1) * t->kv_heads_per_chunk, dim = t->params->head_dim;
    for (long i = (long)chunk * t->kv_heads_per_chunk; i < last && i < t->tokens; i++)
        for (long at = i * t->heads * dim, end = at + t->heads * dim; at < end; at += dim)
            rope(t->params, t->x + at, t->positions[i], t->out + at);
}

EXPORT void exlm_rope(const AttnParams *params, const float *x, const int64_t *positions, int tokens, int heads, float *out,
                      int threads) {
    RopeJob job = {params, x, positions, out, tokens, heads, 16};
    parallel_for(rope_chunk, &job, (tokens + job.kv_heads_per_chunk - 1) / job.kv_heads_per_chunk, threads);
}

/* Where a token of a row is kept, in tokens of all pages laid end to end. */
static int64_t kv_slot(const AttnArgs *c, int row, int64_t pos) {
    return c->pages[(int64_t)row * c->page_stride + pos / c->page_size] * c->page_size + pos % c->page_size;
}

/* Numbers from `at` on, as they are stored. */
static void store_kv(const AttnArgs *c, void *pages, int64_t at, const float *x, int count) {
    if (!c->kv_f16) memcpy((float *)pages + at, x, count * sizeof(float));
    else
        for (int n = 0; n < count; n += LANES) store_f16x16((uint16_t *)pages + at + n, load16(x + n));
}

static void append_kv(const AttnArgs *c, int i) {
    const AttnParams *l = c->params;
    int dim = l->head_dim, width = l->kv_heads * dim;
    int64_t at = kv_slot(c, i / c->tokens, c->past_lens[i / c->tokens] + i % c->tokens) * width;
    float turned[MAX_HEAD_DIM];
    for (int n = 0; n < width; n += dim) {
        rope(l, c->k + (long)i * width + n, c->positions[i], turned);
        store_kv(c, c->keys, at + n, turned, dim);
    }
    store_kv(c, c->values, at, c->v + (long)i * width, width);
}

/* The scores of one query head become its shares; answers what they must be divided by. */
static float softmax_numerators(float *scores, int64_t count) {
    int64_t whole = count / LANES * LANES;
    int rest = (int)(count - whole);
    f32x16 sum = {0}, largest = sum + scores[0];
    for (int64_t j = 0; j < whole; j += LANES) largest = max16(load16(scores + j), largest);
    float max = scores[0];
    for (int n = 0; n < LANES; n++) max = largest[n] > max ? largest[n] : max;
    for (int64_t j = whole; j < count; j++) max = scores[j] > max ? scores[j] : max;
    for (int64_t j = 0; j < whole; j += LANES) {
        f32x16 prob = exp16(load16(scores + j) - max);
        store16(scores + j, prob);
        sum += prob;
    }
    if (rest) {
        f32x16 prob = exp16(load16_tail(scores + whole, rest) - max);
        memcpy(scores + whole, &prob, rest * sizeof(float));
        sum += load16_tail(scores + whole, rest);
    }
    return sum16(sum);
}

/* A stretch of a row's tokens that lie side by side: where it begins, and how many of `most` it has. */
static int64_t page_run(const AttnArgs *c, int row, int64_t pos, int64_t max, int64_t *count) {
    int64_t rest = c->page_size - pos % c->page_size;
    *count = rest < max ? rest : max;
    return kv_slot(c, row, pos);
}

typedef struct {
    AttnArgs args;
    int kv_heads_per_chunk, append_in_chunk; /* key heads of a chunk; alone: all of a row's only token, which is not stored yet */
} DecodeJob;

/* Where a token's key or value begins, of its heads from `head` on. */
INLINE const char *kv_pointer(const AttnArgs *c, const void *pages, int row, int64_t pos, int head, int kv_f16) {
    const AttnParams *l = c->params;
    return (const char *)pages + kv_bytes((kv_slot(c, row, pos) * l->kv_heads + head) * l->head_dim, kv_f16);
}

/* The first token that is seen from a place. */
INLINE int64_t window_start(const AttnParams *l, int64_t pos) {
    return l->window && pos >= l->window ? pos - l->window + 1 : 0;
}

/* What will be needed some blocks behind number n: a row's keys are followed by its values, then by the next row's. */
INLINE const char *prefetch_target(const AttnArgs *c, int row, int64_t first, int64_t count, int64_t n, int head, int kv_f16) {
    int64_t blocks = (count + DECODE_BLOCK - 1) / DECODE_BLOCK;
    n += PREFETCH_BLOCKS;
    if (n < blocks) return kv_pointer(c, c->keys, row, first + n * DECODE_BLOCK, head, kv_f16);
    if (n < 2 * blocks) return kv_pointer(c, c->values, row, first + (n - blocks) * DECODE_BLOCK, head, kv_f16);
    if (row + 1 < c->rows) row++;
    first = window_start(c->params, c->past_lens[row]);
    n = first + (n - 2 * blocks) * DECODE_BLOCK;
    return kv_pointer(c, c->keys, row, n < c->past_lens[row] ? n : first, head, kv_f16);
}

/* One token's query heads that share some key heads: each block of tokens for all of them, as it lies in memory. */
INLINE void decode_token(const DecodeJob *a, int chunk, int kv_f16) {
    const AttnArgs *c = &a->args;
    const AttnParams *l = c->params;
    int heads_per_kv = l->heads / l->kv_heads, dim = l->head_dim, head_chunks = l->kv_heads / a->kv_heads_per_chunk, i = chunk / head_chunks;
    int row = i / c->tokens, width = l->kv_heads * dim, head = chunk % head_chunks * a->kv_heads_per_chunk, own = a->kv_heads_per_chunk * heads_per_kv;
    int64_t pos = c->past_lens[row] + i % c->tokens, first = window_start(l, pos);
    int64_t count = pos - first + 1, some, block = 0;
    long wide = kv_bytes(dim, kv_f16);
    float *q = c->scratch + (int64_t)chunk * a->kv_heads_per_chunk * c->room, *denominators = q + own * dim, *scores = denominators + own;
    float *out = c->out + ((long)i * l->heads + head * heads_per_kv) * dim;
    if (a->append_in_chunk) append_kv(c, i);
    for (int h = 0; h < own; h++)
        rope(l, c->q + ((long)i * l->heads + head * heads_per_kv + h) * dim, c->positions[i], q + h * dim);
    for (int64_t j = 0; j < count; j += some) {
        page_run(c, row, first + j, count - j < DECODE_BLOCK ? count - j : DECODE_BLOCK, &some);
        const char *key = kv_pointer(c, c->keys, row, first + j, head, kv_f16);
        const char *prefetch = prefetch_target(c, row, first, count, block++, head, kv_f16);
        for (int h = 0; h < own; h += heads_per_kv, key += wide, prefetch += wide)
            qk_block(q + h * dim, key, prefetch, some, dim, width, heads_per_kv, kv_f16, l->scale, scores + h * count + j,
                       count);
    }
    memset(out, 0, own * dim * sizeof(float));
    for (int h = 0; h < own; h++) denominators[h] = softmax_numerators(scores + h * count, count);
    for (int64_t j = 0; j < count; j += some) {
        page_run(c, row, first + j, count - j < DECODE_BLOCK ? count - j : DECODE_BLOCK, &some);
        const char *value = kv_pointer(c, c->values, row, first + j, head, kv_f16);
        const char *prefetch = prefetch_target(c, row, first, count, block++, head, kv_f16);
        for (int h = 0; h < own; h += heads_per_kv, value += wide, prefetch += wide)
            pv_block(value, prefetch, some, width, scores + h * count + j, count, heads_per_kv, kv_f16, dim, out + h * dim);
    }
    for (int h = 0; h < own; h++)
        for (int d = 0; d < dim; d += LANES) store16(out + h * dim + d, load16(out + h * dim + d) / denominators[h]);
}

static void decode_chunk(void *job, int chunk) {
    const DecodeJob *a = job;
    if (a->args.kv_f16) decode_token(a, chunk, 1);
    else decode_token(a, chunk, 0);
}

/* Returns 0, or 1 if there is no memory. */
static int attn_decode(const AttnArgs *args, int64_t longest, int threads) {
    DecodeJob job = {.args = *args};
    AttnArgs *c = &job.args;
    const AttnParams *l = c->params;
    int tokens = c->rows * c->tokens, many = tokens * l->kv_heads;
    if (longest * many < 512) threads = 1;
    job.kv_heads_per_chunk = tokens < 2 * threads && threads > 1 ? 1 : l->kv_heads;
    c->room = (int64_t)(l->heads / l->kv_heads) * (l->head_dim + 1 + longest) + LANES;
    c->scratch = malloc(many * c->room * sizeof(float));
    if (!c->scratch) return 1;
    job.append_in_chunk = c->tokens == 1 && job.kv_heads_per_chunk == l->kv_heads;
    for (int i = 0; i < tokens && !job.append_in_chunk; i++) append_kv(c, i);
    parallel_for(decode_chunk, &job, many / job.kv_heads_per_chunk, threads);
    free(c->scratch);
    return 0;
}

#endif
