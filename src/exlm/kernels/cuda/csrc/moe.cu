// A mixture of experts, straight from their codes: who is chosen is found out on the device, by every kernel for itself.
//
// A pair is a token and one of its experts. Where hardly any have the same expert, each is multiplied by itself. Else
// `deal` gives those of one expert seats side by side, and up to eight of them, a group, are multiplied at once. Either way
// a row's answer depends on nothing but the row. It lies in the order of seats until `combine` adds up each token's.
//
// A kernel that has waited for those before it lets the next one begin, so logits, which are there before the first
// begins to multiply, need not be waited for again; and neither need the seats behind `prepare_chosen`.
//
// Set when compiling, besides what products.h wants: EXPERTS, ACTIVE (experts of a token). COLUMNS is 1.

#include "gemm_m16.h"


#define MOE_BLOCK 8  // rows that are multiplied at once
#define NO_EXPERT (-0x7fffffff - 1)

// An expert and its logit as one number: larger ones have larger logits, and of equals the smaller number.
DEVICE int ranked(u16 logit, int expert) {
    const int order = logit & 0x8000 ? -(logit & 0x7fff) : logit;
    return order * 65536 + (65535 - expert);
}
DEVICE int expert_of(int rank) { return 65535 - (rank & 65535); }
DEVICE float logit_of(int rank) {
    const int order = rank >> 16;
    return cvt_f32_f16(order < 0 ? 0x8000 | -order : order);
}

// A token's experts, which come the best first. All lanes of a warp together.
struct TopK {
    static const int each = (NUM_EXPERTS + 31) / 32;
    int ranks[each];

    DEVICE TopK(const u16* logits) {
        UNROLL for (int i = 0; i < each; i++) {
            const int at = i * 32 + threadIdx.x % 32;
            ranks[i] = at < NUM_EXPERTS ? ranked(__ldcg(logits + at), at) : NO_EXPERT;
        }
    }
    DEVICE int next() {
        int best = NO_EXPERT;
        UNROLL for (int i = 0; i < each; i++) best = max(best, ranks[i]);
        best = redux_max(best);
        UNROLL for (int i = 0; i < each; i++) if (ranks[i] == best) ranks[i] = NO_EXPERT;
        return best;
    }
};

DEVICE int topk_expert(const u16* logits, int pair) {
    TopK ranking(logits + (long)(pair / TOP_K) * NUM_EXPERTS);
    int rank = ranking.next();
    for (int slot = pair % TOP_K; slot; slot--) rank = ranking.next();
    return expert_of(rank);
}

// What a token's experts are worth: their shares in all experts, or in the chosen ones only. A warp together.
DEVICE void routing_weights(const u16* logits, bool chosen_only, float (&share)[TOP_K]) {
    TopK ranking(logits);
    float most = 0, sum = 0;
    UNROLL for (int slot = 0; slot < TOP_K; slot++) {
        const float logit = logit_of(ranking.next());
        if (slot == 0) most = logit;
        sum += share[slot] = expf(logit - most);
    }
    if (!chosen_only) {
        sum = 0;
        for (int at = threadIdx.x % 32; at < NUM_EXPERTS; at += 32) sum += expf(cvt_f32_f16(__ldcg(logits + at)) - most);
        UNROLL for (int other = 16; other; other /= 2) sum += shfl_xor(sum, other);
    }
    UNROLL for (int slot = 0; slot < TOP_K; slot++) share[slot] /= sum;
}

// Where a pair sits.
struct Assignment {
    int expert, token;
    int first, rows;  // its group's seats

    DEVICE static Assignment read(const Assignment* at) {
        const int* from = (const int*)at;
        return Assignment{__ldcg(from), __ldcg(from + 1), __ldcg(from + 2), __ldcg(from + 3)};
    }
};

struct MoeParams {
    const GemmOperand* parts;  // (expert, side)
    const int* widths;  // (expert,) bits of their codes, a nibble for each side
    const u16* logits;  // (tokens, experts)
    const u16* x;       // (tokens, inputs) under an ACT, else (seats, inputs)
    u16* y;             // (seats, outputs)
    uint4* words;       // x prepared, (side, seat, room)
    const Assignment* seats;
    const int* groups;  // their first seats; below zero: no group
    int inputs, outputs;
    int room;           // of a row prepared, in words
    int pairs;
};

#define PARAMS_BYTES 256  // bytes of shared memory for one, before all else: registers are wanted for other things

// One expert's share in the work: a group of rows. All threads together.
DEVICE void build_params(const MoeParams& given, const Assignment& seat, GemmParams& job) {
    static_assert(sizeof(GemmParams) <= PARAMS_BYTES);
    const u32* from = (const u32*)(given.parts + seat.expert * GLU_WEIGHTS);
    for (int i = threadIdx.x; i < GLU_WEIGHTS * (int)sizeof(GemmOperand) / 4; i += THREADS) ((u32*)job.parts)[i] = from[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        UNROLL for (int s = 0; s < GLU_WEIGHTS; s++) {
            GemmOperand& part = job.parts[s];
            part.entrance.words = given.words + ((long)(SEPARATE_PERM ? s : 0) * given.pairs + seat.first) * given.room;
            part.y = given.y + (long)seat.first * given.outputs;
            part.stride = given.outputs, part.first = 0;
        }
        job.x = given.x + (FUSED_PACK ? (long)(ACTIVATION ? seat.token : seat.first) * given.inputs : 0);
        job.residual = nullptr, job.eps = 0;
        job.rows = seat.rows, job.inputs = given.inputs;
    }
    __syncthreads();
}

