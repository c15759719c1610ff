// Paged attention of a few new tokens (decode, speculative verification) for grouped-query heads: RoPE, the append to
// the KV cache, and attention in one launch.
//
// Flash-decoding: a row's past is split by its length alone (KvSplits). The thread blocks of one (row, kv head, block
// of queries) share the splits; each leaves an unfinished softmax per split (m, l, unnormalised output), and the
// block that arrives last combines them in order. So a row's output is the same bits in any batch and for any number
// of blocks. The warps of a block take turns with the KV tiles of a split. The new tokens are the last split, in
// float32 and unrounded; its block applies RoPE to their keys and appends them to the pages.
//
// Both products are mma.m16n8k16: S = K Q^T (tokens by queries) and O = V^T P (numbers by queries), so keys and
// values go from memory directly into A registers (kv_fragments.h), the next tile while one is worked on. Hadamard
// codes are never transformed back: queries are transformed instead, and the output once at the end.
//
// PDL: lengths and page tables are read while the kernel before still runs, so that must not be one that writes them.
// Block 0 of every row has work and waits for the kernel before, so a kernel that waits for this one waits for both.
//
// Set when compiling, besides what kv_page.h wants: GQA_GROUP (query heads of a kv head), N8_TILES (n8 tiles of
// queries that a block takes), KV_M16 (16 tokens each: blocks of a KV tile).

#include "kv_fragments.h"

#define QUERIES (N8_TILES * 8)

// A warp's online softmax: m (running maximum, base-2 scores), l (sum) and o of queries 2c and 2c + 1 of each n8
// tile. l and o are of the lane's own tokens until the end.
struct OnlineSoftmax {
    float m[N8_TILES][2], l[N8_TILES][2], o[N8_TILES][HEAD_DIM / 16][4];

    DEVICE void clear() {
        UNROLL
        for (int n = 0; n < N8_TILES; n++) {
            UNROLL
            for (int i = 0; i < 2; i++) {
                m[n][i] = NO_MAX;
                l[n][i] = 0;
                UNROLL
                for (int j = 0; j < HEAD_DIM / 16; j++) o[n][j][i] = o[n][j][i + 2] = 0;
            }
        }
    }
    // Scores of a tile become weights; what is there is rescaled to the new maximum.
    DEVICE void update(float (&score)[KV_M16][N8_TILES][4]) {
        UNROLL
        for (int n = 0; n < N8_TILES; n++) {
            float rescale[2];
            bool changed = false;
            UNROLL
            for (int i = 0; i < 2; i++) {
                float top = m[n][i];
                UNROLL
                for (int s = 0; s < KV_M16; s++) top = fmaxf(top, fmaxf(score[s][n][i], score[s][n][i + 2]));
                UNROLL
                for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, shfl_xor(top, mask));
                rescale[i] = ex2_approx(m[n][i] - top);
                changed |= top > m[n][i];
                m[n][i] = top;
                l[n][i] *= rescale[i];
                UNROLL
                for (int s = 0; s < KV_M16; s++) {
                    UNROLL
                    for (int k = i; k < 4; k += 2) {
                        score[s][n][k] = ex2_approx(score[s][n][k] - top);
                        l[n][i] += score[s][n][k];
                    }
                }
            }
            if (vote_any(changed)) {
                UNROLL
                for (int j = 0; j < HEAD_DIM / 16; j++) {
                    UNROLL
                    for (int k = 0; k < 4; k++) o[n][j][k] *= rescale[k % 2];
                }
            }
        }
    }
    // o += V^T P; P's D registers become B registers by a transposition of 8 x 8 matrices.
    DEVICE void add_values(
        const VFragments<V_DTYPE>::Lane (&values)[KV_M16][4], const float (&weight)[KV_M16][N8_TILES][4]
    ) {
        UNROLL
        for (int s = 0; s < KV_M16; s++) {
            u32 b[N8_TILES][2], near[HEAD_DIM / 8], far[HEAD_DIM / 8];  // tokens 2c, 2c + 1, and 8 further on
            UNROLL
            for (int n = 0; n < N8_TILES; n++) {
                UNROLL
                for (int i = 0; i < 2; i++)
                    b[n][i] = movmatrix_trans(cvt_f16x2_f32(weight[s][n][i * 2], weight[s][n][i * 2 + 1]));
            }
            VFragments<V_DTYPE>::unpack(values[s][0], values[s][1], near);
            VFragments<V_DTYPE>::unpack(values[s][2], values[s][3], far);
            UNROLL
            for (int j = 0; j < HEAD_DIM / 16; j++) {
                UNROLL
                for (int n = 0; n < N8_TILES; n++)
                    mma_m16n8k16(o[n][j], near[2 * j], near[2 * j + 1], far[2 * j], far[2 * j + 1], b[n][0], b[n][1]);
            }
        }
    }
};

