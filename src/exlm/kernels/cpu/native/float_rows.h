/* Rows times a matrix of floats, of sixteen bits or lean.

   Sums of some rows and outputs are in registers, so that what is loaded of x is used for each output and what is read
   of the weights for each row. Rows of x lie side by side, sixteen numbers of each at a time. The outputs are far
   apart, each the first of a stretch: a processor that sees neighbours being read at the same time does not see what
   will be needed next. */

#ifndef EXLM_FLOAT_ROWS_H
#define EXLM_FLOAT_ROWS_H

#include <stdlib.h>

#include "floats.h"
#include "lean.h"
#include "pool.h"
#include "product.h"

/* Rows that are multiplied in one go, and outputs: their sums fit the registers. */
enum { ROWS_AT_ONCE = WIDTH == 16 ? 8 : WIDTH == 8 ? 4 : 2 };
#define TAKEN(rows) ((rows) > 4 ? ROWS_AT_ONCE : (rows)) /* 5 to 7 are filled up: code for each takes seconds to build */
#define BESIDE(rows) ((rows) == 1 ? QUAD : WIDTH < 16 ? 1 : (rows) > 4 ? 2 : QUAD)

#define EACH_PART _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define EACH_SLOT _Pragma("GCC unroll 8") for (int slot = 0; slot < slots; slot++)
#define EACH_OUTPUT _Pragma("GCC unroll 4") for (int n = 0; n < outputs; n++)

enum { SOON = 512, SEEN_BYTES = 1 << 18 }; /* how far ahead weights are asked for; and how many all rows see in turn */
typedef Real Sums[QUAD][ROWS_AT_ONCE][PARTS];

/* sums += rows of x · what was found in a slot of some outputs. */
INLINE void add_products(const Real *found, const float *x, int part, int rows, int outputs, Sums sum) {
    EACH_ROW {
        Real own = r_load(x + r * LANES + part * WIDTH);
        if (outputs > 1) HOLD(own);
        EACH_OUTPUT sum[n][r][part] = r_more(sum[n][r][part], found[n], own);
    }
}

/* Asks for what will be needed soon of some outputs. */
INLINE void ask_for_floats(const uint8_t *at, long gap, int bytes, int outputs) {
    for (int line = 0; line < bytes; line += 64) EACH_OUTPUT __builtin_prefetch(at + n * gap + line + SOON);
}

/* The same for whole outputs, `gap` bytes apart; from slot to slot x goes on by `step`. */
INLINE void add_floats(const uint8_t *at, long gap, int kind, int slots, const float *x, long step, int rows,
                       int outputs, Sums sum) {
#pragma GCC unroll 4
    for (int slot = 0; slot < slots; slot++, at += 2 * LANES, x += step) {
        if (rows > 1 && slot % 2 == 0) ask_for_floats(at, gap, 4 * LANES, outputs);
        EACH_PART {
            Real found[QUAD];
            EACH_OUTPUT found[n] = plain_floats((const uint16_t *)(at + n * gap) + part * WIDTH, kind);
            add_products(found, x, part, rows, outputs, sum);
        }
    }
}

INLINE void add_lean_block(const uint8_t *at, long gap, int slots, const float *x, long step, int rows, int outputs,
                           Sums sum) {
    if (rows > 1) ask_for_floats(at, gap, slots * LANES * LEAN_BITS / 8, outputs);
    EACH_PART {
        Whole pairs[QUAD][LEAN_SLOTS / 2];
        EACH_OUTPUT lean_pairs(at + n * gap, slots, part, pairs[n]);
        EACH_SLOT {
            Real found[QUAD];
            EACH_OUTPUT found[n] = lean_floats(pairs[n][slot / 2], slot);
            add_products(found, x + slot * step, part, rows, outputs, sum);
        }
    }
}

INLINE void add_lean(const uint8_t *at, long gap, int slots, const float *x, long step, int rows, int outputs,
                     Sums sum) {
    for (; slots >= LEAN_SLOTS; slots -= LEAN_SLOTS, at += LEAN_BYTES, x += LEAN_SLOTS * step)
        add_lean_block(at, gap, LEAN_SLOTS, x, step, rows, outputs, sum);
    if (slots) add_lean_block(at, gap, LEAN_SLOTS / 2, x, step, rows, outputs, sum);
}

/* What the sum over an output's codes becomes; x is a row's first slot. */
INLINE float finished(const Matrix *m, long output, float sum, const float *x, long step) {
    const Lean *lean = m->lean;
    if (lean) {
        float rest = 0;
        for (int i = lean->begins[output]; i < lean->begins[output + 1]; i++)
            rest += x[lean->inputs[i] / LANES * step + lean->inputs[i] % LANES] * lean->values[i];
        sum = sum * lean->units[output] + rest * (1 / LEAN_RAISED);
    }
    return sum + (m->bias ? m->bias[output] : 0);
}