// Who multiplies which rows: one thread block for all, a thread for each expert.
extern "C" __global__ void __launch_bounds__(256) moe_align(
    const u16* logits, Assignment* seats, int* places, int* groups, int pairs, int most
) {
    extern __shared__ __align__(128) char memory[];
    int *experts = (int*)memory, *counts = experts + pairs;  // of each pair; the pairs of each
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (int token = threadIdx.x / 32; token < pairs / TOP_K; token += 8) {
        TopK ranking(logits + (long)token * NUM_EXPERTS);
        for (int slot = 0; slot < TOP_K; slot++) experts[token * TOP_K + slot] = expert_of(ranking.next());
    }
    for (int i = threadIdx.x; i < most; i += 256) groups[i] = -1;
    __syncthreads();
    for (int expert = threadIdx.x; expert < NUM_EXPERTS; expert += 256) {
        int count = 0;
        for (int pair = 0; pair < pairs; pair++) count += experts[pair] == expert;
        counts[expert] = count;
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < NUM_EXPERTS; expert += 256) {
        int first = 0, group = 0;
        for (int other = 0; other < expert; other++) first += counts[other], group += (counts[other] + MOE_BLOCK - 1) / MOE_BLOCK;
        int rank = 0;
        for (int pair = 0; pair < pairs; pair++) if (experts[pair] == expert) {
            const int ahead = rank / MOE_BLOCK * MOE_BLOCK;
            if (rank == ahead) groups[group++] = first + rank;
            seats[first + rank] = Assignment{expert, pair / TOP_K, first + ahead, min(MOE_BLOCK, counts[expert] - ahead)};
            places[pair] = first + rank++;
        }
    }
}

// Rows as their experts want them; a thread block for each seat, sixteen bricks' inputs, and side if they differ.
extern "C" __global__ void __launch_bounds__(256) moe_pack_activations(const __grid_constant__ MoeParams given) {
    extern __shared__ __align__(128) char memory[];
    u16* raw = (u16*)(memory + PARAMS_BYTES);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const Assignment seat = Assignment::read(given.seats + blockIdx.x);
    GemmParams& job = *(GemmParams*)memory;
    build_params(given, seat, job);
    const GemmOperand& part = job.parts[SEPARATE_PERM ? blockIdx.z : 0];
    const int unit = blockIdx.y * 256 + threadIdx.x;
    ActPacker item;
    item.load(job, part, unit);
    load_row(job, ACTIVATION ? seat.token : blockIdx.x, raw, nullptr, 8);
    __syncthreads();
    item.put(job, part, unit, blockIdx.x - seat.first, raw, 1.0f, part.entrance.words);
}

// A thread block for each tile of each group, or with INSIDE of each pair.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) moe_gemm(const __grid_constant__ MoeParams given) {
    extern __shared__ __align__(128) char memory[];
    Assignment seat;
    if (FUSED_PACK) {
        const int pair = blockIdx.y, token = pair / TOP_K;
        for (int i = threadIdx.x; ACTIVATION && i * 128 < NUM_EXPERTS * GLU_WEIGHTS * (int)sizeof(GemmOperand); i += THREADS)
            prefetch_l2((const char*)given.parts + i * 128);
        if (ACTIVATION) griddepcontrol_wait();
        seat = Assignment{topk_expert(given.logits, pair), token, pair, 1};
    } else {
        const int first = __ldcg(given.groups + blockIdx.y);
        if (first < 0) return;
        seat = Assignment::read(given.seats + first);
    }
    GemmParams& job = *(GemmParams*)memory;
    build_params(given, seat, job);
    gemm_block(job, memory + PARAMS_BYTES, nullptr, RUNTIME_BITS ? given.widths[seat.expert] : 0);
}

// Every token's experts, (tokens, active); a warp for each token.
extern "C" __global__ void __launch_bounds__(256) topk(const u16* logits, int* experts, int tokens) {
    const int token = blockIdx.x * 8 + threadIdx.x / 32;
    if (token >= tokens) return;
    TopK ranking(logits + (long)token * NUM_EXPERTS);
    for (int slot = 0; slot < TOP_K; slot++) experts[token * TOP_K + slot] = expert_of(ranking.next());
}

// What a token's experts answered times their shares, added in the order of choice; eight numbers for each thread.
// `places` says in which seat each pair sits, null: in order.
extern "C" __global__ void __launch_bounds__(256) combine(
    const u16* logits, const u16* answers, const int* places, u16* out, int width, int chosen_only
) {
    const int token = blockIdx.x, unit = blockIdx.y * 256 + threadIdx.x;
    float share[TOP_K];
    routing_weights(logits + (long)token * NUM_EXPERTS, chosen_only, share);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (unit * 8 >= width) return;
    float sum[8] = {};
    UNROLL for (int slot = 0; slot < TOP_K; slot++) {
        const int pair = token * TOP_K + slot, place = places ? __ldcg(places + pair) : pair;
        const uint4 piece = ((const uint4*)(answers + (long)place * width))[unit];
        const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
        UNROLL for (int i = 0; i < 8; i++)
            sum[i] = fmaf(share[slot], i % 2 ? high_half(words[i / 2]) : low_half(words[i / 2]), sum[i]);
    }
    u32 words[4];
    UNROLL for (int i = 0; i < 4; i++) words[i] = cvt_f16_f32(sum[2 * i]) | (u32)cvt_f16_f32(sum[2 * i + 1]) << 16;
    ((uint4*)(out + (long)token * width))[unit] = uint4{words[0], words[1], words[2], words[3]};
}