// The Hadamard transform of a head, four neighbours of each lane; 16 lanes have a run of 64.
DEVICE void hadamard(float (&x)[4], int lane) {
    UNROLL
    for (int k = 0; k < 2; k++) {
        const float one = x[k], other = x[k + 2];
        x[k] = one + other;
        x[k + 2] = one - other;
    }
    UNROLL
    for (int mask = 1; mask < 16; mask *= 2) {
        UNROLL
        for (int k = 0; k < 4; k++) {
            const float theirs = shfl_xor(x[k], mask);
            x[k] = lane & mask ? theirs - x[k] : theirs + x[k];
        }
    }
    UNROLL
    for (int k = 0; k < 4; k++) x[k] *= 0.03125f;
}

// A thread block's place in the launch: its row, kv head and queries, and where its partial results lie.
struct BlockContext {
    const AttnParams& params;
    KvSplits splits;
    int h, first_query, queries, live, block;  // kv head; queries of a full block, of this one; block of the row
    float *m, *l, *o;                          // of every split: partial results

    DEVICE BlockContext(const AttnParams& given, float* in_smem) : params(given) {
        const int all = params.tokens * GQA_GROUP, query_blocks = (all + QUERIES - 1) / QUERIES, x = blockIdx.x;
        h = x % KV_HEADS;
        first_query = x / KV_HEADS % query_blocks * QUERIES;
        block = blockIdx.y;
        queries = min(QUERIES, all);
        live = min(QUERIES, all - first_query);
        splits.load(params, x / KV_HEADS / query_blocks);
        const i64 size = params.max_splits * queries * (HEAD_DIM + 4);  // a multiple of four floats
        o = in_smem ? in_smem : params.partials + x * size;
        m = o + params.max_splits * queries * HEAD_DIM;
        l = m + params.max_splits * queries;
    }
    DEVICE int token(int q) const { return (first_query + q) / GQA_GROUP; }
    DEVICE int head(int q) const { return h * GQA_GROUP + (first_query + q) % GQA_GROUP; }
    DEVICE u16* out(int q) const {
        return params.out + ((splits.row * params.tokens + token(q)) * KV_HEADS * GQA_GROUP + head(q)) * HEAD_DIM;
    }
    DEVICE bool sees(int q, int key) const {  // a cached token, by its place in the row
        bool visible = !params.window || splits.past + token(q) - key < params.window;
        if (HAS_MASK) visible = visible && params.mask[splits.row * params.mask_stride + key];
        return visible;
    }
    DEVICE float softcap(float score) const {
        return SOFTCAP ? tanhf(score * params.score_scale) * params.cap : score * params.score_scale;
    }
};

struct AttnSmem {
    float m[WARPS][QUERIES], l[WARPS][QUERIES];
    u16 q[QUERIES][HEAD_DIM];  // RoPE applied, and Hadamard-transformed for hadamard keys
    float scratch[1];          // (WARPS, queries, HEAD_DIM) outputs; raw queries and new heads; weights of splits
};

