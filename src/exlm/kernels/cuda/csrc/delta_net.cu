// Gated delta net and Kimi delta attention: everything between the projections. With q and k of a head convolved and
// of length one, v convolved, decay d and write strength beta, a token changes S (KEY_DIM, VALUE_DIM) and gives o:
//
//     S = d S;  delta = beta (v - S^T k);  S = S + k delta^T;  o = S^T q = (d S)^T q + (k.q) delta
//
// The second form of o makes both products with S products with the same S: a token waits for one sum over threads, not
// for two. S is in registers for the whole pass: COLUMN_THREADS threads share COLUMNS neighbouring columns, each with
// KEY_ROWS of their rows. A column's sums have one order, and no column needs another. So how columns are divided among
// thread blocks, and tokens among passes, changes no bit: one token, drafts and prompts are the same arithmetic, and a
// state may be kept after any token.
//
//   delta_net_step    up to 16 tokens: one launch. A thread block has a (row, value head): it convolves and
//                     normalises all tokens' q, k and v into shared memory, walks through them, normalises and gates.
//   delta_net_inputs  many tokens: q, k, v and gates of all of them at once, to a workspace in float32;
//   delta_net_scan    then the recurrence, a thread block for each (row, value head, SCAN_COLUMNS columns), the next
//                     STAGE_TOKENS tokens on their way to shared memory by cp.async;
//   delta_net_outputs then norm and gate.
//
// The chunked form (UT transform: within a chunk of 64 tokens, products of matrices on tensor cores) is not taken: its
// sums depend on where chunks begin, and its products are of rounded numbers, so a state would depend on the passes
// that computed it. What that costs, for 48 heads of 128 x 128 (Qwen3.5-27B) and one row, on 132 SMs of 128 lanes at
// 1.8 GHz:
//
//     per number of S and token: a product, two fmaf for the sums, one for the update: 4 instructions of a lane
//     48 x 16384 x 4 / (132 x 128) = 186 cycles, 0.10 us for each token and layer, if every lane always works
//
// Lanes do not: 6144 columns are 384 warps of 16 columns, four for each of 96 thread blocks, one for a scheduler of an
// SM and none to hide its latency. A token is 340 instructions of a warp (sm_90a: 256 as above, 16 LDS.128, 8 shuffles,
// the rest of the loop), 12 of the copies, and the waiting for shared memory and shuffles. Measured on an H200: 0.48 us
// for each token and layer, 3.9 ms for 8192 tokens, 0.19 of 0.81 s for the whole model. A chunked form has a tenth of
// these instructions: it would save up to a fifth of such a prefill.
//
// Decoding is bound by memory: S is read and written once, 2 x 64 KiB for a head, 6.3 MB for 48 heads and a row: 1.5 us
// at 4.2 TB/s, below what a launch and its latencies take; 8 rows 12 us, 32 rows 48 us for each layer.
//
// Set when compiling (-D), besides CONV_KERNEL: KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CHANNEL_DECAY (a decay for
// each row of S, not one for all), SIGMOID_GATE (else SiLU), COLUMN_THREADS, COLUMNS, SCAN_WARPS, STAGE_TOKENS.

#include "recurrent.h"

#define KEY_ROWS (KEY_DIM / COLUMN_THREADS)
#define WARP_COLUMNS (32 / COLUMN_THREADS * COLUMNS)
#define STEP_THREADS (VALUE_DIM / WARP_COLUMNS * 32)
#define STEP_BLOCKS (STEP_THREADS <= 256 ? 2 : 1)  // resident on an SM: one stores S while another loads
#define SCAN_THREADS (SCAN_WARPS * 32)
#define SCAN_COLUMNS (SCAN_WARPS * WARP_COLUMNS)
#define KEY_WIDTH (KEY_HEADS * KEY_DIM)
#define HEADS_PER_KEY (VALUE_HEADS / KEY_HEADS)
#define VALUE_COUNT HeadConv<VALUE_DIM>::count  // of a lane
#define NUM_DECAYS (CHANNEL_DECAY ? KEY_DIM : 1)
#define INPUT_TOKENS 8  // of a warp of delta_net_inputs
#define L2_NORM_EPS 1e-6f

static_assert(KEY_DIM % (4 * COLUMN_THREADS) == 0 && VALUE_DIM % WARP_COLUMNS == 0 && VALUE_DIM % SCAN_COLUMNS == 0);

