/* From the packed form's bit streams, down each column, to blocks. */

#ifndef EXLM_REPACK_H
#define EXLM_REPACK_H

#include <string.h>

#include "lanes.h"
#include "pool.h"

enum { SIDE = 16, MOST_STREAM = 5, NEXT = 2 }; /* blocks that are asked for before they are needed */

typedef uint32_t Words __attribute__((vector_size(64))); /* one of each of sixteen columns */

typedef struct {
    const uint32_t *codes;
    const int32_t *places;
    uint8_t *out;
    int columns, stored, bits, blocks;
} Repacking;

/* Some columns' words; zeros for those that are not there. */
INLINE Words some_words(const uint32_t *at, int count) {
    Words out = {0};
    if (count == SIDE) memcpy(&out, at, sizeof out);
    else memcpy(&out, at, count * sizeof(uint32_t));
    return out;
}

/* A row's codes. */
INLINE Words codes_of(const Repacking *p, long row, int stored, int first, int width) {
    long bit = row * stored;
    int shift = (int)(bit & 31);
    const uint32_t *at = p->codes + (bit >> 5) * p->columns + first;
    Words codes = some_words(at, width) >> shift;
    if (32 % stored && shift + stored > 32) codes |= some_words(at + p->columns, width) << (32 - shift);
    return codes & ((1u << stored) - 1);
}

/* The block of sixteen columns at `places`. A lane's stream has 1, 3 or 5 bytes: an even number of them lie in its
   first piece, the last in another. Four lanes at a time: their last bytes are a word. */
INLINE void repack_block(const Repacking *p, const int32_t *places, int bits, int stored, int first, int width,
                         Words *out) {
    int slots = slots_of(bits), wide = stream_of(bits) - 1, edge = wide * 8;
    int whole = places[slots * LANES - 1] - places[0] == slots * LANES - 1;
    for (int lane = 0; lane < LANES; lane += 4) {
        Words last = {0};
#pragma GCC unroll 4
        for (int l = 0; l < 4; l++) {
            Words piece = {0};
#pragma GCC unroll 8
            for (int slot = 0; slot < slots; slot++) {
                int place = slot * LANES + lane + l, up = slot * bits;
                if (!whole && places[place] < 0) continue;
                Words codes = codes_of(p, whole ? places[0] + place : places[place], stored, first, width);
                if (up < edge) piece |= codes << up;
                if (up + bits > edge) last |= (up < edge ? codes >> (edge - up) : codes << (up - edge)) << (8 * l);
            }
            if (wide == 4) out[lane + l] = piece;
            if (wide == 2 && l % 2 == 0) out[(lane + l) / 2] = piece & 0xffff;
            if (wide == 2 && l % 2 == 1) out[(lane + l) / 2] |= piece << 16;
        }
        out[(wide * LANES + lane) / 4] = last;
    }
}

/* The same of fewer columns, which are the last ones and can wait. */
static __attribute__((noinline)) void repack_rest(const Repacking *p, const int32_t *places, int first, int width,
                                                  Words *out) {
    repack_block(p, places, p->bits, p->stored, first, width, out);
}

