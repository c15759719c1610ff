// Paged attention of one new token over hadamard8 / hadamard4 pages where each query head has a kv head of its own
// (MHA), by int8 MMA over Hadamard-transformed keys and values: the tensor cores multiply codes as they lie in memory,
// int8 or uint8 by uint8 (mma.m16n8k32).
//
// As in attn_decode.cu a row's past is split by its length alone (KvSplits), and the splits are combined in order.
// Here a warp has a head, and a thread block has WARPS neighbouring heads, so that it fetches whole cache lines:
// cp.async copies the keys of 64 tokens into shared memory while the values before them are used, and the other way
// round.
//
// Integer arithmetic. A cached number is (code - bias) * scale, the scale shared by 32 numbers. Its partner (a number
// of the Hadamard-transformed query, or a token's weight times its value scale) becomes two bytes,
// x = unit * (256 * high + low), with one unit for 32 query numbers, or for 64 tokens. Both bytes are columns of one
// mma, and
//     sum x * (code - bias) = unit * (256 * D_high + D_low),  accumulators starting at -bias * sum of the bytes.
// Each group of 32 numbers has two columns of its own. For values, a lane uses the columns of its own numbers' group.
//
// Codes of 4 bits: a byte has two of them, 16 * upper + lower. Multiplying whole bytes, and in a second operand the
// lower codes alone (shifted or masked), gives both: the contribution of the lower code to the whole byte is
// subtracted.
//
// The order of numbers and of tokens does not matter to a sum: lane 4 g + c reads keys of tokens 8u + g, a quarter of
// each head, which leaves it the scores of tokens 8c + g and 32 further on; and values of tokens c, 4 + c, ..., an
// eighth of each.
//
// Set when compiling: what kv_page.h wants; KV_HEADS is a multiple of WARPS. Loops marked NO_UNROLL were no faster
// unrolled.

#include "kv_page.h"

#define HADAMARD_RUNS (HEAD_DIM / 64)   // that a warp transforms at once, two numbers a lane
#define SCALE_GROUPS (HEAD_DIM / 32)    // of numbers with one scale
#define LANE_OUTPUTS (HEAD_DIM / 8)     // numbers of the output that a lane has
#define CODE_BITS(dtype) ((dtype) == 2 ? 4 : 8)
#define CODE_BIAS(dtype) ((dtype) == 2 ? 8 : 128)  // the code of zero
#define KEY_WORDS (HEAD_DIM * CODE_BITS(K_DTYPE) / 32)
#define VALUE_WORDS (HEAD_DIM * CODE_BITS(V_DTYPE) / 32)
#define Q_RANGE 30000.0f  // to what the largest of 32 query numbers is scaled before it is split into two signed bytes
#define P_RANGE 65000.0f  // the same for weights of tokens: two unsigned bytes

// The largest of a warp: positive floats are ordered like their bits, negative ones the other way round.
DEVICE float warp_max(float x) {
    const int bits = float_as_int(x), top = redux_max(bits ^ (bits >> 31 & 0x7fffffff));
    return int_as_float(top ^ (top >> 31 & 0x7fffffff));
}
DEVICE float warp_max_nonnegative(float x) { return int_as_float(redux_max(float_as_int(x))); }

DEVICE float warp_sum(float x) {
    UNROLL
    for (int mask = 16; mask; mask /= 2) x += shfl_xor(x, mask);
    return x;
}

// The Hadamard transform of 64 numbers, two of each lane, into the space of codes or out of it.
DEVICE void hadamard(float (&x)[2], int lane) {
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            const float theirs = shfl_xor(x[i], mask), sign = lane & mask ? -1.0f : 1.0f;
            x[i] = fmaf(x[i], sign, theirs);
        }
    }
    UNROLL
    for (int i = 0; i < 2; i++) x[i] *= 0.03125f;
}

#define BANK_PAD 8  // words between tokens in shared memory, so that lanes read different banks

// 64 cached tokens of the thread block's heads: one stage of the cp.async pipeline.
struct alignas(16) KvStage {
    u32 keys[64][WARPS * KEY_WORDS + BANK_PAD], values[64][WARPS * VALUE_WORDS + BANK_PAD];
    u16 key_scales[64][WARPS][SCALE_GROUPS], value_scales[64][WARPS][SCALE_GROUPS];
};

