// What the recurrent mixers share: the slots that states are in, the causal convolution, gates, sums over a warp.
//
// A pass must leave the same bits in a state however its tokens are divided into passes. So every sum has one order,
// and products are fused with sums where fmaf says so and nowhere else: the compiler, free to contract, could contract
// one function differently in two kernels. NO_FMAD=1 has sources compiled with --fmad=false (module_cache.py).
//
// A pass never writes a slot that it reads. Slots and states were written by earlier passes, and between two passes
// there are launches without PDL: they are read before griddepcontrol_wait.
//
// Set when compiling (-D): CONV_KERNEL (taps), CONV_BIAS (whether there is one).
#pragma once
#include "ptx.h"

static_assert(NO_FMAD == 1);

#define CONV_PAST (CONV_KERNEL - 1)

// Within 2 ulp at small x; their error grows with |x| to 1e-6 of the result.
DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

DEVICE float warp_sum(float x) {
    UNROLL
    for (int mask = 16; mask; mask /= 2) x += shfl_xor(x, mask);
    return x;
}

// A (rows, tokens, numbers) tensor of halves; the numbers of a token lie side by side.
struct TokenRows {
    const u16* data;
    i64 row_stride, token_stride;

    DEVICE const u16* at(i64 row, int token) const { return data + row * row_stride + token * token_stride; }
};

struct StateSlots {
    const i64* source;   // (row) where its state is before the first token; below zero: zeros; null: zeros for all
    const i64* targets;  // (row, token) where the state after a token goes; below zero, or null: nowhere

    DEVICE i64 source_of(i64 row) const { return source ? source[row] : -1; }
    DEVICE i64 target_of(i64 row, int tokens, int token) const { return targets ? targets[row * tokens + token] : -1; }
};

struct CausalConv {
    const float *weight, *bias;  // (channel, CONV_KERNEL), the newest input's last; (channel)
    u16* states;                 // (slot, CONV_PAST, channel), the last inputs, oldest first; null: none are kept
    i64 channels;
};

// What a token's convolution reads: the token's own inputs last. Inputs are halves, as slots hold them: a state is what
// was convolved.
struct ConvWindow {
    const u16* taps[CONV_KERNEL];  // at the first channel; null: zeros
    float scale;                   // on this pass's inputs, before they are rounded; slots hold scaled ones
    int token;

    // `rows` begins at the convolution's first channel.
    DEVICE ConvWindow(const TokenRows& rows, const CausalConv& conv, i64 row, i64 source, int at, float factor)
        : scale(factor), token(at) {
        const u16* past = conv.states && source >= 0 ? conv.states + source * CONV_PAST * conv.channels : nullptr;
        UNROLL
        for (int tap = 0; tap < CONV_KERNEL; tap++) {
            const int from = token - CONV_PAST + tap;
            taps[tap] = from >= 0 ? rows.at(row, from) : past ? past + (from + CONV_PAST) * conv.channels : nullptr;
        }
    }
    DEVICE u16 at(int tap, int channel) const {
        const u16 input = taps[tap] ? taps[tap][channel] : (u16)0;
        const bool scaled = scale != 1.0f && token - CONV_PAST + tap >= 0;
        return scaled ? cvt_f16_f32(cvt_f32_f16(input) * scale) : input;
    }
};

// COUNT neighbouring floats by one instruction.
template <int COUNT> DEVICE void load_floats(const float* from, float (&to)[COUNT]) {
    if (COUNT % 4 == 0) {
        UNROLL
        for (int i = 0; i < COUNT; i += 4) {
            const float4 four = *(const float4*)(from + i);
            to[i] = four.x, to[(i + 1) % COUNT] = four.y, to[(i + 2) % COUNT] = four.z, to[(i + 3) % COUNT] = four.w;
        }
    } else if (COUNT == 2) {
        const float2 two = *(const float2*)from;
        to[0] = two.x, to[1 % COUNT] = two.y;
    } else {
        UNROLL
        for (int i = 0; i < COUNT; i++) to[i] = from[i];
    }
}
template <int COUNT> DEVICE void store_floats(float* to, const float (&from)[COUNT]) {
    if (COUNT % 4 == 0) {
        UNROLL
        for (int i = 0; i < COUNT; i += 4)
            *(float4*)(to + i) =
                float4{from[i], from[(i + 1) % COUNT], from[(i + 2) % COUNT], from[(i + 3) % COUNT]};
    } else if (COUNT == 2) {
        *(float2*)to = float2{from[0], from[1 % COUNT]};
    } else {
        UNROLL
        for (int i = 0; i < COUNT; i++) to[i] = from[i];
    }
}

