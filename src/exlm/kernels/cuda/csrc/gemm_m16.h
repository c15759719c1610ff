// A few rows of activations times packed matrices, straight from their codes: all but who multiplies what.
//
// The tensor cores do the sums: 16 outputs by 16 inputs of weights are the first operand of one mma, eight rows of
// activations the second. Weights lie in memory in bricks of 128 inputs by 16 outputs, codes as the lanes of the mma
// want them and scales behind (tiles.py). A warp copies bricks into shared memory, several ahead, and begins before
// the kernel that computes the activations has ended. The warps of a thread block share the inputs, and their sums are
// added in the order of the warps: a row's answer depends on nothing but the row.
//
// Activations enter in the order of the stored inputs and where lanes expect them. The tensor cores multiply them by
// 1024 + code, which costs nothing to make of a code, and by 1, and the surplus is taken off with the sums they get so.
// One row is prepared by every thread block for itself, while its first bricks are on their way;
// more of them once for all, by another kernel. Both are the same code and give the same bits.
//
// Set when compiling, besides what bricks.h wants: APART (the two matrices under one ACT have their inputs in orders of
// their own), INSIDE (x is one row, prepared here), ITEMS (eights of a row's inputs that a thread prepares), and where
// matrices of several widths take turns WIDTHS (bit n: there are codes of n bits; BITS has the widest).

#include "weight_tile.h"

#ifndef RUNTIME_BITS
#define RUNTIME_BITS 0
#endif

#define RUNTIME 1  // for a width that is not known before the kernel runs
#define STAGE_BYTES (WARP_TILES * TILE_SLOT)
#define NUM_PERMS (SEPARATE_PERM ? 2 : 1)
#define PREFETCH_ACTS (!FUSED_PACK && !SEPARATE_PERM && N8_TILES == 1)  // there are registers for rows on their way
#define TARGET_THREADS (N8_TILES > 1 ? 512 : 576)  // threads of a multiprocessor: fewer have more registers
#define MIN_BLOCKS (THREADS < TARGET_THREADS ? TARGET_THREADS / THREADS : 1)
#define RING (WARPS * STAGES * STAGE_BYTES)
#define SUMS (WARPS * WARP_TILES * 16 * N8_TILES * 8 * 4)
#define LEDGER_AT (RING > SUMS ? RING : SUMS)

typedef EpilogueSmem<WEIGHT_TILES * 16, N8_TILES * 8> Book;

// The bricks of a matrix that a warp will send next: of those of a tile number `warp`, `warp` + WARPS, …
template <int BITS_> struct TileIterator {
    const char* from;  // the next of the first tile
    int at, tile_bytes, bits;

    DEVICE TileIterator(int width) : bits(BITS_ == RUNTIME ? width : BITS_) {}
    DEVICE void enter(const MmaWeight& m, int tile, int first) {
        at = first;
        const bool fine = at < m.fines;
        const int brick = fine ? TILE_BYTES(bits, FINE_KSTEPS) : TILE_BYTES(bits, GROUP_KSTEPS);
        tile_bytes = (fine ? m.fines : m.bricks - m.fines) * brick;
        from = (fine ? m.fine : m.main) + (long)tile * tile_bytes + (long)(fine ? at : at - m.fines) * brick;
    }
    // On their way into shared memory; nothing if there are no more.
    DEVICE void send(const MmaWeight& m, int tile, int lane, u32 to) {
        if (at >= m.bricks) return;
        const int tiles = m.tiles - tile;
        const bool fine = at < m.fines;
        if (FINE_KSTEPS != GROUP_KSTEPS && fine) copy(TILE_BYTES(bits, FINE_KSTEPS), tiles, lane, to);
        else copy(TILE_BYTES(bits, GROUP_KSTEPS), tiles, lane, to);
        at += WARPS;
        if (fine && at >= m.fines) enter(m, tile, at);
        else from += WARPS * (fine ? TILE_BYTES(bits, FINE_KSTEPS) : TILE_BYTES(bits, GROUP_KSTEPS));
    }
    DEVICE void copy(int size, int tiles, int lane, u32 to) const {
        UNROLL for (int t = 0; t < WEIGHT_TILES; t++) if (t == 0 || t < tiles) {
            const char* piece = from + (long)t * tile_bytes + lane * 16;
            UNROLL for (int i = 0; i < TILE_SLOT; i += 512)
                if (size - i >= 512 || lane * 16 < size - i) cp_async<16>(to + t * TILE_SLOT + i, piece + i);
        }
    }
};

