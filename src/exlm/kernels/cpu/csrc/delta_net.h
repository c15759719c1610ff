/* Gated delta net and Kimi delta attention: everything between the projections.

   For each head, S (key_dim, value_dim) and a token's q, k (length one), v, decay d (one number, or one for each key
   channel) and write strength beta:

     S <- d * S;  delta = beta * (v - S^T k);  S <- S + k delta^T;  out = S^T q / sqrt(key_dim)

   As S^T k after the decay is the sum of S * (d * k) before it, one walk over S does the update and the output of a
   token and S^T k of the next. Columns of S do not depend on each other: a few registers of columns run through all
   tokens of a block while their part of S is in the L1 cache. */

#ifndef EXLM_DELTA_NET_H
#define EXLM_DELTA_NET_H

#include "recurrent.h"

enum { MAX_KEY_DIM = 256 };

#define L2_NORM_EPS 1e-6f

/* Registers of columns that walk together: two sums in each hide the latency of a fused multiply-add. */
#if defined(__AVX512F__)
enum { DELTA_REGS = 4 };
#else
enum { DELTA_REGS = LANE_REGS };
#endif
enum { DELTA_COLUMNS = DELTA_REGS * VLEN };

typedef struct {
    ConvWeights conv;     /* over q, k and v */
    const float *neg_a;   /* (value_heads) -exp(A) */
    const float *dt_bias; /* (value_heads, decays of a head) */
    const float *norm;    /* (value_dim) */
    float norm_eps, beta_scale, query_scale;
    int32_t key_heads, value_heads, key_dim, value_dim;
    int32_t channel_decay, sigmoid_gate; /* a decay for each key channel; the gate's activation, else silu */
} DeltaNetWeights;

typedef struct {
    const DeltaNetWeights *weights;
    const RecurrentPass *pass;
    const float *mixed;     /* (rows, count, channels) q, k and v after the convolution */
    const float *z, *a, *b; /* (rows, tokens) of what exlm_delta_net gets */
    float *out, *working;   /* (rows, tokens, value_heads, value_dim); see head_state */
    int first, count;       /* tokens of this block */
} DeltaNetJob;

/* One head's inputs for the tokens of a block. */
typedef struct {
    float q[TOKEN_BLOCK][MAX_KEY_DIM], k[TOKEN_BLOCK][MAX_KEY_DIM];
    float channel_decay[TOKEN_BLOCK][MAX_KEY_DIM]; /* with channel_decay, else `decay` */
    float decayed_k[TOKEN_BLOCK][MAX_KEY_DIM];     /* d * k */
    float decay[TOKEN_BLOCK], beta[TOKEN_BLOCK];
} DeltaHead;

/* out = x / |x| * scale */
static void l2_normalize(const float *x, int dim, float scale, float *out) {
    f32x16 squares = {0};
    for (int i = 0; i < dim; i += LANES) squares += load16(x + i) * load16(x + i);
    float factor = 1.0f / sqrtf(sum16(squares) + L2_NORM_EPS);
    for (int i = 0; i < dim; i += LANES) store16(out + i, load16(x + i) * factor * scale);
}

static void prepare_delta_head(const DeltaNetJob *job, int row, int head, DeltaHead *h) {
    const DeltaNetWeights *w = job->weights;
    int dim = w->key_dim, heads = w->value_heads, key_head = head / (heads / w->key_heads);
    long first = (long)row * job->pass->tokens + job->first;
    for (int t = 0; t < job->count; t++) {
        const float *q = job->mixed + ((long)row * job->count + t) * w->conv.channels + (long)key_head * dim;
        l2_normalize(q, dim, w->query_scale, h->q[t]);
        l2_normalize(q + (long)w->key_heads * dim, dim, 1.0f, h->k[t]);
    }
    float a[TOKEN_BLOCK] = {0}, b[TOKEN_BLOCK] = {0};
    for (int t = 0; t < job->count; t++) {
        b[t] = job->b[(first + t) * heads + head];
        if (!w->channel_decay) a[t] = job->a[(first + t) * heads + head] + w->dt_bias[head];
    }
    for (int t = 0; t < job->count; t += LANES) {
        store16(h->beta + t, sigmoid16(load16(b + t)) * w->beta_scale);
        store16(h->decay + t, exp16(softplus16(load16(a + t)) * w->neg_a[head]));
    }
    for (int t = 0; t < job->count; t++)
        for (int i = 0; i < dim; i += LANES) {
            f32x16 decay = (f32x16){0} + h->decay[t];
            if (w->channel_decay) {
                f32x16 x = load16(job->a + ((first + t) * heads + head) * dim + i);
                decay = exp16(softplus16(x + load16(w->dt_bias + (long)head * dim + i)) * w->neg_a[head]);
                store16(h->channel_decay[t] + i, decay);
            }
            store16(h->decayed_k[t] + i, load16(h->k[t] + i) * decay);
        }
}