struct alignas(16) WarpSmem {
    uint4 q_fragments[HEAD_DIM / 2];  // the query's bytes as B registers
    u32 weights[SCALE_GROUPS][32];    // of two tokens, 32 apart: their low bytes, then the high ones
    u32 q_bytes[2][HEAD_DIM / 4];     // of the query: low bytes (signed), then high bytes
    float q_unit[SCALE_GROUPS];       // what 1 of them means
    int q_bias[SCALE_GROUPS];         // the sum of the query's integers times the bias of the codes
    float split_weights[MAX_SPLITS + 1];
};

// A warp's row and head, and where its partial results lie.
struct WarpContext {
    const AttnParams& params;
    KvSplits splits;
    int h, number;     // its head, and that among the heads of all rows
    float *m, *l, *o;  // of every split: partial results

    DEVICE WarpContext(const AttnParams& given, int warp) : params(given) {
        splits.load(params, blockIdx.x / (KV_HEADS / WARPS));
        h = blockIdx.x % (KV_HEADS / WARPS) * WARPS + warp;
        number = (int)splits.row * KV_HEADS + h;
        o = params.partials + (i64)number * (params.max_splits * (HEAD_DIM + 4));
        m = o + params.max_splits * HEAD_DIM;
        l = m + params.max_splits;
    }
    DEVICE float softcap(float score) const {
        return SOFTCAP ? tanhf(score * params.score_scale) * params.cap : score * params.score_scale;
    }
    DEVICE bool sees(int key) const {
        bool visible = !params.window || splits.past - key < params.window;
        if (HAS_MASK) visible = visible && params.mask[splits.row * params.mask_stride + key];
        return visible;
    }
    DEVICE i64 head_index(int token) const {  // among all stored heads
        const i64 page = params.page_table[splits.row * params.page_table_stride + token / PAGE_SIZE];
        return (page * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS + h;
    }
};

// BYTES of the block's neighbouring heads, from head number `head` on, of 64 tokens, to where those lie STRIDE bytes
// apart. `left` of the tokens exist; for others the last one is read.
template <int BYTES, int STRIDE> DEVICE void copy_heads(void* to, const void* from, i64 head, int left) {
    const int piece = BYTES < 16 ? BYTES : 16, pieces = BYTES / piece, all = 64 * pieces;
    const int token_bytes = BYTES / WARPS * KV_HEADS, part = threadIdx.x % pieces, token = threadIdx.x / pieces;
    const int pace = THREADS / pieces;
    const u32 smem = cvta_to_shared(to) + token * STRIDE + part * piece;
    const char* at = (const char*)from + head * (BYTES / WARPS) + part * piece;
    UNROLL
    for (int n = 0; n < (all + THREADS - 1) / THREADS; n++) {
        if (all % THREADS && n * THREADS + threadIdx.x >= all) continue;
        const int which = n * pace + token;
        cp_async<piece>(smem + n * pace * STRIDE, at + (i64)(left >= 64 ? which : min(which, left - 1)) * token_bytes);
    }
}
DEVICE void copy_keys(KvStage& stage, const AttnParams& params, i64 head, int left) {
    copy_heads<WARPS * KEY_WORDS * 4, sizeof(stage.keys[0])>(stage.keys, params.key, head, left);
    copy_heads<WARPS * SCALE_GROUPS * 2, sizeof(stage.key_scales[0])>(stage.key_scales, params.key_scale, head, left);
}
DEVICE void copy_values(KvStage& stage, const AttnParams& params, i64 head, int left) {
    copy_heads<WARPS * VALUE_WORDS * 4, sizeof(stage.values[0])>(stage.values, params.value, head, left);
    copy_heads<WARPS * SCALE_GROUPS * 2, sizeof(stage.value_scales[0])>(
        stage.value_scales, params.value_scale, head, left
    );
}
template <int WORDS> DEVICE void copy_words(u32* to, const u32* from) {
    if (WORDS == 1) to[0] = from[0];
    if (WORDS == 2) *(uint2*)to = *(const uint2*)from;
    if (WORDS == 4) *(uint4*)to = *(const uint4*)from;
}

// The query as B: columns 2 * group and 2 * group + 1 have the low and high bytes of a group, zero where keys are of
// others.
struct QFragments {
    static const int steps = HEAD_DIM / 32;
    uint4* words;  // the lane's, of two k32 steps each
    float unit;    // of its group of scores
    int start;     // of its sums

