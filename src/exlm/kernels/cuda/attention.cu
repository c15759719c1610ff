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

#include "pages.h"

#ifndef EMULATED
DEVICE u32 transposed(u32 x) {  // of 8 × 8 halves
    u32 out; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x)); return out;
}
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

#define QUERIES (COLUMNS * 8)
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

// Number `number` of a head in or out of the space of rotated codes.
template <class Read> DEVICE float rotated(int number, Read read) {
    float sum = 0;
    LOOP for (int i = 0; i < 32; i++) {
        const float x = read(number / 64 * 64 + 2 * i + number % 2);
        sum += __popc(i & (number / 2 % 32)) % 2 ? -x : x;
    }
    return sum * 0.03125f;
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
    float answers[1];  // (WARPS, queries, HEAD); also for new heads, and for queries and answers being rotated
};

// Queries, turned, into shared memory; zeros where there are none. All are on their way before the first is turned.
DEVICE void enter(const Block& b, Memory& memory, Turn turn) {
    const Job& job = b.job;
    const int each = (QUERIES * HEAD + THREADS - 1) / THREADS;
    u16* plain = IN_CODES(KEYS) ? (u16*)memory.answers : memory.q[0];
    u16 own[each], partner[each];
    LOOP for (int n = 0; n < each; n++) {
        const int i = n * THREADS + threadIdx.x, m = i / HEAD;
        own[n] = partner[n] = 0;
        if (i >= QUERIES * HEAD || m >= b.live) continue;
        const int at = i % HEAD;
        const u16* head = job.q + b.row.number * job.q_row + b.token(m) * job.q_token + b.head(m) * HEAD;
        own[n] = head[at];
        const int other = Turn::other(job, at);
        if (other >= 0) partner[n] = head[other];
    }
    LOOP for (int n = 0; n < each; n++) {
        const int i = n * THREADS + threadIdx.x, m = i / HEAD;
        if (i >= QUERIES * HEAD) continue;
        if (m >= b.live) {
            memory.q[m][i % HEAD] = 0;
            continue;
        }
        const int at = i % HEAD;
        if (b.token(m) != turn.token || THREADS % HEAD) turn.load(job, b.row.number, at, b.token(m));
        plain[i] = turn.turned(own[n], partner[n]);
    }
    __syncthreads();
    if (IN_CODES(KEYS)) {
        for (int i = threadIdx.x; i < b.live * HEAD; i += THREADS)
            memory.q[i / HEAD][i % HEAD] =
                as_half(rotated(i % HEAD, [=](int other) { return as_float(plain[i / HEAD * HEAD + other]); }));
        __syncthreads();
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
    for (int i = threadIdx.x; i < b.live * HEAD; i += THREADS) {
        const int m = i / HEAD;
        float peak = NOTHING, total = 0, answer = 0;
        LOOP for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, memory.peaks[w][m]);
        LOOP for (int w = 0; w < WARPS; w++) {
            const float weight = power(memory.peaks[w][m] - peak);
            total += memory.totals[w][m] * weight;
            answer += memory.answers[w * b.queries * HEAD + i] * weight;
        }
        b.answers[(i64)chunk * b.queries * HEAD + i] = answer;
        if (i % HEAD == 0) b.peaks[chunk * b.queries + m] = peak, b.totals[chunk * b.queries + m] = total;
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

// What other thread blocks have left, or this one nearby.
template <class T> DEVICE T left_there(const T* at, bool near) { return near ? *at : __ldcg(at); }

// All chunks, added up in order; four numbers of a head at a time.
DEVICE void finish(const Block& b, Memory& memory, bool near) {
    for (int i = threadIdx.x; i < b.live * HEAD / 4; i += THREADS) {
        const int m = i / (HEAD / 4), number = i % (HEAD / 4) * 4;
        float peak = NOTHING, total = 0, answer[4] = {};
        _Pragma("unroll 8") for (int c = 0; c < b.row.chunks; c++) {
            const float next = left_there(b.peaks + c * b.queries + m, near), top = fmaxf(peak, next);
            const float fade = power(peak - top), weight = power(next - top);
            const float4 more = left_there((const float4*)(b.answers + (i64)c * b.queries * HEAD) + i, near);
            total = total * fade + left_there(b.totals + c * b.queries + m, near) * weight;
            answer[0] = answer[0] * fade + more.x * weight, answer[1] = answer[1] * fade + more.y * weight;
            answer[2] = answer[2] * fade + more.z * weight, answer[3] = answer[3] * fade + more.w * weight;
            peak = top;
        }
        LOOP for (int k = 0; k < 4; k++) answer[k] /= total;
        if (IN_CODES(VALUES)) *(float4*)(memory.answers + i * 4) = float4{answer[0], answer[1], answer[2], answer[3]};
        else *(uint2*)(b.out(m) + number) = uint2{as_halves(answer[0], answer[1]), as_halves(answer[2], answer[3])};
    }
    if (!IN_CODES(VALUES)) return;
    __syncthreads();
    for (int i = threadIdx.x; i < b.live * HEAD; i += THREADS) {
        const int m = i / HEAD, number = i % HEAD;
        const float* whole = memory.answers + m * HEAD;
        b.out(m)[number] = as_half(rotated(number, [=](int other) { return whole[other]; }));
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
    enter(b, memory, turn);
    if (b.part == row.host(job.parts)) {
        welcome(b, memory, warp, lane);
        __syncthreads();
    }
    u32 q[COLUMNS][HEAD / 8];
    LOOP for (int n = 0; n < COLUMNS; n++) LOOP for (int i = 0; i < HEAD / 8; i++) {
        const u16* from = memory.q[n * 8 + lane / 4];
        q[n][i] = from[Pairs<KEYS>::Lane::place(lane % 4, Pairs<KEYS>::first(i))] |
                  (u32)from[Pairs<KEYS>::Lane::place(lane % 4, Pairs<KEYS>::second(i))] << 16;
    }
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
    if (last(job, row)) finish(b, memory, near);
}
