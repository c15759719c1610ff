// Attention of one new token, each of its query heads with a kv head of its own, over pages of codes.
//
// As in attention.cu a row's past is cut into chunks by its length alone, and added up in order. Here a head is one
// warp's, and a thread block has heads that are neighbours in memory, so that it fetches whole lines of it: the keys of
// 64 tokens are on their way to shared memory while the values before them are worked on, and the other way round.
// Loops stay loops: unrolled, they were no faster.
//
// A code, less the middle of its range, stands for itself times the scale of its 32 neighbours, so products are of whole
// numbers. What codes are multiplied with is cut into two digits of 8 bits: query numbers, as parts of the largest of 32,
// and the weights of tokens times the values' scales, as parts of the largest of 64. Each digit of each 32 neighbours is
// a column of its own; of values, those of a lane's own neighbours count. Sums begin with what the middles bring too much.
//
// The tensor cores take bytes as they lie. One with two codes in it is 16 times the upper one and the lower one: the
// product with the lower ones alone makes up for that.
//
// The order of a head's numbers, and of tokens, means nothing to a sum: lanes take keys of tokens 8u + g in quarters
// (g = lane / 4, c = lane % 4), which leaves a lane the scores of tokens 8c + g and 32 further on; and values of tokens
// c, 4 + c, and so on, in eighths.
//
// Set when compiling: what pages.h wants; KV is a multiple of WARPS.

#include "mma_int8.h"

#define BANK_PAD 8  // words between tokens, so that lanes find theirs in different banks

// 64 stored tokens of the thread block's heads, as they come.
struct alignas(16) KvStage {
    u32 keys[64][WARPS * KEY_WORDS + BANK_PAD], values[64][WARPS * VALUE_WORDS + BANK_PAD];
    u16 key_scales[64][WARPS][GROUPS], value_scales[64][WARPS][GROUPS];
};

struct alignas(16) AttnSmem {    // of a warp
    uint4 query[HEAD_DIM / 2];     // digits as the lanes multiply them
    u32 weights[GROUPS][32];   // of two tokens, 32 apart: the lower digits, then the upper ones
    u32 digits[2][HEAD_DIM / 4];   // of the query, the lower ones first
    float units[GROUPS];       // what one of them means
    int middles[GROUPS];       // the sum of them times the middle codes
    float shares[MAX_SPLITS + 1];   // of chunks in the answer
};

// A warp's row and head, and where it leaves what is unfinished.
struct WarpContext {
    const AttnParams& job;
    KvSplits row;
    int h, number;  // its own, and among those of all rows
    float *peaks, *totals, *answers;

