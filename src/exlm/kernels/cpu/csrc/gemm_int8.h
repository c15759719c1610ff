/* Products with quantised matrices: quantise rows of x, multiply panel by panel, add what is fused around them.

   Products of codes and quantised activations are exact integers, so neither other rows nor the order of a sum decide
   any bits. A span's sum becomes a float once, and spans are added in order: a row's result is the same bits alone, in
   any batch and with any number of threads. */

#ifndef EXLM_GEMM_INT8_H
#define EXLM_GEMM_INT8_H

#include <stdlib.h>

#include "quantize_act.h"
#include "threadpool.h"
#if defined(__AVX512VNNI__)
#include "microkernel_vnni.h"
#else
#include "gemm_narrow_simd.h"
#endif

enum { GEMM_BLOCK_M = 192 }; /* most rows that share unpacked codes; half as many if activations have two bytes */

/* sums (48) += one row of x times a segment's full panel: the usual widths and factors have code of their own. */
INLINE void gemv_segment(const GemmArgs *p, int act_bytes, const Segment *segment, Panel panel, f32v *sums) {
    const uint8_t *qact = p->qact + (long)segment->first_k / KBLOCK * qact_bytes(act_bytes);
    const ActScale *act_scales = p->act_scales + segment->first_span;
    int mode = dequant_mode(segment);
#define GEMV(bits, has_codebook, mode) \
    gemv_panel(segment, bits, has_codebook, mode, act_bytes, panel, qact, act_scales, sums)
#define GEMV_SCALE(bits) GEMV(bits, 0, DEQUANT_SCALE)
#define GEMV_ANY(bits) GEMV(bits, 0, DEQUANT_ANY)
    if (segment->codebook && mode == DEQUANT_SCALE)
        GEMV(4, 1, DEQUANT_SCALE);
    else if (segment->codebook)
        GEMV(4, 1, DEQUANT_ANY);
    else if (segment->bits == 4 && mode == DEQUANT_SCALE_MIN)
        GEMV(4, 0, DEQUANT_SCALE_MIN);
    else if (segment->bits == 4 && mode == DEQUANT_SCALE_ZERO)
        GEMV(4, 0, DEQUANT_SCALE_ZERO);
    else if (mode == DEQUANT_SCALE) {
        SWITCH_BITS(segment->bits, GEMV_SCALE)
    } else {
        SWITCH_BITS(segment->bits, GEMV_ANY)
    }
#undef GEMV
#undef GEMV_SCALE
#undef GEMV_ANY
}

static void gemv_segment_2(const GemmArgs *p, const Segment *segment, Panel panel, f32v *sums) {
    gemv_segment(p, 2, segment, panel, sums);
}

#if defined(HAS_BYTE_DOT)
static void gemv_segment_1(const GemmArgs *p, const Segment *segment, Panel panel, f32v *sums) {
    gemv_segment(p, 1, segment, panel, sums);
}
#else
#define gemv_segment_1 gemv_segment_2
#endif

/* sums (rows, outputs of the panel) = the rows of x times a panel, plus the bias. */
static void panel_product(const GemmArgs *p, int index, float *sums) {
    const Matrix *m = p->matrix;
    Panel panel = panel_at(m->outputs, index);
    int first = panel.first * TILE_N, panel_n = panel.tiles * TILE_N;
    memset(sums, 0, (size_t)p->rows * panel_n * sizeof(float));
    for (const Segment *segment = m->segments; segment < m->segments + m->segment_count; segment++) {
        if (p->rows > 1 || panel.tiles < PANEL_TILES)
            gemm_panel(p, segment, panel, sums);
        else if (m->act_bytes == 1)
            gemv_segment_1(p, segment, panel, (f32v *)sums);
        else
            gemv_segment_2(p, segment, panel, (f32v *)sums);
    }
    for (int row = 0; m->bias && row < p->rows; row++)
        for (int n = 0; n < panel_n && first + n < m->outputs; n++) sums[row * panel_n + n] += m->bias[first + n];
}

