/* Packed matrices on a processor: products and single columns. Plain C, called through ctypes.

   One library for each instruction set, from the same source. AMX is never used: virtual machines announce it
   without letting programs use it. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#include "attention.h"
#include "banded.h"
#include "float_rows.h"
#include "floats.h"
#include "matrix.h"
#include "pool.h"
#include "product.h"
#include "repack.h"
#include "repack_bands.h"
#include "repack_lean.h"
#include "small.h"
#include "unpack.h"

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *placed, *y;
    int rows, tiles, each; /* `each`: tiles, or rows, of a chunk */
} Product;

/* Rows of x, put where the matrix's codes stand. */
static void place_chunk(void *job, int chunk) {
    const Product *p = job;
    const Matrix *m = p->matrix;
    int last = (chunk + 1) * p->each;
    for (long row = chunk * p->each; row < last && row < p->rows; row++) {
        const float *from = p->x + row * m->inputs;
        float *to = p->placed + row * m->places;
        for (int i = 0; i < m->places; i++) to[i] = m->source[i] < 0 ? 0 : from[m->source[i]];
    }
}

static int panels_of(const Run *run) {
    int most = MOST_SLOTS / slots_of(run->bits);
    return (run->blocks + most - 1) / most;
}

static void product_tile(const Product *p, const float *x, int tile) {
    const Matrix *m = p->matrix;
    float weights[TILE * PANEL] __attribute__((aligned(64)));
    float sums[MOST_STRIP * TILE * LANES] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)p->rows * TILE * LANES * sizeof(float));
    for (const Run *run = m->runs; run < m->runs + m->count; run++) {
        int slots = slots_of(run->bits), panels = panels_of(run), most = (run->blocks + panels - 1) / panels;
        for (int block = 0; block < run->blocks; block += most) {
            int blocks = run->blocks - block < most ? run->blocks - block : most;
            const float *from = x + run->first + block * slots * LANES;
            for (int n = 0; n < TILE; n += QUAD) {
                Panel panel = {run, (tile * TILE + n) / QUAD, block, blocks, m->rounded};
                if (p->rows > 1) unpack(&panel, weights + n * PANEL);
                else multiply_one(&panel, from, sums + n * LANES);
            }
            if (p->rows > 1) multiply(weights, from, m->places, blocks * slots, p->rows, sums);
        }
    }
    int first = tile * TILE, width = m->outputs - first < TILE ? m->outputs - first : TILE;
    for (int row = 0; row < p->rows; row++) {
        float out[TILE], *y = p->y + (long)row * m->outputs + first;
        for (int n = 0; n < TILE; n += QUAD) add_up(sums + (row * TILE + n) * LANES, out + n);
        for (int n = 0; n < width; n++) y[n] = out[n] + (m->bias ? m->bias[first + n] : 0);
    }
}

static void product_chunk(void *job, int chunk) {
    const Product *p = job;
    const float *x = p->placed ? p->placed : p->x;
    int first = chunk * p->each, last = first + p->each < p->tiles ? first + p->each : p->tiles;
    for (int tile = first; tile < last; tile++) product_tile(p, x, tile);
}

/* Whether matrices in bands can be multiplied here. */
EXPORT int exlm_has_whole_numbers(void) {
#if defined(WHOLE_NUMBERS)
    return 1;
#else
    return 0;
#endif
}

/* y (rows, outputs) = x (rows, inputs) @ matrix + bias. Returns 0, or 1 if there is no memory. */
EXPORT int exlm_product(const Matrix *m, const float *x, int rows, float *y, int threads) {
#if defined(WHOLE_NUMBERS)
    if (m->spans) return banded_products(&m, 1, x, rows, &y, (Around){0}, threads);
#endif
    if (m->runs->bits >= LEAN_BITS) return float_products(m, x, rows, y, threads);
    int strip = (int)(STRIP_BYTES / sizeof(float)) / m->places / 3 * 3;
    strip = strip < 12 ? 12 : strip > MOST_STRIP ? MOST_STRIP : strip;
    if (strip > rows) strip = rows;
    Product p = {.matrix = m, .tiles = (m->outputs + TILE - 1) / TILE};
    if (m->source && !(p.placed = malloc((size_t)strip * m->places * sizeof(float)))) return 1;
    for (int row = 0; row < rows; row += strip) {
        p.rows = rows - row < strip ? rows - row : strip;
        p.x = x + (long)row * m->inputs;
        p.y = y + (long)row * m->outputs;
        if (p.placed) {
            p.each = 1 + (1 << 14) / m->places;
            share(place_chunk, &p, (p.rows + p.each - 1) / p.each, threads);
        }
        int fair = (p.tiles + threads * 8 - 1) / (threads * 8);
        int least = 1 + (1 << 13) / (m->places * (p.rows + 3) / 4);
        p.each = fair > least ? fair : least;
        while ((p.tiles + p.each - 1) / p.each > MOST_CHUNKS) p.each *= 2;
        share(product_chunk, &p, (p.tiles + p.each - 1) / p.each, threads);
    }
    free(p.placed);
    return 0;
}

/* out (count, inputs): what single columns stand for. */
EXPORT void exlm_columns(const Matrix *m, const int64_t *ids, int count, float *out) {
    float weights[QUAD * PANEL];
    for (int i = 0; i < count; i++, out += m->inputs) {
        if (m->lean) {
            lean_column(m, ids[i], out);
            continue;
        }
#if defined(WHOLE_NUMBERS)
        if (m->spans) {
            banded_column(m, ids[i], out);
            continue;
        }
#endif
        for (const Run *run = m->runs; run < m->runs + m->count; run++) {
            int slots = slots_of(run->bits), most = MOST_SLOTS / slots;
            for (int block = 0; block < run->blocks; block += most) {
                int blocks = run->blocks - block < most ? run->blocks - block : most;
                Panel panel = {run, (int)(ids[i] / QUAD), block, blocks, m->rounded};
                unpack(&panel, weights);
                const float *from = weights + ids[i] % QUAD * PANEL;
                int place = run->first + block * slots * LANES;
                for (int n = 0; n < blocks * slots * LANES; n++, place++) {
                    int input = m->source ? m->source[place] : place;
                    if (input >= 0) out[input] = from[n];
                }
            }
        }
    }
}
