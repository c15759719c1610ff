// Thin wrappers of PTX instructions and warp intrinsics, named as PTX names them. The tests' emulator
// (tests/kernels/cuda/emulator.h) implements the same names in C++, all but wgmma, and defines EMULATED.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

// The host fills kernel arguments through ctypes mirrors of the structs, and passes the mirrors' sizes as SIZEOF_...
#define CHECK_SIZEOF(Struct) static_assert(sizeof(Struct) == SIZEOF_##Struct, "the ctypes mirror differs: " #Struct)

#ifndef EMULATED
#define DEVICE __device__ __forceinline__

// -- bits ----------------------------------------------------------------------------------------------------------
DEVICE u32 lop3_and_or(u32 word, u32 mask, u32 rest) {  // (word & mask) | rest
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(rest));
    return out;
}
DEVICE u32 prmt(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE int float_as_int(float x) { return __float_as_int(x); }
DEVICE float int_as_float(int x) { return __int_as_float(x); }

// -- float16 and pairs of it ---------------------------------------------------------------------------------------
DEVICE u32 add_f16x2(u32 a, u32 b) {
    u32 out;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
DEVICE u32 min_f16x2(u32 a, u32 b) {
    u32 out;
    asm("min.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
DEVICE u32 max_f16x2(u32 a, u32 b) {
    u32 out;
    asm("max.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
DEVICE float cvt_f32_f16(u16 half) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half));
    return out;
}
DEVICE u16 cvt_f16_f32(float number) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(number));
    return out;
}
DEVICE u32 cvt_f16x2_f32(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
DEVICE float ex2_approx(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
DEVICE float rcp_approx(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// -- among the lanes of a warp -------------------------------------------------------------------------------------
DEVICE float shfl_xor(float x, int lane_mask) { return __shfl_xor_sync(~0u, x, lane_mask); }
DEVICE u32 shfl_xor_u32(u32 x, int lane_mask) { return __shfl_xor_sync(~0u, x, lane_mask); }
DEVICE int redux_max(int x) { return __reduce_max_sync(~0u, x); }
DEVICE int redux_add(int x) { return __reduce_add_sync(~0u, x); }
DEVICE bool vote_any(bool x) { return __any_sync(~0u, x); }
DEVICE u32 movmatrix_trans(u32 x) {  // one 8 x 8 matrix of halves
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
    return out;
}

// -- tensor cores: d += a b ----------------------------------------------------------------------------------------
// Lane 4 g + c holds of A rows g and g + 8, of B column g, of D rows g (d[0], d[1]) and g + 8 (d[2], d[3]), columns
// 2c, 2c + 1.
DEVICE void mma_m16n8k16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma_m16n8k32_u8s8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma_m16n8k32_u8u8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// -- wgmma: MMA of a warpgroup, Hopper only ------------------------------------------------------------------------
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// wgmma reads shared memory through the async proxy, which must see what cp.async has written.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// d += a b of m64nNk16, N = 8 * N8: A in registers, as mma_m16n8k16 has it in each of the four warps; B in shared
// memory, given by its matrix descriptor, k-major or with TRANS_B n-major.
#define WGMMA_D4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_D8(d, c) WGMMA_D4(d[c]), WGMMA_D4(d[c + 1])
#define WGMMA_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_24 WGMMA_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_32 WGMMA_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA(n, d, operands, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" d "}, " operands ";" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANS_B))
template <int N8, int TRANS_B>
DEVICE void wgmma_m64k16(float (&d)[N8][4], const u32 (&a)[4], unsigned long long b) {
    static_assert(N8 == 4 || N8 == 6 || N8 == 8);
    if constexpr (N8 == 4)
        WGMMA("32", WGMMA_16, "{%16,%17,%18,%19}, %20, 1, 1, 1, %21", WGMMA_D8(d, 0), WGMMA_D8(d, 2));
    if constexpr (N8 == 6)
        WGMMA("48", WGMMA_24, "{%24,%25,%26,%27}, %28, 1, 1, 1, %29", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4));
    if constexpr (N8 == 8)
        WGMMA("64", WGMMA_32, "{%32,%33,%34,%35}, %36, 1, 1, 1, %37", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4),
              WGMMA_D8(d, 6));
}
#endif

// -- shared memory: cp.async, ldmatrix, stmatrix -------------------------------------------------------------------
DEVICE u32 cvta_to_shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }
// 16 bytes bypass L1 (.cg): weights and cache lines are read once. Smaller pieces are shared with neighbours (.ca).
template <int BYTES> DEVICE void cp_async(u32 to, const void* from) {
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void cp_async_wait_group() {  // until at most the last PENDING groups are under way
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Four 8 x 8 matrices of halves; lane 8 i + r gives the address of row r of matrix i.
DEVICE void ldmatrix_x4(u32 (&out)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(row) : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&out)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(row) : "memory");
}
DEVICE void stmatrix_x4_trans(u32 row, const u32 (&a)[4]) {  // sm_90 has the instruction; before, movmatrix and stores
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]) : "memory");
#else
    const int lane = threadIdx.x % 32;
    UNROLL
    for (int j = 0; j < 4; j++) {
        u32 turned;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(a[j]));
        const u32 at = __shfl_sync(~0u, row, j * 8 + lane / 4) + lane % 4 * 4;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(turned) : "memory");
    }
#endif
}

// -- global memory -------------------------------------------------------------------------------------------------
// Read once (weights, cached keys and values): the non-coherent path, nothing kept in L1.
DEVICE uint4 ld_nc_v4(const char* from) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}
DEVICE uint2 ld_nc_v2(const char* from) {
    uint2 out;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(from));
    return out;
}
DEVICE u32 ld_nc_u32(const char* from) {
    u32 out;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(out) : "l"(from));
    return out;
}
DEVICE u16 ld_nc_u16(const u16* from) {
    u16 out;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(out) : "l"(from));
    return out;
}
// The same with a prefetch of the 128-byte line into L2.
DEVICE uint2 ld_nc_l2_v2(const char* from) {
    uint2 out;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(from));
    return out;
}
DEVICE u32 ld_nc_l2_u32(const char* from) {
    u32 out;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(out) : "l"(from));
    return out;
}
DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// -- between thread blocks -----------------------------------------------------------------------------------------
DEVICE int atom_add_acq_rel(int* at) {  // += 1; writes before it are visible to the block that adds later
    int out;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(out) : "l"(at) : "memory");
    return out;
}
template <int MAX> DEVICE u32 atom_inc_acq_rel(u32* at) {  // += 1, and 0 after MAX
    u32 old;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "n"(MAX) : "memory");
    return old;
}
DEVICE u32 ld_acquire(const u32* at) {
    u32 out;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(out) : "l"(at) : "memory");
    return out;
}
DEVICE float ld_relaxed(const float* at) {
    float out;
    asm volatile("ld.relaxed.gpu.f32 %0, [%1];" : "=f"(out) : "l"(at));
    return out;
}
DEVICE float4 ld_relaxed_v4(const float* at) {
    float4 out;
    asm volatile("ld.relaxed.gpu.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "l"(at));
    return out;
}

// -- programmatic dependent launch (PDL) ---------------------------------------------------------------------------
// The host launches every kernel with programmatic stream serialization: it may start once all thread blocks of the one
// before have called launch_dependents (or ended), and must not touch that one's results before griddepcontrol_wait.
DEVICE void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif
