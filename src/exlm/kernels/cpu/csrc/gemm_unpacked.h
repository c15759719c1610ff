/* Several rows times a band whose codes are put down first, as the instruction set multiplies them: a few rows at a time,
   and registers abreast. */

#ifndef EXLM_ROWS_PUT_H
#define EXLM_ROWS_PUT_H

#define EACH_ROW _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)
#define EACH_NR_REG _Pragma("GCC unroll 4") for (int v = 0; v < NR_REGS; v++)

#if defined(__ARM_FEATURE_DOTPROD) && !defined(EXLM_PORTABLE)
#include "microkernel_dotprod.h"
#else
#include "microkernel_madd16.h"
#endif

enum { KC_KBLOCKS = 8, KC_BYTES = KC_KBLOCKS * PANEL_N * LANES }; /* unless a span has more; as bytes. Put down they
                                                                        stay in the first cache */

/* sums (rows, outputs of the band) += what a span adds to registers abreast. */
INLINE void add_dequantized_rows(i32v (*dot)[NR_REGS], const Dequant *g, int has_minima, int first, const ActScale *act_scale,
                        int rows, int wide, float *sums) {
    EACH_ROW {
        f32v delta = f32_set1(act_scale[r].delta), sum = has_minima ? f32_set1(act_scale[r].sum) : delta;
        EACH_NR_REG {
            float *at = sums + r * wide + (first + v) * VLEN;
            f32v own = f32_fma(f32_load(at), f32_mul(f32_from_i32(dot[r][v]), delta), g->scale[first + v]);
            if (has_minima) own = f32_fnma(own, g->minimum[first + v], sum);
            f32_store(at, own);
        }
    }
}

/* sums (rows, outputs of the band) += a few rows · a piece. */
INLINE void microkernel(const KcBlock *p, int row, int rows, int regs, float *sums) {
    const i32v *codes = (const i32v *)p->codes;
    for (int first = 0; first < regs; first += NR_REGS) {
        const uint8_t *qact = p->qact;
        const ActScale *act_scale = p->act_scales + row;
        for (int n = 0; n < p->count; n++, act_scale += p->rows) {
            long step = (long)p->spans[n].kblocks * QACT_BYTES;
            const Dequant *g = p->dequants + n;
            i32v dot[MR][NR_REGS];
            dot_span(codes, qact + row * step, step, rows, dot);
            codes += p->spans[n].kblocks * KBLOCK_REGS * NR_REGS, qact += step * p->rows;
            if (g->has_zeros || g->shared_zero)
                EACH_ROW EACH_NR_REG dot[r][v] = i32_add(dot[r][v], zero_correction(g, first + v, act_scale + r));
            if (g->has_minima) add_dequantized_rows(dot, g, 1, first, act_scale, rows, regs * VLEN, sums);
            else add_dequantized_rows(dot, g, 0, first, act_scale, rows, regs * VLEN, sums);
        }
    }
}

typedef void Microkernel(const KcBlock *, int, int, float *);
#define ROWS(rows)                                                                                               \
    static __attribute__((noinline)) void rows_##rows(const KcBlock *p, int row, int regs, float *sums) {       \
        microkernel(p, row, rows, regs, sums);                                                                   \
    }
ROWS(1) ROWS(2) ROWS(3) ROWS(4)
static Microkernel *const microkernels[] = {rows_1, rows_2, rows_3, rows_4};
#undef ROWS
#undef EACH_ROW
#undef EACH_NR_REG

/* A band's codes, (those abreast, slots, steps, abreast). */
INLINE void unpack_panel(const uint8_t *panel, int bits, const Segment *lookup, int tiles, int first, int kblocks,
                         i32v *to) {
    i32v codebook = lookup ? load_codebook(lookup) : i32_set1(0);
    for (int kblock = 0; kblock < kblocks; kblock++) {
        prefetch_codes(panel, bits, first + kblock, KC_BYTES);
        for (int v = 0; v < tiles * LANE_REGS; v++) {
            i32v quads[QUADS];
            unpack_kblock(panel + v * REG_BYTES, bits, tiles, first + kblock, quads);
            if (lookup) lookup_quads(codebook, quads);
            store_operand(quads, bits == 8 || lookup, to + (long)(v / NR_REGS * kblocks + kblock) * KBLOCK_REGS * NR_REGS + v % NR_REGS);
        }
    }
}

/* sums (rows, outputs of the band) += rows · a run's band; one row too, if the band is a narrow one. */
static void gemm_panel(const GemmArgs *p, const Segment *segment, Panel panel, float *sums) {
    i32v buffer[MAX_SPAN * KBLOCK_REGS * PANEL_REGS];
    KcBlock kc; /* not cleared: its meanings are large */
    int passes = (p->rows + MR - 1) / MR, rows_per_pass = (p->rows + passes - 1) / passes, regs = panel.tiles * LANE_REGS;
    const uint8_t *codes = panel_codes(segment, panel);
    kc.codes = (const uint8_t *)buffer;
    for (int n = 0; n < segment->span_count;) {
        n += next_kc_block(&kc, p, segment, n, panel, KC_KBLOCKS);
#define OWN(own) case own: unpack_panel(codes, own, NULL, panel.tiles, kc.spans->kblock, kc.kblocks, buffer); break;
        if (segment->codebook) unpack_panel(codes, 4, segment, panel.tiles, kc.spans->kblock, kc.kblocks, buffer);
        else
        switch (segment->bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) OWN(8) }
#undef OWN
        for (int row = 0; row < p->rows; row += rows_per_pass) {
            Microkernel *some = microkernels[(p->rows - row < rows_per_pass ? p->rows - row : rows_per_pass) - 1];
            some(&kc, row, regs, sums + row * regs * VLEN);
        }
    }
}

#endif
