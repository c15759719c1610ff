/* What the kernels answer on random odd shapes, a line for each call: what it was, and a digest of its bits.

   Compiled with the library itself, once for each instruction set; the lines must be the same. Where a set has no
   products of whole numbers, their answers are worked out one by one, by their definition. Every call is made with 1 to
   4 threads and must not care. */

#include <stdio.h>

#include "exlm_cpu.c"

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint64_t chance(void) {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* A whole number from least to most. */
static int any(int least, int most) { return least + (int)(chance() % (uint64_t)(most - least + 1)); }

/* A float from -1 to 1. */
static float real(void) { return (float)((double)(int64_t)chance() * 0x1p-63); }

static void *taken[1000];
static int takings;

/* Memory that is all zero, with some behind it that may be read, until `clear`. */
static void *room(size_t bytes) {
    if (takings == sizeof taken / sizeof *taken || !(taken[takings] = calloc(bytes + 64, 1))) abort();
    return taken[takings++];
}

static void clear(void) {
    while (takings) free(taken[--takings]);
}

static float *reals(long count, float size) {
    float *out = room((size_t)count * sizeof(float));
    for (long i = 0; i < count; i++) out[i] = real() * size;
    return out;
}

/* float16 from 2^-24 to 2, some of them so small that they have fewer bits. */
static uint16_t *halves(long count) {
    uint16_t *out = room((size_t)count * sizeof(uint16_t));
    for (long i = 0; i < count; i++) out[i] = (uint16_t)(any(0, 9) ? any(0x2000, 0x3fff) : any(1, 0x7ff));
    return out;
}

static void *bytes(long count, int most) {
    uint8_t *out = room((size_t)count);
    for (long i = 0; i < count; i++) out[i] = (uint8_t)any(0, most);
    return out;
}

/* All NaNs are one. */
static uint64_t digest(uint64_t so_far, const float *x, long count) {
    for (long i = 0; i < count; i++) {
        uint32_t bits = 0x7fc00000;
        if (x[i] == x[i]) memcpy(&bits, x + i, sizeof bits);
        so_far = (so_far ^ bits) * 0x100000001b3u;
    }
    return so_far;
}

static uint64_t digest_bytes(uint64_t so_far, const void *x, long count) {
    for (long i = 0; i < count; i++) so_far = (so_far ^ ((const uint8_t *)x)[i]) * 0x100000001b3u;
    return so_far;
}

/* What is computed with `threads`, which `job` knows the rest of. */
typedef uint64_t Answer(void *job, int threads);

static void tell(const char *what, int one, int two, int three, Answer *answer, void *job) {
    uint64_t first = answer(job, 1);
    for (int threads = 2; threads <= 4; threads++)
        if (answer(job, threads) != first) printf("%d threads differ: ", threads);
    printf("%s %d %d %d: %016llx\n", what, one, two, three, (unsigned long long)first);
}

#include "digest_linear.h"

#include "digest_panels.h"

#include "digest_layers.h"

/* A case of a kind has random numbers of its own: those before it may change without changing it. */
static void check_all(void check(int), int count, uint64_t kind) {
    for (int n = 0; n < count; n++) {
        state = kind << 32 | (uint64_t)n;
        check(n);
        clear();
    }
}

int main(void) {
    check_all(try_bands, 140, 1);
    check_all(try_floats, 8, 2);
    check_all(try_lean, 8, 3);
    check_all(try_norm, 20, 4);
    check_all(try_gate, 6, 5);
    check_all(try_attention, 60, 6);
    check_all(try_layer, 16, 7);
    check_all(try_codebooks, 60, 8);
    return 0;
}