/* y (real, outputs) for `count` outputs from the first on; behind the real rows there are some that fill up. */
INLINE void some_rows_of_floats(const Matrix *m, int kind, const float *x, int rows, int real, long first, long count,
                                float *y) {
    int outputs = BESIDE(rows), many = outputs * rows, slots = m->inputs / LANES;
    long step = rows * LANES, bytes = (long)m->inputs * m->runs->bits / 8, apart = count / outputs;
    for (long output = first; output < first + apart; output++) {
        const uint8_t *at = m->runs->codes + output * bytes;
        float sums[(ROWS_AT_ONCE + 1) * QUAD * LANES] __attribute__((aligned(64))), out[(ROWS_AT_ONCE + 1) * QUAD];
        Sums sum;
        EACH_OUTPUT EACH_ROW EACH_PART sum[n][r][part] = r_all(0);
        if (kind == LEAN) add_lean(at, apart * bytes, slots, x, step, rows, outputs, sum);
        else add_floats(at, apart * bytes, kind, slots, x, step, rows, outputs, sum);
        EACH_OUTPUT EACH_ROW EACH_PART r_store(sums + (n * rows + r) * LANES + part * WIDTH, sum[n][r][part]);
        if (many % QUAD) memset(sums + many * LANES, 0, QUAD * LANES * sizeof *sums);
        for (int i = 0; i < many; i += QUAD) add_up(sums + i * LANES, out + i);
        EACH_OUTPUT EACH_ROW {
            long own = output + n * apart;
            if (r < real) y[r * (long)m->outputs + own] = finished(m, own, out[n * rows + r], x + r * LANES, step);
        }
    }
}

static void rows_of_stretch(const Matrix *m, const float *x, int rows, long first, long count, float *y) {
    int kind = m->runs->scales.kind;
    for (int some; rows; rows -= some, x += (long)some * m->inputs, y += (long)some * m->outputs) {
        some = rows < ROWS_AT_ONCE ? rows : ROWS_AT_ONCE;
#define KIND(own, as) some_rows_of_floats(m, as, x, own, some, first, count, y)
#define OWN(own)                                                                                                 \
    case own:                                                                                                    \
        if (kind == LEAN) KIND(own, LEAN);                                                                       \
        else if (kind == HALVES) KIND(own, HALVES);                                                              \
        else KIND(own, BRAINS);                                                                                  \
        break;
        switch (TAKEN(some)) {
            OWN(1) OWN(2)
#if defined(__AVX2__)
            OWN(3) OWN(4)
#endif
#if defined(__AVX512F__)
            OWN(8)
#endif
        }
#undef OWN
#undef KIND
    }
}

#undef EACH_PART
#undef EACH_ROW
#undef EACH_SLOT
#undef EACH_OUTPUT

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *placed, *y;
    int rows, each; /* each: tiles of a chunk */
} FloatProduct;

/* Rows that are multiplied in one go, side by side; raised for lean matrices. */
static void place_some(void *job, int chunk) {
    const FloatProduct *p = job;
    long width = p->matrix->inputs, first = (long)chunk * ROWS_AT_ONCE;
    long rows = p->rows - first < ROWS_AT_ONCE ? p->rows - first : ROWS_AT_ONCE;
    float raised = p->matrix->lean ? LEAN_RAISED : 1, *to = p->placed + first * width;
    for (long i = 0; i < width; i += LANES)
        for (long r = 0; r < TAKEN(rows); r++, to += LANES)
            put(to, r < rows ? get(p->x + (first + r) * width + i) * raised : (Sixteen){0});
}

/* A chunk's outputs: as many at a time as stay in the second cache until all rows have seen them. */
static void rows_of_chunk(void *job, int chunk) {
    const FloatProduct *p = job;
    const Matrix *m = p->matrix;
    long first = (long)chunk * p->each * TILE, stop = first + (long)p->each * TILE;
    long some = SEEN_BYTES / ((long)m->inputs * m->runs->bits / 8) / TILE * TILE;
    if (stop > m->outputs) stop = m->outputs;
    if (some < TILE) some = TILE;
    if (p->rows <= ROWS_AT_ONCE) some = stop - first;
    for (; first < stop; first += some)
        rows_of_stretch(m, p->placed, p->rows, first, stop - first < some ? stop - first : some, p->y);
}

/* What exlm_product answers, for a matrix of floats. */
static int float_products(const Matrix *m, const float *x, int rows, float *y, int threads) {
    int strip = (int)(STRIP_BYTES / sizeof(float)) / m->inputs / ROWS_AT_ONCE * ROWS_AT_ONCE, tiles = m->outputs / TILE;
    strip = strip < ROWS_AT_ONCE ? ROWS_AT_ONCE : strip > MOST_STRIP ? MOST_STRIP : strip;
    if (strip > rows) strip = rows;
    FloatProduct p = {.matrix = m, .placed = malloc((size_t)(strip + ROWS_AT_ONCE) * m->inputs * sizeof(float))};
    if (!p.placed) return 1;
    for (int row = 0; row < rows; row += strip) {
        p.rows = rows - row < strip ? rows - row : strip;
        p.x = x + (long)row * m->inputs;
        p.y = y + (long)row * m->outputs;
        share(place_some, &p, (p.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, threads);
        int fair = (tiles + threads * 8 - 1) / (threads * 8);
        int least = 1 + (1 << 13) / (m->inputs * (p.rows + 3) / 4);
        p.each = fair > least ? fair : least;
        while ((tiles + p.each - 1) / p.each > MOST_CHUNKS) p.each *= 2;
        share(rows_of_chunk, &p, (tiles + p.each - 1) / p.each, threads);
    }
    free(p.placed);
    return 0;
}

#endif
