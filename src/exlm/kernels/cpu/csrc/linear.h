/* Packed matrices on a processor: products and single columns. Plain C, called through ctypes.

   One library for each instruction set, from the same source. AMX is never used: virtual machines announce it
   without letting programs use it. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#include "attn_decode.h"
#include "gemm_int8.h"
#include "gemm_f16.h"
#include "narrow16.h"
#include "packed.h"
#include "threadpool.h"
#include "gemm_f32.h"
#include "repack_quads.h"
#include "repack_panels.h"
#include "repack_bf12.h"
#include "norm_act.h"
#include "dequant_quads.h"

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *gathered, *y;
    int rows, tiles, per_chunk; /* `each`: tiles, or rows, of a chunk */
} QuadGemm;

/* Rows of x, put where the matrix's codes stand. */
static void gather_x_chunk(void *job, int chunk) {
    const QuadGemm *p = job;
    const Matrix *m = p->matrix;
    int last = (chunk + 1) * p->per_chunk;
    for (long row = chunk * p->per_chunk; row < last && row < p->rows; row++) {
        const float *from = p->x + row * m->inputs;
        float *to = p->gathered + row * m->k_padded;
        for (int i = 0; i < m->k_padded; i++) to[i] = m->input_of_k[i] < 0 ? 0 : from[m->input_of_k[i]];
    }
}

static int slice_count(const Segment *segment) {
    int most = SLICE_KBLOCKS / kblocks_per_pack(segment->bits);
    return (segment->packs + most - 1) / most;
}

static void gemm_tile(const QuadGemm *p, const float *x, int tile) {
    const Matrix *m = p->matrix;
    float weights[OUT_TILE * SLICE_K] __attribute__((aligned(64)));
    float sums[MAX_BLOCK_M * OUT_TILE * LANES] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)p->rows * OUT_TILE * LANES * sizeof(float));
    for (const Segment *segment = m->segments; segment < m->segments + m->segment_count; segment++) {
        int kblocks = kblocks_per_pack(segment->bits), slices = slice_count(segment), most = (segment->packs + slices - 1) / slices;
        for (int pack = 0; pack < segment->packs; pack += most) {
            int packs = segment->packs - pack < most ? segment->packs - pack : most;
            const float *from = x + segment->first_k + pack * kblocks * LANES;
            for (int n = 0; n < OUT_TILE; n += OUT4) {
                QuadSlice slice = {segment, (tile * OUT_TILE + n) / OUT4, pack, packs, m->round_f16};
                if (p->rows > 1) dequantize_slice(&slice, weights + n * SLICE_K);
                else gemv_slice(&slice, from, sums + n * LANES);
            }
            if (p->rows > 1) gemm_slice(weights, from, m->k_padded, packs * kblocks, p->rows, sums);
        }
    }
    int first = tile * OUT_TILE, width = m->outputs - first < OUT_TILE ? m->outputs - first : OUT_TILE;
    for (int row = 0; row < p->rows; row++) {
        float out[OUT_TILE], *y = p->y + (long)row * m->outputs + first;
        for (int n = 0; n < OUT_TILE; n += OUT4) sum_out4(sums + (row * OUT_TILE + n) * LANES, out + n);
        for (int n = 0; n < width; n++) y[n] = out[n] + (m->bias ? m->bias[first + n] : 0);
    }
}

static void gemm_chunk(void *job, int chunk) {
    const QuadGemm *p = job;
    const float *x = p->gathered ? p->gathered : p->x;
    int first = chunk * p->per_chunk, last = first + p->per_chunk < p->tiles ? first + p->per_chunk : p->tiles;
    for (int tile = first; tile < last; tile++) gemm_tile(p, x, tile);
}

/* Whether matrices in bands can be multiplied here. */
EXPORT int exlm_has_int_dot(void) {
#if defined(HAVE_INT_DOT)
    return 1;
#else
    return 0;
#endif
}

/* y (rows, outputs) = x (rows, inputs) @ matrix + bias. Returns 0, or 1 if there is no memory. */
EXPORT int exlm_linear(const Matrix *m, const float *x, int rows, float *y, int threads) {
#if defined(HAVE_INT_DOT)
    if (m->span_count) return gemm_int8(&m, 1, x, rows, &y, (Fusion){0}, threads);
#endif
    if (m->segments->bits >= BF12_BITS) return gemm_f16(m, x, rows, y, threads);
    int block_m = (int)(X_BLOCK_BYTES / sizeof(float)) / m->k_padded / 3 * 3;
    block_m = block_m < 12 ? 12 : block_m > MAX_BLOCK_M ? MAX_BLOCK_M : block_m;
    if (block_m > rows) block_m = rows;
    QuadGemm p = {.matrix = m, .tiles = (m->outputs + OUT_TILE - 1) / OUT_TILE};
    if (m->input_of_k && !(p.gathered = malloc((size_t)block_m * m->k_padded * sizeof(float)))) return 1;
    for (int row = 0; row < rows; row += block_m) {
        p.rows = rows - row < block_m ? rows - row : block_m;
        p.x = x + (long)row * m->inputs;
        p.y = y + (long)row * m->outputs;
        if (p.gathered) {
            p.per_chunk = 1 + (1 << 14) / m->k_padded;
            parallel_for(gather_x_chunk, &p, (p.rows + p.per_chunk - 1) / p.per_chunk, threads);
        }
        int per_thread = (p.tiles + threads * 8 - 1) / (threads * 8);
        int least = 1 + (1 << 13) / (m->k_padded * (p.rows + 3) / 4);
        p.per_chunk = per_thread > least ? per_thread : least;
        while ((p.tiles + p.per_chunk - 1) / p.per_chunk > MAX_CHUNKS) p.per_chunk *= 2;
        parallel_for(gemm_chunk, &p, (p.tiles + p.per_chunk - 1) / p.per_chunk, threads);
    }
    free(p.gathered);
    return 0;
}

/* out (count, inputs): what single columns stand for. */
EXPORT void exlm_columns(const Matrix *m, const int64_t *ids, int count, float *out) {
    float weights[OUT4 * SLICE_K];
    for (int i = 0; i < count; i++, out += m->inputs) {
        if (m->bf12) {
            bf12_column(m, ids[i], out);
            continue;
        }
#if defined(HAVE_INT_DOT)
        if (m->span_count) {
            dequantize_column(m, ids[i], out);
            continue;
        }
#endif
        for (const Segment *segment = m->segments; segment < m->segments + m->segment_count; segment++) {
            int kblocks = kblocks_per_pack(segment->bits), most = SLICE_KBLOCKS / kblocks;
            for (int pack = 0; pack < segment->packs; pack += most) {
                int packs = segment->packs - pack < most ? segment->packs - pack : most;
                QuadSlice slice = {segment, (int)(ids[i] / OUT4), pack, packs, m->round_f16};
                dequantize_slice(&slice, weights);
                const float *from = weights + ids[i] % OUT4 * SLICE_K;
                int k = segment->first_k + pack * kblocks * LANES;
                for (int n = 0; n < packs * kblocks * LANES; n++, k++) {
                    int input = m->input_of_k ? m->input_of_k[k] : k;
                    if (input >= 0) out[input] = from[n];
                }
            }
        }
    }
}