    DEVICE void load(WarpSmem& smem, int lane) {
        u32 word[steps][2];
        words = smem.q_fragments + lane;
        const int column = lane / 4, part = lane % 4, run = KEY_WORDS < 16 ? KEY_WORDS / 4 : 4;  // words side by side
        const u32* q_bytes = smem.q_bytes[column % 2];
        unit = smem.q_unit[part % SCALE_GROUPS];
        start = part < SCALE_GROUPS ? -smem.q_bias[part % SCALE_GROUPS] : 0;
        UNROLL
        for (int s = 0; s < steps; s++) {
            const int at = K_DTYPE == 2 ? s : 2 * s;  // the lane's words of a key
            const int number = ((at / run * 4 + part) * run + at % run) * (32 / CODE_BITS(K_DTYPE));
            const bool mine = number / 32 == column / 2;
            const u32 low = mine ? q_bytes[number / 4] : 0, high = mine ? q_bytes[number / 4 + 1] : 0;
            word[s][0] = K_DTYPE == 2 ? prmt(low, high, 0x7531) : low;
            word[s][1] = K_DTYPE == 2 ? prmt(low, high, 0x6420) : high;
        }
        UNROLL
        for (int s = 0; s < steps; s += 2)
            words[s * 16] = uint4{word[s][0], word[s][1], word[s + 1][0], word[s + 1][1]};
    }
};

// q.k of tokens 8c + g and 32 further on.
DEVICE void compute_scores(const KvStage& stage, const QFragments& q, int warp, int lane, float (&out)[2]) {
    const int g = lane / 4, c = lane % 4, words = KEY_WORDS / 4, run = words < 4 ? words : 4;
    uint4 both[QFragments::steps / 2];
    UNROLL
    for (int s = 0; s < QFragments::steps; s += 2) both[s / 2] = q.words[s * 16];
    NO_UNROLL
    for (int u = 0; u < 8; u += 2) {  // tokens 8u + g and 8 further on
        u32 a[words], b[words];
        UNROLL
        for (int i = 0; i < words; i += run) {
            const int at = warp * KEY_WORDS + 4 * i + c * run;
            copy_words<run>(a + i, stage.keys[8 * u + g] + at);
            copy_words<run>(b + i, stage.keys[8 * u + 8 + g] + at);
        }
        int sum[4] = {q.start, 0, q.start, 0};
        UNROLL
        for (int s = 0; s < QFragments::steps; s++) {
            const u32 one = s % 2 ? both[s / 2].z : both[s / 2].x, two = s % 2 ? both[s / 2].w : both[s / 2].y;
            const u32 lower = 0xf0f0f0f0;
            if (K_DTYPE == 2) mma_m16n8k32_u8s8(sum, a[s], b[s], a[s] << 4 & lower, b[s] << 4 & lower, one, two);
            else mma_m16n8k32_u8s8(sum, a[2 * s], b[2 * s], a[2 * s + 1], b[2 * s + 1], one, two);
        }
        float part[2];  // of group c
        UNROLL
        for (int i = 0; i < 2; i++)
            part[i] = (float)(sum[2 * i] + 256 * sum[2 * i + 1])
                * (cvt_f32_f16(stage.key_scales[8 * u + 8 * i + g][warp][c % SCALE_GROUPS]) * q.unit);
        float all = (c % 2 ? part[1] : part[0]) + shfl_xor(c % 2 ? part[0] : part[1], 1);
        all += shfl_xor(all, 2);
        if (u / 2 % 2 == c / 2) {
            out[0] = u < 4 ? all : out[0];
            out[1] = all;
        }
    }
}

// A warp's online softmax of a split. The output is accumulated where the split's partial result will lie. l is of the
// lane's own tokens until the end.
struct OnlineSoftmax {
    float m, l;
    float* o;  // the lane's numbers; null: the lane's sums belong to other groups' weights

