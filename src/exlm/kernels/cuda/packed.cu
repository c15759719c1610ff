// Packed matrices times a few rows of activations, and packed matrices unpacked.
//
// The tensor cores do the sums: 16 outputs by 16 inputs of weights are the first operand of one mma, eight rows of
// activations the second. Weights lie in memory in bricks of 128 inputs by 16 outputs, codes as the lanes of the mma
// want them and scales behind (tiles.py). A warp copies bricks into shared memory, several ahead, and begins before
// the kernel that computes the activations has ended. The warps of a thread block share the inputs, and their sums are
// added in the order of the warps: a row's answer depends on nothing but the row.
//
// Activations come from `prepare`, which puts them in the order of the stored inputs and where lanes expect them, and
// adds up each group of them: the tensor cores multiply by 1024 + code, which costs nothing to make of a code, and the
// surplus is taken off again with these sums.
//
// Set when compiling: WIDTHS (bit b: there are codes of b bits), ZEROS (0: half of the codes' range, 1: none, 2: a
// table), MINIMA (there are tables of them), STEPS (sixteens of inputs with one scale: 1, 2, 4 or 8), COLUMNS (rows of
// activations / 8), TILES (of 16 outputs that a warp works on), WARPS, STAGES (bricks on their way), PARTS (matrices
// side by side), ENTRY (what is done to x: 0 nothing, 1 root mean square norm, 2 silu of its first half times the
// second).

typedef unsigned int u32;
typedef unsigned short u16;

struct Segment {
    const char* bricks;  // (tile, block) of BRICK bytes each
    int first, blocks;   // blocks of 128 inputs
    int bits;
};

struct Matrix {
    Segment segments[6];
    int count, blocks, tiles;
    float factor;  // of every sum
};

struct Part {
    Matrix matrix;
    const u16* x;      // prepared, see `prepare`
    const float* sums;
    const u16* bias;   // (outputs) or null
    u16* y;            // (rows, stride)
    int outputs, stride;
    int first;         // of its thread blocks
};

struct Job {
    Part parts[PARTS];
    const u16* residual;  // like y, added; or null
    int rows;
};

struct Entrance {
    const u16* x;       // (rows, width) halves
    const float* norm;  // (inputs) factors
    const int* source;  // (128 blocks) which input stands where, -1 for none; null: in order
    u16* out;           // (block, column, step / 2, row of the column, quarter) 8 halves: of two steps, four inputs each
    float* sums;        // (block, group, 8 columns)
    float eps;
    int rows, width, inputs, blocks;
};

#define LOOP _Pragma("unroll")
#define GROUPS (8 / STEPS)
#define TABLES (1 + (ZEROS == 2) + MINIMA)
#define BRICK(bits) (256 * (bits) + 32 * GROUPS * TABLES)
#define WIDEST ((WIDTHS & 256) ? 8 : (WIDTHS & 64) ? 6 : (WIDTHS & 32) ? 5 : (WIDTHS & 16) ? 4 : (WIDTHS & 8) ? 3 : 2)
#define STAGE_BYTES (TILES * BRICK(WIDEST))

__device__ __forceinline__ u32 pick(u32 word, u32 mask, u32 rest) {  // (word & mask) | rest
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(rest));
    return out;
}
__device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 out; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); return out;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 out; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); return out;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 out; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c)); return out;
}
__device__ __forceinline__ u32 both_low(u32 pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ __forceinline__ u32 both_high(u32 pair) { return __byte_perm(pair, 0, 0x3232); }
__device__ __forceinline__ float as_float(u16 half) {
    float out; asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half)); return out;
}
__device__ __forceinline__ u16 as_half(float number) {
    u16 out; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(number)); return out;
}
__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }


__device__ __forceinline__ void copy16(u32 to, const char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 moved(u32 word, int right) { return right >= 0 ? word >> right : word << -right; }

// What the codes of outputs 8 to 15 are multiplied by: they are taken out of their words where they lie.
template <int BITS> struct Width {
    static const int odd = BITS == 8 ? 1 : BITS < 4 ? 4 : 16;
};

// A lane's codes of a brick: words of up to two planes.
template <int BITS> struct Codes {
    static const int low_words = BITS < 4 ? 4 : 8, high_words = BITS == 8 ? 8 : BITS == 6 ? 4 : BITS % 2 ? 2 : 0;
    u32 low[low_words], high[high_words ? high_words : 1];

    // One step (0..7): 1024 + code in the four registers of an mma's first operand; 1024 + ODD times the code for
    // outputs 8 to 15. `1024 +` is the exponent of a half whose last bits are the code.
    template <int ODD> __device__ __forceinline__ void unpack(int step, u32 (&out)[4]) const {
        LOOP for (int j = 0; j < 4; j++) {
            const int up = j % 2 ? ODD == 16 ? 4 : ODD == 4 ? 2 : 0 : 0;  // by which the code's bits stay away from the end
            const int pair = 2 * (step % 2 * 4 + j), one = step % 4 * 4 + j;  // where fields of 2 and of 1 bit begin
            u32 code = 0x64006400;
            if (BITS < 4) code = pick(moved(low[step / 2], pair - up), 0x00030003 << up, code);
            if (BITS == 3) code = pick(moved(high[step / 4], one - 2 - up), 0x00040004 << up, code);
            if (BITS >= 4) code = pick(moved(low[step], 4 * j - up), 0x000f000f << up, code);
            if (BITS == 5) code = pick(moved(high[step / 4], one - 4 - up), 0x00100010 << up, code);
            if (BITS == 6) code = pick(moved(high[step / 2], pair - 4 - up), 0x00300030 << up, code);
            if (BITS == 8) code = pick(moved(high[step], 4 * j - 4 - up), 0x00f000f0 << up, code);
            out[j] = code;
        }
    }

    // From a brick, wherever it is; a plane lies in pieces of 16 bytes (or all it has) for each lane.
    template <class Read> __device__ __forceinline__ void load(int lane, Read read) {
        plane<low_words>(low, 0, lane, read);
        if (high_words) plane<high_words>(high, 128 * low_words, lane, read);
    }
    template <int WORDS, int ROOM, class Read>
    __device__ __forceinline__ void plane(u32 (&words)[ROOM], int at, int lane, Read read) {
        LOOP for (int i = 0; i < WORDS; i += 4) {
            if (WORDS >= 4) {
                const uint4 piece = read.four(at + i * 128 + lane * 16);
                words[i] = piece.x, words[i + 1] = piece.y, words[i + 2] = piece.z, words[i + 3] = piece.w;
            } else {
                const uint2 piece = read.two(at + lane * 8);
                words[0] = piece.x, words[1] = piece.y;
            }
        }
    }
};

struct Shared {
    u32 base;
    __device__ __forceinline__ uint4 four(int at) const {
        uint4 out;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "r"(base + at));
        return out;
    }
    __device__ __forceinline__ uint2 two(int at) const {
        uint2 out;
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(out.x), "=r"(out.y) : "r"(base + at));
        return out;
    }
    __device__ __forceinline__ u32 one(int at) const {
        u32 out; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(base + at)); return out;
    }
};

struct Global {
    const char* base;
    __device__ __forceinline__ uint4 four(int at) const { return *(const uint4*)(base + at); }
    __device__ __forceinline__ uint2 two(int at) const { return *(const uint2*)(base + at); }
    __device__ __forceinline__ u32 one(int at) const { return *(const u32*)(base + at); }
};

#define EACH_WIDTH(bits, work) \
    if ((WIDTHS & 4) && (WIDTHS == 4 || bits == 2)) { work(2) } \
    if ((WIDTHS & 8) && (WIDTHS == 8 || bits == 3)) { work(3) } \
    if ((WIDTHS & 16) && (WIDTHS == 16 || bits == 4)) { work(4) } \
    if ((WIDTHS & 32) && (WIDTHS == 32 || bits == 5)) { work(5) } \
    if ((WIDTHS & 64) && (WIDTHS == 64 || bits == 6)) { work(6) } \
    if ((WIDTHS & 256) && (WIDTHS == 256 || bits == 8)) { work(8) }

