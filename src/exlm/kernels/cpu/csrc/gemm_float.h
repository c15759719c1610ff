/* Products with float matrices: float16 and bfloat16 as files have them, (outputs, inputs), and BF12 (bf12.h). Computed
   in float32 from the stored numbers.

   x is packed for a microkernel of `rows` rows, so that one pointer walks through it (pack_x_chunk):

     [ row 0: k 0..15 | row 1: k 0..15 | ... ][ row 0: k 16..31 | row 1: k 16..31 | ... ] ...

   The sums of a few rows and outputs stay in registers: each load of x serves all these outputs, each load of weights
   all these rows. An output of a row has sixteen sums over k in order, added up in one fixed order, so its bits depend
   on nothing else. The outputs of a microkernel are far apart, each the start of its own stream: a hardware prefetcher
   that sees neighbouring lines read together does not predict what comes next. */

#ifndef EXLM_GEMM_FLOAT_H
#define EXLM_GEMM_FLOAT_H

#include <stdlib.h>

#include "bf12.h"
#include "matrix.h"
#include "simd.h"
#include "threadpool.h"

/* MR rows and NR outputs fit the registers. 5 to 7 rows are padded to 8: each count would take seconds to compile. */
enum { FLOAT_MR = VLEN == 16 ? 8 : VLEN == 8 ? 4 : 2, MAX_NR = 4 };
#define FLOAT_ROWS(rows) ((rows) > 4 ? FLOAT_MR : (rows))
#define FLOAT_NR(rows) ((rows) == 1 ? MAX_NR : VLEN < 16 ? 1 : (rows) > 4 ? 2 : MAX_NR)
typedef f32v FloatSums[MAX_NR][FLOAT_MR][LANE_REGS];

enum { FLOAT_TILE_N = 8 };                          /* outputs are a multiple of it */
enum { MAX_BLOCK_M = 96, X_BLOCK_BYTES = 1 << 19 }; /* rows of x that are multiplied while weights are cached */
enum { FLOAT_PREFETCH_BYTES = 512, FLOAT_NC_BYTES = 1 << 18 }; /* bytes ahead; bytes of weights that stay in L2 */

#define EACH_KBLOCK(kblock) _Pragma("GCC unroll 8") for (int kblock = 0; kblock < kblocks; kblock++)
#define EACH_OUTPUT(n) _Pragma("GCC unroll 4") for (int n = 0; n < outputs; n++)

INLINE f32v load_f16_or_bf16(const uint16_t *p, int dtype) {
    return dtype == F16 ? f32_load_f16(p) : (f32v)i32_shl(i32_load_u16(p), 16);
}

/* sum += x (rows, 16) times weights (outputs), both one register of a kblock. */
INLINE void fma_products(const f32v *weights, const float *x, int reg, int rows, int outputs, FloatSums sum) {
    EACH_ROW(r) {
        f32v x_reg = f32_load(x + r * LANES + reg * VLEN);
        if (outputs > 1) KEEP_IN_REG(x_reg);
        EACH_OUTPUT(n) sum[n][r][reg] = f32_fma(sum[n][r][reg], weights[n], x_reg);
    }
}

INLINE void prefetch_floats(const uint8_t *at, long spacing, int bytes, int outputs) {
    for (int line = 0; line < bytes; line += 64)
        EACH_OUTPUT(n) __builtin_prefetch(at + n * spacing + line + FLOAT_PREFETCH_BYTES);
}

/* Whole outputs, `spacing` bytes apart; x goes on by `step` from one kblock to the next. */
INLINE void dot_16bit(const uint8_t *at, long spacing, int dtype, int kblocks, const float *x, long step, int rows,
                      int outputs, FloatSums sum) {
#pragma GCC unroll 4
    for (int kblock = 0; kblock < kblocks; kblock++, at += 2 * LANES, x += step) {
        if (rows > 1 && kblock % 2 == 0) prefetch_floats(at, spacing, 4 * LANES, outputs);
        EACH_LANE_REG(reg) {
            f32v weights[MAX_NR];
            EACH_OUTPUT(n) {
                const uint16_t *numbers = (const uint16_t *)(at + n * spacing);
                weights[n] = load_f16_or_bf16(numbers + reg * VLEN, dtype);
            }
            fma_products(weights, x, reg, rows, outputs, sum);
        }
    }
}

