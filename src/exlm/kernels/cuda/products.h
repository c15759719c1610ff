// A few rows of activations times packed matrices, straight from their codes: all but who multiplies what.
//
// The tensor cores do the sums: 16 outputs by 16 inputs of weights are the first operand of one mma, eight rows of
// activations the second. Weights lie in memory in bricks of 128 inputs by 16 outputs, codes as the lanes of the mma
// want them and scales behind (tiles.py). A warp copies bricks into shared memory, several ahead, and begins before
// the kernel that computes the activations has ended. The warps of a thread block share the inputs, and their sums are
// added in the order of the warps: a row's answer depends on nothing but the row.
//
// Activations enter in the order of the stored inputs and where lanes expect them. The tensor cores multiply them by
// 1024 + code, which costs nothing to make of a code, and by 1, and the surplus is taken off with the sums they get so.
// One row is prepared by every thread block for itself, while its first bricks are on their way;
// more of them once for all, by another kernel. Both are the same code and give the same bits.
//
// Set when compiling, besides what bricks.h wants: APART (the two matrices under one ACT have their inputs in orders of
// their own), INSIDE (x is one row, prepared here), ITEMS (eights of a row's inputs that a thread prepares), and where
// matrices of several widths take turns WIDTHS (bit n: there are codes of n bits; BITS has the widest).

#include "bricks.h"

#ifndef WIDTHS
#define WIDTHS 0
#endif

#define ANY 1  // for a width that is not known before the kernel runs
#define STAGE_BYTES (TILES * SLOT)
#define ENTRANCES (APART ? 2 : 1)
#define EARLY (!INSIDE && !APART && COLUMNS == 1)  // there are registers for rows on their way
#define HELD (COLUMNS > 1 ? 512 : 576)  // threads of a multiprocessor: fewer have more registers
#define RESIDENT (THREADS < HELD ? HELD / THREADS : 1)
#define RING (WARPS * STAGES * STAGE_BYTES)
#define SUMS (WARPS * TILES * 16 * COLUMNS * 8 * 4)
#define LEDGER_AT (RING > SUMS ? RING : SUMS)

typedef Ledger<EACH * 16, COLUMNS * 8> Book;

// The bricks of a matrix that a warp will send next: of those of a tile number `warp`, `warp` + WARPS, …
template <int BITS_> struct Stretch {
    const char* from;  // the next of the first tile
    int at, tile_bytes, bits;

    DEVICE Stretch(int width) : bits(BITS_ == ANY ? width : BITS_) {}
    DEVICE void enter(const Matrix& m, int tile, int first) {
        at = first;
        const bool fine = at < m.fines;
        const int brick = fine ? BRICK(bits, FINE) : BRICK(bits, STEPS);
        tile_bytes = (fine ? m.fines : m.bricks - m.fines) * brick;
        from = (fine ? m.fine : m.main) + (long)tile * tile_bytes + (long)(fine ? at : at - m.fines) * brick;
    }
    // On their way into shared memory; nothing if there are no more.
    DEVICE void send(const Matrix& m, int tile, int lane, u32 to) {
        if (at >= m.bricks) return;
        const int tiles = m.tiles - tile;
        const bool fine = at < m.fines;
        if (FINE != STEPS && fine) copy(BRICK(bits, FINE), tiles, lane, to);
        else copy(BRICK(bits, STEPS), tiles, lane, to);
        at += WARPS;
        if (fine && at >= m.fines) enter(m, tile, at);
        else from += WARPS * (fine ? BRICK(bits, FINE) : BRICK(bits, STEPS));
    }
    DEVICE void copy(int size, int tiles, int lane, u32 to) const {
        LOOP for (int t = 0; t < EACH; t++) if (t == 0 || t < tiles) {
            const char* piece = from + (long)t * tile_bytes + lane * 16;
            LOOP for (int i = 0; i < SLOT; i += 512)
                if (size - i >= 512 || lane * 16 < size - i) copy16(to + t * SLOT + i, piece + i);
        }
    }
};

// Activations as they enter a matrix.
struct Prepared {
    const uint4* words;
    int rows;
};

