// Packed matrices in bricks, how their codes become numbers, and how activations are prepared for them.
//
// Weights lie in memory in bricks of 128 inputs by 16 outputs, codes as the lanes of the tensor cores want them and
// scales behind (tiles.py). What is multiplied, and by whom, is said by the sources that include this one.
//
// Set when compiling: BITS (of the codes of each matrix; a nibble for each of them, the first lowest), STEPS (sixteens of
// inputs with one scale: 1, 2, 4 or 8), FINE (the same in the bricks of codes that had another width), ZEROS (0: half of
// the codes' range, 1: none, 2: a table), MINIMA (there are tables of them), TILES (of 16 outputs that a warp works on),
// WARPS, STAGES (bricks on their way), COLUMNS (rows of activations / 8), PARTS (matrices side by side), NORM (x is first
// divided by its root mean square), ACT (0: matrices answer each for itself; else there are two and the answer is
// act(first) times second: 1 silu, 2 gelu's approximation, 3 gelu, 4 relu), FULL (answers are floats, not halves), MATRICES
// (how activations are prepared), HANDED (they were left so by the kernel before), HEIR (answers are left so for the next).

#include "ptx.h"
#include "prepacked.h"

#ifndef LDMATRIX_LAYOUT
#define LDMATRIX_LAYOUT 0
#endif
#ifndef IN_PREPACKED
#define IN_PREPACKED 0
#define OUT_PREPACKED 0
#endif

// A tile's bricks are first those with FINE groups, then the others.
struct MmaWeight {
    const char *fine, *main;  // (tile, brick)
    int fines, bricks, tiles; // bricks of a tile: the fine ones, and all
    float factor;             // of every sum
};

// How a row of x becomes what the lanes expect. `source` and `norm` lie in the order of the prepared numbers.
struct InputPerm {
    const u16* source;  // (brick, pair of steps, quarter, 8) which input stands there, behind the last for none; null: in order
    const float* norm;  // the same, its factor
    uint4* words;       // prepared by `prepare`: (brick, pair of steps, row, quarter) 8 halves, or with MATRICES
                        // (brick, step, half of it, row) 8 halves: eight rows are one matrix of the tensor cores
};

struct GemmOperand {
    MmaWeight matrix;
    InputPerm entrance;
    const u16* bias;  // (outputs) or null
    u16* y;           // (rows, stride); with FULL they are floats
    int outputs, stride;
    int first;        // of its thread blocks, or units of work
};

struct GemmParams {
    GemmOperand parts[NUM_WEIGHTS];
    const u16* x;         // (rows, inputs)
    const u16* residual;  // like y, added; or null
    float eps;
    int rows, inputs;
};

// What a product is handed, and what it leaves to the next.
struct ChainArgs {
    EpilogueTarget heir;
    const float* squares;  // (row, share) of x, if it is to be divided by its root mean square
    int shares;
    float lift;            // what x was multiplied by too little
};

#define NUM_TABLES (1 + (ZERO_POINTS == 2) + HAS_MINS)
#define BITS_OF(part) (BITS >> 4 * (part) & 15)
#define TILE_BYTES(bits, steps) (256 * (bits) + 32 * NUM_TABLES * (8 / (steps)))
#define GLU_WEIGHTS (ACTIVATION ? 2 : 1)    // matrices that a warp works on
#define WEIGHT_TILES (WARP_TILES / GLU_WEIGHTS)   // tiles of each
#define THREADS (WARPS * 32)
#define MIN_KSTEPS (FINE_KSTEPS < GROUP_KSTEPS ? FINE_KSTEPS : GROUP_KSTEPS)

__device__ constexpr int widest() {
    int most = 0;
    for (int part = 0; part < NUM_WEIGHTS; part++)
        if (BITS_OF(part) > most) most = BITS_OF(part);
    return most;
}
__device__ constexpr bool one_width() {
    for (int part = 1; part < NUM_WEIGHTS; part++)
        if (BITS_OF(part) != BITS_OF(0)) return false;
    return true;
}
#define TILE_SLOT TILE_BYTES(widest(), MIN_KSTEPS)  // bytes that a brick may have