// Of a token: what its value heads read of their key head, and the gates of a value head.
struct KeyRecord {
    float k[KEY_DIM], q[KEY_DIM];  // of length one; q times KEY_DIM^-1/2
    float kq, unused[3];           // k.q
};
struct GateRecord {
    float decay[NUM_DECAYS], beta, unused[CHANNEL_DECAY ? 3 : 2];
};
template <int WIDTH> struct alignas(16) TokenInputs {
    KeyRecord key;
    GateRecord gate;
    float v[WIDTH];
    i64 target, unused;
};

CHECK_SIZEOF(KeyRecord);
CHECK_SIZEOF(GateRecord);

struct DeltaNetParams {
    TokenRows qkv, z, a, b;
    u16* out;  // (row, token, value head, VALUE_DIM)
    CausalConv conv;
    const float *decay_rate, *dt_bias, *norm;  // (value head) -exp(A); (value head, NUM_DECAYS); (VALUE_DIM)
    float* states;                             // (slot, value head, KEY_DIM, VALUE_DIM); null: none are kept
    StateSlots slots;
    KeyRecord* keys;    // (row, token, key head), of many tokens
    GateRecord* gates;  // (row, token, value head)
    float* values;      // (row, token, value head, VALUE_DIM): v, and after the scan o
    i64 tokens;
    float norm_eps, beta_scale;
};
CHECK_SIZEOF(DeltaNetParams);

// q and k of a key head, by a warp.
struct KeyMaker {
    HeadConv<KEY_DIM> q_conv, k_conv;

    DEVICE void load(const DeltaNetParams& params, int head, int lane) {
        q_conv.load(params.conv, head * KEY_DIM, lane);
        k_conv.load(params.conv, KEY_WIDTH + head * KEY_DIM, lane);
    }
    DEVICE void operator()(
        const DeltaNetParams& params, const ConvWindow& window, int head, i64 target, int lane, KeyRecord& to
    ) const {
        const int count = HeadConv<KEY_DIM>::count, first = head * KEY_DIM;
        typename HeadConv<KEY_DIM>::Taps q_taps, k_taps;
        q_conv.read(window, first, lane, q_taps);
        k_conv.read(window, KEY_WIDTH + first, lane, k_taps);
        float q[count], k[count], q_square = 0, k_square = 0, kq = 0;
        q_conv.silu_of(q_taps, lane, q);
        k_conv.silu_of(k_taps, lane, k);
        UNROLL
        for (int i = 0; i < count; i++) {
            q_square = fmaf(q[i], q[i], q_square);
            k_square = fmaf(k[i], k[i], k_square);
        }
        const float q_scale = rsqrtf(warp_sum(q_square) + L2_NORM_EPS) * (1.0f / sqrtf(KEY_DIM));
        const float k_scale = rsqrtf(warp_sum(k_square) + L2_NORM_EPS);
        UNROLL
        for (int i = 0; i < count; i++) {
            q[i] *= q_scale;
            k[i] *= k_scale;
            kq = fmaf(k[i], q[i], kq);
            if (!HeadConv<KEY_DIM>::exists(i, lane)) continue;
            to.q[i * 32 + lane] = q[i];
            to.k[i * 32 + lane] = k[i];
        }
        kq = warp_sum(kq);
        if (lane == 0) to.kq = kq;
        q_conv.store(params.conv, q_taps, target, first, lane);
        k_conv.store(params.conv, k_taps, target, KEY_WIDTH + first, lane);
    }
};

// v and the gates of a value head, by a warp.
struct ValueMaker {
    HeadConv<VALUE_DIM> conv;

