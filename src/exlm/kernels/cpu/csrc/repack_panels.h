/* Repacks codes from the form of formats/packed.py, a bit stream down each output, into panels (w_panels.h).

   codes (words, outputs), here of 3 bits, the code of row i at bit 3 * i of its output's stream:

              bit 31                                                     bit 0
     word 0   [ row 10, low 2 bits | row 9 | ... | row 2 | row 1 | row 0 ]        one such word for each output
     word 1   [ row 21, low bit    | row 20 | ...        | row 11 | row 10, high bit ] */

#ifndef EXLM_REPACK_PANELS_H
#define EXLM_REPACK_PANELS_H

#include "threadpool.h"
#include "w_panels.h"

enum { PREFETCH_ROWS = 2 }; /* kblocks ahead */

typedef uint32_t u32x16 __attribute__((vector_size(64))); /* a word of each output of a tile */

typedef struct {
    const uint32_t *codes;   /* (words, outputs): code i of an output is at bit i * stored_bits of its column */
    const int32_t *row_of_k; /* (packs * kblocks of a pack * 16): the stored row at each k, -1 for padding */
    uint8_t *out;
    int outputs, stored_bits, bits, packs; /* stored_bits 7 become 8 */
} RepackArgs;

/* The words of the first `count` outputs, then zeros. */
INLINE u32x16 load_words(const uint32_t *at, int count) {
    u32x16 out = {0};
    if (count == TILE_N)
        memcpy(&out, at, sizeof out);
    else
        memcpy(&out, at, count * sizeof(uint32_t));
    return out;
}

/* The codes of one stored row. */
INLINE u32x16 row_codes(const RepackArgs *p, long row, int stored_bits, int first, int count) {
    long bit = row * stored_bits;
    int shift = (int)(bit & 31);
    const uint32_t *at = p->codes + (bit >> 5) * p->outputs + first;
    u32x16 codes = load_words(at, count) >> shift;
    if (32 % stored_bits && shift + stored_bits > 32) codes |= load_words(at + p->outputs, count) << (32 - shift);
    return codes & ((1u << stored_bits) - 1);
}

/* A kblock of a tile as quads, a byte for each code. Not unrolled: that takes compilers seconds. */
INLINE void gather_kblock(const RepackArgs *p, const int32_t *row_of_k, int stored_bits, int first, int count,
                          u32x16 *quads) {
#pragma GCC unroll 1
    for (int q = 0; q < QUADS; q++, row_of_k += 4)
#pragma GCC unroll 1
        for (int b = 0; b < 4; b++)
            if (row_of_k[b] >= 0) quads[q] |= row_codes(p, row_of_k[b], stored_bits, first, count) << (8 * b);
}

/* gather_kblock of 4 or 8 bits and sixteen consecutive rows: a stored word holds two quads or one. */
INLINE void gather_kblock_words(const RepackArgs *p, int row, int stored_bits, int first, u32x16 *quads) {
    const uint32_t *at = p->codes + (long)row * stored_bits / 32 * p->outputs + first;
    for (int w = 0; w < stored_bits / 2; w++, at += p->outputs) {
        u32x16 word = load_words(at, TILE_N);
        if (stored_bits == 8) quads[w] = word;
        for (int half = 0; stored_bits == 4 && half < 2; half++, word >>= 16) {
            u32x16 two = ((word & 0xffff) | word << 8) & 0x00ff00ff;
            quads[2 * w + half] = (two | two << 4) & 0x0f0f0f0f;
        }
    }
}

/* Writes a tile's kblock into its pack at `out`; `second`: it is the second kblock of the pack. */
INLINE void store_kblock(const u32x16 *quads, int bits, int tiles, int second, uint8_t *out) {
    int base_bits = bits == 8 ? 8 : bits >= 4 ? 4 : 2, rows = base_bits / 2, quads_per_row = QUADS / rows;
    uint32_t mask = 0x01010101u * ((1u << base_bits) - 1);
    for (int row = 0; row < rows; row++) {
        u32x16 packed = {0};
        for (int n = 0; n < quads_per_row; n++) packed |= (quads[row * quads_per_row + n] & mask) << (n * base_bits);
        memcpy(out + (second * rows + row) * ROW_BYTES * tiles, &packed, sizeof packed);
    }
    if (bits == base_bits) return;
    uint8_t *upper_row = out + (rows << (bits & 1)) * ROW_BYTES * tiles;
    int upper_bits = bits - base_bits;
    u32x16 upper = {0};
    if (second) memcpy(&upper, upper_row, sizeof upper);
    mask = 0x01010101u * ((1u << upper_bits) - 1);
    for (int q = 0; q < QUADS; q++) upper |= (quads[q] >> base_bits & mask) << (4 * second + q * upper_bits);
    memcpy(upper_row, &upper, sizeof upper);
}

/* Rows are pages apart, which no hardware prefetcher follows. */
INLINE void prefetch_rows(const RepackArgs *p, int row, int words, int first) {
    long word = (long)(row < 0 ? 0 : row) * p->stored_bits / 32 + PREFETCH_ROWS * words;
    uintptr_t at = (uintptr_t)p->codes + (word * p->outputs + first) * 4;
    for (int w = 0; w < words; w++) __builtin_prefetch((const void *)(at + (long)w * p->outputs * 4));
}

static void repack_panel_chunk(void *job, int index) {
    const RepackArgs *p = job;
    Panel panel = panel_at(p->outputs, index);
    int bits = p->bits, odd = bits & 1, stored_bits = p->stored_bits;
    long size = (long)pack_bytes(bits) * panel.tiles;
    uint8_t *out = p->out + (long)panel.first * p->packs * pack_bytes(bits);
    for (int kblock = 0; kblock < p->packs << odd; kblock++) {
        const int32_t *row_of_k = p->row_of_k + kblock * KBLOCK;
        int row = *row_of_k, consecutive = row >= 0 && row % 8 == 0 && row_of_k[KBLOCK - 1] - row == KBLOCK - 1;
        for (int tile = 0; tile < panel.tiles; tile++) {
            int first = (panel.first + tile) * TILE_N, rest = p->outputs - first;
            int count = rest < TILE_N ? rest : TILE_N;
            u32x16 quads[QUADS] = {{0}};
            prefetch_rows(p, row, (stored_bits + 1) / 2, count > 0 ? first : 0);
            if (count == TILE_N && consecutive && stored_bits == 4)
                gather_kblock_words(p, row, 4, first, quads);
            else if (count == TILE_N && consecutive && stored_bits == 8)
                gather_kblock_words(p, row, 8, first, quads);
            else if (count == TILE_N && stored_bits != 7) {
#define GATHER(bits) gather_kblock(p, row_of_k, bits, first, TILE_N, quads)
                SWITCH_BITS(stored_bits, GATHER)
#undef GATHER
            } else if (count > 0)
                gather_kblock(p, row_of_k, stored_bits, first, count, quads);
            store_kblock(quads, bits, panel.tiles, kblock & odd, out + (kblock >> odd) * size + tile * ROW_BYTES);
        }
    }
}

/* codes (words, outputs) of stored_bits -> out: panel by panel, (packs, bytes of a pack) of `bits`. */
EXPORT void exlm_repack_panels(const uint32_t *codes, int outputs, int stored_bits, int bits, const int32_t *row_of_k,
                               int packs, uint8_t *out, int threads) {
    RepackArgs job = {codes, row_of_k, out, outputs, stored_bits, bits, packs};
    parallel_for(repack_panel_chunk, &job, panel_count(outputs), threads);
}

#endif
