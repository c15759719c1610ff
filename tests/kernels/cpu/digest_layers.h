/* What lies between matrices, attention over pages of float32, float16 and codes, and whole layers. */

typedef struct {
    const float *x, *more, *weight;
    int rows, width;
} Small;

static uint64_t norm_answer(void *job, int threads) {
    const Small *s = job;
    long count = (long)s->rows * s->width;
    float *sum = room((size_t)count * sizeof(float)), *out = room((size_t)count * sizeof(float));
    exlm_rms_norm(s->x, s->more, s->weight, 1e-5f, s->rows, s->width, sum, out, threads);
    return digest(digest(0, sum, count), out, count);
}

static void try_norm(int n) {
    int widths[] = {1, 7, 16, 576, 577}, width = widths[n % 5], rows = n % 2 ? 33 : any(1, 90);
    Small job = {.x = reals((long)rows * width, 30), .rows = rows, .width = width};
    job.weight = reals(width, 2);
    if (n % 3) job.more = reals((long)rows * width, 1);
    tell("norm", rows, width, job.more != NULL, norm_answer, &job);
}

static uint64_t gate_answer(void *job, int threads) {
    const Small *s = job;
    float *out = room((size_t)s->width * sizeof(float));
    exlm_silu_mul(s->x, s->more, out, s->width, threads);
    return digest(0, out, s->width);
}

static void try_gate(int n) {
    int counts[] = {1, 15, 16, 1000, 40001, 9}, count = counts[n];
    float edges[] = {0, -0.0f, 89, -89, 1e30f, -1e30f, __builtin_inff(), __builtin_nanf(""), 1e-30f};
    Small job = {.x = edges, .more = reals(count, 1), .width = count};
    if (count != 9) job.x = reals(count, 30);
    tell("gate", count, 0, 0, gate_answer, &job);
}

/* Pages of tokens, of float32 (bits 0), of float16 (16) or of codes, and some new tokens. */
typedef struct {
    AttnParams layer;
    AttnArgs call;
    int64_t longest, tokens; /* of the longest row, and of all pages */
} Looked;

enum { PAGE = 16, MOST_PAST = 50, POSITIONS = 256 };

static QuantKV some_codes(long count, int bits) {
    QuantKV out = {.codes = bytes(count * bits / 8, 255), .bits = bits};
    out.scales = halves(count / KV_GROUP);
    return out;
}

static uint16_t *signed_halves(long count) {
    uint16_t *out = halves(count);
    for (long i = 0; i < count; i++) out[i] |= (uint16_t)(any(0, 1) << 15);
    return out;
}

static void a_cache(Looked *l, int rows, int tokens, int keys, int values) {
    int pages = (MOST_PAST + tokens) / PAGE + 1, all = rows * pages, width = l->layer.kv_heads * l->layer.head_dim;
    AttnArgs *c = &l->call;
    int64_t *table = room((size_t)all * 8), *past_lens = room((size_t)rows * 8), *at = room((size_t)(rows * tokens) * 8);
    for (int i = 0; i < all; i++) {
        int other = any(0, i);
        table[i] = table[other], table[other] = i;
    }
    l->longest = 0, l->tokens = (int64_t)all * PAGE;
    for (int row = 0; row < rows; row++) {
        past_lens[row] = any(0, MOST_PAST);
        if (past_lens[row] + tokens > l->longest) l->longest = past_lens[row] + tokens;
        for (int i = 0; i < tokens; i++) at[row * tokens + i] = past_lens[row] + i;
    }
    *c = (AttnArgs){.params = &l->layer, .pages = table, .past_lens = past_lens, .positions = at, .rows = rows, .tokens = tokens};
    c->page_size = PAGE, c->page_stride = pages;
    c->q = reals((long)rows * tokens * l->layer.heads * l->layer.head_dim, 2);
    c->kv_f16 = keys == 16;
    float size = any(0, 4) ? 2 : c->kv_f16 ? 1e5f : 3e3f;
    c->k = reals((long)rows * tokens * width, 2), c->v = reals((long)rows * tokens * width, size);
    if (c->kv_f16) c->keys = signed_halves(l->tokens * width), c->values = signed_halves(l->tokens * width);
    else c->keys = reals(l->tokens * width, 1), c->values = reals(l->tokens * width, 1);
    c->out = room((size_t)(rows * tokens * l->layer.heads * l->layer.head_dim) * sizeof(float));
    if (!keys || c->kv_f16) return;
    c->quant_keys = some_codes(l->tokens * width, keys), c->quant_values = some_codes(l->tokens * width, values);
    c->hadamard_interleave = width % 64 == 0 && l->layer.head_dim % 64 == 0 ? 2 : 1;
}

static AttnParams a_layer(int kv_heads, int heads_per_kv, int dim, int number) {
    int turned = number % 4 ? dim : dim / 2, window[] = {0, 1, 9, 64};
    AttnParams l = {.heads = kv_heads * heads_per_kv, .kv_heads = kv_heads, .head_dim = dim, .rope_dim = turned, .scale = 0.1f};
    l.interleaved = number / 2 % 2, l.window = window[number % 5 % 4];
    l.cos = reals(POSITIONS * turned / 2, 1), l.sin = reals(POSITIONS * turned / 2, 1);
    return l;
}

/* All NaNs are one. */
static uint64_t digest_halves(uint64_t so_far, const void *x, long count) {
    for (long i = 0; i < count; i++) {
        uint16_t own;
        memcpy(&own, (const uint16_t *)x + i, sizeof own);
        if ((own & 0x7fff) > 0x7c00) own = 0x7e00;
        so_far = digest_bytes(so_far, &own, sizeof own);
    }
    return so_far;
}

