/* A weight matrix as kernels get it. Python builds these structs (bindings.py mirrors them; exlm_sizeof lets it check
   that both sides agree).

   y[m, n] = sum over k of x[m, input_of_k[k]] * W[k, n] + bias[n]

   The k axis is cut into segments of one bit width, a segment into groups that share a scale (and a zero point, and a
   minimum) for each output:

   W[k, n] = (code[k, n] - zero[g, n]) * scale[g, n] - minimum[g, n]

   Sixteen k are a kblock. A group is padded to whole kblocks and a segment to whole packs; input_of_k is -1 there. */

#ifndef EXLM_MATRIX_H
#define EXLM_MATRIX_H

#include <stdint.h>

enum { MAX_FUSED = 3 };                 /* matrices of one fused product */
enum { MAX_SPAN = 16 };                 /* kblocks whose products of codes and activations fit an int32 sum */
enum { MAX_BYTE_SPAN = 2 };             /* kblocks that share a scale of one-byte activations */
enum { BF12_BITS = 12, F16_BITS = 16 }; /* widths of float segments; 2 to 6 and 8 are integers */

/* What a table or a float segment holds. */
enum { NO_TABLE, F16, F32, U8, I8, BF16, BF12 };

/* Scales, minima or zero points of a segment, for each group and output. With super_scales the table holds small
   integers, and a factor is table[g] * super_scales[g / groups_per_super] (Q2_K ... Q6_K, IQ4_XS). */
typedef struct {
    const void *table;            /* (groups, outputs) in panels: see w_panels.h */
    const uint16_t *super_scales; /* (super_groups, outputs) in panels, float16; or NULL */
    int32_t dtype, groups_per_super, super_groups;
} FactorTable;

/* Neighbouring kblocks of one group: what is summed in int32 before it is scaled. Activations are quantised by span.
   Up to MAX_SPAN kblocks, or MAX_BYTE_SPAN if activations have one byte. */
typedef struct {
    int32_t kblock, kblocks, group;
} GroupSpan;

/* A range of k of one bit width. Of floats (BF12_BITS, F16_BITS) only codes, bits, packs and scales.dtype are set. */
typedef struct {
    const uint8_t *codes; /* integers: panels (w_panels.h); 16 bits: (outputs, inputs) plain; 12 bits: see bf12.h */
    FactorTable scales, minima, zeros;
    const uint8_t *codebook; /* (16) the bytes that codes of 4 bits stand for (IQ4_NL, IQ4_XS); or NULL */
    const GroupSpan *spans;
    int32_t bits, packs, groups, zero; /* zero: the zero point of all groups, where `zeros` has no table */
    int32_t first_k;                   /* where the segment begins on the k axis */
    int32_t span_count, first_span;    /* its spans, and those of the segments before it */
} Segment;

/* What a matrix of BF12 codes needs besides them: see bf12.h. */
typedef struct {
    const float *units;           /* (outputs) a power of two for each output's sum */
    const int32_t *outlier_begin; /* (outputs + 1) where an output's outliers begin */
    const int32_t *inputs;        /* (outliers) */
    const float *values;          /* (outliers) */
} Bf12;

typedef struct {
    const Segment *segments;
    const int32_t *input_of_k; /* (k_padded) the column of x at each k, -1 for padding; NULL: k itself */
    const float *bias;         /* (outputs) or NULL */
    const Bf12 *bf12;          /* or NULL */
    int32_t segment_count, inputs, outputs, k_padded;
    int32_t round_f16;  /* single columns are rounded to float16, as the format defines; products are not */
    int32_t span_count; /* of all segments; 0: a float matrix */
    int32_t act_bytes;  /* of a quantised activation: 2 or 1; see quantize_act.h */
} Matrix;

#endif
