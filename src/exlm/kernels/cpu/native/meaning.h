/* What the sums of a span become: scaled, moved and lowered. */

#ifndef EXLM_MEANING_H
#define EXLM_MEANING_H

#include "digits.h"

#if defined(WHOLE_NUMBERS)

/* What the codes of a span's group are multiplied with, moved and lowered by. */
typedef struct {
    Real scale[VECTORS], minimum[VECTORS];
    Whole zero[VECTORS];
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

/* Of one register of outputs. What is not used stays as it is: this is done for every span. */
INLINE void meaning_of(Meaning *out, const Run *run, int way, Band band, int group, int v) {
    int moved = run->zeros.kind, lowered = run->minima.kind;
    if (way) moved = way == SCALED_MOVED, lowered = way == SCALED_LOWERED;
    out->moved = moved, out->lowered = lowered, out->shared = run->zero - RAISED(run->bits);
    if (way) {
        long at = factors_at(band, run->groups, group) + v * WIDTH;
        out->scale[v] = r_halves((const uint16_t *)run->scales.table + at);
        if (lowered) out->minimum[v] = r_halves((const uint16_t *)run->minima.table + at);
        if (moved) out->zero[v] = w_bytes((const uint8_t *)run->zeros.table + at);
    } else {
        out->scale[v] = some_factors(&run->scales, band, run->groups, group, v);
        if (lowered) out->minimum[v] = some_factors(&run->minima, band, run->groups, group, v);
        if (moved) out->zero[v] = r_whole(some_factors(&run->zeros, band, run->groups, group, v));
    }
    if (moved && RAISED(run->bits)) out->zero[v] = w_add(out->zero[v], w_all(-RAISED(run->bits)));
}

INLINE void meaning(Meaning *out, const Run *run, int way, Band band, int group) {
    int vectors = band.sides * PARTS;
    EACH_VECTOR meaning_of(out, run, way, band, group, v);
}

/* What the zero points take off, to begin with. */
INLINE Whole beginning(const Meaning *g, int v, const Level *level) {
    if (g->moved) return w_times(g->zero[v], w_all(-level->whole));
    return w_all((int)((uint32_t)-g->shared * (uint32_t)level->whole));
}

/* sum + what a span adds to it. */
INLINE Real settle(Real sum, Whole whole, const Meaning *g, int v, const Level *level) {
    sum = r_more(sum, r_mul(r_from(whole), r_all(level->unit)), g->scale[v]);
    return g->lowered ? r_lower(sum, g->minimum[v], r_all(level->sum)) : sum;
}

#endif
#endif
