// Mixture of experts straight from packed weights. Routing stays on the device: there is no host synchronisation.
//
// A pair is a token and one of its top-k experts. If hardly any pairs share an expert, each is multiplied by itself.
// Else moe_align sorts pairs by expert, in blocks of up to MOE_BLOCK rows that are multiplied at once; a pair's place
// in that order is its row of the experts' inputs and outputs. Either way a row's output depends on nothing but the
// row. `combine` adds up each token's experts.
//
// The kernels before moe_align have ended when it launches its dependents, so the router's logits need not be waited
// for again; nor the sorted pairs behind moe_pack_activations (PDL).
//
// Set when compiling, besides what gemm_m16.h wants: NUM_EXPERTS, TOP_K, SIGMOID_ROUTING (scores are sigmoids, and a
// bias on them selects experts; else softmax). N8_TILES is 1.

#include "gemm_m16.h"

#define MOE_BLOCK 8  // rows that are multiplied at once
#define NO_EXPERT (-0x7fffffff - 1)

#if SIGMOID_ROUTING
DEVICE float score_of(const u16* logits, int expert) {
    return 1.0f / (1.0f + expf(-cvt_f32_f16(__ldcg(logits + expert))));
}
// A token's experts by descending score plus bias, of equal ones the smaller. All lanes of a warp together.
struct TopK {
    static const int keys_per_lane = (NUM_EXPERTS + 31) / 32;
    int keys[keys_per_lane];  // integers in the order of the floats

    DEVICE TopK(const u16* logits, const float* bias) {
        UNROLL
        for (int i = 0; i < keys_per_lane; i++) {
            const int expert = i * 32 + threadIdx.x % 32;
            keys[i] = NO_EXPERT;
            if (expert >= NUM_EXPERTS) continue;
            const int bits = float_as_int(score_of(logits, expert) + (bias ? bias[expert] : 0.0f));
            keys[i] = bits < 0 ? bits ^ 0x7fffffff : bits;
        }
    }
    DEVICE int next() {
        int best = NO_EXPERT, chosen = NO_EXPERT;
        UNROLL
        for (int i = 0; i < keys_per_lane; i++) best = max(best, keys[i]);
        best = redux_max(best);
        UNROLL
        for (int i = keys_per_lane - 1; i >= 0; i--)
            if (keys[i] == best) chosen = -(i * 32 + (int)threadIdx.x % 32);
        chosen = -redux_max(chosen);
        UNROLL
        for (int i = 0; i < keys_per_lane; i++)
            if (i * 32 + (int)threadIdx.x % 32 == chosen) keys[i] = NO_EXPERT;
        return chosen;
    }
};
DEVICE int expert_of(int key) { return key; }
#else
// Logit and expert as one integer: larger logits are larger, and of equal ones the smaller expert is.
DEVICE int sort_key(u16 logit, int expert) {
    const int order = logit & 0x8000 ? -(logit & 0x7fff) : logit;
    return order * 65536 + (65535 - expert);
}
DEVICE int expert_of(int key) { return 65535 - (key & 65535); }
DEVICE float logit_of(int key) {
    const int order = key >> 16;
    return cvt_f32_f16(order < 0 ? 0x8000 | -order : order);
}

// A token's experts by descending logit. All lanes of a warp together.
struct TopK {
    static const int keys_per_lane = (NUM_EXPERTS + 31) / 32;
    int keys[keys_per_lane];

    DEVICE TopK(const u16* logits, const float*) {
        UNROLL
        for (int i = 0; i < keys_per_lane; i++) {
            const int expert = i * 32 + threadIdx.x % 32;
            keys[i] = expert < NUM_EXPERTS ? sort_key(__ldcg(logits + expert), expert) : NO_EXPERT;
        }
    }
    DEVICE int next() {
        int best = NO_EXPERT;
        UNROLL
        for (int i = 0; i < keys_per_lane; i++) best = max(best, keys[i]);
        best = redux_max(best);
        UNROLL
        for (int i = 0; i < keys_per_lane; i++)
            if (keys[i] == best) keys[i] = NO_EXPERT;
        return best;
    }
};
#endif

DEVICE int expert_of_pair(const u16* logits, const float* bias, int pair) {
    TopK top(logits + (long)(pair / TOP_K) * NUM_EXPERTS, bias);
    int key = top.next();
    for (int k = pair % TOP_K; k; k--) key = top.next();
    return expert_of(key);
}

