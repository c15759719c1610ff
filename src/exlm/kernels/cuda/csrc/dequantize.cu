// Packed matrices in full: (inputs, outputs) halves, inputs in the model's own order.
//
// A thread block takes a few neighbouring tiles of one block of inputs, a warp for each tile. A lane's numbers belong to
// few outputs and many inputs, and what lies side by side in the answer are outputs: so numbers are turned on their way
// into shared memory, and from there a row of a block's outputs leaves at a time. Sixteens of bytes have an order of
// each row's own there, so that neither those who write nor those who read meet in a bank.
//
// Set when compiling, besides what bricks.h wants: ABREAST (tiles of a thread block: 4, 8 or 16).

#include "weight_tile.h"

#define ROW (BLOCK_TILES * 32)        // bytes of one input in shared memory
#define ROW_CHUNKS (BLOCK_TILES * 2)      // sixteens of bytes in it
#define BLOCK_THREADS (BLOCK_TILES * 32)  // threads


// Blocks of inputs, by the number of their digits: bricks that stand side by side.
struct DigitSpans {
    int digits[6], blocks[6];
};

struct DequantTarget {
    u16* numbers;       // (inputs, stride)
    const u16* source;  // (128 blocks) which input stands there, behind the last for none; null: in order
    int inputs, stride;
};

DEVICE u32 times(u32 pair, float factor) {
    return cvt_f16_f32(low_half(pair) * factor) | (u32)cvt_f16_f32(high_half(pair) * factor) << 16;
}

// Where a row's sixteen of bytes lies: in other banks for each of the eight rows that are stored at once.
DEVICE int place(int row, int piece) { return row * ROW + (piece ^ (row >> 1 & 6 | row & 1)) * 16; }

// A brick, and those of its further digits, into shared memory. Numbers are rounded as the formats say: whole numbers
// times a half, rounded once; then the matrix's own factor.
template <int GROUP_KSTEPS_>
DEVICE void dequantize_tile(const char* from, int digits, float factor, int lane, u32 to) {
    u32 number[8][4];  // two outputs' pairs
    TileFragment<BITS_OF(0), GROUP_KSTEPS_> brick;
    for (int digit = digits - 1; digit >= 0; digit--) {
        brick.template load<false>(from + digit * TILE_BYTES(BITS_OF(0), GROUP_KSTEPS_), lane);
        const TileCodes<BITS_OF(0)> codes = brick.codes();
        const bool last = digit == digits - 1;
        UNROLL for (int step = 0; step < 8; step++) {
            const u32 base = ZERO_POINTS == 0 ? (0xe400u + (1u << (BITS_OF(0) - 1))) * 0x10001u : 0xe400e400u;
            const u32 zeros = ZERO_POINTS == 2 ? add_f16x2(brick.numbers[brick.groups + step / GROUP_KSTEPS_], base) : base;
            u32 a[4];
            codes.template unpack<1>(step, a);
            UNROLL for (int j = 0; j < 4; j++) {
                const u32 code = add_f16x2(a[j], j % 2 ? both_high(zeros) : both_low(zeros));
                number[step][j] = last ? code : fma_f16x2(number[step][j], (15 + BITS_OF(0)) * 0x04000400u, code);
            }
        }
    }
    UNROLL for (int step = 0; step < 8; step++) {  // the lowest digit's scales are those of the number
        const u32* numbers = brick.numbers + step / GROUP_KSTEPS_;
        const u32 scales = numbers[0], minima = HAS_MINS ? numbers[(NUM_TABLES - 1) * brick.groups] : 0;
        u32(&a)[4] = number[step];
        UNROLL for (int j = 0; j < 4; j++) {
            const u32 scale = j % 2 ? both_high(scales) : both_low(scales);
            a[j] = HAS_MINS ? fma_f16x2(a[j], scale, j % 2 ? both_high(minima) : both_low(minima)) : mul_f16x2(a[j], scale);
            if (factor != 1.0f) a[j] = times(a[j], factor);
        }
        stmatrix_x4_trans(to + step * 16 * ROW, a);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 32 / BLOCK_TILES) dequantize(
    const __grid_constant__ MmaWeight m, const __grid_constant__ DigitSpans shares, const __grid_constant__ DequantTarget target
) {
    extern __shared__ __align__(128) char memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.y;
    const int first = blockIdx.x * BLOCK_TILES, tile = first + warp;
    int* inputs = (int*)(memory + 128 * ROW);
    griddepcontrol_launch_dependents();
    if (threadIdx.x < 128) {
        const int stored = block * 128 + threadIdx.x;
        inputs[threadIdx.x] = target.source ? target.source[stored] : stored;
    }
    int share = 0, left = block, brick = 0;
    while (left >= shares.blocks[share]) {
        left -= shares.blocks[share], brick += shares.blocks[share] * shares.digits[share];
        share++;
    }
    const int digits = shares.digits[share];
    brick += left * digits;
    if (tile < m.tiles) {
        const int matrix = lane / 8, column = lane % 8;  // inputs 4q + 2 half + {0, 1} are the columns of (half, eight)
        const u32 to = cvta_to_shared(memory) + place(column / 2 * 4 + matrix / 2 * 2 + column % 2, warp * 2 + matrix % 2);
        const char* fine = m.fine + ((long)tile * m.fines + brick) * TILE_BYTES(BITS_OF(0), FINE_KSTEPS);
        const char* main = m.main + ((long)tile * (m.bricks - m.fines) + brick - m.fines) * TILE_BYTES(BITS_OF(0), GROUP_KSTEPS);
        if (brick < m.fines) dequantize_tile<FINE_KSTEPS>(fine, digits, m.factor, lane, to);
        else dequantize_tile<GROUP_KSTEPS>(main, 1, m.factor, lane, to);  // all codes have the usual width there
    }
    __syncthreads();
    griddepcontrol_wait();  // somebody may still use the memory that is written to
    const int piece = threadIdx.x % ROW_CHUNKS;
    if (first + piece / 2 >= m.tiles) return;
    u16* out = target.numbers + first * 16 + piece * 8;
    UNROLL for (int row = threadIdx.x / ROW_CHUNKS; row < 128; row += BLOCK_THREADS / ROW_CHUNKS) {
        const int input = inputs[row];
        if (input < target.inputs) *(uint4*)(out + (long)input * target.stride) = *(const uint4*)(memory + place(row, piece));
    }
}
