/* Matrices of floats of 16 bits, as files have them, (outputs, inputs): multiplied by the very numbers, in float32. */

#ifndef EXLM_FLOATS_H
#define EXLM_FLOATS_H

#include "pool.h"
#include "unpack.h"

INLINE Real plain_floats(const uint16_t *p, int kind) {
    return kind == HALVES ? r_halves(p) : (Real)w_left(w_shorts(p), 16);
}

/* Without x, the weights of a panel go to `out` (QUAD, PANEL); with it, sums `out` (QUAD, 16) grow by x · weights. */
INLINE void walk_floats(const Panel *p, int kind, const float *x, float *out) {
    long inputs = (long)p->run->blocks * LANES;
    const uint16_t *at = (const uint16_t *)p->run->codes + (long)p->quad * QUAD * inputs + p->block * LANES;
    Real sum[QUAD][PARTS];
#define EACH                                                                                                     \
    _Pragma("GCC unroll 4") for (int n = 0; n < QUAD; n++)                                                       \
        _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)
    EACH sum[n][part] = x ? r_load(out + n * LANES + part * WIDTH) : r_all(0);
    for (int i = 0; i < p->blocks * LANES; i += LANES) {
        EACH {
            const uint16_t *from = at + n * inputs + i + part * WIDTH;
            Real found = plain_floats(from, kind);
            if (!part) __builtin_prefetch((const char *)from + AHEAD);
            if (x) sum[n][part] = r_more(sum[n][part], found, r_load(x + i + part * WIDTH));
            else r_store(out + n * PANEL + i + part * WIDTH, found);
        }
    }
    EACH if (x) r_store(out + n * LANES + part * WIDTH, sum[n][part]);
#undef EACH
}

static void unpack_floats(const Panel *p, float *weights) {
    if (p->run->scales.kind == HALVES) walk_floats(p, HALVES, NULL, weights);
    else walk_floats(p, BRAINS, NULL, weights);
}

static void multiply_floats(const Panel *p, const float *x, float *sums) {
    if (p->run->scales.kind == HALVES) walk_floats(p, HALVES, x, sums);
    else walk_floats(p, BRAINS, x, sums);
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
