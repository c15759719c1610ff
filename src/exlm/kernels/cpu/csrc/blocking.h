/* Several rows times a band, piece by piece: what is common to all instruction sets. */

#ifndef EXLM_PIECES_H
#define EXLM_PIECES_H

#include "dequant.h"

/* Neighbouring spans of a band, up to MOST_SPAN slots. */
typedef struct {
    Dequant dequants[MAX_SPAN]; /* of each span */
    const GroupSpan *spans;
    const uint8_t *codes, *prefetch, *qact; /* soon: what will be needed later, `line` bytes for each quad */
    const ActScale *act_scales;
    int count, kblocks, rows, prefetch_step; /* spans, and the rows whose digits lie side by side */
} KcBlock;

/* What will be needed in the place of a slot, into the second cache: asking for the first, a processor can wait for too
   few lines at a time. Codes of 8 bits are a plain stretch of memory, which it foresees better by itself. */
INLINE void prefetch_codes(const uint8_t *panel, int bits, int kblock, int ahead) {
    const uint8_t *at = panel + (long)kblock * bits * PANEL_N * 2 + ahead;
#pragma GCC unroll 12
    for (int prefetch_step = 0; prefetch_step < (bits * PANEL_N * 2 + 63) / 64; prefetch_step++) __builtin_prefetch(at + prefetch_step * 64, 0, 2);
}

/* Asks for the factors of some groups. */
INLINE void prefetch_factors(const FactorTable *f, Panel panel, int groups, int group, int count) {
    int size = f->kind == F16 ? 2 : f->kind == F32 ? 4 : 1;
    const char *at = (const char *)f->table + table_offset(panel, groups, group) * size;
    for (int prefetch_step = 0; prefetch_step < count * panel.tiles * LANES * size; prefetch_step += 64) __builtin_prefetch(at + prefetch_step);
}

/* The next spans, from number n of a run, one at least and at most so many slots; answers how many. */
static int next_kc_block(KcBlock *kc, const GemmArgs *p, const Segment *segment, int n, Panel panel, int max_kblocks) {
    const GroupSpan *span = segment->spans + n;
    int mode = dequant_mode(segment), kblocks = span->kblocks, count = 1;
    while (n + count < segment->span_count && kblocks + span[count].kblocks <= max_kblocks) kblocks += span[count++].kblocks;
    for (int i = 0; i < count; i++) load_dequant(kc->dequants + i, segment, mode, panel, span[i].group);
    int next = span[count - 1].group + 1; /* the next band's, behind the last */
    prefetch_factors(&segment->scales, panel, segment->groups, next, count);
    if (segment->minima.kind) prefetch_factors(&segment->minima, panel, segment->groups, next, count);
    if (segment->zeros.kind) prefetch_factors(&segment->zeros, panel, segment->groups, next, count);
    kc->spans = span, kc->count = count, kc->kblocks = kblocks, kc->rows = p->rows;
    kc->act_scales = p->act_scales + (long)(segment->first_span + n) * p->rows;
    kc->qact = p->qact + (2l * segment->first_k + (long)span->kblock * QACT_BYTES) * p->rows;
    return count;
}

#if defined(__AVX512VNNI__)
#include "microkernel_vnni.h"
#else
#include "gemm_unpacked.h"
#endif

#endif
