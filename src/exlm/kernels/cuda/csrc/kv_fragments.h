// Cached keys and values from their pages straight into mma.m16n8k16 fragments, for attn_decode.cu. The order of a
// head's numbers does not matter to a sum, so a lane takes 16 bytes where they lie:
//
//     S = K Q^T: A rows are tokens g and g + 8; lane 4 g + c holds a quarter of their numbers (KFragments)
//     O = V^T P: A columns are tokens 2c, 2c + 1, 2c + 8, 2c + 9; lane 4 g + c holds an eighth (VFragments)
//
// Set when compiling, besides what kv_page.h wants: KV_M16 (16 tokens each: blocks of a KV tile).
#pragma once
#include "kv_page.h"

#define KV_TILE (KV_M16 * 16)  // tokens

// A lane's part of a stored head: words in runs of up to 16 bytes; the runs of LANES lanes lie side by side.
template <int DTYPE, int LANES> struct KvFragment {
    static const int bits = DTYPE == 0 ? 16 : DTYPE == 2 ? 4 : 8, per_word = 32 / bits;
    static const int words = HEAD_DIM / per_word / LANES, run = words < 4 ? words : 4, runs = words / run;
    u32 word[words];
    u16 scale[runs];

    static DEVICE int index_of(int part, int number) {  // in the head, of a number of the lane
        return (number / (run * per_word) * LANES + part) * (run * per_word) + number % (run * per_word);
    }
    // From pointers to the lane's first run of some head, `heads` heads further on.
    DEVICE void load(const char* from, const u16* scales, int heads) {
        UNROLL
        for (int r = 0; r < runs; r++) {
            const char* at = from + heads * (HEAD_DIM / per_word * 4) + r * LANES * run * 4;
            u32* to = word + r * run;
            if (run == 4) {
                const uint4 four = ld_nc_v4(at);
                to[0] = four.x;
                to[1] = four.y;
                to[2] = four.z;
                to[3] = four.w;
            }
            if (run == 2) {
                const uint2 two = ld_nc_l2_v2(at);
                to[0] = two.x;
                to[1] = two.y;
            }
            if (run == 1) to[0] = ld_nc_l2_u32(at);
            if (IS_HADAMARD(DTYPE))
                scale[r] = ld_nc_u16(scales + heads * (HEAD_DIM / 32) + r * LANES * run * per_word / 32);
        }
    }
    static DEVICE const char* first_run(const char* stored, i64 head, int part) {
        return stored + head * (HEAD_DIM / per_word * 4) + part * run * 4;
    }
    static DEVICE const u16* first_scale(const u16* scales, i64 head, int part) {
        return scales + head * (HEAD_DIM / 32) + part * run * per_word / 32;
    }
};

