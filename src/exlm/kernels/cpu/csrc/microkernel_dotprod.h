/* ARM dotprod: sdot multiplies signed code bytes with signed activation bytes, four products into each int32.

   Two-byte activations (quantize_act.h) take two of them. A register is a quarter of a tile's row; one of activations
   holds a kblock, a lane for each quad. 8-bit codes and codebook bytes become signed by flipping their top bit
   (SIGN_OFFSET). */

#ifndef EXLM_MICROKERNEL_DOTPROD_H
#define EXLM_MICROKERNEL_DOTPROD_H

#include "kc_block.h"

enum { MR = 4, NR_REGS = 4 }; /* rows of x and registers of outputs whose sums fit */
enum { GEMV_REGS = 6 };       /* registers of outputs, of one row */
enum { KBLOCK_REGS = QUADS }; /* registers of a kblock's unpacked codes, for one register of outputs */

typedef int8x16_t s8x16;
#define INT_DOT(sums, codes, qact, quad) \
    (sums) =                             \
        vreinterpretq_u32_s32(vdotq_laneq_s32(vreinterpretq_s32_u32(sums), vreinterpretq_s8_u32(codes), qact, quad))
#define FLIP_SIGNS(a) veorq_u32(a, i8_set1(128))

/* sums += one row of x times GEMV_REGS registers of a segment's full panel. */
INLINE void gemv_regs(const Segment *segment, int bits, int has_codebook, int mode, int act_bytes, Panel panel,
                      const uint8_t *qact, const ActScale *act_scale, int first, f32v *sums) {
    enum { regs = GEMV_REGS };
    const uint8_t *codes = panel_codes(segment, panel);
    i32v codebook = i32_set1(0);
    if (has_codebook) codebook = FLIP_SIGNS(load_codebook(segment));
    for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++, act_scale++) {
        i32v high[GEMV_REGS], low[GEMV_REGS];
        EACH_REG(v) high[v] = low[v] = i32_set1(0);
        for (int kblock = span->kblock; kblock < span->kblock + span->kblocks; kblock++) {
            s8x16 a = vld1q_s8((const int8_t *)qact), b = a;
            if (act_bytes == 2) b = vld1q_s8((const int8_t *)qact + KBLOCK);
            qact += qact_bytes(act_bytes);
            if (bits < 8 && !first) prefetch_codes(codes, bits, kblock, PREFETCH_BYTES);
            EACH_REG(v) {
                i32v quads[QUADS];
                unpack_kblock(codes + (first + v) * REG_BYTES, bits, PANEL_TILES, kblock, quads);
                if (has_codebook)
                    lookup_quads(codebook, quads);
                else if (bits == 8)
                    EACH_QUAD(q) quads[q] = FLIP_SIGNS(quads[q]);
#define ADD_QUAD(q)                   \
    INT_DOT(high[v], quads[q], a, q); \
    if (act_bytes == 2) INT_DOT(low[v], quads[q], b, q);
                ADD_QUAD(0)
                ADD_QUAD(1)
                ADD_QUAD(2)
                ADD_QUAD(3)
#undef ADD_QUAD
            }
        }
        EACH_REG(v) {
            GroupFactors g;
            i32v dot = act_bytes == 1 ? high[v] : i32_add(i32_shl(high[v], 8), low[v]);
            load_group_factors_reg(&g, segment, mode, panel, span->group, first + v);
            if (g.has_zeros || g.shared_zero) dot = i32_add(dot, zero_correction(&g, first + v, act_scale));
            sums[first + v] = add_dequantized(sums[first + v], dot, &g, first + v, act_scale);
        }
    }
}

/* Code bytes as the operands of dot_span, NR_REGS apart. */
INLINE void store_operands(const i32v *quads, int flip_signs, i32v *to) {
    EACH_QUAD(q) to[q * NR_REGS] = flip_signs ? FLIP_SIGNS(quads[q]) : quads[q];
}

/* dot = the kblocks of a span, of some rows `step` bytes apart, times NR_REGS registers of outputs: all high bytes,
   then all low, or only bytes. */
INLINE void dot_span(const i32v *codes, int act_bytes, const uint8_t *qact, long step, int rows,
                     i32v (*dot)[NR_REGS]) {
    enum { regs = NR_REGS };
    EACH_ROW(r)
        EACH_REG(v) dot[r][v] = i32_set1(0);
    for (int byte = 0; byte < act_bytes; byte++) {
        const i32v *at = codes;
        const uint8_t *x_bytes = qact + byte * KBLOCK, *end = x_bytes + step;
        for (; x_bytes < end; x_bytes += qact_bytes(act_bytes)) {
            s8x16 x[MR];
            EACH_ROW(r) x[r] = vld1q_s8((const int8_t *)x_bytes + r * step);
#define ADD_QUAD(q)                                     \
    EACH_REG(v) {                                       \
        i32v bytes = at[v];                             \
        EACH_ROW(r) INT_DOT(dot[r][v], bytes, x[r], q); \
    }                                                   \
    at += NR_REGS;
            ADD_QUAD(0)
            ADD_QUAD(1)
            ADD_QUAD(2)
            ADD_QUAD(3)
#undef ADD_QUAD
        }
        if (byte + 1 < act_bytes)
            EACH_ROW(r)
                EACH_REG(v) dot[r][v] = i32_shl(dot[r][v], 8);
    }
}

#endif