    DEVICE void begin(const WarpContext& b, int split, int lane) {
        const int g = lane / 4;
        m = NO_MAX;
        l = 0;
        o = g * LANE_OUTPUTS / 32 == lane % 4 ? b.o + split * HEAD_DIM + g * LANE_OUTPUTS : nullptr;
    }
    // Adds 64 tokens whose scores are known.
    DEVICE void update(const KvStage& stage, const float (&score)[2], u32 (&weights)[SCALE_GROUPS][32], bool first) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
        const float top = fmaxf(m, warp_max(fmaxf(score[0], score[1]))), rescale = ex2_approx(m - top);
        const float weight[2] = {ex2_approx(score[0] - top), ex2_approx(score[1] - top)};
        m = top;
        l = l * rescale + weight[0] + weight[1];
        float unit = 0;   // what 1 of the lane's integer sums means
        int all = 0;      // the sum of its group's integers
        __syncwarp();     // all have read the weights before
        NO_UNROLL
        for (int group = 0; group < SCALE_GROUPS; group++) {
            float scaled[2];
            UNROLL
            for (int i = 0; i < 2; i++)
                scaled[i] = weight[i] * cvt_f32_f16(stage.value_scales[i * 32 + 8 * c + g][warp][group]);
            const float most = fmaxf(warp_max_nonnegative(fmaxf(scaled[0], scaled[1])), 1.0e-30f);
            const float factor = P_RANGE * rcp_approx(most), shift = 8388608.0f;  // 2^23: integers are its lowest bits
            const u32 one = float_as_int(fmaf(scaled[0], factor, shift));
            const u32 two = float_as_int(fmaf(scaled[1], factor, shift));
            weights[group][g % 4 * 8 + 2 * c + g / 4] = prmt(one, two, 0x5140);  // in the order of the values' tokens
            const int integers = redux_add((int)(one + two)) - (int)0xc0000000;  // less 64 times the bits of `shift`
            if (group == c) {
                unit = most * (1 / P_RANGE);
                all = integers;
            }
        }
        __syncwarp();
        const int words = VALUE_WORDS / 8, count = 32 / CODE_BITS(V_DTYPE);
        const int upper = V_DTYPE == 2 ? 17 * CODE_BIAS(V_DTYPE) : CODE_BIAS(V_DTYPE);
        int sum[LANE_OUTPUTS / 2][4];
        UNROLL
        for (int i = 0; i < LANE_OUTPUTS / 2; i++) {
            sum[i][0] = -CODE_BIAS(V_DTYPE) * all;
            sum[i][2] = -upper * all;
            sum[i][1] = sum[i][3] = 0;
        }
        NO_UNROLL
        for (int x = 0; x < 4; x += 2) {
            u32 b[2], token[8][words];  // of tokens 8x + c, 32 further on, those four behind both, and so on
            UNROLL
            for (int i = 0; i < 2; i++) {
                const uint2 both = *(const uint2*)&weights[g / 2 % SCALE_GROUPS][8 * c + 2 * x + 2 * i];
                b[i] = prmt(both.x, both.y, g % 2 ? 0x7632 : 0x5410);
            }
            UNROLL
            for (int i = 0; i < 8; i++)
                copy_words<words>(
                    token[i], stage.values[i % 2 * 32 + 8 * x + i / 2 * 4 + c] + warp * VALUE_WORDS + g * words
                );
            UNROLL
            for (int w = 0; w < words; w++) {
                u32 near[count], far[count];
                transpose_codes(token[0][w], token[1][w], token[2][w], token[3][w], near);
                transpose_codes(token[4][w], token[5][w], token[6][w], token[7][w], far);
                UNROLL
                for (int i = 0; i < count; i += 2)
                    mma_m16n8k32_u8u8(sum[(w * count + i) / 2], near[i], near[i + 1], far[i], far[i + 1], b[0], b[1]);
            }
        }
        if (o) accumulate(sum, unit, first ? 0.0f : rescale);
    }
    // o = o * rescale + the integer sums in floats.
    DEVICE void accumulate(const int (&sum)[LANE_OUTPUTS / 2][4], float unit, float rescale) {
        const float upper_unit = V_DTYPE == 2 ? unit * 0.0625f : unit;
        UNROLL
        for (int i = 0; i < LANE_OUTPUTS; i += 4) {
            float4* to = (float4*)(o + i);
            const float4 old = rescale == 0 ? float4{} : *to;
            float more[4];
            UNROLL
            for (int k = 0; k < 2; k++) {
                const int* d = sum[i / 2 + k];
                const int one = d[0] + 256 * d[1], two = d[2] + 256 * d[3];
                more[2 * k] = (float)one * unit;
                more[2 * k + 1] = (float)(V_DTYPE == 2 ? two - one : two) * upper_unit;
            }
            *to = float4{old.x * rescale + more[0], old.y * rescale + more[1], old.z * rescale + more[2],
                         old.w * rescale + more[3]};
        }
    }
    // The codes in a word of each of four tokens, those of one number side by side; of 4 bits: lower codes, then
    // whole bytes.
    static DEVICE void transpose_codes(u32 a, u32 b, u32 c, u32 d, u32 (&out)[32 / CODE_BITS(V_DTYPE)]) {
        const u32 ab[2] = {prmt(a, b, 0x5140), prmt(a, b, 0x7362)}, cd[2] = {prmt(c, d, 0x5140), prmt(c, d, 0x7362)};
        UNROLL
        for (int i = 0; i < 4; i++) {
            const u32 all = prmt(ab[i / 2], cd[i / 2], i % 2 ? 0x7632 : 0x5410);
            if (V_DTYPE == 2) {
                out[2 * i] = all & 0x0f0f0f0f;
                out[2 * i + 1] = all;
            } else {
                out[i] = all;
            }
        }
    }
    DEVICE void store(const WarpContext& b, int split, int lane) {
        const float all = warp_sum(l);
        if (lane == 0) {
            b.m[split] = m;
            b.l[split] = all;
        }
    }
};

