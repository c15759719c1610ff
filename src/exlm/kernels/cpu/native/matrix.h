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

enum { MOST_TOGETHER = 3 }; /* matrices that are multiplied in one go */
enum { LANES = 16, QUAD = 4, PANEL = 768, MOST_SLOTS = PANEL / LANES };
enum { FLOAT_BITS = 16, LEAN_BITS = 12, MOST_TABLE_BITS = 5 };

/* Factors of one run, in one of the ways formats have them. */
enum { NONE, HALVES, FLOATS, SMALL_CODES, SIGNED_CODES, BRAINS, LEAN };

typedef struct {
    const void *table;        /* (quads, groups, 4) float16, float32, uint8 or int8 */
    const uint16_t *supers;   /* (quads, many, 4) float16, what the small codes are multiplied with */
    int32_t kind, each, many; /* group g belongs to super-group g / each */
} Factors;

/* Neighbouring slots of one group, as many as whole sums have room for. */
typedef struct {
    int32_t slot, slots, group;
} Span;

/* Blocks of one width. 16 bits: plain floats, (outputs, inputs), of the kind that `scales` names (floats.h). 12 bits:
   floats too, see lean.h. */
typedef struct {
    const uint8_t *codes;     /* (quads, blocks, 4, bytes of a block) */
    Factors scales, minima, zeros;
    const int32_t *owners;    /* (slots) the group each belongs to */
    const float *book;        /* (32) what a code stands for, the shared zero point taken off; up to 5 bits */
    const Span *spans;        /* in bands only, see bands.h */
    int32_t bits, blocks, groups, zero, first; /* zero: the shared one; first: the place where it begins */
    int32_t count, span;      /* spans, and how many are in the runs before */
} Run;

/* What the codes of 12 bits leave out. */
typedef struct {
    const float *units;       /* (outputs) what sums of codes are multiplied with: powers of two */
    const int32_t *begins;    /* (outputs + 1) where each output's list begins */
    const int32_t *inputs;    /* of numbers that are too small for codes, and which they are */
    const float *values;
} Lean;

typedef struct {
    const Run *runs;
    const int32_t *source;    /* (places) the input at each place, -1 for none; absent if each is its own */
    const float *bias;        /* (outputs), or none */
    const Lean *lean;         /* codes are of 12 bits, or none */
    int32_t count, inputs, outputs, places, rounded; /* rounded: weights are float16 */
    int32_t spans;            /* of all runs; 0: the matrix lies in quads */
} Matrix;

/* Narrow codes are looked up. */
static inline int is_tabled(int bits) { return bits <= MOST_TABLE_BITS; }

static inline int slots_of(int bits) { return bits >= 8 ? 1 : bits == 4 ? 2 : bits & 1 ? 8 : 4; }

/* Bytes of one lane's stream in a block. */
static inline int stream_of(int bits) { return bits * slots_of(bits) / 8; }

/* Where byte `at` of a lane's stream lies in its block. */
static inline int byte_at(int stream, int lane, int at) {
    int first = 0;
    for (int piece = 4; piece; piece >>= 1) {
        if (!(stream & piece)) continue;
        if (at < piece) return first * LANES + lane * piece + at;
        at -= piece, first += piece;
    }
    return 0;
}

#endif