// Activations as they enter a matrix.
struct PackedActs {
    const uint4* words;
    int rows;
};

// A lane's part of the 128 inputs of a brick of some rows: two registers for each step.
struct BFragments {
    uint4 words[N8_TILES][4];

    DEVICE void load(const PackedActs& x, int brick, int lane) {
        const uint4 none = {0, 0, 0, 0};
        UNROLL for (int c = 0; c < N8_TILES; c++) {
            const int row = c * 8 + lane / 4;
            UNROLL for (int p = 0; p < 4; p++)
                words[c][p] = row < x.rows ? x.words[((brick * 4 + p) * x.rows + row) * 4 + lane % 4] : none;
        }
    }
    DEVICE uint2 step(int c, int number) const {
        const uint4 pair = words[c][number / 2];
        return number % 2 ? uint2{pair.z, pair.w} : uint2{pair.x, pair.y};
    }
};

// The sums of two rows' groups.
template <int GROUP_KSTEPS_> struct GroupSums {
    float2 sum[N8_TILES][8 / GROUP_KSTEPS_];

    DEVICE void count(const BFragments& rows) {
        const u32 one = 0x3c003c00;
        UNROLL for (int c = 0; c < N8_TILES; c++) UNROLL for (int group = 0; group < 8 / GROUP_KSTEPS_; group++) {
            float total[4] = {};
            UNROLL for (int step = 0; step < GROUP_KSTEPS_; step++) {
                const uint2 b = rows.step(c, group * GROUP_KSTEPS_ + step);
                mma_m16n8k16(total, one, one, one, one, b.x, b.y);
            }
            sum[c][group] = float2{total[0], total[1]};
        }
    }
};

