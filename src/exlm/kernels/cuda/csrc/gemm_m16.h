// GEMM of packed weights with 1 to 16 rows of activations, shared by gemm_m16.cu and moe.cu. Decoding is bound by
// reading the weights, so everything is arranged around that stream.
//
// A thread block owns WEIGHT_TILES n16 columns of outputs and all inputs; its warps take the k tiles in turn (warp w:
// tiles w, w + WARPS, ...) and their sums are added in the order of the warps at the end. Every warp copies its own
// tiles with cp.async into a ring of STAGES stages, which starts before the kernel that computes the activations has
// ended (PDL).
//
// Up to 16 rows are summed in one and the same order, so a row's output is the same bits in any batch of 1 to 16.
//
// The mma multiplies activations by 1024 + code (weight_tile.h). What that adds, (1024 + zero point) times the sum of
// the group's activations, is subtracted with one fma a group; the sum itself is an mma with a first operand of ones.
//
// A single row is packed by every thread block for itself while its first tiles are under way (FUSED_PACK); more rows
// are packed once by pack_activations. It is the same code and gives the same bits.
//
// Set when compiling, besides what pack_activations.h wants: SEPARATE_PERM (gate and up have orders of inputs of
// their own), FUSED_PACK, PACK_ITEMS (units of 8 halves of a row that a thread packs), and for MoE, where one launch
// multiplies weights of several widths, RUNTIME_BITS (bit n: there are codes of n bits; BITS has the widest).
#pragma once
#include "pack_activations.h"

#ifndef RUNTIME_BITS
#define RUNTIME_BITS 0
#endif

#define AT_RUNTIME 1  // as a template's BITS_: the width is known only at run time
#define STAGE_BYTES (WARP_TILES * MAX_TILE_BYTES)
#define NUM_PERMS (SEPARATE_PERM ? 2 : 1)
#define PREFETCH_ACTS (!FUSED_PACK && !SEPARATE_PERM && N8_TILES == 1)  // there are registers for the next activations
#define TARGET_THREADS (N8_TILES > 1 ? 512 : 576)  // of an SM: fewer threads have more registers
#define MIN_BLOCKS (THREADS < TARGET_THREADS ? TARGET_THREADS / THREADS : 1)
#define RING_BYTES (WARPS * STAGES * STAGE_BYTES)
#define SUM_BYTES (WARPS * WARP_TILES * 16 * N8_TILES * 8 * 4)
#define EPILOGUE_OFFSET (RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES)

static_assert(STAGES >= 2, "one stage is multiplied while the others are copied");
static_assert(N8_TILES == 1 || N8_TILES == 2, "1 to 16 rows of activations");
static_assert(!FUSED_PACK || N8_TILES == 1, "thread blocks pack a single row");
static_assert(WARP_TILES % GLU_WEIGHTS == 0, "gate and up get as many of a warp's tiles");
static_assert(!SEPARATE_PERM || GLU_WEIGHTS == 2, "only gate and up have two orders of inputs");

typedef EpilogueSmem<WEIGHT_TILES * 16, N8_TILES * 8> BlockEpilogue;

// Copies the k tiles of one weight that belong to a warp: in each n16 column the tiles `warp`, `warp` + WARPS, ...
template <int BITS_> struct TileIterator {
    const char* from;  // the next tile of the block's first n16 column
    int k_tile, column_bytes, bits;

    DEVICE TileIterator(int width) : bits(BITS_ == AT_RUNTIME ? width : BITS_) {}
    DEVICE void seek(const MmaWeight& m, int n_tile, int first) {
        k_tile = first;
        const bool fine = k_tile < m.fine_k_tiles;
        const int tile_bytes = fine ? TILE_BYTES(bits, FINE_KSTEPS) : TILE_BYTES(bits, GROUP_KSTEPS);
        column_bytes = (fine ? m.fine_k_tiles : m.k_tiles - m.fine_k_tiles) * tile_bytes;
        from = (fine ? m.fine : m.main) + (long)n_tile * column_bytes
            + (long)(fine ? k_tile : k_tile - m.fine_k_tiles) * tile_bytes;
    }
    // Start copying the next tile of each of the block's columns; nothing if there is none.
    DEVICE void copy_next(const MmaWeight& m, int n_tile, int lane, u32 to) {
        if (k_tile >= m.k_tiles) return;
        const int columns = m.n_tiles - n_tile;
        const bool fine = k_tile < m.fine_k_tiles;
        if (FINE_KSTEPS != GROUP_KSTEPS && fine) copy(TILE_BYTES(bits, FINE_KSTEPS), columns, lane, to);
        else copy(TILE_BYTES(bits, GROUP_KSTEPS), columns, lane, to);
        k_tile += WARPS;
        if (fine && k_tile >= m.fine_k_tiles) seek(m, n_tile, k_tile);
        else from += WARPS * (fine ? TILE_BYTES(bits, FINE_KSTEPS) : TILE_BYTES(bits, GROUP_KSTEPS));
    }
    DEVICE void copy(int bytes, int columns, int lane, u32 to) const {
        UNROLL
        for (int t = 0; t < WEIGHT_TILES; t++) {
            if (t == 0 || t < columns) {
                const char* at = from + (long)t * column_bytes + lane * 16;
                UNROLL
                for (int i = 0; i < MAX_TILE_BYTES; i += 512)
                    if (bytes - i >= 512 || lane * 16 < bytes - i) cp_async<16>(to + t * MAX_TILE_BYTES + i, at + i);
            }
        }
    }
};

