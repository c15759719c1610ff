/* From codes to weights: the numbers a format defines, bit for bit.

   A group of up to 5 bits is a table of its weights, made once and looked up; wider codes are computed one by
   one, with the same operations. */

#ifndef EXLM_UNPACK_H
#define EXLM_UNPACK_H

#include "lanes.h"

enum { ROOM = MOST_SLOTS * QUAD + LANES, AHEAD = 4096 }; /* bytes that are asked for before they are needed */

/* Some blocks of a run, at most a panel of them, in a quad of outputs. */
typedef struct {
    const Run *run;
    int quad, block, blocks, rounded; /* rounded: weights are float16 */
} Panel;

/* What its groups are multiplied with, moved and lowered by, (groups, QUAD). */
typedef struct {
    float scale[ROOM], zero[ROOM], minimum[ROOM];
} Groups;

/* What happens to a number besides its scale. JOINED: it is scaled and lowered in one step, because the product needs
   no rounding; a zero point is then lowered by zero · scale. */
enum { MOVED = 1, LOWERED = 2, ROUNDED = 4, JOINED = 8 };

/* The factors of a few groups as floats. Reads and writes up to 15 behind them. */
INLINE void widen(const Factors *f, long quad, int groups, int first, int count, float *out) {
    long at = (quad * groups + first) * QUAD;
    for (int i = 0; i < count * QUAD; i += WIDTH) {
        Real values;
        if (f->kind == HALVES) values = r_halves((const uint16_t *)f->table + at + i);
        else if (f->kind == FLOATS) values = r_load((const float *)f->table + at + i);
        else if (f->kind == SMALL_CODES) values = r_from(w_bytes((const uint8_t *)f->table + at + i));
        else values = r_from(w_signed((const int8_t *)f->table + at + i));
        r_store(out + i, values);
        __builtin_prefetch((const char *)f->table + (at + i) * 2 + AHEAD / 4);
    }
    if (!f->supers) return;
    const uint16_t *supers = f->supers + quad * f->many * QUAD;
    for (int i = 0; i < count; i++)
        for (int n = 0; n < QUAD; n++) out[i * QUAD + n] *= half(supers[(first + i) / f->each * QUAD + n]);
}

/* Fills in the factors and answers what happens to numbers. */
static int prepare(const Panel *p, Groups *g) {
    const Run *run = p->run;
    const int32_t *owner = run->owners + p->block * slots_of(run->bits);
    int first = *owner, count = owner[p->blocks * slots_of(run->bits) - 1] - first + 1;
    int rounded = p->rounded ? ROUNDED : 0, lowered = run->minima.kind ? LOWERED : 0;
    int moved = run->zeros.kind || !is_tabled(run->bits) ? MOVED : 0; /* a table's shared zero point is in its book */
    widen(&run->scales, p->quad, run->groups, first, count, g->scale);
    if (lowered) widen(&run->minima, p->quad, run->groups, first, count, g->minimum);
    if (lowered && !moved && (run->scales.kind == HALVES || run->scales.supers)) return JOINED | rounded;
    if (run->zeros.kind) widen(&run->zeros, p->quad, run->groups, first, count, g->zero);
    else if (moved)
        for (int at = 0; at < count * QUAD; at++) g->zero[at] = (float)run->zero;
    if (lowered || !moved || run->scales.kind != HALVES) return moved | lowered | rounded;
    for (int at = 0; at < count * QUAD; at += WIDTH) {
        Real less = r_mul(r_load(g->zero + at), r_load(g->scale + at));
        r_store(g->minimum + at, less);
    }
    return JOINED | rounded;
}

/* What plain numbers stand for in a group of one output. */
INLINE Real weights(const Groups *g, int at, Real plain, int way) {
    if (way & MOVED) plain = r_sub(plain, r_all(g->zero[at]));
    if (way & JOINED) plain = r_less(r_all(g->minimum[at]), plain, r_all(g->scale[at]));
    else plain = r_mul(plain, r_all(g->scale[at]));
    if (way & LOWERED) plain = r_sub(plain, r_all(g->minimum[at]));
    return way & ROUNDED ? r_rounded(plain) : plain;
}

/* A group's tables, put down: code for every slot of the wider blocks would take the compiler seconds. */
static __attribute__((noinline)) void make_tables(const Groups *g, int at, const float *book, int parts, int way,
                                                  Real *out) {
    for (int n = 0; n < TOGETHER; n++)
        for (int i = 0; i < parts; i++) out[n * ENTRIES + i] = weights(g, at + n, r_load(book + i * WIDTH), way);
}

INLINE void load_streams(const uint8_t *at, int stream, int part, Whole *words) {
    int lane = part * WIDTH;
    if (stream & 4) words[0] = w_words(at + 4 * lane);
    if (stream == 1) words[0] = w_bytes(at + lane);
    if (stream == 5) words[1] = w_bytes(at + 4 * LANES + lane);
    if (stream == 3) words[0] = w_or(w_shorts(at + 2 * lane), w_left(w_bytes(at + 2 * LANES + lane), 16));
}

