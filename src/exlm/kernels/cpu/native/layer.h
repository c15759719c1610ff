/* Decoder layers in one call, each of them norm, q, k, v, attention, o, norm, gate and up, down, and the two
   additions. Each part is the function that computes it alone, so the bits are the same. */

#ifndef EXLM_LAYER_H
#define EXLM_LAYER_H

#include "project.h"
#include "prompts.h"

typedef struct {
    Projection qkv, o, gate, down;
} Parts;

/* Where the tokens of a step stand, for all layers: calls have nothing there. */
typedef struct {
    const int64_t *pages, *past, *positions;
    int32_t rows, tokens, stride;
} Standing;

enum { STRIP = 96 }; /* rows whose numbers go all the way from attention to the layer's end while they are in the cache */

/* y (rows, width) of x; they may be the same. Codes are read if the call's keys have bits. Returns 0, or 1 if there is
   no memory. */
static int one_layer(const Parts *parts, const CodedCall *given, const Standing *s, const float *x, float *y,
                     int64_t longest, int threads) {
    CodedCall coded = *given;
    Call *c = &coded.call;
    c->pages = s->pages, c->past = s->past, c->positions = s->positions;
    c->rows = s->rows, c->tokens = s->tokens, c->stride = s->stride;
    long rows = (long)c->rows * c->tokens, strip = rows < STRIP ? rows : STRIP, width = parts->o.matrices[0]->outputs;
    long hidden = parts->gate.matrices[0]->outputs;
    long heads = parts->o.matrices[0]->inputs, narrow = parts->qkv.matrices[1]->outputs;
    float *q = malloc((rows * (2 * heads + 2 * narrow) + strip * (2 * width + 3 * hidden)) * sizeof(float));
    if (!q) return 1;
    float *k = q + rows * heads, *v = k + rows * narrow, *seen = v + rows * narrow, *sum = seen + rows * heads;
    float *inner = sum + strip * width, *room = inner + strip * hidden;
    int failed = 0;
    for (long a = 0; a < rows; a += strip) {
        int n = (int)(rows - a < strip ? rows - a : strip);
        float *outs[] = {q + a * heads, k + a * narrow, v + a * narrow};
        failed |= project(&parts->qkv, x + a * width, NULL, n, outs, room, threads);
    }
    c->q = q, c->k = k, c->v = v, c->out = seen;
    failed |= coded.keys.bits ? exlm_attend_coded(&coded, longest, threads) : exlm_attend(c, longest, threads);
    for (long a = 0; a < rows; a += strip) {
        int n = (int)(rows - a < strip ? rows - a : strip);
        float *to = y + a * width;
        failed |= project(&parts->o, seen + a * heads, x + a * width, n, &sum, room, threads);
        failed |= project(&parts->gate, sum, NULL, n, &inner, room, threads);
        failed |= project(&parts->down, inner, sum, n, &to, room, threads);
    }
    free(q);
    return failed;
}

/* The same of layers one behind the other, each with its own call. */
EXPORT int exlm_layers(const Parts *const *parts, const CodedCall *calls, int count, const Standing *standing,
                       const float *x, float *y, int64_t longest, int threads) {
    int failed = 0;
    for (int n = 0; n < count && !failed; n++)
        failed = one_layer(parts[n], calls + n, standing, n ? y : x, y, longest, threads);
    return failed;
}

#endif
