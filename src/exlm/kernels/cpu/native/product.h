/* Rows times a tile of outputs, from unpacked weights.

   A row and an output have sixteen sums, one for each lane, over the places in order; at the end they are added
   up in one fixed order. Nothing else decides the bits: not the other rows, the other outputs, or the threads. */

#ifndef EXLM_PRODUCT_H
#define EXLM_PRODUCT_H

#include "lanes.h"
#include "vectors.h"

enum { TILE = 8, MOST_STRIP = 96, STRIP_BYTES = 1 << 19 }; /* rows that are multiplied while weights are at hand */

/* sums (rows, TILE, 16) += x · weights (TILE, PANEL), `slots` of them. */
INLINE void some_rows(const float *weights, const float *x, long places, int slots, int rows, float *sums) {
    int outputs = OUTPUTS(rows);
    for (int o = 0; o < TILE; o += outputs) {
        Real sum[8][MOST_ROWS][PARTS];
#define EACH                                                                                                     \
    _Pragma("GCC unroll 8") for (int n = 0; n < outputs; n++)                                                    \
        _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)                                                   \
            _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)
        EACH sum[n][r][part] = r_load(sums + (r * TILE + o + n) * LANES + part * WIDTH);
        const float *w = weights + o * PANEL;
        for (int i = 0; i < slots * LANES; i += LANES) {
            Real own[MOST_ROWS][PARTS];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) own[r][part] = r_load(x + r * places + i + part * WIDTH);
#pragma GCC unroll 8
            for (int n = 0; n < outputs; n++)
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) {
                    Real weight = r_load(w + n * PANEL + i + part * WIDTH);
                    if (rows > 1) HOLD(weight);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++) sum[n][r][part] = r_more(sum[n][r][part], weight, own[r][part]);
                }
        }
        EACH r_store(sums + (r * TILE + o + n) * LANES + part * WIDTH, sum[n][r][part]);
#undef EACH
    }
}

static void multiply(const float *weights, const float *x, long places, int slots, int rows, float *sums) {
    while (rows >= 3) {
        some_rows(weights, x, places, slots, 3, sums);
        rows -= 3, x += 3 * places, sums += 3 * TILE * LANES;
    }
    if (rows == 2) some_rows(weights, x, places, slots, 2, sums);
    if (rows == 1) some_rows(weights, x, places, slots, 1, sums);
}

/* The sixteen sums of each output of a quad, added up: halves, quarters, then the last four crosswise. */
INLINE void add_up(const float *sums, float *out) {
    four_totals(get(sums), get(sums + LANES), get(sums + 2 * LANES), get(sums + 3 * LANES), out);
}

#endif
