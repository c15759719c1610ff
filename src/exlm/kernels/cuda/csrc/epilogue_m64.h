// Epilogue of gemm_m64: accumulators -> shared memory -> scale, bias, activation, residual -> y and the next GEMM's
// input. N8 is the number of n8 tiles of rows that this thread block finishes: all, or with split-K its share.
#pragma once
#include "tile_m64.h"

// Four outputs of a row, with one access where they are aligned; those behind `count` do not exist.
DEVICE uint2 load4(const u16* from, bool aligned, int count) {
    if (aligned) return count > 0 ? *(const uint2*)from : uint2{};
    u32 halves[4];
    UNROLL
    for (int k = 0; k < 4; k++) halves[k] = k < count ? from[k] : 0;
    return uint2{halves[0] | halves[1] << 16, halves[2] | halves[3] << 16};
}
DEVICE void store4(u16* y, long at, bool aligned, int count, const float (&number)[4]) {
    if (FP32_OUT) {
        float* to = (float*)y + at;
        if (aligned && count > 0) *(float4*)to = float4{number[0], number[1], number[2], number[3]};
        UNROLL
        for (int k = 0; k < 4; k++)
            if (!aligned && k < count) to[k] = number[k];
        return;
    }
    u16* to = y + at;
    if (aligned) {
        if (count > 0)
            *(uint2*)to = uint2{cvt_f16_f32(number[0]) | (u32)cvt_f16_f32(number[1]) << 16,
                                cvt_f16_f32(number[2]) | (u32)cvt_f16_f32(number[3]) << 16};
        return;
    }
    UNROLL
    for (int k = 0; k < 4; k++)
        if (k < count) to[k] = cvt_f16_f32(number[k]);
}

// Accumulators to shared memory, (weight, row, output).
#define SUM_STRIDE (BLOCK_N + 4)  // of a row: padding against bank conflicts
template <int N8> DEVICE void acc_to_smem(const float (*acc)[N8][4], float* sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = N8 * 8;
    UNROLL
    for (int s = 0; s < GLU_WEIGHTS; s++) {
        UNROLL
        for (int t = 0; t < WEIGHT_TILES; t++) {
            UNROLL
            for (int c = 0; c < N8; c++) {
                UNROLL
                for (int i = 0; i < 4; i++)
                    sums[(s * rows + c * 8 + lane % 4 * 2 + i % 2) * SUM_STRIDE + (warp * WEIGHT_TILES + t) * 16
                         + lane / 4 + i / 2 * 8] = acc[s * WEIGHT_TILES + t][c][i];
            }
        }
    }
    __syncthreads();
}

// Finished rows as the next GEMM's input: 8-row tiles in its B layout.
DEVICE void store_prepacked_rows(
    const EpilogueTarget& target, const BlockEpilogue& epilogue, int group, int first_n8, int num_n8, int outputs,
    const float* y
) {
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK_N * num_n8; i += THREADS) {
        const int output = i % BLOCK_N, n8 = i / BLOCK_N;
        if (group * BLOCK_N + output >= outputs) continue;
        u16 halves[8];
        UNROLL
        for (int r = 0; r < 8; r++) halves[r] = epilogue.normed(target, output, y[(n8 * 8 + r) * SUM_STRIDE + output]);
        store_prepacked_8rows(target, epilogue.slots[output], (first_n8 + n8) * 8, halves);
    }
}

#define ROW_THREADS (BLOCK_N / 4)             // threads of one row: four outputs each
#define ROWS_AT_ONCE (THREADS / ROW_THREADS)  // rows that the block works on side by side

// Bias and residual of a thread's four outputs. Those of the first rows are loaded before the sums are complete.
template <int N8> struct BiasResidual {
    static const int num_rows = N8 * 8 / ROWS_AT_ONCE;                                 // of a thread
    static const int batch = num_rows % 4 ? num_rows % 2 ? 1 : 2 : 4;  // that it loads together
    uint2 residual[batch];
    float bias[GLU_WEIGHTS][4];
    int output, count, first_n8, num_rows_here;
    bool aligned;

    DEVICE void load_rows(const GemmParams& params, const GemmOperand& operand, int row) {
        UNROLL
        for (int i = 0; i < batch; i++, row += ROWS_AT_ONCE) {
            const u16* from = params.residual + (long)(first_n8 * 8 + row) * operand.stride + output;
            residual[i] = params.residual && row < num_rows_here ? load4(from, aligned, count) : uint2{};
        }
    }
    DEVICE void load(const GemmParams& params, int at, int group, int begin_n8, int end_n8) {
        const GemmOperand& operand = params.operands[at];
        output = group * BLOCK_N + threadIdx.x % ROW_THREADS * 4;
        count = operand.outputs - output;
        first_n8 = begin_n8;
        num_rows_here = min(end_n8 * 8, params.rows) - first_n8 * 8;
        aligned = operand.outputs % 4 == 0 && operand.stride % 4 == 0
            && ((size_t)operand.y | (size_t)params.residual) % (FP32_OUT ? 16 : 8) == 0;
        UNROLL
        for (int s = 0; s < GLU_WEIGHTS; s++) {
            UNROLL
            for (int k = 0; k < 4; k++) {
                const u16* biases = params.operands[at + s].bias;
                bias[s][k] = biases && k < count ? cvt_f32_f16(biases[output + k]) : 0.0f;
            }
        }
        load_rows(params, operand, threadIdx.x / ROW_THREADS);
    }
};

