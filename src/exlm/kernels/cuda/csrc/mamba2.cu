// Mamba 2: everything between its two projections. With x, B and C convolved, a = exp(-exp(A) dt), a token changes the
// state S (HEAD_DIM, STATE_DIM) of a head and gives y:
//
//     S = a S + (dt x) B^T;  y = S C + D x
//
// and the y of a group of heads are gated by z and normalised. S is in registers for the whole pass: ROW_THREADS
// threads share ROWS neighbouring rows, each with COLUMNS of their columns. As in delta_net.cu a row's sums have one
// order, so one token, drafts and prompts are the same arithmetic, whatever the passes and thread blocks; here no token
// waits for the sums of the one before.
//
//   mamba2_step    up to 16 tokens: one launch, a thread block for each (row, head). The norm needs all heads of a
//                  group: the thread block that arrives last has it.
//   mamba2_inputs  many tokens: x, B, C, dt of all of them at once, to a workspace in float32;
//   mamba2_scan    then the recurrence, SCAN_ROWS rows of S for each thread block, tokens on their way by cp.async;
//   mamba2_outputs then gate and norm.
//
// Three instructions of a lane for each number of S and token (a product, two fmaf): 128 heads of 80 x 128
// (Nemotron-Nano-9B) are 3.9e6 for a token, 233 cycles of 132 x 128 lanes. 1280 warps of 8 rows are 2.4 for each of 528
// schedulers, so 3 at most, with 96 + 35 instructions each: about 400 cycles, 0.22 us for a token and layer, 0.45 ms
// for 2048 tokens. Decoding is bound by memory: S is 40 KiB for a head, 2 x 5.2 MB for a row, 2.5 us at 4.2 TB/s.
//
// Scaled inputs of the convolution are rounded to half, as slots hold them (ConvWindow).
//
// Set when compiling (-D), besides CONV_KERNEL and CONV_BIAS: HEADS, GROUPS, HEAD_DIM, STATE_DIM, NORM_GROUPS (0: no
// norm), NORM_BEFORE_GATE, ROW_THREADS, ROWS, SCAN_WARPS, STAGE_TOKENS.

#include "recurrent.h"

#define COLUMNS (STATE_DIM / ROW_THREADS)
#define WARP_ROWS (32 / ROW_THREADS * ROWS)
#define STEP_THREADS (HEAD_DIM / WARP_ROWS * 32)
#define STEP_BLOCKS (STEP_THREADS <= 256 && COLUMNS <= 16 ? 2 : 1)  // resident on an SM, as registers allow
#define SCAN_THREADS (SCAN_WARPS * 32)
#define SCAN_ROWS (SCAN_WARPS * WARP_ROWS)
#define WIDTH (HEADS * HEAD_DIM)
#define BC_WIDTH (GROUPS * STATE_DIM)
#define HEADS_PER_GROUP (HEADS / GROUPS)
#define NORM_WIDTH (WIDTH / (NORM_GROUPS ? NORM_GROUPS : HEADS))  // numbers that are normalised together
#define HEADS_PER_NORM (NORM_WIDTH / HEAD_DIM)
#define INPUT_TOKENS 8  // of a warp of mamba2_inputs

static_assert(STATE_DIM % (4 * ROW_THREADS) == 0 && HEAD_DIM % WARP_ROWS == 0 && HEAD_DIM % SCAN_ROWS == 0);

// Of a token: what a group's heads share, and a head's own.
struct GroupRecord {
    float b[STATE_DIM], c[STATE_DIM];
};
struct GateRecord {
    float dt, decay, unused[2];
};
template <int COUNT> struct alignas(16) TokenInputs {
    GroupRecord group;
    GateRecord gate;
    float x[COUNT];
    i64 target, unused;
};

CHECK_SIZEOF(GroupRecord);
CHECK_SIZEOF(GateRecord);

