/* What the cases of digest_*.h share: random numbers, memory and digests. */

#ifndef DIGEST_H
#define DIGEST_H

#include <stdio.h>

#include "exlm_cpu.c"

static uint64_t state;

static uint64_t random_bits(void) {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int random_int(int least, int most) { return least + (int)(random_bits() % (uint64_t)(most - least + 1)); }

/* From -1 to 1. */
static float random_float(void) { return (float)((double)(int64_t)random_bits() * 0x1p-63); }

static void *allocations[1000];
static int allocation_count;

/* Zeroed memory until the end of the case, with 64 bytes behind it that kernels may read. */
static void *allocate(size_t size) {
    void *memory = calloc(size + 64, 1);
    if (allocation_count == sizeof allocations / sizeof *allocations || !memory) abort();
    allocations[allocation_count++] = memory;
    return memory;
}

static void free_all(void) {
    while (allocation_count) free(allocations[--allocation_count]);
}

static float *random_floats(long count, float size) {
    float *out = allocate((size_t)count * sizeof(float));
    for (long i = 0; i < count; i++) out[i] = random_float() * size;
    return out;
}

/* float16 from 2^-24 to 2, a tenth of them subnormal. */
static uint16_t *random_f16(long count) {
    uint16_t *out = allocate((size_t)count * sizeof(uint16_t));
    for (long i = 0; i < count; i++) {
        int normal = random_int(0, 9) > 0;
        out[i] = (uint16_t)(normal ? random_int(0x2000, 0x3fff) : random_int(1, 0x7ff));
    }
    return out;
}

static void *random_bytes(long count, int most) {
    uint8_t *out = allocate((size_t)count);
    for (long i = 0; i < count; i++) out[i] = (uint8_t)random_int(0, most);
    return out;
}

/* FNV-1a over words. All NaNs count as one. */
static uint64_t digest(uint64_t hash, const float *x, long count) {
    for (long i = 0; i < count; i++) {
        uint32_t bits = 0x7fc00000;
        if (x[i] == x[i]) memcpy(&bits, x + i, sizeof bits);
        hash = (hash ^ bits) * 0x100000001b3u;
    }
    return hash;
}

static uint64_t digest_bytes(uint64_t hash, const void *x, long count) {
    for (long i = 0; i < count; i++) hash = (hash ^ ((const uint8_t *)x)[i]) * 0x100000001b3u;
    return hash;
}

/* Runs a case with so many threads and returns the digest of its result. */
typedef uint64_t Run(void *job, int threads);

static void print_digest(const char *what, int one, int two, int three, Run *run, void *job) {
    uint64_t first = run(job, 1);
    for (int threads = 2; threads <= 4; threads++)
        if (run(job, threads) != first) printf("%d threads differ: ", threads);
    printf("%s %d %d %d: %016llx\n", what, one, two, three, (unsigned long long)first);
}

#endif
