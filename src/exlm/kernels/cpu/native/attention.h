/* Attention of a few new tokens over pages of float32 or float16: turn, store, look back. Each head of each token is
   computed by itself, in the order of the keys, whatever its company. All tokens, new ones too, are seen as they are
   stored; float16 becomes float32 in registers, and sums are float32 either way. */

#ifndef EXLM_ATTENTION_H
#define EXLM_ATTENTION_H

#include <stdlib.h>

#include "looking.h"
#include "pool.h"
#include "vectors.h"

/* Tokens that are looked at together, how far ahead they are asked for, and how many new ones of a row are few. */
enum { BLOCK = 8, BLOCKS_AHEAD = 4, MOST_FEW = 8, MOST_HEAD = 512 };

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
    void *keys, *values;               /* (pages, size, kv_heads, head_dim) */
    const int64_t *pages, *past, *positions;
    float *out, *scratch;              /* scratch: (rows · tokens · kv_heads, room) */
    int64_t room;
    int32_t rows, tokens, size, stride; /* stride: from one row's pages to the next's */
    int32_t narrow;                     /* whether keys and values are float16, not float32 */
} Call;

static void turn(const Layer *l, const float *x, int64_t position, float *out) {
    const float *cos = l->cos + position * (l->turned / 2), *sin = l->sin + position * (l->turned / 2);
    int halves = l->turned / 2, a_step = l->pairs ? 2 : 1, b_at = l->pairs ? 1 : halves;
    int whole = l->pairs ? 0 : halves / WIDE * WIDE;
    for (int i = 0; i < whole; i += WIDE) {
        Sixteen a = get(x + i), b = get(x + halves + i), c = get(cos + i), s = get(sin + i);
        put(out + i, a * c - b * s);
        put(out + halves + i, b * c + a * s);
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
    const Layer *layer;
    const float *x;
    const int64_t *positions;
    float *out;
    int tokens, heads, each; /* `each`: tokens of a chunk */
} Turning;

static void turn_chunk(void *job, int chunk) {
    const Turning *t = job;
    long last = (long)(chunk + 1) * t->each, dim = t->layer->head_dim;
    for (long i = (long)chunk * t->each; i < last && i < t->tokens; i++)
        for (long at = i * t->heads * dim, end = at + t->heads * dim; at < end; at += dim)
            turn(t->layer, t->x + at, t->positions[i], t->out + at);
}

EXPORT void exlm_turn(const Layer *layer, const float *x, const int64_t *positions, int tokens, int heads, float *out,
                      int threads) {
    Turning job = {layer, x, positions, out, tokens, heads, 16};
    share(turn_chunk, &job, (tokens + job.each - 1) / job.each, threads);
}

/* Where a token of a row is kept, in tokens of all pages laid end to end. */
static int64_t home(const Call *c, int row, int64_t slot) {
    return c->pages[(int64_t)row * c->stride + slot / c->size] * c->size + slot % c->size;
}

/* Numbers from `at` on, as they are stored. */
static void keep(const Call *c, void *pages, int64_t at, const float *x, int count) {
    if (!c->narrow) memcpy((float *)pages + at, x, count * sizeof(float));
    else
        for (int n = 0; n < count; n += WIDE) put_halves((uint16_t *)pages + at + n, get(x + n));
}

static void store(const Call *c, int i) {
    const Layer *l = c->layer;
    int dim = l->head_dim, width = l->kv_heads * dim;
    int64_t at = home(c, i / c->tokens, c->past[i / c->tokens] + i % c->tokens) * width;
    float turned[MOST_HEAD];
    for (int n = 0; n < width; n += dim) {
        turn(l, c->k + (long)i * width + n, c->positions[i], turned);
        keep(c, c->keys, at + n, turned, dim);
    }
    keep(c, c->values, at, c->v + (long)i * width, width);
}

/* The scores of one query head become its shares; answers what they must be divided by. */
static float soften(float *scores, int64_t count) {
    int64_t whole = count / WIDE * WIDE;
    int rest = (int)(count - whole);
    Sixteen sum = {0}, largest = sum + scores[0];
    for (int64_t j = 0; j < whole; j += WIDE) largest = larger(get(scores + j), largest);
    float most = scores[0];
    for (int n = 0; n < WIDE; n++) most = largest[n] > most ? largest[n] : most;
    for (int64_t j = whole; j < count; j++) most = scores[j] > most ? scores[j] : most;
    for (int64_t j = 0; j < whole; j += WIDE) {
        Sixteen share = power(get(scores + j) - most);
        put(scores + j, share);
        sum += share;
    }
    if (rest) {
        Sixteen share = power(get_some(scores + whole, rest) - most);
        memcpy(scores + whole, &share, rest * sizeof(float));
        sum += get_some(scores + whole, rest);
    }
    return total(sum);
}

/* A stretch of a row's tokens that lie side by side: where it begins, and how many of `most` it has. */
static int64_t stretch(const Call *c, int row, int64_t slot, int64_t most, int64_t *count) {
    int64_t rest = c->size - slot % c->size;
    *count = rest < most ? rest : most;
    return home(c, row, slot);
}

typedef struct {
    Call call;
    int each, alone; /* key heads of a chunk; alone: all of a row's only token, which is not stored yet */
} Attending;

/* Where a token's key or value begins, of its heads from `head` on. */
INLINE const char *begin(const Call *c, const void *pages, int row, int64_t slot, int head, int narrow) {
    const Layer *l = c->layer;
    return (const char *)pages + bytes_of((home(c, row, slot) * l->kv_heads + head) * l->head_dim, narrow);
}

/* The first token that is seen from a place. */
INLINE int64_t first_seen(const Layer *l, int64_t slot) {
    return l->window && slot >= l->window ? slot - l->window + 1 : 0;
}

/* What will be needed some blocks behind number n: a row's keys are followed by its values, then by the next row's. */
INLINE const char *later(const Call *c, int row, int64_t first, int64_t count, int64_t n, int head, int narrow) {
    int64_t blocks = (count + BLOCK - 1) / BLOCK;
    n += BLOCKS_AHEAD;
    if (n < blocks) return begin(c, c->keys, row, first + n * BLOCK, head, narrow);
    if (n < 2 * blocks) return begin(c, c->values, row, first + (n - blocks) * BLOCK, head, narrow);
    if (row + 1 < c->rows) row++;
    first = first_seen(c->layer, c->past[row]);
    n = first + (n - 2 * blocks) * BLOCK;
    return begin(c, c->keys, row, n < c->past[row] ? n : first, head, narrow);
}

/* One token's query heads that share some key heads: each block of tokens for all of them, as it lies in memory. */
INLINE void attend_to(const Attending *a, int chunk, int narrow) {
    const Call *c = &a->call;
    const Layer *l = c->layer;
    int shared = l->heads / l->kv_heads, dim = l->head_dim, pieces = l->kv_heads / a->each, i = chunk / pieces;
    int row = i / c->tokens, width = l->kv_heads * dim, head = chunk % pieces * a->each, own = a->each * shared;
    int64_t slot = c->past[row] + i % c->tokens, first = first_seen(l, slot);
    int64_t count = slot - first + 1, some, block = 0;
    long wide = bytes_of(dim, narrow);
    float *q = c->scratch + (int64_t)chunk * a->each * c->room, *wholes = q + own * dim, *scores = wholes + own;
    float *out = c->out + ((long)i * l->heads + head * shared) * dim;
    if (a->alone) store(c, i);
    for (int h = 0; h < own; h++)
        turn(l, c->q + ((long)i * l->heads + head * shared + h) * dim, c->positions[i], q + h * dim);
    for (int64_t j = 0; j < count; j += some) {
        stretch(c, row, first + j, count - j < BLOCK ? count - j : BLOCK, &some);
        const char *key = begin(c, c->keys, row, first + j, head, narrow);
        const char *soon = later(c, row, first, count, block++, head, narrow);
        for (int h = 0; h < own; h += shared, key += wide, soon += wide)
            score_keys(q + h * dim, key, soon, some, dim, width, shared, narrow, l->scale, scores + h * count + j,
                       count);
    }
    memset(out, 0, own * dim * sizeof(float));
    for (int h = 0; h < own; h++) wholes[h] = soften(scores + h * count, count);
    for (int64_t j = 0; j < count; j += some) {
        stretch(c, row, first + j, count - j < BLOCK ? count - j : BLOCK, &some);
        const char *value = begin(c, c->values, row, first + j, head, narrow);
        const char *soon = later(c, row, first, count, block++, head, narrow);
        for (int h = 0; h < own; h += shared, value += wide, soon += wide)
            add_all_values(value, soon, some, width, scores + h * count + j, count, shared, narrow, dim, out + h * dim);
    }
    for (int h = 0; h < own; h++)
        for (int d = 0; d < dim; d += WIDE) put(out + h * dim + d, get(out + h * dim + d) / wholes[h]);
}

static void attend_chunk(void *job, int chunk) {
    const Attending *a = job;
    if (a->call.narrow) attend_to(a, chunk, 1);
    else attend_to(a, chunk, 0);
}

/* Returns 0, or 1 if there is no memory. */
static int attend_few(const Call *given, int64_t longest, int threads) {
    Attending job = {.call = *given};
    Call *c = &job.call;
    const Layer *l = c->layer;
    int tokens = c->rows * c->tokens, many = tokens * l->kv_heads;
    if (longest * many < 512) threads = 1;
    job.each = tokens < 2 * threads && threads > 1 ? 1 : l->kv_heads;
    c->room = (int64_t)(l->heads / l->kv_heads) * (l->head_dim + 1 + longest) + WIDE;
    c->scratch = malloc(many * c->room * sizeof(float));
    if (!c->scratch) return 1;
    job.alone = c->tokens == 1 && job.each == l->kv_heads;
    for (int i = 0; i < tokens && !job.alone; i++) store(c, i);
    share(attend_chunk, &job, many / job.each, threads);
    free(c->scratch);
    return 0;
}

#endif
