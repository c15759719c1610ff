// What the GEMM kernels share: their parameters, how a row of activations becomes packed activations, and the parts
// of the epilogue that do not depend on the tile.
//
// Packed activations are the second operand of the mma in the order of the weight's packed inputs (act-order
// permutation applied, zeros for padding), 8 halves of a row at a time:
//
//     gemm_m16 (fragment order):  [k tile][pair of k16 steps][row][c]: inputs 4c .. 4c+3 of both steps: the B
//                                 registers of lane 4 row + c for two steps, in one 16-byte load.
//     gemm_m64 (LDMATRIX_LAYOUT): [k tile][k16 step][half][row]: 8 rows are one 8 x 8 matrix of ldmatrix or wgmma.
//
// Set when compiling, besides what weight_tile.h wants: WARP_TILES (weight tiles that a warp multiplies at a time),
// WARPS, STAGES (of the cp.async ring), N8_TILES (n8 tiles of the mma: rows of activations / 8), RMS_NORM (x is
// normalised first), ACTIVATION (0: each weight has an output of its own; else two weights, gate and up, and the
// output is act(gate) * up: 1 silu, 2 tanh-approximated gelu, 3 gelu, 4 relu), FP32_OUT (outputs are float32),
// LDMATRIX_LAYOUT, IN_PREPACKED and OUT_PREPACKED (prepacked_acts.h).
#pragma once
#include "prepacked_acts.h"
#include "weight_tile.h"

#ifndef LDMATRIX_LAYOUT
#define LDMATRIX_LAYOUT 0
#endif
#ifndef IN_PREPACKED
#define IN_PREPACKED 0
#define OUT_PREPACKED 0
#endif

#define GLU_WEIGHTS (ACTIVATION ? 2 : 1)             // weights of one output: gate and up, or one
#define WEIGHT_TILES (WARP_TILES / GLU_WEIGHTS)      // of a warp's tiles, those of each weight
#define THREADS (WARPS * 32)

// From which input each packed number comes. `perm` and `norm_weight` lie in the fragment order of packed activations.
struct InputPerm {
    const u16* perm;           // (k tile, pair of steps, c, 8) inputs, num_inputs for padding; null: in order
    const float* norm_weight;  // the same: the RMS norm's weight
    uint4* packed_x;
};

struct GemmOperand {
    MmaWeight weight;
    InputPerm input;
    const u16* bias;  // (outputs) or null
    u16* y;           // (rows, stride) float16, with FP32_OUT float32
    int outputs, stride;
    int first_block;  // of its thread blocks (gemm_m16) or groups of outputs (gemm_m64)
};

struct GemmParams {
    GemmOperand operands[NUM_WEIGHTS];
    const u16* x;         // (rows, inputs)
    const u16* residual;  // like y, added; or null
    float eps;
    int rows, inputs;
};

struct ChainArgs {
    EpilogueTarget target;      // OUT_PREPACKED
    const float* rms_partials;  // IN_PREPACKED and RMS_NORM: (row, num_partials) sums of squares of x
    int num_partials;
    float norm_scale;           // the norm's weight was divided by it, to stay within float16
};

CHECK_SIZEOF(GemmParams);
CHECK_SIZEOF(ChainArgs);