struct PackedActs {
    const uint4* words;
    int rows;
};

// A lane's B registers for the 128 inputs of a k tile: two for each k16 step and n8 tile of rows.
struct BFragments {
    uint4 words[N8_TILES][4];

    DEVICE void load(const PackedActs& x, int k_tile, int lane) {
        const uint4 zeros = {0, 0, 0, 0};
        UNROLL
        for (int c = 0; c < N8_TILES; c++) {
            const int row = c * 8 + lane / 4;
            UNROLL
            for (int p = 0; p < 4; p++)
                words[c][p] = row < x.rows ? x.words[((k_tile * 4 + p) * x.rows + row) * 4 + lane % 4] : zeros;
        }
    }
    DEVICE uint2 step(int c, int number) const {
        const uint4 pair = words[c][number / 2];
        return number % 2 ? uint2{pair.z, pair.w} : uint2{pair.x, pair.y};
    }
};

// The sum of activations in each group, for the zero-point correction: an mma with a first operand of ones. Of the
// lane's two rows (columns 2c and 2c + 1 of the n8 tile).
template <int KSTEPS> struct GroupSums {
    float2 sum[N8_TILES][8 / KSTEPS];

    DEVICE void compute(const BFragments& x) {
        const u32 ones = 0x3c003c00;
        UNROLL
        for (int c = 0; c < N8_TILES; c++) {
            UNROLL
            for (int group = 0; group < 8 / KSTEPS; group++) {
                float d[4] = {};
                UNROLL
                for (int step = 0; step < KSTEPS; step++) {
                    const uint2 b = x.step(c, group * KSTEPS + step);
                    mma_m16n8k16(d, ones, ones, ones, ones, b.x, b.y);
                }
                sum[c][group] = float2{d[0], d[1]};
            }
        }
    }
};

