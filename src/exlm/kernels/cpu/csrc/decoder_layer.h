/* Whole decoder layers in one call: norm, q/k/v, attention, o + residual, norm, gate and up, down + residual. Each part
   is the function that computes it alone, so the bits are the same. */

#ifndef EXLM_DECODER_LAYER_H
#define EXLM_DECODER_LAYER_H

#include "attention.h"
#include "linear.h"

typedef struct {
    FusedMatrices qkv, o, gate_up, down;
} LayerWeights;

/* The step's rows, the same for all layers. */
typedef struct {
    const int64_t *pages, *past_lens, *positions;
    int32_t rows, tokens, page_stride;
} BatchArgs;

enum { LAYER_BLOCK_M = 96 }; /* rows that go from attention to the layer's end while they are cached */

/* y (rows, width) = the layer's output for x; they may be the same. `layer` lacks the batch and q, k, v. Returns 0, or
   1 if there is no memory. */
static int decoder_layer(const LayerWeights *weights, const AttnArgs *layer, const BatchArgs *batch, const float *x,
                         float *y, int64_t longest, int threads) {
    long rows = (long)batch->rows * batch->tokens, block_m = rows < LAYER_BLOCK_M ? rows : LAYER_BLOCK_M;
    long width = weights->o.matrices[0]->outputs, hidden = weights->gate_up.matrices[0]->outputs;
    long q_width = weights->o.matrices[0]->inputs, kv_width = weights->qkv.matrices[1]->outputs;
    long scratch_size = block_m * (2 * width + 3 * hidden); /* sum, activations of the MLP, scratch of products */
    float *q = malloc((rows * (2 * q_width + 2 * kv_width) + scratch_size) * sizeof(float));
    if (!q) return 1;
    float *k = q + rows * q_width, *v = k + rows * kv_width, *attn = v + rows * kv_width, *sum = attn + rows * q_width;
    float *activations = sum + block_m * width, *scratch = activations + block_m * hidden;
    int failed = 0;
    for (long row = 0; row < rows; row += block_m) {
        int count = (int)(rows - row < block_m ? rows - row : block_m);
        float *outs[] = {q + row * q_width, k + row * kv_width, v + row * kv_width};
        failed |= fused_linear(&weights->qkv, x + row * width, NULL, count, outs, scratch, threads);
    }
    AttnArgs args = *layer;
    args.q = q;
    args.k = k;
    args.v = v;
    args.out = attn;
    args.pages = batch->pages;
    args.past_lens = batch->past_lens;
    args.positions = batch->positions;
    args.rows = batch->rows;
    args.tokens = batch->tokens;
    args.page_stride = batch->page_stride;
    failed |= exlm_attention(&args, longest, threads);
    for (long row = 0; row < rows; row += block_m) {
        int count = (int)(rows - row < block_m ? rows - row : block_m);
        float *to = y + row * width;
        failed |= fused_linear(&weights->o, attn + row * q_width, x + row * width, count, &sum, scratch, threads);
        failed |= fused_linear(&weights->gate_up, sum, NULL, count, &activations, scratch, threads);
        failed |= fused_linear(&weights->down, activations, sum, count, &to, scratch, threads);
    }
    free(q);
    return failed;
}

/* y = all layers of x, one after the other, each with its own cache. */
EXPORT int exlm_decoder_layers(const LayerWeights *const *weights, const AttnArgs *layers, int count,
                               const BatchArgs *batch, const float *x, float *y, int64_t longest, int threads) {
    int failed = 0;
    for (int n = 0; n < count && !failed; n++)
        failed = decoder_layer(weights[n], layers + n, batch, n ? y : x, y, longest, threads);
    return failed;
}

#endif
