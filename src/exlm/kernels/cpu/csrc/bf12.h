/* BF12: float matrices with eight significant bits, as bfloat16 has them, in 12 bits a number and without loss.

   Within one output the exponents differ little: 4 bits distinguish zero and the fifteen powers of two up to the
   largest, which is kept once for each output (its unit). The few smaller numbers are outliers: their code is zero and
   they are listed with their inputs.

   A code is a 16-bit word with 4 spare bits; the spare bits of three words hold the 12 bits of a fourth:

     bit      15   14 13 12 11   10 ...... 7   6 ...... 0
            [ sign | 4 spare   | e3 e2 e1 e0 | m6 ... m0 ]      e: exponent, m: mantissa

     spare bits of kblock 0: sign, e3, e2, e1 of kblock 6      of kblock 1: those of kblock 7
                   kblock 2: e0, m6, m5, m4                       kblock 3
                   kblock 4: m3, m2, m1, m0                       kblock 5

   An output is a row of blocks of eight kblocks (128 inputs), BF12_BLOCK_BYTES = 192 bytes each; lane i of a kblock is
   its input i:

     bytes 0 to 63      lane 0: [word of kblock 0][word of kblock 1]  lane 1: ...  lane 15
     bytes 64 to 127    the same of kblocks 2 and 3
     bytes 128 to 191   the same of kblocks 4 and 5

   The last block may be half of that, four kblocks in 96 bytes: 16 lanes of a pair (kblocks 0 and 1), then 16 words of
   kblock 2; the spare bits of the three hold kblock 3.

   Read as the upper half of a float32, a word is a number near 2^-112. x is multiplied by BF12_X_SCALE first and the
   sum by the output's unit in the end: powers of two do not round. */

#ifndef EXLM_BF12_H
#define EXLM_BF12_H

#include "matrix.h"
#include "simd.h"
#include "threadpool.h"

enum { BF12_KBLOCKS = 8, BF12_BLOCK = BF12_KBLOCKS * LANES, BF12_BLOCK_BYTES = BF12_BLOCK * BF12_BITS / 8 };
enum { BF12_EXPONENTS = 15, BF12_MAX_EXPONENT = 40 }; /* the largest number of an output is within 2^-40 to 2^40 */
enum { BF12_CHUNK = 64 };                             /* outputs of a chunk */
#define BF12_X_SCALE 0x1p64f

/* Pairs of words of a block (of half a block with kblocks = 4), in one register of lanes. */
INLINE void bf12_unpack_pairs(const uint8_t *at, int kblocks, int reg, i32v *pairs) {
    int lane = reg * VLEN;
    i32v a = i32_load(at + 4 * lane);
    KEEP_IN_REG(a);
    i32v last = i32_bitselect(i32_set1(0x80008000), i32_shl(a, 1), i32_shr(a, 3));
    if (kblocks == BF12_KBLOCKS) {
        i32v b = i32_load(at + 4 * (LANES + lane)), c = i32_load(at + 4 * (2 * LANES + lane));
        KEEP_IN_REG(b);
        KEEP_IN_REG(c);
        last = i32_bitselect(i32_set1(0x87008700), last, i32_shr(b, 7));
        last = i32_bitselect(i32_set1(0x87f087f0), last, i32_shr(c, 11));
        pairs[0] = a;
        pairs[1] = b;
        pairs[2] = c;
        pairs[3] = last;
    } else {
        i32v b = i32_load_u16(at + 4 * LANES + 2 * lane);
        last = i32_bitselect(i32_set1(0x8700), last, i32_shr(a, 23));
        last = i32_bitselect(i32_set1(0x87f0), last, i32_shr(b, 11));
        pairs[0] = a;
        pairs[1] = i32_or(b, i32_shl(last, 16));
    }
}

/* The word of a kblock as floats near 2^-112. */
INLINE f32v bf12_to_f32(i32v pair, int kblock) {
    return (f32v)i32_and(kblock % 2 ? pair : i32_shl(pair, 16), i32_set1(0x87ff0000));
}

INLINE void bf12_store(const uint8_t *at, int kblocks, int reg, float *out) {
    i32v pairs[BF12_KBLOCKS / 2];
    bf12_unpack_pairs(at, kblocks, reg, pairs);
    for (int kblock = 0; kblock < kblocks; kblock++) {
        f32v values = bf12_to_f32(pairs[kblock / 2], kblock);
        f32_store(out + kblock * LANES + reg * VLEN, values);
    }
}