// Copies a warp's bricks: of every tile the blocks number `warp`, `warp` + WARPS, …
struct Sender {
    int segment, left;     // blocks left in the segment
    const char* from;      // this lane's 16 bytes of the next brick of the first tile
    long tile_bytes;       // how far the next tile is
    int step;              // how far the next brick is

    __device__ __forceinline__ void enter(const Matrix& m, int tile, int lane, int block) {
        while (segment < m.count && block >= m.segments[segment].blocks) block -= m.segments[segment++].blocks;
        left = segment < m.count ? m.segments[segment].blocks - block : 0;
        if (left <= 0) return;
        const Segment& s = m.segments[segment];
        const int brick = BRICK(s.bits);
        tile_bytes = (long)s.blocks * brick, step = WARPS * brick;
        from = s.bricks + tile * tile_bytes + (long)block * brick + lane * 16;
    }

    __device__ __forceinline__ void next(const Matrix& m, int tile, int lane, u32 to) {
        if (left > 0) {
            LOOP for (int t = 0; t < TILES; t++) {
                if (t == 0 || tile + t < m.tiles) {
                    const char* brick = from + t * tile_bytes;
#define WORK(B)                                                                                         \
    LOOP for (int i = 0; i < BRICK(B); i += 512)                                                        \
        if (BRICK(B) - i >= 512 || lane * 16 < BRICK(B) - i)                                            \
            copy16(to + t * BRICK(WIDEST) + i + lane * 16, brick + i);
                    EACH_WIDTH(m.segments[segment].bits, WORK)
#undef WORK
                }
            }
            from += step, left -= WARPS;
            if (left <= 0 && segment + 1 < m.count) {
                segment++;
                enter(m, tile, lane, -left);
            }
        }
        asm volatile("cp.async.commit_group;");
    }
};

// A lane's part of 128 inputs of some rows: two registers for each step, and the sums of two rows' groups.
struct Rows {
    uint4 words[COLUMNS][4];
    float2 sums[COLUMNS][GROUPS];

    __device__ __forceinline__ void load(const Part& part, int rows, int block, int lane) {
        const uint4* from = (const uint4*)part.x + (long)block * COLUMNS * 128 + lane;
        const float* sum = part.sums + (long)block * GROUPS * 8 * COLUMNS + lane % 4 * 2;
        LOOP for (int c = 0; c < COLUMNS; c++) {
            const bool used = c * 8 + lane / 4 < rows;
            LOOP for (int p = 0; p < 4; p++) words[c][p] = used ? from[(c * 4 + p) * 32] : uint4{0, 0, 0, 0};
            LOOP for (int g = 0; g < GROUPS; g++) sums[c][g] = *(const float2*)(sum + (g * COLUMNS + c) * 8);
        }
    }
    __device__ __forceinline__ uint2 step(int c, int number) const {
        const uint4 pair = words[c][number / 2];
        return number % 2 ? uint2{pair.z, pair.w} : uint2{pair.x, pair.y};
    }
};

__device__ __forceinline__ float low_half(u32 pair) { return as_float((u16)pair); }
__device__ __forceinline__ float high_half(u32 pair) { return as_float((u16)(pair >> 16)); }

