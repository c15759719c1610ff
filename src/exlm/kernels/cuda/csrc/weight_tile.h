// The GPU layout of a packed weight, and how its codes become float16 in the registers of mma.m16n8k16.
//
// A weight tile has 128 inputs (k) by 16 outputs (n): eight k16 steps of an mma whose first operand is the transposed
// weight (m16 = outputs) and whose second operand has 8 rows of activations (n8). Codes lie in fragment order: what
// lane 4 g + c loads with one 16-byte instruction are codes of its own A registers, so nothing is shuffled.
//
//     A, one k16 step               lane 4 g + c holds                      one tile of b-bit codes in memory
//              k: 4c  4c+2                a0 = (row g,     k 4c,   4c+1)    +--------------------------------+ byte 0
//     row g     [a0] [a2]                 a1 = (row g + 8, k 4c,   4c+1)    | low plane: [chunk][lane][16 B] |
//     row g + 8 [a1] [a3]                 a2 = (row g,     k 4c+2, 4c+3)    | high plane, if b is 3, 5, 6, 8 |
//                                         a3 = (row g + 8, k 4c+2, 4c+3)    +--------------------------------+ 256 b
//     The mma's own k order is 2c, 2c+1, 2c+8, 2c+9; a sum does not mind,   | scales:  [group][g] f16 pair   |
//     as long as both operands use the same one (pack_activations.h).      | -zeros:  [group][g], if a table |
//                                                                           | -mins:   [group][g], if any    |
//     one 32-bit word of a 4-bit plane (one k16 step of a lane):            +--------------------------------+
//       bit 31    28 27    24 23    20 19    16 15    12 11     8 7      4 3      0
//           | a3,k+1 | a2,k+1 | a1,k+1 | a0,k+1 | a3,k   | a2,k   | a1,k   | a0,k   |
//     Both codes of a register stand 16 bits apart, where a pair of float16 has its lowest bits. Planes of 2 bits hold
//     two steps a word, of 1 bit four. Codes of 3, 5, 6, 8 bits are split into planes of 2+1, 4+1, 4+2, 4+4 bits, the
//     low bits first.
//     A table's 32-bit word g is the pair (output g, output g + 8) of a group of inputs.
//
// A 16-byte chunk of a lane holds the words of neighbouring steps: of 4 bits, chunk i those of steps 4 i to 4 i + 3. A
// plane of 1 bit is half a chunk, [lane][8 B]. In shared memory a tile lies as here.
//
// The tiles of an n16 column lie in two arrays, contiguous in each: `fine` has the first fine_k_tiles k tiles, with
// FINE_KSTEPS groups (codes that had another width), `main` the others. repack.py fills them; weight_tile.py says what
// digits are.
//
// The 1024 + code trick: or-ing a code into the low mantissa bits of 0x6400 (1024.0) makes the float16 1024 + code
// with one lop3, no conversion. Codes of a1 and a3 (rows g + 8) are used where they lie in their word, shifted left, so
// they make 1024 + factor * code (RowG8).
//
// Set when compiling (-D): BITS (width of each weight, a nibble each, the first lowest), GROUP_KSTEPS (k16 steps with
// one scale: 1, 2, 4, 8), FINE_KSTEPS (the same in fine tiles), ZERO_POINTS (0: half of the codes' range, 1: none, 2:
// a table), HAS_MINS (a table of minimums), NUM_WEIGHTS (side by side in a launch).
#pragma once
#include "ptx.h"

struct MmaWeight {
    const char *fine, *main;             // (n_tiles, fine_k_tiles or the others, bytes)
    int fine_k_tiles, k_tiles, n_tiles;  // k_tiles: of an n16 column, fine ones included
    float factor;                        // of every sum: keeps small float32 scales from vanishing in float16
};

#define NUM_TABLES (1 + (ZERO_POINTS == 2) + HAS_MINS)
#define BITS_OF(weight) (BITS >> 4 * (weight) & 15)
#define TILE_BYTES(bits, ksteps) (256 * (bits) + 32 * NUM_TABLES * (8 / (ksteps)))
#define MIN_KSTEPS (FINE_KSTEPS < GROUP_KSTEPS ? FINE_KSTEPS : GROUP_KSTEPS)

__device__ constexpr int max_bits() {
    int most = 0;
    for (int weight = 0; weight < NUM_WEIGHTS; weight++)
        if (BITS_OF(weight) > most) most = BITS_OF(weight);
    return most;
}
__device__ constexpr bool one_width() {
    for (int weight = 1; weight < NUM_WEIGHTS; weight++)
        if (BITS_OF(weight) != BITS_OF(0)) return false;
    return true;
}
#define MAX_TILE_BYTES TILE_BYTES(max_bits(), MIN_KSTEPS)  // bytes of shared memory that hold any tile of the launch