INLINE void dot_bf12_block(const uint8_t *at, long spacing, int kblocks, const float *x, long step, int rows,
                           int outputs, FloatSums sum) {
    if (rows > 1) prefetch_floats(at, spacing, kblocks * LANES * BF12_BITS / 8, outputs);
    EACH_LANE_REG(reg) {
        i32v pairs[MAX_NR][BF12_KBLOCKS / 2];
        EACH_OUTPUT(n) bf12_unpack_pairs(at + n * spacing, kblocks, reg, pairs[n]);
        EACH_KBLOCK(kblock) {
            f32v weights[MAX_NR];
            EACH_OUTPUT(n) weights[n] = bf12_to_f32(pairs[n][kblock / 2], kblock);
            fma_products(weights, x + kblock * step, reg, rows, outputs, sum);
        }
    }
}

INLINE void dot_bf12(const uint8_t *at, long spacing, int kblocks, const float *x, long step, int rows, int outputs,
                     FloatSums sum) {
    for (; kblocks >= BF12_KBLOCKS; kblocks -= BF12_KBLOCKS, at += BF12_BLOCK_BYTES, x += BF12_KBLOCKS * step)
        dot_bf12_block(at, spacing, BF12_KBLOCKS, x, step, rows, outputs, sum);
    if (kblocks) dot_bf12_block(at, spacing, BF12_KBLOCKS / 2, x, step, rows, outputs, sum);
}

/* An output's sum with its BF12 unit and outliers, and the bias. x is a row's first kblock. */
INLINE float finish_sum(const Matrix *m, long output, float sum, const float *x, long step) {
    const Bf12 *bf12 = m->bf12;
    if (bf12) {
        float outliers = 0;
        for (int i = bf12->outlier_begin[output]; i < bf12->outlier_begin[output + 1]; i++)
            outliers += x[bf12->inputs[i] / LANES * step + bf12->inputs[i] % LANES] * bf12->values[i];
        sum = sum * bf12->units[output] + outliers * (1 / BF12_X_SCALE);
    }
    return sum + (m->bias ? m->bias[output] : 0);
}

/* y (real_rows, outputs) for `count` outputs from `first` on; rows from real_rows to rows are padding. */
INLINE void float_microkernel(const Matrix *m, int dtype, const float *x, int rows, int real_rows, long first,
                              long count, float *y) {
    int outputs = FLOAT_NR(rows), sum_count = outputs * rows, kblocks = m->inputs / LANES;
    long step = rows * LANES, bytes = (long)m->inputs * m->segments->bits / 8, stride = count / outputs;
    for (long output = first; output < first + stride; output++) {
        const uint8_t *at = m->segments->codes + output * bytes;
        float sums[(FLOAT_MR + 1) * MAX_NR * LANES] __attribute__((aligned(64))), out[(FLOAT_MR + 1) * MAX_NR];
        FloatSums sum;
        EACH_OUTPUT(n)
            EACH_ROW(r)
                EACH_LANE_REG(reg) sum[n][r][reg] = f32_set1(0);
        if (dtype == BF12)
            dot_bf12(at, stride * bytes, kblocks, x, step, rows, outputs, sum);
        else
            dot_16bit(at, stride * bytes, dtype, kblocks, x, step, rows, outputs, sum);
        EACH_OUTPUT(n)
            EACH_ROW(r)
                EACH_LANE_REG(reg) f32_store(sums + (n * rows + r) * LANES + reg * VLEN, sum[n][r][reg]);
        if (sum_count % 4) memset(sums + sum_count * LANES, 0, 4 * LANES * sizeof *sums);
        for (int i = 0; i < sum_count; i += 4) {
            const float *four = sums + i * LANES;
            sum16_x4(load16(four), load16(four + LANES), load16(four + 2 * LANES), load16(four + 3 * LANES), out + i);
        }
        EACH_OUTPUT(n)
            EACH_ROW(r) {
                long column = output + n * stride;
                if (r < real_rows)
                    y[r * (long)m->outputs + column] = finish_sum(m, column, out[n * rows + r], x + r * LANES, step);
            }
    }
}