// A lane's part of the 128 inputs of a brick of some rows: two registers for each step.
struct Rows {
    uint4 words[COLUMNS][4];

    DEVICE void load(const Prepared& x, int brick, int lane) {
        const uint4 none = {0, 0, 0, 0};
        LOOP for (int c = 0; c < COLUMNS; c++) {
            const int row = c * 8 + lane / 4;
            LOOP for (int p = 0; p < 4; p++)
                words[c][p] = row < x.rows ? x.words[((brick * 4 + p) * x.rows + row) * 4 + lane % 4] : none;
        }
    }
    DEVICE uint2 step(int c, int number) const {
        const uint4 pair = words[c][number / 2];
        return number % 2 ? uint2{pair.z, pair.w} : uint2{pair.x, pair.y};
    }
};

// The sums of two rows' groups.
template <int STEPS_> struct Sums {
    float2 sum[COLUMNS][8 / STEPS_];

    DEVICE void count(const Rows& rows) {
        const u32 one = 0x3c003c00;
        LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int group = 0; group < 8 / STEPS_; group++) {
            float total[4] = {};
            LOOP for (int step = 0; step < STEPS_; step++) {
                const uint2 b = rows.step(c, group * STEPS_ + step);
                multiply_add(total, one, one, one, one, b.x, b.y);
            }
            sum[c][group] = float2{total[0], total[1]};
        }
    }
};

// Add bricks of several tiles times rows to the sums. Tiles take turns, and every second step has sums of its own: a
// tensor core is slow to answer and quick to be asked again.
template <int BITS_, int STEPS_>
DEVICE void consume(
    const char* from, const Rows& rows, const Sums<STEPS_>& sums, float (*total)[COLUMNS][4], int lane
) {
    constexpr int groups = 8 / STEPS_, chains = STEPS_ > 1 ? 2 : 1;
    const int odd = Width<BITS_>::odd;
    const float even_zero = ZEROS == 0 ? -1024.0f - (1 << (BITS_ - 1)) : -1024.0f;
    const float odd_zero = ZEROS == 0 ? -1024.0f - odd * (1 << (BITS_ - 1)) : -1024.0f;
    Brick<BITS_, STEPS_> bricks[EACH];
    Codes<BITS_> codes[EACH];
    LOOP for (int t = 0; t < EACH; t++) {
        bricks[t].template load<true>(from + t * SLOT, lane);
        codes[t] = bricks[t].codes();
    }
    LOOP for (int group = 0; group < groups; group++) {
        float part[EACH][chains][COLUMNS][4] = {};
        LOOP for (int step = 0; step < STEPS_; step++) LOOP for (int t = 0; t < EACH; t++) {
            u32 a[4];
            codes[t].template unpack<odd>(group * STEPS_ + step, a);
            LOOP for (int c = 0; c < COLUMNS; c++) {
                const uint2 b = rows.step(c, group * STEPS_ + step);
                multiply_add(part[t][step % chains][c], a[0], a[1], a[2], a[3], b.x, b.y);
            }
        }
        LOOP for (int t = 0; t < EACH; t++) {
            const u32* numbers = bricks[t].numbers + group;
            const u32 scales = numbers[0];
            const float scale[2] = {low_half(scales), high_half(scales) * (1.0f / odd)};
            float zero[2] = {even_zero, odd_zero};
            if (ZEROS == 2) {
                const u32 zeros = numbers[groups];  // -zero point
                zero[0] += low_half(zeros), zero[1] += high_half(zeros) * odd;
            }
            const u32 minima = MINIMA ? numbers[(TABLES - 1) * groups] : 0;  // -minimum
            LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int i = 0; i < 4; i++) {
                const float sum = i % 2 ? sums.sum[c][group].y : sums.sum[c][group].x;
                const float both = chains == 2 ? part[t][0][c][i] + part[t][1][c][i] : part[t][0][c][i];
                float& to = total[t][c][i];
                to = fmaf(scale[i / 2], fmaf(zero[i / 2], sum, both), to);
                if (MINIMA) to = fmaf(i / 2 ? high_half(minima) : low_half(minima), sum, to);
            }
        }
    }
}

