/* Matrices of floats of 16 bits, as files have them, (outputs, inputs): multiplied by the very numbers, in float32. */

#ifndef EXLM_FLOATS_H
#define EXLM_FLOATS_H

#include "simd.h"
#include "threadpool.h"

INLINE f32v load_narrow(const uint16_t *p, int kind) {
    return kind == F16 ? f32_load_f16(p) : (f32v)i32_shl(i32_load_u16(p), 16);
}

typedef struct {
    const float *from;
    uint16_t *to;
    long count;
    int kind;
    _Atomic int lost;
} NarrowArgs;

enum { NARROW_CHUNK = 1 << 16 }; /* numbers of a chunk */

static void narrow_chunk(void *job, int chunk) {
    NarrowArgs *p = job;
    long first = (long)chunk * NARROW_CHUNK, stop = first + NARROW_CHUNK < p->count ? first + NARROW_CHUNK : p->count;
    i32v lost = i32_set1(0);
    uint32_t own_bits[VLEN];
    int any = 0;
    if (p->lost) return;
    for (long i = first; i < stop; i += VLEN) {
        f32v own = f32_load(p->from + i);
        i32v bits = (i32v)own;
        if (p->kind == F16) {
            lost = i32_or(lost, bits ^ (i32v)f32_round_f16(own));
            f32_store_f16(p->to + i, own);
        } else {
            lost = i32_or(lost, i32_and(bits, i32_set1(0xffff)));
            memcpy(own_bits, &bits, sizeof bits);
            for (int n = 0; n < VLEN; n++) p->to[i + n] = (uint16_t)(own_bits[n] >> 16);
        }
    }
    memcpy(own_bits, &lost, sizeof lost);
    for (int n = 0; n < VLEN; n++) any |= own_bits[n] != 0;
    if (any) p->lost = 1;
}

/* `count` floats, a multiple of 16, as float16 or bfloat16. Returns 0, or 1 if that would change one. */
EXPORT int exlm_narrow(const float *from, long count, int kind, uint16_t *to, int threads) {
    NarrowArgs job = {.from = from, .to = to, .count = count, .kind = kind};
    parallel_for(narrow_chunk, &job, (int)((count + NARROW_CHUNK - 1) / NARROW_CHUNK), threads);
    return job.lost;
}

#endif
