/* Sixteen floats at a time, in any instruction set: sums have the same order everywhere. */

#ifndef EXLM_VECTORS_H
#define EXLM_VECTORS_H

#include <stdint.h>
#include <string.h>

enum { WIDE = 16 };

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors stay within this library */

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t Sixteen_whole __attribute__((vector_size(64)));

static inline Sixteen get(const float *p) {
    Sixteen out;
    memcpy(&out, p, sizeof out);
    return out;
}

/* What is left behind the last whole sixteen, then zeros. */
static inline Sixteen get_some(const float *p, int count) {
    Sixteen out = {0};
    memcpy(&out, p, count * sizeof(float));
    return out;
}

static inline void put(float *p, Sixteen a) { memcpy(p, &a, sizeof a); }

static inline float total(Sixteen a) {
    Eight halves[2];
    Four quarters[2];
    memcpy(halves, &a, sizeof a);
    Eight half = halves[0] + halves[1];
    memcpy(quarters, &half, sizeof half);
    Four last = quarters[0] + quarters[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

static inline Sixteen where(Sixteen_whole condition, Sixteen a, Sixteen b) {
    return (Sixteen)((condition & (Sixteen_whole)a) | (~condition & (Sixteen_whole)b));
}

/* e to the power of each, to 2e-7: 2^n times a polynomial on ±ln 2 / 2. Below -87 it is 0, above 88 infinite. */
static inline Sixteen power(Sixteen x) {
    Sixteen top = {0}, low = top - 87.0f;
    Sixteen_whole small = x < low, big = x > top + 88.0f, odd = x != x;
    Sixteen held = where(small, low, where(big, top + 88.0f, where(odd, top, x)));
    Sixteen moved = held * 1.44269504f + 12582912.0f; /* 1.5 · 2^23: the lowest bits are the rounded number */
    Sixteen_whole n = (Sixteen_whole)moved - 0x4b400000;
    Sixteen turns = moved - 12582912.0f;
    Sixteen r = held - turns * 0.693359375f;
    r = r + turns * 2.12194440e-4f;
    Sixteen p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Sixteen out = (Sixteen)((Sixteen_whole)p + (n << 23));
    return where(odd, x, where(small, top, where(big, top + __builtin_inff(), out)));
}

#endif