    DEVICE void load(const DeltaNetParams& params, int head, int lane) {
        conv.load(params.conv, 2 * KEY_WIDTH + head * VALUE_DIM, lane);
    }
    DEVICE void operator()(
        const DeltaNetParams& params, const ConvWindow& window, i64 row, int head, i64 target, int lane, float* v,
        GateRecord& gate
    ) const {
        const int count = HeadConv<VALUE_DIM>::count, first = 2 * KEY_WIDTH + head * VALUE_DIM;
        typename HeadConv<VALUE_DIM>::Taps taps;
        conv.read(window, first, lane, taps);
        float out[count];
        conv.silu_of(taps, lane, out);
        UNROLL
        for (int i = 0; i < count; i++)
            if (HeadConv<VALUE_DIM>::exists(i, lane)) v[i * 32 + lane] = out[i];
        const u16* a = params.a.at(row, window.token) + head * NUM_DECAYS;
        NO_UNROLL
        for (int i = lane; i < NUM_DECAYS; i += 32) {
            const float rate = softplus(cvt_f32_f16(a[i]) + params.dt_bias[head * NUM_DECAYS + i]);
            gate.decay[i] = expf(params.decay_rate[head] * rate);
        }
        if (lane == 0)
            gate.beta = sigmoid(cvt_f32_f16(params.b.at(row, window.token)[head])) * params.beta_scale;
        conv.store(params.conv, taps, target, first, lane);
    }
};

// A thread's part of S: rows (4 j + e) of every COLUMN_THREADS runs of four.
struct StateColumns {
    float s[COLUMNS][KEY_ROWS];