// Add a brick times rows to the sums.
template <int BITS>
__device__ __forceinline__ void consume(int lane, Shared brick, const Rows& rows, float (&total)[COLUMNS][4]) {
    const int odd = Width<BITS>::odd, tables = 256 * BITS + lane / 4 * 4;
    const float even_zero = ZEROS == 0 ? -1024.0f - (1 << (BITS - 1)) : -1024.0f;
    const float odd_zero = ZEROS == 0 ? -1024.0f - odd * (1 << (BITS - 1)) : -1024.0f;
    Codes<BITS> codes;
    codes.load(lane, brick);
    LOOP for (int group = 0; group < GROUPS; group++) {
        float part[COLUMNS][4] = {};
        LOOP for (int step = group * STEPS; step < (group + 1) * STEPS; step++) {
            u32 a[4];
            codes.template unpack<odd>(step, a);
            LOOP for (int c = 0; c < COLUMNS; c++) {
                const uint2 b = rows.step(c, step);
                multiply_add(part[c], a, b.x, b.y);
            }
        }
        const u32 scales = brick.one(tables + group * 32);
        const float scale[2] = {low_half(scales), high_half(scales) * (1.0f / odd)};
        float zero[2] = {even_zero, odd_zero};
        if (ZEROS == 2) {
            const u32 zeros = brick.one(tables + (GROUPS + group) * 32);  // -zero point
            zero[0] += low_half(zeros), zero[1] += high_half(zeros) * odd;
        }
        LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int i = 0; i < 4; i++) {
            const float sum = i % 2 ? rows.sums[c][group].y : rows.sums[c][group].x;
            total[c][i] = fmaf(scale[i / 2], fmaf(zero[i / 2], sum, part[c][i]), total[c][i]);
        }
        if (MINIMA) {
            const u32 minima = brick.one(tables + ((TABLES - 1) * GROUPS + group) * 32);  // -minimum
            LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int i = 0; i < 4; i++) {
                const float sum = i % 2 ? rows.sums[c][group].y : rows.sums[c][group].x;
                total[c][i] = fmaf(i / 2 ? high_half(minima) : low_half(minima), sum, total[c][i]);
            }
        }
    }
}

__device__ __forceinline__ void begin() {  // let the next kernel start, then wait for the one before
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) multiply(const __grid_constant__ Job job) {
    extern __shared__ __align__(128) char memory[];
    int at = 0;
    while (at + 1 < PARTS && blockIdx.x >= job.parts[at + 1].first) at++;
    const Part& part = job.parts[at];
    const Matrix& m = part.matrix;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = (blockIdx.x - part.first) * TILES;
    const u32 ring = shared_address(memory) + warp * (STAGES * STAGE_BYTES);
    float total[TILES][COLUMNS][4] = {};

    Sender sender;
    sender.segment = 0;
    sender.enter(m, tile, lane, warp);
    LOOP for (int stage = 0; stage < STAGES - 1; stage++) sender.next(m, tile, lane, ring + stage * STAGE_BYTES);
    begin();
    Rows now, later;
    if (warp < m.blocks) now.load(part, job.rows, warp, lane);
    int reader = 0, stage = 0;
    for (int block = warp; block < m.blocks; block += WARPS) {
        if (block + WARPS < m.blocks) later.load(part, job.rows, block + WARPS, lane);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp();  // a lane reads what others copied, and overwrites what others have read
        sender.next(m, tile, lane, ring + (stage ? stage - 1 : STAGES - 1) * STAGE_BYTES);
        while (block >= m.segments[reader].first + m.segments[reader].blocks) reader++;
        LOOP for (int t = 0; t < TILES; t++) {
#define WORK(B) consume<B>(lane, Shared{ring + stage * STAGE_BYTES + t * BRICK(WIDEST)}, now, total[t]);
            EACH_WIDTH(m.segments[reader].bits, WORK)
#undef WORK
        }
        now = later;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float* sums = (float*)memory;
    LOOP for (int t = 0; t < TILES; t++) LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int i = 0; i < 4; i++)
        sums[((warp * TILES + t) * COLUMNS + c) * 128 + i * 32 + lane] = total[t][c][i];
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * COLUMNS * 128; i += WARPS * 32) {
        const int quarter = i / 32 % 4, column = i / 128 % COLUMNS, t = i / (128 * COLUMNS);
        const int row = column * 8 + i % 4 * 2 + quarter % 2;
        const int output = (tile + t) * 16 + i % 32 / 4 + quarter / 2 * 8;
        if (row >= job.rows || output >= part.outputs) continue;
        float sum = 0;
        LOOP for (int w = 0; w < WARPS; w++) sum += sums[w * (TILES * COLUMNS * 128) + i];
        sum *= m.factor;
        if (part.bias) sum += as_float(part.bias[output]);
        if (job.residual) sum += as_float(job.residual[(long)row * part.stride + output]);
        part.y[(long)row * part.stride + output] = as_half(sum);
    }
}

#define PREPARERS 256  // threads: sixteen for each block of inputs

