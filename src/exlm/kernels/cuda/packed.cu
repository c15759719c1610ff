// Packed matrices times a few rows of activations, and packed matrices unpacked.
//
// The tensor cores do the sums: 16 outputs by 16 inputs of weights are the first operand of one mma, eight rows of
// activations the second. Weights lie in memory in bricks of 128 inputs by 16 outputs, codes as the lanes of the mma
// want them and scales behind (tiles.py). A warp copies bricks into shared memory, several ahead, and begins before
// the kernel that computes the activations has ended. The warps of a thread block share the inputs, and their sums are
// added in the order of the warps: a row's answer depends on nothing but the row.
//
// Activations enter in the order of the stored inputs and where lanes expect them, with the sum of each group of them:
// the tensor cores multiply by 1024 + code, which costs nothing to make of a code, and the surplus is taken off again
// with these sums. One row is so prepared by every thread block for itself, while its first bricks are on their way;
// more of them once for all, by `prepare`. Both are the same code and give the same bits.
//
// Set when compiling, besides what bricks.h wants: MAIN (of how many bits most codes are), INSIDE (x is one row, prepared
// here), ITEMS (eights of a row's inputs that a thread prepares).

#define SUMMED 1
#include "bricks.h"

#define STAGE_BYTES (TILES * BRICK(MAIN))
typedef Brick<MAIN / 2, MAIN % 2, TABLES * GROUPS_OF(MAIN)> Main;

// A warp's blocks of a segment: of all blocks of the matrix those number `warp`, `warp` + WARPS, …
struct Stretch {
    const char* from;  // the next brick of the first tile
    int block, end;    // the next block, and the first behind the segment
    int bits, brick, tile_bytes;

    DEVICE void enter(const Segment& s, int tile, int warp) {
        const int skipped = (warp - s.first % WARPS + WARPS) % WARPS;
        bits = s.bits, brick = brick_bytes(bits), tile_bytes = s.blocks * brick;
        block = s.first + skipped, end = s.first + s.blocks;
        from = s.bricks + (long)tile * tile_bytes + (long)skipped * brick;
    }
    // The next bricks into registers.
    DEVICE void read(int tiles, int lane, Any* to) {
        LOOP for (int t = 0; t < EACH; t++)
            if (t == 0 || t < tiles) to[t].template load<false>(from + (long)t * tile_bytes, bits, lane);
        from += WARPS * brick, block += WARPS;
    }
    // The next bricks, of MAIN bits, on their way into shared memory; nothing if there are no more.
    DEVICE void send(int tiles, int lane, u32 to) {
        if (block >= end) return;
        LOOP for (int t = 0; t < EACH; t++) if (t == 0 || t < tiles) {
            const char* piece = from + (long)t * tile_bytes + lane * 16;
            LOOP for (int i = 0; i < BRICK(MAIN); i += 512)
                if (BRICK(MAIN) - i >= 512 || lane * 16 < BRICK(MAIN) - i) copy16(to + t * BRICK(MAIN) + i, piece + i);
        }
        from += WARPS * BRICK(MAIN), block += WARPS;
    }
};

// A lane's part of 128 inputs of some rows: two registers for each step, and the sums of two rows' groups.
struct Rows {
    uint4 words[COLUMNS][4];
    float2 sums[COLUMNS][SUMS];

    DEVICE void load(const uint4* from, const float* sum, int stride, int rows, int block, int lane) {
        const uint4 none = {0, 0, 0, 0};
        LOOP for (int c = 0; c < COLUMNS; c++) {
            const int row = c * 8 + lane / 4, pair = c * 8 + lane % 4 * 2;
            LOOP for (int p = 0; p < 4; p++)
                words[c][p] = row < rows ? from[((block * 4 + p) * rows + row) * 4 + lane % 4] : none;
            LOOP for (int g = 0; g < SUMS; g++)
                sums[c][g] = pair < rows ? *(const float2*)(sum + (block * SUMS + g) * stride + pair) : float2{0, 0};
        }
    }
    DEVICE uint2 step(int c, int number) const {
        const uint4 pair = words[c][number / 2];
        return number % 2 ? uint2{pair.z, pair.w} : uint2{pair.x, pair.y};
    }
};

