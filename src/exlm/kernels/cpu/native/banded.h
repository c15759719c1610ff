/* Products of whole numbers: codes as they are, activations as digits.

   Sums of codes times digits are exact, so neither the other rows nor the order in which they are made decide any
   bits; a span's sum becomes a float once, and the spans are added up in order. */

#ifndef EXLM_BANDED_H
#define EXLM_BANDED_H

#include <stdlib.h>

#include "meaning.h"
#include "pieces.h"
#include "pool.h"

#if defined(__AVX512VNNI__)

enum { MANY = 96 }; /* rows of a strip, whose sums fit the cache */

/* What will be needed in the place of a slot. */
INLINE void ask_ahead(const uint8_t *band, int bits, int slot) {
    const uint8_t *at = band + (long)slot * bits * BAND * 2 + AHEAD_BYTES;
#pragma GCC unroll 12
    for (int line = 0; line < (bits * BAND * 2 + 63) / 64; line++) __builtin_prefetch(at + line * 64);
}

/* sums += one row · a run's band, a wide one. */
INLINE void one_row(const Run *run, int bits, int way, Band band, const uint8_t *digits, const Level *level,
                    Real *sums) {
    enum { sides = SIDES };
    const uint8_t *codes = band_codes(run, band);
    band.sides = sides;
    for (const Span *span = run->spans; span < run->spans + run->count; span++, level++) {
        Whole high[SIDES], low[SIDES];
        EACH_SIDE high[side] = low[side] = w_all(0);
        for (int slot = span->slot; slot < span->slot + span->slots; slot++, digits += DIGITS) {
            Whole quads[SIDES][QUADS];
            EACH_SIDE slot_codes(codes + side * 64, bits, sides, slot, quads[side]);
            ask_ahead(codes, bits, slot);
            EACH_QUAD {
                Whole a = four_digits(digits + 4 * q), b = four_digits(digits + LANES + 4 * q);
                EACH_SIDE {
                    ADD_PRODUCTS(high[side], quads[side][q], a);
                    ADD_PRODUCTS(low[side], quads[side][q], b);
                }
            }
        }
        Meaning g;
        meaning(&g, run, way, band, span->group);
        EACH_SIDE {
            Whole whole = _mm512_add_epi32(w_left(high[side], 8), low[side]);
            if (g.moved || g.shared) whole = _mm512_add_epi32(whole, beginning(&g, side, level));
            sums[side] = settle(sums[side], whole, &g, side, level);
        }
    }
}

static void product_of_band(const Banded *p, int number) {
    const Matrix *m = p->matrix;
    Band band = band_of(m->outputs, number);
    int first = band.first * LANES, wide = band.sides * LANES;
    float sums[MANY * BAND] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)p->rows * wide * sizeof(float));
    for (const Run *run = m->runs; run < m->runs + m->count; run++) {
        if (p->rows > 1 || band.sides < SIDES) {
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
    int width = m->outputs - first < wide ? m->outputs - first : wide;
    for (int row = 0; row < p->rows; row++) {
        float *y = p->y + (long)row * m->outputs + first, *own = sums + row * wide;
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
        all.parts[n] = (Banded){.matrix = m, .bands = bands_of(m->outputs)};
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
    int side = (int)(id / LANES), at = (int)(id % LANES), number = side / SIDES;
    Band band = band_of(m->outputs, number);
    if (side >= band.first + band.sides) band = band_of(m->outputs, number + 1);
    side -= band.first;
    for (const Run *run = m->runs; run < m->runs + m->count; run++)
        for (const Span *span = run->spans; span < run->spans + run->count; span++) {
            Meaning g;
            meaning(&g, run, ANY_WAY, band, span->group);
            float scales[LANES], minima[LANES];
            int32_t zeros[LANES];
            memcpy(scales, &g.scale[side], sizeof scales);
            if (g.lowered) memcpy(minima, &g.minimum[side], sizeof minima);
            if (g.moved) memcpy(zeros, &g.zero[side], sizeof zeros);
            int lane = side * LANES + at, zero = g.moved ? zeros[at] : g.shared;
            for (int n = 0; n < span->slots * LANES; n++) {
                int place = run->first + span->slot * LANES + n, input = m->source ? m->source[place] : place;
                int slot = span->slot + n / LANES;
                int code = single_code(band_codes(run, band), run->bits, band.sides, slot, lane, n % LANES);
                float value = (float)(code - zero) * scales[at];
                if (g.lowered) value -= minima[at];
                if (m->rounded) value = _cvtsh_ss(_cvtss_sh(value, NEAREST));
                if (input >= 0) out[input] = value;
            }
        }
}

#endif
#endif
