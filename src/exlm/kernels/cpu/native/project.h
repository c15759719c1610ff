/* Matrices together with what stands around them, in one call: a norm before, an addition or a gate behind.
   Each step is the one that exlm_norm, exlm_product and exlm_silu take, so the bits are theirs. */

#ifndef EXLM_PROJECT_H
#define EXLM_PROJECT_H

#include "matrix.h"
#include "small.h"

typedef struct {
    const Matrix *matrices[MOST_TOGETHER];
    const float *norm;   /* (inputs) the scale of a root mean square norm, or none */
    float eps;
    int32_t count, gated; /* gated: there are two, and the answer is silu(first) · second */
} Projection;

/* outs: one for each answer, (rows, outputs); `residual` is added to the first. `room` is for rows of inputs behind a
   norm, then for rows of two outputs before a gate. Returns 0, or 1 if there is no memory. */
static int project(const Projection *p, const float *x, const float *residual, int rows, float *const *outs,
                   float *room, int threads) {
    int width = p->matrices[0]->inputs, failed = 0;
    long outputs = (long)rows * p->matrices[0]->outputs, whole = outputs / WIDE * WIDE;
    float *out = outs[0], *gate = room + (long)rows * width, *pair[] = {gate, gate + outputs};
#if defined(WHOLE_NUMBERS)
    Norm norm = {.x = x, .weight = p->norm, .eps = p->eps, .out = room, .rows = rows, .width = width};
    int banded = 1;
    for (int n = 0; n < p->count; n++) banded &= p->matrices[n]->spans > 0;
    if (banded) {
        Around around = {p->norm ? &norm : NULL, residual, p->gated};
        return banded_products(p->matrices, p->count, x, rows, outs, around, threads);
    }
#endif
    if (p->norm) {
        exlm_norm(x, NULL, p->norm, p->eps, rows, width, NULL, room, threads);
        x = room;
    }
    if (p->gated) outs = pair;
    for (int n = 0; n < p->count; n++) failed |= exlm_product(p->matrices[n], x, rows, outs[n], threads);
    if (p->gated) exlm_silu(pair[0], pair[1], out, outputs, threads);
    if (!residual) return failed;
    for (long i = 0; i < whole; i += WIDE) put(out + i, get(out + i) + get(residual + i));
    for (long i = whole; i < outputs; i++) out[i] += residual[i];
    return failed;
}

EXPORT int exlm_project(const Projection *p, const float *x, const float *residual, int rows, float *a, float *b,
                        float *c, int threads) {
    const Matrix *first = p->matrices[0];
    float *room = malloc(rows * sizeof(float) * (first->inputs + (p->gated ? 2l * first->outputs : 0)));
    if (!room) return 1;
    int failed = project(p, x, residual, rows, (float *[]){a, b, c}, room, threads);
    free(room);
    return failed;
}

#endif