    DEVICE WarpContext(const AttnParams& given, int warp) : job(given) {
        row.read(job, blockIdx.x / (KV_HEADS / WARPS));
        h = blockIdx.x % (KV_HEADS / WARPS) * WARPS + warp, number = (int)row.number * KV_HEADS + h;
        answers = job.left + (i64)number * (job.slots * (HEAD_DIM + 4));
        peaks = answers + job.slots * HEAD_DIM, totals = peaks + job.slots;
    }
    DEVICE float softcap(float score) const {
        return SOFTCAP ? tanhf(score * job.factor) * job.cap : score * job.factor;
    }
    DEVICE bool sees(int key) const {
        bool seen = !job.window || row.behind - key < job.window;
        if (HAS_MASK) seen = seen && job.mask[row.number * job.mask_step + key];
        return seen;
    }
    DEVICE i64 home(int token) const {  // among all stored heads
        const i64 page = job.table[row.number * job.table_step + token / PAGE_SIZE];
        return (page * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS + h;
    }
};

// The bytes of neighbouring heads from `home` on, of 64 tokens, to where those lie STEP bytes apart; `left` of the tokens
// are there, and the last of them stands in for others.
template <int BYTES, int STEP> DEVICE void fetch(void* to, const void* from, i64 home, int left) {
    const int piece = BYTES < 16 ? BYTES : 16, each = BYTES / piece, all = 64 * each, whole = BYTES / WARPS * KV_HEADS;
    const int part = threadIdx.x % each, token = threadIdx.x / each, pace = THREADS / each;
    const u32 there = cvta_to_shared(to) + token * STEP + part * piece;
    const char* at = (const char*)from + home * (BYTES / WARPS) + part * piece;
    UNROLL for (int n = 0; n < (all + THREADS - 1) / THREADS; n++) {
        if (all % THREADS && n * THREADS + threadIdx.x >= all) continue;
        const int which = n * pace + token;
        cp_async<piece>(there + n * pace * STEP, at + (i64)(left >= 64 ? which : min(which, left - 1)) * whole);
    }
}
DEVICE void fetch_keys(KvStage& coming, const AttnParams& job, i64 home, int left) {
    fetch<WARPS * KEY_WORDS * 4, sizeof(coming.keys[0])>(coming.keys, job.key, home, left);
    fetch<WARPS * GROUPS * 2, sizeof(coming.key_scales[0])>(coming.key_scales, job.key_scale, home, left);
}
DEVICE void fetch_values(KvStage& coming, const AttnParams& job, i64 home, int left) {
    fetch<WARPS * VALUE_WORDS * 4, sizeof(coming.values[0])>(coming.values, job.value, home, left);
    fetch<WARPS * GROUPS * 2, sizeof(coming.value_scales[0])>(coming.value_scales, job.value_scale, home, left);
}
template <int WORDS> DEVICE void read(u32* to, const u32* from) {
    if (WORDS == 1) to[0] = from[0];
    if (WORDS == 2) *(uint2*)to = *(const uint2*)from;
    if (WORDS == 4) *(uint4*)to = *(const uint4*)from;
}

// The query as the columns of a product: digits 2 · group and 2 · group + 1, zero where keys are of other groups.
struct QFragments {
    static const int steps = HEAD_DIM / 32;
    uint4* words;  // the lane's, of two steps each
    float unit;    // of its group of scores
    int start;     // of its sums

    DEVICE void load(AttnSmem& memory, int lane) {
        u32 word[steps][2];
        words = memory.query + lane;
        const int column = lane / 4, part = lane % 4, run = KEY_WORDS < 16 ? KEY_WORDS / 4 : 4;  // words side by side
        const u32* digits = memory.digits[column % 2];
        unit = memory.units[part % GROUPS], start = part < GROUPS ? -memory.middles[part % GROUPS] : 0;
        UNROLL for (int s = 0; s < steps; s++) {
            const int at = K_DTYPE == 2 ? s : 2 * s;  // the lane's words of a key
            const int number = ((at / run * 4 + part) * run + at % run) * (32 / BITS(K_DTYPE));
            const bool mine = number / 32 == column / 2;
            const u32 low = mine ? digits[number / 4] : 0, high = mine ? digits[number / 4 + 1] : 0;
            word[s][0] = K_DTYPE == 2 ? prmt(low, high, 0x7531) : low;
            word[s][1] = K_DTYPE == 2 ? prmt(low, high, 0x6420) : high;
        }
        UNROLL for (int s = 0; s < steps; s += 2) words[s * 16] = uint4{word[s][0], word[s][1], word[s + 1][0], word[s + 1][1]};
    }
};

// q·k of tokens 8c + g and 32 further on.
DEVICE void score(const KvStage& from, const QFragments& q, int warp, int lane, float (&out)[2]) {
    const int g = lane / 4, c = lane % 4, words = KEY_WORDS / 4, run = words < 4 ? words : 4;
    uint4 both[QFragments::steps / 2];
    UNROLL for (int s = 0; s < QFragments::steps; s += 2) both[s / 2] = q.words[s * 16];
    NO_UNROLL for (int u = 0; u < 8; u += 2) {  // tokens 8u + g and 8 behind
        u32 a[words], b[words];
        UNROLL for (int i = 0; i < words; i += run) {
            const int at = warp * KEY_WORDS + 4 * i + c * run;
            read<run>(a + i, from.keys[8 * u + g] + at);
            read<run>(b + i, from.keys[8 * u + 8 + g] + at);
        }
        int sum[4] = {q.start, 0, q.start, 0};
        UNROLL for (int s = 0; s < QFragments::steps; s++) {
            const u32 one = s % 2 ? both[s / 2].z : both[s / 2].x, two = s % 2 ? both[s / 2].w : both[s / 2].y;
            const u32 lower = 0xf0f0f0f0;
            if (K_DTYPE == 2) mma_m16n8k32_u8s8(sum, a[s], b[s], a[s] << 4 & lower, b[s] << 4 & lower, one, two);
            else mma_m16n8k32_u8s8(sum, a[2 * s], b[2 * s], a[2 * s + 1], b[2 * s + 1], one, two);
        }
        float part[2];  // what group c brings
        UNROLL for (int i = 0; i < 2; i++)
            part[i] = (float)(sum[2 * i] + 256 * sum[2 * i + 1])
                * (cvt_f32_f16(from.key_scales[8 * u + 8 * i + g][warp][c % GROUPS]) * q.unit);
        float all = (c % 2 ? part[1] : part[0]) + shfl_xor(c % 2 ? part[0] : part[1], 1);
        all += shfl_xor(all, 2);
        if (u / 2 % 2 == c / 2) out[0] = u < 4 ? all : out[0], out[1] = all;
    }
}

// A warp's unfinished softmax of a chunk, whose answer is where it will be left. Totals are a lane's own until the end.
struct Softmax {
    float peak, total;
    float* answer;  // the lane's numbers; null: what it has are sums with other groups' weights

