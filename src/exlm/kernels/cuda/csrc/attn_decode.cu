// Attention of a few new tokens over pages of keys and values, from floats or from codes, in one launch.
//
// A row's past is cut into chunks by its length alone. Thread blocks of one (row, kv head) share the chunks, each
// leaves its softmax unfinished in memory, and the block that is done last adds the chunks up in order: so a row's
// answer is the same, bit for bit, in any batch and for any number of thread blocks. The warps of a block share a chunk.
// The new tokens are the last chunk, seen as they came; its block turns the keys and writes them and the values to
// their pages.
//
// Keys and values go from memory into the registers of the tensor cores, and nowhere in between. The order of a
// head's numbers means nothing to a sum, so each lane takes 16 bytes where they lie: for scores = K·Qᵀ a lane holds a
// quarter of tokens g and g + 8, for answers = Vᵀ·P an eighth of tokens 2c, 2c + 1, 2c + 8, 2c + 9 (g = lane / 4,
// c = lane % 4). The next tile is on its way while one is worked on. Rotated codes are not rotated back: queries are
// turned into their space, and the answer out of it.
//
// Lengths and pages are read while the kernel before still runs: it must not be one that writes them. Part 0 of every
// row has work and waits, so that whoever waits for this kernel has waited for the one before as well.
//
// Set when compiling, besides what pages.h wants: SHARE (query heads of a kv head), COLUMNS (queries / 8 that a block
// takes), STEPS (sixteens of tokens in a tile).

#include "kv_fragments.h"


#define QUERIES (N8_TILES * 8)

// A warp's unfinished softmax: of queries 2c and 2c + 1 of each eight. Sums are a lane's own until the end.
struct Softmax {
    float peak[N8_TILES][2], total[N8_TILES][2], answer[N8_TILES][HEAD_DIM / 16][4];

    DEVICE void clear() {
        UNROLL for (int n = 0; n < N8_TILES; n++) UNROLL for (int i = 0; i < 2; i++) {
            peak[n][i] = NO_MAX, total[n][i] = 0;
            UNROLL for (int j = 0; j < HEAD_DIM / 16; j++) answer[n][j][i] = answer[n][j][i + 2] = 0;
        }
    }
    // Scores become weights, and the sums so far fade accordingly.
    DEVICE void weigh(float (&score)[KV_M16][N8_TILES][4]) {
        UNROLL for (int n = 0; n < N8_TILES; n++) {
            float fade[2];
            bool fades = false;
            UNROLL for (int i = 0; i < 2; i++) {
                float top = peak[n][i];
                UNROLL for (int s = 0; s < KV_M16; s++) top = fmaxf(top, fmaxf(score[s][n][i], score[s][n][i + 2]));
                UNROLL for (int other = 4; other < 32; other *= 2) top = fmaxf(top, shfl_xor(top, other));
                fade[i] = ex2_approx(peak[n][i] - top), fades |= top > peak[n][i], peak[n][i] = top, total[n][i] *= fade[i];
                UNROLL for (int s = 0; s < KV_M16; s++) UNROLL for (int k = i; k < 4; k += 2) {
                    score[s][n][k] = ex2_approx(score[s][n][k] - top);
                    total[n][i] += score[s][n][k];
                }
            }
            if (vote_any(fades))
                UNROLL for (int j = 0; j < HEAD_DIM / 16; j++) UNROLL for (int k = 0; k < 4; k++) answer[n][j][k] *= fade[k % 2];
        }
    }
    DEVICE void add(const VFragments<V_DTYPE>::Lane (&values)[KV_M16][4], const float (&weight)[KV_M16][N8_TILES][4]) {
        UNROLL for (int s = 0; s < KV_M16; s++) {
            u32 b[N8_TILES][2], near[HEAD_DIM / 8], far[HEAD_DIM / 8];
            UNROLL for (int n = 0; n < N8_TILES; n++) UNROLL for (int i = 0; i < 2; i++)
                b[n][i] = movmatrix_trans(cvt_f16x2_f32(weight[s][n][i * 2], weight[s][n][i * 2 + 1]));
            VFragments<V_DTYPE>::unpack(values[s][0], values[s][1], near);
            VFragments<V_DTYPE>::unpack(values[s][2], values[s][3], far);
            UNROLL for (int j = 0; j < HEAD_DIM / 16; j++) UNROLL for (int n = 0; n < N8_TILES; n++)
                mma_m16n8k16(answer[n][j], near[2 * j], near[2 * j + 1], far[2 * j], far[2 * j + 1], b[n][0], b[n][1]);
        }
    }
};

