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

#include "stored.h"

#ifndef EMULATED
DEVICE u32 transposed(u32 x) {  // of 8 × 8 halves
    u32 out; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x)); return out;
}
// What other thread blocks have left, or this one nearby.
DEVICE float left_there(const float* at) {
    float out; asm volatile("ld.relaxed.gpu.f32 %0, [%1];" : "=f"(out) : "l"(at)); return out;
}
DEVICE float4 left_there4(const float* at) {
    float4 out;
    asm volatile("ld.relaxed.gpu.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "l"(at));
    return out;
}
#endif

#define QUERIES (COLUMNS * 8)

// A warp's unfinished softmax: of queries 2c and 2c + 1 of each eight. Sums are a lane's own until the end.
struct Softmax {
    float peak[COLUMNS][2], total[COLUMNS][2], answer[COLUMNS][HEAD / 16][4];

    DEVICE void clear() {
        LOOP for (int n = 0; n < COLUMNS; n++) LOOP for (int i = 0; i < 2; i++) {
            peak[n][i] = NOTHING, total[n][i] = 0;
            LOOP for (int j = 0; j < HEAD / 16; j++) answer[n][j][i] = answer[n][j][i + 2] = 0;
        }
    }
    // Scores become weights, and the sums so far fade accordingly.
    DEVICE void weigh(float (&score)[STEPS][COLUMNS][4]) {
        LOOP for (int n = 0; n < COLUMNS; n++) {
            float fade[2];
            bool fades = false;
            LOOP for (int i = 0; i < 2; i++) {
                float top = peak[n][i];
                LOOP for (int s = 0; s < STEPS; s++) top = fmaxf(top, fmaxf(score[s][n][i], score[s][n][i + 2]));
                LOOP for (int other = 4; other < 32; other *= 2) top = fmaxf(top, exchange(top, other));
                fade[i] = power(peak[n][i] - top), fades |= top > peak[n][i], peak[n][i] = top, total[n][i] *= fade[i];
                LOOP for (int s = 0; s < STEPS; s++) LOOP for (int k = i; k < 4; k += 2) {
                    score[s][n][k] = power(score[s][n][k] - top);
                    total[n][i] += score[s][n][k];
                }
            }
            if (anybody(fades))
                LOOP for (int j = 0; j < HEAD / 16; j++) LOOP for (int k = 0; k < 4; k++) answer[n][j][k] *= fade[k % 2];
        }
    }
    DEVICE void add(const Couples<VALUES>::Lane (&values)[STEPS][4], const float (&weight)[STEPS][COLUMNS][4]) {
        LOOP for (int s = 0; s < STEPS; s++) {
            u32 b[COLUMNS][2], near[HEAD / 8], far[HEAD / 8];
            LOOP for (int n = 0; n < COLUMNS; n++) LOOP for (int i = 0; i < 2; i++)
                b[n][i] = transposed(as_halves(weight[s][n][i * 2], weight[s][n][i * 2 + 1]));
            Couples<VALUES>::unpack(values[s][0], values[s][1], near);
            Couples<VALUES>::unpack(values[s][2], values[s][3], far);
            LOOP for (int j = 0; j < HEAD / 16; j++) LOOP for (int n = 0; n < COLUMNS; n++)
                multiply_add(answer[n][j], near[2 * j], near[2 * j + 1], far[2 * j], far[2 * j + 1], b[n][0], b[n][1]);
        }
    }
};

// Four neighbours of a head, in or out of the space of rotated codes; 16 lanes have 64 of them.
DEVICE void rotate(float (&x)[4], int lane) {
    LOOP for (int k = 0; k < 2; k++) {
        const float one = x[k], other = x[k + 2];
        x[k] = one + other, x[k + 2] = one - other;
    }
    LOOP for (int away = 1; away < 16; away *= 2) LOOP for (int k = 0; k < 4; k++) {
        const float theirs = exchange(x[k], away);
        x[k] = lane & away ? theirs - x[k] : theirs + x[k];
    }
    LOOP for (int k = 0; k < 4; k++) x[k] *= 0.03125f;
}

// A thread block's view of the job: its row, its kv head, its queries, and where they leave what is unfinished.
struct Block {
    const Job& job;
    Row row;
    int h, query, queries, live, part;  // of the first query, of a full block, of this one
    float *peaks, *totals, *answers;

    DEVICE Block(const Job& given, float* near) : job(given) {
        const int all = job.tokens * SHARE, blocks = (all + QUERIES - 1) / QUERIES, x = blockIdx.x;
        h = x % KV, query = x / KV % blocks * QUERIES, part = blockIdx.y;
        queries = min(QUERIES, all), live = min(QUERIES, all - query);
        row.read(job, x / KV / blocks);
        const i64 size = job.slots * queries * (HEAD + 4);  // in fours
        answers = near ? near : job.left + x * size;
        peaks = answers + job.slots * queries * HEAD, totals = peaks + job.slots * queries;
    }
    DEVICE int token(int m) const { return (query + m) / SHARE; }
    DEVICE int head(int m) const { return h * SHARE + (query + m) % SHARE; }
    DEVICE u16* out(int m) const {
        return job.out + ((row.number * job.tokens + token(m)) * KV * SHARE + head(m)) * HEAD;
    }
    DEVICE bool sees(int m, int key) const {  // a stored token, by its place in the row
        bool seen = !job.window || row.behind + token(m) - key < job.window;
        if (MASKED) seen = seen && job.mask[row.number * job.mask_step + key];
        return seen;
    }
    DEVICE float bent(float score) const {
        return CAPPED ? tanhf(score * job.factor) * job.cap : score * job.factor;
    }
};

struct Memory {  // shared by a thread block
    float peaks[WARPS][QUERIES], totals[WARPS][QUERIES];
    u16 q[QUERIES][HEAD];
    float answers[1];  // (WARPS, queries, HEAD); also for queries and new heads as they come, and weights of chunks
};

// Queries, turned, into shared memory. Most of this code runs once, and comes slowly: it is kept short.
DEVICE void enter(const Block& b, Memory& memory, Turn turn, int lane) {
    const Job& job = b.job;
    u16 *came = (u16*)memory.answers, *plain = IN_CODES(KEYS) ? came + b.queries * HEAD : memory.q[0];
    for (int i = threadIdx.x; i < b.live * HEAD / 8; i += THREADS) {
        const int m = i / (HEAD / 8);
        const u16* head = job.q + b.row.number * job.q_row + b.token(m) * job.q_token + b.head(m) * HEAD;
        *(uint4*)(came + i * 8) = *(const uint4*)(head + i % (HEAD / 8) * 8);
    }
    __syncthreads();
    _Pragma("unroll 1") for (int i = threadIdx.x; i < b.live * HEAD; i += THREADS) {
        const int at = i % HEAD, token = b.token(i / HEAD);
        if (token != turn.token || THREADS % HEAD) turn.load(job, b.row.number, at, token);
        plain[i] = turn.apply(came + (i - at), at);
    }
    __syncthreads();
    if (!IN_CODES(KEYS)) return;
    const int fours = b.live * HEAD / 4;
    for (int i = threadIdx.x; i - lane < fours; i += THREADS) {  // whole warps
        const uint2 four = *(const uint2*)(plain + min(i, fours - 1) * 4);
        float x[4] = {as_float((u16)four.x), as_float((u16)(four.x >> 16)), as_float((u16)four.y), as_float((u16)(four.y >> 16))};
        rotate(x, lane);
        if (i < fours) *(uint2*)(memory.q[0] + i * 4) = uint2{as_halves(x[0], x[1]), as_halves(x[2], x[3])};
    }
    __syncthreads();
}

// The lane's part of a query, as the keys' numbers lie; zeros where there is none.
DEVICE void take(const Block& b, const Memory& memory, int m, int lane, u32 (&q)[HEAD / 8]) {
    LOOP for (int i = 0; i < HEAD / 8; i += 4) {
        uint4 eight = {};
        if (m < b.live) eight = *(const uint4*)(memory.q[m] + Pairs<KEYS>::Lane::place(lane % 4, Pairs<KEYS>::first(i)));
        const u32 low[2] = {eight.x, eight.y}, high[2] = {eight.z, eight.w};
        if (KEYS == 2) {
            LOOP for (int k = 0; k < 4; k++) q[i + k] = bytes(low[k / 2], high[k / 2], k % 2 ? 0x7632 : 0x5410);
        } else {
            LOOP for (int k = 0; k < 2; k++) q[i + k] = low[k], q[i + 2 + k] = high[k];
        }
    }
}

// q·k of a tile, bent, and hidden where nothing is to be seen; `left` tokens are there.
DEVICE void score(const Block& b, const Pairs<KEYS>::Lane (&keys)[STEPS][2], const u32 (&q)[COLUMNS][HEAD / 8], int tile,
                  int left, int lane, float (&out)[STEPS][COLUMNS][4]) {
    LOOP for (int s = 0; s < STEPS; s++) {
        u32 near[HEAD / 8], far[HEAD / 8];
        Pairs<KEYS>::unpack(keys[s][0], near);
        Pairs<KEYS>::unpack(keys[s][1], far);
        LOOP for (int n = 0; n < COLUMNS; n++) {
            float even[4] = {}, odd[4] = {};  // two chains, so that a product waits for the last but one
            LOOP for (int k = 0; k < HEAD / 8; k += 4) {
                multiply_add(even, near[k], far[k], near[k + 1], far[k + 1], q[n][k], q[n][k + 1]);
                multiply_add(odd, near[k + 2], far[k + 2], near[k + 3], far[k + 3], q[n][k + 2], q[n][k + 3]);
            }
            LOOP for (int i = 0; i < 4; i++) out[s][n][i] = b.bent(even[i] + odd[i]);
        }
    }
    if (left >= TILE && !b.job.window && !MASKED) return;
    LOOP for (int s = 0; s < STEPS; s++) LOOP for (int n = 0; n < COLUMNS; n++) LOOP for (int i = 0; i < 4; i++) {
        const int token = s * 16 + i / 2 * 8 + lane / 4, m = n * 8 + lane % 4 * 2 + i % 2;
        if (token >= left || !b.sees(m, tile + token)) out[s][n][i] = HIDDEN;
    }
}

// What the warps have of a chunk, added up in their order and left in memory.
DEVICE void leave(const Block& b, Memory& memory, Softmax& mine, int chunk, int warp, int lane) {
    LOOP for (int n = 0; n < COLUMNS; n++) LOOP for (int i = 0; i < 2; i++) {
        const int m = n * 8 + lane % 4 * 2 + i;
        LOOP for (int other = 4; other < 32; other *= 2) mine.total[n][i] += exchange(mine.total[n][i], other);
        if (lane < 4) memory.peaks[warp][m] = mine.peak[n][i], memory.totals[warp][m] = mine.total[n][i];
        if (m >= b.live) continue;
        float* to = memory.answers + (warp * b.queries + m) * HEAD;
        LOOP for (int e = 0; e < HEAD / 8; e += 4)
            *(float4*)(to + Couples<VALUES>::Lane::place(lane / 4, e)) =
                float4{mine.answer[n][e / 2][i], mine.answer[n][e / 2][i + 2], mine.answer[n][e / 2 + 1][i],
                       mine.answer[n][e / 2 + 1][i + 2]};
    }
    __syncthreads();
    float4* left = (float4*)(b.answers + (i64)chunk * b.queries * HEAD);
    for (int i = threadIdx.x; i < b.live * HEAD / 4; i += THREADS) {
        const int m = i / (HEAD / 4);
        float peak = NOTHING, total = 0;
        float4 answer = {};
        LOOP for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, memory.peaks[w][m]);
        LOOP for (int w = 0; w < WARPS; w++) {
            const float weight = power(memory.peaks[w][m] - peak);
            const float4 more = ((const float4*)memory.answers)[w * b.queries * (HEAD / 4) + i];
            total += memory.totals[w][m] * weight;
            answer.x += more.x * weight, answer.y += more.y * weight;
            answer.z += more.z * weight, answer.w += more.w * weight;
        }
        left[i] = answer;
        if (i % (HEAD / 4) == 0) b.peaks[chunk * b.queries + m] = peak, b.totals[chunk * b.queries + m] = total;
    }
    __syncthreads();
}

