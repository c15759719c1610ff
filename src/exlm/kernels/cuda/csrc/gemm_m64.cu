// GEMM of packed weights with 17 to 64 rows of activations.
//
// A thread block owns BLOCK_N outputs, all rows, and a stretch of the inputs (all of them, or with split-K one of
// SPLIT_K stretches). It goes through k tiles one after the other: the weight tiles of its warps and the rows'
// activations of a k tile are one stage of a cp.async ring that all warps share; the first weight tiles start before
// the kernel that computes the activations has ended (PDL). Codes are dequantised to exactly the float16 numbers that
// the format means and multiplied by the tensor cores: on Hopper by wgmma, A from registers and B from shared memory,
// asynchronously; elsewhere by mma.
//
// Deterministic split-K: each of the SPLIT_K blocks of a group leaves its sums in memory, waits for the others at a
// barrier (a cooperative launch, so all of them are resident), and reduces a share of the rows in the order of the
// inputs. No order of summation depends on the rows: a row's output is the same bits in any batch of 17 to 64.
//
// Set when compiling, besides what pack_activations.h wants: MIN_BLOCKS (resident thread blocks of an SM), SPLIT_K.

#include "epilogue_m64.h"

// Counts an arrival and waits for the other SOME - 1, whose writes are visible afterwards. The counter wraps after two
// rounds, so it needs no reset: a round ends when the counter passes a multiple of SOME.
template <int SOME> DEVICE void split_k_barrier(u32* counter, bool wait) {
    const u32 old = atom_inc_acq_rel<2 * SOME - 1>(counter);
    if (!wait || old % SOME == SOME - 1) return;
    while (ld_acquire(counter) / SOME == old / SOME) continue;
}