// Four neighbours of a head, in or out of the space of rotated codes; 16 lanes have 64 of them.
DEVICE void hadamard(float (&x)[4], int lane) {
    UNROLL for (int k = 0; k < 2; k++) {
        const float one = x[k], other = x[k + 2];
        x[k] = one + other, x[k + 2] = one - other;
    }
    UNROLL for (int away = 1; away < 16; away *= 2) UNROLL for (int k = 0; k < 4; k++) {
        const float theirs = shfl_xor(x[k], away);
        x[k] = lane & away ? theirs - x[k] : theirs + x[k];
    }
    UNROLL for (int k = 0; k < 4; k++) x[k] *= 0.03125f;
}

// A thread block's view of the job: its row, its kv head, its queries, and where they leave what is unfinished.
struct BlockContext {
    const AttnParams& job;
    KvSplits row;
    int h, query, queries, live, part;  // of the first query, of a full block, of this one
    float *peaks, *totals, *answers;

    DEVICE BlockContext(const AttnParams& given, float* near) : job(given) {
        const int all = job.tokens * GQA_GROUP, blocks = (all + QUERIES - 1) / QUERIES, x = blockIdx.x;
        h = x % KV_HEADS, query = x / KV_HEADS % blocks * QUERIES, part = blockIdx.y;
        queries = min(QUERIES, all), live = min(QUERIES, all - query);
        row.read(job, x / KV_HEADS / blocks);
        const i64 size = job.slots * queries * (HEAD_DIM + 4);  // in fours
        answers = near ? near : job.left + x * size;
        peaks = answers + job.slots * queries * HEAD_DIM, totals = peaks + job.slots * queries;
    }
    DEVICE int token(int m) const { return (query + m) / GQA_GROUP; }
    DEVICE int head(int m) const { return h * GQA_GROUP + (query + m) % GQA_GROUP; }
    DEVICE u16* out(int m) const {
        return job.out + ((row.number * job.tokens + token(m)) * KV_HEADS * GQA_GROUP + head(m)) * HEAD_DIM;
    }
    DEVICE bool sees(int m, int key) const {  // a stored token, by its place in the row
        bool seen = !job.window || row.behind + token(m) - key < job.window;
        if (HAS_MASK) seen = seen && job.mask[row.number * job.mask_step + key];
        return seen;
    }
    DEVICE float softcap(float score) const {
        return SOFTCAP ? tanhf(score * job.factor) * job.cap : score * job.factor;
    }
};

struct AttnSmem {  // shared by a thread block
    float peaks[WARPS][QUERIES], totals[WARPS][QUERIES];
    u16 q[QUERIES][HEAD_DIM];
    float answers[1];  // (WARPS, queries, HEAD); also for queries and new heads as they come, and weights of chunks
};

