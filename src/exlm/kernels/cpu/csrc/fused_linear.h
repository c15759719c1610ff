/* Matrices together with what stands around them, in one call: a norm before, an addition or a gate behind.
   Each step is the one that exlm_norm, exlm_product and exlm_silu take, so the bits are theirs. */

#ifndef EXLM_PROJECT_H
#define EXLM_PROJECT_H

#include "packed.h"
#include "norm_act.h"

typedef struct {
    const Matrix *matrices[MAX_FUSED];
    const float *norm;   /* (inputs) the scale of a root mean square norm, or none */
    float eps;
    int32_t count, gated; /* gated: there are two, and the answer is silu(first) · second */
} LinearGroup;

/* outs: one for each answer, (rows, outputs); `residual` is added to the first. `room` is for rows of inputs behind a
   norm, then for rows of two outputs before a gate. Returns 0, or 1 if there is no memory. */
static int fused_linear(const LinearGroup *p, const float *x, const float *residual, int rows, float *const *outs,
                   float *scratch, int threads) {
    int width = p->matrices[0]->inputs, failed = 0;
    long outputs = (long)rows * p->matrices[0]->outputs, whole = outputs / LANES * LANES;
    float *out = outs[0], *gate = scratch + (long)rows * width, *pair[] = {gate, gate + outputs};
    RmsNorm norm = {.x = x, .weight = p->norm, .eps = p->eps, .out = scratch, .rows = rows, .width = width};
    int all_panels = 1;
    for (int n = 0; n < p->count; n++) all_panels &= p->matrices[n]->span_count > 0;
    if (all_panels) {
        Fusion fusion = {p->norm ? &norm : NULL, residual, p->gated};
        return gemm_int8(p->matrices, p->count, x, rows, outs, fusion, threads);
    }
    if (p->norm) {
        exlm_rms_norm(x, NULL, p->norm, p->eps, rows, width, NULL, scratch, threads);
        x = scratch;
    }
    if (p->gated) outs = pair;
    for (int n = 0; n < p->count; n++) failed |= exlm_linear(p->matrices[n], x, rows, outs[n], threads);
    if (p->gated) exlm_silu_mul(pair[0], pair[1], out, outputs, threads);
    if (!residual) return failed;
    for (long i = 0; i < whole; i += LANES) store16(out + i, load16(out + i) + load16(residual + i));
    for (long i = whole; i < outputs; i++) out[i] += residual[i];
    return failed;
}

EXPORT int exlm_fused_linear(const LinearGroup *p, const float *x, const float *residual, int rows, float *a, float *b,
                        float *c, int threads) {
    const Matrix *first = p->matrices[0];
    float *scratch = malloc(rows * sizeof(float) * (first->inputs + (p->gated ? 2l * first->outputs : 0)));
    if (!scratch) return 1;
    int failed = fused_linear(p, x, residual, rows, (float *[]){a, b, c}, scratch, threads);
    free(scratch);
    return failed;
}

#endif
