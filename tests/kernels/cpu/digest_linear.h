/* Random matrices of every width and every kind of factors: rearranged, multiplied, and taken apart by columns. */

static FactorTable factors(int kind, int groups, int columns) {
    long whole = (long)(columns + 7) / 8 * 8, count = whole * groups;
    FactorTable f = {.kind = kind, .groups_per_super = any(1, 3)};
    f.super_groups = (groups + f.groups_per_super - 1) / f.groups_per_super;
    if (kind == F16) f.table = halves(count);
    else if (kind == F32) f.table = reals(count, any(0, 3) ? 0.1f : any(0, 1) ? 0x1p-18f : 9000.0f);
    else f.table = bytes(count, kind == I8 ? 255 : 63);
    if (kind == U8 || kind == I8) f.super_scales = halves(whole * f.super_groups);
    return f;
}

/* The places of groups filled up to whole slots, all of it to whole blocks; answers how many there are. */
static int lay_out(const int *sizes, int groups, int block, int32_t *places, int32_t *group_of_kblock) {
    int count = 0, row = 0;
    for (int g = 0; g < groups; g++)
        for (int i = 0; i < (sizes[g] + LANES - 1) / LANES * LANES; i++, count++) {
            group_of_kblock[count / LANES] = g;
            places[count] = i < sizes[g] ? row++ : -1;
        }
    for (; count % block; count++) group_of_kblock[count / LANES] = groups - 1, places[count] = -1;
    return count;
}

/* The inputs at the matrix's places, in an order of chance or as they come, and perhaps a bias. */
static void take_inputs(Matrix *m, int32_t *input_of_k) {
    int32_t *order = room((size_t)m->inputs * sizeof(int32_t));
    int ordered = any(0, 1), same = 1;
    for (int i = 0; i < m->inputs; i++) {
        int other = any(0, i);
        order[i] = order[other], order[other] = i;
    }
    for (int i = 0; i < m->k_padded; i++) {
        if (ordered && input_of_k[i] >= 0) input_of_k[i] = order[input_of_k[i]];
        same &= input_of_k[i] == i;
    }
    if (!same) m->input_of_k = input_of_k;
    if (any(0, 1)) m->bias = reals(m->outputs, 1);
}

typedef struct {
    const Matrix *matrix;
    const float *x;
    int rows;
} Multiplying;

static uint64_t product_answer(void *job, int threads) {
    const Multiplying *p = job;
    long count = (long)p->rows * p->matrix->outputs;
    float *y = room((size_t)count * sizeof(float));
    if (exlm_linear(p->matrix, p->x, p->rows, y, threads)) abort();
    return digest(0, y, count);
}

static uint64_t column_answer(void *job, int threads) {
    const Matrix *m = job;
    int64_t ids[200];
    float *out = room((size_t)m->outputs * m->inputs * sizeof(float));
    for (int i = 0; i < m->outputs; i++) ids[i] = i;
    if (threads == 1) exlm_columns(m, ids, m->outputs, out);
    else for (int i = 0; i < m->outputs; i++) exlm_columns(m, ids + i, 1, out + (long)i * m->inputs);
    return digest(0, out, (long)m->outputs * m->inputs);
}

/* Dense matrices of 16 bits, and what becomes of numbers that need more. */
static void try_floats(int n) {
    int inputs = LANES * any(1, 60), outputs = F16_TILE * any(1, 9), kind = n % 2 ? F16 : BF16;
    long count = (long)inputs * outputs;
    uint16_t *plain = halves(count), *kv_f16 = room((size_t)count * sizeof(uint16_t));
    float *wide = room((size_t)count * sizeof(float));
    for (long i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)plain[i] << 16 | (uint32_t)(i & 1) << 31;
        if (kind == F16) wide[i] = f16_to_f32((uint16_t)(plain[i] | (i & 1) << 15));
        else memcpy(wide + i, &bits, sizeof bits);
    }
    int lost = exlm_narrow(wide, count, kind, kv_f16, any(1, 4));
    Segment segment = {.codes = (uint8_t *)kv_f16, .scales = {.kind = kind}, .bits = F16_BITS, .packs = inputs / LANES};
    Matrix m = {.segments = &segment, .segment_count = 1, .inputs = inputs, .outputs = outputs, .k_padded = inputs};
    Multiplying job = {&m, reals(33l * inputs, 1), 33};
    printf("narrow %d: %d %016llx\n", kind, lost, (unsigned long long)digest_bytes(0, kv_f16, 2 * count));
    tell("floats", kind, inputs, outputs, product_answer, &job);
    for (job.rows = 1; job.rows < 10; job.rows++)
        tell("few rows of floats", kind, inputs, outputs, product_answer, &job);
    wide[any(0, (int)count - 1)] = n < 4 ? 1.00001f : 1e30f;
    printf("too wide %d: %d\n", kind, exlm_narrow(wide, count, kind, kv_f16, 2));
}

/* Dense matrices of 12 bits, some numbers zero and some listed, and what is no such matrix. */
static void try_lean(int n) {
    int inputs = 64 * any(1, 20), outputs = F16_TILE * any(1, 9), begin = 0;
    long count = (long)inputs * outputs;
    float *wide = room((size_t)count * sizeof(float)), *units = room((size_t)outputs * sizeof(float));
    int32_t *outlier_begin = room((size_t)(outputs + 1) * sizeof(int32_t));
    for (long i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)any(0x3e00, 0x4000) << 16 | (uint32_t)any(0, 1) << 31;
        if (!any(0, 30)) bits = any(0, 1) ? 0 : (uint32_t)any(0x3000, 0x3a00) << 16; /* at the edge of codes, and below */
        memcpy(wide + i, &bits, sizeof bits);
    }
    memset(wide + (long)any(0, outputs - 1) * inputs, 0, (size_t)inputs * sizeof(float));
    int unsupported = exlm_bf12_plan(wide, outputs, inputs, units, outlier_begin, any(1, 4));
    for (int i = 0; i <= outputs; i++) {
        int many = i < outputs ? outlier_begin[i] : 0;
        outlier_begin[i] = begin, begin += many;
    }
    Bf12 lean = {units, outlier_begin, room((size_t)begin * sizeof(int32_t)), room((size_t)begin * sizeof(float))};
    uint8_t *codes = room((size_t)count * BF12_BITS / 8);
    exlm_bf12_pack(wide, outputs, inputs, &lean, codes, any(1, 4));
    Segment segment = {.codes = codes, .scales = {.kind = BF12}, .bits = BF12_BITS, .packs = inputs / 64};
    Matrix m = {.segments = &segment, .bf12 = &lean, .segment_count = 1, .inputs = inputs, .outputs = outputs, .k_padded = inputs};
    Multiplying job = {&m, reals(101l * inputs, 1), 101};
    printf("lean: %d %d %016llx\n", unsupported, begin, (unsigned long long)digest_bytes(0, codes, count * BF12_BITS / 8));
    tell("lean", inputs, outputs, job.rows, product_answer, &job);
    for (job.rows = 1; job.rows < 10; job.rows++) tell("few rows of lean", inputs, outputs, job.rows, product_answer, &job);
    tell("lean columns", inputs, outputs, begin, column_answer, &m);
    wide[any(0, (int)count - 1)] = n % 2 ? 1.00001f : 1e30f;
    printf("not lean: %d\n", exlm_bf12_plan(wide, outputs, inputs, units, outlier_begin, 2));
}
