// Packed matrices times 17 to 64 rows of activations.
//
// A thread block takes a group of outputs, all rows of activations, and a stretch of the inputs, 128 after the other:
// such a unit of work is WARPS * TILES bricks and the rows' numbers, which all its warps share. Units go through a ring
// in shared memory, several ahead; the first bricks are on their way before the kernel that computes the activations has
// ended. Codes become the numbers that the formats mean, rounded as they say, and the tensor cores multiply those.
//
// Where a group's inputs are cut into PIECES, each thread block leaves its sums in memory, waits for the others and adds
// up a share of the rows in the order of the inputs, for which all must be running at once. Nothing of the sums depends
// on the rows: a row's answer is the same bits in any company of 17 to 64.
//
// Set when compiling, besides what bricks.h wants: RESIDENT (thread blocks of a multiprocessor), PIECES.

#define LDMATRIX_LAYOUT 1
#include "weight_tile.h"

#define ROWS (N8_TILES * 8)
#define MATRIX_BYTES (ROWS * 16)  // eight inputs of all rows: eights of rows side by side, each row by row or, HANDED, by input


// Counts as one of some, in rounds that go by turns, so that nobody sets the counter back; one that waits sees what the
// others of its round have written before.
template <int SOME> DEVICE void split_k_barrier(u32* at, bool wait) {
    const u32 old = atom_inc_acq_rel<2 * SOME - 1>(at);
    if (!wait || old % SOME == SOME - 1) return;
    while (ld_acquire(at) / SOME == old / SOME) continue;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && WARPS % 4 == 0
// Weights of four warps times the rows: Hopper's tensor cores fetch those themselves, and warps go on meanwhile.
#define FOUR(sum) "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
#define EIGHT(sum, c) FOUR(sum[c]), FOUR(sum[c + 1])
#define SUMS16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS24 SUMS16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SUMS32 SUMS24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#if IN_PREPACKED
#define TURNED "1"
#else
#define TURNED "0"
#endif
#define WGMMA(rows, sums, others, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" rows "k16.f32.f16.f16 {" sums "}, " others ", 1, 1, 1, " TURNED ";" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
struct Mma {
    DEVICE static void mma_m16n8k16(float (&sum)[N8_TILES][4], const u32 (&a)[4], u32 rows, int) {
        const unsigned long long b = rows >> 4 | (unsigned long long)(MATRIX_BYTES >> 4) << 16 | 128ull >> 4 << 32;
#if N8_TILES == 4
        WGMMA("32", SUMS16, "{%16,%17,%18,%19}, %20", EIGHT(sum, 0), EIGHT(sum, 2));
#elif N8_TILES == 6
        WGMMA("48", SUMS24, "{%24,%25,%26,%27}, %28", EIGHT(sum, 0), EIGHT(sum, 2), EIGHT(sum, 4));
#else
        WGMMA("64", SUMS32, "{%32,%33,%34,%35}, %36", EIGHT(sum, 0), EIGHT(sum, 2), EIGHT(sum, 4), EIGHT(sum, 6));
#endif
    }
    DEVICE static void start() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
    DEVICE static void close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
    template <int LAST> DEVICE static void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LAST) : "memory"); }
    DEVICE static void show() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // what threads copied
};
#else
struct Mma {
    DEVICE static void mma_m16n8k16(float (&sum)[N8_TILES][4], const u32 (&a)[4], u32 rows, int lane) {
        const u32 row = rows + lane / 8 % 2 * MATRIX_BYTES + (lane / 16 * 8 + lane % 8) * 16;
        UNROLL for (int c = 0; c < N8_TILES; c += 2) {
            u32 b[4];
            if (IN_PREPACKED) ldmatrix_x4_trans(b, row + c * 128);
            else ldmatrix_x4(b, row + c * 128);
            ::mma_m16n8k16(sum[c], a[0], a[1], a[2], a[3], b[0], b[1]);
            ::mma_m16n8k16(sum[c + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
    DEVICE static void start() {}
    DEVICE static void close() {}
    template <int LAST> DEVICE static void wait() {}
    DEVICE static void show() {}
};
#endif

#define GROUP (WEIGHT_TILES * WARPS)  // tiles of a matrix
#define WIDTH (GROUP * 16)    // outputs
#define ROWS_AT (WARP_TILES * WARPS * TILE_SLOT)
#define STAGE_BYTES (ROWS_AT + ROWS * 256)

#define RING (STAGES * STAGE_BYTES)
#define SUMS (ROWS * (WARP_TILES * WARPS * 16 + 8) * 4)
#define LEDGER_AT (RING > SUMS ? RING : SUMS)
#define SHARE ((N8_TILES + SPLIT_K - 1) / SPLIT_K)  // eights of rows that one answers for, at most

typedef EpilogueSmem<WIDTH, ROWS> Book;

struct SplitKWorkspace {
    float4* left;  // (group, piece, TILES, COLUMNS, THREADS) sums
    u32* counts;   // of each group: thread blocks that have left theirs, in rounds of PIECES
};

// Bricks of a group that are next, and what its threads copy of them.
struct StageIterator {
    int brick, change;  // this one, and the first of the other kind
    int tiles;          // of the warp's that exist
    int size[GLU_WEIGHTS], tile_bytes[GLU_WEIGHTS];
    const char *bricks[GLU_WEIGHTS], *words;

    DEVICE void find(const GemmParams& job, int part, int group, int at) {
        const int lane = threadIdx.x % 32, tile = (group * WARPS + threadIdx.x / 32) * WEIGHT_TILES;
        const GemmOperand& p = job.parts[part];
        const bool fine = at < p.matrix.fines;
        brick = at, change = fine ? p.matrix.fines : p.matrix.bricks, tiles = p.matrix.tiles - tile;
        words = (const char*)p.entrance.words + (long)at * (ROWS * 256) + threadIdx.x * 16;
        UNROLL for (int s = 0; s < GLU_WEIGHTS; s++) {
            const MmaWeight& m = job.parts[part + s].matrix;
            const int bits = one_width() ? BITS_OF(0) : (int)BITS_OF(part + s);
            size[s] = fine ? TILE_BYTES(bits, FINE_KSTEPS) : TILE_BYTES(bits, GROUP_KSTEPS);
            tile_bytes[s] = (fine ? m.fines : m.bricks - m.fines) * size[s];
            bricks[s] = (fine ? m.fine : m.main) + (long)tile * tile_bytes[s]
                + (long)(fine ? at : at - m.fines) * size[s] + lane * 16;
        }
    }
    DEVICE void advance(const GemmParams& job, int part, int group) {
        UNROLL for (int s = 0; s < GLU_WEIGHTS; s++) bricks[s] += size[s];
        words += ROWS * 256;
        if (++brick == change && change < job.parts[part].matrix.bricks) find(job, part, group, brick);
    }
    DEVICE void send_bricks(u32 stage) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        UNROLL for (int s = 0; s < GLU_WEIGHTS; s++) UNROLL for (int t = 0; t < WEIGHT_TILES; t++) if (t < tiles) {
            const char* from = bricks[s] + (long)t * tile_bytes[s];
            const u32 to = stage + ((warp * GLU_WEIGHTS + s) * WEIGHT_TILES + t) * TILE_SLOT + lane * 16;
            UNROLL for (int i = 0; i < TILE_SLOT; i += 512) if (i + lane * 16 < size[s]) cp_async<16>(to + i, from + i);
        }
    }
    DEVICE void send_rows(u32 stage) const {
        UNROLL for (int i = 0; i < ROWS * 256; i += THREADS * 16)
            if (ROWS * 256 - i >= THREADS * 16 || threadIdx.x * 16 < ROWS * 256 - i)
                cp_async<16>(stage + ROWS_AT + threadIdx.x * 16 + i, words + i);
    }
};

// 1024 + code, and 1024 + ODD times the code for outputs 8 to 15, as the numbers they stand for.
template <int BITS_, int GROUP_KSTEPS_> struct Dequant {
    static const int groups = 8 / GROUP_KSTEPS_, odd = OddRow<BITS_>::odd;
    u32 scale[2], zero[2], minimum[2];  // of the lane's two outputs, twice each

    DEVICE void load(const u32* numbers, int group) {
        const u32 half = ZERO_POINTS == 0 ? 1u << (BITS_ - 1) : 0, upper = odd == 16 ? 0xd400 : odd == 4 ? 0xdc00 : 0xe400;
        const u32 base = (0xe400 + half) | (upper + odd * half) << 16;  // -1024 and -1024 / odd, both less half
        const u32 zeros = ZERO_POINTS == 2 ? add_f16x2(numbers[groups + group], base) : base, scales = numbers[group];
        const u32 minima = HAS_MINS ? numbers[(NUM_TABLES - 1) * groups + group] : 0;
        scale[0] = both_low(scales), scale[1] = both_high(scales);
        zero[0] = both_low(zeros), zero[1] = both_high(zeros);
        minimum[0] = both_low(minima), minimum[1] = both_high(minima);
    }
    DEVICE void apply(u32 (&codes)[4]) const {
        const u32 part = odd == 16 ? 0x2c002c00 : 0x34003400;  // 1 / odd
        UNROLL for (int j = 0; j < 4; j++) {
            const int o = j % 2;
            const u32 code = o && odd > 1 ? fma_f16x2(codes[j], part, zero[o]) : add_f16x2(codes[j], zero[o]);
            codes[j] = HAS_MINS ? fma_f16x2(code, scale[o], minimum[o]) : mul_f16x2(code, scale[o]);
        }
    }
};

// Add bricks of several tiles times the rows to their sums.
template <int BITS_, int GROUP_KSTEPS_, int COUNT>
DEVICE void mma_tiles(const char* bricks, u32 rows, float (*total)[N8_TILES][4], int lane) {
    TileFragment<BITS_, GROUP_KSTEPS_> brick[COUNT];
    TileCodes<BITS_> codes[COUNT];
    Dequant<BITS_, GROUP_KSTEPS_> meaning[COUNT];
    UNROLL for (int t = 0; t < COUNT; t++) {
        brick[t].template load<true>(bricks + t * TILE_SLOT, lane);
        codes[t] = brick[t].codes();
    }
    u32 a[2][COUNT][4];  // the tensor cores may still read one while the other is made
    UNROLL for (int step = 0; step < 8; step++) {
        UNROLL for (int t = 0; t < COUNT; t++) {
            if (step % GROUP_KSTEPS_ == 0) meaning[t].load(brick[t].numbers, step / GROUP_KSTEPS_);
            codes[t].template unpack<OddRow<BITS_>::odd>(step, a[step % 2][t]);
            meaning[t].apply(a[step % 2][t]);
        }
        Mma::start();
        UNROLL for (int t = 0; t < COUNT; t++)
            Mma::mma_m16n8k16(total[t], a[step % 2][t], rows + step * 2 * MATRIX_BYTES, lane);
        Mma::close();
        if (step < 7) Mma::wait<1>();
    }
    Mma::wait<0>();
}
template <int BITS_, int COUNT>
DEVICE void mma_stage_bits(bool fine, const char* bricks, u32 rows, float (*total)[N8_TILES][4], int lane) {
    if (FINE_KSTEPS != GROUP_KSTEPS && fine) mma_tiles<BITS_, FINE_KSTEPS, COUNT>(bricks, rows, total, lane);
    else mma_tiles<BITS_, GROUP_KSTEPS, COUNT>(bricks, rows, total, lane);
}

// The bricks of a unit, whatever their width.
DEVICE void mma_stage(int part, bool fine, const char* bricks, u32 rows, float (*total)[N8_TILES][4], int lane) {
    if (one_width()) {
        mma_stage_bits<BITS_OF(0), WARP_TILES>(fine, bricks, rows, total, lane);
    } else if (ACTIVATION) {
        mma_stage_bits<BITS_OF(0), WEIGHT_TILES>(fine, bricks, rows, total, lane);
        mma_stage_bits<BITS_OF(NUM_WEIGHTS > 1), WEIGHT_TILES>(fine, bricks + WEIGHT_TILES * TILE_SLOT, rows, total + WEIGHT_TILES, lane);
    } else {
        if (part == 0) mma_stage_bits<BITS_OF(0), WARP_TILES>(fine, bricks, rows, total, lane);
        else if (part == 1) mma_stage_bits<BITS_OF(NUM_WEIGHTS > 1), WARP_TILES>(fine, bricks, rows, total, lane);
        else mma_stage_bits<BITS_OF(NUM_WEIGHTS > 2 ? 2 : 0), WARP_TILES>(fine, bricks, rows, total, lane);
    }
}

// The sums of all pieces, in the order of the inputs, of eights of rows `first` to `end`.
DEVICE void split_k_reduce(const SplitKWorkspace& shared, int group, int piece, int first, int end, const float (*total)[N8_TILES][4],
                   float (*mine)[SHARE][4]) {
    const int size = WARP_TILES * N8_TILES * THREADS;
    float4* left = shared.left + (long)group * SPLIT_K * size + threadIdx.x;
    UNROLL for (int t = 0; t < WARP_TILES; t++) UNROLL for (int c = 0; c < N8_TILES; c++)
        left[piece * size + (t * N8_TILES + c) * THREADS] =
            float4{total[t][c][0], total[t][c][1], total[t][c][2], total[t][c][3]};
    __syncthreads();
    if (threadIdx.x == 0) split_k_barrier<SPLIT_K>(shared.counts + group, first < end);
    __syncthreads();
    const int many = SPLIT_K * SHARE <= 16 ? SHARE : SPLIT_K <= 8 ? 16 / SPLIT_K : 1;  // columns on their way at once
    UNROLL for (int t = 0; t < WARP_TILES; t++) UNROLL for (int start = 0; start < SHARE; start += many) {
        float4 sums[many][SPLIT_K];
        UNROLL for (int c = 0; c < many; c++) if (first + start + c < end) UNROLL for (int p = 0; p < SPLIT_K; p++)
            sums[c][p] = __ldcg(left + p * size + (t * N8_TILES + first + start + c) * THREADS);
        UNROLL for (int c = 0; c < many && start + c < SHARE; c++) {
            float(&to)[4] = mine[t][start + c];
            UNROLL for (int i = 0; i < 4; i++) to[i] = 0;
            if (first + start + c < end) UNROLL for (int p = 0; p < SPLIT_K; p++)
                to[0] += sums[c][p].x, to[1] += sums[c][p].y, to[2] += sums[c][p].z, to[3] += sums[c][p].w;
        }
    }
}

#include "epilogue_m64.h"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gemm_m64(
    const __grid_constant__ GemmParams job, const __grid_constant__ SplitKWorkspace shared, const __grid_constant__ ChainArgs link
) {
    extern __shared__ __align__(128) char memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int number = blockIdx.x / SPLIT_K, piece = blockIdx.x % SPLIT_K;
    int part = 0;
    if (!ACTIVATION) while (part + 1 < NUM_WEIGHTS && number >= job.parts[part + 1].first) part++;
    const MmaWeight& matrix = job.parts[part].matrix;
    const int group = number - job.parts[part].first, end = (long)matrix.bricks * (piece + 1) / SPLIT_K;
    const u32 ring = cvta_to_shared(memory);
    StageIterator ahead;
    ahead.find(job, part, group, (long)matrix.bricks * piece / SPLIT_K);
    const int start = ahead.brick;
    Book& book = *(Book*)(memory + LEDGER_AT);
    PadWriter gap;
    if (OUT_PREPACKED) book.send(link.heir, group * WIDTH, job.parts[part].outputs), gap.find(link.heir, blockIdx.x * THREADS + threadIdx.x);
    UNROLL for (int stage = 0; stage < STAGES - 1; stage++) if (ahead.brick < end) {
        ahead.send_bricks(ring + stage * STAGE_BYTES);
        ahead.advance(job, part, group);
    }
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    RmsPartials<(THREADS > 64 ? THREADS / 64 : 1)> squares;  // all rows at once
    if (IN_PREPACKED && RMS_NORM) squares.ask(job, link);
    const char* words = ahead.words;
    ahead.words -= (long)(ahead.brick - start) * (ROWS * 256);
    UNROLL for (int stage = 0; stage < STAGES - 1; stage++) {
        if (start + stage < end) ahead.send_rows(ring + stage * STAGE_BYTES), ahead.words += ROWS * 256;
        cp_async_commit_group();
    }
    ahead.words = words;
    if (OUT_PREPACKED) gap.close(link.heir, gridDim.x * THREADS);
    if (IN_PREPACKED && RMS_NORM) squares.find(job, link, book.measures);
    float total[WARP_TILES][N8_TILES][4] = {};
    int stage = 0, before = (STAGES - 1) * STAGE_BYTES;  // where a unit is, and where there is room for one
    for (int brick = start; brick < end; brick++) {
        cp_async_wait_group<STAGES - 2>();
        Mma::show();
        __syncthreads();  // all have copied this unit, and read the one before it
        if (ahead.brick < end) {
            ahead.send_bricks(ring + before);
            ahead.send_rows(ring + before);
            ahead.advance(job, part, group);
        }
        cp_async_commit_group();
        mma_stage(part, brick < matrix.fines, memory + stage + warp * WARP_TILES * TILE_SLOT, ring + stage + ROWS_AT, total, lane);
        before = stage, stage = stage + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    }
    cp_async_wait_group<0>();
    __syncthreads();
    const int first = N8_TILES * piece / SPLIT_K, last = N8_TILES * (piece + 1) / SPLIT_K;
    BiasResidual<SHARE> rest;
    rest.ask(job, part, group, first, last);
#if SPLIT_K > 1
    float mine[WARP_TILES][SHARE][4];
    split_k_reduce(shared, number, piece, first, last, total, mine);
    epilogue(job, link, part, group, rest, mine, memory);
#else
    epilogue(job, link, part, group, rest, total, memory);
#endif
}