// 64 numbers of the query, RoPE applied: Hadamard-transformed, and split into two signed bytes. Of 4-bit codes the even
// numbers meet lower codes, which are shifted up (16 times as large), and odd ones whole bytes.
DEVICE void quantize_query(WarpSmem& smem, float (&x)[2], int run, int lane) {
    hadamard(x, lane);
    float most = fmaxf(fabsf(x[0]), fabsf(x[1]));
    UNROLL
    for (int mask = 1; mask < 16; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
    const float factor = most == 0 ? 0.0f : Q_RANGE / most;
    const float parts[2] = {x[0] - (K_DTYPE == 2 ? x[1] * 0.0625f : 0.0f), x[1]};
    u32 low = 0, high = 0;
    int bias = 0;
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int whole = (int)rintf(parts[i] * factor), lower = (signed char)whole;
        low |= (u32)(lower & 255) << 8 * i;
        high |= (u32)((whole - lower) >> 8 & 255) << 8 * i;
        bias += whole * (K_DTYPE == 2 && i ? 136 : 128);
    }
    UNROLL
    for (int mask = 1; mask < 16; mask *= 2) bias += float_as_int(shfl_xor(int_as_float(bias), mask));
    ((u16*)smem.q_bytes[0])[run * 32 + lane] = (u16)low;
    ((u16*)smem.q_bytes[1])[run * 32 + lane] = (u16)high;
    if (lane % 16) return;
    smem.q_unit[run * 2 + lane / 16] = most * ((K_DTYPE == 2 ? 0.0625f : 1.0f) / Q_RANGE);
    smem.q_bias[run * 2 + lane / 16] = bias;
}

// The new token's heads, two numbers of each run of 64 in a lane.
struct NewToken {
    Rope rope[HADAMARD_RUNS][2];
    float q[HADAMARD_RUNS][2], k[HADAMARD_RUNS][2], v[HADAMARD_RUNS][2];

