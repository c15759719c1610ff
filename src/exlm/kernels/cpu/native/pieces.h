/* Several rows times a band, piece by piece: what is common to all instruction sets. */

#ifndef EXLM_PIECES_H
#define EXLM_PIECES_H

#include "meaning.h"

#if defined(WHOLE_NUMBERS)

/* Neighbouring spans of a band, up to MOST_SPAN slots. */
typedef struct {
    Meaning meanings[MOST_SPAN]; /* of each span */
    const Span *spans;
    const uint8_t *codes, *soon, *digits; /* soon: what will be needed later, `line` bytes for each quad */
    const Level *levels;
    int count, slots, rows, line; /* spans, and the rows whose digits lie side by side */
} Piece;

/* What will be needed in the place of a slot, into the second cache: asking for the first, a processor can wait for too
   few lines at a time. Codes of 8 bits are a plain stretch of memory, which it foresees better by itself. */
INLINE void ask_ahead(const uint8_t *band, int bits, int slot, int ahead) {
    const uint8_t *at = band + (long)slot * bits * BAND * 2 + ahead;
#pragma GCC unroll 12
    for (int line = 0; line < (bits * BAND * 2 + 63) / 64; line++) __builtin_prefetch(at + line * 64, 0, 2);
}

/* Asks for the factors of some groups. */
INLINE void ask_for_factors(const Factors *f, Band band, int groups, int group, int count) {
    int size = f->kind == HALVES ? 2 : f->kind == FLOATS ? 4 : 1;
    const char *at = (const char *)f->table + factors_at(band, groups, group) * size;
    for (int line = 0; line < count * band.sides * LANES * size; line += 64) __builtin_prefetch(at + line);
}

/* The next spans, from number n of a run, one at least and at most so many slots; answers how many. */
static int take_spans(Piece *piece, const Banded *p, const Run *run, int n, Band band, int most) {
    const Span *span = run->spans + n;
    int way = way_of(run), slots = span->slots, count = 1;
    while (n + count < run->count && slots + span[count].slots <= most) slots += span[count++].slots;
    for (int i = 0; i < count; i++) meaning(piece->meanings + i, run, way, band, span[i].group);
    int next = span[count - 1].group + 1; /* the next band's, behind the last */
    ask_for_factors(&run->scales, band, run->groups, next, count);
    if (run->minima.kind) ask_for_factors(&run->minima, band, run->groups, next, count);
    if (run->zeros.kind) ask_for_factors(&run->zeros, band, run->groups, next, count);
    piece->spans = span, piece->count = count, piece->slots = slots, piece->rows = p->rows;
    piece->levels = p->levels + (long)(run->span + n) * p->rows;
    piece->digits = p->digits + (2l * run->first + (long)span->slot * DIGITS) * p->rows;
    return count;
}

#if defined(__AVX512VNNI__)
#include "rows_avx512.h"
#else
#include "rows_put.h"
#endif

#endif
#endif
