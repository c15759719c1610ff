/* From floats of eight significant bits to codes of twelve (lean.h): a look at what they need, then the codes. */

#ifndef EXLM_REPACK_LEAN_H
#define EXLM_REPACK_LEAN_H

#include "lean.h"

enum { OCTAVES = 15, MOST_OCTAVE = 40 }; /* of an output's numbers; of the largest, so that sums stay finite */

typedef struct {
    const float *from; /* (outputs, inputs) */
    uint8_t *codes;
    float *units, *values;
    int32_t *begins, *inputs; /* begins: first how many numbers of each output are listed */
    long outputs, width;
    _Atomic int refused;
} Leaning;

enum { LEANED = 64 }; /* outputs of a chunk */

INLINE uint32_t bits_of(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}

INLINE int exponent_of(float a) { return (int)(bits_of(a) >> 23 & 0xff); }

/* Whether codes have no place for a number. */
INLINE int is_listed(float a, int top) { return exponent_of(a) <= top - OCTAVES && bits_of(a) << 1; }

/* The largest exponent of an output, or -1 if its numbers are no such floats. */
static int top_of(const float *from, long width) {
    Whole lost = w_all(0);
    uint32_t all[WIDTH];
    int top = 0, more = 0;
    for (long i = 0; i < width; i += WIDTH) lost = w_or(lost, w_words(from + i));
    memcpy(all, &lost, sizeof all);
    for (int n = 0; n < WIDTH; n++) more |= (all[n] & 0xffff) != 0;
    if (more) return -1;
    for (long i = 0; i < width; i++) {
        int exponent = exponent_of(from[i]);
        top = exponent > top ? exponent : top;
        more |= bits_of(from[i]) << 1 != 0;
    }
    if (!more) return 127; /* all zero */
    return top < 127 - MOST_OCTAVE || top > 127 + MOST_OCTAVE ? -1 : top;
}

static void look_at_some(void *job, int chunk) {
    Leaning *p = job;
    long last = (chunk + 1l) * LEANED < p->outputs ? (chunk + 1l) * LEANED : p->outputs;
    for (long output = (long)chunk * LEANED; output < last && !p->refused; output++) {
        const float *from = p->from + output * p->width;
        int top = top_of(from, p->width), listed = 0;
        if (top < 0) p->refused = 1;
        uint32_t unit = (uint32_t)(top - OCTAVES - 64 + 127) << 23; /* from words and raised numbers to what they are */
        memcpy(p->units + output, &unit, sizeof unit);
        for (long i = 0; i < p->width; i++) listed += is_listed(from[i], top);
        p->begins[output] = listed;
    }
}

/* (slots, 16) words of an output: without spare bits, 0 for what is listed. */
static void put_words(const float *from, int top, int slots, uint16_t (*words)[LANES]) {
    for (int i = 0; i < slots * LANES; i++) {
        uint32_t bits = bits_of(from[i]);
        int octave = exponent_of(from[i]) - (top - OCTAVES);
        uint32_t word = (bits >> 16 & 0x807f) | (uint32_t)octave << 7;
        words[i / LANES][i % LANES] = (uint16_t)(octave > 0 ? word : 0);
    }
}

/* The fourth word in the spare bits of three. */
static void hide_word(uint16_t *a, uint16_t *b, uint16_t *c, uint16_t word) {
    *a |= (uint16_t)((word >> 15 << 3 | (word >> 8 & 7)) << 11);
    *b |= (uint16_t)((word >> 4 & 15) << 11);
    *c |= (uint16_t)((word & 15) << 11);
}

static void put_block(uint16_t (*words)[LANES], int slots, uint16_t *to) {
    int pairs = slots / 4;
    for (int lane = 0; lane < LANES; lane++)
        if (slots == LEAN_SLOTS)
            for (int n = 0; n < 2; n++)
                hide_word(&words[n][lane], &words[2 + n][lane], &words[4 + n][lane], words[6 + n][lane]);
        else hide_word(&words[0][lane], &words[1][lane], &words[2][lane], words[3][lane]);
    for (int n = 0; n < pairs + pairs / 2; n++, to += 2 * LANES)
        for (int lane = 0; lane < LANES; lane++)
            to[2 * lane] = words[2 * n][lane], to[2 * lane + 1] = words[2 * n + 1][lane];
    if (slots != LEAN_SLOTS) memcpy(to, words[2], sizeof words[2]);
}

static void write_some(void *job, int chunk) {
    Leaning *p = job;
    long last = (chunk + 1l) * LEANED < p->outputs ? (chunk + 1l) * LEANED : p->outputs;
    for (long output = (long)chunk * LEANED; output < last; output++) {
        const float *from = p->from + output * p->width;
        uint8_t *to = p->codes + output * p->width * LEAN_BITS / 8;
        int top = (int)(bits_of(p->units[output]) >> 23) + OCTAVES + 64 - 127, listed = p->begins[output];
        for (long i = 0; i < p->width; i += LEAN_SLOTS * LANES, to += LEAN_BYTES) {
            int slots = p->width - i < LEAN_SLOTS * LANES ? LEAN_SLOTS / 2 : LEAN_SLOTS;
            uint16_t words[LEAN_SLOTS][LANES], own[LEAN_SLOTS * LANES];
            put_words(from + i, top, slots, words);
            put_block(words, slots, own);
            memcpy(to, own, slots * LANES * LEAN_BITS / 8);
        }
        for (long i = 0; i < p->width && listed < p->begins[output + 1]; i++)
            if (is_listed(from[i], top))
                p->inputs[listed] = (int)i, p->values[listed++] = from[i];
    }
}

/* The units (outputs) of a matrix, and in begins (outputs) how many numbers of each output are listed. Returns 0, or 1
   if a number has more than eight significant bits, or an output is too large or too small. */
EXPORT int exlm_look_lean(const float *from, long outputs, long width, float *units, int32_t *begins, int threads) {
    Leaning job = {.from = from, .units = units, .begins = begins, .outputs = outputs, .width = width};
    share(look_at_some, &job, (int)((outputs + LEANED - 1) / LEANED), threads);
    return job.refused;
}

/* Its codes, and what is listed; begins (outputs + 1) say where. */
EXPORT void exlm_repack_lean(const float *from, long outputs, long width, const Lean *lean, uint8_t *codes,
                             int threads) {
    Leaning job = {.from = from, .codes = codes, .units = (float *)lean->units, .begins = (int32_t *)lean->begins,
                    .inputs = (int32_t *)lean->inputs, .values = (float *)lean->values, .outputs = outputs,
                    .width = width};
    share(write_some, &job, (int)((outputs + LEANED - 1) / LEANED), threads);
}

#endif
