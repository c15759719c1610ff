/* Attention of a few new tokens over pages of rotated codes (4 or 8 bits, a float16 scale for each 32).

   New tokens are coded as the cache defines it, bit for bit, and seen as they came. Old ones are read without
   undoing the rotation: the transform H of 32 numbers is symmetric, so q · Hx = Hq · x. The query is turned once
   and the answer turned back. Each head of each token is computed by itself, in the order of the keys. */

#ifndef EXLM_CODED_H
#define EXLM_CODED_H

#include "attn_decode.h"
#include "attn_dot_q.h"

enum { TRUNCATED_F16 = 1 }; /* bits: the upper bytes of float16, which only prompts are taken with */

typedef struct {
    AttnArgs attn;        /* its keys and values are not used */
    QuantKV keys, values;
    int64_t interleave;     /* transforms side by side in a run */
} QuantAttnArgs;

typedef uint8_t u8x16 __attribute__((vector_size(16)));

static inline f32x16 abs16(f32x16 x) { return (f32x16)((i32x16)x & 0x7fffffff); }

/* Each number as float16 would hold it; those beyond its range become its largest. */
static inline f32x16 round_f16_x16(f32x16 x) {
    f32x16 zero = {0}, top = zero + 65504.0f, size = abs16(x), half = zero + 0.5f;
    size = select16(size > top, top, size);
    i32x16 bits = (i32x16)size;
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff;
    f32x16 tiny = (size + half) - half; /* a half below 2^-14 is a multiple of 2^-24, as floats from 0.5 to 1 are */
    f32x16 out = select16(size < zero + 6.103515625e-5f, tiny, (f32x16)bits);
    return (f32x16)((i32x16)out | ((i32x16)x & (i32x16)(-zero)));
}

static inline float round_f16(float x) { return round_f16_x16((f32x16){x})[0]; }

/* The bits of a float16 that is not negative, from the float that equals it, and back. */
static inline uint16_t f16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x < 6.103515625e-5f ? (uint16_t)(x * 16777216.0f) : (uint16_t)((bits >> 13) - (112 << 10));
}

static inline float f16_from_bits(uint16_t bits) {
    if (bits < 1 << 10) return bits * 5.9604644775390625e-8f;
    uint32_t wide = ((uint32_t)bits << 13) + (112u << 23);
    float out;
    memcpy(&out, &wide, sizeof out);
    return out;
}

/* Transform runs of 32 · ways numbers in place, without normalising; `rounds` to float16 after each step. */
static void hadamard(float *x, int count, int interleave, int round_each) {
    for (int stride = interleave; stride < KV_GROUP * interleave; stride *= 2) {
        for (int at = 0; at < count; at += 2 * stride) {
            for (int i = at; i < at + stride; i++) {
                float a = x[i], b = x[i + stride];
                x[i] = a + b;
                x[i + stride] = a - b;
            }
        }
        for (int i = 0; round_each && i < count; i += LANES) store16(x + i, round_f16_x16(load16(x + i)));
    }
}

/* The codes of a token's heads, `count` numbers that are spoilt on the way. */
static void quantize_token(float *x, int count, int interleave, const QuantKV *to, int64_t slot) {
    int center = 1 << (to->bits - 1);
    uint8_t *codes = to->codes + slot * count * to->bits / 8;
    uint16_t *scales = to->scales + slot * (count / KV_GROUP);
    for (int i = 0; i < count; i += LANES) store16(x + i, round_f16_x16(load16(x + i)));
    hadamard(x, count, interleave, 1);
    for (int g = 0; g < count / KV_GROUP; g++, x += KV_GROUP) {
        float max_abs = 0;
        int code[KV_GROUP];
        for (int i = 0; i < KV_GROUP; i++) max_abs = fabsf(x[i]) > max_abs ? fabsf(x[i]) : max_abs;
        scales[g] = f16_bits(round_f16(max_abs / (float)center));
        for (int i = 0; i < KV_GROUP; i += LANES) {
            f32x16 prob = round_f16_x16(load16(x + i) / (max_abs > 0 ? max_abs : 1.0f));
            f32x16 level = round_f16_x16(prob * (float)center + (float)center);
            level = (level + 12582912.0f) - 12582912.0f; /* 1.5 · 2^23: adding it and taking it away rounds */
            for (int n = 0; n < LANES; n++) code[i + n] = level[n] > 2 * center - 1 ? 2 * center - 1 : (int)level[n];
        }
        for (int i = 0; i < KV_GROUP; i++) code[i] = max_abs > 0 ? code[i] : 0;
        if (to->bits == 8)
            for (int i = 0; i < KV_GROUP; i++) *codes++ = (uint8_t)code[i];
        else
            for (int i = 0; i < KV_GROUP; i += 2) *codes++ = (uint8_t)(code[i] | code[i + 1] << 4);
    }
}

/* The upper bytes of a token's heads as float16. */
static void truncate_token(const float *x, int count, const QuantKV *to, int64_t slot) {
    uint8_t *codes = to->codes + slot * count;
    for (int i = 0; i < count; i += LANES) {
        uint16_t halves[LANES];
        store_f16x16(halves, load16(x + i));
        for (int n = 0; n < LANES; n++) codes[i + n] = (uint8_t)(halves[n] >> 8);
    }
}

