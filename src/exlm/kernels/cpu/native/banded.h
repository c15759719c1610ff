/* Products of whole numbers: codes as they are, activations as digits.

   Sums of codes times digits are exact, so neither the other rows nor the order in which they are made decide any
   bits; a span's sum becomes a float once, and the spans are added up in order. */

#ifndef EXLM_BANDED_H
#define EXLM_BANDED_H

#include <stdlib.h>

#include "digits.h"
#include "pool.h"

#if defined(__AVX512VNNI__)

enum { FEW = 8, MANY = 96 }; /* rows whose sums fit the registers, and a strip of them the cache */

/* What the codes of a span's group are multiplied with, moved and lowered by. */
typedef struct {
    Real scale[SIDES], minimum[SIDES];
    Whole zero[SIDES];
    int moved, lowered, shared; /* moved: each output by its own zero point, else all by the shared one */
} Meaning;

/* The usual ways have code of their own: float16 scales alone, with float16 minima, or with zero points. */
enum { ANY_WAY, SCALED, SCALED_LOWERED, SCALED_MOVED };

static int way_of(const Run *run) {
    int lowered = run->minima.kind, moved = run->zeros.kind;
    if (run->scales.kind != HALVES) return ANY_WAY;
    if (!lowered && !moved) return SCALED;
    return !moved && lowered == HALVES ? SCALED_LOWERED : !lowered && moved == SMALL_CODES ? SCALED_MOVED : ANY_WAY;
}

INLINE Meaning meaning(const Run *run, int way, int band, int group) {
    Meaning out; /* what is not used stays as it is: this is done for every span */
    out.moved = run->zeros.kind, out.lowered = run->minima.kind, out.shared = run->zero;
    if (way) out.moved = way == SCALED_MOVED, out.lowered = way == SCALED_LOWERED;
#pragma GCC unroll 2
    for (int side = 0; side < SIDES; side++) {
        long at = ((long)band * run->groups + group) * BAND + side * LANES;
        if (way) {
            out.scale[side] = r_halves((const uint16_t *)run->scales.table + at);
            if (out.lowered) out.minimum[side] = r_halves((const uint16_t *)run->minima.table + at);
            if (out.moved) out.zero[side] = w_bytes((const uint8_t *)run->zeros.table + at);
            continue;
        }
        out.scale[side] = sixteen_factors(&run->scales, band, run->groups, group, side);
        if (out.lowered) out.minimum[side] = sixteen_factors(&run->minima, band, run->groups, group, side);
        if (out.moved)
            out.zero[side] = _mm512_cvtps_epi32(sixteen_factors(&run->zeros, band, run->groups, group, side));
    }
    return out;
}

/* What the zero points take off, to begin with. */
INLINE Whole beginning(const Meaning *g, int side, const Level *level) {
    if (g->moved) return _mm512_mullo_epi32(g->zero[side], w_all(-level->whole));
    return w_all((int)((uint32_t)-g->shared * (uint32_t)level->whole));
}

/* sum + what a span adds to it. */
INLINE Real settle(Real sum, Whole whole, const Meaning *g, int side, const Level *level) {
    sum = r_more(sum, r_from(whole), r_mul(g->scale[side], r_all(level->unit)));
    return g->lowered ? _mm512_fnmadd_ps(g->minimum[side], r_all(level->sum), sum) : sum;
}

INLINE Whole four_digits(const uint8_t *at) {
    int32_t four;
    memcpy(&four, at, sizeof four);
    return w_all(four);
}

/* sums + bytes · digits, four to a sum; written out, because the compiler copies sums to and fro otherwise. */
#define ADD_PRODUCTS(sums, bytes, digits) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(digits))

#define EACH_SIDE _Pragma("GCC unroll 2") for (int side = 0; side < SIDES; side++)
#define EACH_QUAD _Pragma("GCC unroll 4") for (int q = 0; q < QUADS; q++)

/* Every other line of what will be needed in the place of a slot. */
INLINE void ask_ahead(const uint8_t *band, int bits, int slot, int side) {
#pragma GCC unroll 4
    for (int line = side; line < bits; line += SIDES)
        __builtin_prefetch(band + (long)slot * bits * 64 + AHEAD_BYTES + line * 64);
}

/* sums += one row · a run's band. */
INLINE void one_row(const Run *run, int bits, int way, int band, const uint8_t *digits, const Level *level,
                    Real *sums) {
    const uint8_t *codes = band_codes(run, band);
    for (const Span *span = run->spans; span < run->spans + run->count; span++, level++) {
        Meaning g = meaning(run, way, band, span->group);
        Whole high[SIDES][2], low[SIDES][2];
        EACH_SIDE {
            high[side][0] = high[side][1] = low[side][1] = w_all(0);
            low[side][0] = beginning(&g, side, level);
        }
        for (int slot = span->slot; slot < span->slot + span->slots; slot++, digits += DIGITS) {
            Whole quads[SIDES][QUADS];
            EACH_SIDE slot_codes(codes + side * 64, bits, slot, quads[side]);
            EACH_SIDE ask_ahead(codes, bits, slot, side);
            EACH_QUAD {
                Whole a = four_digits(digits + 4 * q), b = four_digits(digits + LANES + 4 * q);
                EACH_SIDE {
                    ADD_PRODUCTS(high[side][q & 1], quads[side][q], a);
                    ADD_PRODUCTS(low[side][q & 1], quads[side][q], b);
                }
            }
        }
        EACH_SIDE {
            Whole a = _mm512_add_epi32(high[side][0], high[side][1]), b = _mm512_add_epi32(low[side][0], low[side][1]);
            sums[side] = settle(sums[side], _mm512_add_epi32(w_left(a, 8), b), &g, side, level);
        }
    }
}

