/* Rows times bands by products of 16-bit numbers, two to a sum: codes widened, activations as they are.

   A quad's bytes are its first and third code as 16-bit numbers, once the others are masked, and its second and fourth,
   shifted. Products of bytes would need as many instructions, half of them to keep sums from overflowing. */

#ifndef EXLM_MICROKERNEL_MADD16_H
#define EXLM_MICROKERNEL_MADD16_H

enum { MR = 4, NR_REGS = 2 }; /* rows and registers whose sums fit */
enum { KBLOCK_REGS = 2 * QUADS };    /* registers that a slot's codes take of each, once they are put down */
enum { GEMV_REGS = 6 };          /* of one row */

#define INT_DOT(sums, shorts, qact) (sums) = i32_add(sums, i16_madd(shorts, qact))
#define CODES_16BIT(a, n) i32_and(n ? u16_shr(a, n) : a, i32_set1(0x000f000f))
#define EVEN_BYTES(a) i32_and(a, i32_set1(0x00ff00ff))

/* sums (vectors) += a slot of one row · a band's codes of 4 bits, two quads of which share a row. */
INLINE void dot_kblock_4bit(const uint8_t *at, const uint8_t *qact, i32v *sums) {
    enum { regs = GEMV_REGS };
#pragma GCC unroll 2
    for (int row = 0; row < 2; row++, at += PANEL_N * 4, qact += LANES) {
        i32v a = broadcast_quad(qact), b = broadcast_quad(qact + 4);
        i32v c = broadcast_quad(qact + 8), d = broadcast_quad(qact + 12);
        EACH_REG {
            i32v two = i32_load(at + v * REG_BYTES);
            INT_DOT(sums[v], CODES_16BIT(two, 0), a);
            INT_DOT(sums[v], CODES_16BIT(two, 8), b);
            INT_DOT(sums[v], CODES_16BIT(two, 4), c);
            INT_DOT(sums[v], u16_shr(two, 12), d);
        }
    }
}

/* The same of any width. */
INLINE void dot_kblock(const uint8_t *codes, int bits, int has_codebook, i32v codebook, int kblock, const uint8_t *qact,
                       i32v *sums) {
    enum { regs = GEMV_REGS };
    EACH_REG {
        i32v quads[QUADS];
        unpack_kblock(codes + v * REG_BYTES, bits, PANEL_TILES, kblock, quads);
        if (has_codebook) lookup_quads(codebook, quads);
        EACH_QUAD {
            i32v even = EVEN_BYTES(quads[q]), odd = u16_shr(quads[q], 8);
            INT_DOT(sums[v], even, broadcast_quad(qact + 8 * q));
            INT_DOT(sums[v], odd, broadcast_quad(qact + 8 * q + 4));
        }
    }
}

/* sums += one row · a run's band, a wide one, some registers at a time. */
INLINE void gemv_regs(const Segment *segment, int bits, int has_codebook, int mode, Panel panel, const uint8_t *qact,
                      const ActScale *act_scale, int first, f32v *sums) {
    enum { regs = GEMV_REGS };
    const uint8_t *codes = panel_codes(segment, panel) + first * REG_BYTES;
    i32v codebook = has_codebook ? load_codebook(segment) : i32_set1(0);
    for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++, act_scale++) {
        i32v dot[GEMV_REGS];
        EACH_REG dot[v] = i32_set1(0);
        for (int kblock = span->kblock; kblock < span->kblock + span->kblocks; kblock++, qact += QACT_BYTES) {
            if (bits < 8 && !first) prefetch_codes(codes, bits, kblock, PREFETCH_BYTES);
            if (bits == 4 && !has_codebook) dot_kblock_4bit(codes + (long)kblock * PANEL_N * 8, qact, dot);
            else dot_kblock(codes, bits, has_codebook, codebook, kblock, qact, dot);
        }
        EACH_REG {
            Dequant g;
            load_dequant_reg(&g, segment, mode, panel, span->group, first + v);
            if (g.has_zeros || g.shared_zero) dot[v] = i32_add(dot[v], zero_correction(&g, first + v, act_scale));
            sums[first + v] = add_dequantized(sums[first + v], dot[v], &g, first + v, act_scale);
        }
    }
}

INLINE void gemv_panel(const Segment *segment, int bits, int has_codebook, int mode, Panel panel, const uint8_t *qact,
                       const ActScale *act_scale, f32v *sums) {
    panel.tiles = PANEL_TILES;
    for (int first = 0; first < PANEL_REGS; first += GEMV_REGS)
        gemv_regs(segment, bits, has_codebook, mode, panel, qact, act_scale, first, sums);
}

/* Codes as 16-bit numbers, registers `ABREAST` apart. */
INLINE void store_operand(const i32v *quads, int is_8bit, i32v *to) {
    (void)is_8bit;
    EACH_QUAD {
        to[2 * q * NR_REGS] = EVEN_BYTES(quads[q]);
        to[(2 * q + 1) * NR_REGS] = u16_shr(quads[q], 8);
    }
}

/* whole: a span's slots of some rows, `step` bytes apart, times registers abreast. */
INLINE void dot_span(const i32v *codes, const uint8_t *qact, long step, int rows, i32v (*dot)[NR_REGS]) {
    EACH_ROW EACH_NR_REG dot[r][v] = i32_set1(0);
    const uint8_t *end = qact + step;
#pragma GCC unroll 2
    for (; qact < end; qact += 4, codes += NR_REGS)
        EACH_ROW {
            i32v two = broadcast_quad(qact + r * step);
            EACH_NR_REG INT_DOT(dot[r][v], codes[v], two);
        }
}

#endif