static void store_kv_q(float *x, int count, int interleave, const QuantKV *to, int64_t slot) {
    if (to->bits == TRUNCATED_F16) truncate_token(x, count, to, slot);
    else quantize_token(x, count, interleave, to, slot);
}

/* Encode a new token; `turned` (rows · tokens, kv_heads, head_dim) keeps its keys as they came, turned. */
static void append_kv_q(const QuantAttnArgs *quant, int i, float *turned, float *work) {
    const AttnArgs *c = &quant->attn;
    const AttnParams *l = c->params;
    int width = l->kv_heads * l->head_dim;
    int64_t at = kv_slot(c, i / c->tokens, c->past_lens[i / c->tokens] + i % c->tokens);
    float *key = turned + (long)i * width;
    for (int head = 0; head < l->kv_heads; head++)
        rope(l, c->k + (long)i * width + head * l->head_dim, c->positions[i], key + head * l->head_dim);
    memcpy(work, key, width * sizeof(float));
    store_kv_q(work, width, (int)quant->interleave, &quant->keys, at);
    memcpy(work, c->v + (long)i * width, width * sizeof(float));
    store_kv_q(work, width, (int)quant->interleave, &quant->values, at);
}

static inline u8x16 load_u8x16(const uint8_t *p) {
    u8x16 out;
    memcpy(&out, p, sizeof out);
    return out;
}

static inline f32x16 f32_from_u8x16(u8x16 bytes) {
    return __builtin_convertvector(__builtin_convertvector(bytes, i32x16), f32x16);
}

/* The 32 codes of a group as floats: places 0 to 15 and 16 to 31 of 8 bits, even and odd places of 4. The mask
   changes nothing for 8 bits, but compilers convert a vector they have just loaded number by number. */
static inline void unpack_group(const uint8_t *codes, int bits, f32x16 *low, f32x16 *high) {
    u8x16 bytes = load_u8x16(codes), mask = (u8x16){0} + (uint8_t)((1 << bits) - 1);
    *low = f32_from_u8x16(bytes & mask);
    *high = f32_from_u8x16((bits == 4 ? bytes >> 4 : load_u8x16(codes + LANES)) & mask);
}

/* Numbers in the order in which `unfold_group` gives them. */
static void to_packed_order(const float *from, int count, int bits, float *to) {
    for (int at = 0; at < count; at += KV_GROUP)
        for (int i = 0; i < KV_GROUP; i++) to[at + (bits == 4 ? i % 2 * LANES + i / 2 : i)] = from[at + i];
}

static void from_packed_order(const float *from, int count, int bits, float *to) {
    for (int at = 0; at < count; at += KV_GROUP)
        for (int i = 0; i < KV_GROUP; i++) to[at + i] = from[at + (bits == 4 ? i % 2 * LANES + i / 2 : i)];
}

typedef struct {
    const QuantAttnArgs *quant;
    float *turned, *work; /* (rows · tokens, kv_heads, head_dim) each */
} QuantDecodeJob;

static void append_q_chunk(void *args, int i) {
    const QuantDecodeJob *job = args;
    const AttnParams *l = job->quant->attn.params;
    append_kv_q(job->quant, i, job->turned, job->work + (long)i * l->kv_heads * l->head_dim);
}

/* What some query heads of a token see of a key head: from the first token to the last, of which `old` are codes. */
typedef struct {
    int row, head, heads_per_kv;
    int64_t first, old, count;
} KvView;

/* One query head's sum over old values, turned and folded, becomes its answer. */
static void finish_head_q(const QuantDecodeJob *job, const KvView *v, const float *probs, float whole, float *sum,
                        const float *center_sums, float *out) {
    const QuantAttnArgs *quant = job->quant;
    const AttnArgs *c = &quant->attn;
    const AttnParams *l = c->params;
    int dim = l->head_dim, width = l->kv_heads * dim;
    float plain[MAX_HEAD_DIM], center = (float)(1 << (quant->values.bits - 1));
    for (int g = 0; g < dim / KV_GROUP; g++)
        for (int n = 0; n < KV_GROUP; n++) sum[g * KV_GROUP + n] -= center_sums[g] * center;
    from_packed_order(sum, dim, (int)quant->values.bits, plain);
    hadamard(plain, dim, (int)quant->interleave, 0);
    for (int d = 0; d < dim; d++) plain[d] /= (float)KV_GROUP;
    for (int64_t j = v->old; j < v->count; j++) {
        long token = (long)v->row * c->tokens + (v->first + j - c->past_lens[v->row]);
        const float *value = c->v + token * width + v->head * dim;
        for (int d = 0; d < dim; d++) plain[d] += value[d] * probs[j];
    }
    for (int d = 0; d < dim; d++) out[d] = plain[d] / whole;
}

/* The scores (shared, count) of query heads, with room for as many more behind them as there are heads, become their
   answers; `sums` and `taken` are room for (shared, dim) and (shared, groups). */