// Add bricks of several tiles times rows to the sums. Tiles take turns, and every second step has sums of its own: a
// tensor core is slow to answer and quick to be asked again.
template <int BITS_, int GROUP_KSTEPS_>
DEVICE void mma_tile(
    const char* from, const BFragments& rows, const GroupSums<GROUP_KSTEPS_>& sums, float (*total)[N8_TILES][4], int lane
) {
    constexpr int groups = 8 / GROUP_KSTEPS_, chains = GROUP_KSTEPS_ > 1 ? 2 : 1;
    const int odd = OddRow<BITS_>::odd;
    const float even_zero = ZERO_POINTS == 0 ? -1024.0f - (1 << (BITS_ - 1)) : -1024.0f;
    const float odd_zero = ZERO_POINTS == 0 ? -1024.0f - odd * (1 << (BITS_ - 1)) : -1024.0f;
    TileFragment<BITS_, GROUP_KSTEPS_> bricks[WEIGHT_TILES];
    TileCodes<BITS_> codes[WEIGHT_TILES];
    UNROLL for (int t = 0; t < WEIGHT_TILES; t++) {
        bricks[t].template load<true>(from + t * TILE_SLOT, lane);
        codes[t] = bricks[t].codes();
    }
    UNROLL for (int group = 0; group < groups; group++) {
        float part[WEIGHT_TILES][chains][N8_TILES][4] = {};
        UNROLL for (int step = 0; step < GROUP_KSTEPS_; step++) UNROLL for (int t = 0; t < WEIGHT_TILES; t++) {
            u32 a[4];
            codes[t].template unpack<odd>(group * GROUP_KSTEPS_ + step, a);
            UNROLL for (int c = 0; c < N8_TILES; c++) {
                const uint2 b = rows.step(c, group * GROUP_KSTEPS_ + step);
                mma_m16n8k16(part[t][step % chains][c], a[0], a[1], a[2], a[3], b.x, b.y);
            }
        }
        UNROLL for (int t = 0; t < WEIGHT_TILES; t++) {
            const u32* numbers = bricks[t].numbers + group;
            const u32 scales = numbers[0];
            const float scale[2] = {low_half(scales), high_half(scales) * (1.0f / odd)};
            float zero[2] = {even_zero, odd_zero};
            if (ZERO_POINTS == 2) {
                const u32 zeros = numbers[groups];  // -zero point
                zero[0] += low_half(zeros), zero[1] += high_half(zeros) * odd;
            }
            const u32 minima = HAS_MINS ? numbers[(NUM_TABLES - 1) * groups] : 0;  // -minimum
            UNROLL for (int c = 0; c < N8_TILES; c++) UNROLL for (int i = 0; i < 4; i++) {
                const float sum = i % 2 ? sums.sum[c][group].y : sums.sum[c][group].x;
                const float both = chains == 2 ? part[t][0][c][i] + part[t][1][c][i] : part[t][0][c][i];
                float& to = total[t][c][i];
                to = fmaf(scale[i / 2], fmaf(zero[i / 2], sum, both), to);
                if (HAS_MINS) to = fmaf(i / 2 ? high_half(minima) : low_half(minima), sum, to);
            }
        }
    }
}

// The same, of codes of a width that may be known only here.
template <int BITS_, int GROUP_KSTEPS_, class... Others> DEVICE void mma_tile_any_bits(int width, Others&... others) {
    if (BITS_ != RUNTIME) mma_tile<BITS_ == RUNTIME ? 2 : BITS_, GROUP_KSTEPS_>(others...);
    else if (RUNTIME_BITS >> 2 & 1 && width == 2) mma_tile<2, GROUP_KSTEPS_>(others...);
    else if (RUNTIME_BITS >> 3 & 1 && width == 3) mma_tile<3, GROUP_KSTEPS_>(others...);
    else if (RUNTIME_BITS >> 4 & 1 && width == 4) mma_tile<4, GROUP_KSTEPS_>(others...);
    else if (RUNTIME_BITS >> 5 & 1 && width == 5) mma_tile<5, GROUP_KSTEPS_>(others...);
    else if (RUNTIME_BITS >> 6 & 1 && width == 6) mma_tile<6, GROUP_KSTEPS_>(others...);
    else if (RUNTIME_BITS >> 8 & 1) mma_tile<8, GROUP_KSTEPS_>(others...);
}

// The bricks of one matrix, or of two that share their inputs; `widths` are a nibble each.
template <int FIRST, int SECOND, int GROUP_KSTEPS_>
DEVICE void mma_tiles(const char* slots, const BFragments& rows, float (*total)[N8_TILES][4], int lane, int widths) {
    GroupSums<GROUP_KSTEPS_> sums;
    sums.count(rows);
    mma_tile_any_bits<FIRST, GROUP_KSTEPS_>(widths & 15, slots, rows, sums, total, lane);
    if (SECOND) {
        const char* others = slots + WEIGHT_TILES * TILE_SLOT;
        float (*more)[N8_TILES][4] = total + WEIGHT_TILES;
        mma_tile_any_bits<SECOND ? SECOND : 2, GROUP_KSTEPS_>(widths >> 4, others, rows, sums, more, lane);
    }
}
template <int FIRST, int SECOND>
DEVICE void mma_tiles(
    const MmaWeight& m, int brick, const char* slots, const BFragments& rows, float (*total)[N8_TILES][4], int lane, int widths
) {
    if (FINE_KSTEPS != GROUP_KSTEPS && brick < m.fines) mma_tiles<FIRST, SECOND, FINE_KSTEPS>(slots, rows, total, lane, widths);
    else mma_tiles<FIRST, SECOND, GROUP_KSTEPS>(slots, rows, total, lane, widths);
}

