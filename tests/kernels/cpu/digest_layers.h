/* Norms and gates, attention over pages of float32, float16 and codes, and whole decoder layers. */

#ifndef DIGEST_LAYERS_H
#define DIGEST_LAYERS_H

#include "digest_linear.h"

typedef struct {
    const float *x, *other, *weight; /* other: the residual, or the gate's other half */
    int rows, width;
} Elementwise;

static uint64_t run_norm(void *job, int threads) {
    const Elementwise *e = job;
    long count = (long)e->rows * e->width;
    float *sum = allocate((size_t)count * sizeof(float)), *out = allocate((size_t)count * sizeof(float));
    exlm_rms_norm(e->x, e->other, e->weight, 1e-5f, e->rows, e->width, sum, out, threads);
    return digest(digest(0, sum, count), out, count);
}

static void case_norm(int n) {
    int widths[] = {1, 7, 16, 576, 577}, width = widths[n % 5], rows = n % 2 ? 33 : random_int(1, 90);
    Elementwise job = {.x = random_floats((long)rows * width, 30), .rows = rows, .width = width};
    job.weight = random_floats(width, 2);
    if (n % 3) job.other = random_floats((long)rows * width, 1);
    print_digest("norm", rows, width, job.other != NULL, run_norm, &job);
}

static uint64_t run_silu_mul(void *job, int threads) {
    const Elementwise *e = job;
    float *out = allocate((size_t)e->width * sizeof(float));
    exlm_silu_mul(e->x, e->other, out, e->width, threads);
    return digest(0, out, e->width);
}

static void case_silu_mul(int n) {
    int counts[] = {1, 15, 16, 1000, 40001, 9}, count = counts[n];
    float edges[] = {0, -0.0f, 89, -89, 1e30f, -1e30f, __builtin_inff(), __builtin_nanf(""), 1e-30f};
    Elementwise job = {.x = edges, .other = random_floats(count, 1), .width = count};
    if (count != 9) job.x = random_floats(count, 30);
    print_digest("silu_mul", count, 0, 0, run_silu_mul, &job);
}

typedef struct {
    AttnParams params;
    AttnArgs args;
    int64_t longest, slots; /* slots: tokens of all pages */
} Attention;

enum { PAGE = 16, MAX_PAST = 50, POSITIONS = 256 };

static QuantKV random_quant_kv(long count, int bits) {
    QuantKV out = {.codes = random_bytes(count * bits / 8, 255), .bits = bits};
    out.scales = random_f16(count / KV_GROUP);
    return out;
}

static uint16_t *random_signed_f16(long count) {
    uint16_t *out = random_f16(count);
    for (long i = 0; i < count; i++) out[i] |= (uint16_t)(random_int(0, 1) << 15);
    return out;
}