static void finish_heads_q(const QuantDecodeJob *job, const KvView *v, float *scores, float *sums, float *center_sums, float *out) {
    const QuantAttnArgs *quant = job->quant;
    const AttnArgs *c = &quant->attn;
    int dim = c->params->head_dim, width = c->params->kv_heads * dim, groups = dim / KV_GROUP;
    float *denominators = scores + v->heads_per_kv * v->count;
    int64_t some;
    for (int h = 0; h < v->heads_per_kv; h++) denominators[h] = softmax_numerators(scores + h * v->count, v->count);
    memset(sums, 0, v->heads_per_kv * dim * sizeof(float));
    memset(center_sums, 0, v->heads_per_kv * groups * sizeof(float));
    for (int64_t j = 0; j < v->old; j += some) {
        int64_t at = page_run(c, v->row, v->first + j, v->old - j, &some);
        QuantTokens values = quant_tokens(&quant->values, at, some, dim, width, v->head);
        pv_block_q(values, v->heads_per_kv, scores + j, v->count, sums, center_sums);
    }
    for (int h = 0; h < v->heads_per_kv; h++)
        finish_head_q(job, v, scores + h * v->count, denominators[h], sums + h * dim, center_sums + h * groups, out + h * dim);
}

/* One token's query heads that share a key head. */
static void decode_q_chunk(void *args, int chunk) {
    const QuantDecodeJob *job = args;
    const QuantAttnArgs *quant = job->quant;
    const AttnArgs *c = &quant->attn;
    const AttnParams *l = c->params;
    int heads_per_kv = l->heads / l->kv_heads, dim = l->head_dim, head = chunk % l->kv_heads, i = chunk / l->kv_heads;
    int row = i / c->tokens, width = l->kv_heads * dim, groups = dim / KV_GROUP;
    int64_t pos = c->past_lens[row] + i % c->tokens, first = window_start(l, pos);
    int64_t count = pos - first + 1, old = c->past_lens[row] > first ? c->past_lens[row] - first : 0, some;
    KvView view = {row, head, heads_per_kv, first, old, count};
    float *q = c->scratch + chunk * c->room, *turned = q + heads_per_kv * dim, *sums = turned + heads_per_kv * dim;
    float *scores = sums + heads_per_kv * groups, center = (float)(1 << (quant->keys.bits - 1));
    for (int h = 0; h < heads_per_kv; h++) {
        float *own = q + h * dim, work[MAX_HEAD_DIM];
        rope(l, c->q + ((long)i * l->heads + head * heads_per_kv + h) * dim, c->positions[i], own);
        memcpy(work, own, dim * sizeof(float));
        hadamard(work, dim, (int)quant->interleave, 0);
        to_packed_order(work, dim, (int)quant->keys.bits, turned + h * dim);
        for (int g = 0; g < groups; g++) {
            float sum = 0;
            for (int n = 0; n < KV_GROUP; n++) sum += work[g * KV_GROUP + n];
            sums[h * groups + g] = sum * center;
        }
    }
    for (int64_t j = 0; j < old; j += some) {
        int64_t at = page_run(c, row, first + j, old - j, &some);
        qk_block_q(quant_tokens(&quant->keys, at, some, dim, width, head), heads_per_kv, turned, sums,
                    l->scale / (float)KV_GROUP, scores + j, count);
    }
    for (int64_t j = old; j < count; j++) {
        const float *key = job->turned + ((long)row * c->tokens + (first + j - c->past_lens[row])) * width + head * dim;
        for (int h = 0; h < heads_per_kv; h++) {
            f32x16 sum = {0};
            for (int d = 0; d < dim; d += LANES) sum += load16(q + h * dim + d) * load16(key + d);
            scores[h * count + j] = sum16(sum) * l->scale;
        }
    }
    finish_heads_q(job, &view, scores, turned, sums, c->out + ((long)i * l->heads + head * heads_per_kv) * dim);
}

/* Returns 0, or 1 if there is no memory. */
static int attn_decode_q(const QuantAttnArgs *args, int64_t longest, int threads) {
    QuantAttnArgs quant = *args;
    AttnArgs *c = &quant.attn;
    const AttnParams *l = c->params;
    int chunks = c->rows * c->tokens * l->kv_heads, heads_per_kv = l->heads / l->kv_heads, width = l->kv_heads * l->head_dim;
    long new_values = (long)c->rows * c->tokens * width;
    c->room = (int64_t)heads_per_kv * (2 * l->head_dim + l->head_dim / KV_GROUP + longest + 1) + LANES;
    float *memory = malloc((2 * new_values + chunks * c->room) * sizeof(float));
    if (!memory) return 1;
    c->scratch = memory + 2 * new_values;
    QuantDecodeJob job = {&quant, memory, memory + new_values};
    parallel_for(append_q_chunk, &job, c->rows * c->tokens, threads);
    parallel_for(decode_q_chunk, &job, chunks, longest * chunks < 512 ? 1 : threads);
    free(memory);
    return 0;
}

#endif