// acc (n16 outputs by ROWS rows) += A of one k16 step, in registers, times B at `acts`: two 8-input matrices of all
// rows.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && WARPS % 4 == 0
// wgmma: a warpgroup's four n16 columns are one m64 tile. The warps go on while it runs.
struct Mma {
    DEVICE static void multiply_add(float (&acc)[N8_TILES][4], const u32 (&a)[4], u32 acts, int) {
        // matrix descriptor without swizzle: address, leading byte offset (k), stride byte offset (rows), in 16 bytes
        const unsigned long long b =
            acts >> 4 | (unsigned long long)(MATRIX_BYTES >> 4) << 16 | 128ull >> 4 << 32;
        wgmma_m64k16<N8_TILES, IN_PREPACKED>(acc, a, b);  // prepacked acts lie input by input: B is n-major
    }
    DEVICE static void fence() { wgmma_fence(); }
    DEVICE static void commit_group() { wgmma_commit_group(); }
    template <int PENDING> DEVICE static void wait_group() { wgmma_wait_group<PENDING>(); }
    DEVICE static void fence_async() { fence_proxy_async(); }
};
#else
struct Mma {
    DEVICE static void multiply_add(float (&acc)[N8_TILES][4], const u32 (&a)[4], u32 acts, int lane) {
        const u32 row = acts + lane / 8 % 2 * MATRIX_BYTES + (lane / 16 * 8 + lane % 8) * 16;
        UNROLL
        for (int c = 0; c < N8_TILES; c += 2) {
            u32 b[4];
            if (IN_PREPACKED) ldmatrix_x4_trans(b, row + c * 128);
            else ldmatrix_x4(b, row + c * 128);
            mma_m16n8k16(acc[c], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma_m16n8k16(acc[c + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
    DEVICE static void fence() {}
    DEVICE static void commit_group() {}
    template <int PENDING> DEVICE static void wait_group() {}
    DEVICE static void fence_async() {}
};
#endif

#define RMS_LANES (THREADS >= 512 ? 8 : THREADS >= 256 ? 4 : THREADS >= 128 ? 2 : 1)  // for each of up to 64 rows
#define N8_SHARE ((N8_TILES + SPLIT_K - 1) / SPLIT_K)  // n8 tiles of rows that a thread block finishes, at most

struct SplitKWorkspace {
    float4* partial_sums;  // (group, split, WARP_TILES, N8_TILES, THREADS)
    u32* arrivals;         // of each group, see split_k_barrier
};
CHECK_SIZEOF(SplitKWorkspace);

// The next stage: weight tiles of the warp, and the thread's 16-byte pieces of the activations.
struct StageIterator {
    int k_tile, region_end;  // the next k tile, and where its region (fine tiles, or the others) ends
    int n_tiles;             // of the warp's columns that exist
    int tile_bytes[GLU_WEIGHTS], column_bytes[GLU_WEIGHTS];
    const char *tiles[GLU_WEIGHTS], *acts;

    DEVICE void seek(const GemmParams& params, int at, int group, int first) {
        const int lane = threadIdx.x % 32, n_tile = (group * WARPS + threadIdx.x / 32) * WEIGHT_TILES;
        const GemmOperand& operand = params.operands[at];
        const bool fine = first < operand.weight.fine_k_tiles;
        k_tile = first;
        region_end = fine ? operand.weight.fine_k_tiles : operand.weight.k_tiles;
        n_tiles = operand.weight.n_tiles - n_tile;
        acts = (const char*)operand.input.packed_x + (long)first * (ROWS * 256) + threadIdx.x * 16;
        UNROLL
        for (int s = 0; s < GLU_WEIGHTS; s++) {
            const MmaWeight& m = params.operands[at + s].weight;
            const int bits = one_width() ? BITS_OF(0) : (int)BITS_OF(at + s);
            tile_bytes[s] = fine ? TILE_BYTES(bits, FINE_KSTEPS) : TILE_BYTES(bits, GROUP_KSTEPS);
            column_bytes[s] = (fine ? m.fine_k_tiles : m.k_tiles - m.fine_k_tiles) * tile_bytes[s];
            tiles[s] = (fine ? m.fine : m.main) + (long)n_tile * column_bytes[s]
                + (long)(fine ? first : first - m.fine_k_tiles) * tile_bytes[s] + lane * 16;
        }
    }
    DEVICE void advance(const GemmParams& params, int at, int group) {
        UNROLL
        for (int s = 0; s < GLU_WEIGHTS; s++) tiles[s] += tile_bytes[s];
        acts += ROWS * 256;
        if (++k_tile == region_end && region_end < params.operands[at].weight.k_tiles) seek(params, at, group, k_tile);
    }
    DEVICE void copy_weights(u32 stage) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        UNROLL
        for (int s = 0; s < GLU_WEIGHTS; s++) {
            UNROLL
            for (int t = 0; t < WEIGHT_TILES; t++) {
                if (t < n_tiles) {
                    const char* from = tiles[s] + (long)t * column_bytes[s];
                    const u32 to = stage + ((warp * GLU_WEIGHTS + s) * WEIGHT_TILES + t) * MAX_TILE_BYTES + lane * 16;
                    UNROLL
                    for (int i = 0; i < MAX_TILE_BYTES; i += 512)
                        if (i + lane * 16 < tile_bytes[s]) cp_async<16>(to + i, from + i);
                }
            }
        }
    }
    DEVICE void copy_acts(u32 stage) const {
        UNROLL
        for (int i = 0; i < ROWS * 256; i += THREADS * 16)
            if (ROWS * 256 - i >= THREADS * 16 || threadIdx.x * 16 < ROWS * 256 - i)
                cp_async<16>(stage + ACTS_OFFSET + threadIdx.x * 16 + i, acts + i);
    }
};

// From 1024 + code (and 1024 + factor * code in rows g + 8) to the numbers that the codes mean, rounded as the formats
// say: (code - zero point) exact, then one rounding by the scale, or by an fma with the minimum.
template <int BITS_, int KSTEPS> struct Dequant {
    static const int groups = 8 / KSTEPS, factor_g8 = RowG8<BITS_>::factor;
    u32 scale[2], zero[2], minimum[2];  // of the lane's two outputs, each twice

    DEVICE void load(const u32* tables, int group) {
        const u32 half = ZERO_POINTS == 0 ? 1u << (BITS_ - 1) : 0;
        const u32 upper = factor_g8 == 16 ? 0xd400 : factor_g8 == 4 ? 0xdc00 : 0xe400;  // -1024 / factor_g8
        const u32 base = (0xe400 + half) | (upper + factor_g8 * half) << 16;          // both less half of the range
        const u32 zeros = ZERO_POINTS == 2 ? add_f16x2(tables[groups + group], base) : base, scales = tables[group];
        const u32 mins = HAS_MINS ? tables[(NUM_TABLES - 1) * groups + group] : 0;
        scale[0] = both_low(scales);
        scale[1] = both_high(scales);
        zero[0] = both_low(zeros);
        zero[1] = both_high(zeros);
        minimum[0] = both_low(mins);
        minimum[1] = both_high(mins);
    }
    DEVICE void apply(u32 (&a)[4]) const {
        const u32 inverse = factor_g8 == 16 ? 0x2c002c00 : 0x34003400;  // 1 / factor_g8
        UNROLL
        for (int j = 0; j < 4; j++) {
            const int row = j % 2;
            const u32 code = row && factor_g8 > 1 ? fma_f16x2(a[j], inverse, zero[row]) : add_f16x2(a[j], zero[row]);
            a[j] = HAS_MINS ? fma_f16x2(code, scale[row], minimum[row]) : mul_f16x2(code, scale[row]);
        }
    }
};

// acc += tiles * acts for one k tile of COUNT columns.
template <int BITS_, int KSTEPS, int COUNT>
DEVICE void mma_tiles(const char* tiles, u32 acts, float (*acc)[N8_TILES][4], int lane) {
    TileFragment<BITS_, KSTEPS> fragment[COUNT];
    TileCodes<BITS_> codes[COUNT];
    Dequant<BITS_, KSTEPS> dequant[COUNT];
    UNROLL
    for (int t = 0; t < COUNT; t++) {
        fragment[t].template load<true>(tiles + t * MAX_TILE_BYTES, lane);
        codes[t] = fragment[t].codes();
    }
    u32 a[2][COUNT][4];  // double-buffered: wgmma may still read one while the other is made
    UNROLL
    for (int step = 0; step < 8; step++) {
        UNROLL
        for (int t = 0; t < COUNT; t++) {
            if (step % KSTEPS == 0) dequant[t].load(fragment[t].tables, step / KSTEPS);
            codes[t].template unpack<RowG8<BITS_>::factor>(step, a[step % 2][t]);
            dequant[t].apply(a[step % 2][t]);
        }
        Mma::fence();
        UNROLL
        for (int t = 0; t < COUNT; t++) Mma::multiply_add(acc[t], a[step % 2][t], acts + step * 2 * MATRIX_BYTES, lane);
        Mma::commit_group();
        if (step < 7) Mma::wait_group<1>();
    }
    Mma::wait_group<0>();
}
template <int BITS_, int COUNT>
DEVICE void mma_stage_bits(bool fine, const char* tiles, u32 acts, float (*acc)[N8_TILES][4], int lane) {
    if (FINE_KSTEPS != GROUP_KSTEPS && fine) mma_tiles<BITS_, FINE_KSTEPS, COUNT>(tiles, acts, acc, lane);
    else mma_tiles<BITS_, GROUP_KSTEPS, COUNT>(tiles, acts, acc, lane);
}

// The tiles of a stage, whatever their width.
DEVICE void mma_stage(int at, bool fine, const char* tiles, u32 acts, float (*acc)[N8_TILES][4], int lane) {
    if (one_width()) {
        mma_stage_bits<BITS_OF(0), WARP_TILES>(fine, tiles, acts, acc, lane);
    } else if (ACTIVATION) {
        mma_stage_bits<BITS_OF(0), WEIGHT_TILES>(fine, tiles, acts, acc, lane);
        mma_stage_bits<BITS_OF(NUM_WEIGHTS > 1), WEIGHT_TILES>(
            fine, tiles + WEIGHT_TILES * MAX_TILE_BYTES, acts, acc + WEIGHT_TILES, lane
        );
    } else {
        if (at == 0) mma_stage_bits<BITS_OF(0), WARP_TILES>(fine, tiles, acts, acc, lane);
        else if (at == 1) mma_stage_bits<BITS_OF(NUM_WEIGHTS > 1), WARP_TILES>(fine, tiles, acts, acc, lane);
        else if (NUM_WEIGHTS == 3 || at == 2)
            mma_stage_bits<BITS_OF(NUM_WEIGHTS > 2 ? 2 : 0), WARP_TILES>(fine, tiles, acts, acc, lane);
        else mma_stage_bits<BITS_OF(NUM_WEIGHTS > 3 ? 3 : 0), WARP_TILES>(fine, tiles, acts, acc, lane);
    }
}

// The sums of all splits, in the order of the inputs, of the n8 tiles of rows from `first` to `end`.
DEVICE void split_k_reduce(
    const SplitKWorkspace& workspace, int group, int split, int first, int end, const float (*acc)[N8_TILES][4],
    float (*reduced)[N8_SHARE][4]
) {
    const int size = WARP_TILES * N8_TILES * THREADS;
    float4* partial_sums = workspace.partial_sums + (long)group * SPLIT_K * size + threadIdx.x;
    UNROLL
    for (int t = 0; t < WARP_TILES; t++) {
        UNROLL
        for (int c = 0; c < N8_TILES; c++)
            partial_sums[split * size + (t * N8_TILES + c) * THREADS] =
                float4{acc[t][c][0], acc[t][c][1], acc[t][c][2], acc[t][c][3]};
    }
    __syncthreads();
    if (threadIdx.x == 0) split_k_barrier<SPLIT_K>(workspace.arrivals + group, first < end);
    __syncthreads();
    const int at_once = SPLIT_K * N8_SHARE <= 16 ? N8_SHARE : SPLIT_K <= 8 ? 16 / SPLIT_K : 1;  // n8 tiles in flight
    UNROLL
    for (int t = 0; t < WARP_TILES; t++) {
        UNROLL
        for (int start = 0; start < N8_SHARE; start += at_once) {
            float4 parts[at_once][SPLIT_K];
            UNROLL
            for (int c = 0; c < at_once; c++) {
                if (first + start + c < end) {
                    UNROLL
                    for (int p = 0; p < SPLIT_K; p++)
                        parts[c][p] = __ldcg(partial_sums + p * size + (t * N8_TILES + first + start + c) * THREADS);
                }
            }
            UNROLL
            for (int c = 0; c < at_once && start + c < N8_SHARE; c++) {
                float(&to)[4] = reduced[t][start + c];
                UNROLL
                for (int i = 0; i < 4; i++) to[i] = 0;
                if (first + start + c < end) {
                    UNROLL
                    for (int p = 0; p < SPLIT_K; p++) {
                        to[0] += parts[c][p].x;
                        to[1] += parts[c][p].y;
                        to[2] += parts[c][p].z;
                        to[3] += parts[c][p].w;
                    }
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gemm_m64(
    const __grid_constant__ GemmParams params, const __grid_constant__ SplitKWorkspace workspace,
    const __grid_constant__ ChainArgs chain
) {
    extern __shared__ __align__(128) char smem[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int all_groups = blockIdx.x / SPLIT_K, split = blockIdx.x % SPLIT_K;
    int at = 0;
    if (!ACTIVATION)
        while (at + 1 < NUM_WEIGHTS && all_groups >= params.operands[at + 1].first_block) at++;
    const MmaWeight& weight = params.operands[at].weight;
    const int group = all_groups - params.operands[at].first_block;
    const int end = (long)weight.k_tiles * (split + 1) / SPLIT_K;
    const u32 ring = cvta_to_shared(smem);
    StageIterator next;
    next.seek(params, at, group, (long)weight.k_tiles * split / SPLIT_K);
    const int start = next.k_tile;
    BlockEpilogue& block = *(BlockEpilogue*)(smem + EPILOGUE_OFFSET);
    PadWriter pads;
    if (OUT_PREPACKED) {
        block.load_async(chain.target, group * BLOCK_N, params.operands[at].outputs);
        pads.locate(chain.target, blockIdx.x * THREADS + threadIdx.x);
    }
    UNROLL
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (next.k_tile < end) {
            next.copy_weights(ring + stage * STAGE_BYTES);
            next.advance(params, at, group);
        }
    }
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    RmsPartials<RMS_LANES> rms_partials;  // all rows at once
    if (IN_PREPACKED && RMS_NORM) rms_partials.load(params, chain);
    const char* acts = next.acts;
    next.acts -= (long)(next.k_tile - start) * (ROWS * 256);
    UNROLL
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (start + stage < end) {
            next.copy_acts(ring + stage * STAGE_BYTES);
            next.acts += ROWS * 256;
        }
        cp_async_commit_group();
    }
    next.acts = acts;
    if (OUT_PREPACKED) pads.write(chain.target, gridDim.x * THREADS);
    if (IN_PREPACKED && RMS_NORM) rms_partials.reduce(params, chain, block.rms_scales);
    float acc[WARP_TILES][N8_TILES][4] = {};
    int stage = 0, free_stage = (STAGES - 1) * STAGE_BYTES;  // offsets of the stage to multiply, and of the one to fill
    for (int k_tile = start; k_tile < end; k_tile++) {
        cp_async_wait_group<STAGES - 2>();
        Mma::fence_async();
        __syncthreads();  // all have copied this stage, and read the one before it
        if (next.k_tile < end) {
            next.copy_weights(ring + free_stage);
            next.copy_acts(ring + free_stage);
            next.advance(params, at, group);
        }
        cp_async_commit_group();
        mma_stage(at, k_tile < weight.fine_k_tiles, smem + stage + warp * WARP_TILES * MAX_TILE_BYTES,
                  ring + stage + ACTS_OFFSET, acc, lane);
        free_stage = stage;
        stage = stage + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    }
    cp_async_wait_group<0>();
    __syncthreads();
    const int first_n8 = N8_TILES * split / SPLIT_K, end_n8 = N8_TILES * (split + 1) / SPLIT_K;
    BiasResidual<N8_SHARE> bias_residual;
    bias_residual.load(params, at, group, first_n8, end_n8);
#if SPLIT_K > 1
    float reduced[WARP_TILES][N8_SHARE][4];
    split_k_reduce(workspace, all_groups, split, first_n8, end_n8, acc, reduced);
    epilogue(params, chain, at, group, bias_residual, reduced, smem);
#else
    epilogue(params, chain, at, group, bias_residual, acc, smem);
#endif
}