// acc += tiles * x for one k tile of WEIGHT_TILES columns. Columns take turns, and every second k step has
// accumulators of its own: an mma has a long latency and a short issue interval.
template <int BITS_, int KSTEPS>
DEVICE void mma_tile(
    const char* tiles, const BFragments& x, const GroupSums<KSTEPS>& sums, float (*acc)[N8_TILES][4], int lane
) {
    constexpr int groups = 8 / KSTEPS, acc_sets = KSTEPS > 1 ? 2 : 1;
    const int factor_g8 = RowG8<BITS_>::factor;
    const float zero_g = ZERO_POINTS == 0 ? -1024.0f - (1 << (BITS_ - 1)) : -1024.0f;
    const float zero_g8 = ZERO_POINTS == 0 ? -1024.0f - factor_g8 * (1 << (BITS_ - 1)) : -1024.0f;
    TileFragment<BITS_, KSTEPS> fragment[WEIGHT_TILES];
    TileCodes<BITS_> codes[WEIGHT_TILES];
    UNROLL
    for (int t = 0; t < WEIGHT_TILES; t++) {
        fragment[t].template load<true>(tiles + t * MAX_TILE_BYTES, lane);
        codes[t] = fragment[t].codes();
    }
    UNROLL
    for (int group = 0; group < groups; group++) {
        float part[WEIGHT_TILES][acc_sets][N8_TILES][4] = {};
        UNROLL
        for (int step = 0; step < KSTEPS; step++) {
            UNROLL
            for (int t = 0; t < WEIGHT_TILES; t++) {
                u32 a[4];
                codes[t].template unpack<factor_g8>(group * KSTEPS + step, a);
                UNROLL
                for (int c = 0; c < N8_TILES; c++) {
                    const uint2 b = x.step(c, group * KSTEPS + step);
                    mma_m16n8k16(part[t][step % acc_sets][c], a[0], a[1], a[2], a[3], b.x, b.y);
                }
            }
        }
        UNROLL
        for (int t = 0; t < WEIGHT_TILES; t++) {
            const u32* tables = fragment[t].tables + group;
            const u32 scales = tables[0];
            const float scale[2] = {low_half(scales), high_half(scales) * (1.0f / factor_g8)};
            float zero[2] = {zero_g, zero_g8};
            if (ZERO_POINTS == 2) {
                const u32 zeros = tables[groups];  // negated zero points
                zero[0] += low_half(zeros);
                zero[1] += high_half(zeros) * factor_g8;
            }
            const u32 mins = HAS_MINS ? tables[(NUM_TABLES - 1) * groups] : 0;  // negated minimums
            UNROLL
            for (int c = 0; c < N8_TILES; c++) {
                UNROLL
                for (int i = 0; i < 4; i++) {
                    const float sum = i % 2 ? sums.sum[c][group].y : sums.sum[c][group].x;
                    const float both = acc_sets == 2 ? part[t][0][c][i] + part[t][1][c][i] : part[t][0][c][i];
                    float& to = acc[t][c][i];
                    to = fmaf(scale[i / 2], fmaf(zero[i / 2], sum, both), to);
                    if (HAS_MINS) to = fmaf(i / 2 ? high_half(mins) : low_half(mins), sum, to);
                }
            }
        }
    }
}

// The same for a width that may be known only at run time.
template <int BITS_, int KSTEPS, class... Args> DEVICE void mma_tile_any_bits(int bits, Args&... args) {
    if (BITS_ != AT_RUNTIME) mma_tile<BITS_ == AT_RUNTIME ? 2 : BITS_, KSTEPS>(args...);
    else if (RUNTIME_BITS >> 2 & 1 && bits == 2) mma_tile<2, KSTEPS>(args...);
    else if (RUNTIME_BITS >> 3 & 1 && bits == 3) mma_tile<3, KSTEPS>(args...);
    else if (RUNTIME_BITS >> 4 & 1 && bits == 4) mma_tile<4, KSTEPS>(args...);
    else if (RUNTIME_BITS >> 5 & 1 && bits == 5) mma_tile<5, KSTEPS>(args...);
    else if (RUNTIME_BITS >> 6 & 1 && bits == 6) mma_tile<6, KSTEPS>(args...);
    else if (RUNTIME_BITS >> 8 & 1) mma_tile<8, KSTEPS>(args...);
}

// One k tile of one weight, or of gate and up, which share their activations; `runtime_bits` has a nibble for each.
template <int GATE_BITS, int UP_BITS, int KSTEPS>
DEVICE void mma_stage_ksteps(
    const char* tiles, const BFragments& x, float (*acc)[N8_TILES][4], int lane, int runtime_bits
) {
    GroupSums<KSTEPS> sums;
    sums.compute(x);
    mma_tile_any_bits<GATE_BITS, KSTEPS>(runtime_bits & 15, tiles, x, sums, acc, lane);
    if (UP_BITS) {
        const char* up_tiles = tiles + WEIGHT_TILES * MAX_TILE_BYTES;
        float (*up_acc)[N8_TILES][4] = acc + WEIGHT_TILES;
        mma_tile_any_bits<UP_BITS ? UP_BITS : 2, KSTEPS>(runtime_bits >> 4, up_tiles, x, sums, up_acc, lane);
    }
}
template <int GATE_BITS, int UP_BITS>
DEVICE void mma_stage(
    const MmaWeight& m, int k_tile, const char* tiles, const BFragments& x, float (*acc)[N8_TILES][4], int lane,
    int runtime_bits
) {
    if (FINE_KSTEPS != GROUP_KSTEPS && k_tile < m.fine_k_tiles)
        mma_stage_ksteps<GATE_BITS, UP_BITS, FINE_KSTEPS>(tiles, x, acc, lane, runtime_bits);
    else
        mma_stage_ksteps<GATE_BITS, UP_BITS, GROUP_KSTEPS>(tiles, x, acc, lane, runtime_bits);
}