    DEVICE void load_rope(const WarpContext& b, int lane) {
        UNROLL
        for (int r = 0; r < HADAMARD_RUNS; r++) {
            UNROLL
            for (int i = 0; i < 2; i++) rope[r][i].load(b.params, b.splits.row, r * 64 + lane * 2 + i, 0);
        }
    }
    DEVICE void load(const WarpContext& b, bool with_kv, int lane) {
        const AttnParams& params = b.params;
        const i64 row = b.splits.row, at = b.h * HEAD_DIM;
        UNROLL
        for (int r = 0; r < HADAMARD_RUNS; r++) {
            UNROLL
            for (int i = 0; i < 2; i++) {
                const int number = r * 64 + lane * 2 + i;
                q[r][i] = cvt_f32_f16(rope[r][i].apply(params.q + row * params.q_row_stride + at, number));
                if (!with_kv) continue;
                k[r][i] = cvt_f32_f16(rope[r][i].apply(params.k + row * params.k_row_stride + at, number));
                v[r][i] = cvt_f32_f16(params.v[row * params.v_row_stride + at + number]);
            }
        }
    }
    // Appends the heads to the cache; they are the last split, attended to as they came. The query is transformed.
    DEVICE void append_kv(const WarpContext& b, int lane) {
        const AttnParams& params = b.params;
        const i64 stored = b.head_index(b.splits.past);
        const int split = b.splits.count - 1;
        float sum = 0;
        UNROLL
        for (int r = 0; r < HADAMARD_RUNS; r++) {
            store_kv<K_DTYPE>(k[r], params.key, params.key_scale, stored, r, lane, true);
            store_kv<V_DTYPE>(v[r], params.value, params.value_scale, stored, r, lane, true);
            sum += q[r][0] * k[r][0] + q[r][1] * k[r][1];
            *(float2*)(b.o + split * HEAD_DIM + r * 64 + lane * 2) = float2{v[r][0], v[r][1]};
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            b.m[split] = b.softcap(sum);
            b.l[split] = 1;
        }
    }
};

// Whether this warp is the last of those that share the head. It resets the counter.
DEVICE bool arrives_last(const WarpContext& b, int lane) {
    const int warps = b.splits.busy_blocks(b.params.blocks_per_row);
    __syncwarp();
    if (warps == 1) return true;
    bool last = false;
    if (lane == 0) {
        last = atom_add_acq_rel(b.params.arrivals + b.number) + 1 == warps;
        if (last) b.params.arrivals[b.number] = 0;
    }
    return vote_any(last);
}

// The partial results of all splits, combined in order and transformed back. Some outputs are loaded before their
// weights are known.
DEVICE void combine_splits(const WarpContext& b, float (&split_weights)[MAX_SPLITS + 1], int lane) {
    const int splits = b.splits.count, in_flight = 12;
    const int lane_splits = MAX_SPLITS / 32 + 1;  // whose weights a lane computes
    const EpilogueTarget& target = b.params.target;
    uint4 slots[HADAMARD_RUNS][2];
    UNROLL
    for (int r = 0; r < HADAMARD_RUNS; r++) {
        UNROLL
        for (int i = 0; i < 2; i++)
            if (target.packed_x) slots[r][i] = target.slots[b.h * HEAD_DIM + r * 64 + lane * 2 + i];
    }
    float m[lane_splits], l[lane_splits], top = NO_MAX, total = 0, o[HADAMARD_RUNS][2] = {};
    UNROLL
    for (int n = 0; n < lane_splits; n++) {
        const bool exists = n * 32 + lane < splits;
        m[n] = exists ? __ldcg(b.m + n * 32 + lane) : NO_MAX;
        l[n] = exists ? __ldcg(b.l + n * 32 + lane) : 0;
    }
    for (int first = 0; first < splits; first += in_flight) {
        float2 more[in_flight][HADAMARD_RUNS];
        UNROLL
        for (int s = 0; s < in_flight; s++) {
            UNROLL
            for (int r = 0; r < HADAMARD_RUNS; r++)
                if (first + s < splits)
                    more[s][r] = __ldcg((const float2*)b.o + (first + s) * (HEAD_DIM / 2) + r * 32 + lane);
        }
        if (first == 0) {
            UNROLL
            for (int n = 0; n < lane_splits; n++) top = fmaxf(top, m[n]);
            top = warp_max(top);
            UNROLL
            for (int n = 0; n < lane_splits; n++) {
                const float weight = ex2_approx(m[n] - top);
                if (n * 32 + lane < splits) split_weights[n * 32 + lane] = weight;
                total += l[n] * weight;
            }
            total = warp_sum(total);
            __syncwarp();
        }
        UNROLL
        for (int s = 0; s < in_flight; s++) {
            UNROLL
            for (int r = 0; r < HADAMARD_RUNS; r++) {
                if (first + s < splits) {
                    o[r][0] += more[s][r].x * split_weights[first + s];
                    o[r][1] += more[s][r].y * split_weights[first + s];
                }
            }
        }
    }
    UNROLL
    for (int r = 0; r < HADAMARD_RUNS; r++) {
        hadamard(o[r], lane);
        const float inverse = 1.0f / total;
        const u32 both = cvt_f16x2_f32(o[r][0] * inverse, o[r][1] * inverse);
        if (b.params.out) *(u32*)(b.params.out + (i64)b.number * HEAD_DIM + r * 64 + lane * 2) = both;
        UNROLL
        for (int i = 0; i < 2; i++)
            if (target.packed_x) store_prepacked(target, slots[r][i], (int)b.splits.row, (u16)(both >> 16 * i));
    }
}

