/* Rows times a matrix of floats, of sixteen bits or lean.

   Sums of some rows and outputs are in registers, so that what is loaded of x is used for each output and what is read
   of the weights for each row. Rows of x lie side by side, sixteen numbers of each at a time. The outputs are far
   apart, each the first of a stretch: a processor that sees neighbours being read at the same time does not see what
   will be needed next. */

#ifndef EXLM_FLOAT_ROWS_H
#define EXLM_FLOAT_ROWS_H

#include <stdlib.h>

#include "narrow16.h"
#include "bf12.h"
#include "threadpool.h"
#include "simd16.h"

enum { OUT_TILE = 8, OUT4 = 4, MAX_BLOCK_M = 96, X_BLOCK_BYTES = 1 << 19 }; /* rows that are multiplied while weights are at hand */

/* Rows that are multiplied in one go, and outputs: their sums fit the registers. */
enum { F16_MR = VLEN == 16 ? 8 : VLEN == 8 ? 4 : 2 };
#define F16_ROWS(rows) ((rows) > 4 ? F16_MR : (rows)) /* 5 to 7 are filled up: code for each takes seconds to build */
#define F16_NR(rows) ((rows) == 1 ? OUT4 : VLEN < 16 ? 1 : (rows) > 4 ? 2 : OUT4)

#define EACH_LANE_REG _Pragma("GCC unroll 4") for (int reg = 0; reg < LANE_REGS; reg++)
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define EACH_KBLOCK _Pragma("GCC unroll 8") for (int kblock = 0; kblock < kblocks; kblock++)
#define EACH_OUTPUT _Pragma("GCC unroll 4") for (int n = 0; n < outputs; n++)

enum { F16_PREFETCH = 512, F16_NC_BYTES = 1 << 18 }; /* how far ahead weights are asked for; and how many all rows see in turn */
typedef f32v F16Sums[OUT4][F16_MR][LANE_REGS];

/* sums += rows of x · what was found in a slot of some outputs. */
INLINE void fma_products(const f32v *weights, const float *x, int reg, int rows, int outputs, F16Sums sum) {
    EACH_ROW {
        f32v own = f32_load(x + r * LANES + reg * VLEN);
        if (outputs > 1) KEEP_IN_REG(own);
        EACH_OUTPUT sum[n][r][reg] = f32_fma(sum[n][r][reg], weights[n], own);
    }
}

/* Asks for what will be needed soon of some outputs. */
INLINE void prefetch_f16(const uint8_t *at, long gap, int bytes, int outputs) {
    for (int line = 0; line < bytes; line += 64) EACH_OUTPUT __builtin_prefetch(at + n * gap + line + F16_PREFETCH);
}

/* The same for whole outputs, `gap` bytes apart; from slot to slot x goes on by `step`. */
INLINE void dot_f16(const uint8_t *at, long gap, int kind, int kblocks, const float *x, long step, int rows,
                       int outputs, F16Sums sum) {
#pragma GCC unroll 4
    for (int kblock = 0; kblock < kblocks; kblock++, at += 2 * LANES, x += step) {
        if (rows > 1 && kblock % 2 == 0) prefetch_f16(at, gap, 4 * LANES, outputs);
        EACH_LANE_REG {
            f32v weights[OUT4];
            EACH_OUTPUT weights[n] = load_narrow((const uint16_t *)(at + n * gap) + reg * VLEN, kind);
            fma_products(weights, x, reg, rows, outputs, sum);
        }
    }
}

INLINE void dot_bf12_block(const uint8_t *at, long gap, int kblocks, const float *x, long step, int rows, int outputs,
                           F16Sums sum) {
    if (rows > 1) prefetch_f16(at, gap, kblocks * LANES * BF12_BITS / 8, outputs);
    EACH_LANE_REG {
        i32v pairs[OUT4][BF12_KBLOCKS / 2];
        EACH_OUTPUT bf12_unpack_pairs(at + n * gap, kblocks, reg, pairs[n]);
        EACH_KBLOCK {
            f32v weights[OUT4];
            EACH_OUTPUT weights[n] = bf12_to_f32(pairs[n][kblock / 2], kblock);
            fma_products(weights, x + kblock * step, reg, rows, outputs, sum);
        }
    }
}

INLINE void dot_bf12(const uint8_t *at, long gap, int kblocks, const float *x, long step, int rows, int outputs,
                     F16Sums sum) {
    for (; kblocks >= BF12_KBLOCKS; kblocks -= BF12_KBLOCKS, at += BF12_BLOCK_BYTES, x += BF12_KBLOCKS * step)
        dot_bf12_block(at, gap, BF12_KBLOCKS, x, step, rows, outputs, sum);
    if (kblocks) dot_bf12_block(at, gap, BF12_KBLOCKS / 2, x, step, rows, outputs, sum);
}

/* What the sum over an output's codes becomes; x is a row's first slot. */
INLINE float finish_sum(const Matrix *m, long output, float sum, const float *x, long step) {
    const Bf12 *bf12 = m->bf12;
    if (bf12) {
        float rest = 0;
        for (int i = bf12->outlier_begin[output]; i < bf12->outlier_begin[output + 1]; i++)
            rest += x[bf12->inputs[i] / LANES * step + bf12->inputs[i] % LANES] * bf12->values[i];
        sum = sum * bf12->units[output] + rest * (1 / BF12_UP);
    }
    return sum + (m->bias ? m->bias[output] : 0);
}

