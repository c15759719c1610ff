/* Packed matrices on a processor: repacking, products, single columns. Plain C, called through ctypes.

   One library for each instruction set, from the same source. AMX is never used: virtual machines announce it
   without letting programs use it. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#include "attention.h"
#include "matrix.h"
#include "pool.h"
#include "product.h"
#include "small.h"
#include "rows.h"

enum { PANEL_BYTES = 1 << 19, STRIP = 32, RUN = 4 };

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *y;
    Rows ready;
    int rows, tiles, each; /* `each`: tiles, or rows, of a chunk */
} Product;

static void prepare_chunk(void *job, int chunk) {
    const Product *p = job;
    int last = (chunk + 1) * p->each;
    for (int row = chunk * p->each; row < last && row < p->rows; row++)
        prepare(p->matrix, p->x + (long)row * p->matrix->inputs, &p->ready, row);
}

static void product_chunk(void *job, int chunk) {
    const Product *p = job;
    const Matrix *m = p->matrix;
    float out[STRIP * TILE];
    for (int tile = chunk * p->each; tile < (chunk + 1) * p->each && tile < p->tiles; tile++) {
        int first = tile * TILE, width = m->outputs - first < TILE ? m->outputs - first : TILE;
        for (int row = 0; row < p->rows; row += STRIP) {
            int rows = p->rows - row < STRIP ? p->rows - row : STRIP;
            product(m, tile, rows, &p->ready, row, out);
            for (int r = 0; r < rows; r++) {
                float *y = p->y + (long)(row + r) * m->outputs + first;
                for (int n = 0; n < width; n++) y[n] = out[r * TILE + n] + (m->bias ? m->bias[first + n] : 0);
            }
        }
    }
}

/* y (rows, outputs) = x (rows, inputs) @ matrix + bias. Returns 0, or 1 if there is no memory. */
EXPORT int exlm_product(const Matrix *m, const float *x, int rows, float *y, int threads) {
    int most = PANEL_BYTES / (m->blocks * BLOCK * 2) / STRIP * STRIP;
    int panel = rows < STRIP ? rows : most < STRIP ? STRIP : most < rows ? most : rows;
    long places = (long)panel * m->blocks;
    char *memory = malloc(places * (BLOCK * 2 + 4 + 8) + (long)panel * m->groups * 4 + 64);
    if (!memory) return 1;
    Product p = {.matrix = m, .tiles = (m->outputs + TILE - 1) / TILE};
    p.ready.whole = (int16_t *)(memory + (-(uintptr_t)memory & 63));
    p.ready.scale = (float *)(p.ready.whole + places * BLOCK);
    p.ready.start = (int32_t *)(p.ready.scale + places);
    p.ready.sum = (float *)(p.ready.start + 2 * places);
    for (int row = 0; row < rows; row += panel) {
        p.rows = rows - row < panel ? rows - row : panel;
        p.x = x + (long)row * m->inputs;
        p.y = y + (long)row * m->outputs;
        p.each = 1 + 512 / m->blocks;
        share(prepare_chunk, &p, (p.rows + p.each - 1) / p.each, threads);
        int fair = (p.tiles + threads * 8 - 1) / (threads * 8), least = 1 + 160 / (m->blocks * p.rows);
        p.each = fair > least ? fair : least;
        while ((p.tiles + p.each - 1) / p.each > MOST_CHUNKS) p.each *= 2;
        share(product_chunk, &p, (p.tiles + p.each - 1) / p.each, threads);
    }
    free(memory);
    return 0;
}

static int code_at(const int32_t *words, int bits, int place, int lane) {
    int pair = place / 2, code = 0, low = 0, odd = place % 2 * 16;
    if (bits == 8) return words[pair / 2 * TILE + lane] >> (pair % 2 * 8 + odd) & 0xff;
    for (int plane = 4; plane; plane >>= 1) {
        if (!(bits & plane)) continue;
        int each = 16 / plane;
        code |= (words[pair / each * TILE + lane] >> (pair % each * plane + odd) & ((1 << plane) - 1)) << low;
        words += plane * TILE;
        low += plane;
    }
    return code;
}

