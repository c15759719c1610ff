/* Matrices of floats of 16 bits, as files have them, (outputs, inputs): multiplied by the very numbers, in float32. */

#ifndef EXLM_FLOATS_H
#define EXLM_FLOATS_H

#include "lanes.h"
#include "pool.h"

INLINE Real plain_floats(const uint16_t *p, int kind) {
    return kind == HALVES ? r_halves(p) : (Real)w_left(w_shorts(p), 16);
}

typedef struct {
    const float *from;
    uint16_t *to;
    long count;
    int kind;
    _Atomic int lost;
} Narrowing;

enum { NARROWED = 1 << 16 }; /* numbers of a chunk */

static void narrow_chunk(void *job, int chunk) {
    Narrowing *p = job;
    long first = (long)chunk * NARROWED, stop = first + NARROWED < p->count ? first + NARROWED : p->count;
    Whole lost = w_all(0);
    uint32_t own_bits[WIDTH];
    int any = 0;
    if (p->lost) return;
    for (long i = first; i < stop; i += WIDTH) {
        Real own = r_load(p->from + i);
        Whole bits = (Whole)own;
        if (p->kind == HALVES) {
            lost = w_or(lost, bits ^ (Whole)r_rounded(own));
            r_put_halves(p->to + i, own);
        } else {
            lost = w_or(lost, w_and(bits, w_all(0xffff)));
            memcpy(own_bits, &bits, sizeof bits);
            for (int n = 0; n < WIDTH; n++) p->to[i + n] = (uint16_t)(own_bits[n] >> 16);
        }
    }
    memcpy(own_bits, &lost, sizeof lost);
    for (int n = 0; n < WIDTH; n++) any |= own_bits[n] != 0;
    if (any) p->lost = 1;
}

/* `count` floats, a multiple of 16, as float16 or bfloat16. Returns 0, or 1 if that would change one. */
EXPORT int exlm_narrow(const float *from, long count, int kind, uint16_t *to, int threads) {
    Narrowing job = {.from = from, .to = to, .count = count, .kind = kind};
    share(narrow_chunk, &job, (int)((count + NARROWED - 1) / NARROWED), threads);
    return job.lost;
}

#endif