/* Where a block of columns is read and written, and how far apart their rows are. */
typedef struct {
    const float *from;
    float *to;
    int from_stride, to_stride;
} ColumnWalk;

/* One walk over `regs` registers of columns: update, output, and S^T k of the next token if there is one. */
INLINE void delta_walk(const DeltaHead *h, ColumnWalk walk, int t, int key_dim, int regs, int channel_decay,
                       int has_next, const f32v *delta, f32v *out, f32v *next_sums) {
    const float *from = walk.from, *q = h->q[t], *k = h->k[t], *next = h->decayed_k[has_next ? t + 1 : t];
    float *to = walk.to;
    f32v head_decay = f32_set1(h->decay[t]), sums[DELTA_REGS], next_own[DELTA_REGS], own_delta[DELTA_REGS];
    EACH_REG(v) {
        sums[v] = next_own[v] = f32_set1(0);
        own_delta[v] = delta[v];
    }
    for (int i = 0; i < key_dim; i++, from += walk.from_stride, to += walk.to_stride) {
        f32v q_i = f32_set1(q[i]), k_i = f32_set1(k[i]), next_i = f32_set1(has_next ? next[i] : 0);
        f32v decay = channel_decay ? f32_set1(h->channel_decay[t][i]) : head_decay;
        EACH_REG(v) {
            f32v s = f32_fma(f32_mul(f32_load(from + v * VLEN), decay), k_i, own_delta[v]);
            f32_store(to + v * VLEN, s);
            sums[v] = f32_fma(sums[v], s, q_i);
            if (has_next) next_own[v] = f32_fma(next_own[v], s, next_i);
        }
    }
    EACH_REG(v) {
        out[v] = sums[v];
        next_sums[v] = next_own[v];
    }
}

static void copy_columns(const float *from, int from_stride, float *to, int to_stride, int rows, int columns) {
    for (int i = 0; i < rows; i++)
        memcpy(to + (long)i * to_stride, from + (long)i * from_stride, (size_t)columns * sizeof(float));
}

/* All tokens of the block for `regs` registers of columns from `column` on. */
INLINE void delta_columns(const DeltaNetJob *job, const DeltaHead *h, HeadState state, int row, int head, int column,
                          int regs, int channel_decay) {
    const DeltaNetWeights *w = job->weights;
    int key_dim = w->key_dim, dim = w->value_dim, heads = w->value_heads, columns = regs * VLEN;
    long size = (long)key_dim * dim, value_at = 2l * w->key_heads * key_dim + (long)head * dim + column;
    float packed[MAX_KEY_DIM * DELTA_COLUMNS] __attribute__((aligned(64)));
    f32v sums[DELTA_REGS], delta[DELTA_REGS], out[DELTA_REGS];
    ColumnWalk walk = {state.from + column, packed, dim, columns};
    EACH_REG(v) sums[v] = f32_set1(0);
    for (int i = 0; i < key_dim; i++) {
        f32v k_i = f32_set1(h->decayed_k[0][i]);
        EACH_REG(v) sums[v] = f32_fma(sums[v], f32_load(walk.from + (long)i * dim + v * VLEN), k_i);
    }
    for (int t = 0; t < job->count; t++) {
        const float *value = job->mixed + ((long)row * job->count + t) * w->conv.channels + value_at;
        float *to = job->out + (((long)row * job->pass->tokens + job->first + t) * heads + head) * dim + column;
        f32v beta = f32_set1(h->beta[t]);
        int is_last = t + 1 == job->count;
        EACH_REG(v) delta[v] = f32_mul(f32_sub(f32_load(value + v * VLEN), sums[v]), beta);
        if (is_last) {
            walk.to = state.to + column;
            walk.to_stride = dim;
            delta_walk(h, walk, t, key_dim, regs, channel_decay, 0, delta, out, sums);
        } else
            delta_walk(h, walk, t, key_dim, regs, channel_decay, 1, delta, out, sums);
        EACH_REG(v) f32_store(to + v * VLEN, out[v]);
        float *stored = stored_state(job->pass, row, job->first + t, head, heads, size, state.to);
        if (stored) copy_columns(walk.to, walk.to_stride, stored + column, dim, key_dim, columns);
        walk.from = walk.to;
        walk.from_stride = walk.to_stride;
    }
}