static float factor(const void *table, long at, int wide) {
    return wide ? ((const float *)table)[at] : half(((const uint16_t *)table)[at]);
}

/* out (count, inputs): what single columns stand for. */
EXPORT void exlm_columns(const Matrix *m, const int64_t *ids, int count, float *out) {
    for (int i = 0; i < count; i++, out += m->inputs) {
        int tile = (int)(ids[i] / TILE), lane = (int)(ids[i] % TILE);
        for (int n = 0; n < m->count; n++) {
            const Run *run = m->runs + n;
            const int32_t *words = run->codes + (long)tile * run->blocks * run->bits * TILE;
            for (int block = 0, group = 0, used = 0; block < run->blocks; block++, words += run->bits * TILE) {
                for (int place = 0; place < BLOCK; place++) {
                    int input = m->source ? m->source[(run->first_block + block) * BLOCK + place]
                                          : (run->first_block + block) * BLOCK + place;
                    if (input < 0) continue;
                    int g = run->fine ? 2 * block + place / 16 : group;
                    long at = ((long)tile * run->groups + g) * TILE + lane;
                    float zero = run->zeros ? run->zeros[at] : (float)run->zero;
                    float value = ((float)code_at(words, run->bits, place, lane) - zero) *
                                  factor(run->scales, at, run->wide);
                    out[input] = run->minima ? value - factor(run->minima, at, run->wide) : value;
                }
                if (!run->fine && ++used == run->spans[group]) group++, used = 0;
            }
        }
    }
}

typedef struct {
    const int32_t *codes, *places;
    const uint8_t *book;
    int32_t *out;
    int columns, stored, bits, blocks;
} Repacking;

static void repack_tile(const Repacking *p, int tile) {
    int first = tile * TILE, width = p->columns - first < TILE ? p->columns - first : TILE;
    uint32_t mask = (1u << p->stored) - 1;
    for (int block = 0; block < p->blocks; block++) {
        uint32_t *out = (uint32_t *)p->out + ((long)tile * p->blocks + block) * p->bits * TILE;
        memset(out, 0, (size_t)p->bits * TILE * 4);
        for (int place = 0; place < BLOCK; place++) {
            int row = p->places[block * BLOCK + place];
            if (row < 0) continue;
            long bit = (long)row * p->stored;
            int shift = (int)(bit & 31), pair = place / 2, odd = place % 2 * 16;
            const uint32_t *at = (const uint32_t *)p->codes + (bit >> 5) * p->columns + first;
            uint32_t code[TILE] = {0};
            for (int n = 0; n < width; n++) {
                uint64_t word = at[n];
                if (shift + p->stored > 32) word |= (uint64_t)at[n + p->columns] << 32;
                code[n] = (uint32_t)(word >> shift) & mask;
            }
            if (p->book) for (int n = 0; n < TILE; n++) code[n] = p->book[code[n]];
            if (p->bits == 8) {
                for (int n = 0; n < TILE; n++) out[pair / 2 * TILE + n] |= code[n] << (pair % 2 * 8 + odd);
                continue;
            }
            uint32_t *words = out;
            for (int plane = 4, low = 0; plane; plane >>= 1) {
                if (!(p->bits & plane)) continue;
                int each = 16 / plane, up = pair % each * plane + odd;
                for (int n = 0; n < TILE; n++)
                    words[pair / each * TILE + n] |= (code[n] >> low & ((1u << plane) - 1)) << up;
                words += plane * TILE;
                low += plane;
            }
        }
    }
}

static void repack_chunk(void *job, int chunk) {
    const Repacking *p = job;
    for (int tile = chunk * RUN; tile < (chunk + 1) * RUN && tile * TILE < p->columns; tile++) repack_tile(p, tile);
}

/* Codes of `stored` bits down each column → blocks of `bits`; `book`, if any, says what each code becomes. */
EXPORT void exlm_repack(const int32_t *codes, int columns, int stored, const int32_t *places, int blocks,
                        const uint8_t *book, int bits, int32_t *out, int threads) {
    Repacking job = {codes, places, book, out, columns, stored, bits, blocks};
    share(repack_chunk, &job, (columns + RUN * TILE - 1) / (RUN * TILE), threads);
}