/* The same of four bits, where a word has eight rows of its column: all rows at once. */
INLINE void repack_fours(const Repacking *p, int place, int first, Words *out) {
    const uint32_t *at = p->codes + (long)place / 8 * p->columns + first;
    for (int side = 0; side < 2; side++, at += p->columns) {
        Words low = some_words(at, SIDE), high = some_words(at + 2l * p->columns, SIDE);
        Words even = (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4;
        Words odd = (low >> 4 & 0x0f0f0f0f) | (high & 0xf0f0f0f0);
        out[2 * side] = (even & 0xff) | (odd & 0xff) << 8 | (even & 0xff00) << 8 | (odd & 0xff00) << 16;
        out[2 * side + 1] = (even >> 16 & 0xff) | (odd >> 8 & 0xff00) | (even >> 8 & 0xff0000) | (odd & 0xff000000);
    }
}

/* Columns of a block, each to its place: `size` bytes behind the one before, `each` behind the quad before. */
INLINE void put_down(const Words *block, int words, int width, uint8_t *out, long size, long each) {
#if defined(__AVX512F__)
    for (int w = 0; width == SIDE && w < words; w += 4) {
        Whole a = (Whole)block[w], b = (Whole)block[w + 1], c = (Whole)block[w + 2], d = (Whole)block[w + 3];
        Whole ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
        Whole more_ab = _mm512_unpackhi_epi32(a, b), more_cd = _mm512_unpackhi_epi32(c, d);
        Whole column[QUAD] = {_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd),
                              _mm512_unpacklo_epi64(more_ab, more_cd), _mm512_unpackhi_epi64(more_ab, more_cd)};
#pragma GCC unroll 4
        for (int n = 0; n < QUAD; n++) {
            uint8_t *to = out + n * size + 4 * w;
            _mm_storeu_si128((__m128i *)to, _mm512_castsi512_si128(column[n]));
            _mm_storeu_si128((__m128i *)(to + each), _mm512_extracti32x4_epi32(column[n], 1));
            _mm_storeu_si128((__m128i *)(to + 2 * each), _mm512_extracti32x4_epi32(column[n], 2));
            _mm_storeu_si128((__m128i *)(to + 3 * each), _mm512_extracti32x4_epi32(column[n], 3));
        }
    }
    if (width == SIDE) return;
#endif
    for (int n = 0; n < width; n++) {
        uint8_t *to = out + n / QUAD * each + n % QUAD * size;
        for (int w = 0; w < words; w++) memcpy(to + 4 * w, (const uint32_t *)&block[w] + n, 4);
    }
}

/* Every row is a page of its own, which no processor foresees. */
INLINE void ask_for(const Repacking *p, int place, int words, int first) {
    long word = (long)(place < 0 ? 0 : place) * p->stored / 32 + NEXT * words;
    uintptr_t at = (uintptr_t)p->codes + (word * p->columns + first) * 4;
    for (int w = 0; w < words; w++) __builtin_prefetch((const void *)(at + (long)w * p->columns * 4));
}

/* Sixteen columns. */
static void repack_chunk(void *job, int chunk) {
    const Repacking *p = job;
    int first = chunk * SIDE, width = p->columns - first < SIDE ? p->columns - first : SIDE, bits = p->bits;
    int count = slots_of(bits) * LANES, words = stream_of(bits) * LANES / 4;
    long size = words * 4, each = size * p->blocks * QUAD; /* of a block, and of a quad */
    uint8_t *out = p->out + first / QUAD * each;
    const int32_t *places = p->places;
    for (int b = 0; b < p->blocks; b++, places += count, out += QUAD * size) {
        Words block[MOST_STREAM * LANES / 4];
        ask_for(p, *places, words, first);
#define REPACK(own, stored) case stored: repack_block(p, places, own, stored, first, SIDE, block); break;
        int plain = *places % 8 == 0 && places[count - 1] - *places == count - 1;
        if (width < SIDE) repack_rest(p, places, first, width, block);
        else if (p->stored == 4 && plain) repack_fours(p, *places, first, block);
        else switch (p->stored) {
            REPACK(2, 2) REPACK(3, 3) REPACK(4, 4) REPACK(5, 5) REPACK(6, 6) REPACK(8, 7) REPACK(8, 8)
        }
        put_down(block, words, width, out, size, each);
    }
}

/* Codes of `stored` bits, of rows `places` (-1: none) of each column → (quads, blocks, 4, bytes). Columns that
   only fill a quad are not written. */
EXPORT void exlm_repack(const uint32_t *codes, int columns, int stored, int bits, const int32_t *places, int blocks,
                        uint8_t *out, int threads) {
    Repacking job = {codes, places, out, columns, stored, bits, blocks};
    share(repack_chunk, &job, (columns + SIDE - 1) / SIDE, threads);
}

#endif
