// Packed matrices times 17 to 64 rows of activations.
//
// A thread block takes a group of outputs, all rows of activations, and one brick of 128 inputs after the other: such a
// unit of work is WARPS * TILES bricks and the rows' numbers, which all its warps share. Units go through a ring in
// shared memory, several ahead; the first bricks are on their way before the kernel that computes the activations has
// ended. Codes become the numbers that the formats mean, rounded as they say, and the tensor cores multiply those.
//
// All units stand in one line, group by group, and every thread block has an equal stretch of it. Where a group belongs
// to several, each leaves its sums in memory, and the one that is done last adds them up in the order of the inputs.
// The line does not depend on the rows: a row's answer is the same bits in any company of 17 to 64.
//
// Set when compiling, besides what bricks.h wants: RESIDENT (thread blocks of a multiprocessor).

#include "bricks.h"

#ifndef EMULATED
DEVICE int arrive(int* at) {  // counts; what was written before it is seen by who arrives later
    int out; asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(out) : "l"(at) : "memory"); return out;
}
#endif

#define GROUP (EACH * WARPS)  // tiles of a matrix
#define ROWS (COLUMNS * 8)
#define ROWS_AT (TILES * WARPS * SLOT)
#define STAGE_BYTES (ROWS_AT + ROWS * 256)

struct Line {
    float4* left;  // (thread block, 2, TILES, COLUMNS, THREADS) sums of groups that others have a share in
    int* counts;   // of each group, at its first unit: thread blocks that have left theirs; zero before and after
    int units;     // of all parts; Part::first counts them

    DEVICE int start(int worker) const { return (long)units * worker / gridDim.x; }
    DEVICE int owner(int unit) const { return ((long)(unit + 1) * gridDim.x - 1) / units; }
};

// Where in the line a thread block stands, and what its threads copy there.
struct Place {
    int unit, change;        // this unit, and the first that is of another run or group
    int part, group, first;  // the group's number in its part, and its first unit
    int tiles;               // of the warp's that exist
    bool fine;
    int size[SIDES], tile_bytes[SIDES];
    const char *bricks[SIDES], *words;

    DEVICE void find(const Job& job) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        part = 0;
        if (!ACT) while (part + 1 < PARTS && unit >= job.parts[part + 1].first) part++;
        const Part& p = job.parts[part];
        group = (unit - p.first) / p.matrix.bricks, first = p.first + group * p.matrix.bricks;
        const int brick = unit - first, tile = group * GROUP + warp * EACH;
        tiles = p.matrix.tiles - tile;
        words = (const char*)p.entrance.words + (long)brick * (ROWS * 256) + threadIdx.x * 16;
        fine = brick < p.matrix.fines;
        change = first + (fine ? p.matrix.fines : p.matrix.bricks);
        LOOP for (int s = 0; s < SIDES; s++) {
            const Matrix& m = job.parts[part + s].matrix;
            const int bits = one_width() ? BITS_OF(0) : (int)BITS_OF(part + s);
            size[s] = fine ? BRICK(bits, FINE) : BRICK(bits, STEPS);
            tile_bytes[s] = (fine ? m.fines : m.bricks - m.fines) * size[s];
            bricks[s] = (fine ? m.fine : m.main) + (long)tile * tile_bytes[s]
                + (fine ? brick : brick - m.fines) * size[s] + lane * 16;
        }
    }
    DEVICE void advance(const Job& job, int end) {
        LOOP for (int s = 0; s < SIDES; s++) bricks[s] += size[s];
        words += ROWS * 256;
        if (++unit == change && unit < end) find(job);
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
DEVICE void consume(const char* bricks, const char* rows, float (*total)[COLUMNS][4], int lane) {
    Brick<BITS_, STEPS_> brick[COUNT];
    Codes<BITS_> codes[COUNT];
    Meaning<BITS_, STEPS_> meaning[COUNT];
    LOOP for (int t = 0; t < COUNT; t++) {
        brick[t].template load<true>(bricks + t * SLOT, lane);
        codes[t] = brick[t].codes();
    }
    LOOP for (int pair = 0; pair < 4; pair++) {
        u32 a[COUNT][2][4];
        LOOP for (int t = 0; t < COUNT; t++) LOOP for (int half = 0; half < 2; half++) {
            const int step = pair * 2 + half;
            if (step % STEPS_ == 0) meaning[t].load(brick[t].numbers, step / STEPS_);
            codes[t].template unpack<Width<BITS_>::odd>(step, a[t][half]);
            meaning[t].apply(a[t][half]);
        }
        uint4 b[COLUMNS];
        LOOP for (int c = 0; c < COLUMNS; c++) b[c] = *(const uint4*)(rows + (pair * ROWS + c * 8) * 64 + lane * 16);
        LOOP for (int half = 0; half < 2; half++)  // a tensor core is slow to answer: sums take turns
            LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int t = 0; t < COUNT; t++) {
                const u32(&w)[4] = a[t][half];
                multiply_add(total[t][c], w[0], w[1], w[2], w[3], half ? b[c].z : b[c].x, half ? b[c].w : b[c].y);
            }
    }
}
template <int BITS_, int COUNT>
DEVICE void work(bool fine, const char* bricks, const char* rows, float (*total)[COLUMNS][4], int lane) {
    if (FINE != STEPS && fine) consume<BITS_, FINE, COUNT>(bricks, rows, total, lane);
    else consume<BITS_, STEPS, COUNT>(bricks, rows, total, lane);
}

DEVICE void clear(float (*total)[COLUMNS][4]) {
    LOOP for (int t = 0; t < TILES; t++) LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int i = 0; i < 4; i++)
        total[t][c][i] = 0;
}