struct Mamba2Params {
    TokenRows projected;  // z, x, B, C, dt side by side
    u16* out;             // (row, token, WIDTH)
    CausalConv conv;
    const float *decay_rate, *dt_bias, *d, *norm;  // (head) -exp(A), ...; (WIDTH)
    float* states;                                 // (slot, head, HEAD_DIM, STATE_DIM); null: none are kept
    StateSlots slots;
    GroupRecord* groups;  // (row, token, group), of many tokens
    GateRecord* gates;    // (row, token, head)
    float* values;        // (row, token, WIDTH): x, and after the recurrence y
    u32* arrivals;        // (row, norm group) thread blocks that are done; zero before and after a launch
    i64 tokens;
    float norm_eps, dt_min, dt_max, z_scale, x_scale, b_scale, c_scale, dt_scale;

    DEVICE TokenRows conv_rows() const {
        return TokenRows{projected.data + WIDTH, projected.row_stride, projected.token_stride};
    }
};
CHECK_SIZEOF(Mamba2Params);

// B and C of a group, by a warp.
struct GroupMaker {
    HeadConv<STATE_DIM> b_conv, c_conv;

    DEVICE void load(const Mamba2Params& params, int group, int lane) {
        b_conv.load(params.conv, WIDTH + group * STATE_DIM, lane);
        c_conv.load(params.conv, WIDTH + BC_WIDTH + group * STATE_DIM, lane);
    }
    DEVICE void operator()(
        const Mamba2Params& params, ConvWindow window, int group, i64 target, int lane, GroupRecord& to
    ) const {
        const int first = WIDTH + group * STATE_DIM;
        typename HeadConv<STATE_DIM>::Taps b_taps, c_taps;
        window.scale = params.b_scale;
        b_conv.read(window, first, lane, b_taps);
        window.scale = params.c_scale;
        c_conv.read(window, first + BC_WIDTH, lane, c_taps);
        float b[HeadConv<STATE_DIM>::count], c[HeadConv<STATE_DIM>::count];
        b_conv.silu_of(b_taps, lane, b);
        c_conv.silu_of(c_taps, lane, c);
        UNROLL
        for (int i = 0; i < HeadConv<STATE_DIM>::count; i++) {
            if (!HeadConv<STATE_DIM>::exists(i, lane)) continue;
            to.b[i * 32 + lane] = b[i];
            to.c[i * 32 + lane] = c[i];
        }
        b_conv.store(params.conv, b_taps, target, first, lane);
        c_conv.store(params.conv, c_taps, target, first + BC_WIDTH, lane);
    }
};

// x and dt of a head, by a warp.
struct HeadMaker {
    HeadConv<HEAD_DIM> conv;

    DEVICE void load(const Mamba2Params& params, int head, int lane) { conv.load(params.conv, head * HEAD_DIM, lane); }
    DEVICE void operator()(
        const Mamba2Params& params, const ConvWindow& window, i64 row, int head, i64 target, int lane, float* x,
        GateRecord& gate
    ) const {
        typename HeadConv<HEAD_DIM>::Taps taps;
        conv.read(window, head * HEAD_DIM, lane, taps);
        float out[HeadConv<HEAD_DIM>::count];
        conv.silu_of(taps, lane, out);
        UNROLL
        for (int i = 0; i < HeadConv<HEAD_DIM>::count; i++)
            if (HeadConv<HEAD_DIM>::exists(i, lane)) x[i * 32 + lane] = out[i];
        if (lane == 0) {
            const u16 number = params.projected.at(row, window.token)[2 * WIDTH + 2 * BC_WIDTH + head];
            const float biased = cvt_f32_f16(number) * params.dt_scale + params.dt_bias[head];
            const float dt = fminf(fmaxf(softplus(biased), params.dt_min), params.dt_max);
            gate.dt = dt;
            gate.decay = expf(dt * params.decay_rate[head]);
        }
        conv.store(params.conv, taps, target, head * HEAD_DIM, lane);
    }
};

// A thread's part of S: numbers (4 j + e) of every ROW_THREADS runs of four of its rows.
struct StateRows {
    float s[ROWS][COLUMNS];

