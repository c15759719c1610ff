/* From floats of eight significant bits to codes of twelve (lean.h): a look at what they need, then the codes. */

#ifndef EXLM_REPACK_LEAN_H
#define EXLM_REPACK_LEAN_H

#include "bf12.h"

enum { BF12_EXPONENTS = 15, BF12_MAX_EXPONENT = 40 }; /* of an output's numbers; of the largest, so that sums stay finite */

typedef struct {
    const float *from; /* (outputs, inputs) */
    uint8_t *codes;
    float *units, *values;
    int32_t *outlier_begin, *inputs; /* begins: first how many numbers of each output are listed */
    long outputs, width;
    _Atomic int unsupported;
} Bf12Args;

enum { BF12_CHUNK = 64 }; /* outputs of a chunk */

INLINE uint32_t bits_of(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}

INLINE int exponent_of(float a) { return (int)(bits_of(a) >> 23 & 0xff); }

/* Whether codes have no place for a number. */
INLINE int is_outlier(float a, int top_exponent) { return exponent_of(a) <= top_exponent - BF12_EXPONENTS && bits_of(a) << 1; }

/* The largest exponent of an output, or -1 if its numbers are no such floats. */
static int max_exponent(const float *from, long width) {
    i32v lost = i32_set1(0);
    uint32_t all[VLEN];
    int top_exponent = 0, more = 0;
    for (long i = 0; i < width; i += VLEN) lost = i32_or(lost, i32_load(from + i));
    memcpy(all, &lost, sizeof all);
    for (int n = 0; n < VLEN; n++) more |= (all[n] & 0xffff) != 0;
    if (more) return -1;
    for (long i = 0; i < width; i++) {
        int exponent = exponent_of(from[i]);
        top_exponent = exponent > top_exponent ? exponent : top_exponent;
        more |= bits_of(from[i]) << 1 != 0;
    }
    if (!more) return 127; /* all zero */
    return top_exponent < 127 - BF12_MAX_EXPONENT || top_exponent > 127 + BF12_MAX_EXPONENT ? -1 : top_exponent;
}

static void bf12_plan_chunk(void *job, int chunk) {
    Bf12Args *p = job;
    long last = (chunk + 1l) * BF12_CHUNK < p->outputs ? (chunk + 1l) * BF12_CHUNK : p->outputs;
    for (long output = (long)chunk * BF12_CHUNK; output < last && !p->unsupported; output++) {
        const float *from = p->from + output * p->width;
        int top_exponent = max_exponent(from, p->width), outliers = 0;
        if (top_exponent < 0) p->unsupported = 1;
        uint32_t delta = (uint32_t)(top_exponent - BF12_EXPONENTS - 64 + 127) << 23; /* from words and raised numbers to what they are */
        memcpy(p->units + output, &delta, sizeof delta);
        for (long i = 0; i < p->width; i++) outliers += is_outlier(from[i], top_exponent);
        p->outlier_begin[output] = outliers;
    }
}

/* (slots, 16) words of an output: without spare bits, 0 for what is listed. */
static void bf12_encode(const float *from, int top_exponent, int kblocks, uint16_t (*words)[LANES]) {
    for (int i = 0; i < kblocks * LANES; i++) {
        uint32_t bits = bits_of(from[i]);
        int exponent = exponent_of(from[i]) - (top_exponent - BF12_EXPONENTS);
        uint32_t word = (bits >> 16 & 0x807f) | (uint32_t)exponent << 7;
        words[i / LANES][i % LANES] = (uint16_t)(exponent > 0 ? word : 0);
    }
}

/* The fourth word in the spare bits of three. */
static void bf12_split_word(uint16_t *a, uint16_t *b, uint16_t *c, uint16_t word) {
    *a |= (uint16_t)((word >> 15 << 3 | (word >> 8 & 7)) << 11);
    *b |= (uint16_t)((word >> 4 & 15) << 11);
    *c |= (uint16_t)((word & 15) << 11);
}

static void bf12_pack_block(uint16_t (*words)[LANES], int kblocks, uint16_t *to) {
    int pairs = kblocks / 4;
    for (int lane = 0; lane < LANES; lane++)
        if (kblocks == BF12_KBLOCKS)
            for (int n = 0; n < 2; n++)
                bf12_split_word(&words[n][lane], &words[2 + n][lane], &words[4 + n][lane], words[6 + n][lane]);
        else bf12_split_word(&words[0][lane], &words[1][lane], &words[2][lane], words[3][lane]);
    for (int n = 0; n < pairs + pairs / 2; n++, to += 2 * LANES)
        for (int lane = 0; lane < LANES; lane++)
            to[2 * lane] = words[2 * n][lane], to[2 * lane + 1] = words[2 * n + 1][lane];
    if (kblocks != BF12_KBLOCKS) memcpy(to, words[2], sizeof words[2]);
}

static void bf12_write_chunk(void *job, int chunk) {
    Bf12Args *p = job;
    long last = (chunk + 1l) * BF12_CHUNK < p->outputs ? (chunk + 1l) * BF12_CHUNK : p->outputs;
    for (long output = (long)chunk * BF12_CHUNK; output < last; output++) {
        const float *from = p->from + output * p->width;
        uint8_t *to = p->codes + output * p->width * BF12_BITS / 8;
        int top_exponent = (int)(bits_of(p->units[output]) >> 23) + BF12_EXPONENTS + 64 - 127, outliers = p->outlier_begin[output];
        for (long i = 0; i < p->width; i += BF12_KBLOCKS * LANES, to += BF12_BLOCK_BYTES) {
            int kblocks = p->width - i < BF12_KBLOCKS * LANES ? BF12_KBLOCKS / 2 : BF12_KBLOCKS;
            uint16_t words[BF12_KBLOCKS][LANES], own[BF12_KBLOCKS * LANES];
            bf12_encode(from + i, top_exponent, kblocks, words);
            bf12_pack_block(words, kblocks, own);
            memcpy(to, own, kblocks * LANES * BF12_BITS / 8);
        }
        for (long i = 0; i < p->width && outliers < p->outlier_begin[output + 1]; i++)
            if (is_outlier(from[i], top_exponent))
                p->inputs[outliers] = (int)i, p->values[outliers++] = from[i];
    }
}

/* The units (outputs) of a matrix, and in begins (outputs) how many numbers of each output are listed. Returns 0, or 1
   if a number has more than eight significant bits, or an output is too large or too small. */
EXPORT int exlm_bf12_plan(const float *from, long outputs, long width, float *units, int32_t *outlier_begin, int threads) {
    Bf12Args job = {.from = from, .units = units, .outlier_begin = outlier_begin, .outputs = outputs, .width = width};
    parallel_for(bf12_plan_chunk, &job, (int)((outputs + BF12_CHUNK - 1) / BF12_CHUNK), threads);
    return job.unsupported;
}

/* Its codes, and what is listed; begins (outputs + 1) say where. */
EXPORT void exlm_bf12_pack(const float *from, long outputs, long width, const Bf12 *bf12, uint8_t *codes,
                             int threads) {
    Bf12Args job = {.from = from, .codes = codes, .units = (float *)bf12->units, .outlier_begin = (int32_t *)bf12->outlier_begin,
                    .inputs = (int32_t *)bf12->inputs, .values = (float *)bf12->values, .outputs = outputs,
                    .width = width};
    parallel_for(bf12_write_chunk, &job, (int)((outputs + BF12_CHUNK - 1) / BF12_CHUNK), threads);
}

#endif
