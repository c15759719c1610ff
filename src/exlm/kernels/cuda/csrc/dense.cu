// A dense matrix with few outputs and few rows of x: routers, and the gates of recurrent mixers. y = norm(x) W^T + bias.
//
// A thread block computes BLOCK_OUTPUTS outputs of BLOCK_ROWS rows: with several outputs, x is read less often. Its
// threads hold the weights, times those of the norm, in registers, and each sums products of the same inputs in the same
// order for every row: a row's output is the same bits in any batch of at most 64 rows. The RMS norm's sum of squares is
// taken on the way: 1 / rms is one factor of a row, applied after the sum.
//
// Set when compiling (-D): INPUTS, BLOCK_OUTPUTS, BLOCK_ROWS, RMS_NORM.

#include "ptx.h"

#define THREADS 128
#define CHUNKS ((INPUTS + THREADS * 8 - 1) / (THREADS * 8))  // of 8 inputs, for each thread
#define SUMS (BLOCK_OUTPUTS + RMS_NORM)                      // for each row: one of each output, then of squares

static_assert(INPUTS % 8 == 0 && BLOCK_OUTPUTS * BLOCK_ROWS <= THREADS);

struct DenseParams {
    const u16 *x, *weight;            // (rows, INPUTS); (outputs, INPUTS)
    const float *norm_weight, *bias;  // (INPUTS); (outputs) or null
    u16* y;                           // (rows, outputs)
    i64 rows;
    float eps;
    int outputs;
};
CHECK_SIZEOF(DenseParams);

DEVICE void unpack_halves(uint4 halves, float (&to)[8]) {
    const u32 words[4] = {halves.x, halves.y, halves.z, halves.w};
    UNROLL
    for (int i = 0; i < 8; i++) to[i] = cvt_f32_f16((u16)(words[i / 2] >> i % 2 * 16));
}
DEVICE uint4 load_chunk(const u16* row, int at, bool exists) {
    return exists && at < INPUTS ? *(const uint4*)(row + at) : uint4{0, 0, 0, 0};
}

// Grid: (blocks of outputs, blocks of rows). Shared memory: SUMS of each row and warp.
extern "C" __global__ void __launch_bounds__(THREADS) dense_few_outputs(const __grid_constant__ DenseParams params) {
    extern __shared__ __align__(16) char smem[];
    float(*sums)[THREADS / 32][SUMS] = (float(*)[THREADS / 32][SUMS])smem;
    const int first = blockIdx.x * BLOCK_OUTPUTS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float weight[BLOCK_OUTPUTS][CHUNKS][8];
    UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        const int at = (c * THREADS + threadIdx.x) * 8;
        UNROLL
        for (int o = 0; o < BLOCK_OUTPUTS; o++)
            unpack_halves(
                load_chunk(params.weight + (i64)(first + o) * INPUTS, at, first + o < params.outputs), weight[o][c]
            );
        UNROLL
        for (int i = 0; RMS_NORM && i < 8; i++) {
            const float scale = at < INPUTS ? params.norm_weight[at + i] : 0.0f;
            UNROLL
            for (int o = 0; o < BLOCK_OUTPUTS; o++) weight[o][c][i] *= scale;
        }
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    UNROLL
    for (int r = 0; r < BLOCK_ROWS; r++) {
        const i64 row = (i64)blockIdx.y * BLOCK_ROWS + r;
        float sum[SUMS] = {};
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            float x[8];
            unpack_halves(load_chunk(params.x + row * INPUTS, (c * THREADS + threadIdx.x) * 8, row < params.rows), x);
            UNROLL
            for (int i = 0; i < 8; i++) {
                UNROLL
                for (int o = 0; o < BLOCK_OUTPUTS; o++) sum[o] = fmaf(x[i], weight[o][c][i], sum[o]);
                if (RMS_NORM) sum[SUMS - 1] = fmaf(x[i], x[i], sum[SUMS - 1]);
            }
        }
        UNROLL
        for (int s = 0; s < SUMS; s++) {
            UNROLL
            for (int mask = 16; mask; mask /= 2) sum[s] += shfl_xor(sum[s], mask);
            if (lane == 0) sums[r][warp][s] = sum[s];
        }
    }
    __syncthreads();
    const int r = threadIdx.x / BLOCK_OUTPUTS, output = first + threadIdx.x % BLOCK_OUTPUTS;
    const i64 row = (i64)blockIdx.y * BLOCK_ROWS + r;
    if (r >= BLOCK_ROWS || row >= params.rows || output >= params.outputs) return;
    float product = 0, squares = 0;
    UNROLL
    for (int w = 0; w < THREADS / 32; w++) {
        product += sums[r][w][threadIdx.x % BLOCK_OUTPUTS];
        if (RMS_NORM) squares += sums[r][w][SUMS - 1];
    }
    if (RMS_NORM) product *= rsqrtf(squares / INPUTS + params.eps);
    params.y[row * params.outputs + output] = cvt_f16_f32(product + (params.bias ? params.bias[output] : 0.0f));
}
