/* Delta nets, Mamba 2 and short convolutions, from slots or from zeros, with states stored after some tokens. */

#ifndef DIGEST_RECURRENT_H
#define DIGEST_RECURRENT_H

#include "digest_layers.h"

enum { SLOTS = 12 };

typedef struct {
    DeltaNetWeights delta_net;
    Mamba2Weights mamba2;
    ConvWeights conv; /* of a short convolution */
    RecurrentPass pass;
    const float *inputs[4];
    long conv_size, matrix_size, out_size; /* floats of a state's halves, and of the result */
    float *first_conv, *first_matrix;      /* what the slots hold before the call */
    int kind;
} Recurrent;

static uint64_t run_recurrent(void *job, int threads) {
    Recurrent *r = job;
    RecurrentPass *pass = &r->pass;
    float *out = allocate((size_t)r->out_size * sizeof(float));
    const float *const *in = r->inputs;
    memcpy(pass->conv, r->first_conv, (size_t)(SLOTS * r->conv_size) * sizeof(float));
    memcpy(pass->matrix, r->first_matrix, (size_t)(SLOTS * r->matrix_size) * sizeof(float));
    if (r->kind == 0 && exlm_delta_net(&r->delta_net, pass, in[0], in[1], in[2], in[3], out, threads)) abort();
    if (r->kind == 1 && exlm_mamba2(&r->mamba2, pass, in[0], out, threads)) abort();
    if (r->kind == 2) exlm_short_conv(&r->conv, pass, in[0], out, threads);
    uint64_t hash = digest(digest(0, out, r->out_size), pass->conv, SLOTS * r->conv_size);
    return digest(hash, pass->matrix, SLOTS * r->matrix_size);
}

static ConvWeights random_conv(int kernel, int channels, int has_bias) {
    ConvWeights out = {.weight = random_floats((long)kernel * channels, 1), .kernel = kernel, .channels = channels};
    if (has_bias) out.bias = random_floats(channels, 1);
    return out;
}

/* Up to three rows: each reads one slot, or zeros, and writes others after some of its tokens. */
static void random_pass(Recurrent *r, int rows, int tokens) {
    int64_t *source = allocate((size_t)rows * 8), *targets = allocate((size_t)(rows * tokens) * 8);
    for (int row = 0; row < rows; row++) {
        source[row] = random_int(0, 2) ? row : -1;
        for (int t = 0; t < tokens; t++)
            targets[row * tokens + t] = random_int(0, 2) ? -1 : 3 + row * 3 + random_int(0, 2);
    }
    r->pass = (RecurrentPass){.source = source, .targets = targets, .rows = rows, .tokens = tokens};
    r->first_conv = random_floats(SLOTS * r->conv_size, 1);
    r->first_matrix = random_floats(SLOTS * r->matrix_size, 1);
    r->pass.conv = allocate((size_t)(SLOTS * r->conv_size) * sizeof(float));
    r->pass.matrix = allocate((size_t)(SLOTS * r->matrix_size) * sizeof(float));
}

static void negate(float *x, long count) {
    for (long i = 0; i < count; i++) x[i] = -fabsf(x[i]);
}

static void case_recurrent(int n) {
    int tokens_of[] = {1, 5, 40, 70}, rows = random_int(1, 3), tokens = tokens_of[n / 3 % 4], kernel = random_int(2, 4);
    int groups = random_int(1, 2), heads = groups * random_int(1, 2), key_dims[] = {32, 48, 112}, dims[] = {16, 48, 80};
    int key_dim = key_dims[random_int(0, 2)], dim = dims[random_int(0, 2)];
    long all = (long)rows * tokens;
    Recurrent r = {.kind = n % 3};
    float *neg_a = random_floats(heads, 2);
    negate(neg_a, heads);
    if (r.kind == 0) {
        int channels = 2 * groups * key_dim + heads * dim, decays = n / 12 % 2 ? heads * key_dim : heads;
        DeltaNetWeights w = {.conv = random_conv(kernel, channels, 0), .neg_a = neg_a, .norm_eps = 1e-6f};
        w.dt_bias = random_floats(decays, 1);
        w.norm = random_floats(dim, 1);
        w.beta_scale = 1.0f + (float)(n % 2);
        w.query_scale = 0.1f;
        w.key_heads = groups;
        w.value_heads = heads;
        w.key_dim = key_dim;
        w.value_dim = dim;
        w.channel_decay = decays > heads;
        w.sigmoid_gate = n / 2 % 2;
        r.delta_net = w;
        r.conv_size = (kernel - 1l) * channels;
        r.matrix_size = (long)heads * key_dim * dim;
        r.out_size = all * heads * dim;
        int widths[] = {channels, heads * dim, decays, heads};
        for (int i = 0; i < 4; i++) r.inputs[i] = random_floats(all * widths[i], 3);
    } else if (r.kind == 1) {
        int width = heads * dim, channels = width + 2 * groups * key_dim;
        Mamba2Weights w = {.conv = random_conv(kernel, channels, n / 2 % 2), .neg_a = neg_a, .norm_eps = 1e-5f};
        if (n / 4 % 2) w.conv_scale = random_floats(channels, 2);
        if (n / 8 % 2) w.norm = random_floats(width, 1);
        w.dt_bias = random_floats(heads, 1);
        w.d = random_floats(heads, 1);
        w.z_scale = 0.5f;
        w.dt_scale = 2.0f;
        w.dt_min = 0.1f;
        w.dt_max = 1.0f;
        w.heads = heads;
        w.head_dim = dim;
        w.groups = w.norm_groups = groups;
        w.state_dim = key_dim;
        w.norm_before_gate = n / 16 % 2;
        r.mamba2 = w;
        r.conv_size = (kernel - 1l) * channels;
        r.matrix_size = (long)width * key_dim;
        r.out_size = all * width;
        r.inputs[0] = random_floats(all * (width + channels + heads), 3);
    } else {
        int width = dim * 16;
        r.conv = random_conv(kernel, width, n / 2 % 2);
        r.conv_size = (kernel - 1l) * width;
        r.out_size = all * width;
        r.inputs[0] = random_floats(all * 3 * width, 2);
    }
    random_pass(&r, rows, tokens);
    print_digest("recurrent", r.kind, rows * 1000 + tokens, dim, run_recurrent, &r);
}

#endif