// A warp together. Softmax over all experts, or (renormalize) over the selected ones; or sigmoids, which renormalize
// divides by their sum.
DEVICE void routing_weights(
    const u16* logits, const float* bias, bool renormalize, float scale, float (&weight)[TOP_K]
) {
    TopK top(logits, bias);
    float sum = 0;
#if SIGMOID_ROUTING
    UNROLL
    for (int k = 0; k < TOP_K; k++) {
        weight[k] = score_of(logits, top.next());
        sum += weight[k];
    }
    sum = renormalize ? sum + 1e-20f : 1.0f;
#else
    float highest = 0;
    UNROLL
    for (int k = 0; k < TOP_K; k++) {
        const float logit = logit_of(top.next());
        if (k == 0) highest = logit;
        weight[k] = expf(logit - highest);
        sum += weight[k];
    }
    if (!renormalize) {
        sum = 0;
        for (int at = threadIdx.x % 32; at < NUM_EXPERTS; at += 32)
            sum += expf(cvt_f32_f16(__ldcg(logits + at)) - highest);
        UNROLL
        for (int mask = 16; mask; mask /= 2) sum += shfl_xor(sum, mask);
    }
#endif
    UNROLL
    for (int k = 0; k < TOP_K; k++) weight[k] = weight[k] / sum * scale;
}

// The pair of a row.
struct SortedPair {
    int expert, token;
    int first, rows;  // the rows of its block

    DEVICE static SortedPair read(const SortedPair* at) {
        const int* from = (const int*)at;
        return SortedPair{__ldcg(from), __ldcg(from + 1), __ldcg(from + 2), __ldcg(from + 3)};
    }
};

struct MoeParams {
    const GemmOperand* operands;  // (expert, gate / up)
    const int* expert_bits;       // (expert,) bits of their codes, a nibble for each weight
    const u16* logits;            // (tokens, experts)
    const float* bias;            // (experts) that selects; null: none
    const u16* x;                 // (tokens, inputs) under an ACTIVATION, else (rows, inputs)
    u16* y;                       // (rows, outputs)
    uint4* packed_x;              // (input permutation, row, row_words)
    const SortedPair* sorted_pairs;
    const int* blocks;            // their first rows; below zero: no block
    int inputs, outputs;
    int row_words;                // of a packed row, 16 bytes each
    int pairs;
};
CHECK_SIZEOF(SortedPair);
CHECK_SIZEOF(MoeParams);

#define PARAMS_BYTES 256  // of shared memory for GemmParams, before all else: registers are wanted for other things

// GemmParams of one expert's block of rows, in shared memory. All threads together.
DEVICE void build_params(const MoeParams& moe, const SortedPair& sorted, GemmParams& params) {
    static_assert(sizeof(GemmParams) <= PARAMS_BYTES);
    const u32* from = (const u32*)(moe.operands + sorted.expert * GLU_WEIGHTS);
    for (int i = threadIdx.x; i < GLU_WEIGHTS * (int)sizeof(GemmOperand) / 4; i += THREADS)
        ((u32*)params.operands)[i] = from[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        UNROLL
        for (int s = 0; s < GLU_WEIGHTS; s++) {
            GemmOperand& operand = params.operands[s];
            operand.input.packed_x =
                moe.packed_x + ((long)(SEPARATE_PERM ? s : 0) * moe.pairs + sorted.first) * moe.row_words;
            operand.y = moe.y + (long)sorted.first * moe.outputs;
            operand.stride = moe.outputs;
            operand.first_block = 0;
        }
        params.x = moe.x + (FUSED_PACK ? (long)(ACTIVATION ? sorted.token : sorted.first) * moe.inputs : 0);
        params.residual = nullptr;
        params.eps = 0;
        params.rows = sorted.rows;
        params.inputs = moe.inputs;
    }
    __syncthreads();
}

// Sorts pairs by expert into blocks: one thread block, a thread for each expert.
extern "C" __global__ void __launch_bounds__(256) moe_align(
    const u16* logits, const float* bias, SortedPair* sorted_pairs, int* row_of_pair, int* blocks, int pairs, int max_blocks
) {
    extern __shared__ __align__(128) char smem[];
    int *experts = (int*)smem, *counts = experts + pairs;  // of each pair; the pairs of each
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (int token = threadIdx.x / 32; token < pairs / TOP_K; token += 8) {
        TopK top(logits + (long)token * NUM_EXPERTS, bias);
        for (int k = 0; k < TOP_K; k++) experts[token * TOP_K + k] = expert_of(top.next());
    }
    for (int i = threadIdx.x; i < max_blocks; i += 256) blocks[i] = -1;
    __syncthreads();
    for (int expert = threadIdx.x; expert < NUM_EXPERTS; expert += 256) {
        int count = 0;
        for (int pair = 0; pair < pairs; pair++) count += experts[pair] == expert;
        counts[expert] = count;
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < NUM_EXPERTS; expert += 256) {
        int first = 0, block = 0;
        for (int other = 0; other < expert; other++) {
            first += counts[other];
            block += (counts[other] + MOE_BLOCK - 1) / MOE_BLOCK;
        }
        int rank = 0;
        for (int pair = 0; pair < pairs; pair++) {
            if (experts[pair] != expert) continue;
            const int block_rank = rank / MOE_BLOCK * MOE_BLOCK;
            if (rank == block_rank) blocks[block++] = first + rank;
            sorted_pairs[first + rank] =
                SortedPair{expert, pair / TOP_K, first + block_rank, min(MOE_BLOCK, counts[expert] - block_rank)};
            row_of_pair[pair] = first + rank++;
        }
    }
}