// DIM channels of a head by a warp: lane i has channels i, i + 32, ... The weights stay in registers between tokens.
// The inputs of all channels are read before anything is stored, so that their latencies overlap.
template <int DIM> struct HeadConv {
    static const int count = (DIM + 31) / 32;
    typedef u16 Taps[count][CONV_KERNEL];
    float weight[count][CONV_KERNEL], bias[count];

    DEVICE static bool exists(int i, int lane) { return DIM % 32 == 0 || i * 32 + lane < DIM; }
    DEVICE void load(const CausalConv& conv, int first, int lane) {
        UNROLL
        for (int i = 0; i < count; i++) {
            const int channel = first + (exists(i, lane) ? i * 32 + lane : 0);
            bias[i] = CONV_BIAS ? conv.bias[channel] : 0.0f;
            load_floats(conv.weight + channel * CONV_KERNEL, weight[i]);
        }
    }
    DEVICE static void read(const ConvWindow& window, int first, int lane, Taps& taps) {
        UNROLL
        for (int i = 0; i < count; i++) {
            const int channel = first + (exists(i, lane) ? i * 32 + lane : 0);
            UNROLL
            for (int tap = 0; tap < CONV_KERNEL; tap++) taps[i][tap] = window.at(tap, channel);
        }
    }
    // SiLU of the convolution; zeros behind the last channel.
    DEVICE void silu_of(const Taps& taps, int lane, float (&out)[count]) const {
        UNROLL
        for (int i = 0; i < count; i++) {
            float sum = bias[i];
            UNROLL
            for (int tap = 0; tap < CONV_KERNEL; tap++) sum = fmaf(cvt_f32_f16(taps[i][tap]), weight[i][tap], sum);
            out[i] = exists(i, lane) ? silu(sum) : 0.0f;
        }
    }
    // The inputs that the next token needs, to a slot; below zero: none.
    DEVICE static void store(const CausalConv& conv, const Taps& taps, i64 target, int first, int lane) {
        if (target < 0 || !conv.states) return;
        UNROLL
        for (int i = 0; i < count; i++) {
            UNROLL
            for (int tap = 1; tap < CONV_KERNEL; tap++)
                if (exists(i, lane))
                    conv.states[(target * CONV_PAST + tap - 1) * conv.channels + first + i * 32 + lane] = taps[i][tap];
        }
    }
};

// A record of 16-byte pieces, by all BLOCK threads of a thread block.
template <int BLOCK, class Record> DEVICE void cp_async_record(Record& to, const void* from) {
    static_assert(sizeof(Record) % 16 == 0);
    const int pieces = sizeof(Record) / 16, mine = threadIdx.x * 16;
    const u32 begin = cvta_to_shared(&to) + mine;
    const char* source = (const char*)from + mine;
    UNROLL
    for (int i = 0; i < pieces / BLOCK; i++) cp_async<16>(begin + i * BLOCK * 16, source + i * BLOCK * 16);
    const int rest = pieces / BLOCK * BLOCK;
    if (pieces % BLOCK && rest * 16 + mine < (int)sizeof(Record)) cp_async<16>(begin + rest * 16, source + rest * 16);
}

// The slots after tokens `first` to `end` of a row, into their `target`s, by all BLOCK threads of a thread block.
template <int BLOCK, class Token>
DEVICE void load_targets(const StateSlots& slots, i64 row, int tokens, int first, int end, Token* to) {
    NO_UNROLL
    for (int token = first + (int)threadIdx.x; token < end; token += BLOCK) {
        if (slots.targets)
            cp_async<8>(cvta_to_shared(&to[token - first].target), slots.targets + row * tokens + token);
        else
            to[token - first].target = -1;
    }
}