    DEVICE void begin(const WarpContext& b, int chunk, int lane) {
        const int g = lane / 4;
        peak = NO_MAX, total = 0;
        answer = g * EACH / 32 == lane % 4 ? b.answers + chunk * HEAD_DIM + g * EACH : nullptr;
    }
    // A stretch whose scores are known.
    DEVICE void add(const KvStage& from, const float (&score)[2], u32 (&weights)[GROUPS][32], bool first) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
        const float top = fmaxf(peak, warp_max(fmaxf(score[0], score[1]))), fade = ex2_approx(peak - top);
        const float weight[2] = {ex2_approx(score[0] - top), ex2_approx(score[1] - top)};
        peak = top, total = total * fade + weight[0] + weight[1];
        float unit = 0;  // what one of the lane's sums means
        int all = 0;     // digits of its group
        __syncwarp();  // all have read what is there
        NO_UNROLL for (int group = 0; group < GROUPS; group++) {
            float scaled[2];
            UNROLL for (int i = 0; i < 2; i++) scaled[i] = weight[i]
                * cvt_f32_f16(from.value_scales[i * 32 + 8 * c + g][warp][group]);
            const float most = fmaxf(warp_max_nonneg(fmaxf(scaled[0], scaled[1])), 1.0e-30f);
            const float factor = P_RANGE * rcp_approx(most), shift = 8388608.0f;  // whole numbers are its lowest bits
            const u32 one = float_as_int(fmaf(scaled[0], factor, shift)), two = float_as_int(fmaf(scaled[1], factor, shift));
            weights[group][g % 4 * 8 + 2 * c + g / 4] = prmt(one, two, 0x5140);  // in the order of the values
            const int digits = redux_add((int)(one + two)) - (int)0xc0000000;  // 64 times the bits of `shift`
            if (group == c) unit = most * (1 / P_RANGE), all = digits;
        }
        __syncwarp();
        const int words = VALUE_WORDS / 8, count = 32 / BITS(V_DTYPE), upper = V_DTYPE == 2 ? 17 * CODE_BIAS(V_DTYPE) : CODE_BIAS(V_DTYPE);
        int sum[EACH / 2][4];
        UNROLL for (int i = 0; i < EACH / 2; i++)
            sum[i][0] = -CODE_BIAS(V_DTYPE) * all, sum[i][2] = -upper * all, sum[i][1] = sum[i][3] = 0;
        NO_UNROLL for (int x = 0; x < 4; x += 2) {
            u32 digits[2], token[8][words];  // of tokens 8x + c, 32 further on, those four behind both, and so on
            UNROLL for (int i = 0; i < 2; i++) {
                const uint2 both = *(const uint2*)&weights[g / 2 % GROUPS][8 * c + 2 * x + 2 * i];
                digits[i] = prmt(both.x, both.y, g % 2 ? 0x7632 : 0x5410);
            }
            UNROLL for (int i = 0; i < 8; i++)
                read<words>(token[i], from.values[i % 2 * 32 + 8 * x + i / 2 * 4 + c] + warp * VALUE_WORDS + g * words);
            UNROLL for (int w = 0; w < words; w++) {
                u32 near[count], far[count];
                gather(token[0][w], token[1][w], token[2][w], token[3][w], near);
                gather(token[4][w], token[5][w], token[6][w], token[7][w], far);
                UNROLL for (int i = 0; i < count; i += 2)
                    mma_m16n8k32_u8u8(sum[(w * count + i) / 2], near[i], near[i + 1], far[i], far[i + 1], digits[0], digits[1]);
            }
        }
        if (answer) add_up(sum, unit, first ? 0.0f : fade);
    }
    // Sums to the answer so far.
    DEVICE void add_up(const int (&sum)[EACH / 2][4], float unit, float fade) {
        const float is_last_block = V_DTYPE == 2 ? unit * 0.0625f : unit;
        UNROLL for (int i = 0; i < EACH; i += 4) {
            float4* to = (float4*)(answer + i);
            const float4 old = fade == 0 ? float4{} : *to;
            float more[4];
            UNROLL for (int k = 0; k < 2; k++) {
                const int* found = sum[i / 2 + k];
                const int one = found[0] + 256 * found[1], two = found[2] + 256 * found[3];
                more[2 * k] = (float)one * unit, more[2 * k + 1] = (float)(V_DTYPE == 2 ? two - one : two) * is_last_block;
            }
            *to = float4{old.x * fade + more[0], old.y * fade + more[1], old.z * fade + more[2], old.w * fade + more[3]};
        }
    }
    // The numbers in a word, each of four tokens.
    static DEVICE void gather(u32 a, u32 b, u32 c, u32 d, u32 (&out)[32 / BITS(V_DTYPE)]) {
        const u32 ab[2] = {prmt(a, b, 0x5140), prmt(a, b, 0x7362)}, cd[2] = {prmt(c, d, 0x5140), prmt(c, d, 0x7362)};
        UNROLL for (int i = 0; i < 4; i++) {
            const u32 all = prmt(ab[i / 2], cd[i / 2], i % 2 ? 0x7632 : 0x5410);
            if (V_DTYPE == 2) out[2 * i] = all & 0x0f0f0f0f, out[2 * i + 1] = all;
            else out[i] = all;
        }
    }
    DEVICE void store_split(const WarpContext& b, int chunk, int lane) {
        const float all = warp_sum(total);
        if (lane == 0) b.peaks[chunk] = peak, b.totals[chunk] = all;
    }
};