/* out = out / rms(out) * norm * act(z) for one head of a token. */
static void norm_and_gate(const DeltaNetWeights *w, const float *z, float *out) {
    f32x16 squares = {0};
    for (int i = 0; i < w->value_dim; i += LANES) squares += load16(out + i) * load16(out + i);
    float factor = 1.0f / sqrtf(sum16(squares) / (float)w->value_dim + w->norm_eps);
    for (int i = 0; i < w->value_dim; i += LANES) {
        f32x16 gate = w->sigmoid_gate ? sigmoid16(load16(z + i)) : silu16(load16(z + i));
        store16(out + i, load16(out + i) * factor * load16(w->norm + i) * gate);
    }
}

static void delta_head_chunk(void *job, int chunk) {
    const DeltaNetJob *j = job;
    const DeltaNetWeights *w = j->weights;
    int heads = w->value_heads, row = chunk / heads, head = chunk % heads, dim = w->value_dim, column = 0;
    HeadState state = head_state(j->pass, row, head, heads, (long)w->key_dim * dim, j->first, j->working);
    DeltaHead h;
    prepare_delta_head(j, row, head, &h);
#define COLUMNS(regs)                                            \
    if (w->channel_decay)                                        \
        delta_columns(j, &h, state, row, head, column, regs, 1); \
    else                                                         \
        delta_columns(j, &h, state, row, head, column, regs, 0)
    for (; column + DELTA_COLUMNS <= dim; column += DELTA_COLUMNS) COLUMNS(DELTA_REGS);
    for (; column < dim; column += LANES) COLUMNS(LANE_REGS);
#undef COLUMNS
    for (int t = 0; t < j->count; t++) {
        long at = (((long)row * j->pass->tokens + j->first + t) * heads + head) * dim;
        norm_and_gate(w, j->z + at, j->out + at);
    }
}

/* out (rows, tokens, value_heads, value_dim); qkv (rows, tokens, channels), z as out, a (rows, tokens, value_heads or
   value_heads * key_dim), b (rows, tokens, value_heads). Returns 0, or 1 if there is no memory. */
EXPORT int exlm_delta_net(const DeltaNetWeights *weights, const RecurrentPass *pass, const float *qkv, const float *z,
                          const float *a, const float *b, float *out, int threads) {
    int block = pass->tokens < TOKEN_BLOCK ? pass->tokens : TOKEN_BLOCK;
    long rows = pass->rows, channels = weights->conv.channels, mixed_size = rows * block * channels;
    long states = rows * weights->value_heads * weights->key_dim * weights->value_dim;
    float *mixed = malloc((mixed_size + (needs_working_states(pass) ? states : 0)) * sizeof(float));
    if (!mixed) return 1;
    DeltaNetJob job = {weights, pass, mixed, z, a, b, out, mixed + mixed_size, 0, 0};
    ConvJob conv = {.weights = &weights->conv, .pass = pass, .x = qkv, .x_stride = channels, .out = mixed};
    for (int first = 0; first < pass->tokens; first += block) {
        job.first = conv.first = first;
        job.count = conv.count = pass->tokens - first < block ? pass->tokens - first : block;
        causal_conv(&conv, threads);
        parallel_for(delta_head_chunk, &job, pass->rows * weights->value_heads,
                     job.count * states < MIN_CHUNK_WORK ? 1 : threads);
    }
    free(mixed);
    return 0;
}

#endif