DEVICE u32 both_low(u32 pair) { return prmt(pair, 0, 0x1010); }
DEVICE u32 both_high(u32 pair) { return prmt(pair, 0, 0x3232); }
DEVICE float low_half(u32 pair) { return cvt_f32_f16((u16)pair); }
DEVICE float high_half(u32 pair) { return cvt_f32_f16((u16)(pair >> 16)); }


DEVICE u32 moved(u32 word, int right) { return right >= 0 ? word >> right : word << -right; }

// What the codes of outputs 8 to 15 are multiplied by: they are taken out of their words where they lie.
template <int BITS_> struct OddRow {
    static const int odd = BITS_ == 8 ? 1 : BITS_ < 4 ? 4 : 16;
};

// A lane's codes of a brick: words of up to two planes.
template <int BITS_> struct TileCodes {
    static const int low_words = BITS_ < 4 ? 4 : 8, high_words = BITS_ == 8 ? 8 : BITS_ == 6 ? 4 : BITS_ % 2 ? 2 : 0;
    u32 low[low_words], high[high_words ? high_words : 1];

    // One step (0..7): 1024 + code in the four registers of an mma's first operand; 1024 + ODD times the code for
    // outputs 8 to 15. `1024 +` is the exponent of a half whose last bits are the code.
    template <int ODD> DEVICE void unpack(int step, u32 (&out)[4]) const {
        UNROLL for (int j = 0; j < 4; j++) {
            const int up = j % 2 ? ODD == 16 ? 4 : ODD == 4 ? 2 : 0 : 0;  // by which the code's bits stay away from the end
            const int pair = 2 * (step % 2 * 4 + j), one = step % 4 * 4 + j;  // where fields of 2 and of 1 bit begin
            u32 code = 0x64006400;
            if (BITS_ < 4) code = lop3_and_or(moved(low[step / 2], pair - up), 0x00030003 << up, code);
            if (BITS_ == 3) code = lop3_and_or(moved(high[step / 4], one - 2 - up), 0x00040004 << up, code);
            if (BITS_ >= 4) code = lop3_and_or(moved(low[step], 4 * j - up), 0x000f000f << up, code);
            if (BITS_ == 5) code = lop3_and_or(moved(high[step / 4], one - 4 - up), 0x00100010 << up, code);
            if (BITS_ == 6) code = lop3_and_or(moved(high[step / 2], pair - 4 - up), 0x00300030 << up, code);
            if (BITS_ == 8) code = lop3_and_or(moved(high[step], 4 * j - 4 - up), 0x00f000f0 << up, code);
            out[j] = code;
        }
    }
};

// A lane's part of a brick: its codes, and the numbers that two outputs' groups have.
template <int BITS_, int GROUP_KSTEPS_> struct TileFragment {
    static const int fours = BITS_ / 2, groups = 8 / GROUP_KSTEPS_;
    uint4 four[fours];
    uint2 two;
    u32 numbers[NUM_TABLES * groups];

    // From a brick in shared memory (NEAR), or where it lies.
    template <bool NEAR> DEVICE void load(const char* from, int lane) {
        UNROLL for (int i = 0; i < fours; i++) {
            const char* piece = from + i * 512 + lane * 16;
            four[i] = NEAR ? *(const uint4*)piece : ld_nc_v4(piece);
        }
        if (BITS_ % 2) {
            const char* piece = from + fours * 512 + lane * 8;
            two = NEAR ? *(const uint2*)piece : ld_nc_v2(piece);
        }
        UNROLL for (int i = 0; i < NUM_TABLES * groups; i++) {
            const char* piece = from + 256 * BITS_ + i * 32 + lane / 4 * 4;
            numbers[i] = NEAR ? *(const u32*)piece : ld_nc_u32(piece);
        }
    }

    DEVICE TileCodes<BITS_> codes() const {
        constexpr int low = TileCodes<BITS_>::low_words / 4;
        TileCodes<BITS_> out;
        UNROLL for (int i = 0; i < low; i++) spread(four[i], out.low + 4 * i);
        UNROLL for (int i = low; i < fours; i++) spread(four[i], out.high + 4 * (i - low));
        if (BITS_ % 2) out.high[0] = two.x, out.high[1] = two.y;
        return out;
    }
    DEVICE static void spread(uint4 piece, u32* to) {
        to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
    }
};

