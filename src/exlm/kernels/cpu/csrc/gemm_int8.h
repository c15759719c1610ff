/* Products of whole numbers: codes as they are, activations as digits.

   Sums of codes times digits are exact, so neither the other rows nor the order in which they are made decide any
   bits; a span's sum becomes a float once, and the spans are added up in order. */

#ifndef EXLM_BANDED_H
#define EXLM_BANDED_H

#include <stdlib.h>

#include "blocking.h"
#include "threadpool.h"

enum { GEMM_BLOCK_M = 96 }; /* rows of a strip, whose sums fit the cache */

/* sums (rows, 48 or 32): rows · a band, and the bias. */
static void panel_product(const GemmArgs *p, int index, float *sums) {
    const Matrix *m = p->matrix;
    Panel panel = panel_at(m->outputs, index);
    int first = panel.first * LANES, panel_n = panel.tiles * LANES;
    memset(sums, 0, (size_t)p->rows * panel_n * sizeof(float));
    for (const Segment *segment = m->segments; segment < m->segments + m->segment_count; segment++) {
        if (p->rows > 1 || panel.tiles < PANEL_TILES) {
            gemm_panel(p, segment, panel, sums);
            continue;
        }
#define GEMV(own, has_codebook, mode)                                                                             \
    gemv_panel(segment, own, has_codebook, mode, panel, p->qact + 2l * segment->first_k,                          \
               p->act_scales + segment->first_span, (f32v *)sums)
#define OWN(own, mode)                                                                                            \
    case mode << 4 | own:                                                                                         \
        GEMV(own, 0, mode);                                                                                       \
        break;
        if (segment->codebook) {
            if (dequant_mode(segment) == DEQUANT_SCALE) GEMV(4, 1, DEQUANT_SCALE);
            else GEMV(4, 1, DEQUANT_ANY);
            continue;
        }
        switch (dequant_mode(segment) << 4 | segment->bits) {
            OWN(2, DEQUANT_SCALE) OWN(3, DEQUANT_SCALE) OWN(4, DEQUANT_SCALE) OWN(5, DEQUANT_SCALE) OWN(6, DEQUANT_SCALE) OWN(8, DEQUANT_SCALE)
            OWN(4, DEQUANT_SCALE_MIN) OWN(4, DEQUANT_SCALE_ZERO)
        default:
            switch (segment->bits) { OWN(2, 0) OWN(3, 0) OWN(4, 0) OWN(5, 0) OWN(6, 0) OWN(8, 0) }
        }
#undef OWN
#undef GEMV
    }
    for (int row = 0; m->bias && row < p->rows; row++)
        for (int n = 0; n < panel_n && first + n < m->outputs; n++) sums[row * panel_n + n] += m->bias[first + n];
}

typedef struct {
    GemmArgs parts[MAX_FUSED];
    int panels, per_chunk, gated; /* of all of them, and of a chunk; gated: of the first, whose answer goes through a gate */
} GroupedGemm;

/* A band of the answers: of a product, or of silu(first) · second. */
static void grouped_panel(const GroupedGemm *all, const GemmArgs *p, int index) {
    float sums[GEMM_BLOCK_M * PANEL_N] __attribute__((aligned(64))), up_sums[GEMM_BLOCK_M * PANEL_N] __attribute__((aligned(64)));
    Panel panel = panel_at(p->matrix->outputs, index);
    int first = panel.first * LANES, panel_n = panel.tiles * LANES, outputs = p->matrix->outputs;
    int width = outputs - first < panel_n ? outputs - first : panel_n;
    panel_product(p, index, sums);
    if (all->gated) {
        panel_product(p + 1, index, up_sums);
        for (int n = 0; n < p->rows * panel_n; n += LANES) store16(sums + n, silu(load16(sums + n)) * load16(up_sums + n));
    }
    for (int row = 0; row < p->rows; row++) {
        float *y = p->y + (long)row * outputs + first, *own = sums + row * panel_n;
        const float *more = p->residual ? p->residual + (long)row * outputs + first : NULL;
        for (int n = 0; more && n < width; n++) own[n] += more[n];
        if (width == PANEL_N) memcpy(y, own, PANEL_N * sizeof(float));
        else memcpy(y, own, width * sizeof(float));
    }
}

static void grouped_chunk(void *job, int chunk) {
    const GroupedGemm *all = job;
    for (int n = chunk * all->per_chunk; n < (chunk + 1) * all->per_chunk && n < all->panels; n++) {
        const GemmArgs *p = all->parts;
        int panel = n;
        while (panel >= p->panels) panel -= p->panels, p++;
        grouped_panel(all, p, panel);
    }
}

/* Whether x means the same digits to both. */
static int same_quantization(const Matrix *a, const Matrix *b) {
    return !a->input_of_k && !b->input_of_k && a->segment_count == 1 && b->segment_count == 1 && a->span_count == b->span_count &&
           a->k_padded == b->k_padded && !memcmp(a->segments->spans, b->segments->spans, a->span_count * sizeof(GroupSpan));
}