/* out (inputs) = the numbers of one output, as they were. */
static void bf12_column(const Matrix *m, long output, float *out) {
    const Bf12 *bf12 = m->bf12;
    const uint8_t *at = m->segments->codes + output * m->inputs * BF12_BITS / 8;
    for (int i = 0; i < m->inputs; i += BF12_BLOCK, at += BF12_BLOCK_BYTES)
        for (int reg = 0; reg < LANE_REGS; reg++) {
            if (m->inputs - i < BF12_BLOCK)
                bf12_store(at, BF12_KBLOCKS / 2, reg, out + i);
            else
                bf12_store(at, BF12_KBLOCKS, reg, out + i);
        }
    for (int i = 0; i < m->inputs; i++) out[i] = out[i] * BF12_X_SCALE * bf12->units[output];
    for (int i = bf12->outlier_begin[output]; i < bf12->outlier_begin[output + 1]; i++)
        out[bf12->inputs[i]] = bf12->values[i];
}

/* Packing: a first pass finds each output's unit and counts its outliers, a second writes codes and outliers. */

typedef struct {
    const float *from; /* (outputs, width) */
    uint8_t *codes;
    float *units, *values;
    int32_t *outlier_begin, *inputs; /* outlier_begin: of the first pass, the number of outliers of each output */
    long outputs, width;
    _Atomic int unsupported;
} Bf12Args;

INLINE uint32_t f32_bits(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}

INLINE int exponent_of(float a) { return (int)(f32_bits(a) >> 23 & 0xff); }

INLINE int is_outlier(float a, int top_exponent) {
    return exponent_of(a) <= top_exponent - BF12_EXPONENTS && f32_bits(a) << 1;
}

/* The largest exponent of an output (127 if all is zero), or -1 if some number has more than eight significant bits or
   the largest is out of range. */
static int max_exponent(const float *from, long width) {
    i32v all_bits = i32_set1(0);
    uint32_t lanes[VLEN];
    int top_exponent = 0, too_precise = 0, nonzero = 0;
    for (long i = 0; i < width; i += VLEN) all_bits = i32_or(all_bits, i32_load(from + i));
    memcpy(lanes, &all_bits, sizeof lanes);
    for (int n = 0; n < VLEN; n++) too_precise |= (lanes[n] & 0xffff) != 0;
    if (too_precise) return -1;
    for (long i = 0; i < width; i++) {
        int exponent = exponent_of(from[i]);
        top_exponent = exponent > top_exponent ? exponent : top_exponent;
        nonzero |= f32_bits(from[i]) << 1 != 0;
    }
    if (!nonzero) return 127;
    return top_exponent < 127 - BF12_MAX_EXPONENT || top_exponent > 127 + BF12_MAX_EXPONENT ? -1 : top_exponent;
}

static void bf12_plan_chunk(void *job, int chunk) {
    Bf12Args *p = job;
    long last = (chunk + 1l) * BF12_CHUNK < p->outputs ? (chunk + 1l) * BF12_CHUNK : p->outputs;
    for (long output = (long)chunk * BF12_CHUNK; output < last && !p->unsupported; output++) {
        const float *from = p->from + output * p->width;
        int top_exponent = max_exponent(from, p->width), outliers = 0;
        if (top_exponent < 0) p->unsupported = 1;
        /* undoes 2^-112 and BF12_X_SCALE */
        uint32_t unit = (uint32_t)(top_exponent - BF12_EXPONENTS - 64 + 127) << 23;
        memcpy(p->units + output, &unit, sizeof unit);
        for (long i = 0; i < p->width; i++) outliers += is_outlier(from[i], top_exponent);
        p->outlier_begin[output] = outliers;
    }
}

/* words (kblocks, 16): without spare bits; 0 for outliers. */
static void bf12_encode(const float *from, int top_exponent, int kblocks, uint16_t (*words)[LANES]) {
    for (int i = 0; i < kblocks * LANES; i++) {
        int exponent = exponent_of(from[i]) - (top_exponent - BF12_EXPONENTS);
        uint32_t word = (f32_bits(from[i]) >> 16 & 0x807f) | (uint32_t)exponent << 7;
        words[i / LANES][i % LANES] = (uint16_t)(exponent > 0 ? word : 0);
    }
}

