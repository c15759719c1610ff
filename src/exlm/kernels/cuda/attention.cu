// Attention of a few new tokens over pages of keys and values, from floats or from codes, in one launch.
//
// A row's past is cut into chunks by its length alone. Thread blocks of one (row, kv head) share the chunks, each
// leaves its softmax unfinished in memory, and the block that is done last adds the chunks up in order: so a row's
// answer is the same, bit for bit, in any batch and for any number of thread blocks. A chunk of the smallest size is
// one warp's, and no warp waits for another; longer ones are shared by the warps of a block. The new tokens are the
// last chunk, seen as they came; its block turns the keys and writes them and the values to their pages.
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
// Set when compiling: HEAD (64 or 128), KV (heads of a token), SHARE (query heads of each), PAGE (its tokens), KEYS and
// VALUES (0: float16, 1: rotated codes of 8 bits, 2: of 4 bits, 3: the upper bytes of float16), COLUMNS (queries / 8 that a block takes), WARPS, STEPS (sixteens of tokens in a tile),
// RESIDENT (thread blocks of a multiprocessor), UNIT (the smallest chunk), SLOTS (the most chunks, but for powers of
// two), ALONE (chunks of the smallest size are one warp's), CAPPED, MASKED.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define LOOP _Pragma("unroll")