// Grid: (row * groups of WARPS heads, blocks that share the row's splits).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) paged_attn_decode_mha(
    const __grid_constant__ AttnParams params
) {
    extern __shared__ __align__(16) char dynamic_smem[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.y;
    KvStage& stage = *(KvStage*)dynamic_smem;
    WarpSmem& smem = ((WarpSmem*)(dynamic_smem + sizeof(KvStage)))[warp];
    griddepcontrol_launch_dependents();
    const WarpContext b(params, warp);
    const KvSplits& splits = b.splits;
    NewToken token;
    token.load_rope(b, lane);  // before the pipeline fills up
    if (block >= splits.busy_blocks(params.blocks_per_row)) return;
    if (params.target.packed_x && lane < HEAD_DIM / 8) prefetch_l2(params.target.slots + b.h * HEAD_DIM + lane * 8);
    PadWriter pads;
    pads.locate(params.target, block ? 1 << 30 : blockIdx.x * THREADS + threadIdx.x);
    int split = block, at = splits.begin(split);
    if (split < splits.count - 1) {
        const i64 head = b.head_index(at) - warp;
        copy_keys(stage, params, head, splits.end(split) - at);
        cp_async_commit_group();
        copy_values(stage, params, head, splits.end(split) - at);
    }
    cp_async_commit_group();
    const bool has_new_token = block == splits.last_block(params.blocks_per_row);
    QFragments q;
    griddepcontrol_wait();
    pads.write(params.target, gridDim.x * THREADS);
    token.load(b, has_new_token, lane);
    UNROLL
    for (int r = 0; r < HADAMARD_RUNS; r++) quantize_query(smem, token.q[r], r, lane);
    if (has_new_token) token.append_kv(b, lane);
    __syncwarp();
    q.load(smem, lane);
    for (; split < splits.count - 1; split += params.blocks_per_row) {
        OnlineSoftmax softmax;
        softmax.begin(b, split, lane);
        for (at = splits.begin(split); at < splits.end(split); at += 64) {
            int next = at + 64, end = splits.end(split);
            if (next >= end) {
                next = splits.begin(split + params.blocks_per_row);
                end = splits.end(split + params.blocks_per_row);
            }
            const bool more = next < end;
            const i64 head = more ? b.head_index(next) - warp : 0;
            float scores[2] = {};
            cp_async_wait_group<1>();
            __syncthreads();  // all have copied keys
            compute_scores(stage, q, warp, lane, scores);
            __syncthreads();  // all have read them
            if (more) copy_keys(stage, params, head, end - next);
            cp_async_commit_group();
            UNROLL
            for (int i = 0; i < 2; i++) {
                const int cached = at + i * 32 + lane % 4 * 8 + lane / 4;
                scores[i] = cached < splits.end(split) && b.sees(cached) ? b.softcap(scores[i]) : MASKED_SCORE;
            }
            cp_async_wait_group<1>();
            __syncthreads();  // the same for values
            softmax.update(stage, scores, smem.weights, at == splits.begin(split));
            __syncthreads();
            if (more) copy_values(stage, params, head, end - next);
            cp_async_commit_group();
        }
        softmax.store(b, split, lane);
    }
    cp_async_wait_group<0>();
    if (arrives_last(b, lane)) combine_splits(b, smem.split_weights, lane);
}
