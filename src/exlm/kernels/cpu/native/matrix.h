/* A packed matrix as the product kernels read it, and rows of x as they are multiplied.

   Outputs are dealt into tiles of 16, inputs into blocks of 32. A block of one tile is `bits` words for each of
   its outputs: planes of 8, or of 4, 2 and 1 bits, each word holding even inputs in its lower half and odd ones
   in its upper half, so that one shift and one mask give a pair of inputs as two 16-bit numbers.

   x is a whole number of 16 bits times a scale for each block: sums of products with codes are then exact,
   whatever their order. */

#ifndef EXLM_MATRIX_H
#define EXLM_MATRIX_H

#include <stdint.h>

enum { TILE = 16, BLOCK = 32, PAIRS = 16 };

/* Blocks of one width. A group has one factor for each output: several blocks, or if `fine`, half of one. */
typedef struct {
    const int32_t *codes;     /* (tiles, blocks, bits, 16) */
    const void *scales;       /* (tiles, groups, 16) float16, or float32 if `wide` */
    const void *minima;       /* the same, or none */
    const uint8_t *zeros;     /* (tiles, groups, 16), or none */
    const int32_t *spans;     /* (groups) blocks of each; unused if `fine` */
    int32_t bits, blocks, groups, zero, wide, fine, first_block, first_group;
} Run;

typedef struct {
    const Run *runs;
    const int32_t *source;    /* (32 · blocks) the input at each place, -1 for none */
    const float *bias;        /* (outputs), or none */
    int32_t count, inputs, outputs, blocks, groups;
} Matrix;

/* Rows of x, made ready for one matrix. */
typedef struct {
    int16_t *whole;           /* (rows, 32 · blocks) */
    float *scale;             /* (rows, blocks) */
    int32_t *start;           /* (rows, 2 · blocks) where the sum over a block, or over each half, begins: the
                                 zero point that all its outputs share, times the sum of x */
    float *sum;               /* (rows, groups) the sum of x */
} Rows;

#endif