// Add bricks of several tiles times rows to the sums. Tiles take turns, and every second step has sums of its own: a
// tensor core is slow to answer and quick to be asked again.
template <int BITS, int COUNT, class Bricks>
DEVICE void consume(const Bricks* bricks, const Rows& rows, float (*total)[COLUMNS][4]) {
    constexpr int steps = STEPS_OF(BITS), groups = GROUPS_OF(BITS), chains = steps > 1 ? 2 : 1;
    const int odd = Width<BITS>::odd;
    const float even_zero = ZEROS == 0 ? -1024.0f - (1 << (BITS - 1)) : -1024.0f;
    const float odd_zero = ZEROS == 0 ? -1024.0f - odd * (1 << (BITS - 1)) : -1024.0f;
    Codes<BITS> codes[COUNT];
    LOOP for (int t = 0; t < COUNT; t++) codes[t] = bricks[t].template codes<BITS>();
    LOOP for (int group = 0; group < groups; group++) {
        float part[COUNT][chains][COLUMNS][4] = {};
        LOOP for (int step = 0; step < steps; step++) LOOP for (int t = 0; t < COUNT; t++) {
            u32 a[4];
            codes[t].template unpack<odd>(group * steps + step, a);
            LOOP for (int c = 0; c < COLUMNS; c++) {
                const uint2 b = rows.step(c, group * steps + step);
                multiply_add(part[t][step % chains][c], a[0], a[1], a[2], a[3], b.x, b.y);
            }
        }
        LOOP for (int t = 0; t < COUNT; t++) {
            const u32* numbers = bricks[t].numbers + group;
            const u32 scales = numbers[0];
            const float scale[2] = {low_half(scales), high_half(scales) * (1.0f / odd)};
            float zero[2] = {even_zero, odd_zero};
            if (ZEROS == 2) {
                const u32 zeros = numbers[groups];  // -zero point
                zero[0] += low_half(zeros), zero[1] += high_half(zeros) * odd;
            }
            const u32 minima = MINIMA ? numbers[(TABLES - 1) * groups] : 0;  // -minimum
            LOOP for (int c = 0; c < COLUMNS; c++) {
                float sum[2] = {0, 0};
                LOOP for (int i = group * SUMS / groups; i < (group + 1) * SUMS / groups; i++)
                    sum[0] += rows.sums[c][i].x, sum[1] += rows.sums[c][i].y;
                LOOP for (int i = 0; i < 4; i++) {
                    const float both = chains == 2 ? part[t][0][c][i] + part[t][1][c][i] : part[t][0][c][i];
                    float& to = total[t][c][i];
                    to = fmaf(scale[i / 2], fmaf(zero[i / 2], sum[i % 2], both), to);
                    if (MINIMA) to = fmaf(i / 2 ? high_half(minima) : low_half(minima), sum[i % 2], to);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) multiply(const __grid_constant__ Job job) {
    extern __shared__ __align__(128) char memory[];
    int at = 0;
    if (!ACT) while (at + 1 < PARTS && blockIdx.x >= job.parts[at + 1].first) at++;
    const Part& part = job.parts[at];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = (blockIdx.x - part.first) * EACH;
    const int blocks = part.matrix.blocks, stride = INSIDE ? 2 : (job.rows + 1) & ~1;
    const int tiles = part.matrix.tiles - tile;
    float total[TILES][COLUMNS][4] = {};

    // Most codes are of one width; their bricks go through shared memory, several ahead. Of the others a warp has few.
    const char* own = memory + warp * (STAGES * STAGE_BYTES);
    const u32 ring = shared_address(own) + lane * 16;
    Stretch most[SIDES], rest;
    Any other[EACH];
    int side = 0, segment = -1;  // of the rest
    int block[SIDES];
    LOOP for (int s = 0; s < SIDES; s++) {
        const Matrix& m = job.parts[at + s].matrix;
        most[s].block = most[s].end = 0;
        for (int i = 0; i < m.count; i++) if (m.segments[i].bits == MAIN) most[s].enter(m.segments[i], tile, warp);
        block[s] = most[s].block;
    }
#define SEND(to)                                                                                                       \
    LOOP for (int s = 0; s < SIDES; s++) most[s].send(tiles, lane, (to) + s * EACH * BRICK(MAIN));                     \
    close_group();
    LOOP for (int stage = 0; stage < STAGES - 1; stage++) { SEND(ring + stage * STAGE_BYTES) }
    auto find = [&]() {  // the next bricks of other widths; false if there are none
        while (segment < 0 || rest.block >= rest.end) {
            if (++segment == job.parts[at + side].matrix.count) {
                if (++side == SIDES) return false;
                segment = 0;
            }
            const Segment& s = job.parts[at + side].matrix.segments[segment];
            if (s.bits == MAIN) rest.block = rest.end = 0;
            else rest.enter(s, tile, warp);
        }
        rest.read(tiles, lane, other);
        return true;
    };
    const uint4* words = part.entrance.words;
    const float* sums = part.entrance.sums;
    if (INSIDE) {
        Item items[ITEMS];
        LOOP for (int i = 0; i < ITEMS; i++) items[i].load(part, i * THREADS + threadIdx.x);
        uint4* here = (uint4*)(memory + WARPS * STAGES * STAGE_BYTES);
        u16* raw = (u16*)(here + blocks * 16);
        float* sums_here = (float*)(raw + job.inputs);
        float* squares = sums_here + blocks * SUMS * stride;
        begin();
        fetch(job, 0, raw, squares, WARPS);
        __syncthreads();
        const float measure = measured(job, squares);
        LOOP for (int i = 0; i < ITEMS; i++)
            items[i].put(job, part, i * THREADS + threadIdx.x, 0, raw, measure, here, sums_here, stride);
        __syncthreads();
        words = here, sums = sums_here;
    } else {
        begin();
    }

    const int rows = INSIDE ? 1 : job.rows;
    Rows now;
    bool more = WIDTHS != 1 << MAIN && find();
    int stage = 0, before = (STAGES - 1) * STAGE_BYTES;  // where bricks are, and where there is room for more
    while (block[0] < most[0].end || block[SIDES - 1] < most[SIDES - 1].end) {
        wait_groups<STAGES - 2>();
        __syncwarp();  // a lane reads what others copied, and overwrites what others have read
        SEND(ring + before)
        LOOP for (int s = 0; s < SIDES; s++) {
            if (block[s] < most[s].end) {
                Main bricks[EACH];
                LOOP for (int t = 0; t < EACH; t++)
                    bricks[t].template load<true>(own + stage + (s * EACH + t) * BRICK(MAIN), MAIN, lane);
                if (s == 0 || block[s] != block[0] || block[0] >= most[0].end)
                    now.load(words, sums, stride, rows, block[s], lane);
                consume<MAIN, EACH>(bricks, now, total + s * EACH);
            }
            block[s] += WARPS;
        }
        before = stage, stage = stage + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    }
    while (more) {
        now.load(words, sums, stride, rows, rest.block - WARPS, lane);
        LOOP for (int s = 0; s < SIDES; s++) {
            if (SIDES > 1 && s != side) continue;
#define WORK(B) if (B != MAIN) consume<B, EACH>(other, now, total + s * EACH);
            EACH_WIDTH(rest.bits, WORK)
#undef WORK
        }
        more = find();
    }
    wait_groups<0>();
    __syncthreads();
    float* found = (float*)memory;  // (warp, tile, output, row)
    LOOP for (int t = 0; t < TILES; t++) LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int i = 0; i < 4; i++) {
        const int row = c * 8 + lane % 4 * 2 + i % 2;
        if (row < job.rows) found[((warp * TILES + t) * 16 + lane / 4 + i / 2 * 8) * job.rows + row] = total[t][c][i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < EACH * 16 * job.rows; i += THREADS) {
        const int row = i % job.rows, output = tile * 16 + i / job.rows;
        if (output >= part.outputs) continue;
        float answer[SIDES];
        LOOP for (int s = 0; s < SIDES; s++) {
            const Part& side = job.parts[at + s];
            float sum = 0;
            LOOP for (int w = 0; w < WARPS; w++) sum += found[(w * TILES + s * EACH) * 16 * job.rows + i];
            sum *= side.matrix.factor;
            answer[s] = side.bias ? sum + as_float(side.bias[output]) : sum;
        }
        const long to = (long)row * part.stride + output;
        float y = ACT ? bent(answer[0]) * answer[SIDES - 1] : answer[0];
        if (job.residual) y += as_float(job.residual[to]);
        part.y[to] = as_half(y);
    }
}

// The matrix unpacked: (16 tiles, 128 blocks) halves, a row for each output; a warp for each brick.
// Numbers are rounded as the formats say: whole numbers times a half, rounded once.
extern "C" __global__ void __launch_bounds__(256) expand(const __grid_constant__ Matrix m, u16* out) {
    const int lane = threadIdx.x % 32;
    const long unit = (long)blockIdx.x * 8 + threadIdx.x / 32;
    const int tile = unit / m.blocks, block = unit % m.blocks;
    if (tile >= m.tiles) return;
    int at = 0;
    while (block >= m.segments[at].first + m.segments[at].blocks) at++;
    const Segment& s = m.segments[at];
    Any brick;
    brick.template load<false>(s.bricks + ((long)tile * s.blocks + block - s.first) * brick_bytes(s.bits), s.bits, lane);
    u16* row = out + ((long)tile * 16 + lane / 4) * m.blocks * 128 + block * 128 + lane % 4 * 4;
#define WORK(B)                                                                                           \
    const Codes<B> codes = brick.template codes<B>();                                                        \
    LOOP for (int step = 0; step < 8; step++) {                                                           \
        u32 a[4];                                                                                         \
        codes.template unpack<1>(step, a);                                                                \
        const u32* numbers = brick.numbers + step / STEPS_OF(B);                                          \
        const u32 scales = numbers[0], minima = MINIMA ? numbers[(TABLES - 1) * GROUPS_OF(B)] : 0;        \
        const u32 base = ZEROS == 0 ? (0xe400u + (1u << (B - 1))) * 0x10001u : 0xe400e400u;               \
        const u32 zeros = ZEROS == 2 ? add2(numbers[GROUPS_OF(B)], base) : base;                          \
        LOOP for (int j = 0; j < 4; j++) {                                                                \
            const u32 code = add2(a[j], j % 2 ? both_high(zeros) : both_low(zeros));                      \
            const u32 scale = j % 2 ? both_high(scales) : both_low(scales);                               \
            a[j] = MINIMA ? fma2(code, scale, j % 2 ? both_high(minima) : both_low(minima)) : mul2(code, scale); \
        }                                                                                                 \
        *(uint2*)(row + step * 16) = uint2{a[0], a[2]};                                                   \
        *(uint2*)(row + (long)8 * m.blocks * 128 + step * 16) = uint2{a[1], a[3]};                        \
    }
    EACH_WIDTH(s.bits, WORK)
#undef WORK
}

// Rows of x in the order of the stored inputs, (rows, width); a thread block for each.
extern "C" __global__ void __launch_bounds__(256) reorder(const u16* x, const u16* source, u16* out, int inputs, int width) {
    extern __shared__ __align__(128) char memory[];
    u16* raw = (u16*)memory;
    const uint4* from = (const uint4*)(x + (long)blockIdx.x * inputs);
    for (int i = threadIdx.x; i < inputs / 8; i += 256) ((uint4*)raw)[i] = from[i];
    __syncthreads();
    for (int i = threadIdx.x; i < width / 8; i += 256) {
        const uint4 places = ((const uint4*)source)[i];
        const u32 pairs[4] = {places.x, places.y, places.z, places.w};
        u32 words[4];
        LOOP for (int w = 0; w < 4; w++) {
            const u32 first = pairs[w] & 65535, second = pairs[w] >> 16;
            words[w] = (first < inputs ? raw[first] : 0) | (u32)(second < inputs ? raw[second] : 0) << 16;
        }
        ((uint4*)(out + (long)blockIdx.x * width))[i] = uint4{words[0], words[1], words[2], words[3]};
    }
}
