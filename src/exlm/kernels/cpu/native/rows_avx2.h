/* Rows times bands by products of 16-bit numbers, two to a sum: codes widened, activations as they are.

   A quad's bytes are its first and third code as 16-bit numbers, once the others are masked, and its second and fourth,
   shifted. Products of bytes would need as many instructions, half of them to keep sums from overflowing. A register is
   half a side: one row takes a wide band's six at a time. */

#ifndef EXLM_ROWS_AVX2_H
#define EXLM_ROWS_AVX2_H

enum { FEW = 4, ABREAST = 2 }; /* rows and registers whose sums fit */
enum { STEPS = 2 * QUADS };    /* registers that a slot's codes take of each, once they are put down */

#define ADD_PRODUCTS(sums, shorts, digits) (sums) = w_add(sums, _mm256_madd_epi16(shorts, digits))
#define SHORTS(a, n) _mm256_and_si256(n ? _mm256_srli_epi16(a, n) : a, _mm256_set1_epi16(15))

/* sums (vectors) += a slot of one row · a band's codes of 4 bits, two quads of which share a row. */
INLINE void slot_of_fours(const uint8_t *at, const uint8_t *digits, Whole *sums) {
    enum { vectors = VECTORS };
#pragma GCC unroll 2
    for (int row = 0; row < 2; row++, at += BAND * 4, digits += LANES) {
        Whole a = four_digits(digits), b = four_digits(digits + 4);
        Whole c = four_digits(digits + 8), d = four_digits(digits + 12);
        EACH_VECTOR {
            Whole two = w_words(at + v * VECTOR);
            ADD_PRODUCTS(sums[v], SHORTS(two, 0), a);
            ADD_PRODUCTS(sums[v], SHORTS(two, 8), b);
            ADD_PRODUCTS(sums[v], SHORTS(two, 4), c);
            ADD_PRODUCTS(sums[v], _mm256_srli_epi16(two, 12), d);
        }
    }
}

/* The same of any width. */
INLINE void slot_of_codes(const uint8_t *codes, int bits, int slot, const uint8_t *digits, Whole *sums) {
    enum { vectors = VECTORS };
    EACH_VECTOR {
        Whole quads[QUADS];
        slot_codes(codes + v * VECTOR, bits, SIDES, slot, quads);
        EACH_QUAD {
            Whole even = w_and(quads[q], _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(quads[q], 8);
            ADD_PRODUCTS(sums[v], even, four_digits(digits + 8 * q));
            ADD_PRODUCTS(sums[v], odd, four_digits(digits + 8 * q + 4));
        }
    }
}

/* sums += one row · a run's band, a wide one. */
INLINE void one_row(const Run *run, int bits, int way, Band band, const uint8_t *digits, const Level *level,
                    Real *sums) {
    enum { vectors = VECTORS };
    const uint8_t *codes = band_codes(run, band);
    band.sides = SIDES;
    for (const Span *span = run->spans; span < run->spans + run->count; span++, level++) {
        Whole whole[VECTORS];
        EACH_VECTOR whole[v] = w_all(0);
        for (int slot = span->slot; slot < span->slot + span->slots; slot++, digits += DIGITS) {
            if (bits < 8) ask_ahead(codes, bits, slot, AHEAD_BYTES);
            if (bits == 4) slot_of_fours(codes + (long)slot * BAND * 8, digits, whole);
            else slot_of_codes(codes, bits, slot, digits, whole);
        }
        EACH_VECTOR {
            Meaning g;
            meaning_of(&g, run, way, band, span->group, v);
            if (g.moved || g.shared) whole[v] = w_add(whole[v], beginning(&g, v, level));
            sums[v] = settle(sums[v], whole[v], &g, v, level);
        }
    }
}

/* Codes as 16-bit numbers, registers `ABREAST` apart. */
INLINE void put_quads(const Whole *quads, int bits, Whole *to) {
    (void)bits;
    EACH_QUAD {
        to[2 * q * ABREAST] = w_and(quads[q], _mm256_set1_epi16(255));
        to[(2 * q + 1) * ABREAST] = _mm256_srli_epi16(quads[q], 8);
    }
}

/* whole: a span's slots of some rows, `step` bytes apart, times registers abreast. */
INLINE void multiply_span(const Whole *codes, const uint8_t *digits, long step, int rows, Whole (*whole)[ABREAST]) {
    EACH_ROW EACH_ABREAST whole[r][v] = w_all(0);
    const uint8_t *end = digits + step;
#pragma GCC unroll 2
    for (; digits < end; digits += 4, codes += ABREAST)
        EACH_ROW {
            Whole two = four_digits(digits + r * step);
            EACH_ABREAST ADD_PRODUCTS(whole[r][v], codes[v], two);
        }
}

#endif