// The last chunk: new heads are stored, and seen as they came.
DEVICE void welcome(const Block& b, Memory& memory, int warp, int lane) {
    const Job& job = b.job;
    const int runs = HEAD / 64;
    u16* fresh = (u16*)memory.answers;  // (keys and values, tokens, HEAD)
    for (int item = warp; item < 2 * job.tokens * runs; item += WARPS) {
        const int run = item % runs, t = item / runs % job.tokens, slot = b.row.behind + t;
        const i64 page = job.table[b.row.number * job.table_step + slot / PAGE];
        const i64 home = (page * PAGE + slot % PAGE) * KV + b.h;
        const bool key = item < job.tokens * runs;
        float x[2];
        LOOP for (int i = 0; i < 2; i++) {
            const int number = run * 64 + lane * 2 + i;
            if (key) {
                Turn turn;
                turn.load(job, b.row.number, number, t);
                x[i] = as_float(turn.apply(job.k + b.row.number * job.k_row + t * job.k_token + b.h * HEAD, number));
            } else {
                x[i] = as_float(job.v[b.row.number * job.v_row + t * job.v_token + b.h * HEAD + number]);
            }
        }
        if (key) keep<KEYS>(x, job.key, job.key_scale, home, run, lane, b.query == 0);
        else keep<VALUES>(x, job.value, job.value_scale, home, run, lane, b.query == 0);
        ((u32*)fresh)[(item / runs * HEAD + run * 64) / 2 + lane] = as_halves(x[0], x[1]);
    }
    __syncthreads();
    const int chunk = b.row.chunks - 1;
    for (int m = warp; m < b.live; m += WARPS) {
        const int t = b.token(m);
        float peak = NOTHING, total = 0, answer[HEAD / 32] = {};
        for (int n = 0; n <= t; n++) {
            if (n < t && !b.sees(m, b.row.behind + n)) continue;
            const u16 *k = fresh + n * HEAD, *v = fresh + (job.tokens + n) * HEAD;
            float sum = 0;
            LOOP for (int i = 0; i < HEAD / 32; i++)
                sum += as_float(memory.q[m][i * 32 + lane]) * as_float(k[i * 32 + lane]);
            LOOP for (int other = 16; other; other /= 2) sum += exchange(sum, other);
            const float top = fmaxf(peak, b.bent(sum)), fade = power(peak - top), weight = power(b.bent(sum) - top);
            peak = top, total = total * fade + weight;
            LOOP for (int i = 0; i < HEAD / 32; i++) answer[i] = answer[i] * fade + weight * as_float(v[i * 32 + lane]);
        }
        LOOP for (int i = 0; i < HEAD / 32; i++)
            b.answers[((i64)chunk * b.queries + m) * HEAD + i * 32 + lane] = answer[i];
        if (lane == 0) b.peaks[chunk * b.queries + m] = peak, b.totals[chunk * b.queries + m] = total;
    }
}

