// Stored keys and values, floats or codes, on their way from pages into the registers of the tensor cores: which lane
// takes what, and what it becomes.
//
// Set when compiling, besides what pages.h wants: STEPS (sixteens of tokens in a tile).

#include "kv_page.h"


#define KV_TILE (KV_M16 * 16)

// A lane's part of a stored head: words in runs of up to 16 bytes, runs of PARTS lanes side by side.
template <int DTYPE, int PARTS> struct KvFragment {
    static const int bits = DTYPE == 0 ? 16 : DTYPE == 2 ? 4 : 8, each = 32 / bits;
    static const int words = HEAD_DIM / each / PARTS, run = words < 4 ? words : 4, runs = words / run;
    u32 word[words];
    u16 scale[runs];

    static DEVICE int place(int part, int number) {  // in the head, of a number of the lane
        return (number / (run * each) * PARTS + part) * (run * each) + number % (run * each);
    }
    // From pointers to the lane's own first run of some head, `heads` heads further on.
    DEVICE void load(const char* from, const u16* scales, int heads) {
        UNROLL for (int r = 0; r < runs; r++) {
            const char* at = from + heads * (HEAD_DIM / each * 4) + r * PARTS * run * 4;
            u32* to = word + r * run;
            if (run == 4) {
                const uint4 four = ld_nc_v4(at);
                to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
            }
            if (run == 2) {
                const uint2 two = ld_nc_l2_v2(at);
                to[0] = two.x, to[1] = two.y;
            }
            if (run == 1) to[0] = ld_nc_l2_u32(at);
            if (IS_QUANTIZED(DTYPE)) scale[r] = ld_nc_u16(scales + heads * (HEAD_DIM / 32) + r * PARTS * run * each / 32);
        }
    }
    static DEVICE const char* run_of(const char* stored, i64 home, int part) {
        return stored + home * (HEAD_DIM / each * 4) + part * run * 4;
    }
    static DEVICE const u16* scale_of(const u16* scales, i64 home, int part) {
        return scales + home * (HEAD_DIM / 32) + part * run * each / 32;
    }
};

