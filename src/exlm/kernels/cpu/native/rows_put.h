/* Several rows times a band whose codes are put down first, as the instruction set multiplies them: a few rows at a time,
   and registers abreast. */

#ifndef EXLM_ROWS_PUT_H
#define EXLM_ROWS_PUT_H

#define EACH_ROW _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)
#define EACH_ABREAST _Pragma("GCC unroll 4") for (int v = 0; v < ABREAST; v++)

#if defined(__AVX2__)
#include "rows_avx2.h"
#else
#include "rows_neon.h"
#endif

enum { PIECE_SLOTS = 8, PIECE_BYTES = PIECE_SLOTS * BAND * LANES }; /* unless a span has more; as bytes. Put down they
                                                                        stay in the first cache */

/* sums (rows, outputs of the band) += what a span adds to registers abreast. */
INLINE void settle_rows(Whole (*whole)[ABREAST], const Meaning *g, int lowered, int first, const Level *level,
                        int rows, int wide, float *sums) {
    EACH_ROW {
        Real unit = r_all(level[r].unit), sum = lowered ? r_all(level[r].sum) : unit;
        EACH_ABREAST {
            float *at = sums + r * wide + (first + v) * WIDTH;
            Real own = r_more(r_load(at), r_mul(r_from(whole[r][v]), unit), g->scale[first + v]);
            if (lowered) own = r_lower(own, g->minimum[first + v], sum);
            r_store(at, own);
        }
    }
}

/* sums (rows, outputs of the band) += a few rows · a piece. */
INLINE void few_rows(const Piece *p, int row, int rows, int vectors, float *sums) {
    const Whole *codes = (const Whole *)p->codes;
    for (int first = 0; first < vectors; first += ABREAST) {
        const uint8_t *digits = p->digits;
        const Level *level = p->levels + row;
        for (int n = 0; n < p->count; n++, level += p->rows) {
            long step = (long)p->spans[n].slots * DIGITS;
            const Meaning *g = p->meanings + n;
            Whole whole[FEW][ABREAST];
            multiply_span(codes, digits + row * step, step, rows, whole);
            codes += p->spans[n].slots * STEPS * ABREAST, digits += step * p->rows;
            if (g->moved || g->shared)
                EACH_ROW EACH_ABREAST whole[r][v] = w_add(whole[r][v], beginning(g, first + v, level + r));
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
#undef EACH_ABREAST

/* A band's codes, (those abreast, slots, steps, abreast). */
INLINE void put_codes(const uint8_t *band, int bits, int sides, int first, int slots, Whole *to) {
    for (int slot = 0; slot < slots; slot++) {
        ask_ahead(band, bits, first + slot, PIECE_BYTES);
        for (int v = 0; v < sides * PARTS; v++) {
            Whole quads[QUADS];
            slot_codes(band + v * VECTOR, bits, sides, first + slot, quads);
            put_quads(quads, bits, to + (long)(v / ABREAST * slots + slot) * STEPS * ABREAST + v % ABREAST);
        }
    }
}

/* sums (rows, outputs of the band) += rows · a run's band; one row too, if the band is a narrow one. */
static void many_rows(const Banded *p, const Run *run, Band band, float *sums) {
    Whole room[MOST_SPAN * STEPS * VECTORS];
    Piece piece; /* not cleared: its meanings are large */
    int turns = (p->rows + FEW - 1) / FEW, most = (p->rows + turns - 1) / turns, vectors = band.sides * PARTS;
    const uint8_t *codes = band_codes(run, band);
    piece.codes = (const uint8_t *)room;
    for (int n = 0; n < run->count;) {
        n += take_spans(&piece, p, run, n, band, PIECE_SLOTS);
#define OWN(own) case own: put_codes(codes, own, band.sides, piece.spans->slot, piece.slots, room); break;
        switch (run->bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) OWN(8) }
#undef OWN
        for (int row = 0; row < p->rows; row += most) {
            Few *some = by_rows[(p->rows - row < most ? p->rows - row : most) - 1];
            some(&piece, row, vectors, sums + row * vectors * WIDTH);
        }
    }
}

#endif