// Queries, turned, into shared memory. Most of this code runs once, and comes slowly: it is kept short.
DEVICE void load_queries(const BlockContext& b, AttnSmem& memory, Rope turn, int lane) {
    const AttnParams& job = b.job;
    u16 *came = (u16*)memory.answers, *plain = IS_QUANTIZED(K_DTYPE) ? came + b.queries * HEAD_DIM : memory.q[0];
    for (int i = threadIdx.x; i < b.live * HEAD_DIM / 8; i += THREADS) {
        const int m = i / (HEAD_DIM / 8);
        const u16* head = job.q + b.row.number * job.q_row + b.token(m) * job.q_token + b.head(m) * HEAD_DIM;
        *(uint4*)(came + i * 8) = *(const uint4*)(head + i % (HEAD_DIM / 8) * 8);
    }
    __syncthreads();
    _Pragma("unroll 1") for (int i = threadIdx.x; i < b.live * HEAD_DIM; i += THREADS) {
        const int at = i % HEAD_DIM, token = b.token(i / HEAD_DIM);
        if (token != turn.token || THREADS % HEAD_DIM) turn.load(job, b.row.number, at, token);
        plain[i] = turn.apply(came + (i - at), at);
    }
    __syncthreads();
    if (!IS_QUANTIZED(K_DTYPE)) return;
    const int fours = b.live * HEAD_DIM / 4;
    for (int i = threadIdx.x; i - lane < fours; i += THREADS) {  // whole warps
        const uint2 four = *(const uint2*)(plain + min(i, fours - 1) * 4);
        float x[4] = {cvt_f32_f16((u16)four.x), cvt_f32_f16((u16)(four.x >> 16)), cvt_f32_f16((u16)four.y), cvt_f32_f16((u16)(four.y >> 16))};
        hadamard(x, lane);
        if (i < fours) *(uint2*)(memory.q[0] + i * 4) = uint2{cvt_f16x2_f32(x[0], x[1]), cvt_f16x2_f32(x[2], x[3])};
    }
    __syncthreads();
}

// The lane's part of a query, as the keys' numbers lie; zeros where there is none.
DEVICE void load_q_fragments(const BlockContext& b, const AttnSmem& memory, int m, int lane, u32 (&q)[HEAD_DIM / 8]) {
    UNROLL for (int i = 0; i < HEAD_DIM / 8; i += 4) {
        uint4 eight = {};
        if (m < b.live) eight = *(const uint4*)(memory.q[m] + KFragments<K_DTYPE>::Lane::place(lane % 4, KFragments<K_DTYPE>::first(i)));
        const u32 low[2] = {eight.x, eight.y}, high[2] = {eight.z, eight.w};
        if (K_DTYPE == 2) {
            UNROLL for (int k = 0; k < 4; k++) q[i + k] = prmt(low[k / 2], high[k / 2], k % 2 ? 0x7632 : 0x5410);
        } else {
            UNROLL for (int k = 0; k < 2; k++) q[i + k] = low[k], q[i + 2 + k] = high[k];
        }
    }
}

// q·k of a tile, bent, and hidden where nothing is to be seen; `left` tokens are there.
DEVICE void score(const BlockContext& b, const KFragments<K_DTYPE>::Lane (&keys)[KV_M16][2], const u32 (&q)[N8_TILES][HEAD_DIM / 8], int tile,
                  int left, int lane, float (&out)[KV_M16][N8_TILES][4]) {
    UNROLL for (int s = 0; s < KV_M16; s++) {
        u32 near[HEAD_DIM / 8], far[HEAD_DIM / 8];
        KFragments<K_DTYPE>::unpack(keys[s][0], near);
        KFragments<K_DTYPE>::unpack(keys[s][1], far);
        UNROLL for (int n = 0; n < N8_TILES; n++) {
            float even[4] = {}, odd[4] = {};  // two chains, so that a product waits for the last but one
            UNROLL for (int k = 0; k < HEAD_DIM / 8; k += 4) {
                mma_m16n8k16(even, near[k], far[k], near[k + 1], far[k + 1], q[n][k], q[n][k + 1]);
                mma_m16n8k16(odd, near[k + 2], far[k + 2], near[k + 3], far[k + 3], q[n][k + 2], q[n][k + 3]);
            }
            UNROLL for (int i = 0; i < 4; i++) out[s][n][i] = b.softcap(even[i] + odd[i]);
        }
    }
    if (left >= KV_TILE && !b.job.window && !HAS_MASK) return;
    UNROLL for (int s = 0; s < KV_M16; s++) UNROLL for (int n = 0; n < N8_TILES; n++) UNROLL for (int i = 0; i < 4; i++) {
        const int token = s * 16 + i / 2 * 8 + lane / 4, m = n * 8 + lane % 4 * 2 + i % 2;
        if (token >= left || !b.sees(m, tile + token)) out[s][n][i] = MASKED_SCORE;
    }
}