/* Puts the used bits of a fourth word into the spare bits of three. */
static void bf12_split_word(uint16_t *a, uint16_t *b, uint16_t *c, uint16_t word) {
    *a |= (uint16_t)((word >> 15 << 3 | (word >> 8 & 7)) << 11);
    *b |= (uint16_t)((word >> 4 & 15) << 11);
    *c |= (uint16_t)((word & 15) << 11);
}

static void bf12_pack_block(uint16_t (*words)[LANES], int kblocks, uint16_t *to) {
    int pairs = kblocks / 4;
    for (int lane = 0; lane < LANES; lane++) {
        if (kblocks == BF12_KBLOCKS)
            for (int n = 0; n < 2; n++)
                bf12_split_word(&words[n][lane], &words[2 + n][lane], &words[4 + n][lane], words[6 + n][lane]);
        else
            bf12_split_word(&words[0][lane], &words[1][lane], &words[2][lane], words[3][lane]);
    }
    for (int n = 0; n < pairs + pairs / 2; n++, to += 2 * LANES)
        for (int lane = 0; lane < LANES; lane++) {
            to[2 * lane] = words[2 * n][lane];
            to[2 * lane + 1] = words[2 * n + 1][lane];
        }
    if (kblocks != BF12_KBLOCKS) memcpy(to, words[2], sizeof words[2]);
}

static void bf12_pack_chunk(void *job, int chunk) {
    Bf12Args *p = job;
    long last = (chunk + 1l) * BF12_CHUNK < p->outputs ? (chunk + 1l) * BF12_CHUNK : p->outputs;
    for (long output = (long)chunk * BF12_CHUNK; output < last; output++) {
        const float *from = p->from + output * p->width;
        uint8_t *to = p->codes + output * p->width * BF12_BITS / 8;
        int top_exponent = (int)(f32_bits(p->units[output]) >> 23) + BF12_EXPONENTS + 64 - 127;
        int outlier = p->outlier_begin[output];
        for (long i = 0; i < p->width; i += BF12_BLOCK, to += BF12_BLOCK_BYTES) {
            int kblocks = p->width - i < BF12_BLOCK ? BF12_KBLOCKS / 2 : BF12_KBLOCKS;
            uint16_t words[BF12_KBLOCKS][LANES], block[BF12_BLOCK];
            bf12_encode(from + i, top_exponent, kblocks, words);
            bf12_pack_block(words, kblocks, block);
            memcpy(to, block, kblocks * LANES * BF12_BITS / 8);
        }
        for (long i = 0; i < p->width && outlier < p->outlier_begin[output + 1]; i++) {
            if (!is_outlier(from[i], top_exponent)) continue;
            p->inputs[outlier] = (int)i;
            p->values[outlier++] = from[i];
        }
    }
}

/* First pass: units (outputs), and the number of outliers of each output. Returns 0, or 1 if a number has more than
   eight significant bits or an output is out of range. */
EXPORT int exlm_bf12_plan(const float *from, long outputs, long width, float *units, int32_t *outliers, int threads) {
    Bf12Args job = {.from = from, .units = units, .outlier_begin = outliers, .outputs = outputs, .width = width};
    parallel_for(bf12_plan_chunk, &job, (int)((outputs + BF12_CHUNK - 1) / BF12_CHUNK), threads);
    return job.unsupported;
}

/* Second pass: codes, and the outliers' inputs and values; bf12->outlier_begin is summed up by the caller. */
EXPORT void exlm_bf12_pack(const float *from, long outputs, long width, const Bf12 *bf12, uint8_t *codes, int threads) {
    Bf12Args job = {
        .from = from,
        .codes = codes,
        .units = (float *)bf12->units,
        .values = (float *)bf12->values,
        .outlier_begin = (int32_t *)bf12->outlier_begin,
        .inputs = (int32_t *)bf12->inputs,
        .outputs = outputs,
        .width = width,
    };
    parallel_for(bf12_pack_chunk, &job, (int)((outputs + BF12_CHUNK - 1) / BF12_CHUNK), threads);
}

#endif