// pack_activations for each row, by the permutation of its expert. Grid: (row, 256 units, input permutation).
extern "C" __global__ void __launch_bounds__(256) moe_pack_activations(const __grid_constant__ MoeParams moe) {
    extern __shared__ __align__(128) char smem[];
    u16* x_smem = (u16*)(smem + PARAMS_BYTES);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const SortedPair sorted = SortedPair::read(moe.sorted_pairs + blockIdx.x);
    GemmParams& params = *(GemmParams*)smem;
    build_params(moe, sorted, params);
    const GemmOperand& operand = params.operands[SEPARATE_PERM ? blockIdx.z : 0];
    const int unit = blockIdx.y * 256 + threadIdx.x;
    ActPacker packer;
    packer.load(params, operand, unit);
    load_row(params, ACTIVATION ? sorted.token : blockIdx.x, x_smem, nullptr, 8);
    __syncthreads();
    packer.store(params, operand, unit, blockIdx.x - sorted.first, x_smem, 1.0f, operand.input.packed_x);
}

// Grid: (n16 columns / WEIGHT_TILES, blocks of rows; with FUSED_PACK: pairs).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) moe_gemm(const __grid_constant__ MoeParams moe) {
    extern __shared__ __align__(128) char smem[];
    SortedPair sorted;
    if (FUSED_PACK) {
        const int pair = blockIdx.y, token = pair / TOP_K;
        const int table_bytes = NUM_EXPERTS * GLU_WEIGHTS * (int)sizeof(GemmOperand);
        for (int i = threadIdx.x; ACTIVATION && i * 128 < table_bytes; i += THREADS)
            prefetch_l2((const char*)moe.operands + i * 128);
        if (ACTIVATION) griddepcontrol_wait();
        sorted = SortedPair{expert_of_pair(moe.logits, moe.bias, pair), token, pair, 1};
    } else {
        const int first = __ldcg(moe.blocks + blockIdx.y);
        if (first < 0) return;
        sorted = SortedPair::read(moe.sorted_pairs + first);
    }
    GemmParams& params = *(GemmParams*)smem;
    build_params(moe, sorted, params);
    gemm_block(params, smem + PARAMS_BYTES, nullptr, RUNTIME_BITS ? moe.expert_bits[sorted.expert] : 0);
}

// Every token's experts, (tokens, TOP_K), for large batches, which the host sorts; a warp for each token.
extern "C" __global__ void __launch_bounds__(256) topk(
    const u16* logits, const float* bias, int* experts, int tokens
) {
    const int token = blockIdx.x * 8 + threadIdx.x / 32;
    if (token >= tokens) return;
    TopK top(logits + (long)token * NUM_EXPERTS, bias);
    for (int k = 0; k < TOP_K; k++) experts[token * TOP_K + k] = expert_of(top.next());
}

// The outputs of a token's experts times their routing weights, added in the order of selection; eight numbers for each
// thread. `row_of_pair` is null if pairs lie in order.
extern "C" __global__ void __launch_bounds__(256) combine(
    const u16* logits, const float* bias, const u16* expert_out, const int* row_of_pair, u16* out, int width,
    int renormalize, float scale
) {
    const int token = blockIdx.x, unit = blockIdx.y * 256 + threadIdx.x;
    float weight[TOP_K];
    routing_weights(logits + (long)token * NUM_EXPERTS, bias, renormalize, scale, weight);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (unit * 8 >= width) return;
    float sum[8] = {};
    UNROLL
    for (int k = 0; k < TOP_K; k++) {
        const int pair = token * TOP_K + k, row = row_of_pair ? __ldcg(row_of_pair + pair) : pair;
        const uint4 piece = ((const uint4*)(expert_out + (long)row * width))[unit];
        const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
        UNROLL
        for (int i = 0; i < 8; i++)
            sum[i] = fmaf(weight[k], i % 2 ? high_half(words[i / 2]) : low_half(words[i / 2]), sum[i]);
    }
    u32 words[4];
    UNROLL
    for (int i = 0; i < 4; i++) words[i] = cvt_f16_f32(sum[2 * i]) | (u32)cvt_f16_f32(sum[2 * i + 1]) << 16;
    ((uint4*)(out + (long)token * width))[unit] = uint4{words[0], words[1], words[2], words[3]};
}
