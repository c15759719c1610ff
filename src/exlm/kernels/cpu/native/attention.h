/* Attention of a few new tokens over float pages: turn, store, look back. Each head of each token is computed
   by itself, in the order of the keys, whatever its company. */

#ifndef EXLM_ATTENTION_H
#define EXLM_ATTENTION_H

#include <stdlib.h>

#include "pool.h"
#include "vectors.h"

enum { MOST_HEAD = 512 };

/* What a layer is. */
typedef struct {
    const float *cos, *sin; /* (positions, turned / 2) */
    int32_t heads, kv_heads, head_dim, turned, pairs, window; /* window 0: none */
    float scale;
} Layer;

/* What a call is given. */
typedef struct {
    const Layer *layer;
    const float *q, *k, *v;            /* (rows, tokens, heads or kv_heads, head_dim) */
    float *keys, *values;              /* (pages, size, kv_heads, head_dim) */
    const int64_t *pages, *past, *positions;
    float *out, *scratch;              /* scratch: (rows · tokens · kv_heads, room) */
    int64_t room;
    int32_t rows, tokens, size, stride; /* stride: from one row's pages to the next's */
} Call;

static void turn(const Layer *l, const float *x, int64_t position, float *out) {
    const float *cos = l->cos + position * (l->turned / 2), *sin = l->sin + position * (l->turned / 2);
    int halves = l->turned / 2, a_step = l->pairs ? 2 : 1, b_at = l->pairs ? 1 : halves;
    for (int i = 0; i < halves; i++) {
        float a = x[i * a_step], b = x[i * a_step + b_at];
        out[i * a_step] = a * cos[i] - b * sin[i];
        out[i * a_step + b_at] = b * cos[i] + a * sin[i];
    }
    memcpy(out + l->turned, x + l->turned, (l->head_dim - l->turned) * sizeof(float));
}

/* Where a token of a row is kept, in tokens of all pages laid end to end. */
static int64_t home(const Call *c, int row, int64_t slot) {
    return c->pages[(int64_t)row * c->stride + slot / c->size] * c->size + slot % c->size;
}

static void store(const Call *c) {
    const Layer *l = c->layer;
    int width = l->kv_heads * l->head_dim;
    for (int i = 0; i < c->rows * c->tokens; i++) {
        int64_t at = home(c, i / c->tokens, c->past[i / c->tokens] + i % c->tokens) * width;
        for (int head = 0; head < l->kv_heads; head++)
            turn(l, c->k + (long)i * width + head * l->head_dim, c->positions[i], c->keys + at + head * l->head_dim);
        memcpy(c->values + at, c->v + (long)i * width, width * sizeof(float));
    }
}

/* The scores of one query head become its shares; answers what they must be divided by. */
static float soften(float *scores, int64_t count) {
    float most = scores[0];
    for (int64_t j = 1; j < count; j++) most = scores[j] > most ? scores[j] : most;
    Sixteen sum = {0};
    for (int64_t j = 0; j < count; j += WIDE) {
        int rest = count - j < WIDE ? (int)(count - j) : WIDE;
        Sixteen share = power(get_some(scores + j, rest) - most);
        if (rest < WIDE) {
            float kept[WIDE] = {0};
            memcpy(kept, &share, rest * sizeof(float));
            share = get(kept);
        }
        memcpy(scores + j, &share, rest * sizeof(float));
        sum += share;
    }
    return total(sum);
}

/* A stretch of a row's tokens that lie side by side: where it begins, and how many of `most` it has. */
static int64_t stretch(const Call *c, int row, int64_t slot, int64_t most, int64_t *count) {
    int64_t rest = c->size - slot % c->size;
    *count = rest < most ? rest : most;
    return home(c, row, slot);
}

/* One token's query heads that share a key head. */
static void attend_chunk(void *job, int chunk) {
    const Call *c = job;
    const Layer *l = c->layer;
    int shared = l->heads / l->kv_heads, dim = l->head_dim, head = chunk % l->kv_heads, i = chunk / l->kv_heads;
    int row = i / c->tokens, width = l->kv_heads * dim;
    int64_t slot = c->past[row] + i % c->tokens, first = l->window && slot >= l->window ? slot - l->window + 1 : 0;
    int64_t count = slot - first + 1, some;
    float *q = c->scratch + chunk * c->room, *scores = q + shared * dim;
    for (int h = 0; h < shared; h++)
        turn(l, c->q + ((long)i * l->heads + head * shared + h) * dim, c->positions[i], q + h * dim);
    for (int64_t j = 0; j < count; j += some) {
        const float *key = c->keys + stretch(c, row, first + j, count - j, &some) * width + head * dim;
        for (int64_t n = 0; n < some; n++, key += width) {
            for (int h = 0; h < shared; h++) {
                Sixteen sum = {0};
                for (int d = 0; d < dim; d += WIDE) sum += get(q + h * dim + d) * get(key + d);
                scores[h * count + j + n] = total(sum) * l->scale;
            }
        }
    }
    for (int h = 0; h < shared; h++) {
        float *own = scores + h * count, whole = soften(own, count);
        Sixteen sum[MOST_HEAD / WIDE] = {{0}};
        for (int64_t j = 0; j < count; j += some) {
            const float *value = c->values + stretch(c, row, first + j, count - j, &some) * width + head * dim;
            for (int64_t n = 0; n < some; n++, value += width)
                for (int d = 0; d < dim; d += WIDE) sum[d / WIDE] += get(value + d) * own[j + n];
        }
        float *out = c->out + ((long)i * l->heads + head * shared + h) * dim;
        for (int d = 0; d < dim; d += WIDE) put(out + d, sum[d / WIDE] / whole);
    }
}

/* Returns 0, or 1 if there is no memory. */
EXPORT int exlm_attend(const Call *given, int64_t longest, int threads) {
    Call call = *given;
    const Layer *l = call.layer;
    int chunks = call.rows * call.tokens * l->kv_heads;
    call.room = (int64_t)(l->heads / l->kv_heads) * (l->head_dim + longest) + WIDE;
    call.scratch = malloc(chunks * call.room * sizeof(float));
    if (!call.scratch) return 1;
    store(&call);
    share(attend_chunk, &call, chunks, longest * chunks < 512 ? 1 : threads);
    free(call.scratch);
    return 0;
}

#endif
