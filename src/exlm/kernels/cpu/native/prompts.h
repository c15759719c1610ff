/* Attention of many new tokens over pages of floats or codes, a key head at a time: keys and values are laid out
   once for all of its queries, then each crew of queries goes over spans of keys, and what it has seen fades as a higher
   score comes. A query's spans begin at multiples of SPAN and are added up in order: its answer depends neither on its
   company nor on threads. Over floats all tokens are seen as they are stored, over codes new ones as they came. */

#ifndef EXLM_PROMPTS_H
#define EXLM_PROMPTS_H

#include "coded.h"

/* Queries of a crew and vectors of keys, or of numbers, whose sums fit the registers. */
#if defined(__AVX512F__)
enum { CREW = 6, COLS = 4 };
#elif defined(__aarch64__) && !defined(EXLM_PORTABLE)
enum { CREW = 6, COLS = 4 };
#elif defined(__AVX2__)
enum { CREW = 4, COLS = 2 };
#else
enum { CREW = 2, COLS = 4 };
#endif
enum { SPAN = 64, CREWS = 8, STORED = 16, MOST_WIDTH = 16384 }; /* keys of a span; crews and tokens of a chunk */

typedef struct {
    const Call *call;
    const CodedCall *coded; /* none: pages are of floats */
    const float *turned;    /* the new keys as they came, of codes */
    int row, head;
    int64_t count, queries;  /* keys that anybody sees; queries of the key head */
    float *q, *keys, *values; /* (queries, dim); of each span (dim, SPAN); (spans · SPAN, dim) */
} Prompt;

static void store_some(void *job, int chunk) {
    const Prompt *p = job;
    const Call *c = p->call;
    float spare[MOST_WIDTH];
    for (int i = chunk * STORED; i < (chunk + 1) * STORED && i < c->rows * c->tokens; i++) {
        if (p->coded) keep_coded(p->coded, i, (float *)p->turned, spare);
        else store(c, i);
    }
}

/* One head of an old token, out of the space of codes; `at`: which number of all is its first. */
static void recall(const Codes *from, int64_t at, int dim, int ways, float *out) {
    int bits = (int)from->bits;
    float folded[MOST_HEAD], centre = (float)(1 << (bits - 1));
    for (int d = 0; d < dim && bits == TRUNCATED; d++) out[d] = half((uint16_t)(from->codes[at + d] << 8));
    if (bits == TRUNCATED) return;
    for (int g = 0; g < dim / GROUP; g++) {
        Sixteen low, high;
        float factor = from_half_bits(from->scales[at / GROUP + g]) / (float)GROUP;
        unfold_group(from->codes + (at + g * GROUP) * bits / 8, bits, &low, &high);
        put(folded + g * GROUP, (low - centre) * factor);
        put(folded + g * GROUP + WIDE, (high - centre) * factor);
    }
    unfold_all(folded, dim, bits, out);
    spread_runs(out, dim, ways, 0);
}

/* The same of any token that there is, key and value. */
static void recall_both(const Prompt *p, int64_t slot, float *key, float *value) {
    const Call *c = p->call;
    const CodedCall *coded = p->coded;
    int dim = c->layer->head_dim, width = c->layer->kv_heads * dim;
    if (slot >= c->past[p->row]) {
        long at = ((long)p->row * c->tokens + (slot - c->past[p->row])) * width + p->head * dim;
        memcpy(key, p->turned + at, dim * sizeof(float));
        memcpy(value, c->v + at, dim * sizeof(float));
        return;
    }
    int64_t at = home(c, p->row, slot) * width + p->head * dim;
    recall(&coded->keys, at, dim, (int)coded->ways, key);
    recall(&coded->values, at, dim, (int)coded->ways, value);
}

static void lay_out_coded(const Prompt *p, int64_t span) {
    int dim = p->call->layer->head_dim;
    float *keys = p->keys + span * SPAN * dim, *values = p->values + span * SPAN * dim, own[MOST_HEAD];
    for (int n = 0; n < SPAN; n++) {
        memset(own, 0, sizeof own);
        if (span * SPAN + n < p->count) recall_both(p, span * SPAN + n, own, values + n * dim);
        else memset(values + n * dim, 0, dim * sizeof(float));
        for (int d = 0; d < dim; d++) keys[d * SPAN + n] = own[d];
    }
}

INLINE void lay_out_span(const Prompt *p, int64_t span, int narrow) {
    const Call *c = p->call;
    int dim = c->layer->head_dim;
    float *keys = p->keys + span * SPAN * dim, *values = p->values + span * SPAN * dim, own[MOST_HEAD];
    for (int n = 0; n < SPAN; n++) {
        int64_t slot = span * SPAN + n;
        int there = slot < p->count;
        const char *key = there ? begin(c, c->keys, p->row, slot, p->head, narrow) : NULL;
        const char *value = there ? begin(c, c->values, p->row, slot, p->head, narrow) : NULL;
        for (int d = 0; d < dim; d += WIDTH) {
            Real one = there ? recalled(key, d, narrow) : r_all(0), other = there ? recalled(value, d, narrow) : r_all(0);
            r_store(own + d, one);
            r_store(values + n * dim + d, other);
        }
        for (int d = 0; d < dim; d++) keys[d * SPAN + n] = own[d];
    }
}