// A row of x into shared memory, a zero behind it (that is what padding refers to), and the sum of squares of each
// 256 of its numbers: in an order that depends on nothing but the row.
#define ZERO_PAD 8  // halves behind the row
DEVICE void load_row(const GemmParams& params, int row, u16* x_smem, float* squares, int warps) {
    const int lane = threadIdx.x % 32;
    const uint4* x = (const uint4*)(params.x + (long)row * params.inputs);
    if (threadIdx.x == 0) x_smem[params.inputs] = 0;
    const int in_flight = RMS_NORM ? 2 : 3;  // chunks of 256 that a warp loads before it needs the first
    for (int first = threadIdx.x / 32; first * 256 < params.inputs; first += in_flight * warps) {
        uint4 piece[in_flight];
        UNROLL
        for (int n = 0; n < in_flight; n++) {
            const int at = (first + n * warps) * 32 + lane;
            piece[n] = at * 8 < params.inputs ? x[at] : uint4{0, 0, 0, 0};
        }
        UNROLL
        for (int n = 0; n < in_flight; n++) {
            const int chunk = first + n * warps, at = chunk * 32 + lane;
            if (at * 8 < params.inputs) ((uint4*)x_smem)[at] = piece[n];
            if (!RMS_NORM || chunk * 256 >= params.inputs) continue;
            const u32 words[4] = {piece[n].x, piece[n].y, piece[n].z, piece[n].w};
            float sum = 0;
            UNROLL
            for (int w = 0; w < 4; w++)
                sum = fmaf(low_half(words[w]), low_half(words[w]), fmaf(high_half(words[w]), high_half(words[w]), sum));
            UNROLL
            for (int mask = 16; mask; mask /= 2) sum += shfl_xor(sum, mask);
            if (lane == 0) squares[chunk] = sum;
        }
    }
}

// 1 / rms of a row, from the sums of squares of its chunks. All lanes of a warp together.
DEVICE float rms_scale(const GemmParams& params, const float* squares) {
    if (!RMS_NORM) return 1.0f;
    const int chunks = (params.inputs + 255) / 256;
    float sum = 0;
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32) sum += squares[chunk];
    UNROLL
    for (int mask = 16; mask; mask /= 2) sum += shfl_xor(sum, mask);
    return rsqrtf(sum / params.inputs + params.eps);
}

// Packs 8 halves, inputs 4c .. 4c+3 of two k16 steps. The permutation is loaded early: it does not depend on x.
struct ActPacker {
    uint4 perm;
    float4 norm_weight[2];

    // unit: (k tile, pair of steps, c)
    DEVICE void load(const GemmParams& params, const GemmOperand& operand, int unit) {
        if (unit >= operand.weight.k_tiles * 16) return;
        if (operand.input.perm) {
            perm = ((const uint4*)operand.input.perm)[unit];
        } else {
            const int k = unit / 4 * 32 + unit % 4 * 4;
            perm = {in_order(params, k), in_order(params, k + 2), in_order(params, k + 16), in_order(params, k + 18)};
        }
        UNROLL
        for (int i = 0; i < 2; i++)
            if (RMS_NORM) norm_weight[i] = ((const float4*)operand.input.norm_weight)[unit * 2 + i];
    }
    DEVICE static u32 in_order(const GemmParams& params, int input) {
        return min(input, params.inputs) | (u32)min(input + 1, params.inputs) << 16;
    }