/* The next rows of x as digits; what matrices share is made once, for the first. */
static void quantize_block(GroupedGemm *all, int count, int first, int rows, int threads) {
    for (int n = 0; n < count; n++) {
        GemmArgs *p = all->parts + n;
        p->first = first, p->rows = rows;
        if (n && same_quantization(p->matrix, all->parts->matrix)) {
            p->qact = all->parts->qact, p->act_scales = all->parts->act_scales;
            continue;
        }
        p->per_chunk = 1 + (1 << 14) / p->matrix->k_padded;
        parallel_for(quantize_chunk, p, (rows + p->per_chunk - 1) / p->per_chunk, threads);
    }
}

/* What stands around products: a norm, whose answer is their x, what is added to the first, and whether the answer of
   two is silu(first) · second. */
typedef struct {
    const RmsNorm *norm;
    const float *residual;
    int gated;
} Fusion;

/* ys: one for each answer, (rows, outputs), of x (rows, inputs) @ matrix + bias. Returns 0, or 1 if there is no
   memory. */
static int gemm_int8(const Matrix *const *matrices, int count, const float *x, int rows, float *const *ys,
                           Fusion fusion, int threads) {
    int block_m = rows < GEMM_BLOCK_M ? rows : GEMM_BLOCK_M;
    size_t room = 1;
    GroupedGemm all = {.gated = fusion.gated};
    if (fusion.norm) x = fusion.norm->out;
    for (int n = 0; n < count; n++) {
        const Matrix *m = matrices[n];
        all.parts[n] = (GemmArgs){.matrix = m, .norm = n ? NULL : fusion.norm, .panels = panel_count(m->outputs)};
        if (!n || !all.gated) all.panels += all.parts[n].panels;
        room += (size_t)block_m * (m->span_count * sizeof(ActScale) + m->k_padded * 2);
    }
    uint8_t *memory = malloc(room), *free_at = memory;
    if (!memory) return 1;
    for (int n = 0; n < count; n++) {
        all.parts[n].act_scales = (ActScale *)free_at;
        all.parts[n].qact = free_at + (size_t)block_m * matrices[n]->span_count * sizeof(ActScale);
        free_at = all.parts[n].qact + (size_t)block_m * matrices[n]->k_padded * 2;
    }
    all.per_chunk = 1 + all.panels / (1 << 12);
    for (int row = 0; row < rows; row += block_m) {
        for (int n = 0; n < count; n++) {
            GemmArgs *p = all.parts + n;
            p->x = x + (long)row * p->matrix->inputs;
            if (!n || !all.gated) p->y = ys[n] + (long)row * p->matrix->outputs;
            if (!n && fusion.residual) p->residual = fusion.residual + (long)row * p->matrix->outputs;
        }
        quantize_block(&all, count, row, rows - row < block_m ? rows - row : block_m, threads);
        parallel_for(grouped_chunk, &all, (all.panels + all.per_chunk - 1) / all.per_chunk, threads);
    }
    free(memory);
    return 0;
}

/* out (inputs): what a single column stands for. */
static void dequantize_column(const Matrix *m, int64_t id, float *out) {
    int tile = (int)(id / LANES), index = tile / PANEL_TILES;
    Panel panel = panel_at(m->outputs, index);
    if (tile >= panel.first + panel.tiles) panel = panel_at(m->outputs, index + 1);
    int output = (int)(id - (int64_t)panel.first * LANES), v = output / VLEN, at = output % VLEN;
    for (const Segment *segment = m->segments; segment < m->segments + m->segment_count; segment++)
        for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++) {
            Dequant g;
            load_dequant(&g, segment, DEQUANT_ANY, panel, span->group);
            f32v scale = f32_set1(g.scale[v][at]), minimum = f32_set1(g.has_minima ? g.minimum[v][at] : 0);
            int32_t zero = (g.has_zeros ? ((const int32_t *)&g.zero[v])[at] : g.shared_zero) + SIGN_OFFSET(segment);
            for (int kblock = span->kblock; kblock < span->kblock + span->kblocks; kblock++) {
                i32v quads[QUADS];
                uint32_t codes[QUADS];
                unpack_kblock_any(segment, panel_codes(segment, panel) + v * REG_BYTES, panel.tiles, kblock, quads);
                for (int q = 0; q < QUADS; q++) codes[q] = ((const uint32_t *)&quads[q])[at];
                for (int reg = 0; reg < LANE_REGS; reg++) {
                    i32v plain = i32_add(i32_load_u8((const uint8_t *)codes + reg * VLEN), i32_set1(-zero));
                    f32v values = f32_mul(f32_from_i32(plain), scale);
                    if (g.has_minima) values = f32_sub(values, minimum);
                    if (m->round_f16) values = f32_round_f16(values);
                    int k = segment->first_k + kblock * LANES + reg * VLEN;
                    for (int n = 0; n < VLEN; n++) {
                        int input = m->input_of_k ? m->input_of_k[k + n] : k + n;
                        if (input >= 0) out[input] = values[n];
                    }
                }
            }
        }
}

#endif
