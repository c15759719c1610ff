// What all attention over pages has in common: a launch's job, how a row's past is cut, and how new heads are turned and
// stored. Who attends, and how, is said by the sources that include this one.
//
// Set when compiling: HEAD (64 or 128), KV (heads of a token), PAGE (its tokens), KEYS and VALUES (0: float16, 1: rotated
// codes of 8 bits, 2: of 4 bits, 3: the upper bytes of float16), WARPS, RESIDENT (thread blocks of a multiprocessor), UNIT
// (the smallest chunk), SLOTS (the most chunks), CAPPED, MASKED.

#include "ptx.h"
#include "prepacked.h"


struct AttnParams {
    const u16 *q, *k, *v;        // new heads, side by side in a token
    char *key, *value;           // (page, token, kv head, number)
    u16 *key_scale, *value_scale;
    const i64 *table, *past, *positions;
    const float *cos, *sin;      // (position, dim / 2)
    const int* planes;           // which plane of positions each column follows; null: there is one
    const u8* mask;              // zero hides a key
    float* left;                 // (row, block of queries, kv head) of unfinished chunks
    int* counts;                 // thread blocks that are done; zero before and after
    u16* out;                    // (row, token, head, number); null: only the heir gets them
    i64 table_step, mask_step, q_row, q_token, k_row, k_token, v_row, v_token, place_row, place_token, place_plane;
    int tokens, parts, slots, dim, pairs, window;
    int inside, rooms;           // whether a block leaves its chunks nearby, behind so many floats for the warps
    float factor, cap;           // on q·k, and on the bent score
    EpilogueTarget heir;
};

#define THREADS (WARPS * 32)
#define NO_MAX -1.0e30f  // a peak below every score
#define MASKED_SCORE -1.0e38f   // a score below every peak
#define IS_QUANTIZED(coding) ((coding) == 1 || (coding) == 2)

// Where a row stands, and how its past is cut.
struct KvSplits {
    i64 number;
    int behind, first, size, chunks;  // the last chunk is the new tokens

    DEVICE void read(const AttnParams& job, i64 row) {
        number = row, behind = (int)job.past[row];
        first = job.window ? max(behind - job.window + 1, 0) / 64 * 64 : 0;
        size = max((behind - first + MIN_SPLIT * MAX_SPLITS - 1) / (MIN_SPLIT * MAX_SPLITS), 1) * MIN_SPLIT;
        chunks = (behind - first + size - 1) / size + 1;
    }
    // The thread block of the new tokens, among so many, and how many of them have work.
    DEVICE int host(int parts) const { return (chunks - 1) % parts; }
    DEVICE int workers(int parts) const { return min(parts, chunks); }
    DEVICE int start(int chunk) const { return first + chunk * size; }
    DEVICE int stop(int chunk) const { return min(start(chunk) + size, behind); }
};

// One number of a new head, turned by its token's position.
struct Rope {
    int column, partner, token;
    float cos, sin;

    DEVICE void load(const AttnParams& job, i64 row, int number, int at) {
        const int half = job.dim / 2;
        token = at, partner = -1;
        if (number >= job.dim) return;
        const bool low = job.pairs ? number % 2 == 0 : number < half;
        column = job.pairs ? number / 2 : low ? number : number - half;
        partner = other(job, number);
        const i64 plane = job.planes ? job.planes[column] : 0;
        const i64 where = job.positions[row * job.place_row + at * job.place_token + plane * job.place_plane];
        cos = job.cos[where * half + column], sin = job.sin[where * half + column];
        if (low) sin = -sin;
    }
    static DEVICE int other(const AttnParams& job, int number) {  // the number it is turned with, below zero: none
        const int half = job.dim / 2;
        return number >= job.dim ? -1 : job.pairs ? number ^ 1 : number < half ? number + half : number - half;
    }
    DEVICE u16 turned(u16 own, u16 other) const {
        return partner < 0 ? own : cvt_f16_f32(cvt_f32_f16(own) * cos + cvt_f32_f16(other) * sin);
    }
    DEVICE u16 apply(const u16* head, int number) const {
        return turned(head[number], partner < 0 ? 0 : head[partner]);
    }
};

DEVICE float clamp_f16(float x) { return cvt_f32_f16(cvt_f16_f32(fminf(fmaxf(x, -65504.0f), 65504.0f))); }

// A warp's 64 numbers of a new head as the pages want them: each lane brings two and gets them back as they are stored,
// rotated but not rounded to codes.
template <int DTYPE> DEVICE void store_kv(float (&x)[2], char* stored, u16* scales, i64 home, int run, int lane, bool write) {
    if (DTYPE == 0) {
        if (write) ((u32*)stored)[home * (HEAD_DIM / 2) + run * 32 + lane] = cvt_f16x2_f32(x[0], x[1]);
        return;
    }
    UNROLL for (int i = 0; i < 2; i++) x[i] = clamp_f16(x[i]);
    if (DTYPE == 3) {
        const u32 code = cvt_f16x2_f32(x[0], x[1]);
        if (write) ((u16*)stored)[home * (HEAD_DIM / 2) + run * 32 + lane] = (u16)prmt(code, 0, 0x4431);
        return;
    }
    u32 both = cvt_f16x2_f32(x[0], x[1]);
    UNROLL for (int other = 1; other < 32; other *= 2) {  // theirs less one's own, or the sum, and no infinities
        const u32 theirs = shfl_xor_u32(both, other), sign = lane & other ? 0xbc00bc00 : 0x3c003c00;
        both = max_f16x2(min_f16x2(fma_f16x2(both, sign, theirs), 0x7bff7bff), 0xfbfffbff);
    }
    x[0] = cvt_f32_f16((u16)both), x[1] = cvt_f32_f16((u16)(both >> 16));
    const float centre = DTYPE == 1 ? 128 : 8;
    float peak = fmaxf(fabsf(x[0]), fabsf(x[1]));
    UNROLL for (int other = 1; other < 16; other *= 2) peak = fmaxf(peak, shfl_xor(peak, other));
    u32 code[2];
    UNROLL for (int i = 0; i < 2; i++) {
        const float share = cvt_f32_f16(cvt_f16_f32(x[i] / (peak == 0 ? 1.0f : peak)));
        const float level = rintf(cvt_f32_f16(cvt_f16_f32(share * centre + centre)));
        code[i] = peak == 0 ? 0 : (u32)fminf(fmaxf(level, 0.0f), 2 * centre - 1);
    }
    if (!write) return;
    if (DTYPE == 1) ((u16*)stored)[home * (HEAD_DIM / 2) + run * 32 + lane] = (u16)(code[0] | code[1] << 8);
    if (DTYPE == 2) ((u8*)stored)[home * (HEAD_DIM / 2) + run * 32 + lane] = (u8)(code[0] | code[1] << 4);
    if (lane % 16 == 0) scales[home * (HEAD_DIM / 32) + run * 2 + lane / 16] = cvt_f16_f32(peak / centre);
}