// The same, of codes of a width that may be known only here.
template <int BITS_, int STEPS_, class... Others> DEVICE void consume_any(int width, Others&... others) {
    if (BITS_ != ANY) consume<BITS_ == ANY ? 2 : BITS_, STEPS_>(others...);
    else if (WIDTHS >> 2 & 1 && width == 2) consume<2, STEPS_>(others...);
    else if (WIDTHS >> 3 & 1 && width == 3) consume<3, STEPS_>(others...);
    else if (WIDTHS >> 4 & 1 && width == 4) consume<4, STEPS_>(others...);
    else if (WIDTHS >> 5 & 1 && width == 5) consume<5, STEPS_>(others...);
    else if (WIDTHS >> 6 & 1 && width == 6) consume<6, STEPS_>(others...);
    else if (WIDTHS >> 8 & 1) consume<8, STEPS_>(others...);
}

// The bricks of one matrix, or of two that share their inputs; `widths` are a nibble each.
template <int FIRST, int SECOND, int STEPS_>
DEVICE void work(const char* slots, const Rows& rows, float (*total)[COLUMNS][4], int lane, int widths) {
    Sums<STEPS_> sums;
    sums.count(rows);
    consume_any<FIRST, STEPS_>(widths & 15, slots, rows, sums, total, lane);
    if (SECOND) {
        const char* others = slots + EACH * SLOT;
        float (*more)[COLUMNS][4] = total + EACH;
        consume_any<SECOND ? SECOND : 2, STEPS_>(widths >> 4, others, rows, sums, more, lane);
    }
}
template <int FIRST, int SECOND>
DEVICE void work(
    const Matrix& m, int brick, const char* slots, const Rows& rows, float (*total)[COLUMNS][4], int lane, int widths
) {
    if (FINE != STEPS && brick < m.fines) work<FIRST, SECOND, FINE>(slots, rows, total, lane, widths);
    else work<FIRST, SECOND, STEPS>(slots, rows, total, lane, widths);
}

// What is added to the answers of a thread block, fetched long before it is needed.
struct Added {
    static const int most = (EACH * 16 * (INSIDE ? 1 : COLUMNS * 8) + THREADS - 1) / THREADS;  // answers of a thread
    float bias[most][SIDES], rest[most];

    DEVICE void load(const Job& job, int at, int tile) {
        LOOP for (int n = 0; n < most; n++) {
            const int i = n * THREADS + threadIdx.x, row = i % job.rows, output = tile * 16 + i / job.rows;
            const bool there = i < EACH * 16 * job.rows && output < job.parts[at].outputs;
            LOOP for (int s = 0; s < SIDES; s++) {
                const u16* added = job.parts[at + s].bias;
                bias[n][s] = there && added ? as_float(added[output]) : 0.0f;
            }
            rest[n] = there && job.residual ? as_float(job.residual[(long)row * job.parts[at].stride + output]) : 0.0f;
        }
    }
};

// x as matrices want it, in shared memory; the warps' first bricks are on their way meanwhile.
DEVICE void prepare_here(const Job& job, int at, int tile, char* memory, Prepared* x, Added& added) {
    u16* raw = (u16*)memory;
    float* squares = (float*)(raw + job.inputs + BEHIND);
    char* here = memory + ((job.inputs + BEHIND) * 2 + (job.inputs + 255) / 256 * 4 + 15) / 16 * 16;
    Item items[ITEMS];
    LOOP for (int i = 0; i < ITEMS; i++) items[i].load(job, job.parts[at], i * THREADS + threadIdx.x);
    await();
    let_go();  // not before: the next matrix's first bricks would be in the way of this one's
    added.load(job, at, tile);
    fetch(job, 0, raw, squares, WARPS);
    __syncthreads();
    const float measure = measured(job, squares);
    LOOP for (int e = 0; e < ENTRANCES; e++) {
        const Part& part = job.parts[at + e];
        uint4* words = (uint4*)here;
        if (e) LOOP for (int i = 0; i < ITEMS; i++) items[i].load(job, part, i * THREADS + threadIdx.x);
        LOOP for (int i = 0; i < ITEMS; i++) items[i].put(job, part, i * THREADS + threadIdx.x, 0, raw, measure, words);
        x[e] = {words, 1};
        here += part.matrix.bricks * 256;
    }
    __syncthreads();
}