#ifndef EMULATED  // tests bring their own of these to run the kernel on a processor
#define DEVICE __device__ __forceinline__
DEVICE u32 pick(u32 word, u32 mask, u32 rest) {  // (word & mask) | rest
    u32 out; asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(rest)); return out;
}
DEVICE u32 add2(u32 a, u32 b) { u32 out; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); return out; }
DEVICE u32 mul2(u32 a, u32 b) { u32 out; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); return out; }
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    u32 out; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c)); return out;
}
DEVICE u32 bytes(u32 a, u32 b, u32 choice) { return __byte_perm(a, b, choice); }
DEVICE float as_float(u16 half) { float out; asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half)); return out; }
DEVICE u16 as_half(float number) { u16 out; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(number)); return out; }
DEVICE u32 as_halves(float low, float high) {
    u32 out; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low)); return out;
}
DEVICE float power(float x) { float out; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x)); return out; }
DEVICE float exchange(float x, int distance) { return __shfl_xor_sync(~0u, x, distance); }
DEVICE bool anybody(bool x) { return __any_sync(~0u, x); }
DEVICE u32 transposed(u32 x) {  // of 8 × 8 halves
    u32 out; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x)); return out;
}
DEVICE void multiply_add(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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
DEVICE int arrive(int* at) {  // counts; what was written before it is seen by who arrives later
    int out; asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(out) : "l"(at) : "memory"); return out;
}
DEVICE void let_go() {  // the next kernel may start
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void await() {  // the kernel before has ended
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

struct Job {
    const u16 *q, *k, *v;        // new heads, side by side in a token
    char *key, *value;           // (page, token, kv head, number)
    u16 *key_scale, *value_scale;
    const i64 *table, *past, *positions;
    const float *cos, *sin;      // (position, dim / 2)
    const int* planes;           // which plane of positions each column follows; null: there is one
    const u8* mask;              // zero hides a key
    float* left;                 // (row, block of queries, kv head) of unfinished chunks
    int* counts;                 // thread blocks that are done; zero before and after
    u16* out;                    // (row, token, head, number)
    i64 table_step, mask_step, q_row, q_token, k_row, k_token, v_row, v_token, place_row, place_token, place_plane;
    int tokens, parts, slots, dim, pairs, window;
    int inside, rooms;           // whether a block leaves its chunks nearby, behind so many floats for the warps
    float factor, cap;           // on q·k, and on the bent score
};

#define THREADS (WARPS * 32)
#define QUERIES (COLUMNS * 8)
#define TILE (STEPS * 16)
#define NOTHING -1.0e30f  // a peak below every score
#define HIDDEN -1.0e38f   // a score below every peak
#define IN_CODES(coding) ((coding) == 1 || (coding) == 2)

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

// Where a row stands, and how its past is cut.
struct Row {
    i64 number;
    int behind, first, size, chunks;  // the last chunk is the new tokens
    bool alone;                       // a chunk is one warp's
    int crowd;                        // chunks that a thread block has at a time

    DEVICE void read(const Job& job, i64 row) {
        number = row, behind = (int)job.past[row];
        first = job.window ? max(behind - job.window + 1, 0) / 64 * 64 : 0;
        size = UNIT;
        while (size * SLOTS < behind - first) size *= 2;
        chunks = (behind - first + size - 1) / size + 1;
        alone = ALONE && size == UNIT, crowd = alone ? WARPS : 1;
    }
    // The thread block of the new tokens, among so many, and how many of them have work.
    DEVICE int turns() const { return (chunks - 1 + crowd - 1) / crowd; }
    DEVICE int host(int parts) const { return turns() % parts; }
    DEVICE int workers(int parts) const { return min(parts, turns() + 1); }
    DEVICE int start(int chunk) const { return first + chunk * size; }
    DEVICE int stop(int chunk) const { return min(start(chunk) + size, behind); }
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

// One number of a new head, turned by its token's position.
struct Turn {
    int column, partner, token;
    float cos, sin;

    DEVICE void load(const Job& job, i64 row, int number, int at) {
        const int half = job.dim / 2;
        token = at, partner = -1;
        if (number >= job.dim) return;
        const bool low = job.pairs ? number % 2 == 0 : number < half;
        column = job.pairs ? number / 2 : low ? number : number - half;
        partner = other(job, number);
        const i64 plane = job.planes ? job.planes[column] : 0;
        const i64 where = job.positions[row * job.place_row + at * job.place_token + plane * job.place_plane];
        cos = job.cos[where * half + column], sin = job.sin[where * half + column];
        if (low) sin = -sin;
    }
    static DEVICE int other(const Job& job, int number) {  // the number it is turned with, below zero: none
        const int half = job.dim / 2;
        return number >= job.dim ? -1 : job.pairs ? number ^ 1 : number < half ? number + half : number - half;
    }
    DEVICE u16 turned(u16 own, u16 other) const {
        return partner < 0 ? own : as_half(as_float(own) * cos + as_float(other) * sin);
    }
    DEVICE u16 apply(const u16* head, int number) const {
        return turned(head[number], partner < 0 ? 0 : head[partner]);
    }
};

DEVICE float clamped(float x) { return as_float(as_half(fminf(fmaxf(x, -65504.0f), 65504.0f))); }

// A warp's 64 numbers of a new head as the pages want them: each lane brings two and gets them back as they are stored,
// rotated but not rounded to codes.
template <int CODING> DEVICE void keep(float (&x)[2], char* stored, u16* scales, i64 home, int run, int lane, bool write) {
    if (CODING == 0) {
        if (write) ((u32*)stored)[home * (HEAD / 2) + run * 32 + lane] = as_halves(x[0], x[1]);
        return;
    }
    LOOP for (int i = 0; i < 2; i++) x[i] = clamped(x[i]);
    if (CODING == 3) {
        const u32 code = as_halves(x[0], x[1]);
        if (write) ((u16*)stored)[home * (HEAD / 2) + run * 32 + lane] = (u16)bytes(code, 0, 0x4431);
        return;
    }
    LOOP for (int other = 1; other < 32; other *= 2) LOOP for (int i = 0; i < 2; i++) {
        const float theirs = exchange(x[i], other);
        x[i] = clamped(lane & other ? theirs - x[i] : x[i] + theirs);
    }
    const float centre = CODING == 1 ? 128 : 8;
    float peak = fmaxf(fabsf(x[0]), fabsf(x[1]));
    LOOP for (int other = 1; other < 16; other *= 2) peak = fmaxf(peak, exchange(peak, other));
    u32 code[2];
    LOOP for (int i = 0; i < 2; i++) {
        const float share = as_float(as_half(x[i] / (peak == 0 ? 1.0f : peak)));
        const float level = rintf(as_float(as_half(share * centre + centre)));
        code[i] = peak == 0 ? 0 : (u32)fminf(fmaxf(level, 0.0f), 2 * centre - 1);
    }
    if (!write) return;
    if (CODING == 1) ((u16*)stored)[home * (HEAD / 2) + run * 32 + lane] = (u16)(code[0] | code[1] << 8);
    if (CODING == 2) ((u8*)stored)[home * (HEAD / 2) + run * 32 + lane] = (u8)(code[0] | code[1] << 4);
    if (lane % 16 == 0) scales[home * (HEAD / 32) + run * 2 + lane / 16] = as_half(peak / centre);
}

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

// What a warp has of a chunk of its own, left in memory.
DEVICE void leave_alone(const Block& b, Softmax& mine, int chunk, int lane) {
    LOOP for (int n = 0; n < COLUMNS; n++) LOOP for (int i = 0; i < 2; i++) {
        const int m = n * 8 + lane % 4 * 2 + i;
        LOOP for (int other = 4; other < 32; other *= 2) mine.total[n][i] += exchange(mine.total[n][i], other);
        if (m >= b.live) continue;
        const int at = chunk * b.queries + m;
        if (lane < 4) b.peaks[at] = mine.peak[n][i], b.totals[at] = mine.total[n][i];
        LOOP for (int e = 0; e < HEAD / 8; e += 4)
            *(float4*)(b.answers + (i64)at * HEAD + Couples<VALUES>::Lane::place(lane / 4, e)) =
                float4{mine.answer[n][e / 2][i], mine.answer[n][e / 2][i + 2], mine.answer[n][e / 2 + 1][i],
                       mine.answer[n][e / 2 + 1][i + 2]};
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

// Whether this thread block is the last of those that share the row and the head.
DEVICE bool last(const Block& b) {
    const int workers = b.row.workers(b.job.parts);
    __shared__ int done;
    __syncthreads();
    if (workers == 1) return true;
    if (threadIdx.x == 0) {
        done = arrive(b.job.counts + blockIdx.x) + 1;
        if (done == workers) b.job.counts[blockIdx.x] = 0;
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
    const int step = job.parts * row.crowd, pace = (row.alone ? 1 : WARPS) * TILE, offset = row.alone ? 0 : warp * TILE;
    int chunk = row.alone ? b.part * WARPS + warp : b.part;
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
        if (row.alone) leave_alone(b, mine, chunk, lane);
        else leave(b, memory, mine, chunk, warp, lane);
    }
    if (last(b)) finish(b, memory, near);
}
