/* Packed matrices on a processor: products and single columns. Plain C, called through ctypes.

   One library for each instruction set, from the same source. AMX is never used: virtual machines announce it
   without letting programs use it. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#include "attn_decode.h"
#include "gemm_int8.h"
#include "gemm_f16.h"
#include "narrow16.h"
#include "packed.h"
#include "threadpool.h"
#include "repack_panels.h"
#include "repack_bf12.h"
#include "norm_act.h"

/* y (rows, outputs) = x (rows, inputs) @ matrix + bias. Returns 0, or 1 if there is no memory. */
EXPORT int exlm_linear(const Matrix *m, const float *x, int rows, float *y, int threads) {
    if (m->span_count) return gemm_int8(&m, 1, x, rows, &y, (Fusion){0}, threads);
    return gemm_f16(m, x, rows, y, threads);
}

/* out (count, inputs): what single columns stand for. */
EXPORT void exlm_columns(const Matrix *m, const int64_t *ids, int count, float *out) {
    for (int i = 0; i < count; i++, out += m->inputs) {
        if (m->bf12) bf12_column(m, ids[i], out);
        else dequantize_column(m, ids[i], out);
    }
}
