/* Matrices of floats of 16 bits, as files have them, (outputs, inputs): multiplied by the very numbers, in float32. */

#ifndef EXLM_FLOATS_H
#define EXLM_FLOATS_H

#include "pool.h"
#include "product.h"
#include "unpack.h"

INLINE Real plain_floats(const uint16_t *p, int kind) {
    return kind == HALVES ? r_halves(p) : (Real)w_left(w_shorts(p), 16);
}

/* Rows that are multiplied in one go, and those for which weights are not put down. */
enum { ROWS_AT_ONCE = WIDTH == 16 ? 8 : WIDTH == 8 ? 4 : 2, FEW_ROWS = 8 };

#define EACH_PART _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

INLINE const uint16_t *panel_floats(const Panel *p) {
    return (const uint16_t *)p->run->codes + ((long)p->quad * QUAD * p->run->blocks + p->block) * LANES;
}

/* sums (rows, TILE, 16) of a quad += x (rows, places) · weights. One output after the other, as they lie in memory: a
   processor that sees neighbours being read at the same time does not see what will be needed next. */
INLINE void some_rows_of_floats(const Panel *p, int kind, const float *x, long places, int rows, float *sums) {
    const uint16_t *at = panel_floats(p);
    for (int n = 0; n < QUAD; n++, at += (long)p->run->blocks * LANES, sums += LANES) {
        Real sum[FEW_ROWS][PARTS];
        EACH_ROW EACH_PART sum[r][part] = r_load(sums + r * TILE * LANES + part * WIDTH);
#pragma GCC unroll 4
        for (int i = 0; i < p->blocks * LANES; i += LANES)
            EACH_PART {
                Real found = plain_floats(at + i + part * WIDTH, kind);
                EACH_ROW sum[r][part] = r_more(sum[r][part], found, r_load(x + r * places + i + part * WIDTH));
            }
        EACH_ROW EACH_PART r_store(sums + r * TILE * LANES + part * WIDTH, sum[r][part]);
    }
}

static void multiply_floats(const Panel *p, const float *x, long places, int rows, float *sums) {
    for (int some; rows; rows -= some, x += some * places, sums += some * TILE * LANES) {
        some = rows < ROWS_AT_ONCE ? rows : ROWS_AT_ONCE;
#define OWN(own)                                                                                                  \
    case own:                                                                                                     \
        if (p->run->scales.kind == HALVES) some_rows_of_floats(p, HALVES, x, places, own, sums);                  \
        else some_rows_of_floats(p, BRAINS, x, places, own, sums);                                                \
        break;
        switch (some) {
            OWN(1) OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) OWN(7) OWN(8)
        }
#undef OWN
    }
}

/* Some outputs of one row, from the first on: four at a time, a quarter of them apart, so that sums need not wait for
   each other and each quarter is read in order. */
INLINE void far_outputs(const Matrix *m, int kind, const float *x, long first, long count, float *y) {
    long gap = count / QUAD, inputs = m->inputs;
    for (long output = first; output < first + gap; output++) {
        const uint16_t *at = (const uint16_t *)m->runs->codes + output * inputs;
        Real sum[QUAD][PARTS];
        float sums[QUAD * LANES] __attribute__((aligned(64))), out[QUAD];
#define EACH_FAR _Pragma("GCC unroll 4") for (int n = 0; n < QUAD; n++)
        EACH_FAR EACH_PART sum[n][part] = r_all(0);
        for (long i = 0; i < inputs; i += LANES)
            EACH_PART {
                Real own = r_load(x + i + part * WIDTH);
                EACH_FAR sum[n][part] =
                    r_more(sum[n][part], plain_floats(at + n * gap * inputs + i + part * WIDTH, kind), own);
            }
        EACH_FAR EACH_PART r_store(sums + n * LANES + part * WIDTH, sum[n][part]);
        add_up(sums, out);
        EACH_FAR y[output + n * gap] = out[n] + (m->bias ? m->bias[output + n * gap] : 0);
#undef EACH_FAR
    }
}

static void one_row_of_floats(const Matrix *m, const float *x, long first, long count, float *y) {
    if (m->runs->scales.kind == HALVES) far_outputs(m, HALVES, x, first, count, y);
    else far_outputs(m, BRAINS, x, first, count, y);
}

/* weights (QUAD, PANEL) of a panel. */
static void unpack_floats(const Panel *p, float *weights) {
    const uint16_t *at = panel_floats(p);
    int kind = p->run->scales.kind;
    for (int n = 0; n < QUAD; n++, at += (long)p->run->blocks * LANES, weights += PANEL)
        for (int i = 0; i < p->blocks * LANES; i += WIDTH) {
            Real found = kind == HALVES ? plain_floats(at + i, HALVES) : plain_floats(at + i, BRAINS);
            r_store(weights + i, found);
        }
}

#undef EACH_PART
#undef EACH_ROW

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