/* Matrices that share an input, in one pass over the threads. */
typedef struct {
    GemmArgs parts[MAX_FUSED];
    int panels, per_chunk; /* panels of all parts, of a chunk */
    int gated;             /* the result is silu(first) * second */
} FusedGemm;

static void fused_panel(const FusedGemm *group, const GemmArgs *p, int index) {
    float sums[GEMM_BLOCK_M * PANEL_N] __attribute__((aligned(64)));
    float up_sums[GEMM_BLOCK_M * PANEL_N] __attribute__((aligned(64)));
    Panel panel = panel_at(p->matrix->outputs, index);
    int first = panel.first * TILE_N, panel_n = panel.tiles * TILE_N, outputs = p->matrix->outputs;
    int width = outputs - first < panel_n ? outputs - first : panel_n;
    for (int row = 0; p->rows > 1 && row < p->rows; row++) /* lines that are far apart and would be waited for */
        for (int n = 0; n < width; n += LANES) __builtin_prefetch(p->y + (long)row * outputs + first + n, 1);
    panel_product(p, index, sums);
    if (group->gated) {
        panel_product(p + 1, index, up_sums);
        for (int n = 0; n < p->rows * panel_n; n += LANES)
            store16(sums + n, silu16(load16(sums + n)) * load16(up_sums + n));
    }
    for (int row = 0; row < p->rows; row++) {
        float *y = p->y + (long)row * outputs + first, *row_sums = sums + row * panel_n;
        const float *residual = p->residual ? p->residual + (long)row * outputs + first : NULL;
        for (int n = 0; residual && n < width; n++) row_sums[n] += residual[n];
        if (width == PANEL_N)
            memcpy(y, row_sums, PANEL_N * sizeof(float));
        else
            memcpy(y, row_sums, width * sizeof(float));
    }
}

static void fused_chunk(void *job, int chunk) {
    const FusedGemm *group = job;
    for (int n = chunk * group->per_chunk; n < (chunk + 1) * group->per_chunk && n < group->panels; n++) {
        const GemmArgs *p = group->parts;
        int panel = n;
        for (; panel >= p->panels; p++) panel -= p->panels;
        fused_panel(group, p, panel);
    }
}

/* Whether two matrices cut k into the same spans, so that quantised activations serve both. */
static int same_quantization(const Matrix *a, const Matrix *b) {
    if (a->input_of_k || b->input_of_k || a->segment_count > 1 || b->segment_count > 1) return 0;
    if (a->span_count != b->span_count || a->k_padded != b->k_padded || a->act_bytes != b->act_bytes) return 0;
    return !memcmp(a->segments->spans, b->segments->spans, a->span_count * sizeof(GroupSpan));
}

static void quantize_block(FusedGemm *group, int count, int first, int rows, int threads) {
    for (int n = 0; n < count; n++) {
        GemmArgs *p = group->parts + n;
        p->first_row = first;
        p->rows = rows;
        if (n && same_quantization(p->matrix, group->parts->matrix)) {
            p->qact = group->parts->qact;
            p->act_scales = group->parts->act_scales;
            continue;
        }
        p->per_chunk = 1 + (1 << 14) / p->matrix->k_padded;
        parallel_for(quantize_chunk, p, (rows + p->per_chunk - 1) / p->per_chunk, threads);
    }
}

/* What is fused with the products. */
typedef struct {
    const RmsNorm *norm;   /* prologue: its output is x; or NULL */
    const float *residual; /* epilogue: added to the first result; or NULL */
    int gated;             /* epilogue: the result of two matrices is silu(first) * second */
} Fusion;

INLINE size_t qact_row_bytes(const Matrix *m) { return (size_t)m->k_padded / KBLOCK * qact_bytes(m->act_bytes); }

/* ys (one for each result): (rows, outputs) = x (rows, inputs) times matrix + bias. Returns 0, or 1 if there is no
   memory. */
