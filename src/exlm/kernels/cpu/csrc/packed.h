/* A packed matrix as the kernels read it, in quads: four outputs, and along them sixteen inputs at a time. In bands
   (bands.h) codes and tables lie otherwise; the rest holds for both.

   The stored inputs stand at places, sixteen to a slot; a group is filled up to whole slots, a run to whole
   blocks. A block is the fewest slots whose codes fill whole bytes. Place 16 · s + j of it is slot s of lane j:
   each lane has a little-endian stream of its slots' codes, so that one shift of sixteen words brings the next
   slot's codes to where a table lookup wants them. Streams of 3 and 5 bytes are kept in pieces that one instruction
   spreads over the lanes: 4 bytes of every lane, then 2 of every lane, then 1. Codes of 7 bits take 8. */

#ifndef EXLM_MATRIX_H
#define EXLM_MATRIX_H

#include <stdint.h>

enum { MAX_FUSED = 3 }; /* matrices that are multiplied in one go */
enum { LANES = 16 };
enum { F16_BITS = 16, BF12_BITS = 12 };

/* Factors of one run, in one of the ways formats have them. */
enum { NO_FACTORS, F16, F32, U8, I8, BF16, BF12 };

typedef struct {
    const void *table;        /* (quads, groups, 4) float16, float32, uint8 or int8 */
    const uint16_t *super_scales;   /* (quads, many, 4) float16, what the small codes are multiplied with */
    int32_t kind, groups_per_super, super_groups; /* group g belongs to super-group g / each */
} FactorTable;

/* Neighbouring slots of one group, as many as whole sums have room for. */
typedef struct {
    int32_t kblock, kblocks, group;
} GroupSpan;

/* Blocks of one width. 16 bits: plain floats, (outputs, inputs), of the kind that `scales` names (floats.h). 12 bits:
   floats too, see lean.h. */
typedef struct {
    const uint8_t *codes;     /* (quads, blocks, 4, bytes of a block) */
    FactorTable scales, minima, zeros;
    const uint8_t *codebook;      /* (16) what codes of 4 bits stand for, or none */
    const GroupSpan *spans;        /* in bands only, see bands.h */
    int32_t bits, packs, groups, zero, first_k; /* zero: the shared one; first: the place where it begins */
    int32_t span_count, first_span;      /* spans, and how many are in the runs before */
} Segment;

/* What the codes of 12 bits leave out. */
typedef struct {
    const float *units;       /* (outputs) what sums of codes are multiplied with: powers of two */
    const int32_t *outlier_begin;    /* (outputs + 1) where each output's list begins */
    const int32_t *inputs;    /* of numbers that are too small for codes, and which they are */
    const float *values;
} Bf12;

typedef struct {
    const Segment *segments;
    const int32_t *input_of_k;    /* (places) the input at each place, -1 for none; absent if each is its own */
    const float *bias;        /* (outputs), or none */
    const Bf12 *bf12;         /* codes are of 12 bits, or none */
    int32_t segment_count, inputs, outputs, k_padded, round_f16; /* rounded: weights are float16 */
    int32_t span_count;            /* of all runs; 0: the matrix lies in quads */
} Matrix;

#endif
