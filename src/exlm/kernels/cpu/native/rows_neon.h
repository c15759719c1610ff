/* Rows times bands by products of signed bytes: codes, and each activation's high and low digit. A register is a quarter
   of a side; one of digits has those of a slot, a lane for each quad. */

#ifndef EXLM_ROWS_NEON_H
#define EXLM_ROWS_NEON_H

enum { FEW = 4, ABREAST = 4 }; /* rows and registers whose sums fit */
enum { STEPS = QUADS };        /* registers that a slot's codes take of each, once they are put down */
enum { AT_ONCE = 6 };          /* of one row */

typedef int8x16_t Digits;
#define ADD_PRODUCTS(sums, bytes, digits, quad)                                                                  \
    (sums) = vreinterpretq_u32_s32(                                                                              \
        vdotq_laneq_s32(vreinterpretq_s32_u32(sums), vreinterpretq_s8_u32(bytes), digits, quad))

/* Signed bytes of a slot's codes. */
INLINE void signed_codes(const uint8_t *at, int bits, int sides, int slot, Whole *quads) {
    slot_codes(at, bits, sides, slot, quads);
    if (RAISED(bits)) EACH_QUAD quads[q] = veorq_u32(quads[q], w_every_byte(RAISED(bits)));
}

/* sums += one row · a run's band, a wide one, some registers at a time. */
INLINE void one_row_of_some(const Run *run, int bits, int way, Band band, const uint8_t *digits, const Level *level,
                            int first, Real *sums) {
    enum { vectors = AT_ONCE };
    const uint8_t *codes = band_codes(run, band);
    for (const Span *span = run->spans; span < run->spans + run->count; span++, level++) {
        Whole high[AT_ONCE], low[AT_ONCE];
        EACH_VECTOR high[v] = low[v] = w_all(0);
        for (int slot = span->slot; slot < span->slot + span->slots; slot++, digits += DIGITS) {
            Digits a = vld1q_s8((const int8_t *)digits), b = vld1q_s8((const int8_t *)digits + LANES);
            if (bits < 8 && !first) ask_ahead(codes, bits, slot, AHEAD_BYTES);
            EACH_VECTOR {
                Whole quads[QUADS];
                signed_codes(codes + (first + v) * VECTOR, bits, SIDES, slot, quads);
                ADD_PRODUCTS(high[v], quads[0], a, 0);
                ADD_PRODUCTS(low[v], quads[0], b, 0);
                ADD_PRODUCTS(high[v], quads[1], a, 1);
                ADD_PRODUCTS(low[v], quads[1], b, 1);
                ADD_PRODUCTS(high[v], quads[2], a, 2);
                ADD_PRODUCTS(low[v], quads[2], b, 2);
                ADD_PRODUCTS(high[v], quads[3], a, 3);
                ADD_PRODUCTS(low[v], quads[3], b, 3);
            }
        }
        EACH_VECTOR {
            Meaning g;
            Whole whole = w_add(w_left(high[v], 8), low[v]);
            meaning_of(&g, run, way, band, span->group, first + v);
            if (g.moved || g.shared) whole = w_add(whole, beginning(&g, first + v, level));
            sums[first + v] = settle(sums[first + v], whole, &g, first + v, level);
        }
    }
}

INLINE void one_row(const Run *run, int bits, int way, Band band, const uint8_t *digits, const Level *level,
                    Real *sums) {
    band.sides = SIDES;
    for (int first = 0; first < VECTORS; first += AT_ONCE)
        one_row_of_some(run, bits, way, band, digits, level, first, sums);
}

/* Codes as signed bytes, registers `ABREAST` apart. */
INLINE void put_quads(const Whole *quads, int bits, Whole *to) {
    Whole less = w_every_byte(RAISED(bits));
    EACH_QUAD to[q * ABREAST] = veorq_u32(quads[q], less);
}

/* whole: a span's slots of some rows, `step` bytes apart, times registers abreast: all high digits, then all low. */
INLINE void multiply_span(const Whole *codes, const uint8_t *digits, long step, int rows, Whole (*whole)[ABREAST]) {
    EACH_ROW EACH_ABREAST whole[r][v] = w_all(0);
    for (int digit = 0; digit < 2; digit++) {
        const Whole *at = codes;
        const uint8_t *own = digits + digit * LANES, *end = own + step;
        for (; own < end; own += DIGITS) {
            Digits x[FEW];
            EACH_ROW x[r] = vld1q_s8((const int8_t *)own + r * step);
#define QUAD_OF(q)                                                                                               \
    EACH_ABREAST {                                                                                               \
        Whole bytes = at[v];                                                                                     \
        EACH_ROW ADD_PRODUCTS(whole[r][v], bytes, x[r], q);                                                      \
    }                                                                                                            \
    at += ABREAST;
            QUAD_OF(0) QUAD_OF(1) QUAD_OF(2) QUAD_OF(3)
#undef QUAD_OF
        }
        if (!digit) EACH_ROW EACH_ABREAST whole[r][v] = w_left(whole[r][v], 8);
    }
}

#endif