// Bias and residual of a thread block's outputs, loaded before the main loop.
struct BiasResidual {
    static const int num_outputs = (WEIGHT_TILES * 16 * (FUSED_PACK ? 1 : N8_TILES * 8) + THREADS - 1) / THREADS;
    float bias[num_outputs][GLU_WEIGHTS], residual[num_outputs];  // of a thread

    DEVICE void load(const GemmParams& params, int at, int n_tile) {
        UNROLL
        for (int n = 0; n < num_outputs; n++) {
            const int i = n * THREADS + threadIdx.x, row = i % params.rows, output = n_tile * 16 + i / params.rows;
            const GemmOperand& operand = params.operands[at];
            const bool exists = i < WEIGHT_TILES * 16 * params.rows && output < operand.outputs;
            UNROLL
            for (int s = 0; s < GLU_WEIGHTS; s++) {
                const u16* biases = params.operands[at + s].bias;
                bias[n][s] = exists && biases ? cvt_f32_f16(biases[output]) : 0.0f;
            }
            residual[n] =
                exists && params.residual ? cvt_f32_f16(params.residual[(long)row * operand.stride + output]) : 0.0f;
        }
    }
};

// FUSED_PACK: the one row is packed in shared memory; the warps' first weight tiles are under way meanwhile.
DEVICE void pack_row(
    const GemmParams& params, int at, int n_tile, char* smem, PackedActs* x, BiasResidual& bias_residual
) {
    u16* x_smem = (u16*)smem;
    float* squares = (float*)(x_smem + params.inputs + ZERO_PAD);
    char* here = smem + ((params.inputs + ZERO_PAD) * 2 + (params.inputs + 255) / 256 * 4 + 15) / 16 * 16;
    ActPacker packers[PACK_ITEMS];
    UNROLL
    for (int i = 0; i < PACK_ITEMS; i++) packers[i].load(params, params.operands[at], i * THREADS + threadIdx.x);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();  // not earlier: the next GEMM's first copies would compete with this one's
    bias_residual.load(params, at, n_tile);
    load_row(params, 0, x_smem, squares, WARPS);
    __syncthreads();
    const float scale = rms_scale(params, squares);
    UNROLL
    for (int e = 0; e < NUM_PERMS; e++) {
        const GemmOperand& operand = params.operands[at + e];
        uint4* words = (uint4*)here;
        if (e) {
            UNROLL
            for (int i = 0; i < PACK_ITEMS; i++) packers[i].load(params, operand, i * THREADS + threadIdx.x);
        }
        UNROLL
        for (int i = 0; i < PACK_ITEMS; i++)
            packers[i].store(params, operand, i * THREADS + threadIdx.x, 0, x_smem, scale, words);
        x[e] = {words, 1};
        here += operand.weight.k_tiles * 256;
    }
    __syncthreads();
}