    DEVICE static int column_of(int i, int part) { return (i / 4 * ROW_THREADS + part) * 4 + i % 4; }
    DEVICE void load(const Mamba2Params& params, i64 source, int head, int first_row, int part) {
        const float* from = params.states + ((source * HEADS + head) * HEAD_DIM + first_row) * STATE_DIM;
        const bool stored = params.states && source >= 0;
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            UNROLL
            for (int i = 0; i < COLUMNS; i += 4) {
                float four[4] = {};
                if (stored) load_floats(from + r * STATE_DIM + column_of(i, part), four);
                UNROLL
                for (int e = 0; e < 4; e++) s[r][i + e] = four[e];
            }
        }
    }
    DEVICE void store(const Mamba2Params& params, i64 target, int head, int first_row, int part) const {
        if (target < 0 || !params.states) return;
        float* to = params.states + ((target * HEADS + head) * HEAD_DIM + first_row) * STATE_DIM;
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            UNROLL
            for (int i = 0; i < COLUMNS; i += 4) {
                const float four[4] = {s[r][i], s[r][i + 1], s[r][i + 2], s[r][i + 3]};
                store_floats(to + r * STATE_DIM + column_of(i, part), four);
            }
        }
    }
    // One token; `first_row` is the first one's place in `in.x`. All lanes of a row get its output.
    template <int COUNT>
    DEVICE void step(const TokenInputs<COUNT>& in, int first_row, int part, float d, float (&out)[ROWS]) {
        float x[ROWS], dt_x[ROWS], sum[ROWS][2] = {};  // two chains, so that an fmaf waits for the last but one
        load_floats(in.x + first_row, x);
        UNROLL
        for (int r = 0; r < ROWS; r++) dt_x[r] = x[r] * in.gate.dt;
        UNROLL
        for (int j = 0; j < COLUMNS; j += 4) {
            float b[4], c[4];
            load_floats(in.group.b + column_of(j, part), b);
            load_floats(in.group.c + column_of(j, part), c);
            UNROLL
            for (int e = 0; e < 4; e++) {
                UNROLL
                for (int r = 0; r < ROWS; r++) {
                    s[r][j + e] = fmaf(dt_x[r], b[e], s[r][j + e] * in.gate.decay);
                    sum[r][j / 4 % 2] = fmaf(s[r][j + e], c[e], sum[r][j / 4 % 2]);
                }
            }
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            float y = sum[r][0] + sum[r][1];
            UNROLL
            for (int mask = 1; mask < ROW_THREADS; mask *= 2) y += shfl_xor(y, mask);
            out[r] = fmaf(x[r], d, y);
        }
    }
};

// Gate and norm of NORM_WIDTH numbers of a token, by STEP_THREADS threads together; other SMs wrote `y`.
DEVICE void write_output(const Mamba2Params& params, i64 row, int token, int group, float* scratch) {
    const int count = (NORM_WIDTH + STEP_THREADS - 1) / STEP_THREADS, first = group * NORM_WIDTH;
    const float* y = params.values + (row * params.tokens + token) * WIDTH + first;
    const u16* z = params.projected.at(row, token) + first;
    u16* out = params.out + (row * params.tokens + token) * WIDTH + first;
    float value[count], gain[count], square = 0;
    UNROLL
    for (int i = 0; i < count; i++) {
        const int at = i * STEP_THREADS + threadIdx.x;
        value[i] = gain[i] = 0;
        if (NORM_WIDTH % STEP_THREADS && at >= NORM_WIDTH) continue;
        const float gate = silu(cvt_f32_f16(z[at]) * params.z_scale);
        value[i] = NORM_BEFORE_GATE ? __ldcg(y + at) : __ldcg(y + at) * gate;
        gain[i] = NORM_BEFORE_GATE ? params.norm[first + at] * gate : params.norm[first + at];
        square = fmaf(value[i], value[i], square);
    }
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = square;
    __syncthreads();
    float sum = 0;
    UNROLL
    for (int warp = 0; warp < STEP_THREADS / 32; warp++) sum += scratch[warp];
    __syncthreads();
    const float scale = rsqrtf(fmaf(sum, 1.0f / NORM_WIDTH, params.norm_eps));
    UNROLL
    for (int i = 0; i < count; i++) {
        const int at = i * STEP_THREADS + threadIdx.x;
        if (NORM_WIDTH % STEP_THREADS && at >= NORM_WIDTH) continue;
        out[at] = cvt_f16_f32(value[i] * scale * gain[i]);
    }
}
DEVICE void write_gated(const Mamba2Params& params, i64 row, int token, int number, float y) {
    const float z = cvt_f32_f16(params.projected.at(row, token)[number]) * params.z_scale;
    params.out[(row * params.tokens + token) * WIDTH + number] = cvt_f16_f32(y * silu(z));
}

