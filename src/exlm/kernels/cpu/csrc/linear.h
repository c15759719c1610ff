/* The products Python calls: one matrix, or up to three with a norm before and a residual or a gate after. Fused and
   alone give the same bits. */

#ifndef EXLM_LINEAR_H
#define EXLM_LINEAR_H

#include <stdlib.h>

#include "gemm_float.h"
#include "gemm_int8.h"
#include "norm_act.h"

/* y (rows, outputs) = x (rows, inputs) times matrix + bias. Returns 0, or 1 if there is no memory. */
EXPORT int exlm_linear(const Matrix *m, const float *x, int rows, float *y, int threads) {
    if (m->span_count) return gemm_int8(&m, 1, x, rows, &y, (Fusion){0}, threads);
    return gemm_float(m, x, rows, y, threads);
}

/* out (count, inputs) = columns of a matrix as floats: the embeddings of tokens. */
EXPORT void exlm_dequantize_columns(const Matrix *m, const int64_t *ids, int count, float *out) {
    for (int i = 0; i < count; i++, out += m->inputs) {
        if (m->bf12)
            bf12_column(m, ids[i], out);
        else if (m->span_count)
            dequantize_column(m, ids[i], out);
        else
            column_16bit(m, ids[i], out);
    }
}

/* Matrices that share an input. */
typedef struct {
    const Matrix *matrices[MAX_FUSED];
    const float *norm; /* (inputs) the weight of an RMS norm before them; or NULL */
    float eps;
    int32_t count, gated; /* gated: of two, the result is silu(first) * second */
} FusedMatrices;

/* outs (one for each result): (rows, outputs); the residual is added to the first. scratch has room for the normed rows
   and, behind them, two outputs of all rows before a gate. Returns 0, or 1 if there is no memory. */
static int fused_linear(const FusedMatrices *p, const float *x, const float *residual, int rows, float *const *outs,
                        float *scratch, int threads) {
    int width = p->matrices[0]->inputs, failed = 0, all_int8 = 1;
    for (int n = 0; n < p->count; n++) all_int8 &= p->matrices[n]->span_count > 0;
    if (all_int8) {
        RmsNorm norm = {.x = x, .weight = p->norm, .eps = p->eps, .out = scratch, .rows = rows, .width = width};
        Fusion fusion = {p->norm ? &norm : NULL, residual, p->gated};
        return gemm_int8(p->matrices, p->count, x, rows, outs, fusion, threads);
    }
    long count = (long)rows * p->matrices[0]->outputs, vector_end = count / LANES * LANES;
    float *out = outs[0], *gate = scratch + (long)rows * width, *gate_up[] = {gate, gate + count};
    if (p->norm) {
        exlm_rms_norm(x, NULL, p->norm, p->eps, rows, width, NULL, scratch, threads);
        x = scratch;
    }
    if (p->gated) outs = gate_up;
    for (int n = 0; n < p->count; n++) failed |= exlm_linear(p->matrices[n], x, rows, outs[n], threads);
    if (p->gated) exlm_silu_mul(gate_up[0], gate_up[1], out, count, threads);
    if (!residual) return failed;
    for (long i = 0; i < vector_end; i += LANES) store16(out + i, load16(out + i) + load16(residual + i));
    for (long i = vector_end; i < count; i++) out[i] += residual[i];
    return failed;
}

/* a, b, c: the results of the matrices, as many as there are; with a gate only a. */
EXPORT int exlm_fused_linear(const FusedMatrices *p, const float *x, const float *residual, int rows, float *a,
                             float *b, float *c, int threads) {
    const Matrix *first = p->matrices[0];
    float *scratch = malloc(rows * sizeof(float) * (first->inputs + (p->gated ? 2l * first->outputs : 0)));
    if (!scratch) return 1;
    int failed = fused_linear(p, x, residual, rows, (float *[]){a, b, c}, scratch, threads);
    free(scratch);
    return failed;
}

#endif