// What is added to the answers of a thread block, fetched long before it is needed.
struct BiasResidual {
    static const int most = (WEIGHT_TILES * 16 * (FUSED_PACK ? 1 : N8_TILES * 8) + THREADS - 1) / THREADS;  // answers of a thread
    float bias[most][GLU_WEIGHTS], rest[most];

    DEVICE void load(const GemmParams& job, int at, int tile) {
        UNROLL for (int n = 0; n < most; n++) {
            const int i = n * THREADS + threadIdx.x, row = i % job.rows, output = tile * 16 + i / job.rows;
            const bool there = i < WEIGHT_TILES * 16 * job.rows && output < job.parts[at].outputs;
            UNROLL for (int s = 0; s < GLU_WEIGHTS; s++) {
                const u16* added = job.parts[at + s].bias;
                bias[n][s] = there && added ? cvt_f32_f16(added[output]) : 0.0f;
            }
            rest[n] = there && job.residual ? cvt_f32_f16(job.residual[(long)row * job.parts[at].stride + output]) : 0.0f;
        }
    }
};

// x as matrices want it, in shared memory; the warps' first bricks are on their way meanwhile.
DEVICE void pack_row(const GemmParams& job, int at, int tile, char* memory, PackedActs* x, BiasResidual& added) {
    u16* raw = (u16*)memory;
    float* squares = (float*)(raw + job.inputs + BEHIND);
    char* here = memory + ((job.inputs + BEHIND) * 2 + (job.inputs + 255) / 256 * 4 + 15) / 16 * 16;
    ActPacker items[PACK_ITEMS];
    UNROLL for (int i = 0; i < PACK_ITEMS; i++) items[i].load(job, job.parts[at], i * THREADS + threadIdx.x);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();  // not before: the next matrix's first bricks would be in the way of this one's
    added.load(job, at, tile);
    load_row(job, 0, raw, squares, WARPS);
    __syncthreads();
    const float measure = rms_scale(job, squares);
    UNROLL for (int e = 0; e < NUM_PERMS; e++) {
        const GemmOperand& part = job.parts[at + e];
        uint4* words = (uint4*)here;
        if (e) UNROLL for (int i = 0; i < PACK_ITEMS; i++) items[i].load(job, part, i * THREADS + threadIdx.x);
        UNROLL for (int i = 0; i < PACK_ITEMS; i++) items[i].put(job, part, i * THREADS + threadIdx.x, 0, raw, measure, words);
        x[e] = {words, 1};
        here += part.matrix.bricks * 256;
    }
    __syncthreads();
}

