// Constants and warp helpers of attention in integers (attn_decode_mha.cu): maxima, sums, and the Hadamard transform.
//
// Set when compiling: what kv_page.h wants.
#pragma once
#include "kv_page.h"

#define HADAMARD_RUNS (HEAD_DIM / 64)   // that a warp rotates at once, two numbers a lane
#define SCALE_GROUPS (HEAD_DIM / 32)    // of numbers with one scale
#define LANE_OUTPUTS (HEAD_DIM / 8)     // numbers of the output that a lane has
#define CODE_BITS(dtype) ((dtype) == 2 ? 4 : 8)
#define CODE_BIAS(dtype) ((dtype) == 2 ? 8 : 128)  // the code of zero
#define KEY_WORDS (HEAD_DIM * CODE_BITS(K_DTYPE) / 32)
#define VALUE_WORDS (HEAD_DIM * CODE_BITS(V_DTYPE) / 32)
#define Q_RANGE 30000.0f  // to what the largest of 32 query numbers is scaled before it is split into two signed bytes
#define P_RANGE 65000.0f  // the same for weights of tokens: two unsigned bytes

// The largest of a warp: positive floats are ordered like their bits, negative ones the other way round.
DEVICE float warp_max(float x) {
    const int bits = float_as_int(x), top = redux_max(bits ^ (bits >> 31 & 0x7fffffff));
    return int_as_float(top ^ (top >> 31 & 0x7fffffff));
}
DEVICE float warp_max_nonnegative(float x) { return int_as_float(redux_max(float_as_int(x))); }

DEVICE float warp_sum(float x) {
    UNROLL
    for (int mask = 16; mask; mask /= 2) x += shfl_xor(x, mask);
    return x;
}

// The Hadamard transform of 64 numbers, two of each lane, into the space of codes or out of it.
DEVICE void hadamard(float (&x)[2], int lane) {
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            const float theirs = shfl_xor(x[i], mask), sign = lane & mask ? -1.0f : 1.0f;
            x[i] = fmaf(x[i], sign, theirs);
        }
    }
    UNROLL
    for (int i = 0; i < 2; i++) x[i] *= 0.03125f;
}
