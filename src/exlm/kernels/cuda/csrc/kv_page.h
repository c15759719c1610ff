// What paged decode attention has in common: a launch's parameters, how a row's past is split, RoPE of new heads, and
// how they are appended to the pages of the KV cache.
//
// A KV page holds PAGE_SIZE tokens of one layer; keys and values are tensors of their own:
//
//     page p:  [token 0: head 0 | head 1 | ... | head KV_HEADS - 1][token 1: ...] ... [token PAGE_SIZE - 1]
//     one head of D = HEAD_DIM numbers x0, x1, ..., by dtype; a bracket is a byte, its bits 7 to 0 from the left:
//       0 float16     D x 2 bytes   [x0 low] [x0 high] [x1 low] ...
//       1 hadamard8   D bytes       [x0:8] [x1:8] [x2:8] ... [x31:8]            | and in a tensor of the same order
//       2 hadamard4   D / 2 bytes   [x1:4 x0:4] [x3:4 x2:4] ... [x31:4 x30:4]   | one float16 scale for each 32 codes
//       3 fp8_e5m2    D bytes       [x0 high] [x1 high] ...: the upper bytes of float16
//     hadamard codes: of each run of 64 numbers the even and the odd ones are multiplied by a 32 x 32 Hadamard matrix,
//     which distributes outliers; then each 32 numbers share a scale: number = (code - 2^(bits - 1)) * scale. The
//     matrix is not normalised. Keys and values are never transformed back: q is transformed instead, and the output
//     once at the end, each by the matrix times 1/32.
//
// Set when compiling (-D): HEAD_DIM (64, 128, or 256 with one n8 tile of queries), KV_HEADS, PAGE_SIZE, K_DTYPE and
// V_DTYPE (above), WARPS, MIN_BLOCKS (resident thread blocks of an SM), MIN_SPLIT (tokens of the smallest split),
// MAX_SPLITS, SOFTCAP, HAS_MASK.
#pragma once
#include "prepacked_acts.h"

struct AttnParams {
    const u16 *q, *k, *v;          // new heads, side by side in a token
    char *key, *value;             // pages
    u16 *key_scale, *value_scale;  // of hadamard codes
    const i64 *page_table, *past_lens, *positions;
    const float *cos, *sin;        // (position, dim / 2); null: q and k come with RoPE applied
    const int* mrope_axis;         // M-RoPE: by which of the three positions each pair of numbers is rotated; null: one
    const u8* mask;                // (row, key) zero hides a key
    float* partials;               // (row, block of queries, kv head): outputs, m and l of every split
    int* arrivals;                 // thread blocks that are done; zero before and after a launch
    u16* out;                      // (row, token, head, number); null: only the target gets it
    i64 page_table_stride, mask_stride;
    i64 q_row_stride, q_token_stride, k_row_stride, k_token_stride, v_row_stride, v_token_stride;
    i64 position_row_stride, position_token_stride, position_axis_stride;
    int tokens, blocks_per_row, max_splits, rope_dim, interleaved, window;
    int partials_in_smem, warp_floats;  // whether partials stay in shared memory, behind so many floats of the warps
    float score_scale, cap;             // base-2 scores: q.k * score_scale, or cap * tanh(q.k * score_scale)
    EpilogueTarget target;
};
CHECK_SIZEOF(AttnParams);

#define THREADS (WARPS * 32)
#define NO_MAX -1.0e30f        // below every score: the running maximum of no keys
#define MASKED_SCORE -1.0e38f  // below NO_MAX: its weight is zero in any case
#define IS_HADAMARD(dtype) ((dtype) == 1 || (dtype) == 2)

// How a row's past is split: by its length alone, so that a row's output is the same bits in any batch and for any
// number of thread blocks. The new tokens are the last split.
struct KvSplits {
    i64 row;
    int past, first, size, count;

    DEVICE void load(const AttnParams& params, i64 number) {
        row = number;
        past = (int)params.past_lens[row];
        first = params.window ? max(past - params.window + 1, 0) / 64 * 64 : 0;
        size = max((past - first + MIN_SPLIT * MAX_SPLITS - 1) / (MIN_SPLIT * MAX_SPLITS), 1) * MIN_SPLIT;
        count = (past - first + size - 1) / size + 1;
    }
    // The thread block of the new tokens among `blocks`, and how many of those have work.
    DEVICE int last_block(int blocks) const { return (count - 1) % blocks; }
    DEVICE int busy_blocks(int blocks) const { return min(blocks, count); }
    DEVICE int begin(int split) const { return first + split * size; }
    DEVICE int end(int split) const { return min(begin(split) + size, past); }
};