/* Shuffled pages of float32 (0 bits), float16 (16) or codes (8, 4), and some new tokens. */
static void random_cache(Attention *a, int rows, int tokens, int key_bits, int value_bits) {
    const AttnParams *p = &a->params;
    AttnArgs *c = &a->args;
    int pages = (MAX_PAST + tokens) / PAGE + 1, all = rows * pages, width = p->kv_heads * p->head_dim;
    int64_t *table = allocate((size_t)all * 8), *past_lens = allocate((size_t)rows * 8);
    int64_t *positions = allocate((size_t)(rows * tokens) * 8);
    for (int i = 0; i < all; i++) {
        int other = random_int(0, i);
        table[i] = table[other];
        table[other] = i;
    }
    a->longest = 0;
    a->slots = (int64_t)all * PAGE;
    for (int row = 0; row < rows; row++) {
        past_lens[row] = random_int(0, MAX_PAST);
        if (past_lens[row] + tokens > a->longest) a->longest = past_lens[row] + tokens;
        for (int i = 0; i < tokens; i++) positions[row * tokens + i] = past_lens[row] + i;
    }
    *c = (AttnArgs){.params = p, .pages = table, .past_lens = past_lens, .positions = positions, .rows = rows};
    c->tokens = tokens;
    c->page_size = PAGE;
    c->page_stride = pages;
    c->q = random_floats((long)rows * tokens * p->heads * p->head_dim, 2);
    c->kv_f16 = key_bits == 16;
    float size = random_int(0, 4) ? 2 : c->kv_f16 ? 1e5f : 3e3f;
    c->k = random_floats((long)rows * tokens * width, 2);
    c->v = random_floats((long)rows * tokens * width, size);
    c->keys = c->kv_f16 ? (void *)random_signed_f16(a->slots * width) : random_floats(a->slots * width, 1);
    c->values = c->kv_f16 ? (void *)random_signed_f16(a->slots * width) : random_floats(a->slots * width, 1);
    c->out = allocate((size_t)(rows * tokens * p->heads * p->head_dim) * sizeof(float));
    if (!key_bits || c->kv_f16) return;
    c->quant_keys = random_quant_kv(a->slots * width, key_bits);
    c->quant_values = random_quant_kv(a->slots * width, value_bits);
    c->hadamard_interleave = width % 64 == 0 && p->head_dim % 64 == 0 ? 2 : 1;
}

static AttnParams random_params(int kv_heads, int heads_per_kv, int dim, int n) {
    int rope_dim = n % 4 ? dim : dim / 2, window[] = {0, 1, 9, 64};
    AttnParams p = {.heads = kv_heads * heads_per_kv, .kv_heads = kv_heads, .head_dim = dim, .scale = 0.1f};
    p.rope_dim = rope_dim;
    p.interleaved = n / 2 % 2;
    p.window = window[n % 5 % 4];
    p.cos = random_floats(POSITIONS * rope_dim / 2, 1);
    p.sin = random_floats(POSITIONS * rope_dim / 2, 1);
    return p;
}

/* All NaNs count as one. */
static uint64_t digest_f16(uint64_t hash, const void *x, long count) {
    for (long i = 0; i < count; i++) {
        uint16_t own;
        memcpy(&own, (const uint16_t *)x + i, sizeof own);
        if ((own & 0x7fff) > 0x7c00) own = 0x7e00;
        hash = digest_bytes(hash, &own, sizeof own);
    }
    return hash;
}

/* The cache after the call. Storing the same tokens again changes nothing. */
static uint64_t digest_cache(const Attention *a, uint64_t hash) {
    const AttnArgs *c = &a->args;
    long width = a->params.kv_heads * a->params.head_dim, count = a->slots * width;
    if (c->kv_f16) return digest_f16(digest_f16(hash, c->keys, count), c->values, count);
    if (!c->quant_keys.bits) return digest(digest(hash, c->keys, count), c->values, count);
    const QuantKV both[] = {c->quant_keys, c->quant_values};
    for (const QuantKV *own = both; own < both + 2; own++)
        hash = digest_bytes(digest_bytes(hash, own->codes, count * own->bits / 8), own->scales, count / 16);
    return hash;
}

static uint64_t run_attention(void *job, int threads) {
    Attention *a = job;
    const AttnArgs *c = &a->args;
    long tokens = (long)c->rows * c->tokens, count = tokens * a->params.heads * a->params.head_dim;
    if (exlm_attention(c, a->longest, threads)) abort();
    uint64_t hash = digest_cache(a, digest(0, c->out, count));
    exlm_rope(&a->params, c->q, c->positions, (int)tokens, a->params.heads, c->out, threads);
    return digest(hash, c->out, count);
}

