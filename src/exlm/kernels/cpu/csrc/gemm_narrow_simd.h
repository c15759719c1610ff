/* gemv_panel and gemm_panel of the instruction sets with fewer or narrower registers than AVX-512: one row in several
   passes over the panel, several rows from codes that are unpacked first, MR rows times NR_REGS registers at a time. */

#ifndef EXLM_GEMM_NARROW_SIMD_H
#define EXLM_GEMM_NARROW_SIMD_H

#if defined(__ARM_FEATURE_DOTPROD) && !defined(EXLM_PORTABLE)
#include "microkernel_dotprod.h"
#else
#include "microkernel_madd16.h"
#endif

/* kblocks of a KcBlock, unless a span has more, and their size as bytes; unpacked they stay in L1. */
enum { KC_KBLOCKS = 8, KC_BYTES = KC_KBLOCKS * PANEL_N * KBLOCK };

/* sums (48) += one row of x times a segment's full panel. */
INLINE void gemv_panel(const Segment *segment, int bits, int has_codebook, int mode, int act_bytes, Panel panel,
                       const uint8_t *qact, const ActScale *act_scale, f32v *sums) {
    panel.tiles = PANEL_TILES;
    for (int first = 0; first < PANEL_REGS; first += GEMV_REGS)
        gemv_regs(segment, bits, has_codebook, mode, act_bytes, panel, qact, act_scale, first, sums);
}

/* sums (rows, outputs of the panel) += a span's dot products with NR_REGS registers of outputs, dequantised. */
INLINE void add_dequantized_rows(i32v (*dot)[NR_REGS], const GroupFactors *g, int has_minima, int first,
                                 const ActScale *act_scale, int rows, int panel_n, float *sums) {
    enum { regs = NR_REGS };
    EACH_ROW(r) {
        f32v delta = f32_set1(act_scale[r].delta), sum = has_minima ? f32_set1(act_scale[r].sum) : delta;
        EACH_REG(v) {
            float *at = sums + r * panel_n + (first + v) * VLEN;
            f32v y = f32_fma(f32_load(at), f32_mul(f32_from_i32(dot[r][v]), delta), g->scale[first + v]);
            if (has_minima) y = f32_fnma(y, g->minimum[first + v], sum);
            f32_store(at, y);
        }
    }
}

/* sums (rows, outputs of the panel) += rows of x, from `row` on, times a KcBlock. */
INLINE void microkernel(const KcBlock *p, int row, int rows, int act_bytes, int panel_regs, float *sums) {
    enum { regs = NR_REGS };
    const i32v *codes = (const i32v *)p->codes;
    for (int first = 0; first < panel_regs; first += NR_REGS) {
        const uint8_t *qact = p->qact;
        const ActScale *act_scale = p->act_scales + row;
        for (int n = 0; n < p->count; n++, act_scale += p->rows) {
            long step = (long)p->spans[n].kblocks * qact_bytes(act_bytes);
            const GroupFactors *g = p->factors + n;
            i32v dot[MR][NR_REGS];
            dot_span(codes, act_bytes, qact + row * step, step, rows, dot);
            codes += p->spans[n].kblocks * KBLOCK_REGS * NR_REGS;
            qact += step * p->rows;
            if (g->has_zeros || g->shared_zero)
                EACH_ROW(r)
                    EACH_REG(v) dot[r][v] = i32_add(dot[r][v], zero_correction(g, first + v, act_scale + r));
            if (g->has_minima)
                add_dequantized_rows(dot, g, 1, first, act_scale, rows, panel_regs * VLEN, sums);
            else
                add_dequantized_rows(dot, g, 0, first, act_scale, rows, panel_regs * VLEN, sums);
        }
    }
}

/* One function for each number of rows and bytes of activations. */
typedef void Microkernel(const KcBlock *, int, int, float *);
#define ONE(rows, act_bytes)                                                                                    \
    static __attribute__((noinline)) void microkernel_##rows##_##act_bytes(const KcBlock *p, int row, int regs, \
                                                                           float *sums) {                       \
        microkernel(p, row, rows, act_bytes, regs, sums);                                                       \
    }
#define FOUR(act_bytes) ONE(1, act_bytes) ONE(2, act_bytes) ONE(3, act_bytes) ONE(4, act_bytes)
FOUR(2)
static Microkernel *const microkernels_2[MR] = {microkernel_1_2, microkernel_2_2, microkernel_3_2, microkernel_4_2};
#if defined(HAS_BYTE_DOT)
FOUR(1)
static Microkernel *const microkernels_1[MR] = {microkernel_1_1, microkernel_2_1, microkernel_3_1, microkernel_4_1};
#else
#define microkernels_1 microkernels_2
#endif
#undef ONE
#undef FOUR

/* The operands of some kblocks: (registers / NR_REGS, kblocks, KBLOCK_REGS, NR_REGS); `lookup`: the segment with
   the codebook, or NULL. */
INLINE void unpack_panel(const uint8_t *codes, int bits, const Segment *lookup, int tiles, int first, int kblocks,
                         i32v *to) {
    i32v codebook = lookup ? load_codebook(lookup) : i32_set1(0);
    for (int kblock = 0; kblock < kblocks; kblock++) {
        prefetch_codes(codes, bits, first + kblock, KC_BYTES);
        for (int v = 0; v < tiles * LANE_REGS; v++) {
            i32v quads[QUADS], *dst = to + (long)(v / NR_REGS * kblocks + kblock) * KBLOCK_REGS * NR_REGS + v % NR_REGS;
            unpack_kblock(codes + v * REG_BYTES, bits, tiles, first + kblock, quads);
            if (lookup) lookup_quads(codebook, quads);
            store_operands(quads, bits == 8 || lookup, dst);
        }
    }
}

/* sums (rows, outputs of the panel) += the rows of x times a segment's panel, MR rows at a time. */
static void gemm_panel(const GemmArgs *p, const Segment *segment, Panel panel, float *sums) {
    i32v buffer[MAX_SPAN * KBLOCK_REGS * PANEL_REGS];
    KcBlock kc; /* large: not cleared */
    int passes = (p->rows + MR - 1) / MR, per_pass = (p->rows + passes - 1) / passes;
    int tiles = panel.tiles, panel_regs = tiles * LANE_REGS;
    const uint8_t *codes = panel_codes(segment, panel);
    Microkernel *const *by_rows = p->matrix->act_bytes == 1 ? microkernels_1 : microkernels_2;
    kc.codes = (const uint8_t *)buffer;
    for (int n = 0; n < segment->span_count;) {
        n += next_kc_block(&kc, p, segment, n, panel, KC_KBLOCKS);
        if (segment->codebook)
            unpack_panel(codes, 4, segment, tiles, kc.spans->kblock, kc.kblocks, buffer);
        else {
#define UNPACK(bits) unpack_panel(codes, bits, NULL, tiles, kc.spans->kblock, kc.kblocks, buffer)
            SWITCH_BITS(segment->bits, UNPACK)
#undef UNPACK
        }
        for (int row = 0; row < p->rows; row += per_pass) {
            int rows = p->rows - row < per_pass ? p->rows - row : per_pass;
            by_rows[rows - 1](&kc, row, panel_regs, sums + row * panel_regs * VLEN);
        }
    }
}

#endif