/* sums (rows, 32) += a few rows · a span, whose codes are bytes (quads, 2, 64): all high digits, then all low ones. */
INLINE void few_rows(const Whole *codes, int slots, const uint8_t *digits, const Level *level, const Meaning *g,
                     int rows, float *sums) {
    long step = slots * DIGITS;
    Whole whole[FEW][SIDES];
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
    EACH_ROW EACH_SIDE whole[r][side] = w_all(0);
    for (int digit = 0; digit < 2; digit++, digits += LANES) {
        const uint8_t *own = digits;
        for (const Whole *at = codes, *end = codes + slots * QUADS * SIDES; at < end; own += DIGITS)
            for (int q = 0; q < QUADS; q++, at += SIDES) {
                Whole left = at[0], right = at[1];
                EACH_ROW {
                    Whole four = four_digits(own + r * step + 4 * q);
                    ADD_PRODUCTS(whole[r][0], left, four);
                    ADD_PRODUCTS(whole[r][1], right, four);
                }
            }
        if (!digit) EACH_ROW EACH_SIDE whole[r][side] = w_left(whole[r][side], 8);
    }
    if (g->moved || g->shared)
        EACH_ROW EACH_SIDE whole[r][side] = _mm512_add_epi32(whole[r][side], beginning(g, side, level + r));
    EACH_ROW EACH_SIDE {
        float *at = sums + r * BAND + side * LANES;
        r_store(at, settle(r_load(at), whole[r][side], g, side, level + r));
    }
#undef EACH_ROW
}

/* Out of line, so that a group's meaning stays in memory and the sums in registers. */
typedef void Few(const Whole *, int, const uint8_t *, const Level *, const Meaning *, float *);
#define ROWS(count)                                                                                              \
    static __attribute__((noinline)) void rows_##count(const Whole *codes, int slots, const uint8_t *digits,     \
                                                       const Level *level, const Meaning *g, float *sums) {      \
        few_rows(codes, slots, digits, level, g, count, sums);                                                   \
    }
ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
static Few *const by_rows[] = {NULL, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6, rows_7, rows_8};
#undef ROWS

/* A span's codes as bytes, (quads, 2, 64). */
INLINE void put_span(const uint8_t *band, int bits, const Span *span, Whole *codes) {
    for (int slot = span->slot; slot < span->slot + span->slots; slot++, codes += QUADS * SIDES)
        EACH_SIDE {
            Whole quads[QUADS];
            slot_codes(band + side * 64, bits, slot, quads);
            EACH_QUAD codes[q * SIDES + side] = quads[q];
            ask_ahead(band, bits, slot, side);
        }
}

/* sums (rows, 32) += rows · a run's band, whose codes are put down span by span. */
static void many_rows(const Banded *p, const Run *run, int band, float *sums) {
    Whole codes[MOST_SPAN * QUADS * SIDES];
    int way = way_of(run), turns = (p->rows + FEW - 1) / FEW, most = (p->rows + turns - 1) / turns;
    for (int n = 0; n < run->count; n++) {
        const Span *span = run->spans + n;
        Meaning g = meaning(run, way, band, span->group);
#define OWN(own) case own: put_span(band_codes(run, band), own, span, codes); break;
        switch (run->bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) OWN(8) }
#undef OWN
        const uint8_t *digits = p->digits + (2l * run->first + (long)span->slot * DIGITS) * p->rows;
        const Level *level = p->levels + (long)(run->span + n) * p->rows;
        for (int row = 0; row < p->rows; row += most) {
            Few *some = by_rows[p->rows - row < most ? p->rows - row : most];
            some(codes, span->slots, digits + (long)row * span->slots * DIGITS, level + row, &g, sums + row * BAND);
        }
    }
}

