/* From the packed form's bit streams, down each column, to blocks. */

#ifndef EXLM_REPACK_H
#define EXLM_REPACK_H

#include <string.h>

#include "simd.h"
#include "threadpool.h"

enum { REPACK_COLUMNS = 16, MAX_LANE_BYTES = 5, NEXT = 2 }; /* blocks that are asked for before they are needed */

typedef uint32_t u32x16 __attribute__((vector_size(64))); /* one of each of sixteen columns */

typedef struct {
    const uint32_t *codes;
    const int32_t *row_of_k;
    uint8_t *out;
    int columns, stored_bits, bits, packs;
} RepackArgs;

/* Some columns' words; zeros for those that are not there. */
INLINE u32x16 load_columns(const uint32_t *at, int count) {
    u32x16 out = {0};
    if (count == REPACK_COLUMNS) memcpy(&out, at, sizeof out);
    else memcpy(&out, at, count * sizeof(uint32_t));
    return out;
}

/* A row's codes. */
INLINE u32x16 row_codes(const RepackArgs *p, long row, int stored_bits, int first, int width) {
    long bit = row * stored_bits;
    int shift = (int)(bit & 31);
    const uint32_t *at = p->codes + (bit >> 5) * p->columns + first;
    u32x16 codes = load_columns(at, width) >> shift;
    if (32 % stored_bits && shift + stored_bits > 32) codes |= load_columns(at + p->columns, width) << (32 - shift);
    return codes & ((1u << stored_bits) - 1);
}

/* The block of sixteen columns at `places`. A lane's stream has 1, 3 or 5 bytes: an even number of them lie in its
   first piece, the last in another. Four lanes at a time: their last bytes are a word. */
