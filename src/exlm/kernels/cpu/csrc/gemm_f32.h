/* Rows times a tile of outputs, from unpacked weights.

   A row and an output have sixteen sums, one for each lane, over the places in order; at the end they are added
   up in one fixed order. Nothing else decides the bits: not the other rows, the other outputs, or the threads. */

#ifndef EXLM_PRODUCT_H
#define EXLM_PRODUCT_H

#include "simd.h"
#include "simd16.h"

enum { OUT_TILE = 8, MAX_BLOCK_M = 96, X_BLOCK_BYTES = 1 << 19 }; /* rows that are multiplied while weights are at hand */

/* sums (rows, TILE, 16) += x · weights (TILE, PANEL), `slots` of them. */
INLINE void f32_microkernel(const float *weights, const float *x, long k_padded, int kblocks, int rows, float *sums) {
    int outputs = F32_NR(rows);
    for (int o = 0; o < OUT_TILE; o += outputs) {
        f32v sum[8][F32_MR][LANE_REGS];
#define EACH                                                                                                     \
    _Pragma("GCC unroll 8") for (int n = 0; n < outputs; n++)                                                    \
        _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)                                                   \
            _Pragma("GCC unroll 4") for (int reg = 0; reg < LANE_REGS; reg++)
        EACH sum[n][r][reg] = f32_load(sums + (r * OUT_TILE + o + n) * LANES + reg * VLEN);
        const float *w = weights + o * SLICE_K;
        for (int i = 0; i < kblocks * LANES; i += LANES) {
            f32v own[F32_MR][LANE_REGS];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int reg = 0; reg < LANE_REGS; reg++) own[r][reg] = f32_load(x + r * k_padded + i + reg * VLEN);
#pragma GCC unroll 8
            for (int n = 0; n < outputs; n++)
#pragma GCC unroll 4
                for (int reg = 0; reg < LANE_REGS; reg++) {
                    f32v weight = f32_load(w + n * SLICE_K + i + reg * VLEN);
                    if (rows > 1) KEEP_IN_REG(weight);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++) sum[n][r][reg] = f32_fma(sum[n][r][reg], weight, own[r][reg]);
                }
        }
        EACH f32_store(sums + (r * OUT_TILE + o + n) * LANES + reg * VLEN, sum[n][r][reg]);
#undef EACH
    }
}

static void gemm_slice(const float *weights, const float *x, long k_padded, int kblocks, int rows, float *sums) {
    while (rows >= 3) {
        f32_microkernel(weights, x, k_padded, kblocks, 3, sums);
        rows -= 3, x += 3 * k_padded, sums += 3 * OUT_TILE * LANES;
    }
    if (rows == 2) f32_microkernel(weights, x, k_padded, kblocks, 2, sums);
    if (rows == 1) f32_microkernel(weights, x, k_padded, kblocks, 1, sums);
}

/* The sixteen sums of each output of a quad, added up: halves, quarters, then the last four crosswise. */
INLINE void sum_out4(const float *sums, float *out) {
    sum16_x4(load16(sums), load16(sums + LANES), load16(sums + 2 * LANES), load16(sums + 3 * LANES), out);
}

#endif