    DEVICE static int row_of(int i, int part) { return (i / 4 * COLUMN_THREADS + part) * 4 + i % 4; }
    DEVICE void load(const DeltaNetParams& params, i64 source, int head, int column, int part) {
        const float* from = params.states + (source * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + column;
        const bool stored = params.states && source >= 0;
        UNROLL
        for (int i = 0; i < KEY_ROWS; i++) {
            float row[COLUMNS] = {};
            if (stored) load_floats(from + row_of(i, part) * VALUE_DIM, row);
            UNROLL
            for (int c = 0; c < COLUMNS; c++) s[c][i] = row[c];
        }
    }
    DEVICE void store(const DeltaNetParams& params, i64 target, int head, int column, int part) const {
        if (target < 0 || !params.states) return;
        float* to = params.states + (target * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + column;
        UNROLL
        for (int i = 0; i < KEY_ROWS; i++) {
            float row[COLUMNS];
            UNROLL
            for (int c = 0; c < COLUMNS; c++) row[c] = s[c][i];
            store_floats(to + row_of(i, part) * VALUE_DIM, row);
        }
    }
    // One token; `column` is the first one's place in `in.v`. All lanes of a column get its output.
    template <int WIDTH>
    DEVICE void step(const TokenInputs<WIDTH>& in, int column, int part, float (&out)[COLUMNS]) {
        float k[KEY_ROWS], v[COLUMNS];
        float sk[COLUMNS][2] = {}, sq[COLUMNS][2] = {};  // two chains each, so that an fmaf waits for the last but one
        load_floats(in.v + column, v);
        UNROLL
        for (int j = 0; j < KEY_ROWS; j += 4) {
            float four_k[4], q[4], decay[4];
            load_floats(in.key.k + row_of(j, part), four_k);
            load_floats(in.key.q + row_of(j, part), q);
            if (CHANNEL_DECAY) load_floats(in.gate.decay + (CHANNEL_DECAY ? row_of(j, part) : 0), decay);
            UNROLL
            for (int e = 0; e < 4; e++) {
                k[j + e] = four_k[e];
                UNROLL
                for (int c = 0; c < COLUMNS; c++) {
                    s[c][j + e] *= CHANNEL_DECAY ? decay[e] : in.gate.decay[0];
                    sk[c][j / 4 % 2] = fmaf(s[c][j + e], four_k[e], sk[c][j / 4 % 2]);
                    sq[c][j / 4 % 2] = fmaf(s[c][j + e], q[e], sq[c][j / 4 % 2]);
                }
            }
        }
        UNROLL
        for (int c = 0; c < COLUMNS; c++) {
            float with_k = sk[c][0] + sk[c][1], with_q = sq[c][0] + sq[c][1];
            UNROLL
            for (int mask = 1; mask < COLUMN_THREADS; mask *= 2) {
                with_k += shfl_xor(with_k, mask);
                with_q += shfl_xor(with_q, mask);
            }
            const float delta = (v[c] - with_k) * in.gate.beta;
            UNROLL
            for (int i = 0; i < KEY_ROWS; i++) s[c][i] = fmaf(k[i], delta, s[c][i]);
            out[c] = fmaf(in.key.kq, delta, with_q);
        }
    }
};

// The scale of the norm times the gate.
DEVICE float output_gain(const DeltaNetParams& params, i64 row, int token, int head, int at) {
    const float z = cvt_f32_f16(params.z.at(row, token)[head * VALUE_DIM + at]);
    return params.norm[at] * (SIGMOID_GATE ? sigmoid(z) : silu(z));
}

// Norm and gate of a head's output, by a warp.
DEVICE void write_output(const float* o, const float (&gain)[VALUE_COUNT], u16* out, float eps, int lane) {
    float x[VALUE_COUNT], square = 0;
    UNROLL
    for (int i = 0; i < VALUE_COUNT; i++) {
        x[i] = HeadConv<VALUE_DIM>::exists(i, lane) ? o[i * 32 + lane] : 0.0f;
        square = fmaf(x[i], x[i], square);
    }
    const float scale = rsqrtf(fmaf(warp_sum(square), 1.0f / VALUE_DIM, eps));
    UNROLL
    for (int i = 0; i < VALUE_COUNT; i++)
        if (HeadConv<VALUE_DIM>::exists(i, lane))
            out[i * 32 + lane] = cvt_f16_f32(x[i] * scale * gain[i]);
}

// Grid: (value head, row). Shared memory: of each token the inputs, then VALUE_DIM gains, then VALUE_DIM outputs.
extern "C" __global__ void __launch_bounds__(STEP_THREADS, STEP_BLOCKS) delta_net_step(
    const __grid_constant__ DeltaNetParams params
) {
    extern __shared__ __align__(128) char smem[];
    const int warps = STEP_THREADS / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tokens = (int)params.tokens, head = blockIdx.x, key_head = head / HEADS_PER_KEY;
    const int column = threadIdx.x / COLUMN_THREADS * COLUMNS, part = threadIdx.x % COLUMN_THREADS;
    TokenInputs<VALUE_DIM>* inputs = (TokenInputs<VALUE_DIM>*)smem;
    float *gains = (float*)(inputs + tokens), *outputs = gains + tokens * VALUE_DIM;
    const i64 row = blockIdx.y, source = params.slots.source_of(row);
    StateColumns state;
    state.load(params, source, head, column, part);
    bool waited = false;
    if (warp % 2 == 0) {  // of the heads that share q and k, the first stores their conv state
        KeyMaker make;
        if (warp / 2 < tokens) make.load(params, key_head, lane);
        griddepcontrol_wait();
        waited = true;
        NO_UNROLL
        for (int token = warp / 2; token < tokens; token += (warps + 1) / 2) {
            const i64 target = head % HEADS_PER_KEY ? -1 : params.slots.target_of(row, tokens, token);
            const ConvWindow window(params.qkv, params.conv, row, source, token, 1.0f);
            make(params, window, key_head, target, lane, inputs[token].key);
        }
    }
    if (warp % 2 || warps == 1) {
        ValueMaker make;
        if (warp / 2 < tokens) make.load(params, head, lane);
        if (!waited) griddepcontrol_wait();
        NO_UNROLL
        for (int token = warp / 2; token < tokens; token += max(warps / 2, 1)) {
            const i64 target = params.slots.target_of(row, tokens, token);
            const ConvWindow window(params.qkv, params.conv, row, source, token, 1.0f);
            make(params, window, row, head, target, lane, inputs[token].v, inputs[token].gate);
            if (lane == 0) inputs[token].target = target;
        }
    }
    griddepcontrol_launch_dependents();
    NO_UNROLL
    for (int i = threadIdx.x; i < tokens * VALUE_DIM; i += STEP_THREADS)
        gains[i] = output_gain(params, row, i / VALUE_DIM, head, i % VALUE_DIM);
    __syncthreads();
    NO_UNROLL
    for (int token = 0; token < tokens; token++) {
        float out[COLUMNS];
        state.step(inputs[token], column, part, out);
        if (part == 0) store_floats(outputs + token * VALUE_DIM + column, out);
        state.store(params, inputs[token].target, head, column, part);
    }
    __syncthreads();
    NO_UNROLL
    for (int token = warp; token < tokens; token += warps) {
        float gain[VALUE_COUNT];
        UNROLL
        for (int i = 0; i < VALUE_COUNT; i++)
            gain[i] = HeadConv<VALUE_DIM>::exists(i, lane) ? gains[token * VALUE_DIM + i * 32 + lane] : 0.0f;
        u16* out = params.out + ((row * tokens + token) * VALUE_HEADS + head) * VALUE_DIM;
        write_output(outputs + token * VALUE_DIM, gain, out, params.norm_eps, lane);
    }
}

// Grid: (INPUT_TOKENS tokens, four of the key heads and then the value heads, row).
extern "C" __global__ void __launch_bounds__(128) delta_net_inputs(const __grid_constant__ DeltaNetParams params) {
    const int lane = threadIdx.x % 32, item = blockIdx.y * 4 + threadIdx.x / 32, tokens = (int)params.tokens;
    const int first = blockIdx.x * INPUT_TOKENS, end = min(first + INPUT_TOKENS, tokens);
    const i64 row = blockIdx.z;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const i64 source = params.slots.source_of(row);
    if (item < KEY_HEADS) {
        KeyMaker make;
        make.load(params, item, lane);
        for (int token = first; token < end; token++) {
            const ConvWindow window(params.qkv, params.conv, row, source, token, 1.0f);
            make(params, window, item, params.slots.target_of(row, tokens, token), lane,
                 params.keys[(row * tokens + token) * KEY_HEADS + item]);
        }
    } else if (item < KEY_HEADS + VALUE_HEADS) {
        const int head = item - KEY_HEADS;
        ValueMaker make;
        make.load(params, head, lane);
        for (int token = first; token < end; token++) {
            const i64 at = (row * tokens + token) * VALUE_HEADS + head;
            const ConvWindow window(params.qkv, params.conv, row, source, token, 1.0f);
            make(params, window, row, head, params.slots.target_of(row, tokens, token), lane,
                 params.values + at * VALUE_DIM, params.gates[at]);
        }
    }
}

// Grid: (SCAN_COLUMNS columns of a value head, row). Shared memory: two stages of STAGE_TOKENS tokens.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) delta_net_scan(
    const __grid_constant__ DeltaNetParams params
) {
    extern __shared__ __align__(128) char smem[];
    typedef TokenInputs<SCAN_COLUMNS> Token;
    const int slices = VALUE_DIM / SCAN_COLUMNS, head = blockIdx.x / slices, tokens = (int)params.tokens;
    const int first_column = blockIdx.x % slices * SCAN_COLUMNS;
    const int column = threadIdx.x / COLUMN_THREADS * COLUMNS, part = threadIdx.x % COLUMN_THREADS;
    const i64 row = blockIdx.y;
    Token* stages = (Token*)smem;
    StateColumns state;
    state.load(params, params.slots.source_of(row), head, first_column + column, part);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const auto load_stage = [&](int first) {
        Token* stage = stages + first / STAGE_TOKENS % 2 * STAGE_TOKENS;
        const int end = min(first + STAGE_TOKENS, tokens);
        NO_UNROLL
        for (int token = first; token < end; token++) {
            Token& to = stage[token - first];
            const i64 at = row * tokens + token, in_head = at * VALUE_HEADS + head;
            cp_async_record<SCAN_THREADS>(to.key, params.keys + at * KEY_HEADS + head / HEADS_PER_KEY);
            cp_async_record<SCAN_THREADS>(to.gate, params.gates + in_head);
            cp_async_record<SCAN_THREADS>(to.v, params.values + in_head * VALUE_DIM + first_column);
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
            float out[COLUMNS];
            state.step(in, column, part, out);
            if (part == 0)  // over v, which is in shared memory
                store_floats(params.values + ((row * tokens + token) * VALUE_HEADS + head) * VALUE_DIM + first_column
                                 + column, out);
            state.store(params, in.target, head, first_column + column, part);
        }
        __syncthreads();
    }
}

// Grid: (token, four value heads, row).
extern "C" __global__ void __launch_bounds__(128) delta_net_outputs(const __grid_constant__ DeltaNetParams params) {
    const int head = blockIdx.y * 4 + threadIdx.x / 32;
    const i64 row = blockIdx.z;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (head >= VALUE_HEADS) return;
    const int lane = threadIdx.x % 32;
    const i64 at = ((row * params.tokens + blockIdx.x) * VALUE_HEADS + head) * VALUE_DIM;
    float gain[VALUE_COUNT];
    UNROLL
    for (int i = 0; i < VALUE_COUNT; i++) {
        const bool real = HeadConv<VALUE_DIM>::exists(i, lane);
        gain[i] = real ? output_gain(params, row, blockIdx.x, head, i * 32 + lane) : 0.0f;
    }
    write_output(params.values + at, gain, params.out + at, params.norm_eps, lane);
}