// A warp's sums over its k tiles, for the block's columns of operand `at` and, under an ACTIVATION, of the next one.
template <int GATE_BITS, int UP_BITS>
DEVICE void mainloop(
    const GemmParams& params, int at, int n_tile, char* smem, float (*acc)[N8_TILES][4], BiasResidual& bias_residual,
    const ChainArgs* chain, int runtime_bits = 0
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const MmaWeight &gate = params.operands[at].weight, &up = params.operands[at + GLU_WEIGHTS - 1].weight;
    const char* warp_smem = smem + warp * (STAGES * STAGE_BYTES);
    const u32 ring = cvta_to_shared(warp_smem) + lane * 16;
    TileIterator<GATE_BITS> gate_tiles(runtime_bits & 15);
    TileIterator<UP_BITS ? UP_BITS : 2> up_tiles(runtime_bits >> 4);
    gate_tiles.seek(gate, n_tile, warp);
    if (UP_BITS) up_tiles.seek(up, n_tile, warp);
    auto copy_stage = [&](u32 to) {
        gate_tiles.copy_next(gate, n_tile, lane, to);
        if (UP_BITS) up_tiles.copy_next(up, n_tile, lane, to + WEIGHT_TILES * MAX_TILE_BYTES);
        cp_async_commit_group();
    };
    BlockEpilogue* epilogue = (BlockEpilogue*)(smem + EPILOGUE_OFFSET);
    if (OUT_PREPACKED) epilogue->load_async(chain->target, n_tile * 16, params.operands[at].outputs);
    UNROLL
    for (int stage = 0; stage < STAGES - 1; stage++) copy_stage(ring + stage * STAGE_BYTES);
    PackedActs x[NUM_PERMS];
    RmsPartials<32> rms_partials;
    if (FUSED_PACK) {
        pack_row(params, at, n_tile, smem + WARPS * STAGES * STAGE_BYTES, x, bias_residual);
    } else {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        if (IN_PREPACKED && RMS_NORM) rms_partials.load(params, *chain);
        bias_residual.load(params, at, n_tile);
        UNROLL
        for (int e = 0; e < NUM_PERMS; e++) x[e] = {params.operands[at + e].input.packed_x, params.rows};
    }
    int stage = 0, free_stage = (STAGES - 1) * STAGE_BYTES;  // offsets of the stage to multiply, and of the one to fill
    const int k_tiles = SEPARATE_PERM ? max(gate.k_tiles, up.k_tiles) : gate.k_tiles;
    BFragments b, next_b;  // activations in global memory are loaded one round ahead
    if (PREFETCH_ACTS && warp < k_tiles) next_b.load(x[0], warp, lane);
    if (IN_PREPACKED && RMS_NORM) rms_partials.reduce(params, *chain, epilogue->rms_scales);
    for (int k_tile = warp; k_tile < k_tiles; k_tile += WARPS) {
        if (PREFETCH_ACTS) b = next_b;
        if (PREFETCH_ACTS && k_tile + WARPS < k_tiles) next_b.load(x[0], k_tile + WARPS, lane);
        cp_async_wait_group<STAGES - 2>();
        __syncwarp();  // a lane reads what others copied, and overwrites what others have read
        copy_stage(ring + free_stage);
        const char* tiles = warp_smem + stage;
        if (SEPARATE_PERM) {
            constexpr int up_bits = UP_BITS ? UP_BITS : 2;
            if (k_tile < gate.k_tiles) {
                b.load(x[0], k_tile, lane);
                mma_stage<GATE_BITS, 0>(gate, k_tile, tiles, b, acc, lane, runtime_bits);
            }
            if (k_tile < up.k_tiles) {
                b.load(x[NUM_PERMS - 1], k_tile, lane);
                mma_stage<up_bits, 0>(
                    up, k_tile, tiles + WEIGHT_TILES * MAX_TILE_BYTES, b, acc + WEIGHT_TILES, lane, runtime_bits >> 4
                );
            }
        } else {
            if (!PREFETCH_ACTS) b.load(x[0], k_tile, lane);
            mma_stage<GATE_BITS, UP_BITS>(gate, k_tile, tiles, b, acc, lane, runtime_bits);
        }
        free_stage = stage;
        stage = stage + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    }
    cp_async_wait_group<0>();
}

// The sum of squares of a block's outputs for the RMS norm of the next GEMM: for each row in one and the same order.
DEVICE void store_rms_partials(
    const GemmParams& params, const EpilogueTarget& target, float* sums, const float (&y)[BiasResidual::num_outputs]
) {
    const int lane = threadIdx.x % 32, outputs = WEIGHT_TILES * 16;
    if (params.rows == 1 && outputs <= 32) {  // the first warp has them all
        float sum = y[0] * y[0];
        UNROLL
        for (int mask = 16; mask; mask /= 2) sum += shfl_xor(sum, mask);
        if (threadIdx.x == 0) target.rms_partials[blockIdx.x] = sum;
        return;
    }
    __syncthreads();  // all have read `sums`
    UNROLL
    for (int n = 0; n < BiasResidual::num_outputs; n++) {
        const int i = n * THREADS + threadIdx.x;
        if (i < outputs * params.rows) sums[i] = y[n];
    }
    __syncthreads();
    for (int row = threadIdx.x / 32; row < params.rows; row += WARPS) {
        float sum = 0;
        for (int output = lane; output < outputs; output += 32) {
            const float number = sums[output * params.rows + row];
            sum = fmaf(number, number, sum);
        }
        UNROLL
        for (int mask = 16; mask; mask /= 2) sum += shfl_xor(sum, mask);
        if (lane == 0) target.rms_partials[row * target.num_partials + blockIdx.x] = sum;
    }
}