// Grid: (head, row). Shared memory: each token's inputs, then 32 floats.
extern "C" __global__ void __launch_bounds__(STEP_THREADS, STEP_BLOCKS) mamba2_step(
    const __grid_constant__ Mamba2Params params
) {
    extern __shared__ __align__(128) char smem[];
    const int warps = STEP_THREADS / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tokens = (int)params.tokens, head = blockIdx.x, group = head / HEADS_PER_GROUP;
    const int first_row = threadIdx.x / ROW_THREADS * ROWS, part = threadIdx.x % ROW_THREADS;
    TokenInputs<HEAD_DIM>* inputs = (TokenInputs<HEAD_DIM>*)smem;
    float* scratch = (float*)(inputs + tokens);
    const i64 row = blockIdx.y, source = params.slots.source_of(row);
    StateRows state;
    state.load(params, source, head, first_row, part);
    const float d = params.d[head];
    const TokenRows rows = params.conv_rows();
    bool waited = false;
    if (warp % 2 == 0) {  // of the heads that share B and C, the first stores their conv state
        GroupMaker make;
        if (warp / 2 < tokens) make.load(params, group, lane);
        griddepcontrol_wait();
        waited = true;
        NO_UNROLL
        for (int token = warp / 2; token < tokens; token += (warps + 1) / 2) {
            const i64 target = head % HEADS_PER_GROUP ? -1 : params.slots.target_of(row, tokens, token);
            const ConvWindow window(rows, params.conv, row, source, token, 1.0f);
            make(params, window, group, target, lane, inputs[token].group);
        }
    }
    if (warp % 2 || warps == 1) {
        HeadMaker make;
        if (warp / 2 < tokens) make.load(params, head, lane);
        if (!waited) griddepcontrol_wait();
        NO_UNROLL
        for (int token = warp / 2; token < tokens; token += max(warps / 2, 1)) {
            const i64 target = params.slots.target_of(row, tokens, token);
            const ConvWindow window(rows, params.conv, row, source, token, params.x_scale);
            make(params, window, row, head, target, lane, inputs[token].x, inputs[token].gate);
            if (lane == 0) inputs[token].target = target;
        }
    }
    griddepcontrol_launch_dependents();
    __syncthreads();
    NO_UNROLL
    for (int token = 0; token < tokens; token++) {
        float out[ROWS];
        state.step(inputs[token], first_row, part, d, out);
        if (part == 0) {
            const int number = head * HEAD_DIM + first_row;
            if (NORM_GROUPS) {
                store_floats(params.values + (row * tokens + token) * WIDTH + number, out);
            } else {
                UNROLL
                for (int r = 0; r < ROWS; r++) write_gated(params, row, token, number + r, out[r]);
            }
        }
        state.store(params, inputs[token].target, head, first_row, part);
    }
    if (!NORM_GROUPS) return;
    const int norm_group = head / HEADS_PER_NORM;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* arrivals = params.arrivals + row * NORM_GROUPS + norm_group;
        scratch[0] = atom_inc_acq_rel<HEADS_PER_NORM - 1>(arrivals) == HEADS_PER_NORM - 1;
    }
    __syncthreads();
    const bool last = scratch[0] != 0;
    __syncthreads();
    if (!last) return;
    NO_UNROLL
    for (int token = 0; token < tokens; token++) write_output(params, row, token, norm_group, scratch);
}

