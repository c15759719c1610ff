/* Mamba 2: everything between its projections.

   For each head, S (head_dim, state_dim) and a token's x, dt and the group's B and C:

     S <- exp(-exp(A) dt) S + (dt x) B^T;  y = S C + D x

   Rows of S do not depend on each other: four at a time run through all tokens of a block while they are in the L1
   cache. */

#ifndef EXLM_MAMBA2_H
#define EXLM_MAMBA2_H

#include "recurrent.h"

enum { MAMBA_ROWS = 4 }; /* rows of a state that are computed together */

typedef struct {
    ConvWeights conv;         /* over x, B and C */
    const float *conv_scale;  /* (conv.channels) on x, B and C before it; or NULL */
    const float *neg_a;       /* (heads) -exp(A) */
    const float *dt_bias, *d; /* (heads) */
    const float *norm;        /* (heads * head_dim), or NULL: there is only a gate */
    float norm_eps, z_scale, dt_scale, dt_min, dt_max;
    int32_t heads, head_dim, groups, state_dim, norm_groups, norm_before_gate;
} Mamba2Weights;

typedef struct {
    const Mamba2Weights *weights;
    const RecurrentPass *pass;
    const float *projected; /* (rows, tokens, stride) z, x, B, C and dt side by side */
    const float *mixed;     /* (rows, count, channels) x, B and C after the convolution */
    float *out, *working;   /* (rows, tokens, heads, head_dim); see head_state */
    long stride;
    int first, count; /* tokens of this block */
} Mamba2Job;

/* to = decay * from + (dt x) B^T for MAMBA_ROWS rows; sums: their products with C. */
INLINE void mamba_rows(const float *from, float *to, const float *dt_x, const float *b, const float *c, float decay,
                       int dim, float *sums) {
    f32v acc[MAMBA_ROWS][LANE_REGS], factor = f32_set1(decay), x[MAMBA_ROWS];
    _Pragma("GCC unroll 4") for (int r = 0; r < MAMBA_ROWS; r++) {
        x[r] = f32_set1(dt_x[r]);
        EACH_LANE_REG(reg) acc[r][reg] = f32_set1(0);
    }
    for (int i = 0; i < dim; i += LANES)
        EACH_LANE_REG(reg) {
            f32v b_i = f32_load(b + i + reg * VLEN), c_i = f32_load(c + i + reg * VLEN);
            _Pragma("GCC unroll 4") for (int r = 0; r < MAMBA_ROWS; r++) {
                long at = (long)r * dim + i + reg * VLEN;
                f32v s = f32_fma(f32_mul(f32_load(from + at), factor), x[r], b_i);
                f32_store(to + at, s);
                acc[r][reg] = f32_fma(acc[r][reg], s, c_i);
            }
        }
    f32x16 lanes[MAMBA_ROWS];
    memcpy(lanes, acc, sizeof lanes);
    sum16_x4(lanes[0], lanes[1], lanes[2], lanes[3], sums);
}