// One thread block: its warps' sums, added up, and the epilogue. `runtime_bits` counts only with RUNTIME_BITS.
DEVICE void gemm_block(const GemmParams& params, char* smem, const ChainArgs* chain, int runtime_bits = 0) {
    int at = 0;
    if (!ACTIVATION)
        while (at + 1 < NUM_WEIGHTS && blockIdx.x >= params.operands[at + 1].first_block) at++;
    const GemmOperand& operand = params.operands[at];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n_tile = (blockIdx.x - operand.first_block) * WEIGHT_TILES;
    float acc[WARP_TILES][N8_TILES][4] = {};
    BiasResidual bias_residual;
    PadWriter pads;
    if (OUT_PREPACKED) pads.locate(chain->target, blockIdx.x * THREADS + threadIdx.x);
    if (RUNTIME_BITS)
        mainloop<AT_RUNTIME, ACTIVATION ? AT_RUNTIME : 0>(
            params, at, n_tile, smem, acc, bias_residual, chain, runtime_bits
        );
    else if (ACTIVATION)
        mainloop<BITS_OF(0), ACTIVATION ? BITS_OF(1) : 0>(params, at, n_tile, smem, acc, bias_residual, chain);
    else if (one_width() || at == 0)
        mainloop<BITS_OF(0), 0>(params, at, n_tile, smem, acc, bias_residual, chain);
    else if (NUM_WEIGHTS == 2 || at == 1)
        mainloop<BITS_OF(NUM_WEIGHTS > 1 ? 1 : 0), 0>(params, at, n_tile, smem, acc, bias_residual, chain);
    else if (NUM_WEIGHTS == 3 || at == 2)
        mainloop<BITS_OF(NUM_WEIGHTS > 2 ? 2 : 0), 0>(params, at, n_tile, smem, acc, bias_residual, chain);
    else
        mainloop<BITS_OF(NUM_WEIGHTS > 3 ? 3 : 0), 0>(params, at, n_tile, smem, acc, bias_residual, chain);
    __syncthreads();
    float* sums = (float*)smem;  // (warp, tile, output, row)
    UNROLL
    for (int t = 0; t < WARP_TILES; t++) {
        UNROLL
        for (int c = 0; c < N8_TILES; c++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                const int row = c * 8 + lane % 4 * 2 + i % 2;
                if (row < params.rows)
                    sums[((warp * WARP_TILES + t) * 16 + lane / 4 + i / 2 * 8) * params.rows + row] = acc[t][c][i];
            }
        }
    }
    __syncthreads();
    const BlockEpilogue* epilogue = (const BlockEpilogue*)(smem + EPILOGUE_OFFSET);
    float stored[BiasResidual::num_outputs] = {};
    UNROLL
    for (int n = 0; n < BiasResidual::num_outputs; n++) {
        const int i = n * THREADS + threadIdx.x, row = i % params.rows, output = n_tile * 16 + i / params.rows;
        if (i >= WEIGHT_TILES * 16 * params.rows || output >= operand.outputs) continue;
        const float rms_scale = IN_PREPACKED && RMS_NORM ? epilogue->rms_scales[row] : 1.0f;
        float answer[GLU_WEIGHTS];
        UNROLL
        for (int s = 0; s < GLU_WEIGHTS; s++) {
            float sum = 0;
            UNROLL
            for (int w = 0; w < WARPS; w++) sum += sums[(w * WARP_TILES + s * WEIGHT_TILES) * 16 * params.rows + i];
            answer[s] = sum * params.operands[at + s].weight.factor * rms_scale + bias_residual.bias[n][s];
        }
        const float y = ACTIVATION ? activate(answer[0]) * answer[GLU_WEIGHTS - 1] : answer[0];
        const u16 half = cvt_f16_f32(y + bias_residual.residual[n]);
        if (FP32_OUT) ((float*)operand.y)[(long)row * operand.stride + output] = y + bias_residual.residual[n];
        else if (!OUT_PREPACKED || operand.y) operand.y[(long)row * operand.stride + output] = half;
        if (!OUT_PREPACKED) continue;
        stored[n] = cvt_f32_f16(half);
        const int block_output = i / params.rows;
        store_prepacked(chain->target, epilogue->slots[block_output], row,
                        epilogue->normed(chain->target, block_output, stored[n]));
    }
    if (!OUT_PREPACKED) return;
    pads.write(chain->target, gridDim.x * THREADS);
    if (chain->target.rms_partials) store_rms_partials(params, chain->target, sums, stored);
}
