/* What the sums of a span become: scaled, moved and lowered. */

#ifndef EXLM_MEANING_H
#define EXLM_MEANING_H

#include "digits.h"

#if defined(__AVX512VNNI__)

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

/* What is not used stays as it is: this is done for every span. */
INLINE void meaning(Meaning *out, const Run *run, int way, Band band, int group) {
    int moved = run->zeros.kind, lowered = run->minima.kind;
    if (way) moved = way == SCALED_MOVED, lowered = way == SCALED_LOWERED;
    int sides = band.sides;
    out->moved = moved, out->lowered = lowered, out->shared = run->zero;
    EACH_SIDE {
        long at = factors_at(band, run->groups, group) + side * LANES;
        if (way) {
            out->scale[side] = r_halves((const uint16_t *)run->scales.table + at);
            if (lowered) out->minimum[side] = r_halves((const uint16_t *)run->minima.table + at);
            if (moved) out->zero[side] = w_bytes((const uint8_t *)run->zeros.table + at);
            continue;
        }
        out->scale[side] = sixteen_factors(&run->scales, band, run->groups, group, side);
        if (lowered) out->minimum[side] = sixteen_factors(&run->minima, band, run->groups, group, side);
        if (moved)
            out->zero[side] = _mm512_cvtps_epi32(sixteen_factors(&run->zeros, band, run->groups, group, side));
    }
}

/* What the zero points take off, to begin with. */
INLINE Whole beginning(const Meaning *g, int side, const Level *level) {
    if (g->moved) return _mm512_mullo_epi32(g->zero[side], w_all(-level->whole));
    return w_all((int)((uint32_t)-g->shared * (uint32_t)level->whole));
}

/* sum + what a span adds to it. */
INLINE Real settle(Real sum, Whole whole, const Meaning *g, int side, const Level *level) {
    sum = r_more(sum, r_mul(r_from(whole), r_all(level->unit)), g->scale[side]);
    return g->lowered ? _mm512_fnmadd_ps(g->minimum[side], r_all(level->sum), sum) : sum;
}

#endif
#endif