// Queries with RoPE into shared memory. This code runs once, so it is bound by the instruction cache and not unrolled.
DEVICE void load_queries(const BlockContext& b, AttnSmem& smem, Rope rope, int lane) {
    const AttnParams& params = b.params;
    u16 *raw = (u16*)smem.scratch, *with_rope = IS_HADAMARD(K_DTYPE) ? raw + b.queries * HEAD_DIM : smem.q[0];
    for (int i = threadIdx.x; i < b.live * HEAD_DIM / 8; i += THREADS) {
        const int q = i / (HEAD_DIM / 8);
        const u16* head = params.q + b.splits.row * params.q_row_stride + b.token(q) * params.q_token_stride
            + b.head(q) * HEAD_DIM;
        *(uint4*)(raw + i * 8) = *(const uint4*)(head + i % (HEAD_DIM / 8) * 8);
    }
    __syncthreads();
    NO_UNROLL
    for (int i = threadIdx.x; i < b.live * HEAD_DIM; i += THREADS) {
        const int at = i % HEAD_DIM, token = b.token(i / HEAD_DIM);
        if (token != rope.token || THREADS % HEAD_DIM) rope.load(params, b.splits.row, at, token);
        with_rope[i] = rope.apply(raw + (i - at), at);
    }
    __syncthreads();
    if (!IS_HADAMARD(K_DTYPE)) return;
    const int fours = b.live * HEAD_DIM / 4;
    for (int i = threadIdx.x; i - lane < fours; i += THREADS) {  // whole warps
        const uint2 four = *(const uint2*)(with_rope + min(i, fours - 1) * 4);
        float x[4] = {cvt_f32_f16((u16)four.x), cvt_f32_f16((u16)(four.x >> 16)), cvt_f32_f16((u16)four.y),
                      cvt_f32_f16((u16)(four.y >> 16))};
        hadamard(x, lane);
        if (i < fours) *(uint2*)(smem.q[0] + i * 4) = uint2{cvt_f16x2_f32(x[0], x[1]), cvt_f16x2_f32(x[2], x[3])};
    }
    __syncthreads();
}

// The lane's B registers of query q, in the order of the keys' numbers; zeros where there is no query.
DEVICE void load_q_fragments(const BlockContext& b, const AttnSmem& smem, int q, int lane, u32 (&out)[HEAD_DIM / 8]) {
    typedef KFragments<K_DTYPE> Keys;
    UNROLL
    for (int i = 0; i < HEAD_DIM / 8; i += 4) {
        uint4 eight = {};
        if (q < b.live) eight = *(const uint4*)(smem.q[q] + Keys::Lane::index_of(lane % 4, Keys::first(i)));
        const u32 low[2] = {eight.x, eight.y}, high[2] = {eight.z, eight.w};
        if (K_DTYPE == 2) {
            UNROLL
            for (int k = 0; k < 4; k++) out[i + k] = prmt(low[k / 2], high[k / 2], k % 2 ? 0x7632 : 0x5410);
        } else {
            UNROLL
            for (int k = 0; k < 2; k++) {
                out[i + k] = low[k];
                out[i + 2 + k] = high[k];
            }
        }
    }
}

// S = K Q^T of a tile, scaled, capped, and masked; `left` of its tokens exist.
DEVICE void compute_scores(
    const BlockContext& b, const KFragments<K_DTYPE>::Lane (&keys)[KV_M16][2], const u32 (&q)[N8_TILES][HEAD_DIM / 8],
    int first_token, int left, int lane, float (&out)[KV_M16][N8_TILES][4]
) {
    UNROLL
    for (int s = 0; s < KV_M16; s++) {
        u32 near[HEAD_DIM / 8], far[HEAD_DIM / 8];  // tokens g and g + 8
        KFragments<K_DTYPE>::unpack(keys[s][0], near);
        KFragments<K_DTYPE>::unpack(keys[s][1], far);
        UNROLL
        for (int n = 0; n < N8_TILES; n++) {
            float even[4] = {}, odd[4] = {};  // two chains, so that an mma waits for the last but one
            UNROLL
            for (int k = 0; k < HEAD_DIM / 8; k += 4) {
                mma_m16n8k16(even, near[k], far[k], near[k + 1], far[k + 1], q[n][k], q[n][k + 1]);
                mma_m16n8k16(odd, near[k + 2], far[k + 2], near[k + 3], far[k + 3], q[n][k + 2], q[n][k + 3]);
            }
            UNROLL
            for (int i = 0; i < 4; i++) out[s][n][i] = b.softcap(even[i] + odd[i]);
        }
    }
    if (left >= KV_TILE && !b.params.window && !HAS_MASK) return;
    UNROLL
    for (int s = 0; s < KV_M16; s++) {
        UNROLL
        for (int n = 0; n < N8_TILES; n++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                const int token = s * 16 + i / 2 * 8 + lane / 4, query = n * 8 + lane % 4 * 2 + i % 2;
                if (token >= left || !b.sees(query, first_token + token)) out[s][n][i] = MASKED_SCORE;
            }
        }
    }
}

