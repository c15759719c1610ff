/* What recurrent mixers share: one pass over tokens and states, and the causal convolution; LFM2's short convolution.

   A state is a function of the tokens before it: every sum here and in delta_net.h and mamba2.h has one order, for one
   new token and for many, whatever the other rows and the threads. So results do not depend on how a text is cut into
   passes. */

#ifndef EXLM_RECURRENT_H
#define EXLM_RECURRENT_H

#include <stdlib.h>

#include "norm_act.h"

enum { MAX_CONV_KERNEL = 8, CONV_CHANNELS = 512 /* of a chunk */ };
enum { TOKEN_BLOCK = 32 }; /* tokens whose convolved inputs stay in the cache until the recurrence reads them */

/* `tokens` new tokens of each of `rows` sequences, and a layer's states. No slot is both read and written. */
typedef struct {
    const int64_t *source;  /* (rows) the slot of the state before the first token; -1: zeros. NULL: zeros for all */
    const int64_t *targets; /* (rows, tokens) the slot of the state after each token; -1: not stored. NULL: none is */
    float *conv;            /* (slots, kernel - 1, channels) last inputs, oldest first */
    float *matrix;          /* (slots, heads, rows, columns) */
    int32_t rows, tokens;
} RecurrentPass;

static int64_t source_slot(const RecurrentPass *pass, int row) { return pass->source ? pass->source[row] : -1; }

static int64_t target_slot(const RecurrentPass *pass, int row, int token) {
    return pass->targets ? pass->targets[(long)row * pass->tokens + token] : -1;
}

/* Whether the last state of some row is not stored, so that its recurrence needs memory of its own. */
static int needs_working_states(const RecurrentPass *pass) {
    for (int row = 0; row < pass->rows; row++)
        if (target_slot(pass, row, pass->tokens - 1) < 0) return 1;
    return 0;
}

/* Where the states of one head of a row are. */
typedef struct {
    const float *from; /* before the block's first token */
    float *to;         /* after its last; the next block reads it there */
} HeadState;

/* `first`: the block's first token; `size`: floats of a head's state; `working`: (rows, heads, size). A first state of
   zeros is written to `to`. */
static HeadState head_state(const RecurrentPass *pass, int row, int head, int heads, long size, int first,
                            float *working) {
    int64_t source = source_slot(pass, row), target = target_slot(pass, row, pass->tokens - 1);
    int64_t at = target < 0 ? row : target;
    float *to = (target < 0 ? working : pass->matrix) + (at * heads + head) * size;
    if (first) return (HeadState){to, to};
    if (source >= 0) return (HeadState){pass->matrix + (source * heads + head) * size, to};
    memset(to, 0, (size_t)size * sizeof(float));
    return (HeadState){to, to};
}

/* Where else a head's state after a token must be written; NULL if it is not stored, or `to` is its slot. */
static float *stored_state(const RecurrentPass *pass, int row, int token, int head, int heads, long size,
                           const float *to) {
    int64_t target = target_slot(pass, row, token);
    float *slot = target < 0 ? NULL : pass->matrix + (target * heads + head) * size;
    return slot == to ? NULL : slot;
}

/* -- the causal convolution of each channel ------------------------------------------------------------------- */

typedef struct {
    const float *weight; /* (kernel, channels), the newest input's last */
    const float *bias;   /* (channels) or NULL */
    int32_t kernel, channels;
} ConvWeights;

typedef struct {
    const ConvWeights *weights;
    const RecurrentPass *pass;
    const float *x;      /* (rows, tokens, x_stride) inputs */
    const float *factor; /* multiplies them: a number for each channel, or for each token too; or NULL */
    const float *gate;   /* (rows, tokens, x_stride) the sums are multiplied by it; NULL: the results are silu(sums) */
    float *out;          /* (rows, count, channels) */
    long x_stride, factor_stride;
    int first, count; /* tokens */
    int chunks_per_row;
} ConvJob;

/* out (channels) = the convolution of one token; taps and factors are `kernel` pointers to inputs, the newest last,
   and the next token's are `stride` further on. */