/* y (real, outputs) for `count` outputs from the first on; behind the real rows there are some that fill up. */
INLINE void f16_microkernel(const Matrix *m, int kind, const float *x, int rows, int real_rows, long first, long count,
                                float *y) {
    int outputs = F16_NR(rows), many = outputs * rows, kblocks = m->inputs / LANES;
    long step = rows * LANES, bytes = (long)m->inputs * m->segments->bits / 8, spacing = count / outputs;
    for (long output = first; output < first + spacing; output++) {
        const uint8_t *at = m->segments->codes + output * bytes;
        float sums[(F16_MR + 1) * OUT4 * LANES] __attribute__((aligned(64))), out[(F16_MR + 1) * OUT4];
        F16Sums sum;
        EACH_OUTPUT EACH_ROW EACH_LANE_REG sum[n][r][reg] = f32_set1(0);
        if (kind == BF12) dot_bf12(at, spacing * bytes, kblocks, x, step, rows, outputs, sum);
        else dot_f16(at, spacing * bytes, kind, kblocks, x, step, rows, outputs, sum);
        EACH_OUTPUT EACH_ROW EACH_LANE_REG f32_store(sums + (n * rows + r) * LANES + reg * VLEN, sum[n][r][reg]);
        if (many % OUT4) memset(sums + many * LANES, 0, OUT4 * LANES * sizeof *sums);
        for (int i = 0; i < many; i += OUT4) sum16_x4(load16(sums + i * LANES), load16(sums + (i + 1) * LANES), load16(sums + (i + 2) * LANES),
                     load16(sums + (i + 3) * LANES), out + i);
        EACH_OUTPUT EACH_ROW {
            long own = output + n * spacing;
            if (r < real_rows) y[r * (long)m->outputs + own] = finish_sum(m, own, out[n * rows + r], x + r * LANES, step);
        }
    }
}

static void f16_rows(const Matrix *m, const float *x, int rows, long first, long count, float *y) {
    int kind = m->segments->scales.kind;
    for (int some; rows; rows -= some, x += (long)some * m->inputs, y += (long)some * m->outputs) {
        some = rows < F16_MR ? rows : F16_MR;
#define KIND(own, as) f16_microkernel(m, as, x, own, some, first, count, y)
#define OWN(own)                                                                                                 \
    case own:                                                                                                    \
        if (kind == BF12) KIND(own, BF12);                                                                       \
        else if (kind == F16) KIND(own, F16);                                                              \
        else KIND(own, BF16);                                                                                  \
        break;
        switch (F16_ROWS(some)) {
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

#undef EACH_LANE_REG
#undef EACH_ROW
#undef EACH_KBLOCK
#undef EACH_OUTPUT

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *x_packed, *y;
    int rows, per_chunk; /* each: tiles of a chunk */
} F16Gemm;

/* Rows that are multiplied in one go, side by side; raised for lean matrices. */
static void pack_x_chunk(void *job, int chunk) {
    const F16Gemm *p = job;
    long width = p->matrix->inputs, first = (long)chunk * F16_MR;
    long rows = p->rows - first < F16_MR ? p->rows - first : F16_MR;
    float up = p->matrix->bf12 ? BF12_UP : 1, *to = p->x_packed + first * width;
    for (long i = 0; i < width; i += LANES)
        for (long r = 0; r < F16_ROWS(rows); r++, to += LANES)
            store16(to, r < rows ? load16(p->x + (first + r) * width + i) * up : (f32x16){0});
}

/* A chunk's outputs: as many at a time as stay in the second cache until all rows have seen them. */
static void gemm_f16_chunk(void *job, int chunk) {
    const F16Gemm *p = job;
    const Matrix *m = p->matrix;
    long first = (long)chunk * p->per_chunk * OUT_TILE, stop = first + (long)p->per_chunk * OUT_TILE;
    long some = F16_NC_BYTES / ((long)m->inputs * m->segments->bits / 8) / OUT_TILE * OUT_TILE;
    if (stop > m->outputs) stop = m->outputs;
    if (some < OUT_TILE) some = OUT_TILE;
    if (p->rows <= F16_MR) some = stop - first;
    for (; first < stop; first += some)
        f16_rows(m, p->x_packed, p->rows, first, stop - first < some ? stop - first : some, p->y);
}

/* What exlm_product answers, for a matrix of floats. */
static int gemm_f16(const Matrix *m, const float *x, int rows, float *y, int threads) {
    int block_m = (int)(X_BLOCK_BYTES / sizeof(float)) / m->inputs / F16_MR * F16_MR, tiles = m->outputs / OUT_TILE;
    block_m = block_m < F16_MR ? F16_MR : block_m > MAX_BLOCK_M ? MAX_BLOCK_M : block_m;
    if (block_m > rows) block_m = rows;
    F16Gemm p = {.matrix = m, .x_packed = malloc((size_t)(block_m + F16_MR) * m->inputs * sizeof(float))};
    if (!p.x_packed) return 1;
    for (int row = 0; row < rows; row += block_m) {
        p.rows = rows - row < block_m ? rows - row : block_m;
        p.x = x + (long)row * m->inputs;
        p.y = y + (long)row * m->outputs;
        parallel_for(pack_x_chunk, &p, (p.rows + F16_MR - 1) / F16_MR, threads);
        int per_thread = (tiles + threads * 8 - 1) / (threads * 8);
        int least = 1 + (1 << 13) / (m->inputs * (p.rows + 3) / 4);
        p.per_chunk = per_thread > least ? per_thread : least;
        while ((tiles + p.per_chunk - 1) / p.per_chunk > MAX_CHUNKS) p.per_chunk *= 2;
        parallel_for(gemm_f16_chunk, &p, (tiles + p.per_chunk - 1) / p.per_chunk, threads);
    }
    free(p.x_packed);
    return 0;
}

#endif