// The warps' softmax of a split, combined in the order of the warps, to the partial results.
DEVICE void store_split(const BlockContext& b, AttnSmem& smem, OnlineSoftmax& mine, int split, int warp, int lane) {
    UNROLL
    for (int n = 0; n < N8_TILES; n++) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int query = n * 8 + lane % 4 * 2 + i;
            UNROLL
            for (int mask = 4; mask < 32; mask *= 2) mine.l[n][i] += shfl_xor(mine.l[n][i], mask);
            if (lane < 4) {
                smem.m[warp][query] = mine.m[n][i];
                smem.l[warp][query] = mine.l[n][i];
            }
            if (query >= b.live) continue;
            float* to = smem.scratch + (warp * b.queries + query) * HEAD_DIM;
            UNROLL
            for (int e = 0; e < HEAD_DIM / 8; e += 4)
                *(float4*)(to + VFragments<V_DTYPE>::Lane::index_of(lane / 4, e)) =
                    float4{mine.o[n][e / 2][i], mine.o[n][e / 2][i + 2], mine.o[n][e / 2 + 1][i],
                           mine.o[n][e / 2 + 1][i + 2]};
        }
    }
    __syncthreads();
    float4* out = (float4*)(b.o + (i64)split * b.queries * HEAD_DIM);
    for (int i = threadIdx.x; i < b.live * HEAD_DIM / 4; i += THREADS) {
        const int query = i / (HEAD_DIM / 4);
        float m = NO_MAX, l = 0;
        float4 o = {};
        UNROLL
        for (int w = 0; w < WARPS; w++) m = fmaxf(m, smem.m[w][query]);
        UNROLL
        for (int w = 0; w < WARPS; w++) {
            const float rescale = ex2_approx(smem.m[w][query] - m);
            const float4 more = ((const float4*)smem.scratch)[w * b.queries * (HEAD_DIM / 4) + i];
            l += smem.l[w][query] * rescale;
            o.x += more.x * rescale;
            o.y += more.y * rescale;
            o.z += more.z * rescale;
            o.w += more.w * rescale;
        }
        out[i] = o;
        if (i % (HEAD_DIM / 4) == 0) {
            b.m[split * b.queries + query] = m;
            b.l[split * b.queries + query] = l;
        }
    }
    __syncthreads();
}

// The last split: the new tokens are appended to the cache, and attended to causally as they came.
DEVICE void append_kv(const BlockContext& b, AttnSmem& smem, int warp, int lane) {
    const AttnParams& params = b.params;
    const int runs = HEAD_DIM / 64;
    u16* fresh = (u16*)smem.scratch;  // (keys and values, tokens, HEAD_DIM)
    for (int item = warp; item < 2 * params.tokens * runs; item += WARPS) {
        const int run = item % runs, t = item / runs % params.tokens, place = b.splits.past + t;
        const i64 page = params.page_table[b.splits.row * params.page_table_stride + place / PAGE_SIZE];
        const i64 stored = (page * PAGE_SIZE + place % PAGE_SIZE) * KV_HEADS + b.h;
        const bool is_key = item < params.tokens * runs;
        float x[2];
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int number = run * 64 + lane * 2 + i;
            if (is_key) {
                Rope rope;
                rope.load(params, b.splits.row, number, t);
                const u16* head =
                    params.k + b.splits.row * params.k_row_stride + t * params.k_token_stride + b.h * HEAD_DIM;
                x[i] = cvt_f32_f16(rope.apply(head, number));
            } else {
                x[i] = cvt_f32_f16(params.v[b.splits.row * params.v_row_stride + t * params.v_token_stride
                                            + b.h * HEAD_DIM + number]);
            }
        }
        const bool write = b.first_query == 0;
        if (is_key) store_kv<K_DTYPE>(x, params.key, params.key_scale, stored, run, lane, write);
        else store_kv<V_DTYPE>(x, params.value, params.value_scale, stored, run, lane, write);
        ((u32*)fresh)[(item / runs * HEAD_DIM + run * 64) / 2 + lane] = cvt_f16x2_f32(x[0], x[1]);
    }
    __syncthreads();
    const int split = b.splits.count - 1;
    for (int query = warp; query < b.live; query += WARPS) {
        const int t = b.token(query);
        float m = NO_MAX, l = 0, o[HEAD_DIM / 32] = {};
        for (int n = 0; n <= t; n++) {
            if (n < t && !b.sees(query, b.splits.past + n)) continue;
            const u16 *k = fresh + n * HEAD_DIM, *v = fresh + (params.tokens + n) * HEAD_DIM;
            float sum = 0;
            UNROLL
            for (int i = 0; i < HEAD_DIM / 32; i++)
                sum += cvt_f32_f16(smem.q[query][i * 32 + lane]) * cvt_f32_f16(k[i * 32 + lane]);
            UNROLL
            for (int mask = 16; mask; mask /= 2) sum += shfl_xor(sum, mask);
            const float top = fmaxf(m, b.softcap(sum)), rescale = ex2_approx(m - top);
            const float weight = ex2_approx(b.softcap(sum) - top);
            m = top;
            l = l * rescale + weight;
            UNROLL
            for (int i = 0; i < HEAD_DIM / 32; i++) o[i] = o[i] * rescale + weight * cvt_f32_f16(v[i * 32 + lane]);
        }
        UNROLL
        for (int i = 0; i < HEAD_DIM / 32; i++) b.o[((i64)split * b.queries + query) * HEAD_DIM + i * 32 + lane] = o[i];
        if (lane == 0) {
            b.m[split * b.queries + query] = m;
            b.l[split * b.queries + query] = l;
        }
    }
}

