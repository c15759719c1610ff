/* Rows times bands by products of signed bytes: codes, and each activation's high and low digit. A register is a quarter
   of a side; one of digits has those of a slot, a lane for each quad. */

#ifndef EXLM_ROWS_NEON_H
#define EXLM_ROWS_NEON_H

enum { MR = 4, NR_REGS = 4 }; /* rows and registers whose sums fit */
enum { KBLOCK_REGS = QUADS };        /* registers that a slot's codes take of each, once they are put down */
enum { GEMV_REGS = 6 };          /* of one row */

typedef int8x16_t i8x16v;
#define INT_DOT(sums, bytes, qact, quad)                                                                  \
    (sums) = vreinterpretq_u32_s32(                                                                              \
        vdotq_laneq_s32(vreinterpretq_s32_u32(sums), vreinterpretq_s8_u32(bytes), qact, quad))

/* Signed bytes of a slot's codes. */
INLINE void unpack_signed(const uint8_t *at, int bits, int has_codebook, i32v codebook, int tiles, int kblock,
                          i32v *quads) {
    unpack_kblock(at, bits, tiles, kblock, quads);
    if (has_codebook) lookup_quads(codebook, quads);
    else if (bits == 8) EACH_QUAD quads[q] = veorq_u32(quads[q], i8_set1(128));
}

/* sums += one row · a run's band, a wide one, some registers at a time. */
INLINE void gemv_regs(const Segment *segment, int bits, int has_codebook, int mode, Panel panel, const uint8_t *qact, const ActScale *act_scale,
                            int first, f32v *sums) {
    enum { regs = GEMV_REGS };
    const uint8_t *codes = panel_codes(segment, panel);
    i32v codebook = i32_set1(0);
    if (has_codebook) codebook = veorq_u32(load_codebook(segment), i8_set1(128));
    for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++, act_scale++) {
        i32v high[GEMV_REGS], low[GEMV_REGS];
        EACH_REG high[v] = low[v] = i32_set1(0);
        for (int kblock = span->kblock; kblock < span->kblock + span->kblocks; kblock++, qact += QACT_BYTES) {
            i8x16v a = vld1q_s8((const int8_t *)qact), b = vld1q_s8((const int8_t *)qact + LANES);
            if (bits < 8 && !first) prefetch_codes(codes, bits, kblock, PREFETCH_BYTES);
            EACH_REG {
                i32v quads[QUADS];
                unpack_signed(codes + (first + v) * REG_BYTES, bits, has_codebook, codebook, PANEL_TILES, kblock, quads);
                INT_DOT(high[v], quads[0], a, 0);
                INT_DOT(low[v], quads[0], b, 0);
                INT_DOT(high[v], quads[1], a, 1);
                INT_DOT(low[v], quads[1], b, 1);
                INT_DOT(high[v], quads[2], a, 2);
                INT_DOT(low[v], quads[2], b, 2);
                INT_DOT(high[v], quads[3], a, 3);
                INT_DOT(low[v], quads[3], b, 3);
            }
        }
        EACH_REG {
            Dequant g;
            i32v dot = i32_add(i32_shl(high[v], 8), low[v]);
            load_dequant_reg(&g, segment, mode, panel, span->group, first + v);
            if (g.has_zeros || g.shared_zero) dot = i32_add(dot, zero_correction(&g, first + v, act_scale));
            sums[first + v] = add_dequantized(sums[first + v], dot, &g, first + v, act_scale);
        }
    }
}

INLINE void gemv_panel(const Segment *segment, int bits, int has_codebook, int mode, Panel panel, const uint8_t *qact, const ActScale *act_scale,
                    f32v *sums) {
    panel.tiles = PANEL_TILES;
    for (int first = 0; first < PANEL_REGS; first += GEMV_REGS)
        gemv_regs(segment, bits, has_codebook, mode, panel, qact, act_scale, first, sums);
}

/* Codes as signed bytes, registers `ABREAST` apart. */
INLINE void store_operand(const i32v *quads, int is_8bit, i32v *to) {
    i32v less = i8_set1(is_8bit ? 128 : 0);
    EACH_QUAD to[q * NR_REGS] = veorq_u32(quads[q], less);
}

/* whole: a span's slots of some rows, `step` bytes apart, times registers abreast: all high digits, then all low. */
INLINE void dot_span(const i32v *codes, const uint8_t *qact, long step, int rows, i32v (*dot)[NR_REGS]) {
    EACH_ROW EACH_NR_REG dot[r][v] = i32_set1(0);
    for (int byte = 0; byte < 2; byte++) {
        const i32v *at = codes;
        const uint8_t *own = qact + byte * LANES, *end = own + step;
        for (; own < end; own += QACT_BYTES) {
            i8x16v x[MR];
            EACH_ROW x[r] = vld1q_s8((const int8_t *)own + r * step);
#define QUAD_OF(q)                                                                                               \
    EACH_NR_REG {                                                                                               \
        i32v bytes = at[v];                                                                                     \
        EACH_ROW INT_DOT(dot[r][v], bytes, x[r], q);                                                      \
    }                                                                                                            \
    at += NR_REGS;
            QUAD_OF(0) QUAD_OF(1) QUAD_OF(2) QUAD_OF(3)
#undef QUAD_OF
        }
        if (!byte) EACH_ROW EACH_NR_REG dot[r][v] = i32_shl(dot[r][v], 8);
    }
}

#endif