// 64 numbers of the turned query, rotated and cut into digits. Even numbers meet the lower codes of bytes, 16 times as
// large, and odd ones whole bytes.
DEVICE void quantize_query(AttnSmem& memory, float (&x)[2], int run, int lane) {
    hadamard(x, lane);
    float most = fmaxf(fabsf(x[0]), fabsf(x[1]));
    UNROLL for (int other = 1; other < 16; other *= 2) most = fmaxf(most, shfl_xor(most, other));
    const float factor = most == 0 ? 0.0f : Q_RANGE / most, parts[2] = {x[0] - (K_DTYPE == 2 ? x[1] * 0.0625f : 0.0f), x[1]};
    u32 low = 0, high = 0;
    int middles = 0;
    UNROLL for (int i = 0; i < 2; i++) {
        const int whole = (int)rintf(parts[i] * factor), lower = (signed char)whole;
        low |= (u32)(lower & 255) << 8 * i, high |= (u32)((whole - lower) >> 8 & 255) << 8 * i;
        middles += whole * (K_DTYPE == 2 && i ? 136 : 128);
    }
    UNROLL for (int other = 1; other < 16; other *= 2) middles += float_as_int(shfl_xor(int_as_float(middles), other));
    ((u16*)memory.digits[0])[run * 32 + lane] = (u16)low;
    ((u16*)memory.digits[1])[run * 32 + lane] = (u16)high;
    if (lane % 16) return;
    memory.units[run * 2 + lane / 16] = most * ((K_DTYPE == 2 ? 0.0625f : 1.0f) / Q_RANGE);
    memory.middles[run * 2 + lane / 16] = middles;
}