/* The next slot's codes, in the lowest bits. */
INLINE Whole code_of(const Whole *words, int bits, int slot) {
    int bit = slot * bits;
    if (bit + bits <= 32) return bit ? w_right(words[0], bit) : words[0];
    if (bit >= 32) return bit > 32 ? w_right(words[1], bit - 32) : words[1];
    return w_or(w_right(words[0], bit), w_left(words[1], 32 - bit));
}

/* Outputs `from` to `from + TOGETHER` of a panel. Without x, the weights go to `out` (QUAD, PANEL); with it, sums
   `out` (QUAD, 16) grow by x · weights. */
INLINE void walk(const Panel *p, int bits, int way, int fused, const Groups *g, int from, const float *x,
                 float *out) {
    const Run *run = p->run;
    int slots = slots_of(bits), stream = stream_of(bits), tabled = is_tabled(bits);
    int parts = 1 << bits > WIDTH ? (1 << bits) / WIDTH : 1;
    int current = -1, group = from - QUAD;
    const int32_t *owner = run->owners + p->block * slots, *end = owner + p->blocks * slots;
    const uint8_t *at = run->codes + (((long)p->quad * run->blocks + p->block) * QUAD + from) * stream * LANES;
    Real table[TOGETHER][ENTRIES], sum[TOGETHER][PARTS];
    out += from * (fused ? LANES : PANEL);
#define EACH_OUTPUT _Pragma("GCC unroll 4") for (int n = 0; n < TOGETHER; n++)
#define EACH_PART _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)
    EACH_OUTPUT EACH_PART sum[n][part] = fused ? r_load(out + n * LANES + part * WIDTH) : r_all(0);
    for (; owner < end; owner += slots, at += QUAD * stream * LANES) {
        Whole words[TOGETHER][PARTS][2];
        EACH_OUTPUT __builtin_prefetch(at + n * stream * LANES + AHEAD);
        EACH_OUTPUT EACH_PART load_streams(at + n * stream * LANES, stream, part, words[n][part]);
#pragma GCC unroll 8
        for (int slot = 0; slot < slots; slot++) {
            if (owner[slot] != current) {
                current = owner[slot], group += QUAD;
                if (bits == 4)
                    EACH_OUTPUT
#pragma GCC unroll 8
                    for (int i = 0; i < parts; i++)
                        table[n][i] = weights(g, group + n, r_load(run->book + i * WIDTH), way);
                else if (tabled) make_tables(g, group, run->book, parts, way, table[0]);
            }
            EACH_PART {
                Real own = r_all(0);
                if (fused) own = r_load(x + part * WIDTH);
                EACH_OUTPUT {
                    Whole code = code_of(words[n][part], bits, slot);
                    Real found;
                    if (tabled) found = pick(table[n], code, bits);
                    else {
                        found = r_from(bits == 8 ? code : w_and(code, w_all((1 << bits) - 1)));
                        found = weights(g, group + n, found, way);
                    }
                    if (fused) sum[n][part] = r_more(sum[n][part], found, own);
                    else r_store(out + n * PANEL + part * WIDTH, found);
                }
            }
            if (fused) x += LANES;
            else out += LANES;
        }
    }
    EACH_OUTPUT EACH_PART if (fused) r_store(out + n * LANES + part * WIDTH, sum[n][part]);
}

/* The usual ways have code of their own. */
#define BY_WAY(ANY, OWN)                                                                                          \
    switch (way << 4 | p->run->bits) {                                                                            \
        OWN(4, 0) OWN(4, JOINED) OWN(4, ROUNDED) OWN(4, JOINED | ROUNDED) OWN(8, JOINED)                          \
    default:                                                                                                      \
        switch (p->run->bits) { ANY(2) ANY(3) ANY(4) ANY(5) ANY(6) ANY(8) }                                       \
    }

/* weights (QUAD, PANEL) of a panel. */
static void unpack(const Panel *p, float *weights) {
    Groups g;
    int way = prepare(p, &g);
#define ANY(bits) case bits: walk(p, bits, way, 0, &g, from, NULL, weights); break;
#define OWN(bits, own) case (own) << 4 | bits: walk(p, bits, own, 0, &g, from, NULL, weights); break;
    for (int from = 0; from < QUAD; from += TOGETHER) BY_WAY(ANY, OWN)
#undef ANY
#undef OWN
}

/* sums (QUAD, 16) += x · weights: one row, whose weights are never put down. */
static void multiply_one(const Panel *p, const float *x, float *sums) {
    Groups g;
    int way = prepare(p, &g);
#define ANY(bits) case bits: walk(p, bits, way, 1, &g, from, x, sums); break;
#define OWN(bits, own) case (own) << 4 | bits: walk(p, bits, own, 1, &g, from, x, sums); break;
    for (int from = 0; from < QUAD; from += TOGETHER) BY_WAY(ANY, OWN)
#undef ANY
#undef OWN
}

#endif
