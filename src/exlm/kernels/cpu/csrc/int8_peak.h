/* The processor's peak of byte dot products, which `exlm bench` compares prompts with: independent sums in registers,
   no memory. Kernels do not call it. */

#ifndef EXLM_INT8_PEAK_H
#define EXLM_INT8_PEAK_H

#include "simd.h"
#include "threadpool.h"

#if defined(__AVX512VNNI__)
enum { PEAK_PRODUCTS = 64 };
#define PEAK_DOT(sums, a) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(sums) : "v"(a))
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(EXLM_PORTABLE)
enum { PEAK_PRODUCTS = 16 };
#define PEAK_DOT(sums, a) __asm__ volatile("sdot %0.4s, %1.16b, %1.16b" : "+w"(sums) : "w"(a))
#endif

#ifdef PEAK_DOT
enum { PEAK_SUMS = 16 };  /* more than latency times instructions per cycle, and each has a register */
enum { PEAK_CHUNKS = 8 }; /* of a thread: one that the system deschedules leaves its own to the others */

static void int8_peak_chunk(void *rounds, int chunk) {
    enum { regs = PEAK_SUMS / 2 };
    i32v even[PEAK_SUMS / 2], odd[PEAK_SUMS / 2], a = i32_set1(0);
    (void)chunk;
    EACH_REG(v) even[v] = odd[v] = a;
    for (int round = *(int *)rounds; round > 0; round--) {
        EACH_REG(v) PEAK_DOT(even[v], a);
        EACH_REG(v) PEAK_DOT(odd[v], a);
    }
}
#endif

/* Runs so many rounds of each chunk. Returns the operations of a round of all chunks, two for each product; 0 if this
   library's instruction set has no byte dot product. */
EXPORT int exlm_int8_peak(int rounds, int threads) {
#ifdef PEAK_DOT
    int chunks = PEAK_CHUNKS * threads;
    parallel_for(int8_peak_chunk, &rounds, chunks, threads);
    return 2 * PEAK_PRODUCTS * PEAK_SUMS * chunks;
#else
    (void)rounds, (void)threads;
    return 0;
#endif
}

#endif