INLINE void conv_token(const ConvWeights *w, const float *const *taps, const float *const *factors, const float *gate,
                       int channel, int channels, int kernel, int has_factor, long stride, float *out) {
    for (int c = 0; c < channels; c += LANES) {
        f32x16 sum = {0};
        if (w->bias) sum = load16(w->bias + channel + c);
#pragma GCC unroll 4
        for (int i = 0; i < kernel; i++) {
            f32x16 x = load16(taps[i] + c);
            if (i + 1 == kernel) __builtin_prefetch(taps[i] + stride + c); /* the next token's input */
            if (has_factor) x *= load16(factors[i] + c);
            sum += x * load16(w->weight + (long)i * w->channels + channel + c);
        }
        store16(out + c, gate ? sum * load16(gate + c) : silu16(sum));
    }
}

static void conv_chunk(void *job, int chunk) {
    const ConvJob *j = job;
    const ConvWeights *w = j->weights;
    const RecurrentPass *pass = j->pass;
    int row = chunk / j->chunks_per_row, channel = chunk % j->chunks_per_row * CONV_CHANNELS, past = w->kernel - 1;
    int channels = w->channels - channel < CONV_CHANNELS ? w->channels - channel : CONV_CHANNELS;
    int64_t source = source_slot(pass, row);
    float zeros[CONV_CHANNELS] = {0}, ones[CONV_CHANNELS];
    for (int c = 0; c < CONV_CHANNELS; c++) ones[c] = 1.0f;
    for (int n = 0; n < j->count; n++) {
        const float *taps[MAX_CONV_KERNEL], *factors[MAX_CONV_KERNEL];
        int token = j->first + n;
        long at = (long)row * pass->tokens + token;
        for (int i = 0; i <= past; i++) {
            int back = past - i;
            long state_row = source * past + token + i; /* the state ends with the input before token 0 */
            taps[i] = back <= token ? j->x + (at - back) * j->x_stride + channel
                      : source < 0  ? zeros
                                    : pass->conv + state_row * w->channels + channel;
            factors[i] = back <= token && j->factor ? j->factor + (at - back) * j->factor_stride + channel : ones;
        }
        float *out = j->out + ((long)row * j->count + n) * w->channels + channel;
        const float *gate = j->gate ? j->gate + at * j->x_stride + channel : NULL;
#define CONV(kernel, has_factor) \
    conv_token(w, taps, factors, gate, channel, channels, kernel, has_factor, j->x_stride, out)
        if (w->kernel == 4 && !j->factor)
            CONV(4, 0);
        else if (w->kernel == 3 && j->factor)
            CONV(3, 1);
        else if (j->factor)
            CONV(w->kernel, 1);
        else
            CONV(w->kernel, 0);
#undef CONV
        int64_t target = target_slot(pass, row, token);
        for (int i = 0; i < past && target >= 0; i++) {
            float *stored = pass->conv + (target * past + i) * w->channels + channel;
            for (int c = 0; c < channels; c += LANES)
                store16(stored + c, load16(taps[i + 1] + c) * load16(factors[i + 1] + c));
        }
    }
}

static void causal_conv(ConvJob *job, int threads) {
    const ConvWeights *w = job->weights;
    job->chunks_per_row = (w->channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    if ((long)job->pass->rows * job->count * w->channels < MIN_CHUNK_WORK / 4) threads = 1;
    parallel_for(conv_chunk, job, job->pass->rows * job->chunks_per_row, threads);
}

/* out (rows, tokens, channels) = C * conv(B * x); projected (rows, tokens, 3 * channels) holds B, C and x. */
EXPORT void exlm_short_conv(const ConvWeights *weights, const RecurrentPass *pass, const float *projected, float *out,
                            int threads) {
    long width = weights->channels;
    ConvJob job = {.weights = weights, .pass = pass, .x = projected + 2 * width, .factor = projected, .out = out};
    job.gate = projected + width;
    job.x_stride = job.factor_stride = 3 * width;
    job.count = pass->tokens;
    causal_conv(&job, threads);
}

#endif