// One warp's sums for the tiles of its thread block; of matrix `at`, and under an ACT of the next.
template <int FIRST, int SECOND>
DEVICE void sum_up(
    const Job& job, int at, int tile, char* memory, float (*total)[COLUMNS][4], Added& added, const Link* link, int widths = 0
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Matrix &first = job.parts[at].matrix, &second = job.parts[at + SIDES - 1].matrix;
    const char* own = memory + warp * (STAGES * STAGE_BYTES);
    const u32 ring = shared_address(own) + lane * 16;
    Stretch<FIRST> some(widths & 15);
    Stretch<SECOND ? SECOND : 2> others(widths >> 4);
    some.enter(first, tile, warp);
    if (SECOND) others.enter(second, tile, warp);
    auto send = [&](u32 to) {
        some.send(first, tile, lane, to);
        if (SECOND) others.send(second, tile, lane, to + EACH * SLOT);
        close_group();
    };
    Book* book = (Book*)(memory + LEDGER_AT);
    if (HEIR) book->send(link->heir, tile * 16, job.parts[at].outputs);
    LOOP for (int stage = 0; stage < STAGES - 1; stage++) send(ring + stage * STAGE_BYTES);
    Prepared x[ENTRANCES];
    Squares<32> squares;
    if (INSIDE) {
        prepare_here(job, at, tile, memory + WARPS * STAGES * STAGE_BYTES, x, added);
    } else {
        await();
        let_go();
        if (HANDED && NORM) squares.ask(job, *link);
        added.load(job, at, tile);
        LOOP for (int e = 0; e < ENTRANCES; e++) x[e] = {job.parts[at + e].entrance.words, job.rows};
    }
    int stage = 0, before = (STAGES - 1) * STAGE_BYTES;  // where bricks are, and where there is room for more
    const int most = APART ? max(first.bricks, second.bricks) : first.bricks;
    Rows rows, next;  // those that are far away are fetched a round ahead
    if (EARLY && warp < most) next.load(x[0], warp, lane);
    if (HANDED && NORM) squares.find(job, *link, book->measures);
    for (int brick = warp; brick < most; brick += WARPS) {
        if (EARLY) rows = next;
        if (EARLY && brick + WARPS < most) next.load(x[0], brick + WARPS, lane);
        wait_groups<STAGES - 2>();
        __syncwarp();  // a lane reads what others copied, and overwrites what others have read
        send(ring + before);
        const char* slots = own + stage;
        if (APART) {
            constexpr int bits = SECOND ? SECOND : 2;
            if (brick < first.bricks) rows.load(x[0], brick, lane), work<FIRST, 0>(first, brick, slots, rows, total, lane, widths);
            if (brick < second.bricks) {
                rows.load(x[ENTRANCES - 1], brick, lane);
                work<bits, 0>(second, brick, slots + EACH * SLOT, rows, total + EACH, lane, widths >> 4);
            }
        } else {
            if (!EARLY) rows.load(x[0], brick, lane);
            work<FIRST, SECOND>(first, brick, slots, rows, total, lane, widths);
        }
        before = stage, stage = stage + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    }
    wait_groups<0>();
}

