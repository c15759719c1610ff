// Products of whole numbers by the tensor cores, and what a warp does together for them: how large its numbers are, their
// sums, and their way into the space of codes.
//
// Set when compiling: what pages.h wants.

#include "kv_page.h"

#define RUNS (HEAD_DIM / 64)    // that a warp rotates at once, two numbers a lane
#define GROUPS (HEAD_DIM / 32)  // of numbers with one scale
#define EACH (HEAD_DIM / 8)     // numbers of an answer that a lane has
#define BITS(coding) ((coding) == 2 ? 4 : 8)
#define KEY_WORDS (HEAD_DIM * BITS(K_DTYPE) / 32)
#define VALUE_WORDS (HEAD_DIM * BITS(V_DTYPE) / 32)
#define CODE_BIAS(coding) ((coding) == 2 ? 8 : 128)
#define Q_RANGE 30000.0f  // of numbers cut into digits
#define P_RANGE 65000.0f


// The largest of a warp; floats are ordered like whole numbers, those below zero the other way round.
DEVICE float warp_max(float x) {
    const int bits = float_as_int(x), top = redux_max(bits ^ (bits >> 31 & 0x7fffffff));
    return int_as_float(top ^ (top >> 31 & 0x7fffffff));
}
DEVICE float warp_max_nonneg(float x) { return int_as_float(redux_max(float_as_int(x))); }

DEVICE float warp_sum(float x) {
    UNROLL for (int other = 16; other; other /= 2) x += shfl_xor(x, other);
    return x;
}

// 64 numbers in or out of the space of rotated codes, two of each lane.
DEVICE void hadamard(float (&x)[2], int lane) {
    UNROLL for (int other = 1; other < 32; other *= 2) UNROLL for (int i = 0; i < 2; i++) {
        const float theirs = shfl_xor(x[i], other), sign = lane & other ? -1.0f : 1.0f;
        x[i] = fmaf(x[i], sign, theirs);
    }
    UNROLL for (int i = 0; i < 2; i++) x[i] *= 0.03125f;
}