// Grid: (INPUT_TOKENS tokens, four of the groups and then the heads, row).
extern "C" __global__ void __launch_bounds__(128) mamba2_inputs(const __grid_constant__ Mamba2Params params) {
    const int lane = threadIdx.x % 32, item = blockIdx.y * 4 + threadIdx.x / 32, tokens = (int)params.tokens;
    const int first = blockIdx.x * INPUT_TOKENS, end = min(first + INPUT_TOKENS, tokens);
    const i64 row = blockIdx.z, source = params.slots.source_of(row);
    const TokenRows rows = params.conv_rows();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (item < GROUPS) {
        GroupMaker make;
        make.load(params, item, lane);
        for (int token = first; token < end; token++) {
            const ConvWindow window(rows, params.conv, row, source, token, 1.0f);
            make(params, window, item, params.slots.target_of(row, tokens, token), lane,
                 params.groups[(row * tokens + token) * GROUPS + item]);
        }
    } else if (item < GROUPS + HEADS) {
        const int head = item - GROUPS;
        HeadMaker make;
        make.load(params, head, lane);
        for (int token = first; token < end; token++) {
            const i64 at = (row * tokens + token) * HEADS + head;
            const ConvWindow window(rows, params.conv, row, source, token, params.x_scale);
            make(params, window, row, head, params.slots.target_of(row, tokens, token), lane,
                 params.values + at * HEAD_DIM, params.gates[at]);
        }
    }
}

// Grid: (SCAN_ROWS rows of a head, row). Shared memory: two stages of STAGE_TOKENS tokens.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) mamba2_scan(const __grid_constant__ Mamba2Params params) {
    extern __shared__ __align__(128) char smem[];
    typedef TokenInputs<SCAN_ROWS> Token;
    const int slices = HEAD_DIM / SCAN_ROWS, head = blockIdx.x / slices, tokens = (int)params.tokens;
    const int slice_row = blockIdx.x % slices * SCAN_ROWS;
    const int first_row = threadIdx.x / ROW_THREADS * ROWS, part = threadIdx.x % ROW_THREADS;
    const i64 row = blockIdx.y;
    Token* stages = (Token*)smem;
    StateRows state;
    state.load(params, params.slots.source_of(row), head, slice_row + first_row, part);
    const float d = params.d[head];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const auto load_stage = [&](int first) {
        Token* stage = stages + first / STAGE_TOKENS % 2 * STAGE_TOKENS;
        const int end = min(first + STAGE_TOKENS, tokens);
        NO_UNROLL
        for (int token = first; token < end; token++) {
            Token& to = stage[token - first];
            const i64 at = row * tokens + token, in_head = at * HEADS + head;
            cp_async_record<SCAN_THREADS>(to.group, params.groups + at * GROUPS + head / HEADS_PER_GROUP);
            cp_async_record<SCAN_THREADS>(to.gate, params.gates + in_head);
            cp_async_record<SCAN_THREADS>(to.x, params.values + in_head * HEAD_DIM + slice_row);
        }
        load_targets<SCAN_THREADS>(params.slots, row, tokens, first, end, stage);
        cp_async_commit_group();
    };
    load_stage(0);
    NO_UNROLL
    for (int first = 0; first < tokens; first += STAGE_TOKENS) {
        load_stage(first + STAGE_TOKENS);
        cp_async_wait_group<1>();
        __syncthreads();
        const Token* stage = stages + first / STAGE_TOKENS % 2 * STAGE_TOKENS;
        const int end = min(first + STAGE_TOKENS, tokens);
        NO_UNROLL
        for (int token = first; token < end; token++) {
            const Token& in = stage[token - first];
            float out[ROWS];
            state.step(in, first_row, part, d, out);
            const int number = head * HEAD_DIM + slice_row + first_row;
            if (part == 0)  // over x, which is in shared memory
                store_floats(params.values + (row * tokens + token) * WIDTH + number, out);
            state.store(params, in.target, head, slice_row + first_row, part);
        }
        __syncthreads();
    }
}

// Grid: (token, norm group; without a norm STEP_THREADS numbers, row). Shared memory: 32 floats.
extern "C" __global__ void __launch_bounds__(STEP_THREADS) mamba2_outputs(const __grid_constant__ Mamba2Params params) {
    extern __shared__ __align__(128) char smem[];
    const int token = blockIdx.x, number = blockIdx.y * STEP_THREADS + threadIdx.x;
    const i64 row = blockIdx.z;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (NORM_GROUPS)
        write_output(params, row, token, blockIdx.y, (float*)smem);
    else if (number < WIDTH)
        write_gated(params, row, token, number, params.values[(row * params.tokens + token) * WIDTH + number]);
}