// Whether this thread block is the last of those that share a row and a head. It resets the counter.
DEVICE bool arrives_last(const AttnParams& params, const KvSplits& splits) {
    const int blocks = splits.busy_blocks(params.blocks_per_row);
    __shared__ int done;
    __syncthreads();
    if (blocks == 1) return true;
    if (threadIdx.x == 0) {
        done = atom_add_acq_rel(params.arrivals + blockIdx.x) + 1;
        if (done == blocks) params.arrivals[blockIdx.x] = 0;
    }
    __syncthreads();
    return done == blocks;
}

#define SPLITS_IN_FLIGHT 12  // whose partial outputs a thread loads at once

// The partial results of all splits, combined in order; a thread has four numbers of a query at a time.
DEVICE void combine_splits(const BlockContext& b, AttnSmem& smem, int lane) {
    const int splits = b.splits.count, count = splits * b.queries, fours = b.live * HEAD_DIM / 4;
    float *all_m = smem.scratch, *all_l = all_m + count;
    float m = NO_MAX, l = 0, o[4] = {};
    bool loaded = false;
    const EpilogueTarget& target = b.params.target;
    for (int base = 0, split = 0; base < fours;) {  // which numbers, and the first of some splits
        const int i = min(base + (int)threadIdx.x, fours - 1), query = i / (HEAD_DIM / 4);
        float4 next[SPLITS_IN_FLIGHT];
        UNROLL
        for (int k = 0; k < SPLITS_IN_FLIGHT; k++)
            if (split + k < splits)
                next[k] = ld_relaxed_v4(b.o + ((split + k) * b.queries * (HEAD_DIM / 4) + i) * 4);
        const i64 row = b.splits.row * b.params.tokens + b.token(query);
        uint4 slots[4];
        UNROLL
        for (int k = 0; k < 4; k++)
            if (target.packed_x && split + SPLITS_IN_FLIGHT >= splits)
                slots[k] = target.slots[b.head(query) * HEAD_DIM + i % (HEAD_DIM / 4) * 4 + k];
        if (!loaded) {
            for (int n = threadIdx.x; n < count; n += THREADS) {
                all_m[n] = ld_relaxed(b.m + n);
                all_l[n] = ld_relaxed(b.l + n);
            }
            __syncthreads();
            loaded = true;
        }
        if (split == 0) {
            _Pragma("unroll 4")
            for (int s = 0; s < splits; s++) m = fmaxf(m, all_m[s * b.queries + query]);
        }
        UNROLL
        for (int k = 0; k < SPLITS_IN_FLIGHT; k++) {
            if (split + k < splits) {
                const float rescale = ex2_approx(all_m[(split + k) * b.queries + query] - m);
                l += all_l[(split + k) * b.queries + query] * rescale;
                o[0] += next[k].x * rescale;
                o[1] += next[k].y * rescale;
                o[2] += next[k].z * rescale;
                o[3] += next[k].w * rescale;
            }
        }
        split += SPLITS_IN_FLIGHT;
        if (split < splits) continue;
        const float inverse = 1.0f / l;
        UNROLL
        for (int k = 0; k < 4; k++) o[k] *= inverse;
        if (IS_HADAMARD(V_DTYPE)) hadamard(o, lane);
        const u32 pairs[2] = {cvt_f16x2_f32(o[0], o[1]), cvt_f16x2_f32(o[2], o[3])};
        if (base + (int)threadIdx.x < fours) {
            if (b.params.out) *(uint2*)(b.out(query) + i % (HEAD_DIM / 4) * 4) = uint2{pairs[0], pairs[1]};
            UNROLL
            for (int k = 0; k < 4; k++)
                if (target.packed_x) store_prepacked(target, slots[k], (int)row, (u16)(pairs[k / 2] >> k % 2 * 16));
        }
        base += THREADS;
        split = 0;
        m = NO_MAX;
        l = 0;
        UNROLL
        for (int k = 0; k < 4; k++) o[k] = 0;
    }
}

