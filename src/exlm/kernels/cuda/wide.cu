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

#define MATRICES 1
#include "bricks.h"

#define ROWS (COLUMNS * 8)
#define MATRIX_BYTES (ROWS * 16)  // eight inputs of all rows: eights of rows side by side, each row by row or, HANDED, by input

#ifndef EMULATED
// Counts as one of some, in rounds that go by turns, so that nobody sets the counter back; one that waits sees what the
// others of its round have written before.
template <int SOME> DEVICE void meet(u32* at, bool wait) {
    u32 old, found;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "n"(2 * SOME - 1) : "memory");
    if (!wait || old % SOME == SOME - 1) return;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(at) : "memory"); while (found / SOME == old / SOME);
}
#define LOAD(how) \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" how ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(row) : "memory")
DEVICE void load_matrices(u32 (&out)[4], u32 row) { LOAD(""); }  // four of 8 x 8 halves; a lane says where a row of one is
DEVICE void load_turned(u32 (&out)[4], u32 row) { LOAD(".trans"); }
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && WARPS % 4 == 0
// Weights of four warps times the rows: Hopper's tensor cores fetch those themselves, and warps go on meanwhile.
#define FOUR(sum) "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
#define EIGHT(sum, c) FOUR(sum[c]), FOUR(sum[c + 1])
#define SUMS16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS24 SUMS16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SUMS32 SUMS24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#if HANDED
#define TURNED "1"
#else
#define TURNED "0"
#endif
#define ASK(rows, sums, others, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" rows "k16.f32.f16.f16 {" sums "}, " others ", 1, 1, 1, " TURNED ";" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
struct Tensor {
    DEVICE static void multiply_add(float (&sum)[COLUMNS][4], const u32 (&a)[4], u32 rows, int) {
        const unsigned long long b = rows >> 4 | (unsigned long long)(MATRIX_BYTES >> 4) << 16 | 128ull >> 4 << 32;
#if COLUMNS == 4
        ASK("32", SUMS16, "{%16,%17,%18,%19}, %20", EIGHT(sum, 0), EIGHT(sum, 2));
#elif COLUMNS == 6
        ASK("48", SUMS24, "{%24,%25,%26,%27}, %28", EIGHT(sum, 0), EIGHT(sum, 2), EIGHT(sum, 4));
#else
        ASK("64", SUMS32, "{%32,%33,%34,%35}, %36", EIGHT(sum, 0), EIGHT(sum, 2), EIGHT(sum, 4), EIGHT(sum, 6));
#endif
    }
    DEVICE static void start() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
    DEVICE static void close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
    template <int LAST> DEVICE static void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LAST) : "memory"); }
    DEVICE static void show() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // what threads copied
};
#else
struct Tensor {
    DEVICE static void multiply_add(float (&sum)[COLUMNS][4], const u32 (&a)[4], u32 rows, int lane) {
        const u32 row = rows + lane / 8 % 2 * MATRIX_BYTES + (lane / 16 * 8 + lane % 8) * 16;
        LOOP for (int c = 0; c < COLUMNS; c += 2) {
            u32 b[4];
            if (HANDED) load_turned(b, row + c * 128);
            else load_matrices(b, row + c * 128);
            ::multiply_add(sum[c], a[0], a[1], a[2], a[3], b[0], b[1]);
            ::multiply_add(sum[c + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
    DEVICE static void start() {}
    DEVICE static void close() {}
    template <int LAST> DEVICE static void wait() {}
    DEVICE static void show() {}
};
#endif

#define GROUP (EACH * WARPS)  // tiles of a matrix
#define WIDTH (GROUP * 16)    // outputs
#define ROWS_AT (TILES * WARPS * SLOT)
#define STAGE_BYTES (ROWS_AT + ROWS * 256)

#define RING (STAGES * STAGE_BYTES)
#define SUMS (ROWS * (TILES * WARPS * 16 + 8) * 4)
#define LEDGER_AT (RING > SUMS ? RING : SUMS)
#define SHARE ((COLUMNS + PIECES - 1) / PIECES)  // eights of rows that one answers for, at most

typedef Ledger<WIDTH, ROWS> Book;

struct Shared {
    float4* left;  // (group, piece, TILES, COLUMNS, THREADS) sums
    u32* counts;   // of each group: thread blocks that have left theirs, in rounds of PIECES
};

// Bricks of a group that are next, and what its threads copy of them.
struct Place {
    int brick, change;  // this one, and the first of the other kind
    int tiles;          // of the warp's that exist
    int size[SIDES], tile_bytes[SIDES];
    const char *bricks[SIDES], *words;

    DEVICE void find(const Job& job, int part, int group, int at) {
        const int lane = threadIdx.x % 32, tile = (group * WARPS + threadIdx.x / 32) * EACH;
        const Part& p = job.parts[part];
        const bool fine = at < p.matrix.fines;
        brick = at, change = fine ? p.matrix.fines : p.matrix.bricks, tiles = p.matrix.tiles - tile;
        words = (const char*)p.entrance.words + (long)at * (ROWS * 256) + threadIdx.x * 16;
        LOOP for (int s = 0; s < SIDES; s++) {
            const Matrix& m = job.parts[part + s].matrix;
            const int bits = one_width() ? BITS_OF(0) : (int)BITS_OF(part + s);
            size[s] = fine ? BRICK(bits, FINE) : BRICK(bits, STEPS);
            tile_bytes[s] = (fine ? m.fines : m.bricks - m.fines) * size[s];
            bricks[s] = (fine ? m.fine : m.main) + (long)tile * tile_bytes[s]
                + (long)(fine ? at : at - m.fines) * size[s] + lane * 16;
        }
    }
    DEVICE void advance(const Job& job, int part, int group) {
        LOOP for (int s = 0; s < SIDES; s++) bricks[s] += size[s];
        words += ROWS * 256;
        if (++brick == change && change < job.parts[part].matrix.bricks) find(job, part, group, brick);
    }
    DEVICE void send_bricks(u32 stage) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        LOOP for (int s = 0; s < SIDES; s++) LOOP for (int t = 0; t < EACH; t++) if (t < tiles) {
            const char* from = bricks[s] + (long)t * tile_bytes[s];
            const u32 to = stage + ((warp * SIDES + s) * EACH + t) * SLOT + lane * 16;
            LOOP for (int i = 0; i < SLOT; i += 512) if (i + lane * 16 < size[s]) copy16(to + i, from + i);
        }
    }
    DEVICE void send_rows(u32 stage) const {
        LOOP for (int i = 0; i < ROWS * 256; i += THREADS * 16)
            if (ROWS * 256 - i >= THREADS * 16 || threadIdx.x * 16 < ROWS * 256 - i)
                copy16(stage + ROWS_AT + threadIdx.x * 16 + i, words + i);
    }
};

// 1024 + code, and 1024 + ODD times the code for outputs 8 to 15, as the numbers they stand for.
template <int BITS_, int STEPS_> struct Meaning {
    static const int groups = 8 / STEPS_, odd = Width<BITS_>::odd;
    u32 scale[2], zero[2], minimum[2];  // of the lane's two outputs, twice each

    DEVICE void load(const u32* numbers, int group) {
        const u32 half = ZEROS == 0 ? 1u << (BITS_ - 1) : 0, upper = odd == 16 ? 0xd400 : odd == 4 ? 0xdc00 : 0xe400;
        const u32 base = (0xe400 + half) | (upper + odd * half) << 16;  // -1024 and -1024 / odd, both less half
        const u32 zeros = ZEROS == 2 ? add2(numbers[groups + group], base) : base, scales = numbers[group];
        const u32 minima = MINIMA ? numbers[(TABLES - 1) * groups + group] : 0;
        scale[0] = both_low(scales), scale[1] = both_high(scales);
        zero[0] = both_low(zeros), zero[1] = both_high(zeros);
        minimum[0] = both_low(minima), minimum[1] = both_high(minima);
    }
    DEVICE void apply(u32 (&codes)[4]) const {
        const u32 part = odd == 16 ? 0x2c002c00 : 0x34003400;  // 1 / odd
        LOOP for (int j = 0; j < 4; j++) {
            const int o = j % 2;
            const u32 code = o && odd > 1 ? fma2(codes[j], part, zero[o]) : add2(codes[j], zero[o]);
            codes[j] = MINIMA ? fma2(code, scale[o], minimum[o]) : mul2(code, scale[o]);
        }
    }
};

// Add bricks of several tiles times the rows to their sums.
template <int BITS_, int STEPS_, int COUNT>
DEVICE void consume(const char* bricks, u32 rows, float (*total)[COLUMNS][4], int lane) {
    Brick<BITS_, STEPS_> brick[COUNT];
    Codes<BITS_> codes[COUNT];
    Meaning<BITS_, STEPS_> meaning[COUNT];
    LOOP for (int t = 0; t < COUNT; t++) {
        brick[t].template load<true>(bricks + t * SLOT, lane);
        codes[t] = brick[t].codes();
    }
    u32 a[2][COUNT][4];  // the tensor cores may still read one while the other is made
    LOOP for (int step = 0; step < 8; step++) {
        LOOP for (int t = 0; t < COUNT; t++) {
            if (step % STEPS_ == 0) meaning[t].load(brick[t].numbers, step / STEPS_);
            codes[t].template unpack<Width<BITS_>::odd>(step, a[step % 2][t]);
            meaning[t].apply(a[step % 2][t]);
        }
        Tensor::start();
        LOOP for (int t = 0; t < COUNT; t++)
            Tensor::multiply_add(total[t], a[step % 2][t], rows + step * 2 * MATRIX_BYTES, lane);
        Tensor::close();
        if (step < 7) Tensor::wait<1>();
    }
    Tensor::wait<0>();
}
template <int BITS_, int COUNT>
DEVICE void work(bool fine, const char* bricks, u32 rows, float (*total)[COLUMNS][4], int lane) {
    if (FINE != STEPS && fine) consume<BITS_, FINE, COUNT>(bricks, rows, total, lane);
    else consume<BITS_, STEPS, COUNT>(bricks, rows, total, lane);
}

// The bricks of a unit, whatever their width.
DEVICE void work_on(int part, bool fine, const char* bricks, u32 rows, float (*total)[COLUMNS][4], int lane) {
    if (one_width()) {
        work<BITS_OF(0), TILES>(fine, bricks, rows, total, lane);
    } else if (ACT) {
        work<BITS_OF(0), EACH>(fine, bricks, rows, total, lane);
        work<BITS_OF(PARTS > 1), EACH>(fine, bricks + EACH * SLOT, rows, total + EACH, lane);
    } else {
        if (part == 0) work<BITS_OF(0), TILES>(fine, bricks, rows, total, lane);
        else if (part == 1) work<BITS_OF(PARTS > 1), TILES>(fine, bricks, rows, total, lane);
        else work<BITS_OF(PARTS > 2 ? 2 : 0), TILES>(fine, bricks, rows, total, lane);
    }
}

// The sums of all pieces, in the order of the inputs, of eights of rows `first` to `end`.
DEVICE void gather(const Shared& shared, int group, int piece, int first, int end, const float (*total)[COLUMNS][4],
                   float (*mine)[SHARE][4]) {
    const int size = TILES * COLUMNS * THREADS;
    float4* left = shared.left + (long)group * PIECES * size + threadIdx.x;
    LOOP for (int t = 0; t < TILES; t++) LOOP for (int c = 0; c < COLUMNS; c++)
        left[piece * size + (t * COLUMNS + c) * THREADS] =
            float4{total[t][c][0], total[t][c][1], total[t][c][2], total[t][c][3]};
    __syncthreads();
    if (threadIdx.x == 0) meet<PIECES>(shared.counts + group, first < end);
    __syncthreads();
    const int many = PIECES * SHARE <= 16 ? SHARE : PIECES <= 8 ? 16 / PIECES : 1;  // columns on their way at once
    LOOP for (int t = 0; t < TILES; t++) LOOP for (int start = 0; start < SHARE; start += many) {
        float4 sums[many][PIECES];
        LOOP for (int c = 0; c < many; c++) if (first + start + c < end) LOOP for (int p = 0; p < PIECES; p++)
            sums[c][p] = __ldcg(left + p * size + (t * COLUMNS + first + start + c) * THREADS);
        LOOP for (int c = 0; c < many && start + c < SHARE; c++) {
            float(&to)[4] = mine[t][start + c];
            LOOP for (int i = 0; i < 4; i++) to[i] = 0;
            if (first + start + c < end) LOOP for (int p = 0; p < PIECES; p++)
                to[0] += sums[c][p].x, to[1] += sums[c][p].y, to[2] += sums[c][p].z, to[3] += sums[c][p].w;
        }
    }
}

#include "answers.h"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) multiply_wide(
    const __grid_constant__ Job job, const __grid_constant__ Shared shared, const __grid_constant__ Link link
) {
    extern __shared__ __align__(128) char memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int number = blockIdx.x / PIECES, piece = blockIdx.x % PIECES;
    int part = 0;
    if (!ACT) while (part + 1 < PARTS && number >= job.parts[part + 1].first) part++;
    const Matrix& matrix = job.parts[part].matrix;
    const int group = number - job.parts[part].first, end = (long)matrix.bricks * (piece + 1) / PIECES;
    const u32 ring = shared_address(memory);
    Place ahead;
    ahead.find(job, part, group, (long)matrix.bricks * piece / PIECES);
    const int start = ahead.brick;
    Book& book = *(Book*)(memory + LEDGER_AT);
    Gap gap;
    if (HEIR) book.send(link.heir, group * WIDTH, job.parts[part].outputs), gap.find(link.heir, blockIdx.x * THREADS + threadIdx.x);
    LOOP for (int stage = 0; stage < STAGES - 1; stage++) if (ahead.brick < end) {
        ahead.send_bricks(ring + stage * STAGE_BYTES);
        ahead.advance(job, part, group);
    }
    let_go();
    await();
    Squares<(THREADS > 64 ? THREADS / 64 : 1)> squares;  // all rows at once
    if (HANDED && NORM) squares.ask(job, link);
    const char* words = ahead.words;
    ahead.words -= (long)(ahead.brick - start) * (ROWS * 256);
    LOOP for (int stage = 0; stage < STAGES - 1; stage++) {
        if (start + stage < end) ahead.send_rows(ring + stage * STAGE_BYTES), ahead.words += ROWS * 256;
        close_group();
    }
    ahead.words = words;
    if (HEIR) gap.close(link.heir, gridDim.x * THREADS);
    if (HANDED && NORM) squares.find(job, link, book.measures);
    float total[TILES][COLUMNS][4] = {};
    int stage = 0, before = (STAGES - 1) * STAGE_BYTES;  // where a unit is, and where there is room for one
    for (int brick = start; brick < end; brick++) {
        wait_groups<STAGES - 2>();
        Tensor::show();
        __syncthreads();  // all have copied this unit, and read the one before it
        if (ahead.brick < end) {
            ahead.send_bricks(ring + before);
            ahead.send_rows(ring + before);
            ahead.advance(job, part, group);
        }
        close_group();
        work_on(part, brick < matrix.fines, memory + stage + warp * TILES * SLOT, ring + stage + ROWS_AT, total, lane);
        before = stage, stage = stage + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    }
    wait_groups<0>();
    __syncthreads();
    const int first = COLUMNS * piece / PIECES, last = COLUMNS * (piece + 1) / PIECES;
    Rest<SHARE> rest;
    rest.ask(job, part, group, first, last);
#if PIECES > 1
    float mine[TILES][SHARE][4];
    gather(shared, number, piece, first, last, total, mine);
    answer(job, link, part, group, rest, mine, memory);
#else
    answer(job, link, part, group, rest, total, memory);
#endif
}