// Codes of 8 bits or the upper bytes of halves, two of a word, as halves; of codes of 4 bits those at `up` (0 or 4).
template <int DTYPE> DEVICE u32 from_bytes(u32 word, int second) {
    if (DTYPE == 3) return prmt(word, 0, second ? 0x3424 : 0x1404);
    return add_f16x2(prmt(word, 0x64646464, second ? 0x4342 : 0x4140), 0xe480e480);  // 1024 + code - 1152
}
DEVICE u32 from_fours(u32 word, bool up) {
    if (up) return fma_f16x2(lop3_and_or(word, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);  // (1024 + 16 code) / 16 - 72
    return add_f16x2(lop3_and_or(word, 0x000f000f, 0x64006400), 0xe408e408);                     // 1024 + code - 1032
}

// Of one token: pairs of numbers. `first` and `second` say which.
template <int DTYPE> struct KFragments {
    typedef KvFragment<DTYPE, 4> Lane;
    static const int count = HEAD_DIM / 8;
    static DEVICE int first(int pair) { return DTYPE == 2 ? pair / 4 * 8 + pair % 4 : pair * 2; }
    static DEVICE int second(int pair) { return DTYPE == 2 ? first(pair) + 4 : pair * 2 + 1; }
    static DEVICE void unpack(const Lane& lane, u32 (&out)[count]) {
        UNROLL for (int i = 0; i < count; i++) {
            const int w = first(i) / Lane::each;
            if (DTYPE == 0) out[i] = lane.word[w];
            if (DTYPE == 1 || DTYPE == 3) out[i] = from_bytes<DTYPE>(lane.word[w], i % 2);
            if (DTYPE == 2) out[i] = from_fours(i % 4 < 2 ? lane.word[w] : lane.word[w] >> 8, i % 2);
            if (IS_QUANTIZED(DTYPE)) out[i] = mul_f16x2(out[i], prmt(lane.scale[w / Lane::run], 0, 0x1010));
        }
    }
};

// Of two tokens: the same number of both.
template <int DTYPE> struct VFragments {
    typedef KvFragment<DTYPE, 8> Lane;
    static const int count = HEAD_DIM / 8;
    static DEVICE void unpack(const Lane& one, const Lane& other, u32 (&out)[count]) {
        UNROLL for (int i = 0; i < count; i++) {
            const int w = i / Lane::each;
            const u32 a = one.word[w], b = other.word[w];
            if (DTYPE == 0) out[i] = prmt(a, b, i % 2 ? 0x7632 : 0x5410);
            if (DTYPE == 1 || DTYPE == 3) out[i] = from_bytes<DTYPE>(prmt(a, b, i % 4 < 2 ? 0x5140 : 0x7362), i % 2);
            if (DTYPE == 2) {
                const u32 both = prmt(a, b, i % 8 < 4 ? 0x5410 : 0x7632);
                out[i] = from_fours(i % 4 < 2 ? both : both >> 8, i % 2);
            }
            if (IS_QUANTIZED(DTYPE)) out[i] = mul_f16x2(out[i], one.scale[w / Lane::run] | (u32)other.scale[w / Lane::run] << 16);
        }
    }
};

// One warp's tile of stored tokens on their way. A tile never leaves its page; behind `stop` the last token stands in.
struct KvTile {
    KFragments<K_DTYPE>::Lane keys[KV_M16][2];
    VFragments<V_DTYPE>::Lane values[KV_M16][4];

    // Among all stored heads, of a row's token.
    static DEVICE i64 home(const AttnParams& job, i64 row, int token, int h) {
        return (job.table[row * job.table_step + token / PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS + h;
    }
    // `left` tokens are there, perhaps more than a tile.
    DEVICE void load_keys(const AttnParams& job, i64 home, int left, int lane) {
        const int g = lane / 4, c = lane % 4;
        typedef KFragments<K_DTYPE>::Lane Lane;
        if (left >= KV_TILE) {
            const char* from = Lane::run_of(job.key, home + g * KV_HEADS, c);
            const u16* scales = Lane::scale_of(job.key_scale, home + g * KV_HEADS, c);
            UNROLL for (int s = 0; s < KV_M16; s++) UNROLL for (int i = 0; i < 2; i++)
                keys[s][i].load(from, scales, (s * 16 + i * 8) * KV_HEADS);
        } else {
            const char* from = Lane::run_of(job.key, home, c);
            const u16* scales = Lane::scale_of(job.key_scale, home, c);
            UNROLL for (int s = 0; s < KV_M16; s++) UNROLL for (int i = 0; i < 2; i++)
                keys[s][i].load(from, scales, min(s * 16 + i * 8 + g, left - 1) * KV_HEADS);
        }
    }
    DEVICE void load_values(const AttnParams& job, i64 home, int left, int lane) {
        const int g = lane / 4, c = lane % 4;
        typedef VFragments<V_DTYPE>::Lane Lane;
        if (left >= KV_TILE) {
            const char* from = Lane::run_of(job.value, home + 2 * c * KV_HEADS, g);
            const u16* scales = Lane::scale_of(job.value_scale, home + 2 * c * KV_HEADS, g);
            UNROLL for (int s = 0; s < KV_M16; s++) UNROLL for (int i = 0; i < 4; i++)
                values[s][i].load(from, scales, (s * 16 + i / 2 * 8 + i % 2) * KV_HEADS);
        } else {
            const char* from = Lane::run_of(job.value, home, g);
            const u16* scales = Lane::scale_of(job.value_scale, home, g);
            UNROLL for (int s = 0; s < KV_M16; s++) UNROLL for (int i = 0; i < 4; i++)
                values[s][i].load(from, scales, min(s * 16 + i / 2 * 8 + 2 * c + i % 2, left - 1) * KV_HEADS);
        }
    }
};
