/* Rows times bands by products of bytes: codes, and each activation's high and low digit. A register is a side.

   Eight rows and three sides are 24 sums. Processors multiply twice as many vectors in a cycle as they load, so what
   is loaded must be used often: each four digits for three sides, each quad of codes for eight rows. */

#ifndef EXLM_ROWS_AVX512_H
#define EXLM_ROWS_AVX512_H

/* sums + bytes · digits, four to a sum; written out, because the compiler copies sums to and fro otherwise. */
#define ADD_PRODUCTS(sums, bytes, digits) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(digits))

/* sums += one row · a run's band, a wide one. */
INLINE void one_row(const Run *run, int bits, int way, Band band, const uint8_t *digits, const Level *level,
                    Real *sums) {
    enum { sides = SIDES, vectors = VECTORS };
    const uint8_t *codes = band_codes(run, band);
    band.sides = sides;
    for (const Span *span = run->spans; span < run->spans + run->count; span++, level++) {
        Whole high[VECTORS], low[VECTORS];
        EACH_VECTOR high[v] = low[v] = w_all(0);
        for (int slot = span->slot; slot < span->slot + span->slots; slot++, digits += DIGITS) {
            Whole quads[VECTORS][QUADS];
            EACH_VECTOR slot_codes(codes + v * 64, bits, sides, slot, quads[v]);
            if (bits < 8) ask_ahead(codes, bits, slot, AHEAD_BYTES);
            EACH_QUAD {
                Whole a = four_digits(digits + 4 * q), b = four_digits(digits + LANES + 4 * q);
                EACH_VECTOR {
                    ADD_PRODUCTS(high[v], quads[v][q], a);
                    ADD_PRODUCTS(low[v], quads[v][q], b);
                }
            }
        }
        Meaning g;
        meaning(&g, run, way, band, span->group);
        EACH_VECTOR {
            Whole whole = w_add(w_left(high[v], 8), low[v]);
            if (g.moved || g.shared) whole = w_add(whole, beginning(&g, v, level));
            sums[v] = settle(sums[v], whole, &g, v, level);
        }
    }
}

enum { FEW = 8 }; /* rows whose sums fit the registers */

/* How a piece's codes lie: (slots, quads, sides, 64) a byte for each, put down or as they are in bands of 8 bits, or as
   they are in bands of 4 bits. */
enum { BYTES, EIGHTS, FOURS };

#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

/* sums (rows, sides, 16) += what a span adds to them. */
INLINE void settle_rows(Whole (*whole)[VECTORS], const Meaning *g, int lowered, const Level *level, int rows,
                        int vectors, float *sums) {
    Real scale[VECTORS], minimum[VECTORS];
    __asm__ volatile("" : "+r"(sums)); /* or else sums are loaded before it is known how, and wait in memory */
    EACH_VECTOR {
        scale[v] = g->scale[v];
        HOLD(scale[v]);
        if (lowered) {
            minimum[v] = g->minimum[v];
            HOLD(minimum[v]);
        }
    }
    EACH_ROW {
        Real unit = r_all(level[r].unit), sum = r_all(0);
        HOLD(unit);
        if (lowered) {
            sum = r_all(level[r].sum);
            HOLD(sum);
        }
        EACH_VECTOR {
            float *at = sums + (r * vectors + v) * LANES;
            Real own = r_more(r_load(at), r_mul(r_from(whole[r][v]), unit), scale[v]);
            if (lowered) own = r_lower(own, minimum[v], sum);
            r_store(at, own);
        }
    }
}

/* Quad q of a slot, in bytes. */
INLINE Whole quad_of(const uint8_t *slot, int kind, int q, int sides, int v) {
    if (kind != FOURS) return w_words(slot + (q * sides + v) * 64);
    Whole two = w_words(slot + (q / 2 * sides + v) * 64);
    return w_and(q % 2 ? w_right(two, 4) : two, w_every_byte(15));
}