// The new heads, two numbers of each 64 in a lane.
struct NewToken {
    Rope turn[RUNS][2];
    float q[RUNS][2], k[RUNS][2], v[RUNS][2];

    DEVICE void find(const WarpContext& b, int lane) {
        UNROLL for (int r = 0; r < RUNS; r++) UNROLL for (int i = 0; i < 2; i++)
            turn[r][i].load(b.job, b.row.number, r * 64 + lane * 2 + i, 0);
    }
    DEVICE void read(const WarpContext& b, bool host, int lane) {
        const AttnParams& job = b.job;
        const i64 row = b.row.number, at = b.h * HEAD_DIM;
        UNROLL for (int r = 0; r < RUNS; r++) UNROLL for (int i = 0; i < 2; i++) {
            const int number = r * 64 + lane * 2 + i;
            q[r][i] = cvt_f32_f16(turn[r][i].apply(job.q + row * job.q_row + at, number));
            if (!host) continue;
            k[r][i] = cvt_f32_f16(turn[r][i].apply(job.k + row * job.k_row + at, number));
            v[r][i] = cvt_f32_f16(job.v[row * job.v_row + at + number]);
        }
    }
    // Stored, and the last chunk: seen as they came. The query has been rotated.
    DEVICE void append_kv(const WarpContext& b, int lane) {
        const AttnParams& job = b.job;
        const i64 home = b.home(b.row.behind);
        const int chunk = b.row.chunks - 1;
        float sum = 0;
        UNROLL for (int r = 0; r < RUNS; r++) {
            store_kv<K_DTYPE>(k[r], job.key, job.key_scale, home, r, lane, true);
            store_kv<V_DTYPE>(v[r], job.value, job.value_scale, home, r, lane, true);
            sum += q[r][0] * k[r][0] + q[r][1] * k[r][1];
            *(float2*)(b.answers + chunk * HEAD_DIM + r * 64 + lane * 2) = float2{v[r][0], v[r][1]};
        }
        sum = warp_sum(sum);
        if (lane == 0) b.peaks[chunk] = b.softcap(sum), b.totals[chunk] = 1;
    }
};

// Whether this warp is the last of those that share the head.
DEVICE bool is_last_warp(const WarpContext& b, int lane) {
    const int workers = b.row.workers(b.job.parts);
    __syncwarp();
    if (workers == 1) return true;
    bool mine = false;
    if (lane == 0) {
        mine = atom_add_acq_rel(b.job.counts + b.number) + 1 == workers;
        if (mine) b.job.counts[b.number] = 0;
    }
    return vote_any(mine);
}