// One number of x as the matrix wants it.
__device__ __forceinline__ u32 entered(const Entrance& e, const u16* x, float measure, int place) {
    const int input = e.source ? e.source[place] : place < e.inputs ? place : -1;
    if (input < 0) return 0;
    if (ENTRY == 1) return as_half(as_float(x[input]) * measure * e.norm[input]);
    if (ENTRY == 2) {
        const float gate = as_float(x[input]);
        return as_half(gate / (1.0f + __expf(-gate)) * as_float(x[input + e.inputs]));
    }
    return x[input];
}

// Rows of activations for `multiply`; a thread block for each row and each sixteen blocks of inputs.
extern "C" __global__ void __launch_bounds__(PREPARERS) prepare(const __grid_constant__ Entrance e) {
    __shared__ float steps[PREPARERS / 2];  // the sum of each sixteen inputs
    const int row = blockIdx.x, lane = threadIdx.x % 32;
    const u16* x = e.x + (long)row * e.width;
    begin();
    float measure = 1.0f;
    if (ENTRY == 1) {
        __shared__ float parts[PREPARERS / 32];
        float sum = 0;
        for (int i = threadIdx.x * 2; i < e.inputs; i += PREPARERS * 2) {
            const u32 pair = *(const u32*)(x + i);
            sum += low_half(pair) * low_half(pair) + high_half(pair) * high_half(pair);
        }
        LOOP for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (lane == 0) parts[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0;
        LOOP for (int i = 0; i < PREPARERS / 32; i++) sum += parts[i];
        measure = rsqrtf(sum / e.inputs + e.eps);
    }
    const int first = blockIdx.y * (PREPARERS / 16);
    const int block = first + threadIdx.x / 16, pair = threadIdx.x / 4 % 4, quarter = threadIdx.x % 4;
    if (block < e.blocks) {
        u32 words[4];
        float sum[2] = {0, 0};
        LOOP for (int w = 0; w < 4; w++) {
            const int place = block * 128 + (pair * 2 + w / 2) * 16 + quarter * 4 + w % 2 * 2;
            words[w] = entered(e, x, measure, place) | entered(e, x, measure, place + 1) << 16;
            sum[w / 2] += low_half(words[w]) + high_half(words[w]);
        }
        const u32 quad = 0xfu << (lane & ~3);
        LOOP for (int half = 0; half < 2; half++) {
            LOOP for (int other = 2; other; other /= 2) sum[half] += __shfl_xor_sync(quad, sum[half], other);
            if (quarter == 0) steps[(block - first) * 8 + pair * 2 + half] = sum[half];
        }
        const long at = ((((long)block * COLUMNS + row / 8) * 4 + pair) * 8 + row % 8) * 4 + quarter;
        ((uint4*)e.out)[at] = uint4{words[0], words[1], words[2], words[3]};
    }
    __syncthreads();
    const int group = first * GROUPS + threadIdx.x;
    if (threadIdx.x < PREPARERS / 16 * GROUPS && group < e.blocks * GROUPS) {
        float sum = 0;
        LOOP for (int s = 0; s < STEPS; s++) sum += steps[threadIdx.x * STEPS + s];
        e.sums[(long)group * 8 * COLUMNS + row] = sum;
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
    const Global brick = {s.bricks + ((long)tile * s.blocks + block - s.first) * BRICK(s.bits)};
    u16* row = out + ((long)tile * 16 + lane / 4) * m.blocks * 128 + block * 128 + lane % 4 * 4;
#define WORK(B)                                                                                           \
    Codes<B> codes;                                                                                       \
    codes.load(lane, brick);                                                                              \
    LOOP for (int step = 0; step < 8; step++) {                                                           \
        u32 a[4];                                                                                         \
        codes.template unpack<1>(step, a);                                                                \
        const int table = 256 * B + step / STEPS * 32 + lane / 4 * 4;                                     \
        const u32 scales = brick.one(table), minima = MINIMA ? brick.one(table + (TABLES - 1) * GROUPS * 32) : 0; \
        const u32 base = ZEROS == 0 ? (0xe400u + (1u << (B - 1))) * 0x10001u : 0xe400e400u;                   \
        const u32 zeros = ZEROS == 2 ? add2(brick.one(table + GROUPS * 32), base) : base;                 \
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
