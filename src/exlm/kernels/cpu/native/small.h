/* What lies between the matrices: norms and gates. */

#ifndef EXLM_SMALL_H
#define EXLM_SMALL_H

#include <math.h>

#include "pool.h"
#include "vectors.h"

enum { SMALL = 1 << 14 }; /* numbers that are not worth waking another thread for */

static int chunks_of(long numbers, int items, int *each) {
    long most = numbers / SMALL + 1;
    int chunks = most > 64 ? 64 : (int)most;
    if (chunks > items) chunks = items;
    *each = (items + chunks - 1) / chunks;
    return (items + *each - 1) / *each;
}

typedef struct {
    const float *x, *more, *weight;
    float *sum, *out, eps;
    int rows, width, each;
} Norm;

static void norm_row(const Norm *n, int row) {
    const float *x = n->x + (long)row * n->width;
    int whole = n->width / WIDE * WIDE, rest = n->width - whole;
    Sixteen squares = {0};
    if (n->more) {
        const float *more = n->more + (long)row * n->width;
        float *sum = n->sum + (long)row * n->width;
        for (int i = 0; i < whole; i += WIDE) put(sum + i, get(x + i) + get(more + i));
        for (int i = whole; i < n->width; i++) sum[i] = x[i] + more[i];
        x = sum;
    }
    for (int i = 0; i < whole; i += WIDE) squares += get(x + i) * get(x + i);
    if (rest) squares += get_some(x + whole, rest) * get_some(x + whole, rest);
    float factor = 1.0f / sqrtf(total(squares) / (float)n->width + n->eps), *out = n->out + (long)row * n->width;
    for (int i = 0; i < whole; i += WIDE) put(out + i, get(x + i) * factor * get(n->weight + i));
    for (int i = whole; i < n->width; i++) out[i] = x[i] * factor * n->weight[i];
}

static void norm_chunk(void *job, int chunk) {
    const Norm *n = job;
    for (int row = chunk * n->each; row < (chunk + 1) * n->each && row < n->rows; row++) norm_row(n, row);
}

/* out = (x + more) / its root mean square · weight; the addition, if there is one, goes to `sum`. */
EXPORT void exlm_norm(const float *x, const float *more, const float *weight, float eps, int rows, int width,
                      float *sum, float *out, int threads) {
    Norm job = {.x = x, .more = more, .weight = weight, .sum = sum, .out = out, .eps = eps, .rows = rows, .width = width};
    int chunks = chunks_of((long)rows * width, rows, &job.each);
    share(norm_chunk, &job, chunks, threads);
}

typedef struct {
    const float *gate, *up;
    float *out;
    long count;
    int each;
} Gate;

static Sixteen silu(Sixteen x) { return x / (power(-x) + 1.0f); }

static void gate_chunk(void *job, int chunk) {
    const Gate *g = job;
    long stop = (long)(chunk + 1) * g->each * WIDE;
    for (long i = (long)chunk * g->each * WIDE; i < stop && i < g->count; i += WIDE) {
        if (i + WIDE <= g->count) {
            put(g->out + i, silu(get(g->gate + i)) * get(g->up + i));
            continue;
        }
        int rest = (int)(g->count - i);
        Sixteen last = silu(get_some(g->gate + i, rest)) * get_some(g->up + i, rest);
        memcpy(g->out + i, &last, rest * sizeof(float));
    }
}

/* out = silu(gate) · up. */
EXPORT void exlm_silu(const float *gate, const float *up, float *out, long count, int threads) {
    Gate job = {.gate = gate, .up = up, .out = out, .count = count};
    int chunks = chunks_of(count * 4, (int)((count + WIDE - 1) / WIDE), &job.each);
    share(gate_chunk, &job, chunks, threads);
}

#endif