// What the warps have of a chunk, added up in their order and left in memory.
DEVICE void store_split(const BlockContext& b, AttnSmem& memory, Softmax& mine, int chunk, int warp, int lane) {
    UNROLL for (int n = 0; n < N8_TILES; n++) UNROLL for (int i = 0; i < 2; i++) {
        const int m = n * 8 + lane % 4 * 2 + i;
        UNROLL for (int other = 4; other < 32; other *= 2) mine.total[n][i] += shfl_xor(mine.total[n][i], other);
        if (lane < 4) memory.peaks[warp][m] = mine.peak[n][i], memory.totals[warp][m] = mine.total[n][i];
        if (m >= b.live) continue;
        float* to = memory.answers + (warp * b.queries + m) * HEAD_DIM;
        UNROLL for (int e = 0; e < HEAD_DIM / 8; e += 4)
            *(float4*)(to + VFragments<V_DTYPE>::Lane::place(lane / 4, e)) =
                float4{mine.answer[n][e / 2][i], mine.answer[n][e / 2][i + 2], mine.answer[n][e / 2 + 1][i],
                       mine.answer[n][e / 2 + 1][i + 2]};
    }
    __syncthreads();
    float4* left = (float4*)(b.answers + (i64)chunk * b.queries * HEAD_DIM);
    for (int i = threadIdx.x; i < b.live * HEAD_DIM / 4; i += THREADS) {
        const int m = i / (HEAD_DIM / 4);
        float peak = NO_MAX, total = 0;
        float4 answer = {};
        UNROLL for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, memory.peaks[w][m]);
        UNROLL for (int w = 0; w < WARPS; w++) {
            const float weight = ex2_approx(memory.peaks[w][m] - peak);
            const float4 more = ((const float4*)memory.answers)[w * b.queries * (HEAD_DIM / 4) + i];
            total += memory.totals[w][m] * weight;
            answer.x += more.x * weight, answer.y += more.y * weight;
            answer.z += more.z * weight, answer.w += more.w * weight;
        }
        left[i] = answer;
        if (i % (HEAD_DIM / 4) == 0) b.peaks[chunk * b.queries + m] = peak, b.totals[chunk * b.queries + m] = total;
    }
    __syncthreads();
}

// The last chunk: new heads are stored, and seen as they came.
DEVICE void append_kv(const BlockContext& b, AttnSmem& memory, int warp, int lane) {
    const AttnParams& job = b.job;
    const int runs = HEAD_DIM / 64;
    u16* fresh = (u16*)memory.answers;  // (keys and values, tokens, HEAD)
    for (int item = warp; item < 2 * job.tokens * runs; item += WARPS) {
        const int run = item % runs, t = item / runs % job.tokens, slot = b.row.behind + t;
        const i64 page = job.table[b.row.number * job.table_step + slot / PAGE_SIZE];
        const i64 home = (page * PAGE_SIZE + slot % PAGE_SIZE) * KV_HEADS + b.h;
        const bool key = item < job.tokens * runs;
        float x[2];
        UNROLL for (int i = 0; i < 2; i++) {
            const int number = run * 64 + lane * 2 + i;
            if (key) {
                Rope turn;
                turn.load(job, b.row.number, number, t);
                x[i] = cvt_f32_f16(turn.apply(job.k + b.row.number * job.k_row + t * job.k_token + b.h * HEAD_DIM, number));
            } else {
                x[i] = cvt_f32_f16(job.v[b.row.number * job.v_row + t * job.v_token + b.h * HEAD_DIM + number]);
            }
        }
        if (key) store_kv<K_DTYPE>(x, job.key, job.key_scale, home, run, lane, b.query == 0);
        else store_kv<V_DTYPE>(x, job.value, job.value_scale, home, run, lane, b.query == 0);
        ((u32*)fresh)[(item / runs * HEAD_DIM + run * 64) / 2 + lane] = cvt_f16x2_f32(x[0], x[1]);
    }
    __syncthreads();
    const int chunk = b.row.chunks - 1;
    for (int m = warp; m < b.live; m += WARPS) {
        const int t = b.token(m);
        float peak = NO_MAX, total = 0, answer[HEAD_DIM / 32] = {};
        for (int n = 0; n <= t; n++) {
            if (n < t && !b.sees(m, b.row.behind + n)) continue;
            const u16 *k = fresh + n * HEAD_DIM, *v = fresh + (job.tokens + n) * HEAD_DIM;
            float sum = 0;
            UNROLL for (int i = 0; i < HEAD_DIM / 32; i++)
                sum += cvt_f32_f16(memory.q[m][i * 32 + lane]) * cvt_f32_f16(k[i * 32 + lane]);
            UNROLL for (int other = 16; other; other /= 2) sum += shfl_xor(sum, other);
            const float top = fmaxf(peak, b.softcap(sum)), fade = ex2_approx(peak - top), weight = ex2_approx(b.softcap(sum) - top);
            peak = top, total = total * fade + weight;
            UNROLL for (int i = 0; i < HEAD_DIM / 32; i++) answer[i] = answer[i] * fade + weight * cvt_f32_f16(v[i * 32 + lane]);
        }
        UNROLL for (int i = 0; i < HEAD_DIM / 32; i++)
            b.answers[((i64)chunk * b.queries + m) * HEAD_DIM + i * 32 + lane] = answer[i];
        if (lane == 0) b.peaks[chunk * b.queries + m] = peak, b.totals[chunk * b.queries + m] = total;
    }
}

