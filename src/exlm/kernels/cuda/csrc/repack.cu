// Repacks codes that lie in rows of inputs, with the scales of their groups, into weight tiles (weight_tile.h has the
// layout). Every number is, to the last bit, what the oracle of the tests makes in torch. Each thread gathers one
// 32-bit word at a time from wherever its codes are. A model is repacked once, so this is written plainly.

#include "ptx.h"

#define THREADS 128

enum TableKind { NO_TABLE, F16, F32, EXL2_SCALES, K_QUANT_SIGNED, K_QUANT_UNSIGNED };

// A number for each group and output, in one of the ways formats store it (formats/packed.py).
struct Table {
    const void* values;              // (groups, outputs): the numbers, or small integers
    const u16* outer;                // scales of small integers: of EXL2 (groups), of K-quants (superblocks, outputs)
    const int* superblock_of_group;  // of K-quants: (groups)
    int kind;
};

// Rows of one width.
struct Segment {
    const u32* codes;  // (words, outputs)
    Table scales, minimum;
    const u8* zeros;   // (groups, outputs), or null: `zero` for all
    int zero, bits;
};

// One k16 step of packed inputs: they have one width and one group.
struct KStep {
    int segment, row, rows, group;  // rows: below 16 if the others are padding
};

struct RepackParams {
    const Segment* segments;
    const KStep* ksteps;
    char* tiles;             // (n tiles, k blocks, digits, tile_bytes)
    int* overflow;           // set to 1 if a number is too large for float16
    long long column_bytes;  // of an n tile
    int tile_bytes, bits, groups, num_digits, outputs;
    int zeros, mins;         // whether there are tables of them
    int symmetric;           // whether zero points are half the codes' range: then digits have a sign
    float factor;            // of scales and minimums
};
CHECK_SIZEOF(Table);
CHECK_SIZEOF(Segment);
CHECK_SIZEOF(KStep);
CHECK_SIZEOF(RepackParams);

DEVICE float table_entry(const Table& table, int group, int output, int outputs) {
    const long long at = (long long)group * outputs + output;
    switch (table.kind) {
        case F16:
            return cvt_f32_f16(((const u16*)table.values)[at]);
        case F32:
            return ((const float*)table.values)[at];
        case EXL2_SCALES: {  // (code + 1)^2 * maximum / 256
            const float root = (float)(((const u8*)table.values)[at] + 1);
            const float step = cvt_f32_f16(cvt_f16_f32(cvt_f32_f16(table.outer[group]) / 256.0f));
            return cvt_f32_f16(cvt_f16_f32(root * root * step));
        }
        case K_QUANT_SIGNED:
        case K_QUANT_UNSIGNED: {
            const int code = table.kind == K_QUANT_SIGNED ? (int)((const signed char*)table.values)[at]
                                                          : (int)((const u8*)table.values)[at];
            return cvt_f32_f16(table.outer[(long long)table.superblock_of_group[group] * outputs + output])
                * (float)code;
        }
    }
    return 0.0f;
}

// One digit, base 2^bits of the tile, of the code of a stored row. Of symmetric codes the digits are signed, and
// stand half their range too high, as codes do.
DEVICE u32 digit_of(const RepackParams& params, const Segment& segment, int row, int output, int digit) {
    const int bits = segment.bits, shift = row * bits % 32;
    const u32* word = segment.codes + (long long)(row * bits / 32) * params.outputs + output;
    u32 code = *word >> shift;
    if (shift + bits > 32) code |= word[params.outputs] << (32 - shift);
    const int half = params.symmetric ? 1 << (params.bits - 1) : 0, mask = (1 << params.bits) - 1;
    int rest = (int)(code & ((1u << bits) - 1)) - (params.symmetric ? 1 << (bits - 1) : 0);
    for (int i = 0; i < digit; i++) rest = (rest + half) >> params.bits;
    return rest + half & mask;
}

// Word i of a tile's bit planes: the bits that one plane has of some codes of a lane.
DEVICE u32 code_word(const RepackParams& params, int n_tile, int k_block, int digit, int i) {
    int low = 0, plane_bits = params.bits < 4 ? 2 : 4;
    if (i >= 64 * plane_bits) {
        i -= 64 * plane_bits;
        low = plane_bits;
        plane_bits = params.bits - plane_bits;
    }
    const int chunk = 2 * plane_bits < 4 ? 2 * plane_bits : 4;  // words of a lane that lie side by side
    const int lane = i / chunk % 32, word = i / chunk / 32 * chunk + i % chunk, count = 32 / plane_bits;
    u32 out = 0;
    for (int k = 0; k < count; k++) {
        // The lane's code n is (k16 step, A register, k pair); see the picture in weight_tile.h.
        const int n = word * count + k, input = lane % 4 * 4 + n / 4 % 2 * 2 + n % 2;
        const int output = n_tile * 16 + n / 2 % 2 * 8 + lane / 4;
        const KStep step = params.ksteps[k_block * 8 + n / 8];
        if (input >= step.rows || output >= params.outputs) continue;
        const u32 bits = digit_of(params, params.segments[step.segment], step.row + input, output, digit) >> low;
        out |= (bits & ((1u << plane_bits) - 1)) << (plane_bits * (k / 2) + 16 * (k % 2));
    }
    return out;
}

// Word i of a tile's tables: the entries of outputs g and g + 8.
DEVICE u32 table_word(const RepackParams& params, int n_tile, int k_block, int digit, int i) {
    const int table = i / 8 / params.groups, group = i / 8 % params.groups;
    const KStep step = params.ksteps[k_block * 8 + group * 8 / params.groups];
    const Segment& segment = params.segments[step.segment];
    const float once = digit == 0;  // zero points and minimums are added once: the lowest digit has them
    u32 out = 0;
    for (int half = 0; half < 2; half++) {
        const int output = n_tile * 16 + half * 8 + i % 8;
        if (step.rows == 0 || output >= params.outputs) continue;
        float value;
        if (table == 0) {
            value = table_entry(segment.scales, step.group, output, params.outputs) * params.factor;
            value *= (float)(1 << params.bits * digit);
        } else if (table == 1 && params.zeros) {
            const long long at = (long long)step.group * params.outputs + output;
            value = -(float)(segment.zeros ? segment.zeros[at] : segment.zero) * once;
        } else {
            value = -table_entry(segment.minimum, step.group, output, params.outputs) * params.factor * once;
        }
        if (value > 65504.0f || value < -65504.0f) *params.overflow = 1;
        out |= (u32)cvt_f16_f32(value) << 16 * half;
    }
    return out;
}

// A thread block for each tile. Grid: (n tiles, k blocks * digits).
extern "C" __global__ void __launch_bounds__(THREADS) repack(const __grid_constant__ RepackParams params) {
    const int n_tile = blockIdx.x, k_block = blockIdx.y / params.num_digits, digit = blockIdx.y % params.num_digits;
    const int code_words = 64 * params.bits;
    u32* tile = (u32*)(params.tiles + n_tile * params.column_bytes + (long long)blockIdx.y * params.tile_bytes);
    for (int i = threadIdx.x; i < params.tile_bytes / 4; i += THREADS)
        tile[i] = i < code_words ? code_word(params, n_tile, k_block, digit, i)
                                 : table_word(params, n_tile, k_block, digit, i - code_words);
}
