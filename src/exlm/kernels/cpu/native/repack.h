/* From the packed form's bit streams, down each column, to blocks. */

#ifndef EXLM_REPACK_H
#define EXLM_REPACK_H

#include "matrix.h"
#include "pool.h"

typedef struct {
    const uint32_t *codes;
    const int32_t *places;
    uint8_t *out;
    int columns, stored, bits, blocks;
} Repacking;

/* Sixteen columns. */
static void repack_chunk(void *job, int chunk) {
    const Repacking *p = job;
    int first = chunk * 16, width = p->columns - first < 16 ? p->columns - first : 16, bits = p->bits;
    int slots = slots_of(bits), stream = stream_of(bits);
    long size = (long)stream * LANES, each = size * p->blocks * QUAD; /* of a block, and of a quad */
    uint32_t mask = (1u << p->stored) - 1;
    uint8_t *out = p->out + first / QUAD * each;
    for (long place = 0; place < (long)p->blocks * slots * LANES; place++) {
        int row = p->places[place];
        if (row < 0) continue;
        long bit = (long)row * p->stored;
        int shift = (int)(bit & 31), lane = (int)(place % LANES), up = (int)(place / LANES % slots) * bits;
        const uint32_t *at = p->codes + (bit >> 5) * p->columns + first;
        uint8_t *block = out + place / (slots * LANES) * QUAD * size;
        int low = byte_at(stream, lane, up / 8), high = byte_at(stream, lane, up / 8 + 1), over = up % 8;
        for (int n = 0; n < width; n++) {
            uint64_t word = at[n];
            if (shift + p->stored > 32) word |= (uint64_t)at[n + p->columns] << 32;
            uint32_t code = ((uint32_t)(word >> shift) & mask) << over;
            uint8_t *to = block + n / QUAD * each + n % QUAD * size;
            to[low] |= (uint8_t)code;
            if (over + bits > 8) to[high] |= (uint8_t)(code >> 8);
        }
    }
}

/* Codes of `stored` bits, of rows `places` (-1: none) of each column → (quads, blocks, 4, bytes), zeros before. */
EXPORT void exlm_repack(const uint32_t *codes, int columns, int stored, int bits, const int32_t *places, int blocks,
                        uint8_t *out, int threads) {
    Repacking job = {codes, places, out, columns, stored, bits, blocks};
    share(repack_chunk, &job, (columns + 15) / 16, threads);
}

#endif
