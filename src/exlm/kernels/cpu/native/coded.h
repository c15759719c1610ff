/* Attention of a few new tokens over pages of rotated codes (4 or 8 bits, a float16 scale for each 32).

   New tokens are coded as the cache defines it, bit for bit, and seen as they came. Old ones are read without
   undoing the rotation: the transform H of 32 numbers is symmetric, so q · Hx = Hq · x. The query is turned once
   and the answer turned back. Each head of each token is computed by itself, in the order of the keys. */

#ifndef EXLM_CODED_H
#define EXLM_CODED_H

#include "attention.h"
#include "looking_coded.h"

enum { TRUNCATED = 1 }; /* bits: the upper bytes of float16, which only prompts are taken with */

typedef struct {
    Call call;        /* its keys and values are not used */
    Codes keys, values;
    int64_t ways;     /* transforms side by side in a run */
} CodedCall;

typedef uint8_t Bytes __attribute__((vector_size(16)));

static inline Sixteen magnitude(Sixteen x) { return (Sixteen)((Sixteen_whole)x & 0x7fffffff); }

/* Each number as float16 would hold it; those beyond its range become its largest. */
static inline Sixteen as_halves(Sixteen x) {
    Sixteen zero = {0}, top = zero + 65504.0f, size = magnitude(x), half = zero + 0.5f;
    size = where(size > top, top, size);
    Sixteen_whole bits = (Sixteen_whole)size;
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff;
    Sixteen tiny = (size + half) - half; /* a half below 2^-14 is a multiple of 2^-24, as floats from 0.5 to 1 are */
    Sixteen out = where(size < zero + 6.103515625e-5f, tiny, (Sixteen)bits);
    return (Sixteen)((Sixteen_whole)out | ((Sixteen_whole)x & (Sixteen_whole)(-zero)));
}

static inline float as_half(float x) { return as_halves((Sixteen){x})[0]; }

/* The bits of a float16 that is not negative, from the float that equals it, and back. */
static inline uint16_t half_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x < 6.103515625e-5f ? (uint16_t)(x * 16777216.0f) : (uint16_t)((bits >> 13) - (112 << 10));
}

static inline float from_half_bits(uint16_t bits) {
    if (bits < 1 << 10) return bits * 5.9604644775390625e-8f;
    uint32_t wide = ((uint32_t)bits << 13) + (112u << 23);
    float out;
    memcpy(&out, &wide, sizeof out);
    return out;
}

/* Transform runs of 32 · ways numbers in place, without normalising; `rounds` to float16 after each step. */
static void spread_runs(float *x, int count, int ways, int rounds) {
    for (int stride = ways; stride < GROUP * ways; stride *= 2) {
        for (int at = 0; at < count; at += 2 * stride) {
            for (int i = at; i < at + stride; i++) {
                float a = x[i], b = x[i + stride];
                x[i] = a + b;
                x[i + stride] = a - b;
            }
        }
        for (int i = 0; rounds && i < count; i += WIDE) put(x + i, as_halves(get(x + i)));
    }
}

