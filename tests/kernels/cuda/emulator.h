// A CUDA source as C++ for a processor: each thread of a thread block is a fibre. A fibre that reaches a barrier waits
// for the others. Blocks run one after the other, as far as they can. Shared memory is NaNs at first, and so is what a
// copy on its way will overwrite.
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <list>
#include <vector>

#define EMULATED
#define DEVICE inline
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
using std::max;
using std::min;

struct Index { int x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct Copy { uint32_t to; const char* from; int group, size; };
struct Fibre {
    ucontext_t context;
    std::vector<char> stack;
    long met, met_warp;  // how often it has waited, for its thread block and for its warp
    uint32_t bits[6];    // what it shows to its warp
    std::vector<Copy> copies;  // on their way
    int group;
};
static Index threadIdx, blockIdx, gridDim;
alignas(128) static char shared_memory[1 << 18];
static std::vector<Fibre> fibres;
static ucontext_t home;
static int now;
static long progress;  // how often a fibre went on

static void meet(long Fibre::*count, int first, int last) {
    const int me = now;
    const long mine = ++(fibres[me].*count);
    for (;;) {
        bool all = true;
        for (int i = first; i < last && all; i++) all = fibres[i].*count >= mine;
        if (all) { progress++; return; }
        swapcontext(&fibres[me].context, &home);
        threadIdx = {me, 0, 0};
    }
}
static inline void meet_warp() { meet(&Fibre::met_warp, now / 32 * 32, now / 32 * 32 + 32); }
static inline void __syncthreads() { meet(&Fibre::met, 0, (int)fibres.size()); }
static inline void __syncwarp() { meet_warp(); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> static inline T __ldcg(const T* at) { return *at; }

static float half_value(uint16_t bits) { _Float16 x; memcpy(&x, &bits, 2); return (float)x; }
template <class T> static uint16_t half_bits(T x) {
    const _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static inline uint32_t both(uint32_t a, uint32_t b, uint32_t c, double (*f)(double, double, double)) {
    uint32_t out = 0;
    for (int i = 0; i < 32; i += 16)
        out |= (uint32_t)half_bits(f(half_value(a >> i), half_value(b >> i), half_value(c >> i))) << i;
    return out;
}
static inline uint32_t lop3_and_or(uint32_t word, uint32_t mask, uint32_t rest) { return (word & mask) | rest; }
static inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
    return both(a, b, 0, [](double x, double y, double) { return x + y; });
}
static inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    return both(a, b, 0, [](double x, double y, double) { return x * y; });
}
static inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    return both(a, b, c, [](double x, double y, double z) { return x * y + z; });
}
static inline uint32_t min_f16x2(uint32_t a, uint32_t b) {
    return both(a, b, 0, [](double x, double y, double) { return std::min(x, y); });
}
static inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
    return both(a, b, 0, [](double x, double y, double) { return std::max(x, y); });
}
static inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t choice) {
    const uint64_t all = a | (uint64_t)b << 32;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) out |= (uint32_t)(all >> (choice >> (4 * i) & 7) * 8 & 255) << (8 * i);
    return out;
}
static inline float cvt_f32_f16(uint16_t half) { return half_value(half); }
static inline uint16_t cvt_f16_f32(float number) { return half_bits(number); }
static inline uint32_t cvt_f16x2_f32(float low, float high) { return half_bits(low) | (uint32_t)half_bits(high) << 16; }
static inline float ex2_approx(float x) { return exp2f(x); }
#define __expf expf
static inline float __fdividef(float x, float y) { return x / y; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// All show, all meet, all read, all meet again.
template <class Read> static auto shown(std::initializer_list<uint32_t> bits, Read read) {
    std::copy(bits.begin(), bits.end(), fibres[now].bits);
    meet_warp();
    const auto out = read(&fibres[now / 32 * 32]);
    meet_warp();
    return out;
}
static inline float shfl_xor(float x, int distance) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const int lane = now % 32;
    bits = shown({bits}, [=](const Fibre* warp) { return warp[lane ^ distance].bits[0]; });
    memcpy(&x, &bits, 4);
    return x;
}
static inline uint32_t shfl_xor_u32(uint32_t x, int distance) {
    const int lane = now % 32;
    return shown({x}, [=](const Fibre* warp) { return warp[lane ^ distance].bits[0]; });
}
static inline bool vote_any(bool x) {
    return shown({x}, [](const Fibre* warp) {
        bool any = false;
        for (int i = 0; i < 32; i++) any |= warp[i].bits[0];
        return any;
    });
}
static inline uint32_t movmatrix_trans(uint32_t x) {
    const int g = now % 32 / 4, c = now % 4;
    return shown({x}, [=](const Fibre* warp) {
        const auto at = [=](int row, int column) {
            return warp[row * 4 + column / 2].bits[0] >> column % 2 * 16 & 65535;
        };
        return at(2 * c, g) | at(2 * c + 1, g) << 16;
    });
}
static inline void mma_m16n8k16(
    float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1
) {
    const int g = now % 32 / 4, c = now % 4;
    shown({a0, a1, a2, a3, b0, b1}, [&](const Fibre* warp) {
        for (int i = 0; i < 4; i++) {  // row g + i / 2 * 8, column 2c + i % 2
            double total = sum[i];
            for (int k = 0; k < 16; k++) {
                const int shift = k % 2 * 16, owner = k % 8 / 2;
                const uint32_t a = warp[g * 4 + owner].bits[i / 2 + k / 8 * 2];
                const uint32_t b = warp[(2 * c + i % 2) * 4 + owner].bits[4 + k / 8];
                total += (double)half_value(a >> shift) * half_value(b >> shift);
            }
            sum[i] = (float)total;
        }
        return 0;
    });
}
template <class Other> static void multiply_bytes(int (&sum)[4], std::initializer_list<uint32_t> words) {
    const int g = now % 32 / 4, c = now % 4;
    shown(words, [&](const Fibre* warp) {
        for (int i = 0; i < 4; i++)  // row g + i / 2 * 8, column 2c + i % 2
            for (int k = 0; k < 32; k++) {
                const int shift = k % 4 * 8, owner = k % 16 / 4;
                const uint32_t a = warp[g * 4 + owner].bits[i / 2 + k / 16 * 2];
                const uint32_t b = warp[(2 * c + i % 2) * 4 + owner].bits[4 + k / 16];
                sum[i] += (uint8_t)(a >> shift) * (Other)(b >> shift);
            }
        return 0;
    });
}
template <class... Words> static void mma_m16n8k32_u8s8(int (&sum)[4], Words... words) {
    multiply_bytes<int8_t>(sum, {words...});
}
template <class... Words> static void mma_m16n8k32_u8u8(int (&sum)[4], Words... words) {
    multiply_bytes<uint8_t>(sum, {words...});
}
static inline int redux_max(int x) {
    return shown({(uint32_t)x}, [](const Fibre* warp) {
        int out = (int)warp[0].bits[0];
        for (int i = 1; i < 32; i++) out = std::max(out, (int)warp[i].bits[0]);
        return out;
    });
}
static inline int redux_add(int x) {
    return shown({(uint32_t)x}, [](const Fibre* warp) {
        int out = 0;
        for (int i = 0; i < 32; i++) out += (int)warp[i].bits[0];
        return out;
    });
}
static inline float rcp_approx(float x) { return 1.0f / x; }
static inline int float_as_int(float x) { int out; memcpy(&out, &x, 4); return out; }
static inline float int_as_float(int x) { float out; memcpy(&out, &x, 4); return out; }
static inline void ldmatrix_x4(uint32_t (&out)[4], uint32_t row) {
    const int g = now % 32 / 4, c = now % 4;
    shown({row}, [&](const Fibre* warp) {
        for (int i = 0; i < 4; i++) memcpy(&out[i], shared_memory + warp[i * 8 + g].bits[0] + c * 4, 4);
        return 0;
    });
}
static inline void ldmatrix_x4_trans(uint32_t (&out)[4], uint32_t row) {
    const int g = now % 32 / 4, c = now % 4;
    shown({row}, [&](const Fibre* warp) {
        for (int i = 0; i < 8; i++)  // row 2c + i % 2, column g of matrix i / 2
            memcpy((char*)&out[i / 2] + i % 2 * 2, shared_memory + warp[i / 2 * 8 + 2 * c + i % 2].bits[0] + g * 2, 2);
        return 0;
    });
}
static inline void stmatrix_x4_trans(uint32_t to, const uint32_t (&a)[4]) {
    const int g = now % 32 / 4, c = now % 4;
    shown({to}, [&](const Fibre* warp) {
        for (int i = 0; i < 8; i++) {  // row g, column 2c + i % 2 of matrix i / 2
            const uint16_t half = a[i / 2] >> i % 2 * 16;
            memcpy(shared_memory + warp[i / 2 * 8 + 2 * c + i % 2].bits[0] + g * 2, &half, 2);
        }
        return 0;
    });
}
static inline uint4 ld_nc_v4(const char* from) { return *(const uint4*)from; }
static inline uint2 ld_nc_v2(const char* from) { return *(const uint2*)from; }
static inline uint32_t ld_nc_u32(const char* from) { return *(const uint32_t*)from; }
static inline uint16_t ld_nc_u16(const uint16_t* from) { return *from; }
static inline uint2 ld_nc_l2_v2(const char* from) { return *(const uint2*)from; }
static inline uint32_t ld_nc_l2_u32(const char* from) { return *(const uint32_t*)from; }
static inline void prefetch_l2(const void*) {}
static inline void griddepcontrol_launch_dependents() {}
static inline void griddepcontrol_wait() {}
static inline int atom_add_acq_rel(int* at) { progress++; return (*at)++; }
template <int MAX> static inline uint32_t atom_inc_acq_rel(uint32_t* at) {
    const uint32_t old = *at;
    *at = old == MAX ? 0 : old + 1;
    progress++;
    return old;
}
static inline uint32_t ld_acquire(const uint32_t* at) {  // a polling thread lets other blocks run
    const int me = now;
    const uint32_t before = *at;
    swapcontext(&fibres[me].context, &home);
    threadIdx = {me, 0, 0};
    progress += *at != before;
    return *at;
}
static inline float ld_relaxed(const float* at) { return *at; }
static inline float4 ld_relaxed_v4(const float* at) { return *(const float4*)at; }

static inline uint32_t cvta_to_shared(const void* at) { return (const char*)at - shared_memory; }
template <int BYTES> static inline void cp_async(uint32_t to, const void* from) {
    memset(shared_memory + to, 0xff, BYTES);
    fibres[now].copies.push_back({to, (const char*)from, fibres[now].group, BYTES});
}
static inline void cp_async_commit_group() { fibres[now].group++; }
template <int LAST> static inline void cp_async_wait_group() {
    Fibre& me = fibres[now];
    std::erase_if(me.copies, [&](const Copy& copy) {
        const bool due = copy.group < me.group - LAST;
        if (due) memcpy(shared_memory + copy.to, copy.from, copy.size);
        return due;
    });
}