/* One function for each number of rows. */
typedef void FloatMicrokernel(const Matrix *, const float *, int, long, long, float *);
#define ONE(rows)                                                                                              \
    static void float_microkernel_##rows(const Matrix *m, const float *x, int real_rows, long first,          \
                                         long count, float *y) {                                               \
        if (m->segments->scales.dtype == BF12)                                                                 \
            float_microkernel(m, BF12, x, rows, real_rows, first, count, y);                                   \
        else if (m->segments->scales.dtype == F16)                                                             \
            float_microkernel(m, F16, x, rows, real_rows, first, count, y);                                    \
        else                                                                                                   \
            float_microkernel(m, BF16, x, rows, real_rows, first, count, y);                                   \
    }
ONE(1)
ONE(2)
#if defined(__AVX2__)
ONE(3)
ONE(4)
#endif
#if defined(__AVX512F__)
ONE(8)
#endif
#undef ONE

static FloatMicrokernel *const float_microkernels[FLOAT_MR + 1] = {
    [1] = float_microkernel_1, [2] = float_microkernel_2,
#if defined(__AVX2__)
    [3] = float_microkernel_3, [4] = float_microkernel_4,
#endif
#if defined(__AVX512F__)
    [8] = float_microkernel_8,
#endif
};

static void float_rows(const Matrix *m, const float *x, int rows, long first, long count, float *y) {
    for (int block; rows; rows -= block, x += (long)block * m->inputs, y += (long)block * m->outputs) {
        block = rows < FLOAT_MR ? rows : FLOAT_MR;
        float_microkernels[FLOAT_ROWS(block)](m, x, block, first, count, y);
    }
}

#undef EACH_KBLOCK
#undef EACH_OUTPUT

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *x_packed, *y;
    int rows, per_chunk; /* per_chunk: tiles of outputs */
} FloatGemm;

/* Interleaves the rows of a microkernel kblock by kblock; for BF12, times BF12_X_SCALE. */
static void pack_x_chunk(void *job, int chunk) {
    const FloatGemm *p = job;
    long width = p->matrix->inputs, first = (long)chunk * FLOAT_MR;
    long rows = p->rows - first < FLOAT_MR ? p->rows - first : FLOAT_MR;
    float x_scale = p->matrix->bf12 ? BF12_X_SCALE : 1, *to = p->x_packed + first * width;
    for (long i = 0; i < width; i += LANES)
        for (long r = 0; r < FLOAT_ROWS(rows); r++, to += LANES)
            store16(to, r < rows ? load16(p->x + (first + r) * width + i) * x_scale : (f32x16){0});
}

/* A chunk's outputs in blocks that stay in L2 until all rows have been multiplied. */
static void gemm_float_chunk(void *job, int chunk) {
    const FloatGemm *p = job;
    const Matrix *m = p->matrix;
    long first = (long)chunk * p->per_chunk * FLOAT_TILE_N, stop = first + (long)p->per_chunk * FLOAT_TILE_N;
    long block_n = FLOAT_NC_BYTES / ((long)m->inputs * m->segments->bits / 8) / FLOAT_TILE_N * FLOAT_TILE_N;
    if (stop > m->outputs) stop = m->outputs;
    if (block_n < FLOAT_TILE_N) block_n = FLOAT_TILE_N;
    if (p->rows <= FLOAT_MR) block_n = stop - first;
    for (; first < stop; first += block_n)
        float_rows(m, p->x_packed, p->rows, first, stop - first < block_n ? stop - first : block_n, p->y);
}

/* y (rows, outputs) = x (rows, inputs) times a float matrix + bias. Returns 0, or 1 if there is no memory. */
static int gemm_float(const Matrix *m, const float *x, int rows, float *y, int threads) {
    int tiles = m->outputs / FLOAT_TILE_N;
    int block_m = (int)(X_BLOCK_BYTES / sizeof(float)) / m->inputs / FLOAT_MR * FLOAT_MR;
    block_m = block_m < FLOAT_MR ? FLOAT_MR : block_m > MAX_BLOCK_M ? MAX_BLOCK_M : block_m;
    if (block_m > rows) block_m = rows;
    FloatGemm p = {.matrix = m, .x_packed = malloc((size_t)(block_m + FLOAT_MR) * m->inputs * sizeof(float))};
    if (!p.x_packed) return 1;
    for (int row = 0; row < rows; row += block_m) {
        p.rows = rows - row < block_m ? rows - row : block_m;
        p.x = x + (long)row * m->inputs;
        p.y = y + (long)row * m->outputs;
        parallel_for(pack_x_chunk, &p, (p.rows + FLOAT_MR - 1) / FLOAT_MR, threads);
        int per_thread = (tiles + threads * 8 - 1) / (threads * 8);
        int min_tiles = 1 + (1 << 13) / (m->inputs * (p.rows + 3) / 4);
        p.per_chunk = per_thread > min_tiles ? per_thread : min_tiles;
        while ((tiles + p.per_chunk - 1) / p.per_chunk > MAX_CHUNKS) p.per_chunk *= 2;
        parallel_for(gemm_float_chunk, &p, (tiles + p.per_chunk - 1) / p.per_chunk, threads);
    }
    free(p.x_packed);
    return 0;
}

/* out (inputs) = the numbers of one output of a 16-bit matrix. */
static void column_16bit(const Matrix *m, long output, float *out) {
    const uint16_t *numbers = (const uint16_t *)m->segments->codes + output * m->inputs;
    for (int i = 0; i < m->inputs; i += VLEN) {
        f32v values = load_f16_or_bf16(numbers + i, m->segments->scales.dtype);
        f32_store(out + i, values);
    }
}

/* Casting float32 matrices to 16 bits where that changes no number. */

typedef struct {
    const float *from;
    uint16_t *to;
    long count;
    int dtype;
    _Atomic int lossy;
} CastArgs;

enum { CAST_CHUNK = 1 << 16 };

static void cast_chunk(void *job, int chunk) {
    CastArgs *p = job;
    long first = (long)chunk * CAST_CHUNK, stop = first + CAST_CHUNK < p->count ? first + CAST_CHUNK : p->count;
    i32v lost = i32_set1(0);
    uint32_t lanes[VLEN];
    int any = 0;
    if (p->lossy) return;
    for (long i = first; i < stop; i += VLEN) {
        f32v numbers = f32_load(p->from + i);
        i32v bits = (i32v)numbers;
        if (p->dtype == F16) {
            lost = i32_or(lost, bits ^ (i32v)f32_round_f16(numbers));
            f32_store_f16(p->to + i, numbers);
        } else {
            lost = i32_or(lost, i32_and(bits, i32_set1(0xffff)));
            memcpy(lanes, &bits, sizeof bits);
            for (int n = 0; n < VLEN; n++) p->to[i + n] = (uint16_t)(lanes[n] >> 16);
        }
    }
    memcpy(lanes, &lost, sizeof lost);
    for (int n = 0; n < VLEN; n++) any |= lanes[n] != 0;
    if (any) p->lossy = 1;
}

/* `count` floats, a multiple of 16, as float16 or bfloat16. Returns 0, or 1 if that would change one. */
EXPORT int exlm_cast_16bit(const float *from, long count, int dtype, uint16_t *to, int threads) {
    CastArgs job = {.from = from, .to = to, .count = count, .dtype = dtype};
    parallel_for(cast_chunk, &job, (int)((count + CAST_CHUNK - 1) / CAST_CHUNK), threads);
    return job.lossy;
}

#endif