// Sums of squares for the RMS norm of the next GEMM: for each row in one and the same order.
template <int BATCH>
DEVICE void store_rms_partials(const EpilogueTarget& target, float (&squares)[BATCH], int group, int row, int end) {
    const int lanes = ROW_THREADS < 32 ? ROW_THREADS : 32, parts = ROW_THREADS / lanes;
    UNROLL
    for (int mask = lanes / 2; mask; mask /= 2) {
        UNROLL
        for (int i = 0; i < BATCH; i++) squares[i] += shfl_xor(squares[i], mask);
    }
    UNROLL
    for (int i = 0; i < BATCH; i++, row += ROWS_AT_ONCE)
        if (threadIdx.x % lanes == 0 && row < end)
            target.rms_partials[row * target.num_partials + group * parts + threadIdx.x % ROW_THREADS / lanes] =
                squares[i];
}

template <int N8>
DEVICE void epilogue(
    const GemmParams& params, const ChainArgs& chain, int at, int group, BiasResidual<N8>& bias_residual,
    const float (*acc)[N8][4], char* smem
) {
    float* sums = (float*)smem;
    const BlockEpilogue& block = *(const BlockEpilogue*)(smem + EPILOGUE_OFFSET);
    const int rows = N8 * 8, batch = BiasResidual<N8>::batch, column = threadIdx.x % ROW_THREADS * 4;
    const int first_n8 = bias_residual.first_n8, end = bias_residual.num_rows_here;
    acc_to_smem<N8>(acc, sums);
    const GemmOperand& operand = params.operands[at];
    // Not unrolled: code that runs once is bound by the instruction cache. A batch of rows shares its loads.
    NO_UNROLL
    for (int n = 0, row = threadIdx.x / ROW_THREADS; n < BiasResidual<N8>::num_rows;
         n += batch, row += batch * ROWS_AT_ONCE) {
        if (n) bias_residual.load_rows(params, operand, row);
        float squares[batch] = {};
        UNROLL
        for (int i = 0; i < batch; i++) {
            const int here = row + i * ROWS_AT_ONCE;
            if (here >= end) break;
            const float rms_scale = IN_PREPACKED && RMS_NORM ? block.rms_scales[first_n8 * 8 + here] : 1.0f;
            float y[4];
            UNROLL
            for (int s = 0; s < GLU_WEIGHTS; s++) {
                const float4 four = *(const float4*)(sums + (s * rows + here) * SUM_STRIDE + column);
                const float of[4] = {four.x, four.y, four.z, four.w};
                UNROLL
                for (int k = 0; k < 4; k++) {
                    const float factor = params.operands[at + s].weight.factor * rms_scale;
                    const float sum = fmaf(of[k], factor, bias_residual.bias[s][k]);
                    y[k] = s ? y[k] * sum : ACTIVATION ? activate(sum) : sum;
                }
            }
            const u32 words[2] = {bias_residual.residual[i].x, bias_residual.residual[i].y};
            UNROLL
            for (int k = 0; k < 4; k++) y[k] += cvt_f32_f16((u16)(words[k / 2] >> k % 2 * 16));
            if (!OUT_PREPACKED || operand.y)
                store4(operand.y, (long)(first_n8 * 8 + here) * operand.stride + bias_residual.output,
                       bias_residual.aligned, bias_residual.count, y);
            if (!OUT_PREPACKED) continue;
            UNROLL
            for (int k = 0; k < 4; k++) {
                y[k] = k < bias_residual.count ? cvt_f32_f16(cvt_f16_f32(y[k])) : 0.0f;
                squares[i] = fmaf(y[k], y[k], squares[i]);
            }
            *(float4*)(sums + here * SUM_STRIDE + column) = float4{y[0], y[1], y[2], y[3]};
        }
        if (OUT_PREPACKED && chain.target.rms_partials)
            store_rms_partials(chain.target, squares, group, first_n8 * 8 + row, first_n8 * 8 + end);
    }
    if (OUT_PREPACKED)
        store_prepacked_rows(chain.target, block, group, first_n8, (end + 7) / 8, operand.outputs, sums);
}