// Pairs of float16.
DEVICE u32 both_low(u32 pair) { return prmt(pair, 0, 0x1010); }
DEVICE u32 both_high(u32 pair) { return prmt(pair, 0, 0x3232); }
DEVICE float low_half(u32 pair) { return cvt_f32_f16((u16)pair); }
DEVICE float high_half(u32 pair) { return cvt_f32_f16((u16)(pair >> 16)); }

DEVICE u32 shift_right(u32 word, int by) { return by >= 0 ? word >> by : word << -by; }

// By what the codes of row g + 8 (a1 and a3) are multiplied, because they are used where they lie in their word.
template <int BITS_> struct RowG8 {
    static const int factor = BITS_ == 8 ? 1 : BITS_ < 4 ? 4 : 16;
};

// A lane's codes of one tile: words of up to two bit planes.
template <int BITS_> struct TileCodes {
    static const int low_words = BITS_ < 4 ? 4 : 8;
    static const int high_words = BITS_ == 8 ? 8 : BITS_ == 6 ? 4 : BITS_ % 2 ? 2 : 0;
    u32 low[low_words], high[high_words ? high_words : 1];

    // The A registers of a k16 step (0..7): 1024 + code, in a1 and a3 1024 + FACTOR_G8 * code.
    template <int FACTOR_G8> DEVICE void unpack(int step, u32 (&a)[4]) const {
        UNROLL
        for (int j = 0; j < 4; j++) {
            // Bits below the code that stay empty.
            const int up = j % 2 ? FACTOR_G8 == 16 ? 4 : FACTOR_G8 == 4 ? 2 : 0 : 0;
            const int pair = 2 * (step % 2 * 4 + j), one = step % 4 * 4 + j;  // where fields of 2 and of 1 bit begin
            u32 code = 0x64006400;
            if (BITS_ < 4) code = lop3_and_or(shift_right(low[step / 2], pair - up), 0x00030003 << up, code);
            if (BITS_ == 3) code = lop3_and_or(shift_right(high[step / 4], one - 2 - up), 0x00040004 << up, code);
            if (BITS_ >= 4) code = lop3_and_or(shift_right(low[step], 4 * j - up), 0x000f000f << up, code);
            if (BITS_ == 5) code = lop3_and_or(shift_right(high[step / 4], one - 4 - up), 0x00100010 << up, code);
            if (BITS_ == 6) code = lop3_and_or(shift_right(high[step / 2], pair - 4 - up), 0x00300030 << up, code);
            if (BITS_ == 8) code = lop3_and_or(shift_right(high[step], 4 * j - 4 - up), 0x00f000f0 << up, code);
            a[j] = code;
        }
    }
};

// A lane's part of a tile as it is loaded: its codes, and the table entries of its two outputs.
template <int BITS_, int KSTEPS> struct TileFragment {
    static const int num_chunks = BITS_ / 2, groups = 8 / KSTEPS;
    uint4 chunk[num_chunks];          // 16 bytes each
    uint2 tail;                       // the plane of 1 bit has 8 bytes a lane
    u32 tables[NUM_TABLES * groups];  // (table, group): a pair, outputs g and g + 8

    template <bool FROM_SHARED> DEVICE void load(const char* tile, int lane) {
        UNROLL
        for (int i = 0; i < num_chunks; i++) {
            const char* at = tile + i * 512 + lane * 16;
            chunk[i] = FROM_SHARED ? *(const uint4*)at : ld_nc_v4(at);
        }
        if (BITS_ % 2) {
            const char* at = tile + num_chunks * 512 + lane * 8;
            tail = FROM_SHARED ? *(const uint2*)at : ld_nc_v2(at);
        }
        UNROLL
        for (int i = 0; i < NUM_TABLES * groups; i++) {
            const char* at = tile + 256 * BITS_ + i * 32 + lane / 4 * 4;
            tables[i] = FROM_SHARED ? *(const u32*)at : ld_nc_u32(at);
        }
    }

    DEVICE TileCodes<BITS_> codes() const {
        constexpr int low_chunks = TileCodes<BITS_>::low_words / 4;
        TileCodes<BITS_> out;
        UNROLL
        for (int i = 0; i < low_chunks; i++) copy_words(chunk[i], out.low + 4 * i);
        UNROLL
        for (int i = low_chunks; i < num_chunks; i++) copy_words(chunk[i], out.high + 4 * (i - low_chunks));
        if (BITS_ % 2) {
            out.high[0] = tail.x;
            out.high[1] = tail.y;
        }
        return out;
    }
    DEVICE static void copy_words(uint4 from, u32* to) {
        to[0] = from.x;
        to[1] = from.y;
        to[2] = from.z;
        to[3] = from.w;
    }
};