// RoPE of one number of a new head.
struct Rope {
    int column, partner, token;
    float cos, sin;

    DEVICE void load(const AttnParams& params, i64 row, int number, int at) {
        const int half = params.rope_dim / 2;
        token = at;
        partner = -1;
        if (number >= params.rope_dim) return;
        const bool low = params.interleaved ? number % 2 == 0 : number < half;
        column = params.interleaved ? number / 2 : low ? number : number - half;
        partner = partner_of(params, number);
        const i64 axis = params.mrope_axis ? params.mrope_axis[column] : 0;
        const i64 position = params.positions[row * params.position_row_stride + at * params.position_token_stride
                                              + axis * params.position_axis_stride];
        cos = params.cos[position * half + column];
        sin = params.sin[position * half + column];
        if (low) sin = -sin;
    }
    static DEVICE int partner_of(const AttnParams& params, int number) {  // the other number of the pair, -1: none
        const int half = params.rope_dim / 2;
        if (number >= params.rope_dim) return -1;
        return params.interleaved ? number ^ 1 : number < half ? number + half : number - half;
    }
    DEVICE u16 rotated(u16 own, u16 other) const {
        return partner < 0 ? own : cvt_f16_f32(cvt_f32_f16(own) * cos + cvt_f32_f16(other) * sin);
    }
    DEVICE u16 apply(const u16* head, int number) const {
        return rotated(head[number], partner < 0 ? 0 : head[partner]);
    }
};

DEVICE float clamp_f16(float x) { return cvt_f32_f16(cvt_f16_f32(fminf(fmaxf(x, -65504.0f), 65504.0f))); }

// A warp appends 64 numbers of a new head, run `run` of it: each lane brings two, and gets them back as attention
// uses them now: Hadamard-transformed, but not rounded to codes. With `write` false nothing is stored (another block
// does that).
template <int DTYPE>
DEVICE void store_kv(float (&x)[2], char* stored, u16* scales, i64 head, int run, int lane, bool write) {
    if (DTYPE == 0) {
        if (write) ((u32*)stored)[head * (HEAD_DIM / 2) + run * 32 + lane] = cvt_f16x2_f32(x[0], x[1]);
        return;
    }
    UNROLL
    for (int i = 0; i < 2; i++) x[i] = clamp_f16(x[i]);
    if (DTYPE == 3) {
        const u32 code = cvt_f16x2_f32(x[0], x[1]);
        if (write) ((u16*)stored)[head * (HEAD_DIM / 2) + run * 32 + lane] = (u16)prmt(code, 0, 0x4431);
        return;
    }
    u32 both = cvt_f16x2_f32(x[0], x[1]);
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {  // a Hadamard butterfly: difference or sum, saturated
        const u32 theirs = shfl_xor_u32(both, mask), sign = lane & mask ? 0xbc00bc00 : 0x3c003c00;
        both = max_f16x2(min_f16x2(fma_f16x2(both, sign, theirs), 0x7bff7bff), 0xfbfffbff);
    }
    x[0] = cvt_f32_f16((u16)both);
    x[1] = cvt_f32_f16((u16)(both >> 16));
    const float center = DTYPE == 1 ? 128 : 8;
    float largest = fmaxf(fabsf(x[0]), fabsf(x[1]));
    UNROLL
    for (int mask = 1; mask < 16; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    u32 code[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
        const float share = cvt_f32_f16(cvt_f16_f32(x[i] / (largest == 0 ? 1.0f : largest)));
        const float level = rintf(cvt_f32_f16(cvt_f16_f32(share * center + center)));
        code[i] = largest == 0 ? 0 : (u32)fminf(fmaxf(level, 0.0f), 2 * center - 1);
    }
    if (!write) return;
    if (DTYPE == 1) ((u16*)stored)[head * (HEAD_DIM / 2) + run * 32 + lane] = (u16)(code[0] | code[1] << 8);
    if (DTYPE == 2) ((u8*)stored)[head * (HEAD_DIM / 2) + run * 32 + lane] = (u8)(code[0] | code[1] << 4);
    if (lane % 16 == 0) scales[head * (HEAD_DIM / 32) + run * 2 + lane / 16] = cvt_f16_f32(largest / center);
}
