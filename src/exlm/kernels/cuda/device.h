// What all kernels have in common: pairs of halves in a word, lanes that exchange numbers, the tensor cores' product, and who
// waits for whom.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define LOOP _Pragma("unroll")

#ifndef EMULATED  // tests bring their own of these to run the kernels on a processor
#define DEVICE __device__ __forceinline__
DEVICE u32 pick(u32 word, u32 mask, u32 rest) {  // (word & mask) | rest
    u32 out; asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(rest)); return out;
}
DEVICE u32 add2(u32 a, u32 b) { u32 out; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); return out; }
DEVICE u32 mul2(u32 a, u32 b) { u32 out; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); return out; }
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    u32 out; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c)); return out;
}
DEVICE u32 bytes(u32 a, u32 b, u32 choice) { return __byte_perm(a, b, choice); }
DEVICE float as_float(u16 half) { float out; asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half)); return out; }
DEVICE u16 as_half(float number) { u16 out; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(number)); return out; }
DEVICE float exchange(float x, int distance) { return __shfl_xor_sync(~0u, x, distance); }
DEVICE void multiply_add(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void soon(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
DEVICE int highest(int x) { return __reduce_max_sync(~0u, x); }
DEVICE int arrive(int* at) {  // counts; what was written before it is seen by who arrives later
    int out; asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(out) : "l"(at) : "memory"); return out;
}
DEVICE void let_go() {  // the next kernel may start
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void await() {  // the kernel before has ended
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif
