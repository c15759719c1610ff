// Sums of 17 to 64 rows to answers, by way of shared memory.

// Four neighbours of a row of halves, at once if they lie so; those behind `count` are none.
DEVICE uint2 load4(const u16* from, bool even, int count) {
    if (even) return count > 0 ? *(const uint2*)from : uint2{};
    u32 halves[4];
    UNROLL for (int k = 0; k < 4; k++) halves[k] = k < count ? from[k] : 0;
    return uint2{halves[0] | halves[1] << 16, halves[2] | halves[3] << 16};
}
DEVICE void store4(u16* from, long at, bool even, int count, const float (&y)[4]) {
    if (FP32_OUT) {
        float* to = (float*)from + at;
        if (even && count > 0) *(float4*)to = float4{y[0], y[1], y[2], y[3]};
        UNROLL for (int k = 0; k < 4; k++) if (!even && k < count) to[k] = y[k];
        return;
    }
    u16* to = from + at;
    if (even) {
        if (count > 0)
            *(uint2*)to = uint2{cvt_f16_f32(y[0]) | (u32)cvt_f16_f32(y[1]) << 16, cvt_f16_f32(y[2]) | (u32)cvt_f16_f32(y[3]) << 16};
        return;
    }
    UNROLL for (int k = 0; k < 4; k++) if (k < count) to[k] = cvt_f16_f32(y[k]);
}

// Sums to shared memory, (side, row, output): the lanes of the tensor cores hold them in pieces.
#define ROW_STEP (WIDTH + 4)  // from row to row: other banks
template <int EIGHTS> DEVICE void acc_to_smem(const float (*total)[EIGHTS][4], float* found) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = EIGHTS * 8;
    UNROLL for (int s = 0; s < GLU_WEIGHTS; s++) UNROLL for (int t = 0; t < WEIGHT_TILES; t++) UNROLL for (int c = 0; c < EIGHTS; c++)
        UNROLL for (int i = 0; i < 4; i++)
            found[(s * rows + c * 8 + lane % 4 * 2 + i % 2) * ROW_STEP + (warp * WEIGHT_TILES + t) * 16 + lane / 4 + i / 2 * 8] =
                total[s * WEIGHT_TILES + t][c][i];
    __syncthreads();
}

// Answers of some eights of rows to the next product: eight rows of an output lie together there.
DEVICE void store_prepacked_rows(const EpilogueTarget& heir, const Book& book, int group, int first, int eights, int outputs, const float* found) {
    __syncthreads();
    for (int i = threadIdx.x; i < WIDTH * eights; i += THREADS) {
        const int column = i % WIDTH, eight = i / WIDTH;
        if (group * WIDTH + column >= outputs) continue;
        u16 halves[8];
        UNROLL for (int r = 0; r < 8; r++)
            halves[r] = book.normed(heir, column, found[(eight * 8 + r) * ROW_STEP + column]);
        store_prepacked8(heir, book.places[column], (first + eight) * 8, halves);
    }
}

// The threads that have a row, and what each adds to its four outputs of some rows at a time. Those of the first rows are
// asked for before the sums are there.
#define THREADS_PER_ROW (WIDTH / 4)
#define ROW_PACE (THREADS / THREADS_PER_ROW)
template <int EIGHTS> struct BiasResidual {
    static const int many = EIGHTS * 8 / ROW_PACE, some = many % 4 ? many % 2 ? 1 : 2 : 4;  // rows of a thread, and at a time
    uint2 halves[some];
    float bias[GLU_WEIGHTS][4];
    int output, count, first, last;
    bool even;

    DEVICE void ask(const GemmParams& job, const GemmOperand& part, int row) {
        UNROLL for (int i = 0; i < some; i++, row += ROW_PACE) {
            const u16* from = job.residual + (long)(first * 8 + row) * part.stride + output;
            halves[i] = job.residual && row < last ? load4(from, even, count) : uint2{};
        }
    }
    DEVICE void ask(const GemmParams& job, int at, int group, int from, int end) {
        const GemmOperand& part = job.parts[at];
        output = group * WIDTH + threadIdx.x % THREADS_PER_ROW * 4, count = part.outputs - output;
        first = from, last = min(end * 8, job.rows) - first * 8;
        even = part.outputs % 4 == 0 && part.stride % 4 == 0 && ((size_t)part.y | (size_t)job.residual) % (FP32_OUT ? 16 : 8) == 0;
        UNROLL for (int s = 0; s < GLU_WEIGHTS; s++) UNROLL for (int k = 0; k < 4; k++) {
            const u16* added = job.parts[at + s].bias;
            bias[s][k] = added && k < count ? cvt_f32_f16(added[output + k]) : 0.0f;
        }
        ask(job, part, threadIdx.x / THREADS_PER_ROW);
    }
};

// The squares of rows that a warp has, to whom asks for them: of each row in one and the same order.
template <int SOME> DEVICE void store_rms_partials(const EpilogueTarget& heir, float (&squares)[SOME], int group, int row, int last) {
    const int lanes = THREADS_PER_ROW < 32 ? THREADS_PER_ROW : 32, parts = THREADS_PER_ROW / lanes;
    UNROLL for (int other = lanes / 2; other; other /= 2) UNROLL for (int i = 0; i < SOME; i++)
        squares[i] += shfl_xor(squares[i], other);
    UNROLL for (int i = 0; i < SOME; i++, row += ROW_PACE)
        if (threadIdx.x % lanes == 0 && row < last)
            heir.squares[row * heir.shares + group * parts + threadIdx.x % THREADS_PER_ROW / lanes] = squares[i];
}

// Sums to answers, so that neighbours write to neighbours; of some eights of rows.
template <int EIGHTS>
DEVICE void epilogue(const GemmParams& job, const ChainArgs& link, int at, int group, BiasResidual<EIGHTS>& rest, const float (*total)[EIGHTS][4], char* memory) {
    float* found = (float*)memory;
    const Book& book = *(const Book*)(memory + LEDGER_AT);
    const int rows = EIGHTS * 8, some = BiasResidual<EIGHTS>::some, first = rest.first, last = rest.last, column = threadIdx.x % THREADS_PER_ROW * 4;
    acc_to_smem<EIGHTS>(total, found);
    const GemmOperand& part = job.parts[at];
    // Code that runs once comes slowly: a loop, with some rows at a time so that what they add is fetched together.
    _Pragma("unroll 1") for (int n = 0, row = threadIdx.x / THREADS_PER_ROW; n < rest.many; n += some, row += some * ROW_PACE) {
        if (n) rest.ask(job, part, row);
        float squares[some] = {};
        UNROLL for (int i = 0; i < some; i++) {
            const int here = row + i * ROW_PACE;
            if (here >= last) break;
            const float measure = IN_PREPACKED && RMS_NORM ? book.measures[first * 8 + here] : 1.0f;
            float y[4];
            UNROLL for (int s = 0; s < GLU_WEIGHTS; s++) {
                const float4 sums = *(const float4*)(found + (s * rows + here) * ROW_STEP + column);
                const float of[4] = {sums.x, sums.y, sums.z, sums.w};
                UNROLL for (int k = 0; k < 4; k++) {
                    const float sum = fmaf(of[k], job.parts[at + s].matrix.factor * measure, rest.bias[s][k]);
                    y[k] = s ? y[k] * sum : ACTIVATION ? activate(sum) : sum;
                }
            }
            const u32 words[2] = {rest.halves[i].x, rest.halves[i].y};
            UNROLL for (int k = 0; k < 4; k++) y[k] += cvt_f32_f16((u16)(words[k / 2] >> k % 2 * 16));
            if (!OUT_PREPACKED || part.y) store4(part.y, (long)(first * 8 + here) * part.stride + rest.output, rest.even, rest.count, y);
            if (!OUT_PREPACKED) continue;
            UNROLL for (int k = 0; k < 4; k++) {
                y[k] = k < rest.count ? cvt_f32_f16(cvt_f16_f32(y[k])) : 0.0f;
                squares[i] = fmaf(y[k], y[k], squares[i]);
            }
            *(float4*)(found + here * ROW_STEP + column) = float4{y[0], y[1], y[2], y[3]};
        }
        if (OUT_PREPACKED && link.heir.squares) store_rms_partials(link.heir, squares, group, first * 8 + row, first * 8 + last);
    }
    if (OUT_PREPACKED) store_prepacked_rows(link.heir, book, group, first, (last + 7) / 8, part.outputs, found);
}
