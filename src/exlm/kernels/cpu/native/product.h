/* Rows times a tile of 16 outputs.

   Every row is computed in the same way whatever its company: exact whole sums within a block, then one float
   operation after the other. */

#ifndef EXLM_PRODUCT_H
#define EXLM_PRODUCT_H

#include "lanes.h"
#include "matrix.h"

#define INLINE static inline __attribute__((always_inline))
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

enum { LANES = TILE / VECTORS };

/* Inputs 2 · pair and 2 · pair + 1 of each output as two 16-bit numbers. */
INLINE Whole pair_of(const int32_t *words, int bits, int pair, int v) {
    const int32_t *at = words + v * LANES;
    if (bits == 8)
        return w_and(w_right(w_load(at + pair / 2 * TILE), pair % 2 * 8), w_all(0x00ff00ff));
    Whole out = w_all(0);
    int place = 0;
#pragma GCC unroll 3
    for (int plane = 4; plane; plane >>= 1) {
        if (!(bits & plane)) continue;
        int each = 16 / plane, shift = pair % each * plane, mask = ((1 << plane) - 1) * 0x00010001 << place;
        Whole word = w_load(at + pair / each * TILE);
        word = shift >= place ? w_right(word, shift - place) : w_left(word, place - shift);
        out = w_or(out, w_and(word, w_all(mask)));
        at += plane * TILE;
        place += plane;
    }
    return out;
}

INLINE Real factors(const void *table, long at, int wide, int v) {
    at += v * LANES;
    return wide ? r_load((const float *)table + at) : r_halves((const uint16_t *)table + at);
}

/* y += a group's factor times its sum, less what its zero point and minimum take away. */
INLINE void settle(const Run *run, long at, int v, int rows, const float *const *sums, int group,
                         Real *total, Real *y) {
    Real scale = factors(run->scales, at, run->wide, v);
    if (run->zeros) {
        Real zero = r_bytes(run->zeros + at + v * LANES);
        EACH_ROW total[r] = r_less(total[r], zero, r_all(sums[r][group]));
    }
    EACH_ROW y[r] = r_more(y[r], scale, total[r]);
    if (run->minima) {
        Real minimum = factors(run->minima, at, run->wide, v);
        EACH_ROW y[r] = r_less(y[r], minimum, r_all(sums[r][group]));
    }
}

/* The whole sums of one block, pairs `from` to `to`. Few rows are summed in several strands, which a processor
   does side by side; whole sums do not mind. */
INLINE void gather(const int32_t *words, int bits, int v, int rows, const int16_t *const *x,
                   const int32_t *const *start, int half, int from, int to, Whole *sum) {
    enum { MOST_STRANDS = 4 };
    int strands = rows == 1 ? 4 : rows == 2 ? 2 : 1;
    Whole strand[MOST_ROWS * MOST_STRANDS];
    EACH_ROW {
        strand[r] = w_all(start[r][half]);
#pragma GCC unroll 4
        for (int s = 1; s < strands; s++) strand[s * rows + r] = w_all(0);
    }
#pragma GCC unroll 16
    for (int pair = from; pair < to; pair++) {
        Whole codes = pair_of(words, bits, pair, v), *own = strand + pair % strands * rows;
        EACH_ROW own[r] = w_dot(own[r], codes, x[r] + 2 * pair);
    }
    EACH_ROW {
        sum[r] = strand[r];
#pragma GCC unroll 4
        for (int s = 1; s < strands; s++) sum[r] = w_add(sum[r], strand[s * rows + r]);
    }
}

INLINE void run_tile(const Run *run, int bits, int fine, int tile, int v, int rows, const Rows *x,
                           const Matrix *m, int row, Real *y) {
    const int16_t *whole[MOST_ROWS];
    const int32_t *start[MOST_ROWS];
    const float *scale[MOST_ROWS], *sums[MOST_ROWS];
    EACH_ROW {
        whole[r] = x->whole + ((long)(row + r) * m->blocks + run->first_block) * BLOCK;
        start[r] = x->start + ((long)(row + r) * m->blocks + run->first_block) * 2;
        scale[r] = x->scale + (long)(row + r) * m->blocks + run->first_block;
        sums[r] = x->sum + (long)(row + r) * m->groups + run->first_group;
    }
    const int32_t *words = run->codes + (long)tile * run->blocks * bits * TILE;
    long at = (long)tile * run->groups * TILE;
    Whole sum[MOST_ROWS];
    Real total[MOST_ROWS];
    int block = 0;
    for (int group = 0; group < run->groups; group++, at += TILE) {
        int span = fine ? 1 : run->spans[group];
        EACH_ROW total[r] = r_all(0);
        for (int i = 0; i < span; i++) {
            int half = fine ? group & 1 : 0;
            if (!fine) gather(words, bits, v, rows, whole, start, 0, 0, PAIRS, sum);
            else if (!half) gather(words, bits, v, rows, whole, start, 0, 0, PAIRS / 2, sum);
            else gather(words, bits, v, rows, whole, start, 1, PAIRS / 2, PAIRS, sum);
            EACH_ROW total[r] = r_more(total[r], r_from(sum[r]), r_all(*scale[r]));
            if (fine && !half) continue;
            words += bits * TILE;
            block++;
            EACH_ROW whole[r] += BLOCK, start[r] += 2, scale[r]++;
        }
        settle(run, at, v, rows, sums, group, total, y);
    }
}

#define WIDTH(b)                                                                                               \
    case b:                                                                                                    \
        if (run->fine) run_tile(run, b, 1, tile, v, rows, x, m, row, y);                                 \
        else run_tile(run, b, 0, tile, v, rows, x, m, row, y);                                           \
        break;

INLINE void some_rows(const Matrix *m, int tile, int rows, const Rows *x, int row, float *out) {
    for (int v = 0; v < VECTORS; v++) {
        Real y[MOST_ROWS];
        EACH_ROW y[r] = r_all(0);
        for (int n = 0; n < m->count; n++) {
            const Run *run = m->runs + n;
            switch (run->bits) { WIDTH(2) WIDTH(3) WIDTH(4) WIDTH(5) WIDTH(6) WIDTH(7) WIDTH(8) }
        }
        EACH_ROW r_store(out + r * TILE + v * LANES, y[r]);
    }
}

#define ROWS(n)                                                                                                \
    static void rows_##n(const Matrix *m, int tile, const Rows *x, int row, float *out) {                 \
        some_rows(m, tile, n, x, row, out);                                                              \
    }
ROWS(1)
ROWS(2)
ROWS(4)
#if defined(__AVX512VNNI__)
ROWS(8)
#endif

/* out (rows, 16) of one tile. */
static void product(const Matrix *m, int tile, int rows, const Rows *x, int row, float *out) {
    while (rows) {
        int n = rows >= MOST_ROWS ? MOST_ROWS : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
#if defined(__AVX512VNNI__)
        if (n == 8) rows_8(m, tile, x, row, out);
        else
#endif
        if (n == 4) rows_4(m, tile, x, row, out);
        else if (n == 2) rows_2(m, tile, x, row, out);
        else rows_1(m, tile, x, row, out);
        row += n, rows -= n, out += n * TILE;
    }
}

#endif
