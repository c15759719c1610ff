/* Processors without a byte dot product that fits (AVX2, SSE2, NEON before dotprod, portable C): pmaddwd multiplies
   16-bit integers and adds neighbours, two products into each int32.

   Codes are widened on the way. Of a quad's four bytes the masked even ones are its first and third code as 16-bit
   integers, the shifted odd ones its second and fourth; store_qact puts activations in that order. pmaddubsw would need
   as many instructions, half of them to keep its 16-bit sums from overflowing. */

#ifndef EXLM_MICROKERNEL_MADD16_H
#define EXLM_MICROKERNEL_MADD16_H

#include "kc_block.h"

enum { MR = 4, NR_REGS = 2 };     /* rows of x and registers of outputs whose sums fit */
enum { GEMV_REGS = 6 };           /* registers of outputs, of one row */
enum { KBLOCK_REGS = 2 * QUADS }; /* registers of a kblock's widened codes, for one register of outputs */

#define INT_DOT(sums, codes, qact) (sums) = i32_add(sums, i16_madd(codes, qact))
#define EVEN_BYTES(quad) i32_and(quad, i32_set1(0x00ff00ff))
#define ODD_BYTES(quad) u16_shr(quad, 8)
#define EVEN_NIBBLES(nibbles, shift) i32_and((shift) ? u16_shr(nibbles, shift) : (nibbles), i32_set1(0x000f000f))

/* sums += one row of a kblock times codes of 4 bits: a row of the panel holds two quads, and nibbles are widened to
   16 bits directly. */
INLINE void dot_kblock_4bit(const uint8_t *codes, const uint8_t *qact, i32v *sums) {
    enum { regs = GEMV_REGS };
#pragma GCC unroll 2
    for (int row = 0; row < 2; row++, codes += PANEL_N * 4, qact += KBLOCK) {
        i32v a = broadcast_quad(qact), b = broadcast_quad(qact + 4);
        i32v c = broadcast_quad(qact + 8), d = broadcast_quad(qact + 12);
        EACH_REG(v) {
            i32v nibbles = i32_load(codes + v * REG_BYTES);
            INT_DOT(sums[v], EVEN_NIBBLES(nibbles, 0), a);
            INT_DOT(sums[v], EVEN_NIBBLES(nibbles, 8), b);
            INT_DOT(sums[v], EVEN_NIBBLES(nibbles, 4), c);
            INT_DOT(sums[v], u16_shr(nibbles, 12), d);
        }
    }
}

INLINE void dot_kblock(const uint8_t *codes, int bits, int has_codebook, i32v codebook, int kblock, const uint8_t *qact,
                       i32v *sums) {
    enum { regs = GEMV_REGS };
    EACH_REG(v) {
        i32v quads[QUADS];
        unpack_kblock(codes + v * REG_BYTES, bits, PANEL_TILES, kblock, quads);
        if (has_codebook) lookup_quads(codebook, quads);
        EACH_QUAD(q) {
            INT_DOT(sums[v], EVEN_BYTES(quads[q]), broadcast_quad(qact + 8 * q));
            INT_DOT(sums[v], ODD_BYTES(quads[q]), broadcast_quad(qact + 8 * q + 4));
        }
    }
}

/* sums += one row of x times GEMV_REGS registers of a segment's full panel. */
INLINE void gemv_regs(const Segment *segment, int bits, int has_codebook, int mode, int act_bytes, Panel panel,
                      const uint8_t *qact, const ActScale *act_scale, int first, f32v *sums) {
    enum { regs = GEMV_REGS };
    const int x_size = qact_bytes(act_bytes);
    const uint8_t *codes = panel_codes(segment, panel) + first * REG_BYTES;
    i32v codebook = has_codebook ? load_codebook(segment) : i32_set1(0);
    for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++, act_scale++) {
        i32v dot[GEMV_REGS];
        EACH_REG(v) dot[v] = i32_set1(0);
        for (int kblock = span->kblock; kblock < span->kblock + span->kblocks; kblock++, qact += x_size) {
            if (bits < 8 && !first) prefetch_codes(codes, bits, kblock, PREFETCH_BYTES);
            if (bits == 4 && !has_codebook)
                dot_kblock_4bit(codes + (long)kblock * PANEL_N * 8, qact, dot);
            else
                dot_kblock(codes, bits, has_codebook, codebook, kblock, qact, dot);
        }
        EACH_REG(v) {
            GroupFactors g;
            load_group_factors_reg(&g, segment, mode, panel, span->group, first + v);
            if (g.has_zeros || g.shared_zero) dot[v] = i32_add(dot[v], zero_correction(&g, first + v, act_scale));
            sums[first + v] = add_dequantized(sums[first + v], dot[v], &g, first + v, act_scale);
        }
    }
}

/* Widened codes as the operands of dot_span, NR_REGS apart. Products are of signed integers: no code is too large. */
INLINE void store_operands(const i32v *quads, int flip_signs, i32v *to) {
    (void)flip_signs;
    EACH_QUAD(q) {
        to[2 * q * NR_REGS] = EVEN_BYTES(quads[q]);
        to[(2 * q + 1) * NR_REGS] = ODD_BYTES(quads[q]);
    }
}

/* dot = the kblocks of a span, of some rows `step` bytes apart, times NR_REGS registers of outputs. */
INLINE void dot_span(const i32v *codes, int act_bytes, const uint8_t *qact, long step, int rows,
                     i32v (*dot)[NR_REGS]) {
    (void)act_bytes;
    enum { regs = NR_REGS };
    EACH_ROW(r)
        EACH_REG(v) dot[r][v] = i32_set1(0);
    const uint8_t *end = qact + step;
#pragma GCC unroll 2
    for (; qact < end; qact += 4, codes += NR_REGS)
        EACH_ROW(r) {
            i32v x = broadcast_quad(qact + r * step);
            EACH_REG(v) INT_DOT(dot[r][v], codes[v], x);
        }
}

#endif
