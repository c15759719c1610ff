/* A stretch of k whose codes a microkernel multiplies with several rows before it goes on: it stays in the L1 cache. */

#ifndef EXLM_KC_BLOCK_H
#define EXLM_KC_BLOCK_H

#include "dequant.h"

enum { PREFETCH_BYTES = 4096 };

/* Neighbouring spans of one panel, up to MAX_SPAN kblocks. */
typedef struct {
    GroupFactors factors[MAX_SPAN]; /* of each span */
    const GroupSpan *spans;
    const uint8_t *codes, *qact;
    const uint8_t *prefetch; /* what to prefetch meanwhile, prefetch_stride bytes at a time */
    const ActScale *act_scales;
    int count, kblocks, rows, prefetch_stride; /* count: spans; rows: of each span's qact */
} KcBlock;

/* Fills kc with the spans from number n on, at least one and up to max_kblocks; returns how many spans. The caller sets
   kc->codes. */
static int next_kc_block(KcBlock *kc, const GemmArgs *p, const Segment *segment, int n, Panel panel, int max_kblocks) {
    const GroupSpan *span = segment->spans + n;
    int mode = dequant_mode(segment), kblocks = span->kblocks, count = 1;
    while (n + count < segment->span_count && kblocks + span[count].kblocks <= max_kblocks)
        kblocks += span[count++].kblocks;
    for (int i = 0; i < count; i++) load_group_factors(kc->factors + i, segment, mode, panel, span[i].group);
    int next = span[count - 1].group + 1; /* past the last group: the next panel's first */
    prefetch_factors(&segment->scales, panel, segment->groups, next, count);
    if (segment->minima.dtype) prefetch_factors(&segment->minima, panel, segment->groups, next, count);
    if (segment->zeros.dtype) prefetch_factors(&segment->zeros, panel, segment->groups, next, count);
    kc->spans = span;
    kc->count = count;
    kc->kblocks = kblocks;
    kc->rows = p->rows;
    kc->act_scales = p->act_scales + (long)(segment->first_span + n) * p->rows;
    kc->qact = p->qact + (segment->first_k / KBLOCK + (long)span->kblock) * qact_bytes(p->matrix->act_bytes) * p->rows;
    return count;
}

#endif