// Whether this thread block is the last of those that share a row and a head.
DEVICE bool is_last_block(const AttnParams& job, const KvSplits& row) {
    const int workers = row.workers(job.parts);
    __shared__ int done;
    __syncthreads();
    if (workers == 1) return true;
    if (threadIdx.x == 0) {
        done = atom_add_acq_rel(job.counts + blockIdx.x) + 1;
        if (done == workers) job.counts[blockIdx.x] = 0;
    }
    __syncthreads();
    return done == workers;
}

#define PREFETCH_SPLITS 12  // chunks whose sums are on their way at once

// All chunks, added up in order; four numbers of a query at a time.
DEVICE void combine_splits(const BlockContext& b, AttnSmem& memory, int lane) {
    const int chunks = b.row.chunks, count = chunks * b.queries, fours = b.live * HEAD_DIM / 4;
    float *peaks = memory.answers, *totals = peaks + count;
    float peak = NO_MAX, total = 0, answer[4] = {};
    bool known = false;
    const EpilogueTarget& heir = b.job.heir;
    for (int base = 0, chunk = 0; base < fours;) {  // which numbers, and the first of some chunks
        const int i = min(base + (int)threadIdx.x, fours - 1), m = i / (HEAD_DIM / 4);
        float4 next[PREFETCH_SPLITS];
        UNROLL for (int k = 0; k < PREFETCH_SPLITS; k++) if (chunk + k < chunks)
            next[k] = ld_relaxed_v4(b.answers + ((chunk + k) * b.queries * (HEAD_DIM / 4) + i) * 4);
        const i64 row = b.row.number * b.job.tokens + b.token(m);
        uint4 places[4];
        UNROLL for (int k = 0; k < 4; k++)
            if (heir.words && chunk + PREFETCH_SPLITS >= chunks) places[k] = heir.places[b.head(m) * HEAD_DIM + i % (HEAD_DIM / 4) * 4 + k];
        if (!known) {
            for (int n = threadIdx.x; n < count; n += THREADS)
                peaks[n] = ld_relaxed(b.peaks + n), totals[n] = ld_relaxed(b.totals + n);
            __syncthreads();
            known = true;
        }
        if (chunk == 0) _Pragma("unroll 4") for (int c = 0; c < chunks; c++) peak = fmaxf(peak, peaks[c * b.queries + m]);
        UNROLL for (int k = 0; k < PREFETCH_SPLITS; k++) if (chunk + k < chunks) {
            const float weight = ex2_approx(peaks[(chunk + k) * b.queries + m] - peak);
            total += totals[(chunk + k) * b.queries + m] * weight;
            answer[0] += next[k].x * weight, answer[1] += next[k].y * weight;
            answer[2] += next[k].z * weight, answer[3] += next[k].w * weight;
        }
        chunk += PREFETCH_SPLITS;
        if (chunk < chunks) continue;
        const float share = 1.0f / total;
        UNROLL for (int k = 0; k < 4; k++) answer[k] *= share;
        if (IS_QUANTIZED(V_DTYPE)) hadamard(answer, lane);
        const u32 pairs[2] = {cvt_f16x2_f32(answer[0], answer[1]), cvt_f16x2_f32(answer[2], answer[3])};
        if (base + (int)threadIdx.x < fours) {
            if (b.job.out) *(uint2*)(b.out(m) + i % (HEAD_DIM / 4) * 4) = uint2{pairs[0], pairs[1]};
            UNROLL for (int k = 0; k < 4; k++)
                if (heir.words) store_prepacked(heir, places[k], (int)row, (u16)(pairs[k / 2] >> k % 2 * 16));
        }
        base += THREADS, chunk = 0, peak = NO_MAX, total = 0;
        UNROLL for (int k = 0; k < 4; k++) answer[k] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) paged_attn_decode(const __grid_constant__ AttnParams job) {
    extern __shared__ __align__(16) char space[];
    AttnSmem& memory = *(AttnSmem*)space;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    griddepcontrol_launch_dependents();
    const bool near = job.inside;
    const int busy = WARPS * QUERIES * 2 * 4 + QUERIES * HEAD_DIM * 2 + job.rooms * 4;  // bytes before what is left
    const BlockContext b(job, near ? (float*)(space + busy) : nullptr);
    const KvSplits& row = b.row;
    if (b.part >= row.workers(job.parts)) return;
    if (job.heir.words && threadIdx.x < GQA_GROUP * HEAD_DIM / 8) prefetch_l2(job.heir.places + b.h * GQA_GROUP * HEAD_DIM + threadIdx.x * 8);
    PadWriter gap;
    gap.find(job.heir, b.part ? 1 << 30 : blockIdx.x * THREADS + threadIdx.x);
    const int step = job.parts, pace = WARPS * KV_TILE, offset = warp * KV_TILE;
    int chunk = b.part;
    KvTile tile;
    int at = row.start(chunk) + offset;
    if (chunk < row.chunks - 1 && at < row.stop(chunk)) {
        const i64 home = KvTile::home(job, row.number, at, b.h);
        tile.load_keys(job, home, row.stop(chunk) - at, lane);
        tile.load_values(job, home, row.stop(chunk) - at, lane);
    }
    Rope turn;
    turn.load(job, row.number, threadIdx.x % HEAD_DIM, b.token(0));
    griddepcontrol_wait();
    gap.close(job.heir, gridDim.x * THREADS);
    load_queries(b, memory, turn, lane);
    if (b.part == row.host(job.parts)) {
        append_kv(b, memory, warp, lane);
        __syncthreads();
    }
    u32 q[N8_TILES][HEAD_DIM / 8];
    UNROLL for (int n = 0; n < N8_TILES; n++) load_q_fragments(b, memory, n * 8 + lane / 4, lane, q[n]);
    for (; chunk < row.chunks - 1; chunk += step) {
        Softmax mine;
        mine.clear();
        for (at = row.start(chunk) + offset; at < row.stop(chunk); at += pace) {
            int next = at + pace, end = row.stop(chunk);
            if (next >= end) next = row.start(chunk + step) + offset, end = row.stop(chunk + step);
            const bool more = next < end;
            const i64 home = more ? KvTile::home(job, row.number, next, b.h) : 0;
            float weight[KV_M16][N8_TILES][4];
            score(b, tile.keys, q, at, row.stop(chunk) - at, lane, weight);
            if (more) tile.load_keys(job, home, end - next, lane);
            mine.weigh(weight);
            mine.add(tile.values, weight);
            if (more) tile.load_values(job, home, end - next, lane);
        }
        store_split(b, memory, mine, chunk, warp, lane);
    }
    if (is_last_block(job, row)) combine_splits(b, memory, lane);
}