// Whether this thread block is the last of those that share a row and a head.
DEVICE bool last(const Job& job, const Row& row) {
    const int workers = row.workers(job.parts);
    __shared__ int done;
    __syncthreads();
    if (workers == 1) return true;
    if (threadIdx.x == 0) {
        done = arrive(job.counts + blockIdx.x) + 1;
        if (done == workers) job.counts[blockIdx.x] = 0;
    }
    __syncthreads();
    return done == workers;
}

#define AHEAD 12  // chunks whose sums are on their way at once

// All chunks, added up in order; four numbers of a query at a time.
DEVICE void finish(const Block& b, Memory& memory, int lane) {
    const int chunks = b.row.chunks, count = chunks * b.queries, fours = b.live * HEAD / 4;
    float *peaks = memory.answers, *totals = peaks + count;
    float peak = NOTHING, total = 0, answer[4] = {};
    bool known = false;
    const Heir& heir = b.job.heir;
    for (int base = 0, chunk = 0; base < fours;) {  // which numbers, and the first of some chunks
        const int i = min(base + (int)threadIdx.x, fours - 1), m = i / (HEAD / 4);
        float4 next[AHEAD];
        LOOP for (int k = 0; k < AHEAD; k++) if (chunk + k < chunks)
            next[k] = left_there4(b.answers + ((chunk + k) * b.queries * (HEAD / 4) + i) * 4);
        const i64 row = b.row.number * b.job.tokens + b.token(m);
        uint4 places[4];
        LOOP for (int k = 0; k < 4; k++)
            if (heir.words && chunk + AHEAD >= chunks) places[k] = heir.places[b.head(m) * HEAD + i % (HEAD / 4) * 4 + k];
        if (!known) {
            for (int n = threadIdx.x; n < count; n += THREADS)
                peaks[n] = left_there(b.peaks + n), totals[n] = left_there(b.totals + n);
            __syncthreads();
            known = true;
        }
        if (chunk == 0) _Pragma("unroll 4") for (int c = 0; c < chunks; c++) peak = fmaxf(peak, peaks[c * b.queries + m]);
        LOOP for (int k = 0; k < AHEAD; k++) if (chunk + k < chunks) {
            const float weight = power(peaks[(chunk + k) * b.queries + m] - peak);
            total += totals[(chunk + k) * b.queries + m] * weight;
            answer[0] += next[k].x * weight, answer[1] += next[k].y * weight;
            answer[2] += next[k].z * weight, answer[3] += next[k].w * weight;
        }
        chunk += AHEAD;
        if (chunk < chunks) continue;
        const float share = 1.0f / total;
        LOOP for (int k = 0; k < 4; k++) answer[k] *= share;
        if (IN_CODES(VALUES)) rotate(answer, lane);
        const u32 pairs[2] = {as_halves(answer[0], answer[1]), as_halves(answer[2], answer[3])};
        if (base + (int)threadIdx.x < fours) {
            if (b.job.out) *(uint2*)(b.out(m) + i % (HEAD / 4) * 4) = uint2{pairs[0], pairs[1]};
            LOOP for (int k = 0; k < 4; k++)
                if (heir.words) hand(heir, places[k], (int)row, (u16)(pairs[k / 2] >> k % 2 * 16));
        }
        base += THREADS, chunk = 0, peak = NOTHING, total = 0;
        LOOP for (int k = 0; k < 4; k++) answer[k] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend(const __grid_constant__ Job job) {
    extern __shared__ __align__(16) char space[];
    Memory& memory = *(Memory*)space;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    let_go();
    const bool near = job.inside;
    const int busy = WARPS * QUERIES * 2 * 4 + QUERIES * HEAD * 2 + job.rooms * 4;  // bytes before what is left
    const Block b(job, near ? (float*)(space + busy) : nullptr);
    const Row& row = b.row;
    if (b.part >= row.workers(job.parts)) return;
    if (job.heir.words && threadIdx.x < SHARE * HEAD / 8) soon(job.heir.places + b.h * SHARE * HEAD + threadIdx.x * 8);
    Gap gap;
    gap.find(job.heir, b.part ? 1 << 30 : blockIdx.x * THREADS + threadIdx.x);
    const int step = job.parts, pace = WARPS * TILE, offset = warp * TILE;
    int chunk = b.part;
    Tile tile;
    int at = row.start(chunk) + offset;
    if (chunk < row.chunks - 1 && at < row.stop(chunk)) {
        const i64 home = Tile::home(job, row.number, at, b.h);
        tile.load_keys(job, home, row.stop(chunk) - at, lane);
        tile.load_values(job, home, row.stop(chunk) - at, lane);
    }
    Turn turn;
    turn.load(job, row.number, threadIdx.x % HEAD, b.token(0));
    await();
    gap.close(job.heir, gridDim.x * THREADS);
    enter(b, memory, turn, lane);
    if (b.part == row.host(job.parts)) {
        welcome(b, memory, warp, lane);
        __syncthreads();
    }
    u32 q[COLUMNS][HEAD / 8];
    LOOP for (int n = 0; n < COLUMNS; n++) take(b, memory, n * 8 + lane / 4, lane, q[n]);
    for (; chunk < row.chunks - 1; chunk += step) {
        Softmax mine;
        mine.clear();
        for (at = row.start(chunk) + offset; at < row.stop(chunk); at += pace) {
            int next = at + pace, end = row.stop(chunk);
            if (next >= end) next = row.start(chunk + step) + offset, end = row.stop(chunk + step);
            const bool more = next < end;
            const i64 home = more ? Tile::home(job, row.number, next, b.h) : 0;
            float weight[STEPS][COLUMNS][4];
            score(b, tile.keys, q, at, row.stop(chunk) - at, lane, weight);
            if (more) tile.load_keys(job, home, end - next, lane);
            mine.weigh(weight);
            mine.add(tile.values, weight);
            if (more) tile.load_values(job, home, end - next, lane);
        }
        leave(b, memory, mine, chunk, warp, lane);
    }
    if (last(job, row)) finish(b, memory, lane);
}