static int gemm_int8(const Matrix *const *matrices, int count, const float *x, int rows, float *const *ys,
                     Fusion fusion, int threads) {
    int max_rows = GEMM_BLOCK_M / (*matrices)->act_bytes, block_m = rows < max_rows ? rows : max_rows;
    size_t bytes = 1;
    FusedGemm group = {.gated = fusion.gated};
    if (fusion.norm) x = fusion.norm->out;
    for (int n = 0; n < count; n++) {
        const Matrix *m = matrices[n];
        group.parts[n] = (GemmArgs){.matrix = m, .norm = n ? NULL : fusion.norm, .panels = panel_count(m->outputs)};
        if (!n || !group.gated) group.panels += group.parts[n].panels;
        bytes += (size_t)block_m * (m->span_count * sizeof(ActScale) + qact_row_bytes(m));
    }
    uint8_t *memory = malloc(bytes), *next = memory;
    if (!memory) return 1;
    for (int n = 0; n < count; n++) {
        group.parts[n].act_scales = (ActScale *)next;
        group.parts[n].qact = next + (size_t)block_m * matrices[n]->span_count * sizeof(ActScale);
        next = group.parts[n].qact + block_m * qact_row_bytes(matrices[n]);
    }
    group.per_chunk = 1 + group.panels / (1 << 12);
    for (int row = 0; row < rows; row += block_m) {
        for (int n = 0; n < count; n++) {
            GemmArgs *p = group.parts + n;
            p->x = x + (long)row * p->matrix->inputs;
            if (!n || !group.gated) p->y = ys[n] + (long)row * p->matrix->outputs;
            if (!n && fusion.residual) p->residual = fusion.residual + (long)row * p->matrix->outputs;
        }
        quantize_block(&group, count, row, rows - row < block_m ? rows - row : block_m, threads);
        parallel_for(fused_chunk, &group, (group.panels + group.per_chunk - 1) / group.per_chunk, threads);
    }
    free(memory);
    return 0;
}

/* out (inputs) = column `id` of W, bit for bit what dequantize() defines. */
static void dequantize_column(const Matrix *m, int64_t id, float *out) {
    int tile = (int)(id / TILE_N), index = tile / PANEL_TILES;
    Panel panel = panel_at(m->outputs, index);
    if (tile >= panel.first + panel.tiles) panel = panel_at(m->outputs, index + 1);
    int n = (int)(id - (int64_t)panel.first * TILE_N), v = n / VLEN, lane = n % VLEN;
    for (const Segment *segment = m->segments; segment < m->segments + m->segment_count; segment++) {
        const uint8_t *codes = panel_codes(segment, panel) + v * REG_BYTES;
        for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++) {
            GroupFactors g;
            load_group_factors(&g, segment, DEQUANT_ANY, panel, span->group);
            f32v scale = f32_set1(g.scale[v][lane]), minimum = f32_set1(g.has_minima ? g.minimum[v][lane] : 0);
            int32_t zero = g.has_zeros ? ((const int32_t *)&g.zero[v])[lane] : g.shared_zero;
            zero += SIGN_OFFSET(segment);
            for (int kblock = span->kblock; kblock < span->kblock + span->kblocks; kblock++) {
                i32v quads[QUADS];
                uint32_t words[QUADS];
                unpack_kblock_any(segment, codes, panel.tiles, kblock, quads);
                for (int q = 0; q < QUADS; q++) words[q] = ((const uint32_t *)&quads[q])[lane];
                for (int reg = 0; reg < LANE_REGS; reg++) {
                    i32v ints = i32_add(i32_load_u8((const uint8_t *)words + reg * VLEN), i32_set1(-zero));
                    f32v values = f32_mul(f32_from_i32(ints), scale);
                    if (g.has_minima) values = f32_sub(values, minimum);
                    if (m->round_f16) values = f32_round_f16(values);
                    int k = segment->first_k + kblock * KBLOCK + reg * VLEN;
                    for (int i = 0; i < VLEN; i++) {
                        int input = m->input_of_k ? m->input_of_k[k + i] : k + i;
                        if (input >= 0) out[input] = values[i];
                    }
                }
            }
        }
    }
}

#endif