/* Keys and values of a span, and as large a part of the queries, turned. */
static void lay_out_some(void *job, int chunk) {
    const Prompt *p = job;
    const Call *c = p->call;
    const Layer *l = c->layer;
    int64_t spans = (p->count + SPAN - 1) / SPAN, first = p->queries * chunk / spans;
    int shared = l->heads / l->kv_heads;
    if (p->coded) lay_out_coded(p, chunk);
    else if (c->narrow) lay_out_span(p, chunk, 1);
    else lay_out_span(p, chunk, 0);
    for (int64_t n = first; n < p->queries * (chunk + 1) / spans; n++) {
        int64_t token = (int64_t)p->row * c->tokens + n / shared;
        float *to = p->q + n * l->head_dim;
        turn(l, c->q + (token * l->heads + p->head * shared + n % shared) * l->head_dim, c->positions[token], to);
        for (int d = 0; d < l->head_dim; d += WIDE) put(to + d, get(to + d) * l->scale);
    }
}

/* scores (CREW, SPAN) of the queries. */
INLINE void score_crew(const float *const *q, const float *keys, int dim, float *scores) {
    for (int at = 0; at < SPAN; at += COLS * WIDTH) {
        Real sum[CREW][COLS];
#define EACH                                                                                                     \
    _Pragma("GCC unroll 6") for (int r = 0; r < CREW; r++)                                                       \
        _Pragma("GCC unroll 4") for (int c = 0; c < COLS; c++)
        EACH sum[r][c] = r_all(0);
        for (int d = 0; d < dim; d++) {
            Real own[COLS];
#pragma GCC unroll 4
            for (int c = 0; c < COLS; c++) own[c] = r_load(keys + d * SPAN + at + c * WIDTH);
#pragma GCC unroll 6
            for (int r = 0; r < CREW; r++) {
                Real number = r_all(q[r][d]);
#pragma GCC unroll 4
                for (int c = 0; c < COLS; c++) sum[r][c] = r_more(sum[r][c], own[c], number);
            }
        }
        EACH r_store(scores + r * SPAN + at + c * WIDTH, sum[r][c]);
#undef EACH
    }
}

/* outs += shares (CREW, SPAN) · `count` values, in `cols` vectors of their numbers. */
INLINE void add_crew(const float *shares, const float *values, int count, int dim, float *const *outs, int at, int cols) {
    Real sum[CREW][COLS];
#define EACH                                                                                                     \
    _Pragma("GCC unroll 6") for (int r = 0; r < CREW; r++)                                                       \
        _Pragma("GCC unroll 4") for (int c = 0; c < cols; c++)
    EACH sum[r][c] = r_load(outs[r] + at + c * WIDTH);
    for (int n = 0; n < count; n++) {
        Real own[COLS];
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) own[c] = r_load(values + (long)n * dim + at + c * WIDTH);
#pragma GCC unroll 6
        for (int r = 0; r < CREW; r++) {
            Real share = r_all(shares[r * SPAN + n]);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) sum[r][c] = r_more(sum[r][c], own[c], share);
        }
    }
    EACH r_store(outs[r] + at + c * WIDTH, sum[r][c]);
#undef EACH
}

/* What a query has seen so far. */
typedef struct {
    float peak, whole;
} Seen;

/* Scores of a span, of which those from `low` to before `high` are seen, become shares; `out` fades accordingly. */
static void weigh_span(float *scores, int low, int high, Seen *seen, float *out, int dim) {
    if (low >= high) {
        memset(scores, 0, SPAN * sizeof(float));
        return;
    }
    for (int n = 0; n < low; n++) scores[n] = -__builtin_inff();
    for (int n = high; n < SPAN; n++) scores[n] = -__builtin_inff();
    Sixteen largest = get(scores), sum = {0};
    for (int n = WIDE; n < SPAN; n += WIDE) largest = larger(get(scores + n), largest);
    float most = seen->peak, fade = 1;
    for (int n = 0; n < WIDE; n++) most = largest[n] > most ? largest[n] : most;
    if (most > seen->peak) {
        fade = power((Sixteen){0} + (seen->peak - most))[0];
        for (int d = 0; d < dim; d += WIDE) put(out + d, get(out + d) * fade);
        seen->peak = most;
    }
    for (int n = 0; n < SPAN; n += WIDE) {
        Sixteen share = power(get(scores + n) - most);
        put(scores + n, share);
        sum += share;
    }
    seen->whole = seen->whole * fade + total(sum);
}

