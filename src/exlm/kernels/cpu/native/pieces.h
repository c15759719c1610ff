/* Several rows times a band, piece by piece: up to eight rows at a time, their sums in registers. One row too, if the
   band is a narrow one.

   Eight rows and three sides are 24 sums. Processors multiply twice as many vectors in a cycle as they load, so what
   is loaded must be used often: each four digits for three sides, each quad of codes for eight rows. */

#ifndef EXLM_PIECES_H
#define EXLM_PIECES_H

#include "meaning.h"

#if defined(__AVX512VNNI__)

enum { FEW = 8 }; /* rows whose sums fit the registers */

/* How a piece's codes lie: (slots, quads, sides, 64) a byte for each, put down or as they are in bands of 8 bits, or as
   they are in bands of 4 bits. */
enum { BYTES, EIGHTS, FOURS };

/* Neighbouring spans of a band, up to MOST_SPAN slots. */
typedef struct {
    Meaning meanings[MOST_SPAN]; /* of each span */
    const Span *spans;
    const uint8_t *codes, *soon, *digits; /* soon: what will be needed later, `line` bytes for each quad */
    const Level *levels;
    int count, rows, line; /* spans, and the rows whose digits lie side by side */
} Piece;

#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

/* sums (rows, sides, 16) += what a span adds to them. */
INLINE void settle_rows(Whole (*whole)[SIDES], const Meaning *g, int lowered, const Level *level, int rows,
                        int sides, float *sums) {
    Real scale[SIDES], minimum[SIDES];
    __asm__ volatile("" : "+r"(sums)); /* or else sums are loaded before it is known how, and wait in memory */
    EACH_SIDE {
        scale[side] = g->scale[side];
        HOLD(scale[side]);
        if (lowered) {
            minimum[side] = g->minimum[side];
            HOLD(minimum[side]);
        }
    }
    EACH_ROW {
        Real unit = r_all(level[r].unit), sum = r_all(0);
        HOLD(unit);
        if (lowered) {
            sum = r_all(level[r].sum);
            HOLD(sum);
        }
        EACH_SIDE {
            float *at = sums + (r * sides + side) * LANES;
            Real own = r_more(r_load(at), r_mul(r_from(whole[r][side]), unit), scale[side]);
            if (lowered) own = _mm512_fnmadd_ps(minimum[side], sum, own);
            r_store(at, own);
        }
    }
}

/* Quad q of a slot, in bytes. */
INLINE Whole quad_of(const uint8_t *slot, int kind, int q, int sides, int side) {
    if (kind != FOURS) return w_words(slot + (q * sides + side) * 64);
    Whole two = w_words(slot + (q / 2 * sides + side) * 64);
    return w_and(q % 2 ? w_right(two, 4) : two, _mm512_set1_epi8(15));
}

/* sums (rows, sides, 16) += a few rows · a piece: of each span all high digits, then all low. */
INLINE void few_rows(const Piece *p, int row, int rows, int kind, int sides, float *sums) {
    const uint8_t *codes = p->codes, *digits = p->digits, *soon = p->soon;
    const Level *level = p->levels + row;
    long size = (kind == FOURS ? 4 : 8) * sides * 32, line = row ? 0 : p->line;
    for (int n = 0; n < p->count; n++, level += p->rows) {
        long step = (long)p->spans[n].slots * DIGITS;
        const uint8_t *at, *end = codes + p->spans[n].slots * size;
        Whole whole[FEW][SIDES];
        EACH_ROW EACH_SIDE whole[r][side] = w_all(0);
        for (int digit = 0; digit < 2; digit++) {
            const uint8_t *own = digits + row * step + digit * LANES;
            for (at = codes; at < end; own += DIGITS, at += size)
                EACH_QUAD {
                    Whole bytes[SIDES];
                    EACH_SIDE {
                        bytes[side] = quad_of(at, kind, q, sides, side);
                        HOLD(bytes[side]);
                    }
                    if (kind == EIGHTS) { /* 96 bytes at a time, and too many for the first cache */
                        __builtin_prefetch(soon, 0, 2);
                        __builtin_prefetch(soon + line / 2, 0, 2);
                    } else __builtin_prefetch(soon);
                    soon += line;
                    EACH_ROW {
                        Whole four = four_digits(own + r * step + 4 * q);
                        EACH_SIDE ADD_PRODUCTS(whole[r][side], bytes[side], four);
                    }
                }
            if (!digit) EACH_ROW EACH_SIDE whole[r][side] = w_left(whole[r][side], 8);
        }
        codes = end, digits += step * p->rows;
        const Meaning *g = p->meanings + n;
        if (g->moved || g->shared)
            EACH_ROW EACH_SIDE whole[r][side] = _mm512_add_epi32(whole[r][side], beginning(g, side, level + r));
        if (g->lowered) settle_rows(whole, g, 1, level, rows, sides, sums);
        else settle_rows(whole, g, 0, level, rows, sides, sums);
    }
}

