// Gated short convolution (LFM2): y = C conv(B x), one thread for each number. B x is rounded to half before the
// convolution, as slots hold it, so that a token's output does not depend on the pass that its past was in.
//
// Bound by memory: a token of 2048 channels reads 3 and writes 1 x 4 KiB (the two inputs before it, 8 reads more, come
// from L1 and L2), and a pass 2 x 8 KiB of state; one row's token is one launch of 8 thread blocks.
//
// Set when compiling (-D), besides CONV_KERNEL and CONV_BIAS: WIDTH (channels).

#include "recurrent.h"

struct ShortConvParams {
    TokenRows projected;  // B, C and x side by side
    u16* out;             // (row, token, WIDTH)
    CausalConv conv;
    StateSlots slots;
    i64 tokens;
};
CHECK_SIZEOF(ShortConvParams);

// Grid: (token, 256 channels, row).
extern "C" __global__ void __launch_bounds__(256) short_conv(const __grid_constant__ ShortConvParams params) {
    const int channel = blockIdx.y * 256 + threadIdx.x, token = blockIdx.x, tokens = (int)params.tokens;
    const i64 row = blockIdx.z, source = params.slots.source_of(row);
    const i64 target = params.slots.target_of(row, tokens, token);
    if (channel >= WIDTH) return;
    float weight[CONV_KERNEL];
    load_floats(params.conv.weight + channel * CONV_KERNEL, weight);
    float sum = CONV_BIAS ? params.conv.bias[channel] : 0.0f;
    const u16* past = params.conv.states && source >= 0 ? params.conv.states + source * CONV_PAST * WIDTH : nullptr;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    u16 taps[CONV_KERNEL];
    UNROLL
    for (int tap = 0; tap < CONV_KERNEL; tap++) {
        const int from = token - CONV_PAST + tap;
        if (from >= 0) {
            const u16* at = params.projected.at(row, from) + channel;
            taps[tap] = cvt_f16_f32(cvt_f32_f16(at[0]) * cvt_f32_f16(at[2 * WIDTH]));
        } else {
            taps[tap] = past ? past[(from + CONV_PAST) * WIDTH + channel] : (u16)0;
        }
    }
    UNROLL
    for (int tap = 0; tap < CONV_KERNEL; tap++) sum = fmaf(cvt_f32_f16(taps[tap]), weight[tap], sum);
    const float c = cvt_f32_f16(params.projected.at(row, token)[WIDTH + channel]);
    params.out[(row * tokens + token) * WIDTH + channel] = cvt_f16_f32(c * sum);
    if (target < 0 || !params.conv.states) return;
    UNROLL
    for (int tap = 1; tap < CONV_KERNEL; tap++)
        params.conv.states[(target * CONV_PAST + tap - 1) * WIDTH + channel] = taps[tap];
}