// Sums of a group from its beginning to its end, in the order of the inputs; false if somebody else will do it.
DEVICE bool gather(
    const Line& line, const Place& at, int begin, int end, int group_end, int* before, float (*total)[COLUMNS][4]
) {
    if (begin <= at.first && end >= group_end) return true;
    const int size = TILES * COLUMNS * THREADS;
    float4* mine = line.left + (long)(blockIdx.x * 2 + (begin <= at.first)) * size + threadIdx.x;
    LOOP for (int t = 0; t < TILES; t++) LOOP for (int c = 0; c < COLUMNS; c++)
        mine[(t * COLUMNS + c) * THREADS] = float4{total[t][c][0], total[t][c][1], total[t][c][2], total[t][c][3]};
    __syncthreads();
    if (threadIdx.x == 0) *before = arrive(line.counts + at.first);
    __syncthreads();
    const int from = line.owner(at.first), to = line.owner(group_end - 1);
    if (*before < to - from) return false;
    if (threadIdx.x == 0) line.counts[at.first] = 0;
    clear(total);
    for (int worker = from; worker <= to; worker++) {
        const float4* theirs = line.left + (long)(worker * 2 + (worker == from)) * size + threadIdx.x;
        LOOP for (int t = 0; t < TILES; t++) LOOP for (int c = 0; c < COLUMNS; c++) {
            const float4 sum = __ldcg(theirs + (t * COLUMNS + c) * THREADS);
            total[t][c][0] += sum.x, total[t][c][1] += sum.y, total[t][c][2] += sum.z, total[t][c][3] += sum.w;
        }
    }
    return true;
}

DEVICE void answer(const Job& job, const Place& at, const float (*total)[COLUMNS][4], int warp, int lane) {
    const Part& part = job.parts[at.part];
    LOOP for (int t = 0; t < EACH; t++) LOOP for (int upper = 0; upper < 2; upper++) {
        const int output = ((at.group * WARPS + warp) * EACH + t) * 16 + lane / 4 + upper * 8;
        if (output >= part.outputs) continue;
        float factor[SIDES], bias[SIDES];
        LOOP for (int s = 0; s < SIDES; s++) {
            const Part& side = job.parts[at.part + s];
            factor[s] = side.matrix.factor, bias[s] = side.bias ? as_float(side.bias[output]) : 0.0f;
        }
        LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int i = 0; i < 2; i++) {
            const int row = c * 8 + lane % 4 * 2 + i;
            if (row >= job.rows) continue;
            const long to = (long)row * part.stride + output;
            float sides[SIDES];
            LOOP for (int s = 0; s < SIDES; s++)
                sides[s] = fmaf(total[s * EACH + t][c][upper * 2 + i], factor[s], bias[s]);
            float y = ACT ? bent(sides[0]) * sides[SIDES - 1] : sides[0];
            if (job.residual) y += as_float(job.residual[to]);
            part.y[to] = as_half(y);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) multiply_wide(
    const __grid_constant__ Job job, const __grid_constant__ Line line
) {
    extern __shared__ __align__(128) char memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int begin = line.start(blockIdx.x), end = line.start(blockIdx.x + 1);
    const u32 ring = shared_address(memory);
    int* note = (int*)(memory + STAGES * STAGE_BYTES);
    Place at, ahead;
    at.unit = begin, at.find(job), ahead = at;
    LOOP for (int stage = 0; stage < STAGES - 1; stage++) if (ahead.unit < end) {
        ahead.send_bricks(ring + stage * STAGE_BYTES);
        ahead.advance(job, end);
    }
    ::begin();
    ahead = at;
    LOOP for (int stage = 0; stage < STAGES - 1; stage++) {
        if (ahead.unit < end) {
            ahead.send_rows(ring + stage * STAGE_BYTES);
            ahead.advance(job, end);
        }
        close_group();
    }
    float total[TILES][COLUMNS][4] = {};
    int stage = 0, before = (STAGES - 1) * STAGE_BYTES;  // where a unit is, and where there is room for one
    while (at.unit < end) {
        wait_groups<STAGES - 2>();
        __syncthreads();  // all have copied this unit, and read the one before it
        if (ahead.unit < end) {
            ahead.send_bricks(ring + before);
            ahead.send_rows(ring + before);
            ahead.advance(job, end);
        }
        close_group();
        const char *bricks = memory + stage + warp * TILES * SLOT, *rows = memory + stage + ROWS_AT;
        if (one_width()) {
            work<BITS_OF(0), TILES>(at.fine, bricks, rows, total, lane);
        } else if (ACT) {
            work<BITS_OF(0), EACH>(at.fine, bricks, rows, total, lane);
            work<BITS_OF(PARTS > 1), EACH>(at.fine, bricks + EACH * SLOT, rows, total + EACH, lane);
        } else {
            if (at.part == 0) work<BITS_OF(0), TILES>(at.fine, bricks, rows, total, lane);
            else if (at.part == 1) work<BITS_OF(PARTS > 1), TILES>(at.fine, bricks, rows, total, lane);
            else work<BITS_OF(PARTS > 2 ? 2 : 0), TILES>(at.fine, bricks, rows, total, lane);
        }
        const int group_end = at.first + job.parts[at.part].matrix.bricks;
        if (at.unit + 1 == end || at.unit + 1 == group_end) {
            if (gather(line, at, begin, end, group_end, note, total)) answer(job, at, total, warp, lane);
            clear(total);
        }
        at.advance(job, end);
        before = stage, stage = stage + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    }
    wait_groups<0>();
}