static void case_attention(int n) {
    int bits[][2] = {{0, 0}, {8, 8}, {8, 4}, {4, 4}, {16, 16}}, *own = bits[n / 12 % 5];
    int quantised = own[0] && own[0] < 16;
    int dims[] = {16, 64, 80, 128, 32, 64, 96, 128, 64}, dim = dims[quantised ? random_int(4, 8) : random_int(0, 3)];
    int rows = random_int(1, 4), tokens = n % 3 ? random_int(1, 5) : random_int(9, 150);
    int kv_heads = random_int(1, 3), heads_per_kv = random_int(1, 4);
    Attention job = {.params = random_params(kv_heads, heads_per_kv, dim, n)};
    random_cache(&job, rows, tokens, own[0], own[1]);
    print_digest("attention", own[0] * 10 + own[1], rows * 1000 + tokens, dim, run_attention, &job);
}

typedef struct {
    Attention attention;
    LayerWeights weights;
    const float *x;
    int rows, width;
} Layer;

/* Two layers at once are the bits of one after the other. */
static uint64_t run_layer(void *job, int threads) {
    Layer *l = job;
    const FusedMatrices *qkv = &l->weights.qkv;
    const AttnArgs *c = &l->attention.args;
    const LayerWeights *weights[] = {&l->weights, &l->weights};
    AttnArgs layers[] = {*c, *c};
    BatchArgs batch = {c->pages, c->past_lens, c->positions, c->rows, c->tokens, c->page_stride};
    int64_t longest = l->attention.longest;
    long count = (long)l->rows * l->width;
    float *y = allocate((size_t)count * sizeof(float)), *both = allocate((size_t)count * sizeof(float)), *outs[3];
    if (exlm_decoder_layers(weights, layers, 2, &batch, l->x, both, longest, threads)) abort();
    if (exlm_decoder_layers(weights, layers, 1, &batch, l->x, y, longest, threads)) abort();
    if (exlm_decoder_layers(weights, layers, 1, &batch, y, y, longest, threads)) abort();
    if (memcmp(y, both, (size_t)count * sizeof(float))) abort();
    uint64_t hash = digest_cache(&l->attention, digest(0, y, count));
    for (int n = 0; n < 3; n++) outs[n] = allocate((size_t)(l->rows * qkv->matrices[n]->outputs) * sizeof(float));
    if (exlm_fused_linear(qkv, l->x, NULL, l->rows, outs[0], outs[1], outs[2], threads)) abort();
    for (int n = 0; n < 3; n++) hash = digest(hash, outs[n], (long)l->rows * qkv->matrices[n]->outputs);
    return hash;
}

static void case_layer(int n) {
    int bits[] = {0, 8, 4, 16}, kv_heads = random_int(1, 2), heads_per_kv = random_int(1, 3);
    int width = random_int(40, 130), hidden = random_int(40, 200), q_width = kv_heads * heads_per_kv * 64;
    int rows = random_int(1, 4), tokens = n % 5 ? random_int(1, 4) : random_int(30, 80);
    int inputs[] = {width, width, width, q_width, width, width, hidden};
    int outputs[] = {q_width, kv_heads * 64, kv_heads * 64, width, hidden, hidden, width};
    Matrix m[7];
    for (int i = 0; i < 7; i++) m[i] = random_matrix(inputs[i], outputs[i], n + i, 0, n % 4 == 3 ? 1 : 2)->matrix;
    Layer job = {.attention = {.params = random_params(kv_heads, heads_per_kv, 64, n)}};
    job.rows = rows * tokens;
    job.width = width;
    random_cache(&job.attention, rows, tokens, bits[n % 4], bits[n % 4]);
    job.x = random_floats((long)rows * tokens * width, 1);
    job.weights.qkv = (FusedMatrices){{m, m + 1, m + 2}, random_floats(width, 1), 1e-5f, 3, 0};
    job.weights.o = (FusedMatrices){{m + 3}, NULL, 0, 1, 0};
    job.weights.gate_up = (FusedMatrices){{m + 4, m + 5}, random_floats(width, 1), 1e-5f, 2, 1};
    job.weights.down = (FusedMatrices){{m + 6}, NULL, 0, 1, 0};
    print_digest("layer", bits[n % 4], rows * tokens, width, run_layer, &job);
}

#endif