    // All numbers are gathered before the first is needed: no branches.
    DEVICE void store(const GemmParams& params, const GemmOperand& operand, int unit, int row, const u16* x_smem,
                      float scale, uint4* packed_x) const {
        if (unit >= operand.weight.k_tiles * 16) return;
        const u32 pairs[4] = {perm.x, perm.y, perm.z, perm.w};
        const float4 w0 = norm_weight[0], w1 = norm_weight[1];
        const float weights[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
        u32 numbers[8], out[4];
        UNROLL
        for (int i = 0; i < 8; i++) numbers[i] = x_smem[pairs[i / 2] >> i % 2 * 16 & 65535];
        UNROLL
        for (int i = 0; i < 8; i++)
            if (RMS_NORM) numbers[i] = cvt_f16_f32(cvt_f32_f16((u16)numbers[i]) * scale * weights[i]);
        UNROLL
        for (int w = 0; w < 4; w++) out[w] = numbers[2 * w] | numbers[2 * w + 1] << 16;
        if (!LDMATRIX_LAYOUT) {
            packed_x[(unit / 4 * params.rows + row) * 4 + unit % 4] = uint4{out[0], out[1], out[2], out[3]};
        } else {
            UNROLL
            for (int w = 0; w < 4; w++)
                ((u32*)packed_x)[((unit / 4 * 4 + w) * params.rows + row) * 4 + unit % 4] = out[w];
        }
    }
};

// Activations for a GEMM that does not pack them itself. Grid: (row, 256 units of 8 halves, input permutation);
// params.rows is the number of rows that there is space for.
extern "C" __global__ void __launch_bounds__(256) pack_activations(const __grid_constant__ GemmParams params) {
    extern __shared__ __align__(128) char smem[];
    const GemmOperand& operand = params.operands[blockIdx.z];
    const int row = blockIdx.x, unit = blockIdx.y * 256 + threadIdx.x;
    u16* x_smem = (u16*)smem;
    float* squares = (float*)(x_smem + params.inputs + ZERO_PAD);
    ActPacker packer;
    packer.load(params, operand, unit);
    if (!LDMATRIX_LAYOUT) griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (LDMATRIX_LAYOUT) griddepcontrol_launch_dependents();  // not earlier: gemm_m64 would fill the SMs
    load_row(params, row, x_smem, squares, 8);
    __syncthreads();
    const float scale = rms_scale(params, squares);
    packer.store(params, operand, unit, row, x_smem, scale, operand.input.packed_x);
}

// -- epilogue ------------------------------------------------------------------------------------------------------

DEVICE float activate(float x) {
    if (ACTIVATION == 1) return __fdividef(x, 1.0f + __expf(-x));
    if (ACTIVATION == 2) return __fdividef(x, 1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    if (ACTIVATION == 3) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    return fmaxf(x, 0.0f);
}

// Shared memory of a thread block's epilogue: where its outputs go in the next GEMM's input, and the 1 / rms of its
// rows.
template <int OUTPUTS, int ROWS_> struct EpilogueSmem {
    uint4 slots[OUTPUTS];
    float norm_weight[OUTPUTS], rms_scales[ROWS_];

    DEVICE void load_async(const EpilogueTarget& target, int first, int num_outputs) {  // outputs from `first` on
        for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) {
            if (first + i < num_outputs)
                cp_async<16>(cvta_to_shared(slots + i), (const char*)(target.slots + first + i));
            if (target.norm_weight && i < OUTPUTS / 4 && first + 4 * i < num_outputs)
                cp_async<16>(cvta_to_shared(norm_weight + 4 * i), (const char*)(target.norm_weight + first + 4 * i));
        }
    }
    DEVICE u16 normed(const EpilogueTarget& target, int output, float number) const {
        return cvt_f16_f32(target.norm_weight ? number * norm_weight[output] : number);
    }
};

// 1 / rms of rows from the partial sums of squares that the kernel before has left, LANES lanes for each row. The first
// partials are loaded early, before the pipeline fills up.
template <int LANES> struct RmsPartials {
    static const int at_once = LANES < 4 ? 32 / LANES : 8;
    float partial[at_once];

    DEVICE void load(const GemmParams& params, const ChainArgs& chain, int row, int first) {
        UNROLL
        for (int n = 0; n < at_once; n++) {
            const int at = first + threadIdx.x % LANES + n * LANES;
            partial[n] = row < params.rows && at < chain.num_partials
                ? chain.rms_partials[row * chain.num_partials + at] : 0.0f;
        }
    }
    DEVICE void load(const GemmParams& params, const ChainArgs& chain) { load(params, chain, threadIdx.x / LANES, 0); }
    DEVICE void reduce(const GemmParams& params, const ChainArgs& chain, float* rms_scales) {
        for (int first = 0; first < params.rows; first += THREADS / LANES) {
            const int row = first + threadIdx.x / LANES;
            if (first) load(params, chain, row, 0);
            float sum = 0;
            for (int at = 0; at < chain.num_partials; at += at_once * LANES) {
                if (at) load(params, chain, row, at);
                UNROLL
                for (int n = 0; n < at_once; n++) sum += partial[n];
            }
            UNROLL
            for (int mask = LANES / 2; mask; mask /= 2) sum += shfl_xor(sum, mask);
            if (threadIdx.x % LANES == 0 && row < params.rows)
                rms_scales[row] = rsqrtf(sum / params.inputs + params.eps) * chain.norm_scale;
        }
    }
};