/* A crew's queries, from `first` on, over all spans that one of them sees. */
static void attend_crew(const Prompt *p, int64_t first) {
    const Call *c = p->call;
    const Layer *l = c->layer;
    int shared = l->heads / l->kv_heads, dim = l->head_dim;
    float scores[CREW * SPAN] __attribute__((aligned(64))), nowhere[MOST_HEAD];
    const float *q[CREW];
    float *outs[CREW];
    int64_t start[CREW], stop[CREW], from = p->count, until = 0; /* keys that each sees, and anybody */
    Seen seen[CREW];
    for (int r = 0; r < CREW; r++) {
        int64_t n = first + r < p->queries ? first + r : p->queries - 1, token = n / shared;
        int64_t last = c->past[p->row] + token + 1;
        q[r] = p->q + n * dim;
        outs[r] = c->out + (((int64_t)p->row * c->tokens + token) * l->heads + p->head * shared + n % shared) * dim;
        if (first + r >= p->queries) outs[r] = nowhere, last = 0;
        stop[r] = last, start[r] = l->window && last > l->window ? last - l->window : 0;
        if (last && start[r] < from) from = start[r];
        if (last > until) until = last;
        seen[r] = (Seen){-__builtin_inff(), 0};
        memset(outs[r], 0, dim * sizeof(float));
    }
    for (int64_t span = from / SPAN; span * SPAN < until; span++) {
        int64_t at = span * SPAN, count = until - at < SPAN ? until - at : SPAN;
        const float *values = p->values + at * dim;
        score_crew(q, p->keys + at * dim, dim, scores);
        for (int r = 0; r < CREW; r++) {
            int64_t low = start[r] - at, high = stop[r] - at;
            weigh_span(scores + r * SPAN, low > 0 ? low < SPAN ? (int)low : SPAN : 0,
                       high < SPAN ? high > 0 ? (int)high : 0 : SPAN, seen + r, outs[r], dim);
        }
        int d = 0;
        for (; d + COLS * WIDTH <= dim; d += COLS * WIDTH) add_crew(scores, values, (int)count, dim, outs, d, COLS);
        for (; d < dim; d += WIDTH) add_crew(scores, values, (int)count, dim, outs, d, 1);
    }
    for (int r = 0; r < CREW && first + r < p->queries; r++)
        for (int d = 0; d < dim; d += WIDE) put(outs[r] + d, get(outs[r] + d) / seen[r].whole);
}

static void attend_crews(void *job, int chunk) {
    const Prompt *p = job;
    for (int64_t n = (int64_t)chunk * CREWS; n < (chunk + 1) * CREWS && n * CREW < p->queries; n++)
        attend_crew(p, n * CREW);
}

/* Returns 0, or 1 if there is no memory. */
static int attend_many(const Call *c, const CodedCall *coded, int64_t longest, int threads) {
    const Layer *l = c->layer;
    Prompt p = {.call = c, .coded = coded, .queries = (int64_t)c->tokens * (l->heads / l->kv_heads)};
    int64_t room = (longest + SPAN - 1) / SPAN * SPAN * l->head_dim;
    int64_t fresh = coded ? (int64_t)c->rows * c->tokens * l->kv_heads * l->head_dim : 0;
    p.keys = malloc((2 * room + p.queries * l->head_dim + fresh) * sizeof(float));
    if (!p.keys) return 1;
    p.values = p.keys + room, p.q = p.values + room, p.turned = p.q + p.queries * l->head_dim;
    share(store_some, &p, (c->rows * c->tokens + STORED - 1) / STORED, threads);
    for (p.row = 0; p.row < c->rows; p.row++)
        for (p.head = 0; p.head < l->kv_heads; p.head++) {
            p.count = c->past[p.row] + c->tokens;
            share(lay_out_some, &p, (int)((p.count + SPAN - 1) / SPAN), threads);
            share(attend_crews, &p, (int)((p.queries + CREW * CREWS - 1) / (CREW * CREWS)), threads);
        }
    free(p.keys);
    return 0;
}

/* Attention of any number of new tokens, over floats and over codes. Returns 0, or 1 if there is no memory. */
EXPORT int exlm_attend(const Call *given, int64_t longest, int threads) {
    if (given->tokens > MOST_FEW) return attend_many(given, NULL, longest, threads);
    return attend_few(given, longest, threads);
}

EXPORT int exlm_attend_coded(const CodedCall *given, int64_t longest, int threads) {
    const Layer *l = given->call.layer;
    int wide = l->kv_heads * l->head_dim > MOST_WIDTH; /* of a token's keys */
    if (given->call.tokens > MOST_FEW && !wide) return attend_many(&given->call, given, longest, threads);
    return look_few(given, longest, threads);
}

#endif