// All chunks, added up in order, and out of the space of codes. Some are on their way before their shares are known.
DEVICE void combine_splits(const WarpContext& b, float (&shares)[MAX_SPLITS + 1], int lane) {
    const int chunks = b.row.chunks, many = 12, each = MAX_SPLITS / 32 + 1;  // chunks of a lane, whose shares it finds
    const EpilogueTarget& heir = b.job.heir;
    uint4 places[RUNS][2];
    UNROLL for (int r = 0; r < RUNS; r++) UNROLL for (int i = 0; i < 2; i++)
        if (heir.words) places[r][i] = heir.places[b.h * HEAD_DIM + r * 64 + lane * 2 + i];
    float peak[each], part[each], top = NO_MAX, total = 0, x[RUNS][2] = {};
    UNROLL for (int n = 0; n < each; n++) {
        const bool there = n * 32 + lane < chunks;
        peak[n] = there ? __ldcg(b.peaks + n * 32 + lane) : NO_MAX, part[n] = there ? __ldcg(b.totals + n * 32 + lane) : 0;
    }
    for (int first = 0; first < chunks; first += many) {
        float2 more[many][RUNS];
        UNROLL for (int c = 0; c < many; c++) UNROLL for (int r = 0; r < RUNS; r++) if (first + c < chunks)
            more[c][r] = __ldcg((const float2*)b.answers + (first + c) * (HEAD_DIM / 2) + r * 32 + lane);
        if (first == 0) {
            UNROLL for (int n = 0; n < each; n++) top = fmaxf(top, peak[n]);
            top = warp_max(top);
            UNROLL for (int n = 0; n < each; n++) {
                const float share = ex2_approx(peak[n] - top);
                if (n * 32 + lane < chunks) shares[n * 32 + lane] = share;
                total += part[n] * share;
            }
            total = warp_sum(total);
            __syncwarp();
        }
        UNROLL for (int c = 0; c < many; c++) UNROLL for (int r = 0; r < RUNS; r++) if (first + c < chunks)
            x[r][0] += more[c][r].x * shares[first + c], x[r][1] += more[c][r].y * shares[first + c];
    }
    UNROLL for (int r = 0; r < RUNS; r++) {
        hadamard(x[r], lane);
        const float share = 1.0f / total;
        const u32 both = cvt_f16x2_f32(x[r][0] * share, x[r][1] * share);
        if (b.job.out) *(u32*)(b.job.out + (i64)b.number * HEAD_DIM + r * 64 + lane * 2) = both;
        UNROLL for (int i = 0; i < 2; i++)
            if (heir.words) store_prepacked(heir, places[r][i], (int)b.row.number, (u16)(both >> 16 * i));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) paged_attn_decode_mha(const __grid_constant__ AttnParams job) {
    extern __shared__ __align__(16) char space[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = blockIdx.y;
    KvStage& coming = *(KvStage*)space;
    AttnSmem& memory = ((AttnSmem*)(space + sizeof(KvStage)))[warp];
    griddepcontrol_launch_dependents();
    const WarpContext b(job, warp);
    const KvSplits& row = b.row;
    NewToken fresh;
    fresh.find(b, lane);  // before much else is on its way
    if (part >= row.workers(job.parts)) return;
    if (job.heir.words && lane < HEAD_DIM / 8) prefetch_l2(job.heir.places + b.h * HEAD_DIM + lane * 8);
    PadWriter gap;
    gap.find(job.heir, part ? 1 << 30 : blockIdx.x * THREADS + threadIdx.x);
    int chunk = part, at = row.start(chunk);
    if (chunk < row.chunks - 1) {
        const i64 home = b.home(at) - warp;
        fetch_keys(coming, job, home, row.stop(chunk) - at);
        cp_async_commit_group();
        fetch_values(coming, job, home, row.stop(chunk) - at);
    }
    cp_async_commit_group();
    const bool host = part == row.host(job.parts);
    QFragments q;
    griddepcontrol_wait();
    gap.close(job.heir, gridDim.x * THREADS);
    fresh.read(b, host, lane);
    UNROLL for (int r = 0; r < RUNS; r++) quantize_query(memory, fresh.q[r], r, lane);
    if (host) fresh.append_kv(b, lane);
    __syncwarp();
    q.load(memory, lane);
    for (; chunk < row.chunks - 1; chunk += job.parts) {
        Softmax mine;
        mine.begin(b, chunk, lane);
        for (at = row.start(chunk); at < row.stop(chunk); at += 64) {
            int next = at + 64, end = row.stop(chunk);
            if (next >= end) next = row.start(chunk + job.parts), end = row.stop(chunk + job.parts);
            const bool more = next < end;
            const i64 home = more ? b.home(next) - warp : 0;
            float found[2] = {};
            cp_async_wait_group<1>();
            __syncthreads();  // all have copied keys
            score(coming, q, warp, lane, found);
            __syncthreads();  // all have read them
            if (more) fetch_keys(coming, job, home, end - next);
            cp_async_commit_group();
            UNROLL for (int i = 0; i < 2; i++) {
                const int token = at + i * 32 + lane % 4 * 8 + lane / 4;
                found[i] = token < row.stop(chunk) && b.sees(token) ? b.softcap(found[i]) : MASKED_SCORE;
            }
            cp_async_wait_group<1>();
            __syncthreads();
            mine.add(coming, found, memory.weights, at == row.start(chunk));
            __syncthreads();
            if (more) fetch_values(coming, job, home, end - next);
            cp_async_commit_group();
        }
        mine.store_split(b, chunk, lane);
    }
    cp_async_wait_group<0>();
    if (is_last_warp(b, lane)) combine_splits(b, memory.shares, lane);
}