// One warp's sums for the tiles of its thread block; of matrix `at`, and under an ACT of the next.
template <int FIRST, int SECOND>
DEVICE void mainloop(
    const GemmParams& job, int at, int tile, char* memory, float (*total)[N8_TILES][4], BiasResidual& added, const ChainArgs* link, int widths = 0
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const MmaWeight &first = job.parts[at].matrix, &second = job.parts[at + GLU_WEIGHTS - 1].matrix;
    const char* own = memory + warp * (STAGES * STAGE_BYTES);
    const u32 ring = cvta_to_shared(own) + lane * 16;
    TileIterator<FIRST> some(widths & 15);
    TileIterator<SECOND ? SECOND : 2> others(widths >> 4);
    some.enter(first, tile, warp);
    if (SECOND) others.enter(second, tile, warp);
    auto send = [&](u32 to) {
        some.send(first, tile, lane, to);
        if (SECOND) others.send(second, tile, lane, to + WEIGHT_TILES * TILE_SLOT);
        cp_async_commit_group();
    };
    Book* book = (Book*)(memory + LEDGER_AT);
    if (OUT_PREPACKED) book->send(link->heir, tile * 16, job.parts[at].outputs);
    UNROLL for (int stage = 0; stage < STAGES - 1; stage++) send(ring + stage * STAGE_BYTES);
    PackedActs x[NUM_PERMS];
    RmsPartials<32> squares;
    if (FUSED_PACK) {
        pack_row(job, at, tile, memory + WARPS * STAGES * STAGE_BYTES, x, added);
    } else {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        if (IN_PREPACKED && RMS_NORM) squares.ask(job, *link);
        added.load(job, at, tile);
        UNROLL for (int e = 0; e < NUM_PERMS; e++) x[e] = {job.parts[at + e].entrance.words, job.rows};
    }
    int stage = 0, before = (STAGES - 1) * STAGE_BYTES;  // where bricks are, and where there is room for more
    const int most = SEPARATE_PERM ? max(first.bricks, second.bricks) : first.bricks;
    BFragments rows, next;  // those that are far away are fetched a round ahead
    if (PREFETCH_ACTS && warp < most) next.load(x[0], warp, lane);
    if (IN_PREPACKED && RMS_NORM) squares.find(job, *link, book->measures);
    for (int brick = warp; brick < most; brick += WARPS) {
        if (PREFETCH_ACTS) rows = next;
        if (PREFETCH_ACTS && brick + WARPS < most) next.load(x[0], brick + WARPS, lane);
        cp_async_wait_group<STAGES - 2>();
        __syncwarp();  // a lane reads what others copied, and overwrites what others have read
        send(ring + before);
        const char* slots = own + stage;
        if (SEPARATE_PERM) {
            constexpr int bits = SECOND ? SECOND : 2;
            if (brick < first.bricks) rows.load(x[0], brick, lane), mma_tiles<FIRST, 0>(first, brick, slots, rows, total, lane, widths);
            if (brick < second.bricks) {
                rows.load(x[NUM_PERMS - 1], brick, lane);
                mma_tiles<bits, 0>(second, brick, slots + WEIGHT_TILES * TILE_SLOT, rows, total + WEIGHT_TILES, lane, widths >> 4);
            }
        } else {
            if (!PREFETCH_ACTS) rows.load(x[0], brick, lane);
            mma_tiles<FIRST, SECOND>(first, brick, slots, rows, total, lane, widths);
        }
        before = stage, stage = stage + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    }
    cp_async_wait_group<0>();
}

// The sums of a thread block's squares; of each row in one and the same order.
DEVICE void store_rms_partials(const GemmParams& job, const EpilogueTarget& heir, float* found, const float (&kept)[BiasResidual::most]) {
    const int lane = threadIdx.x % 32, outputs = WEIGHT_TILES * 16;
    if (job.rows == 1 && outputs <= 32) {  // the first warp has them all
        float sum = kept[0] * kept[0];
        UNROLL for (int other = 16; other; other /= 2) sum += shfl_xor(sum, other);
        if (threadIdx.x == 0) heir.squares[blockIdx.x] = sum;
        return;
    }
    __syncthreads();  // all have added up
    UNROLL for (int n = 0; n < BiasResidual::most; n++) {
        const int i = n * THREADS + threadIdx.x;
        if (i < outputs * job.rows) found[i] = kept[n];
    }
    __syncthreads();
    for (int row = threadIdx.x / 32; row < job.rows; row += WARPS) {
        float sum = 0;
        for (int output = lane; output < outputs; output += 32) {
            const float number = found[output * job.rows + row];
            sum = fmaf(number, number, sum);
        }
        UNROLL for (int other = 16; other; other /= 2) sum += shfl_xor(sum, other);
        if (lane == 0) heir.squares[row * heir.shares + blockIdx.x] = sum;
    }
}

