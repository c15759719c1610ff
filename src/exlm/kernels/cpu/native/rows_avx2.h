/* Rows times bands by products of 16-bit numbers, two to a sum: codes widened, activations as they are.

   A quad's bytes are its first and third code as 16-bit numbers, once the others are masked, and its second and fourth,
   shifted. Products of bytes would need as many instructions, half of them to keep sums from overflowing. A register is
   half a side: one row takes a wide band's six at a time, several rows two. */

#ifndef EXLM_ROWS_AVX2_H
#define EXLM_ROWS_AVX2_H

enum { FEW = 4, PAIR = 2, TURNS = 2 * QUADS }; /* rows and registers whose sums fit; products of a slot */
enum { PIECE_SLOTS = 8, PIECE_BYTES = PIECE_SLOTS * BAND * LANES }; /* unless a span has more; as bytes. Widened, twice
                                                                        that, they stay in the first cache */

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

#define EACH_ROW _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)
#define EACH_OF_PAIR _Pragma("GCC unroll 2") for (int v = 0; v < PAIR; v++)

/* sums (rows, outputs of the band) += what a span adds to two registers of them. */
INLINE void settle_rows(Whole (*whole)[PAIR], const Meaning *g, int lowered, int first, const Level *level, int rows,
                        int wide, float *sums) {
    EACH_ROW {
        Real unit = r_all(level[r].unit), sum = lowered ? r_all(level[r].sum) : unit;
        EACH_OF_PAIR {
            float *at = sums + r * wide + (first + v) * WIDTH;
            Real own = r_more(r_load(at), r_mul(r_from(whole[r][v]), unit), g->scale[first + v]);
            r_store(at, lowered ? r_lower(own, g->minimum[first + v], sum) : own);
        }
    }
}

/* sums (rows, outputs of the band) += a few rows · a piece, whose codes are put down. */
INLINE void few_rows(const Piece *p, int row, int rows, int vectors, float *sums) {
    const Whole *codes = (const Whole *)p->codes;
    for (int first = 0; first < vectors; first += PAIR) {
        const uint8_t *digits = p->digits;
        const Level *level = p->levels + row;
        for (int n = 0; n < p->count; n++, level += p->rows) {
            long step = (long)p->spans[n].slots * DIGITS;
            const uint8_t *own = digits + row * step, *end = own + step;
            Whole whole[FEW][PAIR];
            EACH_ROW EACH_OF_PAIR whole[r][v] = w_all(0);
#pragma GCC unroll 2
            for (; own < end; own += 4, codes += PAIR)
                EACH_ROW {
                    Whole two = four_digits(own + r * step);
                    EACH_OF_PAIR ADD_PRODUCTS(whole[r][v], codes[v], two);
                }
            digits += step * p->rows;
            const Meaning *g = p->meanings + n;
            if (g->moved || g->shared)
                EACH_ROW EACH_OF_PAIR whole[r][v] = w_add(whole[r][v], beginning(g, first + v, level + r));
            if (g->lowered) settle_rows(whole, g, 1, first, level, rows, vectors * WIDTH, sums);
            else settle_rows(whole, g, 0, first, level, rows, vectors * WIDTH, sums);
        }
    }
}

typedef void Few(const Piece *, int, int, float *);
#define ROWS(rows)                                                                                               \
    static __attribute__((noinline)) void rows_##rows(const Piece *p, int row, int vectors, float *sums) {       \
        few_rows(p, row, rows, vectors, sums);                                                                   \
    }
ROWS(1) ROWS(2) ROWS(3) ROWS(4)
static Few *const by_rows[] = {rows_1, rows_2, rows_3, rows_4};
#undef ROWS
#undef EACH_ROW
#undef EACH_OF_PAIR

/* A band's codes as 16-bit numbers, (pairs of registers, slots, turns, 2). */
INLINE void put_codes(const uint8_t *band, int bits, int sides, int first, int slots, Whole *to) {
    for (int slot = 0; slot < slots; slot++) {
        ask_ahead(band, bits, first + slot, PIECE_BYTES);
        for (int v = 0; v < sides * PARTS; v++) {
            Whole quads[QUADS], *own = to + ((long)(v / PAIR * slots + slot) * TURNS) * PAIR + v % PAIR;
            slot_codes(band + v * VECTOR, bits, sides, first + slot, quads);
            EACH_QUAD {
                own[(2 * q) * PAIR] = w_and(quads[q], _mm256_set1_epi16(255));
                own[(2 * q + 1) * PAIR] = _mm256_srli_epi16(quads[q], 8);
            }
        }
    }
}

/* sums (rows, outputs of the band) += rows · a run's band; one row too, if the band is a narrow one. */
static void many_rows(const Banded *p, const Run *run, Band band, float *sums) {
    Whole room[MOST_SPAN * TURNS * VECTORS];
    Piece piece; /* not cleared: its meanings are large */
    int turns = (p->rows + FEW - 1) / FEW, most = (p->rows + turns - 1) / turns, vectors = band.sides * PARTS;
    const uint8_t *codes = band_codes(run, band);
    piece.codes = (const uint8_t *)room;
    for (int n = 0; n < run->count;) {
        n += take_spans(&piece, p, run, n, band, PIECE_SLOTS);
#define OWN(own) case own: put_codes(codes, own, band.sides, piece.spans->slot, piece.slots, room); break;
        switch (run->bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) OWN(8) }
#undef OWN
        for (int row = 0; row < p->rows; row += most)
            by_rows[(p->rows - row < most ? p->rows - row : most) - 1](&piece, row, vectors,
                                                                       sums + row * vectors * WIDTH);
    }
}

#endif