static void mamba_head_chunk(void *job, int chunk) {
    const Mamba2Job *j = job;
    const Mamba2Weights *w = j->weights;
    const RecurrentPass *pass = j->pass;
    int heads = w->heads, row = chunk / heads, head = chunk % heads, head_dim = w->head_dim, dim = w->state_dim;
    int group = head / (heads / w->groups), tokens = j->count;
    long size = (long)head_dim * dim, width = (long)heads * head_dim, channels = w->conv.channels;
    long first = (long)row * pass->tokens + j->first;
    HeadState state = head_state(pass, row, head, heads, size, j->first, j->working);
    float dt[TOKEN_BLOCK] = {0}, decay[TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++)
        dt[t] = j->projected[(first + t) * j->stride + width + channels + head] * w->dt_scale + w->dt_bias[head];
    for (int t = 0; t < tokens; t += LANES) {
        f32x16 zero = {0}, step = softplus16(load16(dt + t)), low = zero + w->dt_min, high = zero + w->dt_max;
        step = select16(step < low, low, select16(step > high, high, step));
        store16(dt + t, step);
        store16(decay + t, exp16(step * w->neg_a[head]));
    }
    for (int p = 0; p < head_dim; p += MAMBA_ROWS) {
        const float *from = state.from + (long)p * dim;
        float *to = state.to + (long)p * dim;
        for (int t = 0; t < tokens; t++, from = to) {
            const float *mixed = j->mixed + ((long)row * tokens + t) * channels, *x = mixed + (long)head * head_dim + p;
            const float *b = mixed + width + (long)group * dim, *c = b + (long)w->groups * dim;
            float dt_x[MAMBA_ROWS], sums[MAMBA_ROWS], *out = j->out + (first + t) * width + (long)head * head_dim + p;
            for (int r = 0; r < MAMBA_ROWS; r++) dt_x[r] = x[r] * dt[t];
            mamba_rows(from, to, dt_x, b, c, decay[t], dim, sums);
            for (int r = 0; r < MAMBA_ROWS; r++) out[r] = sums[r] + x[r] * w->d[head];
            float *stored = stored_state(pass, row, j->first + t, head, heads, size, state.to);
            if (stored) memcpy(stored + (long)p * dim, to, (size_t)MAMBA_ROWS * dim * sizeof(float));
        }
    }
    for (int t = 0; t < tokens && !(w->norm && w->norm_before_gate); t++) {
        const float *z = j->projected + (first + t) * j->stride + (long)head * head_dim;
        float *out = j->out + (first + t) * width + (long)head * head_dim;
        for (int p = 0; p < head_dim; p += LANES)
            store16(out + p, load16(out + p) * silu16(load16(z + p) * w->z_scale));
    }
}

/* The norm of one group of one token, and the gate if it comes after it. */
static void mamba_norm_chunk(void *job, int chunk) {
    const Mamba2Job *j = job;
    const Mamba2Weights *w = j->weights;
    long width = (long)w->heads * w->head_dim, per_group = width / w->norm_groups, begin = chunk % w->norm_groups;
    long n = chunk / w->norm_groups, token = n / j->count * j->pass->tokens + j->first + n % j->count;
    begin *= per_group;
    float *out = j->out + token * width + begin;
    const float *z = j->projected + token * j->stride + begin, *norm = w->norm + begin;
    f32x16 squares = {0};
    for (long i = 0; i < per_group; i += LANES) squares += load16(out + i) * load16(out + i);
    float factor = 1.0f / sqrtf(sum16(squares) / (float)per_group + w->norm_eps);
    for (long i = 0; i < per_group; i += LANES) {
        f32x16 y = load16(out + i) * factor * load16(norm + i);
        store16(out + i, w->norm_before_gate ? y * silu16(load16(z + i) * w->z_scale) : y);
    }
}

/* out (rows, tokens, heads, head_dim). Returns 0, or 1 if there is no memory. */
EXPORT int exlm_mamba2(const Mamba2Weights *weights, const RecurrentPass *pass, const float *projected, float *out,
                       int threads) {
    int block = pass->tokens < TOKEN_BLOCK ? pass->tokens : TOKEN_BLOCK, heads = weights->heads;
    long rows = pass->rows, channels = weights->conv.channels, mixed_size = rows * block * channels;
    long width = (long)heads * weights->head_dim, states = rows * width * weights->state_dim;
    float *mixed = malloc((mixed_size + (needs_working_states(pass) ? states : 0)) * sizeof(float));
    if (!mixed) return 1;
    Mamba2Job job = {weights, pass, projected, mixed, out, mixed + mixed_size, width + channels + heads, 0, 0};
    ConvJob conv = {.weights = &weights->conv, .pass = pass, .x = projected + width, .x_stride = job.stride};
    conv.factor = weights->conv_scale;
    conv.out = mixed;
    for (int first = 0; first < pass->tokens; first += block) {
        job.first = conv.first = first;
        job.count = conv.count = pass->tokens - first < block ? pass->tokens - first : block;
        causal_conv(&conv, threads);
        parallel_for(mamba_head_chunk, &job, pass->rows * heads, job.count * states < MIN_CHUNK_WORK ? 1 : threads);
        if (weights->norm)
            parallel_for(mamba_norm_chunk, &job, pass->rows * job.count * weights->norm_groups,
                         rows * job.count * width < MIN_CHUNK_WORK ? 1 : threads);
    }
    free(mixed);
    return 0;
}

#endif