// A thread block's tiles: the sums of its warps, added up, and what is done with them. `widths`, a nibble for each side,
// are heeded if there are WIDTHS.
DEVICE void gemm_block(const GemmParams& job, char* memory, const ChainArgs* link, int widths = 0) {
    int at = 0;
    if (!ACTIVATION) while (at + 1 < NUM_WEIGHTS && blockIdx.x >= job.parts[at + 1].first) at++;
    const GemmOperand& part = job.parts[at];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = (blockIdx.x - part.first) * WEIGHT_TILES;
    float total[WARP_TILES][N8_TILES][4] = {};
    BiasResidual added;
    PadWriter gap;
    if (OUT_PREPACKED) gap.find(link->heir, blockIdx.x * THREADS + threadIdx.x);
    if (RUNTIME_BITS) mainloop<RUNTIME, ACTIVATION ? RUNTIME : 0>(job, at, tile, memory, total, added, link, widths);
    else if (ACTIVATION) mainloop<BITS_OF(0), ACTIVATION ? BITS_OF(1) : 0>(job, at, tile, memory, total, added, link);
    else if (one_width() || at == 0) mainloop<BITS_OF(0), 0>(job, at, tile, memory, total, added, link);
    else if (NUM_WEIGHTS == 2 || at == 1) mainloop<BITS_OF(NUM_WEIGHTS > 1 ? 1 : 0), 0>(job, at, tile, memory, total, added, link);
    else mainloop<BITS_OF(NUM_WEIGHTS > 2 ? 2 : 0), 0>(job, at, tile, memory, total, added, link);
    __syncthreads();
    float* found = (float*)memory;  // (warp, tile, output, row)
    UNROLL for (int t = 0; t < WARP_TILES; t++) UNROLL for (int c = 0; c < N8_TILES; c++) UNROLL for (int i = 0; i < 4; i++) {
        const int row = c * 8 + lane % 4 * 2 + i % 2;
        if (row < job.rows) found[((warp * WARP_TILES + t) * 16 + lane / 4 + i / 2 * 8) * job.rows + row] = total[t][c][i];
    }
    __syncthreads();
    const Book* book = (const Book*)(memory + LEDGER_AT);
    float kept[BiasResidual::most] = {};
    UNROLL for (int n = 0; n < BiasResidual::most; n++) {
        const int i = n * THREADS + threadIdx.x, row = i % job.rows, output = tile * 16 + i / job.rows;
        if (i >= WEIGHT_TILES * 16 * job.rows || output >= part.outputs) continue;
        const float measure = IN_PREPACKED && RMS_NORM ? book->measures[row] : 1.0f;
        float answer[GLU_WEIGHTS];
        UNROLL for (int s = 0; s < GLU_WEIGHTS; s++) {
            float sum = 0;
            UNROLL for (int w = 0; w < WARPS; w++) sum += found[(w * WARP_TILES + s * WEIGHT_TILES) * 16 * job.rows + i];
            answer[s] = sum * job.parts[at + s].matrix.factor * measure + added.bias[n][s];
        }
        const float y = ACTIVATION ? activate(answer[0]) * answer[GLU_WEIGHTS - 1] : answer[0];
        const u16 half = cvt_f16_f32(y + added.rest[n]);
        if (FP32_OUT) ((float*)part.y)[(long)row * part.stride + output] = y + added.rest[n];
        else if (!OUT_PREPACKED || part.y) part.y[(long)row * part.stride + output] = half;
        if (!OUT_PREPACKED) continue;
        kept[n] = cvt_f32_f16(half);
        store_prepacked(link->heir, book->places[i / job.rows], row, book->normed(link->heir, i / job.rows, kept[n]));
    }
    if (!OUT_PREPACKED) return;
    gap.close(link->heir, gridDim.x * THREADS);
    if (link->heir.squares) store_rms_partials(job, link->heir, found, kept);
}
