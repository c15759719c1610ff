// Chained kernels: an epilogue writes its output as the packed activations of the next GEMM (OUT_PREPACKED), which
// then needs no pack_activations (IN_PREPACKED). The act-order permutation of the next weight is folded into this
// store, and so is the weight of an RMS norm that stands between the two. The norm's 1 / rms is not known yet: every
// thread block leaves the sum of squares of its own outputs, and the next GEMM's epilogue multiplies by 1 / rms,
// since it commutes with the product. prepacked_acts.py allocates the buffers and makes the tables.
#pragma once
#include "ptx.h"

#define NO_SLOT 65535

// A slot is the place of an input in the packed order of the next weight; an input may have several (its codes have
// several digits, or several weights have orders of their own), and some slots are padding.
struct EpilogueTarget {
    const uint4* slots;       // (output) up to eight slots of 16 bits, then NO_SLOT
    const u16* pad_slots;     // (num_pads) slots of no input, to be zeroed
    const float* norm_weight; // (output) what the output is multiplied by; null: nothing
    u16* packed_x;            // the next GEMM's input, in the layout of pack_activations.h; null: no chaining
    float* rms_partials;      // (row, num_partials) sums of squares; null: no norm follows
    int num_pads, row_capacity, num_partials;
    int fragment_layout;      // 1: for gemm_m16 (k32, row, 32), 0: for gemm_m64 (k8, 8 rows, input, row)
};

DEVICE u16* packed_at(const EpilogueTarget& target, u32 slot, int row) {
    if (target.fragment_layout) return target.packed_x + (slot / 32 * target.row_capacity + row) * 32 + slot % 32;
    const u32 matrix = slot / 32 * 4 + slot % 8 / 2, input = slot % 32 / 8 * 2 + slot % 2;  // 8 x 8, by ldmatrix.trans
    return target.packed_x + ((matrix * (target.row_capacity / 8) + row / 8) * 8 + input) * 8 + row % 8;
}

// One output of a row to all slots of it.
DEVICE void store_prepacked(const EpilogueTarget& target, uint4 slots, int row, u16 number) {
    const u32 pairs[4] = {slots.x, slots.y, slots.z, slots.w};
    UNROLL
    for (int i = 0; i < 8; i++) {
        const u32 slot = pairs[i / 2] >> i % 2 * 16 & 65535;
        if (slot == NO_SLOT) return;
        *packed_at(target, slot, row) = number;
    }
}

// One output of eight rows, which lie together in the layout of gemm_m64.
DEVICE void store_prepacked_8rows(const EpilogueTarget& target, uint4 slots, int row, const u16 (&numbers)[8]) {
    const u32 pairs[4] = {slots.x, slots.y, slots.z, slots.w};
    u32 words[4];
    UNROLL
    for (int w = 0; w < 4; w++) words[w] = numbers[2 * w] | (u32)numbers[2 * w + 1] << 16;
    UNROLL
    for (int i = 0; i < 8; i++) {
        const u32 slot = pairs[i / 2] >> i % 2 * 16 & 65535;
        if (slot == NO_SLOT) return;
        *(uint4*)packed_at(target, slot, row) = uint4{words[0], words[1], words[2], words[3]};
    }
}

// Zeroes the padding slots of all rows, shared out to all threads of the grid. The first slot of a thread is looked up
// early, before griddepcontrol_wait allows a write.
struct PadWriter {
    int at;
    u32 slot;

    DEVICE void locate(const EpilogueTarget& target, int thread) {
        at = thread;
        slot = target.packed_x && at < target.num_pads * target.row_capacity
            ? target.pad_slots[at / target.row_capacity] : NO_SLOT;
    }
    DEVICE void write(const EpilogueTarget& target, int threads) {
        while (slot != NO_SLOT) {
            *packed_at(target, slot, at % target.row_capacity) = 0;
            locate(target, at + threads);
        }
    }
};
