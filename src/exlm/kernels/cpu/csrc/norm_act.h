/* RMS norm and the gated activation silu(gate) * up. */

#ifndef EXLM_NORM_ACT_H
#define EXLM_NORM_ACT_H

#include <math.h>

#include "simd.h"
#include "threadpool.h"

enum { MIN_CHUNK_WORK = 1 << 14 }; /* floats below which waking another thread costs more than it saves */

/* Splits items into chunks of at least MIN_CHUNK_WORK; returns how many chunks there are. */
static int split_chunks(long floats, int items, int *per_chunk) {
    long max_chunks = floats / MIN_CHUNK_WORK + 1;
    int chunks = max_chunks > 64 ? 64 : (int)max_chunks;
    if (chunks > items) chunks = items;
    *per_chunk = (items + chunks - 1) / chunks;
    return (items + *per_chunk - 1) / *per_chunk;
}

typedef struct {
    const float *x, *residual, *weight; /* residual: added to x first; or NULL */
    float *sum, *out, eps;              /* sum: x + residual */
    int rows, width, per_chunk;
} RmsNorm;

static void rms_norm_row(const RmsNorm *n, int row) {
    const float *x = n->x + (long)row * n->width;
    float *out = n->out + (long)row * n->width;
    int vector_end = n->width / LANES * LANES, rest = n->width - vector_end;
    if (n->residual) {
        const float *residual = n->residual + (long)row * n->width;
        float *sum = n->sum + (long)row * n->width;
        for (int i = 0; i < vector_end; i += LANES) store16(sum + i, load16(x + i) + load16(residual + i));
        for (int i = vector_end; i < n->width; i++) sum[i] = x[i] + residual[i];
        x = sum;
    }
    f32x16 squares = {0};
    for (int i = 0; i < vector_end; i += LANES) squares += load16(x + i) * load16(x + i);
    if (rest) squares += load16_tail(x + vector_end, rest) * load16_tail(x + vector_end, rest);
    float factor = 1.0f / sqrtf(sum16(squares) / (float)n->width + n->eps);
    for (int i = 0; i < vector_end; i += LANES) store16(out + i, load16(x + i) * factor * load16(n->weight + i));
    for (int i = vector_end; i < n->width; i++) out[i] = x[i] * factor * n->weight[i];
}

static void rms_norm_chunk(void *job, int chunk) {
    const RmsNorm *n = job;
    for (int i = 0, row = chunk * n->per_chunk; i < n->per_chunk && row < n->rows; i++, row++) rms_norm_row(n, row);
}

/* out = (x + residual) / rms(x + residual) * weight, and sum = x + residual; residual and sum may be NULL. */
EXPORT void exlm_rms_norm(const float *x, const float *residual, const float *weight, float eps, int rows, int width,
                          float *sum, float *out, int threads) {
    RmsNorm job = {x, residual, weight, sum, out, eps, rows, width, 0};
    int chunks = split_chunks((long)rows * width, rows, &job.per_chunk);
    parallel_for(rms_norm_chunk, &job, chunks, threads);
}

typedef struct {
    const float *gate, *up;
    float *out;
    long count;
    int per_chunk; /* in vectors of 16 */
} SiluMul;

INLINE f32x16 sigmoid16(f32x16 x) { return 1.0f / (exp16(-x) + 1.0f); }

INLINE f32x16 silu16(f32x16 x) { return x / (exp16(-x) + 1.0f); }

static void silu_mul_chunk(void *job, int chunk) {
    const SiluMul *g = job;
    long stop = (long)(chunk + 1) * g->per_chunk * LANES;
    for (long i = (long)chunk * g->per_chunk * LANES; i < stop && i < g->count; i += LANES) {
        if (i + LANES <= g->count) {
            store16(g->out + i, silu16(load16(g->gate + i)) * load16(g->up + i));
            continue;
        }
        int rest = (int)(g->count - i);
        f32x16 last = silu16(load16_tail(g->gate + i, rest)) * load16_tail(g->up + i, rest);
        memcpy(g->out + i, &last, rest * sizeof(float));
    }
}

/* out = silu(gate) * up. */
EXPORT void exlm_silu_mul(const float *gate, const float *up, float *out, long count, int threads) {
    SiluMul job = {gate, up, out, count, 0};
    int chunks = split_chunks(count * 4 /* exp is costly */, (int)((count + LANES - 1) / LANES), &job.per_chunk);
    parallel_for(silu_mul_chunk, &job, chunks, threads);
}

#endif