/* The codes of a token's heads, `count` numbers that are spoilt on the way. */
static void encode_token(float *x, int count, int ways, const Codes *to, int64_t home) {
    int centre = 1 << (to->bits - 1);
    uint8_t *codes = to->codes + home * count * to->bits / 8;
    uint16_t *scales = to->scales + home * (count / GROUP);
    for (int i = 0; i < count; i += WIDE) put(x + i, as_halves(get(x + i)));
    spread_runs(x, count, ways, 1);
    for (int g = 0; g < count / GROUP; g++, x += GROUP) {
        float peak = 0;
        int code[GROUP];
        for (int i = 0; i < GROUP; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
        scales[g] = half_bits(as_half(peak / (float)centre));
        for (int i = 0; i < GROUP; i += WIDE) {
            Sixteen share = as_halves(get(x + i) / (peak > 0 ? peak : 1.0f));
            Sixteen level = as_halves(share * (float)centre + (float)centre);
            level = (level + 12582912.0f) - 12582912.0f; /* 1.5 · 2^23: adding it and taking it away rounds */
            for (int n = 0; n < WIDE; n++) code[i + n] = level[n] > 2 * centre - 1 ? 2 * centre - 1 : (int)level[n];
        }
        for (int i = 0; i < GROUP; i++) code[i] = peak > 0 ? code[i] : 0;
        if (to->bits == 8)
            for (int i = 0; i < GROUP; i++) *codes++ = (uint8_t)code[i];
        else
            for (int i = 0; i < GROUP; i += 2) *codes++ = (uint8_t)(code[i] | code[i + 1] << 4);
    }
}

/* The upper bytes of a token's heads as float16. */
static void truncate_token(const float *x, int count, const Codes *to, int64_t home) {
    uint8_t *codes = to->codes + home * count;
    for (int i = 0; i < count; i += WIDE) {
        uint16_t halves[WIDE];
        put_halves(halves, get(x + i));
        for (int n = 0; n < WIDE; n++) codes[i + n] = (uint8_t)(halves[n] >> 8);
    }
}

static void encode(float *x, int count, int ways, const Codes *to, int64_t home) {
    if (to->bits == TRUNCATED) truncate_token(x, count, to, home);
    else encode_token(x, count, ways, to, home);
}

/* Encode a new token; `turned` (rows · tokens, kv_heads, head_dim) keeps its keys as they came, turned. */
static void keep_coded(const CodedCall *coded, int i, float *turned, float *spare) {
    const Call *c = &coded->call;
    const Layer *l = c->layer;
    int width = l->kv_heads * l->head_dim;
    int64_t at = home(c, i / c->tokens, c->past[i / c->tokens] + i % c->tokens);
    float *key = turned + (long)i * width;
    for (int head = 0; head < l->kv_heads; head++)
        turn(l, c->k + (long)i * width + head * l->head_dim, c->positions[i], key + head * l->head_dim);
    memcpy(spare, key, width * sizeof(float));
    encode(spare, width, (int)coded->ways, &coded->keys, at);
    memcpy(spare, c->v + (long)i * width, width * sizeof(float));
    encode(spare, width, (int)coded->ways, &coded->values, at);
}

static inline Bytes get_bytes(const uint8_t *p) {
    Bytes out;
    memcpy(&out, p, sizeof out);
    return out;
}

static inline Sixteen as_numbers(Bytes bytes) {
    return __builtin_convertvector(__builtin_convertvector(bytes, Sixteen_whole), Sixteen);
}

/* The 32 codes of a group as floats: places 0 to 15 and 16 to 31 of 8 bits, even and odd places of 4. The mask
   changes nothing for 8 bits, but compilers convert a vector they have just loaded number by number. */
static inline void unfold_group(const uint8_t *codes, int bits, Sixteen *low, Sixteen *high) {
    Bytes bytes = get_bytes(codes), mask = (Bytes){0} + (uint8_t)((1 << bits) - 1);
    *low = as_numbers(bytes & mask);
    *high = as_numbers((bits == 4 ? bytes >> 4 : get_bytes(codes + WIDE)) & mask);
}

/* Numbers in the order in which `unfold_group` gives them. */
static void fold_all(const float *from, int count, int bits, float *to) {
    for (int at = 0; at < count; at += GROUP)
        for (int i = 0; i < GROUP; i++) to[at + (bits == 4 ? i % 2 * WIDE + i / 2 : i)] = from[at + i];
}

static void unfold_all(const float *from, int count, int bits, float *to) {
    for (int at = 0; at < count; at += GROUP)
        for (int i = 0; i < GROUP; i++) to[at + i] = from[at + (bits == 4 ? i % 2 * WIDE + i / 2 : i)];
}

typedef struct {
    const CodedCall *coded;
    float *turned, *spare; /* (rows · tokens, kv_heads, head_dim) each */
} Looking;

static void keep_chunk(void *given, int i) {
    const Looking *job = given;
    const Layer *l = job->coded->call.layer;
    keep_coded(job->coded, i, job->turned, job->spare + (long)i * l->kv_heads * l->head_dim);
}

/* What some query heads of a token see of a key head: from the first token to the last, of which `old` are codes. */
typedef struct {
    int row, head, shared;
    int64_t first, old, count;
} View;

/* One query head's sum over old values, turned and folded, becomes its answer. */
static void answer_head(const Looking *job, const View *v, const float *shares, float whole, float *sum,
                        const float *taken, float *out) {
    const CodedCall *coded = job->coded;
    const Call *c = &coded->call;
    const Layer *l = c->layer;
    int dim = l->head_dim, width = l->kv_heads * dim;
    float plain[MOST_HEAD], centre = (float)(1 << (coded->values.bits - 1));
    for (int g = 0; g < dim / GROUP; g++)
        for (int n = 0; n < GROUP; n++) sum[g * GROUP + n] -= taken[g] * centre;
    unfold_all(sum, dim, (int)coded->values.bits, plain);
    spread_runs(plain, dim, (int)coded->ways, 0);
    for (int d = 0; d < dim; d++) plain[d] /= (float)GROUP;
    for (int64_t j = v->old; j < v->count; j++) {
        long token = (long)v->row * c->tokens + (v->first + j - c->past[v->row]);
        const float *value = c->v + token * width + v->head * dim;
        for (int d = 0; d < dim; d++) plain[d] += value[d] * shares[j];
    }
    for (int d = 0; d < dim; d++) out[d] = plain[d] / whole;
}

/* The scores (shared, count) of query heads, with room for as many more behind them as there are heads, become their
   answers; `sums` and `taken` are room for (shared, dim) and (shared, groups). */
static void answer_heads(const Looking *job, const View *v, float *scores, float *sums, float *taken, float *out) {
    const CodedCall *coded = job->coded;
    const Call *c = &coded->call;
    int dim = c->layer->head_dim, width = c->layer->kv_heads * dim, groups = dim / GROUP;
    float *wholes = scores + v->shared * v->count;
    int64_t some;
    for (int h = 0; h < v->shared; h++) wholes[h] = soften(scores + h * v->count, v->count);
    memset(sums, 0, v->shared * dim * sizeof(float));
    memset(taken, 0, v->shared * groups * sizeof(float));
    for (int64_t j = 0; j < v->old; j += some) {
        int64_t at = stretch(c, v->row, v->first + j, v->old - j, &some);
        CodedTokens values = coded_tokens(&coded->values, at, some, dim, width, v->head);
        add_codes(values, v->shared, scores + j, v->count, sums, taken);
    }
    for (int h = 0; h < v->shared; h++)
        answer_head(job, v, scores + h * v->count, wholes[h], sums + h * dim, taken + h * groups, out + h * dim);
}

/* One token's query heads that share a key head. */
static void look_chunk(void *given, int chunk) {
    const Looking *job = given;
    const CodedCall *coded = job->coded;
    const Call *c = &coded->call;
    const Layer *l = c->layer;
    int shared = l->heads / l->kv_heads, dim = l->head_dim, head = chunk % l->kv_heads, i = chunk / l->kv_heads;
    int row = i / c->tokens, width = l->kv_heads * dim, groups = dim / GROUP;
    int64_t slot = c->past[row] + i % c->tokens, first = first_seen(l, slot);
    int64_t count = slot - first + 1, old = c->past[row] > first ? c->past[row] - first : 0, some;
    View view = {row, head, shared, first, old, count};
    float *q = c->scratch + chunk * c->room, *turned = q + shared * dim, *sums = turned + shared * dim;
    float *scores = sums + shared * groups, centre = (float)(1 << (coded->keys.bits - 1));
    for (int h = 0; h < shared; h++) {
        float *own = q + h * dim, spare[MOST_HEAD];
        turn(l, c->q + ((long)i * l->heads + head * shared + h) * dim, c->positions[i], own);
        memcpy(spare, own, dim * sizeof(float));
        spread_runs(spare, dim, (int)coded->ways, 0);
        fold_all(spare, dim, (int)coded->keys.bits, turned + h * dim);
        for (int g = 0; g < groups; g++) {
            float sum = 0;
            for (int n = 0; n < GROUP; n++) sum += spare[g * GROUP + n];
            sums[h * groups + g] = sum * centre;
        }
    }
    for (int64_t j = 0; j < old; j += some) {
        int64_t at = stretch(c, row, first + j, old - j, &some);
        score_codes(coded_tokens(&coded->keys, at, some, dim, width, head), shared, turned, sums,
                    l->scale / (float)GROUP, scores + j, count);
    }
    for (int64_t j = old; j < count; j++) {
        const float *key = job->turned + ((long)row * c->tokens + (first + j - c->past[row])) * width + head * dim;
        for (int h = 0; h < shared; h++) {
            Sixteen sum = {0};
            for (int d = 0; d < dim; d += WIDE) sum += get(q + h * dim + d) * get(key + d);
            scores[h * count + j] = total(sum) * l->scale;
        }
    }
    answer_heads(job, &view, scores, turned, sums, c->out + ((long)i * l->heads + head * shared) * dim);
}

/* Returns 0, or 1 if there is no memory. */
static int look_few(const CodedCall *given, int64_t longest, int threads) {
    CodedCall coded = *given;
    Call *c = &coded.call;
    const Layer *l = c->layer;
    int chunks = c->rows * c->tokens * l->kv_heads, shared = l->heads / l->kv_heads, width = l->kv_heads * l->head_dim;
    long fresh = (long)c->rows * c->tokens * width;
    c->room = (int64_t)shared * (2 * l->head_dim + l->head_dim / GROUP + longest + 1) + WIDE;
    float *memory = malloc((2 * fresh + chunks * c->room) * sizeof(float));
    if (!memory) return 1;
    c->scratch = memory + 2 * fresh;
    Looking job = {&coded, memory, memory + fresh};
    share(keep_chunk, &job, c->rows * c->tokens, threads);
    share(look_chunk, &job, chunks, longest * chunks < 512 ? 1 : threads);
    free(memory);
    return 0;
}

#endif