typedef void Few(const Piece *, int, float *);
#define ROWS(rows, name, kind, sides)                                                                            \
    static __attribute__((noinline)) void name##_##rows(const Piece *p, int row, float *sums) {                  \
        few_rows(p, row, rows, kind, sides, sums);                                                               \
    }
#define ALL(...)                                                                                                 \
    ROWS(1, __VA_ARGS__) ROWS(2, __VA_ARGS__) ROWS(3, __VA_ARGS__) ROWS(4, __VA_ARGS__)                          \
    ROWS(5, __VA_ARGS__) ROWS(6, __VA_ARGS__) ROWS(7, __VA_ARGS__) ROWS(8, __VA_ARGS__)
ALL(bytes, BYTES, SIDES) ALL(eights, EIGHTS, SIDES) ALL(fours, FOURS, SIDES) ALL(narrow, BYTES, 2)
#define NAMES(name) {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8}
static Few *const by_rows[][FEW] = {NAMES(bytes), NAMES(eights), NAMES(fours)};
static Few *const narrow_by_rows[] = NAMES(narrow);
#undef ROWS
#undef ALL
#undef NAMES
#undef EACH_ROW

/* A band's codes as bytes, (slots, quads, sides, 64). */
INLINE void put_codes(const uint8_t *band, int bits, int sides, int first, int slots, Whole *codes) {
    for (int slot = first; slot < first + slots; slot++, codes += QUADS * sides)
        EACH_SIDE {
            Whole quads[QUADS];
            slot_codes(band + side * 64, bits, sides, slot, quads);
            EACH_QUAD codes[q * sides + side] = quads[q];
        }
}

/* Asks for the factors of some groups. */
INLINE void ask_for_factors(const Factors *f, Band band, int groups, int group, int count) {
    int size = f->kind == HALVES ? 2 : f->kind == FLOATS ? 4 : 1;
    const char *at = (const char *)f->table + factors_at(band, groups, group) * size;
    for (int line = 0; line < count * band.sides * LANES * size; line += 64) __builtin_prefetch(at + line);
}

/* A band's next spans, from number n of a run; answers how many. Codes that can be multiplied as they lie stay there,
   others are put down in `room`. */
static int put_piece(Piece *piece, const Run *run, int n, Band band, int kind, Whole *room) {
    const Span *span = run->spans + n;
    int way = way_of(run), slots = 0, count = 0, size = run->bits * band.sides * 32;
    const uint8_t *codes = band_codes(run, band);
    while (n + count < run->count && slots + span[count].slots <= MOST_SPAN) slots += span[count++].slots;
    piece->codes = codes + (long)span->slot * size, piece->soon = piece->codes + AHEAD_BYTES;
    if (kind == BYTES) {
        piece->codes = (const uint8_t *)room, piece->soon = codes + (long)(span->slot + slots) * size;
#define OWN(own) case own: put_codes(codes, own, band.sides, span->slot, slots, room); break;
        switch (run->bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) }
#undef OWN
    }
    for (int i = 0; i < count; i++) meaning(piece->meanings + i, run, way, band, span[i].group);
    int next = span[count - 1].group + 1; /* the next band's, behind the last */
    ask_for_factors(&run->scales, band, run->groups, next, count);
    if (run->minima.kind) ask_for_factors(&run->minima, band, run->groups, next, count);
    if (run->zeros.kind) ask_for_factors(&run->zeros, band, run->groups, next, count);
    piece->spans = span, piece->count = count, piece->line = size / (2 * QUADS);
    return count;
}

/* sums (rows, sides, 16) += rows · a run's band. Codes of 4 bits become bytes on the way if it happens only once. */
static void many_rows(const Banded *p, const Run *run, Band band, float *sums) {
    Whole room[MOST_SPAN * QUADS * SIDES];
    Piece piece; /* not cleared: its meanings are large */
    int turns = (p->rows + FEW - 1) / FEW, most = (p->rows + turns - 1) / turns;
    int kind = run->bits == 8 ? EIGHTS : run->bits == 4 && turns == 1 && band.sides == SIDES ? FOURS : BYTES;
    Few *const *some = band.sides == SIDES ? by_rows[kind] : narrow_by_rows;
    piece.rows = p->rows;
    for (int n = 0; n < run->count;) {
        piece.levels = p->levels + (long)(run->span + n) * p->rows;
        piece.digits = p->digits + (2l * run->first + (long)run->spans[n].slot * DIGITS) * p->rows;
        n += put_piece(&piece, run, n, band, kind, room);
        for (int row = 0; row < p->rows; row += most)
            some[(p->rows - row < most ? p->rows - row : most) - 1](&piece, row, sums + row * band.sides * LANES);
    }
}

#endif
#endif
