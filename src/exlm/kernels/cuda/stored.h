// Stored keys and values, floats or codes, on their way from pages into the registers of the tensor cores: which lane
// takes what, and what it becomes.
//
// Set when compiling, besides what pages.h wants: STEPS (sixteens of tokens in a tile).

#include "pages.h"

#ifndef EMULATED
// Stored numbers pass by once: they do not displace what is read often.
DEVICE void read4(u32* to, const char* from) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
}
DEVICE void read2(u32* to, const char* from) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}
DEVICE void read1(u32* to, const char* from) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}
DEVICE u16 read_scale(const u16* from) {
    u16 out; asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(out) : "l"(from)); return out;
}
#endif

#define TILE (STEPS * 16)

// A lane's part of a stored head: words in runs of up to 16 bytes, runs of PARTS lanes side by side.
template <int CODING, int PARTS> struct Piece {
    static const int bits = CODING == 0 ? 16 : CODING == 2 ? 4 : 8, each = 32 / bits;
    static const int words = HEAD / each / PARTS, run = words < 4 ? words : 4, runs = words / run;
    u32 word[words];
    u16 scale[runs];

    static DEVICE int place(int part, int number) {  // in the head, of a number of the lane
        return (number / (run * each) * PARTS + part) * (run * each) + number % (run * each);
    }
    // From pointers to the lane's own first run of some head, `heads` heads further on.
    DEVICE void load(const char* from, const u16* scales, int heads) {
        LOOP for (int r = 0; r < runs; r++) {
            const char* at = from + heads * (HEAD / each * 4) + r * PARTS * run * 4;
            if (run == 4) read4(word + r * run, at);
            if (run == 2) read2(word + r * run, at);
            if (run == 1) read1(word + r * run, at);
            if (IN_CODES(CODING)) scale[r] = read_scale(scales + heads * (HEAD / 32) + r * PARTS * run * each / 32);
        }
    }
    static DEVICE const char* run_of(const char* stored, i64 home, int part) {
        return stored + home * (HEAD / each * 4) + part * run * 4;
    }
    static DEVICE const u16* scale_of(const u16* scales, i64 home, int part) {
        return scales + home * (HEAD / 32) + part * run * each / 32;
    }
};

// Codes of 8 bits or the upper bytes of halves, two of a word, as halves; of codes of 4 bits those at `up` (0 or 4).
template <int CODING> DEVICE u32 from_bytes(u32 word, int second) {
    if (CODING == 3) return bytes(word, 0, second ? 0x3424 : 0x1404);
    return add2(bytes(word, 0x64646464, second ? 0x4342 : 0x4140), 0xe480e480);  // 1024 + code - 1152
}
DEVICE u32 from_fours(u32 word, bool up) {
    if (up) return fma2(pick(word, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);  // (1024 + 16 code) / 16 - 72
    return add2(pick(word, 0x000f000f, 0x64006400), 0xe408e408);                     // 1024 + code - 1032
}

// Of one token: pairs of numbers. `first` and `second` say which.
template <int CODING> struct Pairs {
    typedef Piece<CODING, 4> Lane;
    static const int count = HEAD / 8;
    static DEVICE int first(int pair) { return CODING == 2 ? pair / 4 * 8 + pair % 4 : pair * 2; }
    static DEVICE int second(int pair) { return CODING == 2 ? first(pair) + 4 : pair * 2 + 1; }
    static DEVICE void unpack(const Lane& lane, u32 (&out)[count]) {
        LOOP for (int i = 0; i < count; i++) {
            const int w = first(i) / Lane::each;
            if (CODING == 0) out[i] = lane.word[w];
            if (CODING == 1 || CODING == 3) out[i] = from_bytes<CODING>(lane.word[w], i % 2);
            if (CODING == 2) out[i] = from_fours(i % 4 < 2 ? lane.word[w] : lane.word[w] >> 8, i % 2);
            if (IN_CODES(CODING)) out[i] = mul2(out[i], bytes(lane.scale[w / Lane::run], 0, 0x1010));
        }
    }
};

// Of two tokens: the same number of both.
template <int CODING> struct Couples {
    typedef Piece<CODING, 8> Lane;
    static const int count = HEAD / 8;
    static DEVICE void unpack(const Lane& one, const Lane& other, u32 (&out)[count]) {
        LOOP for (int i = 0; i < count; i++) {
            const int w = i / Lane::each;
            const u32 a = one.word[w], b = other.word[w];
            if (CODING == 0) out[i] = bytes(a, b, i % 2 ? 0x7632 : 0x5410);
            if (CODING == 1 || CODING == 3) out[i] = from_bytes<CODING>(bytes(a, b, i % 4 < 2 ? 0x5140 : 0x7362), i % 2);
            if (CODING == 2) {
                const u32 both = bytes(a, b, i % 8 < 4 ? 0x5410 : 0x7632);
                out[i] = from_fours(i % 4 < 2 ? both : both >> 8, i % 2);
            }
            if (IN_CODES(CODING)) out[i] = mul2(out[i], one.scale[w / Lane::run] | (u32)other.scale[w / Lane::run] << 16);
        }
    }
};

// One warp's tile of stored tokens on their way. A tile never leaves its page; behind `stop` the last token stands in.
struct Tile {
    Pairs<KEYS>::Lane keys[STEPS][2];
    Couples<VALUES>::Lane values[STEPS][4];

    // Among all stored heads, of a row's token.
    static DEVICE i64 home(const Job& job, i64 row, int token, int h) {
        return (job.table[row * job.table_step + token / PAGE] * PAGE + token % PAGE) * KV + h;
    }
    // `left` tokens are there, perhaps more than a tile.
    DEVICE void load_keys(const Job& job, i64 home, int left, int lane) {
        const int g = lane / 4, c = lane % 4;
        typedef Pairs<KEYS>::Lane Lane;
        if (left >= TILE) {
            const char* from = Lane::run_of(job.key, home + g * KV, c);
            const u16* scales = Lane::scale_of(job.key_scale, home + g * KV, c);
            LOOP for (int s = 0; s < STEPS; s++) LOOP for (int i = 0; i < 2; i++)
                keys[s][i].load(from, scales, (s * 16 + i * 8) * KV);
        } else {
            const char* from = Lane::run_of(job.key, home, c);
            const u16* scales = Lane::scale_of(job.key_scale, home, c);
            LOOP for (int s = 0; s < STEPS; s++) LOOP for (int i = 0; i < 2; i++)
                keys[s][i].load(from, scales, min(s * 16 + i * 8 + g, left - 1) * KV);
        }
    }
    DEVICE void load_values(const Job& job, i64 home, int left, int lane) {
        const int g = lane / 4, c = lane % 4;
        typedef Couples<VALUES>::Lane Lane;
        if (left >= TILE) {
            const char* from = Lane::run_of(job.value, home + 2 * c * KV, g);
            const u16* scales = Lane::scale_of(job.value_scale, home + 2 * c * KV, g);
            LOOP for (int s = 0; s < STEPS; s++) LOOP for (int i = 0; i < 4; i++)
                values[s][i].load(from, scales, (s * 16 + i / 2 * 8 + i % 2) * KV);
        } else {
            const char* from = Lane::run_of(job.value, home, g);
            const u16* scales = Lane::scale_of(job.value_scale, home, g);
            LOOP for (int s = 0; s < STEPS; s++) LOOP for (int i = 0; i < 4; i++)
                values[s][i].load(from, scales, min(s * 16 + i / 2 * 8 + 2 * c + i % 2, left - 1) * KV);
        }
    }
};