/* What is stored is part of it. Storing the same twice changes nothing. */
static uint64_t stored_bits(const Looked *l, uint64_t found) {
    const AttnArgs *c = &l->call;
    long width = l->layer.kv_heads * l->layer.head_dim, count = l->tokens * width;
    if (c->kv_f16) return digest_halves(digest_halves(found, c->keys, count), c->values, count);
    if (!c->quant_keys.bits) return digest(digest(found, c->keys, count), c->values, count);
    const QuantKV both[] = {c->quant_keys, c->quant_values};
    for (const QuantKV *own = both; own < both + 2; own++)
        found = digest_bytes(digest_bytes(found, own->codes, count * own->bits / 8), own->scales, count / 16);
    return found;
}

static uint64_t attention_answer(void *job, int threads) {
    Looked *l = job;
    const AttnArgs *c = &l->call;
    if (exlm_attention(c, l->longest, threads)) abort();
    long many = (long)c->rows * c->tokens, count = many * l->layer.heads * l->layer.head_dim;
    uint64_t found = stored_bits(l, digest(0, c->out, count));
    exlm_rope(&l->layer, c->q, c->positions, (int)many, l->layer.heads, c->out, threads);
    return digest(found, c->out, count);
}

static void try_attention(int n) {
    int bits[][2] = {{0, 0}, {8, 8}, {8, 4}, {4, 4}, {16, 16}}, *own = bits[n / 12 % 5], coded = own[0] && own[0] < 16;
    int dims[] = {16, 64, 80, 128, 32, 64, 96, 128, 64}, dim = dims[coded ? any(4, 8) : any(0, 3)];
    int rows = any(1, 4), tokens = n % 3 ? any(1, 5) : any(9, 150);
    int kv_heads = any(1, 3), heads_per_kv = any(1, 4);
    Looked job = {.layer = a_layer(kv_heads, heads_per_kv, dim, n)};
    a_cache(&job, rows, tokens, own[0], own[1]);
    tell("attention", own[0] * 10 + own[1], rows * 1000 + tokens, dim, attention_answer, &job);
}

typedef struct {
    Looked looked;
    LayerWeights parts;
    const float *x;
    int rows, width;
} Whole_layer;

static uint64_t layer_answer(void *job, int threads) {
    Whole_layer *l = job;
    const LinearGroup *qkv = &l->parts.qkv;
    long count = (long)l->rows * l->width;
    float *y = room((size_t)count * sizeof(float)), *twice = room((size_t)count * sizeof(float)), *each[3];
    const LayerWeights *parts[] = {&l->parts, &l->parts};
    const AttnArgs *c = &l->looked.call;
    AttnArgs calls[] = {l->looked.call, l->looked.call};
    BatchPtrs standing = {c->pages, c->past_lens, c->positions, c->rows, c->tokens, c->page_stride};
    if (exlm_decoder_layers(parts, calls, 2, &standing, l->x, twice, l->looked.longest, threads)) abort();
    if (exlm_decoder_layers(parts, calls, 1, &standing, l->x, y, l->looked.longest, threads)) abort();
    if (exlm_decoder_layers(parts, calls, 1, &standing, y, y, l->looked.longest, threads)) abort();
    if (memcmp(y, twice, (size_t)count * sizeof(float))) abort();
    uint64_t found = stored_bits(&l->looked, digest(0, y, count));
    for (int n = 0; n < 3; n++) each[n] = room((size_t)(l->rows * qkv->matrices[n]->outputs) * sizeof(float));
    if (exlm_fused_linear(qkv, l->x, NULL, l->rows, each[0], each[1], each[2], threads)) abort();
    for (int n = 0; n < 3; n++) found = digest(found, each[n], (long)l->rows * qkv->matrices[n]->outputs);
    return found;
}

static void try_layer(int n) {
    int bits[] = {0, 8, 4, 16}, kv_heads = any(1, 2), heads_per_kv = any(1, 3), width = any(40, 130), hidden = any(40, 200);
    int rows = any(1, 4), tokens = n % 5 ? any(1, 4) : any(30, 80), heads = kv_heads * heads_per_kv * 64;
    int inputs[] = {width, width, width, heads, width, width, hidden};
    int outputs[] = {heads, kv_heads * 64, kv_heads * 64, width, hidden, hidden, width};
    Matrix m[7];
    for (int i = 0; i < 7; i++) m[i] = a_matrix(inputs[i], outputs[i], n + i, 0)->matrix;
    Whole_layer job = {.looked = {.layer = a_layer(kv_heads, heads_per_kv, 64, n)}, .rows = rows * tokens, .width = width};
    a_cache(&job.looked, rows, tokens, bits[n % 4], bits[n % 4]);
    job.x = reals((long)rows * tokens * width, 1);
    job.parts.qkv = (LinearGroup){{m, m + 1, m + 2}, reals(width, 1), 1e-5f, 3, 0};
    job.parts.o = (LinearGroup){{m + 3}, NULL, 0, 1, 0};
    job.parts.gate_up = (LinearGroup){{m + 4, m + 5}, reals(width, 1), 1e-5f, 2, 1};
    job.parts.down = (LinearGroup){{m + 6}, NULL, 0, 1, 0};
    tell("layer", bits[n % 4], rows * tokens, width, layer_answer, &job);
}