static void product_of_band(const Banded *p, int band) {
    const Matrix *m = p->matrix;
    float sums[MANY * BAND] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)p->rows * BAND * sizeof(float));
    for (const Run *run = m->runs; run < m->runs + m->count; run++) {
        if (p->rows > 1) {
            many_rows(p, run, band, sums);
            continue;
        }
#define OWN(own, way)                                                                                            \
    case way << 4 | own:                                                                                         \
        one_row(run, own, way, band, p->digits + 2l * run->first, p->levels + run->span, (Real *)sums);          \
        break;
        switch (way_of(run) << 4 | run->bits) {
            OWN(2, SCALED) OWN(3, SCALED) OWN(4, SCALED) OWN(5, SCALED) OWN(6, SCALED) OWN(8, SCALED)
            OWN(4, SCALED_LOWERED) OWN(4, SCALED_MOVED)
        default:
            switch (run->bits) { OWN(2, 0) OWN(3, 0) OWN(4, 0) OWN(5, 0) OWN(6, 0) OWN(8, 0) }
        }
#undef OWN
    }
    int first = band * BAND, width = m->outputs - first < BAND ? m->outputs - first : BAND;
    for (int row = 0; row < p->rows; row++) {
        float *y = p->y + (long)row * m->outputs + first, *own = sums + row * BAND;
        for (int n = 0; m->bias && n < width; n++) own[n] += m->bias[first + n];
        if (width == BAND) memcpy(y, own, BAND * sizeof(float));
        else memcpy(y, own, width * sizeof(float));
    }
}

typedef struct {
    Banded parts[MOST_TOGETHER];
    int bands, each; /* of all of them, and of a chunk */
} Bands;

static void bands_chunk(void *job, int chunk) {
    const Bands *all = job;
    for (int n = chunk * all->each; n < (chunk + 1) * all->each && n < all->bands; n++) {
        const Banded *p = all->parts;
        int band = n;
        while (band >= p->bands) band -= p->bands, p++;
        product_of_band(p, band);
    }
}

/* Whether x means the same digits to both. */
static int same_spans(const Matrix *a, const Matrix *b) {
    return !a->source && !b->source && a->count == 1 && b->count == 1 && a->spans == b->spans &&
           a->places == b->places && !memcmp(a->runs->spans, b->runs->spans, a->spans * sizeof(Span));
}

static void take_rows(Bands *all, const Matrix *const *matrices, int count, const float *x, int rows, int threads) {
    for (int n = 0; n < count; n++) {
        const Matrix *m = matrices[n];
        Banded *p = all->parts + n;
        p->x = x, p->rows = rows;
        if (n && same_spans(m, matrices[0])) {
            p->digits = all->parts->digits, p->levels = all->parts->levels;
            continue;
        }
        p->each = 1 + (1 << 11) / m->places;
        share(digits_chunk, p, (rows + p->each - 1) / p->each, threads);
    }
}

/* ys: one for each matrix, (rows, outputs) = x (rows, inputs) @ matrix + bias. Returns 0, or 1 if there is no
   memory. */
static int banded_products(const Matrix *const *matrices, int count, const float *x, int rows, float *const *ys,
                           int threads) {
    int strip = rows < MANY ? rows : MANY;
    size_t room = 1;
    Bands all = {.bands = 0};
    for (int n = 0; n < count; n++) {
        const Matrix *m = matrices[n];
        all.parts[n] = (Banded){.matrix = m, .bands = (m->outputs + BAND - 1) / BAND};
        all.bands += all.parts[n].bands;
        room += (size_t)strip * (m->spans * sizeof(Level) + m->places * 2);
    }
    uint8_t *memory = malloc(room), *free_at = memory;
    if (!memory) return 1;
    for (int n = 0; n < count; n++) {
        all.parts[n].levels = (Level *)free_at;
        all.parts[n].digits = free_at + (size_t)strip * matrices[n]->spans * sizeof(Level);
        free_at = all.parts[n].digits + (size_t)strip * matrices[n]->places * 2;
    }
    all.each = 1 + all.bands / (1 << 12);
    for (int row = 0; row < rows; row += strip) {
        take_rows(&all, matrices, count, x + (long)row * matrices[0]->inputs,
                  rows - row < strip ? rows - row : strip, threads);
        for (int n = 0; n < count; n++) all.parts[n].y = ys[n] + (long)row * matrices[n]->outputs;
        share(bands_chunk, &all, (all.bands + all.each - 1) / all.each, threads);
    }
    free(memory);
    return 0;
}

/* out (inputs): what a single column stands for. */
static void banded_column(const Matrix *m, int64_t id, float *out) {
    long band = id / BAND;
    int lane = (int)(id % BAND), side = lane / LANES;
    for (const Run *run = m->runs; run < m->runs + m->count; run++)
        for (const Span *span = run->spans; span < run->spans + run->count; span++) {
            Meaning g = meaning(run, ANY_WAY, (int)band, span->group);
            float scales[LANES], minima[LANES];
            int32_t zeros[LANES];
            memcpy(scales, &g.scale[side], sizeof scales);
            if (g.lowered) memcpy(minima, &g.minimum[side], sizeof minima);
            if (g.moved) memcpy(zeros, &g.zero[side], sizeof zeros);
            int at = lane % LANES, zero = g.moved ? zeros[at] : g.shared;
            for (int n = 0; n < span->slots * LANES; n++) {
                int place = run->first + span->slot * LANES + n, input = m->source ? m->source[place] : place;
                int code = single_code(band_codes(run, (int)band), run->bits, span->slot + n / LANES, lane, n % LANES);
                float value = (float)(code - zero) * scales[at];
                if (g.lowered) value -= minima[at];
                if (m->rounded) value = _cvtsh_ss(_cvtss_sh(value, NEAREST));
                if (input >= 0) out[input] = value;
            }
        }
}

#endif
#endif
