// Products of whole numbers by the tensor cores, and what a warp does together for them: how large its numbers are, their
// sums, and their way into the space of codes.
//
// Set when compiling: what pages.h wants.

#include "pages.h"

#define ROLL _Pragma("unroll 1")
#define RUNS (HEAD / 64)    // that a warp rotates at once, two numbers a lane
#define GROUPS (HEAD / 32)  // of numbers with one scale
#define EACH (HEAD / 8)     // numbers of an answer that a lane has
#define BITS(coding) ((coding) == 2 ? 4 : 8)
#define KEY_WORDS (HEAD * BITS(KEYS) / 32)
#define VALUE_WORDS (HEAD * BITS(VALUES) / 32)
#define MIDDLE(coding) ((coding) == 2 ? 8 : 128)
#define MOST_KEY 30000.0f  // of numbers cut into digits
#define MOST_WEIGHT 65000.0f

#ifndef EMULATED
DEVICE void multiply_signed(int (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {  // only b is
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void multiply_unsigned(int (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
template <int BYTES> DEVICE void copy(u32 to, const void* from) {  // 16 pass by once, others are wanted by neighbours
    if (BYTES == 16) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
DEVICE void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LAST> DEVICE void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory"); }
DEVICE float inverse(float x) { float out; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x)); return out; }
DEVICE int added(int x) { return __reduce_add_sync(~0u, x); }
DEVICE int as_bits(float x) { return __float_as_int(x); }
DEVICE float from_bits(int x) { return __int_as_float(x); }
#endif

// The largest of a warp; floats are ordered like whole numbers, those below zero the other way round.
DEVICE float largest(float x) {
    const int bits = as_bits(x), top = highest(bits ^ (bits >> 31 & 0x7fffffff));
    return from_bits(top ^ (top >> 31 & 0x7fffffff));
}
DEVICE float largest_above_zero(float x) { return from_bits(highest(as_bits(x))); }

DEVICE float summed(float x) {
    LOOP for (int other = 16; other; other /= 2) x += exchange(x, other);
    return x;
}

// 64 numbers in or out of the space of rotated codes, two of each lane.
DEVICE void rotate(float (&x)[2], int lane) {
    LOOP for (int other = 1; other < 32; other *= 2) LOOP for (int i = 0; i < 2; i++) {
        const float theirs = exchange(x[i], other), sign = lane & other ? -1.0f : 1.0f;
        x[i] = fmaf(x[i], sign, theirs);
    }
    LOOP for (int i = 0; i < 2; i++) x[i] *= 0.03125f;
}