// Grid: (row * query block * kv head, blocks that share the row's splits).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) paged_attn_decode(
    const __grid_constant__ AttnParams params
) {
    extern __shared__ __align__(16) char dynamic_smem[];
    AttnSmem& smem = *(AttnSmem*)dynamic_smem;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    griddepcontrol_launch_dependents();
    const bool in_smem = params.partials_in_smem;
    const int used = WARPS * QUERIES * 2 * 4 + QUERIES * HEAD_DIM * 2 + params.warp_floats * 4;  // bytes of AttnSmem
    const BlockContext b(params, in_smem ? (float*)(dynamic_smem + used) : nullptr);
    const KvSplits& splits = b.splits;
    if (b.block >= splits.busy_blocks(params.blocks_per_row)) return;
    if (params.target.packed_x && threadIdx.x < GQA_GROUP * HEAD_DIM / 8)
        prefetch_l2(params.target.slots + b.h * GQA_GROUP * HEAD_DIM + threadIdx.x * 8);
    PadWriter pads;
    pads.locate(params.target, b.block ? 1 << 30 : blockIdx.x * THREADS + threadIdx.x);
    const int step = params.blocks_per_row, pace = WARPS * KV_TILE, offset = warp * KV_TILE;
    int split = b.block;
    KvTile tile;
    int at = splits.begin(split) + offset;
    if (split < splits.count - 1 && at < splits.end(split)) {
        const i64 head = KvTile::head_index(params, splits.row, at, b.h);
        tile.load_keys(params, head, splits.end(split) - at, lane);
        tile.load_values(params, head, splits.end(split) - at, lane);
    }
    Rope rope;
    rope.load(params, splits.row, threadIdx.x % HEAD_DIM, b.token(0));
    griddepcontrol_wait();
    pads.write(params.target, gridDim.x * THREADS);
    load_queries(b, smem, rope, lane);
    if (b.block == splits.last_block(params.blocks_per_row)) {
        append_kv(b, smem, warp, lane);
        __syncthreads();
    }
    u32 q[N8_TILES][HEAD_DIM / 8];
    UNROLL
    for (int n = 0; n < N8_TILES; n++) load_q_fragments(b, smem, n * 8 + lane / 4, lane, q[n]);
    for (; split < splits.count - 1; split += step) {
        OnlineSoftmax softmax;
        softmax.clear();
        for (at = splits.begin(split) + offset; at < splits.end(split); at += pace) {
            int next = at + pace, end = splits.end(split);
            if (next >= end) {
                next = splits.begin(split + step) + offset;
                end = splits.end(split + step);
            }
            const bool more = next < end;
            const i64 head = more ? KvTile::head_index(params, splits.row, next, b.h) : 0;
            float weight[KV_M16][N8_TILES][4];
            compute_scores(b, tile.keys, q, at, splits.end(split) - at, lane, weight);
            if (more) tile.load_keys(params, head, end - next, lane);
            softmax.update(weight);
            softmax.add_values(tile.values, weight);
            if (more) tile.load_values(params, head, end - next, lane);
        }
        store_split(b, smem, softmax, split, warp, lane);
    }
    if (arrives_last(params, splits)) combine_splits(b, smem, lane);
}
