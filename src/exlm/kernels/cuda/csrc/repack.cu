// Codes that lie in rows, with the scales of their groups, as bricks (tiles.py says what those are); nothing is computed
// with them. Each thread makes words of a brick, one at a time, from whatever goes into them. Every number is what
// filling.py makes it, to the last bit; that is read more often than this runs, so it is written as plainly.

#include "ptx.h"

#define THREADS 128

enum Kind { NONE, HALVES, FLOATS, SQUARED, SIGNED, UNSIGNED };

// A number for each group and output, in one of the ways formats store it (scales.py).
struct Table {
    const void* values;  // (groups, outputs): the numbers, or small whole ones
    const u16* above;    // of SQUARED (groups), else (super-groups, outputs): what those are multiples of
    const int* parents;  // (groups) which super-group
    int kind;
};

// Rows of one width.
struct Segment {
    const u32* codes;  // (words, outputs)
    Table scales, minimum;
    const u8* zeros;  // (groups, outputs), or null for all the same
    int zero, bits;
};

// Sixteen inputs: they have one width and one group.
struct Step {
    int segment, row, rows, group;  // rows: below sixteen if the others are padding
};

struct Job {
    const Segment* segments;
    const Step* steps;
    char* bricks;        // (tiles, blocks, digits, bytes)
    int* large;          // not zero in the end if a number is too large for a half
    long long stride;    // bytes of a tile
    int bytes, bits, groups, digits, outputs;
    int zeros, minima;   // whether there are tables of them
    int half;            // whether zero points are half the codes' range: then digits have a sign
    float factor;        // of scales and minimums
};

DEVICE float number(const Table& table, int group, int output, int outputs) {
    const long long at = (long long)group * outputs + output;
    switch (table.kind) {
        case HALVES: return cvt_f32_f16(((const u16*)table.values)[at]);
        case FLOATS: return ((const float*)table.values)[at];
        case SQUARED: {
            const float root = (float)(((const u8*)table.values)[at] + 1);
            return cvt_f32_f16(cvt_f16_f32(root * root * cvt_f32_f16(cvt_f16_f32(cvt_f32_f16(table.above[group]) / 256.0f))));
        }
        case SIGNED:
        case UNSIGNED: {
            const int code = table.kind == SIGNED ? (int)((const signed char*)table.values)[at]
                                                  : (int)((const u8*)table.values)[at];
            return cvt_f32_f16(table.above[(long long)table.parents[group] * outputs + output]) * (float)code;
        }
    }
    return 0.0f;
}

// The code of a stored row, and of that one digit.
DEVICE u32 digit(const Job& job, const Segment& segment, int row, int output, int place) {
    const int bits = segment.bits, shift = row * bits % 32;
    const u32* word = segment.codes + (long long)(row * bits / 32) * job.outputs + output;
    u32 code = *word >> shift;
    if (shift + bits > 32) code |= word[job.outputs] << (32 - shift);
    const int half = job.half ? 1 << (job.bits - 1) : 0, mask = (1 << job.bits) - 1;
    int rest = (int)(code & ((1u << bits) - 1)) - (job.half ? 1 << (bits - 1) : 0);
    for (int i = 0; i < place; i++) rest = (rest + half) >> job.bits;
    return rest + half & mask;
}

// Word i of a brick: some codes of a lane, of which a plane has the same few bits (lanes.py).
DEVICE u32 codes(const Job& job, int tile, int block, int place, int i) {
    int low = 0, plane = job.bits < 4 ? 2 : 4;
    if (i >= 64 * plane) i -= 64 * plane, low = plane, plane = job.bits - plane;
    const int row = 2 * plane < 4 ? 2 * plane : 4;  // words of a lane that lie side by side
    const int lane = i / row % 32, word = i / row / 32 * row + i % row, count = 32 / plane;
    u32 out = 0;
    for (int k = 0; k < count; k++) {
        const int n = word * count + k, input = lane % 4 * 4 + n / 4 % 2 * 2 + n % 2;
        const int output = tile * 16 + n / 2 % 2 * 8 + lane / 4;
        const Step step = job.steps[block * 8 + n / 8];
        if (input >= step.rows || output >= job.outputs) continue;
        const u32 bits = digit(job, job.segments[step.segment], step.row + input, output, place) >> low;
        out |= (bits & ((1u << plane) - 1)) << (plane * (k / 2) + 16 * (k % 2));
    }
    return out;
}

// Word i behind the codes: two numbers of a group.
DEVICE u32 numbers(const Job& job, int tile, int block, int place, int i) {
    const int table = i / 8 / job.groups, group = i / 8 % job.groups;
    const Step step = job.steps[block * 8 + group * 8 / job.groups];
    const Segment& segment = job.segments[step.segment];
    const float once = place == 0;  // of what is added, only one digit has any
    u32 out = 0;
    for (int eight = 0; eight < 2; eight++) {
        const int output = tile * 16 + eight * 8 + i % 8;
        if (step.rows == 0 || output >= job.outputs) continue;
        float value;
        if (table == 0) {
            value = number(segment.scales, step.group, output, job.outputs) * job.factor;
            value *= (float)(1 << job.bits * place);
        } else if (table == 1 && job.zeros) {
            const long long at = (long long)step.group * job.outputs + output;
            value = -(float)(segment.zeros ? segment.zeros[at] : segment.zero) * once;
        } else {
            value = -number(segment.minimum, step.group, output, job.outputs) * job.factor * once;
        }
        if (value > 65504.0f || value < -65504.0f) *job.large = 1;
        out |= (u32)cvt_f16_f32(value) << 16 * eight;
    }
    return out;
}

// A thread block for each brick.
extern "C" __global__ void __launch_bounds__(THREADS) repack(const __grid_constant__ Job job) {
    const int tile = blockIdx.x, block = blockIdx.y / job.digits, place = blockIdx.y % job.digits, end = 64 * job.bits;
    u32* brick = (u32*)(job.bricks + tile * job.stride + (long long)blockIdx.y * job.bytes);
    for (int i = threadIdx.x; i < job.bytes / 4; i += THREADS)
        brick[i] = i < end ? codes(job, tile, block, place, i) : numbers(job, tile, block, place, i - end);
}