// A row of x into shared memory, a zero behind it, and the sum of squares of each 256 numbers of it.
#define BEHIND 8  // room for the zero, in halves
DEVICE void load_row(const GemmParams& job, int row, u16* raw, float* squares, int warps) {
    const int lane = threadIdx.x % 32;
    const uint4* x = (const uint4*)(job.x + (long)row * job.inputs);
    if (threadIdx.x == 0) raw[job.inputs] = 0;
    const int many = RMS_NORM ? 2 : 3;  // chunks of a warp on their way at once
    for (int first = threadIdx.x / 32; first * 256 < job.inputs; first += many * warps) {
        uint4 piece[many];
        UNROLL for (int n = 0; n < many; n++) {
            const int at = (first + n * warps) * 32 + lane;
            piece[n] = at * 8 < job.inputs ? x[at] : uint4{0, 0, 0, 0};
        }
        UNROLL for (int n = 0; n < many; n++) {
            const int chunk = first + n * warps, at = chunk * 32 + lane;
            if (at * 8 < job.inputs) ((uint4*)raw)[at] = piece[n];
            if (!RMS_NORM || chunk * 256 >= job.inputs) continue;
            const u32 words[4] = {piece[n].x, piece[n].y, piece[n].z, piece[n].w};
            float sum = 0;
            UNROLL for (int w = 0; w < 4; w++)
                sum = fmaf(low_half(words[w]), low_half(words[w]), fmaf(high_half(words[w]), high_half(words[w]), sum));
            UNROLL for (int other = 16; other; other /= 2) sum += shfl_xor(sum, other);
            if (lane == 0) squares[chunk] = sum;
        }
    }
}

// What a row is multiplied by, so that its root mean square is one. All lanes of a warp together.
DEVICE float rms_scale(const GemmParams& job, const float* squares) {
    if (!RMS_NORM) return 1.0f;
    const int chunks = (job.inputs + 255) / 256;
    float sum = 0;
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32) sum += squares[chunk];
    UNROLL for (int other = 16; other; other /= 2) sum += shfl_xor(sum, other);
    return rsqrtf(sum / job.inputs + job.eps);
}

// What a thread block keeps at hand for its answers: where they go, and what rows are multiplied by.
template <int OUTPUTS, int ROOM> struct EpilogueSmem {
    uint4 places[OUTPUTS];
    float norm[OUTPUTS], measures[ROOM];

    // On its way: of some outputs from `first` on.
    DEVICE void send(const EpilogueTarget& heir, int first, int count) {
        for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) {
            if (first + i < count) cp_async<16>(cvta_to_shared(places + i), (const char*)(heir.places + first + i));
            if (heir.norm && i < OUTPUTS / 4 && first + 4 * i < count)
                cp_async<16>(cvta_to_shared(norm + 4 * i), (const char*)(heir.norm + first + 4 * i));
        }
    }
    DEVICE u16 normed(const EpilogueTarget& heir, int output, float number) const {
        return cvt_f16_f32(heir.norm ? number * norm[output] : number);
    }
};

// What rows are multiplied by, found from their squares, LANES of a warp for each row. The first of those are asked for
// early: before much else is on its way.
template <int LANES> struct RmsPartials {
    static const int many = LANES < 4 ? 32 / LANES : 8;  // at a time
    float more[many];

    DEVICE void ask(const GemmParams& job, const ChainArgs& link, int row, int first) {
        UNROLL for (int n = 0; n < many; n++) {
            const int at = first + threadIdx.x % LANES + n * LANES;
            more[n] = row < job.rows && at < link.shares ? link.squares[row * link.shares + at] : 0.0f;
        }
    }
    DEVICE void ask(const GemmParams& job, const ChainArgs& link) { ask(job, link, threadIdx.x / LANES, 0); }
    DEVICE void find(const GemmParams& job, const ChainArgs& link, float* measures) {
        for (int first = 0; first < job.rows; first += THREADS / LANES) {
            const int row = first + threadIdx.x / LANES;
            if (first) ask(job, link, row, 0);
            float sum = 0;
            for (int at = 0; at < link.shares; at += many * LANES) {
                if (at) ask(job, link, row, at);
                UNROLL for (int n = 0; n < many; n++) sum += more[n];
            }
            UNROLL for (int other = LANES / 2; other; other /= 2) sum += shfl_xor(sum, other);
            if (threadIdx.x % LANES == 0 && row < job.rows)
                measures[row] = rsqrtf(sum / job.inputs + job.eps) * link.lift;
        }
    }
};