/* sums (rows, sides, 16) += a few rows · a piece: of each span all high digits, then all low. */
INLINE void few_rows(const Piece *p, int row, int rows, int kind, int sides, float *sums) {
    int vectors = sides;
    const uint8_t *codes = p->codes, *digits = p->digits, *soon = p->soon;
    const Level *level = p->levels + row;
    long size = (kind == FOURS ? 4 : 8) * sides * 32, line = row ? 0 : p->line;
    for (int n = 0; n < p->count; n++, level += p->rows) {
        long step = (long)p->spans[n].slots * DIGITS;
        const uint8_t *at, *end = codes + p->spans[n].slots * size;
        Whole whole[FEW][VECTORS];
        EACH_ROW EACH_VECTOR whole[r][v] = w_all(0);
        for (int digit = 0; digit < 2; digit++) {
            const uint8_t *own = digits + row * step + digit * LANES;
            for (at = codes; at < end; own += DIGITS, at += size)
                EACH_QUAD {
                    Whole bytes[VECTORS];
                    EACH_VECTOR {
                        bytes[v] = quad_of(at, kind, q, sides, v);
                        HOLD(bytes[v]);
                    }
                    if (kind == EIGHTS) { /* 96 bytes at a time, and too many for the first cache */
                        __builtin_prefetch(soon, 0, 2);
                        __builtin_prefetch(soon + line / 2, 0, 2);
                    } else __builtin_prefetch(soon);
                    soon += line;
                    EACH_ROW {
                        Whole four = four_digits(own + r * step + 4 * q);
                        EACH_VECTOR ADD_PRODUCTS(whole[r][v], bytes[v], four);
                    }
                }
            if (!digit) EACH_ROW EACH_VECTOR whole[r][v] = w_left(whole[r][v], 8);
        }
        codes = end, digits += step * p->rows;
        const Meaning *g = p->meanings + n;
        if (g->moved || g->shared)
            EACH_ROW EACH_VECTOR whole[r][v] = w_add(whole[r][v], beginning(g, v, level + r));
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
    int vectors = sides;
    for (int slot = first; slot < first + slots; slot++, codes += QUADS * sides)
        EACH_VECTOR {
            Whole quads[QUADS];
            slot_codes(band + v * 64, bits, sides, slot, quads);
            EACH_QUAD codes[q * sides + v] = quads[q];
        }
}

/* The codes of a piece. Those that can be multiplied as they lie stay there, others are put down in `room`. */
static void put_piece(Piece *piece, const Run *run, Band band, int kind, Whole *room) {
    int size = run->bits * band.sides * 32, first = piece->spans->slot;
    const uint8_t *codes = band_codes(run, band);
    piece->line = size / (2 * QUADS);
    piece->codes = codes + (long)first * size, piece->soon = piece->codes + AHEAD_BYTES;
    if (kind != BYTES) return;
    piece->codes = (const uint8_t *)room, piece->soon = codes + (long)(first + piece->slots) * size;
#define OWN(own) case own: put_codes(codes, own, band.sides, first, piece->slots, room); break;
    switch (run->bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) }
#undef OWN
}

/* sums (rows, sides, 16) += rows · a run's band; one row too, if the band is a narrow one. Codes of 4 bits become bytes
   on the way if it happens only once. */
static void many_rows(const Banded *p, const Run *run, Band band, float *sums) {
    Whole room[MOST_SPAN * QUADS * SIDES];
    Piece piece; /* not cleared: its meanings are large */
    int turns = (p->rows + FEW - 1) / FEW, most = (p->rows + turns - 1) / turns;
    int kind = run->bits == 8 ? EIGHTS : run->bits == 4 && turns == 1 && band.sides == SIDES ? FOURS : BYTES;
    Few *const *some = band.sides == SIDES ? by_rows[kind] : narrow_by_rows;
    for (int n = 0; n < run->count;) {
        n += take_spans(&piece, p, run, n, band, MOST_SPAN);
        put_piece(&piece, run, band, kind, room);
        for (int row = 0; row < p->rows; row += most)
            some[(p->rows - row < most ? p->rows - row : most) - 1](&piece, row, sums + row * band.sides * LANES);
    }
}

#endif