INLINE void repack_pack(const RepackArgs *p, const int32_t *row_of_k, int bits, int stored_bits, int first, int width,
                         u32x16 *out) {
    int kblocks = kblocks_per_pack(bits), wide = lane_bytes(bits) - 1, edge = wide * 8;
    int contiguous = row_of_k[kblocks * LANES - 1] - row_of_k[0] == kblocks * LANES - 1;
    for (int lane = 0; lane < LANES; lane += 4) {
        u32x16 last = {0};
#pragma GCC unroll 4
        for (int l = 0; l < 4; l++) {
            u32x16 piece = {0};
#pragma GCC unroll 8
            for (int kblock = 0; kblock < kblocks; kblock++) {
                int row = kblock * LANES + lane + l, up = kblock * bits;
                if (!contiguous && row_of_k[row] < 0) continue;
                u32x16 codes = row_codes(p, contiguous ? row_of_k[0] + row : row_of_k[row], stored_bits, first, width);
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
static __attribute__((noinline)) void repack_last_columns(const RepackArgs *p, const int32_t *row_of_k, int first, int width,
                                                  u32x16 *out) {
    repack_pack(p, row_of_k, p->bits, p->stored_bits, first, width, out);
}

/* The same of four bits, where a word has eight rows of its column: all rows at once. */
INLINE void repack_4bit(const RepackArgs *p, int row, int first, u32x16 *out) {
    const uint32_t *at = p->codes + (long)row / 8 * p->columns + first;
    for (int half = 0; half < 2; half++, at += p->columns) {
        u32x16 low = load_columns(at, REPACK_COLUMNS), high = load_columns(at + 2l * p->columns, REPACK_COLUMNS);
        u32x16 even = (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4;
        u32x16 odd = (low >> 4 & 0x0f0f0f0f) | (high & 0xf0f0f0f0);
        out[2 * half] = (even & 0xff) | (odd & 0xff) << 8 | (even & 0xff00) << 8 | (odd & 0xff00) << 16;
        out[2 * half + 1] = (even >> 16 & 0xff) | (odd >> 8 & 0xff00) | (even >> 8 & 0xff0000) | (odd & 0xff000000);
    }
}

/* Columns of a block, each to its place: `size` bytes behind the one before, `each` behind the quad before. */
INLINE void transpose_store(const u32x16 *pack, int words, int width, uint8_t *out, long size, long quad_stride) {
#if defined(__AVX512F__)
    for (int w = 0; width == REPACK_COLUMNS && w < words; w += 4) {
        i32v a = (i32v)pack[w], b = (i32v)pack[w + 1], c = (i32v)pack[w + 2], d = (i32v)pack[w + 3];
        i32v ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
        i32v more_ab = _mm512_unpackhi_epi32(a, b), more_cd = _mm512_unpackhi_epi32(c, d);
        i32v column[OUT4] = {_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd),
                              _mm512_unpacklo_epi64(more_ab, more_cd), _mm512_unpackhi_epi64(more_ab, more_cd)};
#pragma GCC unroll 4
        for (int n = 0; n < OUT4; n++) {
            uint8_t *to = out + n * size + 4 * w;
            _mm_storeu_si128((__m128i *)to, _mm512_castsi512_si128(column[n]));
            _mm_storeu_si128((__m128i *)(to + quad_stride), _mm512_extracti32x4_epi32(column[n], 1));
            _mm_storeu_si128((__m128i *)(to + 2 * quad_stride), _mm512_extracti32x4_epi32(column[n], 2));
            _mm_storeu_si128((__m128i *)(to + 3 * quad_stride), _mm512_extracti32x4_epi32(column[n], 3));
        }
    }
    if (width == REPACK_COLUMNS) return;
#endif
    for (int n = 0; n < width; n++) {
        uint8_t *to = out + n / OUT4 * quad_stride + n % OUT4 * size;
        for (int w = 0; w < words; w++) memcpy(to + 4 * w, (const uint32_t *)&pack[w] + n, 4);
    }
}

/* Every row is a page of its own, which no processor foresees. */
INLINE void prefetch_rows(const RepackArgs *p, int row, int words, int first) {
    long word = (long)(row < 0 ? 0 : row) * p->stored_bits / 32 + NEXT * words;
    uintptr_t at = (uintptr_t)p->codes + (word * p->columns + first) * 4;
    for (int w = 0; w < words; w++) __builtin_prefetch((const void *)(at + (long)w * p->columns * 4));
}

/* Sixteen columns. */
static void repack_chunk(void *job, int chunk) {
    const RepackArgs *p = job;
    int first = chunk * REPACK_COLUMNS, width = p->columns - first < REPACK_COLUMNS ? p->columns - first : REPACK_COLUMNS, bits = p->bits;
    int count = kblocks_per_pack(bits) * LANES, words = lane_bytes(bits) * LANES / 4;
    long size = words * 4, quad_stride = size * p->packs * OUT4; /* of a block, and of a quad */
    uint8_t *out = p->out + first / OUT4 * quad_stride;
    const int32_t *row_of_k = p->row_of_k;
    for (int b = 0; b < p->packs; b++, row_of_k += count, out += OUT4 * size) {
        u32x16 pack[MAX_LANE_BYTES * LANES / 4];
        prefetch_rows(p, *row_of_k, words, first);
#define REPACK(own, stored_bits) case stored_bits: repack_pack(p, row_of_k, own, stored_bits, first, REPACK_COLUMNS, pack); break;
        int plain = *row_of_k % 8 == 0 && row_of_k[count - 1] - *row_of_k == count - 1;
        if (width < REPACK_COLUMNS) repack_last_columns(p, row_of_k, first, width, pack);
        else if (p->stored_bits == 4 && plain) repack_4bit(p, *row_of_k, first, pack);
        else switch (p->stored_bits) {
            REPACK(2, 2) REPACK(3, 3) REPACK(4, 4) REPACK(5, 5) REPACK(6, 6) REPACK(8, 7) REPACK(8, 8)
        }
        transpose_store(pack, words, width, out, size, quad_stride);
    }
}

/* Codes of `stored` bits, of rows `places` (-1: none) of each column → (quads, blocks, 4, bytes). Columns that
   only fill a quad are not written. */
EXPORT void exlm_repack_quads(const uint32_t *codes, int columns, int stored_bits, int bits, const int32_t *row_of_k, int packs,
                        uint8_t *out, int threads) {
    RepackArgs job = {codes, row_of_k, out, columns, stored_bits, bits, packs};
    parallel_for(repack_chunk, &job, (columns + REPACK_COLUMNS - 1) / REPACK_COLUMNS, threads);
}

#endif