// The sums of a thread block's squares; of each row in one and the same order.
DEVICE void leave_squares(const Job& job, const Heir& heir, float* found, const float (&kept)[Added::most]) {
    const int lane = threadIdx.x % 32, outputs = EACH * 16;
    if (job.rows == 1 && outputs <= 32) {  // the first warp has them all
        float sum = kept[0] * kept[0];
        LOOP for (int other = 16; other; other /= 2) sum += exchange(sum, other);
        if (threadIdx.x == 0) heir.squares[blockIdx.x] = sum;
        return;
    }
    __syncthreads();  // all have added up
    LOOP for (int n = 0; n < Added::most; n++) {
        const int i = n * THREADS + threadIdx.x;
        if (i < outputs * job.rows) found[i] = kept[n];
    }
    __syncthreads();
    for (int row = threadIdx.x / 32; row < job.rows; row += WARPS) {
        float sum = 0;
        for (int output = lane; output < outputs; output += 32) {
            const float number = found[output * job.rows + row];
            sum = fmaf(number, number, sum);
        }
        LOOP for (int other = 16; other; other /= 2) sum += exchange(sum, other);
        if (lane == 0) heir.squares[row * heir.shares + blockIdx.x] = sum;
    }
}

// A thread block's tiles: the sums of its warps, added up, and what is done with them. `widths`, a nibble for each side,
// are heeded if there are WIDTHS.
DEVICE void product(const Job& job, char* memory, const Link* link, int widths = 0) {
    int at = 0;
    if (!ACT) while (at + 1 < PARTS && blockIdx.x >= job.parts[at + 1].first) at++;
    const Part& part = job.parts[at];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = (blockIdx.x - part.first) * EACH;
    float total[TILES][COLUMNS][4] = {};
    Added added;
    Gap gap;
    if (HEIR) gap.find(link->heir, blockIdx.x * THREADS + threadIdx.x);
    if (WIDTHS) sum_up<ANY, ACT ? ANY : 0>(job, at, tile, memory, total, added, link, widths);
    else if (ACT) sum_up<BITS_OF(0), ACT ? BITS_OF(1) : 0>(job, at, tile, memory, total, added, link);
    else if (one_width() || at == 0) sum_up<BITS_OF(0), 0>(job, at, tile, memory, total, added, link);
    else if (PARTS == 2 || at == 1) sum_up<BITS_OF(PARTS > 1 ? 1 : 0), 0>(job, at, tile, memory, total, added, link);
    else sum_up<BITS_OF(PARTS > 2 ? 2 : 0), 0>(job, at, tile, memory, total, added, link);
    __syncthreads();
    float* found = (float*)memory;  // (warp, tile, output, row)
    LOOP for (int t = 0; t < TILES; t++) LOOP for (int c = 0; c < COLUMNS; c++) LOOP for (int i = 0; i < 4; i++) {
        const int row = c * 8 + lane % 4 * 2 + i % 2;
        if (row < job.rows) found[((warp * TILES + t) * 16 + lane / 4 + i / 2 * 8) * job.rows + row] = total[t][c][i];
    }
    __syncthreads();
    const Book* book = (const Book*)(memory + LEDGER_AT);
    float kept[Added::most] = {};
    LOOP for (int n = 0; n < Added::most; n++) {
        const int i = n * THREADS + threadIdx.x, row = i % job.rows, output = tile * 16 + i / job.rows;
        if (i >= EACH * 16 * job.rows || output >= part.outputs) continue;
        const float measure = HANDED && NORM ? book->measures[row] : 1.0f;
        float answer[SIDES];
        LOOP for (int s = 0; s < SIDES; s++) {
            float sum = 0;
            LOOP for (int w = 0; w < WARPS; w++) sum += found[(w * TILES + s * EACH) * 16 * job.rows + i];
            answer[s] = sum * job.parts[at + s].matrix.factor * measure + added.bias[n][s];
        }
        const float y = ACT ? bent(answer[0]) * answer[SIDES - 1] : answer[0];
        const u16 half = as_half(y + added.rest[n]);
        if (FULL) ((float*)part.y)[(long)row * part.stride + output] = y + added.rest[n];
        else if (!HEIR || part.y) part.y[(long)row * part.stride + output] = half;
        if (!HEIR) continue;
        kept[n] = as_float(half);
        hand(link->heir, book->places[i / job.rows], row, book->normed(link->heir, i / job.rows, kept[n]));
    }
    if (!HEIR) return;
    gap.close(link->heir, gridDim.x * THREADS);
    if (link->heir.squares) leave_squares(job, link->heir, found, kept);
}
