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

/* outs: one for each matrix, (rows, outputs); `residual` is added to the first. Returns 0, or 1 if there is no
   memory. */
EXPORT int exlm_project(const Projection *p, const float *x, const float *residual, int rows, float *a, float *b,
                        float *c, int threads) {
    const Matrix *first = p->matrices[0];
    float *outs[MOST_TOGETHER] = {a, b, c}, *scratch = NULL;
    long inputs = (long)rows * first->inputs, outputs = (long)rows * first->outputs;
    if (p->norm || p->gated) {
        scratch = malloc((inputs + 2 * outputs) * sizeof(float));
        if (!scratch) return 1;
    }
    if (p->norm) {
        exlm_norm(x, NULL, p->norm, p->eps, rows, first->inputs, NULL, scratch, threads);
        x = scratch;
    }
    if (p->gated) outs[0] = scratch + inputs, outs[1] = scratch + inputs + outputs;
    int failed = multiply_all(p->matrices, p->count, x, rows, outs, threads);
    if (p->gated) exlm_silu(outs[0], outs[1], a, outputs, threads);
    if (residual) {
        long whole = outputs / WIDE * WIDE;
        for (long i = 0; i < whole; i += WIDE) put(a + i, get(a + i) + get(residual + i));
        for (long i = whole; i < outputs; i++) a[i] += residual[i];
    }
    free(scratch);
    return failed;
}

#endif
