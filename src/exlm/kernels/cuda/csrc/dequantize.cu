// A packed weight in full, (inputs, outputs) float16 with inputs in the model's order, for cuBLAS on prompts.
//
// A thread block takes 128 packed inputs (one k block) of BLOCK_TILES neighbouring n16 columns, a warp for each
// column. The A fragment of a lane has few outputs and many inputs, but rows of the result are outputs: so 8 x 8
// matrices are transposed on their way into shared memory (stmatrix.trans), from where a row of a block's outputs
// leaves at a time. 16-byte chunks are swizzled by row, so that neither stmatrix nor the reads have bank conflicts.
//
// Set when compiling, besides what weight_tile.h wants: BLOCK_TILES (n16 columns of a thread block: 4, 8 or 16).

#include "weight_tile.h"

#define ROW_BYTES (BLOCK_TILES * 32)  // of one input in shared memory
#define ROW_CHUNKS (BLOCK_TILES * 2)  // of 16 bytes
#define BLOCK_THREADS (BLOCK_TILES * 32)

// Blocks of 128 inputs by the number of digits that their codes have; the digits of a block are neighbouring k tiles.
struct DigitSpans {
    int num_digits[6], k_blocks[6];
};

struct DequantTarget {
    u16* numbers;     // (inputs, stride)
    const u16* perm;  // (128 k_blocks) which input stands there, `inputs` or more for padding; null: in order
    int inputs, stride;
};
CHECK_SIZEOF(MmaWeight);
CHECK_SIZEOF(DigitSpans);
CHECK_SIZEOF(DequantTarget);

DEVICE u32 mul_f32(u32 pair, float factor) {
    return cvt_f16_f32(low_half(pair) * factor) | (u32)cvt_f16_f32(high_half(pair) * factor) << 16;
}

// Where a 16-byte chunk of a row lies: in other banks for each of the eight rows that are stored at once.
DEVICE int swizzled(int row, int chunk) { return row * ROW_BYTES + (chunk ^ (row >> 1 & 6 | row & 1)) * 16; }

// One k block, a tile for each of its digits, into shared memory. Rounded as the formats say: the integer (digits
// combined by Horner's rule, exact in float16) times a float16 scale, rounded once; then the weight's own factor.
template <int KSTEPS>
DEVICE void dequantize_k_block(const char* tiles, int num_digits, float factor, int lane, u32 to) {
    u32 number[8][4];  // the A registers of each k16 step
    TileFragment<BITS_OF(0), KSTEPS> fragment;
    for (int digit = num_digits - 1; digit >= 0; digit--) {
        fragment.template load<false>(tiles + digit * TILE_BYTES(BITS_OF(0), KSTEPS), lane);
        const TileCodes<BITS_OF(0)> codes = fragment.codes();
        const bool highest = digit == num_digits - 1;
        UNROLL
        for (int step = 0; step < 8; step++) {
            const u32 base = ZERO_POINTS == 0 ? (0xe400u + (1u << (BITS_OF(0) - 1))) * 0x10001u : 0xe400e400u;
            const u32 zeros =
                ZERO_POINTS == 2 ? add_f16x2(fragment.tables[fragment.groups + step / KSTEPS], base) : base;
            u32 a[4];
            codes.template unpack<1>(step, a);
            UNROLL
            for (int j = 0; j < 4; j++) {
                const u32 code = add_f16x2(a[j], j % 2 ? both_high(zeros) : both_low(zeros));
                const u32 radix = (15 + BITS_OF(0)) * 0x04000400u;  // 2^bits
                number[step][j] = highest ? code : fma_f16x2(number[step][j], radix, code);
            }
        }
    }
    UNROLL
    for (int step = 0; step < 8; step++) {  // the lowest digit's scales are those of the number
        const u32* tables = fragment.tables + step / KSTEPS;
        const u32 scales = tables[0], mins = HAS_MINS ? tables[(NUM_TABLES - 1) * fragment.groups] : 0;
        u32(&a)[4] = number[step];
        UNROLL
        for (int j = 0; j < 4; j++) {
            const u32 scale = j % 2 ? both_high(scales) : both_low(scales);
            a[j] = HAS_MINS ? fma_f16x2(a[j], scale, j % 2 ? both_high(mins) : both_low(mins)) : mul_f16x2(a[j], scale);
            if (factor != 1.0f) a[j] = mul_f32(a[j], factor);
        }
        stmatrix_x4_trans(to + step * 16 * ROW_BYTES, a);
    }
}

// Grid: (groups of BLOCK_TILES columns, blocks of 128 inputs).
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 32 / BLOCK_TILES) dequantize(
    const __grid_constant__ MmaWeight m, const __grid_constant__ DigitSpans spans,
    const __grid_constant__ DequantTarget target
) {
    extern __shared__ __align__(128) char smem[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k_block = blockIdx.y;
    const int first = blockIdx.x * BLOCK_TILES, n_tile = first + warp;
    int* inputs = (int*)(smem + 128 * ROW_BYTES);
    griddepcontrol_launch_dependents();
    if (threadIdx.x < 128) {
        const int slot = k_block * 128 + threadIdx.x;
        inputs[threadIdx.x] = target.perm ? target.perm[slot] : slot;
    }
    int span = 0, left = k_block, k_tile = 0;
    while (left >= spans.k_blocks[span]) {
        left -= spans.k_blocks[span];
        k_tile += spans.k_blocks[span] * spans.num_digits[span];
        span++;
    }
    const int num_digits = spans.num_digits[span];
    k_tile += left * num_digits;
    if (n_tile < m.n_tiles) {
        const int matrix = lane / 8, column = lane % 8;  // matrix a0..a3; its columns are inputs 4c + (0, 1 or 2, 3)
        const int row = column / 2 * 4 + matrix / 2 * 2 + column % 2;
        const u32 to = cvta_to_shared(smem) + swizzled(row, warp * 2 + matrix % 2);
        const char* fine = m.fine + ((long)n_tile * m.fine_k_tiles + k_tile) * TILE_BYTES(BITS_OF(0), FINE_KSTEPS);
        const int main_k_tiles = m.k_tiles - m.fine_k_tiles;
        const char* main = m.main
            + ((long)n_tile * main_k_tiles + k_tile - m.fine_k_tiles) * TILE_BYTES(BITS_OF(0), GROUP_KSTEPS);
        if (k_tile < m.fine_k_tiles) dequantize_k_block<FINE_KSTEPS>(fine, num_digits, m.factor, lane, to);
        else dequantize_k_block<GROUP_KSTEPS>(main, 1, m.factor, lane, to);  // all codes have the usual width there
    }
    __syncthreads();
    griddepcontrol_wait();  // the kernel before may still read the memory that is written to
    const int chunk = threadIdx.x % ROW_CHUNKS;
    if (first + chunk / 2 >= m.n_tiles) return;
    u16* out = target.numbers + first * 16 + chunk * 8;
    UNROLL
    for (int row = threadIdx.x / ROW_CHUNKS; row < 128; row += BLOCK_THREADS / ROW_CHUNKS) {
        const int input = inputs[row];
        if (input < target.inputs)
            *(uint4*)(out + (long)input * target.stride) = *(const uint4*)(smem + swizzled(row, chunk));
    }
}
