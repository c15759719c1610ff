/* Products of whole numbers: codes as they are, activations as digits.

   Sums of codes times digits are exact, so neither the other rows nor the order in which they are made decide any
   bits; a span's sum becomes a float once, and the spans are added up in order. */

#ifndef EXLM_BANDED_H
#define EXLM_BANDED_H

#include <stdlib.h>

#include "pieces.h"
#include "pool.h"

#if defined(WHOLE_NUMBERS)

enum { MANY = 96 }; /* rows of a strip, whose sums fit the cache */

/* sums (rows, 48 or 32): rows · a band, and the bias. */
static void product_of_band(const Banded *p, int number, float *sums) {
    const Matrix *m = p->matrix;
    Band band = band_of(m->outputs, number);
    int first = band.first * LANES, wide = band.sides * LANES;
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
    for (int row = 0; m->bias && row < p->rows; row++)
        for (int n = 0; n < wide && first + n < m->outputs; n++) sums[row * wide + n] += m->bias[first + n];
}

typedef struct {
    Banded parts[MOST_TOGETHER];
    int bands, each, gated; /* of all of them, and of a chunk; gated: of the first, whose answer goes through a gate */
} Bands;

/* A band of the answers: of a product, or of silu(first) · second. */
static void answer_band(const Bands *all, const Banded *p, int number) {
    float sums[MANY * BAND] __attribute__((aligned(64))), others[MANY * BAND] __attribute__((aligned(64)));
    Band band = band_of(p->matrix->outputs, number);
    int first = band.first * LANES, wide = band.sides * LANES, outputs = p->matrix->outputs;
    int width = outputs - first < wide ? outputs - first : wide;
    product_of_band(p, number, sums);
    if (all->gated) {
        product_of_band(p + 1, number, others);
        for (int n = 0; n < p->rows * wide; n += LANES) put(sums + n, silu(get(sums + n)) * get(others + n));
    }
    for (int row = 0; row < p->rows; row++) {
        float *y = p->y + (long)row * outputs + first, *own = sums + row * wide;
        const float *more = p->residual ? p->residual + (long)row * outputs + first : NULL;
        for (int n = 0; more && n < width; n++) own[n] += more[n];
        if (width == BAND) memcpy(y, own, BAND * sizeof(float));
        else memcpy(y, own, width * sizeof(float));
    }
}

static void bands_chunk(void *job, int chunk) {
    const Bands *all = job;
    for (int n = chunk * all->each; n < (chunk + 1) * all->each && n < all->bands; n++) {
        const Banded *p = all->parts;
        int band = n;
        while (band >= p->bands) band -= p->bands, p++;
        answer_band(all, p, band);
    }
}

/* Whether x means the same digits to both. */
static int same_spans(const Matrix *a, const Matrix *b) {
    return !a->source && !b->source && a->count == 1 && b->count == 1 && a->spans == b->spans &&
           a->places == b->places && !memcmp(a->runs->spans, b->runs->spans, a->spans * sizeof(Span));
}

/* The next rows of x as digits; what matrices share is made once, for the first. */
static void take_rows(Bands *all, int count, int first, int rows, int threads) {
    for (int n = 0; n < count; n++) {
        Banded *p = all->parts + n;
        p->first = first, p->rows = rows;
        if (n && same_spans(p->matrix, all->parts->matrix)) {
            p->digits = all->parts->digits, p->levels = all->parts->levels;
            continue;
        }
        p->each = 1 + (1 << 14) / p->matrix->places;
        share(digits_chunk, p, (rows + p->each - 1) / p->each, threads);
    }
}

/* What stands around products: a norm, whose answer is their x, what is added to the first, and whether the answer of
   two is silu(first) · second. */
typedef struct {
    const Norm *norm;
    const float *residual;
    int gated;
} Around;

/* ys: one for each answer, (rows, outputs), of x (rows, inputs) @ matrix + bias. Returns 0, or 1 if there is no
   memory. */
static int banded_products(const Matrix *const *matrices, int count, const float *x, int rows, float *const *ys,
                           Around around, int threads) {
    int strip = rows < MANY ? rows : MANY;
    size_t room = 1;
    Bands all = {.gated = around.gated};
    if (around.norm) x = around.norm->out;
    for (int n = 0; n < count; n++) {
        const Matrix *m = matrices[n];
        all.parts[n] = (Banded){.matrix = m, .norm = n ? NULL : around.norm, .bands = bands_of(m->outputs)};
        if (!n || !all.gated) all.bands += all.parts[n].bands;
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
        for (int n = 0; n < count; n++) {
            Banded *p = all.parts + n;
            p->x = x + (long)row * p->matrix->inputs;
            if (!n || !all.gated) p->y = ys[n] + (long)row * p->matrix->outputs;
            if (!n && around.residual) p->residual = around.residual + (long)row * p->matrix->outputs;
        }
        take_rows(&all, count, row, rows - row < strip ? rows - row : strip, threads);
        share(bands_chunk, &all, (all.bands + all.each - 1) / all.each, threads);
    }
    free(memory);
    return 0;
}

/* out (inputs): what a single column stands for. */
static void banded_column(const Matrix *m, int64_t id, float *out) {
    int side = (int)(id / LANES), number = side / SIDES;
    Band band = band_of(m->outputs, number);
    if (side >= band.first + band.sides) band = band_of(m->outputs, number + 1);
    int output = (int)(id - (int64_t)band.first * LANES), v = output / WIDTH, at = output % WIDTH;
    for (const Run *run = m->runs; run < m->runs + m->count; run++)
        for (const Span *span = run->spans; span < run->spans + run->count; span++) {
            Meaning g;
            meaning(&g, run, ANY_WAY, band, span->group);
            Real scale = r_all(g.scale[v][at]), minimum = r_all(g.lowered ? g.minimum[v][at] : 0);
            int32_t zero = (g.moved ? ((const int32_t *)&g.zero[v])[at] : g.shared) + RAISED(run->bits);
            for (int slot = span->slot; slot < span->slot + span->slots; slot++) {
                Whole quads[QUADS];
                uint32_t codes[QUADS];
                any_codes(band_codes(run, band) + v * VECTOR, run->bits, band.sides, slot, quads);
                for (int q = 0; q < QUADS; q++) codes[q] = ((const uint32_t *)&quads[q])[at];
                for (int part = 0; part < PARTS; part++) {
                    Whole plain = w_add(w_bytes((const uint8_t *)codes + part * WIDTH), w_all(-zero));
                    Real values = r_mul(r_from(plain), scale);
                    if (g.lowered) values = r_sub(values, minimum);
                    if (m->rounded) values = r_rounded(values);
                    int place = run->first + slot * LANES + part * WIDTH;
                    for (int n = 0; n < WIDTH; n++) {
                        int input = m->source ? m->source[place + n] : place + n;
                        if (input >= 0) out[input] = values[n];
                    }
                }
            }
        }
}

#endif
#endif