// Four stored inputs of each of two steps: which they are, and their factors. Known before x is.
struct ActPacker {
    uint4 source;
    float4 norm[2];

    DEVICE void load(const GemmParams& job, const GemmOperand& part, int unit) {
        if (unit >= part.matrix.bricks * 16) return;
        if (part.entrance.source) {
            source = ((const uint4*)part.entrance.source)[unit];
        } else {
            const int first = unit / 4 * 32 + unit % 4 * 4;
            source = {order(job, first), order(job, first + 2), order(job, first + 16), order(job, first + 18)};
        }
        UNROLL for (int i = 0; i < 2; i++) if (RMS_NORM) norm[i] = ((const float4*)part.entrance.norm)[unit * 2 + i];
    }
    DEVICE static u32 order(const GemmParams& job, int input) {
        return min(input, job.inputs) | (u32)min(input + 1, job.inputs) << 16;
    }

    // All numbers are fetched before the first is needed: no branches.
    DEVICE void put(const GemmParams& job, const GemmOperand& part, int unit, int row, const u16* raw, float measure, uint4* words) const {
        if (unit >= part.matrix.bricks * 16) return;
        const u32 pairs[4] = {source.x, source.y, source.z, source.w};
        const float factors[8] = {norm[0].x, norm[0].y, norm[0].z, norm[0].w, norm[1].x, norm[1].y, norm[1].z, norm[1].w};
        u32 numbers[8], out[4];
        UNROLL for (int i = 0; i < 8; i++) numbers[i] = raw[pairs[i / 2] >> i % 2 * 16 & 65535];
        UNROLL for (int i = 0; i < 8; i++) if (RMS_NORM) numbers[i] = cvt_f16_f32(cvt_f32_f16((u16)numbers[i]) * measure * factors[i]);
        UNROLL for (int w = 0; w < 4; w++) out[w] = numbers[2 * w] | numbers[2 * w + 1] << 16;
        if (!LDMATRIX_LAYOUT) words[(unit / 4 * job.rows + row) * 4 + unit % 4] = uint4{out[0], out[1], out[2], out[3]};
        else UNROLL for (int w = 0; w < 4; w++) ((u32*)words)[((unit / 4 * 4 + w) * job.rows + row) * 4 + unit % 4] = out[w];
    }
};

DEVICE float activate(float x) {
    if (ACTIVATION == 1) return __fdividef(x, 1.0f + __expf(-x));
    if (ACTIVATION == 2) return __fdividef(x, 1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    if (ACTIVATION == 3) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    return fmaxf(x, 0.0f);
}

// Rows of activations for a kernel that does not prepare them itself; a thread block for each row and sixteen bricks'
// inputs of each part. `job.rows` says for how many there is room.
extern "C" __global__ void __launch_bounds__(256) pack_activations(const __grid_constant__ GemmParams job) {
    extern __shared__ __align__(128) char memory[];
    const GemmOperand& part = job.parts[blockIdx.z];
    const int row = blockIdx.x, unit = blockIdx.y * 256 + threadIdx.x;
    u16* raw = (u16*)memory;
    float* squares = (float*)(raw + job.inputs + BEHIND);
    ActPacker item;
    item.load(job, part, unit);
    if (!LDMATRIX_LAYOUT) griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (LDMATRIX_LAYOUT) griddepcontrol_launch_dependents();  // not before: thread blocks of 17 to 64 rows would crowd where others have left room
    load_row(job, row, raw, squares, 8);
    __syncthreads();
    const float measure = rms_scale(job, squares);
    item.put(job, part, unit, row, raw, measure, part.entrance.words);
}