// Two of the four bytes of a word as a pair of float16: codes of 8 bits less 128 by the 1024 + code trick, or the upper
// bytes of float16.
template <int DTYPE> DEVICE u32 pair_from_bytes(u32 word, int second) {
    if (DTYPE == 3) return prmt(word, 0, second ? 0x3424 : 0x1404);
    return add_f16x2(prmt(word, 0x64646464, second ? 0x4342 : 0x4140), 0xe480e480);  // 1024 + code - 1152
}
// Codes of 4 bits less 8, at bits 0 and 16, or with `up` at bits 4 and 20.
DEVICE u32 pair_from_nibbles(u32 word, bool up) {
    if (up)  // (1024 + 16 code) / 16 - 72
        return fma_f16x2(lop3_and_or(word, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);
    return add_f16x2(lop3_and_or(word, 0x000f000f, 0x64006400), 0xe408e408);  // 1024 + code - 1032
}

// Keys: pairs of numbers of one token. `first` and `second` say which numbers of the lane.
template <int DTYPE> struct KFragments {
    typedef KvFragment<DTYPE, 4> Lane;
    static const int count = HEAD_DIM / 8;
    static DEVICE int first(int pair) { return DTYPE == 2 ? pair / 4 * 8 + pair % 4 : pair * 2; }
    static DEVICE int second(int pair) { return DTYPE == 2 ? first(pair) + 4 : pair * 2 + 1; }
    static DEVICE void unpack(const Lane& lane, u32 (&out)[count]) {
        UNROLL
        for (int i = 0; i < count; i++) {
            const int w = first(i) / Lane::per_word;
            if (DTYPE == 0) out[i] = lane.word[w];
            if (DTYPE == 1 || DTYPE == 3) out[i] = pair_from_bytes<DTYPE>(lane.word[w], i % 2);
            if (DTYPE == 2) out[i] = pair_from_nibbles(i % 4 < 2 ? lane.word[w] : lane.word[w] >> 8, i % 2);
            if (IS_HADAMARD(DTYPE)) out[i] = mul_f16x2(out[i], prmt(lane.scale[w / Lane::run], 0, 0x1010));
        }
    }
};

// Values: the same number of two tokens.
template <int DTYPE> struct VFragments {
    typedef KvFragment<DTYPE, 8> Lane;
    static const int count = HEAD_DIM / 8;
    static DEVICE void unpack(const Lane& one, const Lane& other, u32 (&out)[count]) {
        UNROLL
        for (int i = 0; i < count; i++) {
            const int w = i / Lane::per_word;
            const u32 a = one.word[w], b = other.word[w];
            if (DTYPE == 0) out[i] = prmt(a, b, i % 2 ? 0x7632 : 0x5410);
            if (DTYPE == 1 || DTYPE == 3)
                out[i] = pair_from_bytes<DTYPE>(prmt(a, b, i % 4 < 2 ? 0x5140 : 0x7362), i % 2);
            if (DTYPE == 2) {
                const u32 both = prmt(a, b, i % 8 < 4 ? 0x5410 : 0x7632);
                out[i] = pair_from_nibbles(i % 4 < 2 ? both : both >> 8, i % 2);
            }
            if (IS_HADAMARD(DTYPE))
                out[i] = mul_f16x2(out[i], one.scale[w / Lane::run] | (u32)other.scale[w / Lane::run] << 16);
        }
    }
};

// One warp's tile of KV_TILE cached tokens under way. A tile never leaves its page; beyond the end the last token is
// read.
struct KvTile {
    KFragments<K_DTYPE>::Lane keys[KV_M16][2];
    VFragments<V_DTYPE>::Lane values[KV_M16][4];

    // The number of a token's head among all stored heads.
    static DEVICE i64 head_index(const AttnParams& params, i64 row, int token, int h) {
        const i64 page = params.page_table[row * params.page_table_stride + token / PAGE_SIZE];
        return (page * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS + h;
    }
    // `left` tokens exist, perhaps more than a tile.
    DEVICE void load_keys(const AttnParams& params, i64 head, int left, int lane) {
        const int g = lane / 4, c = lane % 4;
        typedef KFragments<K_DTYPE>::Lane Lane;
        if (left >= KV_TILE) {
            const char* from = Lane::first_run(params.key, head + g * KV_HEADS, c);
            const u16* scales = Lane::first_scale(params.key_scale, head + g * KV_HEADS, c);
            UNROLL
            for (int s = 0; s < KV_M16; s++) {
                UNROLL
                for (int i = 0; i < 2; i++) keys[s][i].load(from, scales, (s * 16 + i * 8) * KV_HEADS);
            }
        } else {
            const char* from = Lane::first_run(params.key, head, c);
            const u16* scales = Lane::first_scale(params.key_scale, head, c);
            UNROLL
            for (int s = 0; s < KV_M16; s++) {
                UNROLL
                for (int i = 0; i < 2; i++)
                    keys[s][i].load(from, scales, min(s * 16 + i * 8 + g, left - 1) * KV_HEADS);
            }
        }
    }
    DEVICE void load_values(const AttnParams& params, i64 head, int left, int lane) {
        const int g = lane / 4, c = lane % 4;
        typedef VFragments<V_DTYPE>::Lane Lane;
        if (left >= KV_TILE) {
            const char* from = Lane::first_run(params.value, head + 2 * c * KV_HEADS, g);
            const u16* scales = Lane::first_scale(params.value_scale, head + 2 * c * KV_HEADS, g);
            UNROLL
            for (int s = 0; s < KV_M16; s++) {
                UNROLL
                for (int i = 0; i < 4; i++)
                    values[s][i].load(from, scales, (s * 16 + i / 2 * 8 + i % 2) * KV_HEADS);
            }
        } else {
            const char* from = Lane::first_run(params.value, head, g);
            const u16* scales = Lane::first_scale(params.value_scale, head, g);
            UNROLL
            for (int s = 0; s < KV_M16; s++) {
                UNROLL
                for (int i = 0; i < 4; i++)
                    values[s][i].load(from, scales, min(s * 16 + i / 2 * 8 + 2 * c + i % 2, left - 1) * KV_HEADS);
            }
        }
    }
};
