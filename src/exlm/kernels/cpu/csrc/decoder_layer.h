/* Decoder layers in one call, each of them norm, q, k, v, attention, o, norm, gate and up, down, and the two
   additions. Each part is the function that computes it alone, so the bits are the same. */

#ifndef EXLM_LAYER_H
#define EXLM_LAYER_H

#include "fused_linear.h"
#include "attn_prefill.h"

typedef struct {
    LinearGroup qkv, o, gate_up, down;
} LayerWeights;

/* Where the tokens of a step stand, for all layers: calls have nothing there. */
typedef struct {
    const int64_t *pages, *past_lens, *positions;
    int32_t rows, tokens, page_stride;
} BatchPtrs;

enum { LAYER_BLOCK_M = 96 }; /* rows whose numbers go all the way from attention to the layer's end while they are in the cache */

/* y (rows, width) of x; they may be the same. Codes are read if the call's keys have bits. Returns 0, or 1 if there is
   no memory. */
static int decoder_layer(const LayerWeights *weights, const QuantAttnArgs *args, const BatchPtrs *s, const float *x, float *y,
                     int64_t longest, int threads) {
    QuantAttnArgs quant = *args;
    AttnArgs *c = &quant.attn;
    c->pages = s->pages, c->past_lens = s->past_lens, c->positions = s->positions;
    c->rows = s->rows, c->tokens = s->tokens, c->page_stride = s->page_stride;
    long rows = (long)c->rows * c->tokens, block_m = rows < LAYER_BLOCK_M ? rows : LAYER_BLOCK_M, width = weights->o.matrices[0]->outputs;
    long hidden = weights->gate_up.matrices[0]->outputs;
    long heads = weights->o.matrices[0]->inputs, kv_width = weights->qkv.matrices[1]->outputs;
    float *q = malloc((rows * (2 * heads + 2 * kv_width) + block_m * (2 * width + 3 * hidden)) * sizeof(float));
    if (!q) return 1;
    float *k = q + rows * heads, *v = k + rows * kv_width, *attn = v + rows * kv_width, *sum = attn + rows * heads;
    float *inner = sum + block_m * width, *scratch = inner + block_m * hidden;
    int failed = 0;
    for (long a = 0; a < rows; a += block_m) {
        int n = (int)(rows - a < block_m ? rows - a : block_m);
        float *outs[] = {q + a * heads, k + a * kv_width, v + a * kv_width};
        failed |= fused_linear(&weights->qkv, x + a * width, NULL, n, outs, scratch, threads);
    }
    c->q = q, c->k = k, c->v = v, c->out = attn;
    failed |= quant.keys.bits ? exlm_attention_q(&quant, longest, threads) : exlm_attention(c, longest, threads);
    for (long a = 0; a < rows; a += block_m) {
        int n = (int)(rows - a < block_m ? rows - a : block_m);
        float *to = y + a * width;
        failed |= fused_linear(&weights->o, attn + a * heads, x + a * width, n, &sum, scratch, threads);
        failed |= fused_linear(&weights->gate_up, sum, NULL, n, &inner, scratch, threads);
        failed |= fused_linear(&weights->down, inner, sum, n, &to, scratch, threads);
    }
    free(q);
    return failed;
}

/* The same of layers one behind the other, each with its own call. */
EXPORT int exlm_decoder_layers(const LayerWeights *const *weights, const QuantAttnArgs *calls, int count, const BatchPtrs *batch,
                       const float *x, float *y, int64_t longest, int threads) {
    int failed = 0;
    for (int n = 0; n < count && !failed; n++)
        failed = decoder_layer(weights[n], calls + n, batch, n ? y : x, y, longest, threads);
    return failed;
}

#endif
