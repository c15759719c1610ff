/* Random quantised matrices of every width and dtype of factors, and random float matrices: repacked, multiplied, and
   read column by column. */

#ifndef DIGEST_LINEAR_H
#define DIGEST_LINEAR_H

#include "digest.h"

enum { MAX_INPUTS = 32768, MAX_KBLOCKS = MAX_INPUTS / KBLOCK };

/* A matrix, and of each segment what the definition needs. */
typedef struct {
    Matrix matrix;
    const uint32_t *codes[3]; /* as stored: a bit stream down each output */
    const int32_t *row_of_k[3];
    int stored_bits[3], codebooks; /* codebooks: segments of 4 bits have one */
} RandomMatrix;

static FactorTable random_factors(int dtype, int groups, int outputs) {
    long padded = (outputs + 31) / 32 * 32l, count = padded * groups;
    FactorTable f = {.dtype = dtype, .groups_per_super = random_int(1, 3)};
    f.super_groups = (groups + f.groups_per_super - 1) / f.groups_per_super;
    if (dtype == F16)
        f.table = random_f16(count);
    else if (dtype == F32)
        f.table = random_floats(count, random_int(0, 3) ? 0.1f : random_int(0, 1) ? 0x1p-18f : 9000.0f);
    else
        f.table = random_bytes(count, dtype == I8 ? 255 : 63);
    if (dtype == U8 || dtype == I8)
        f.super_scales = random_f16(padded * f.super_groups);
    else
        f.groups_per_super = f.super_groups = 0;
    return f;
}

/* The stored row at each k: groups padded to kblocks, the end to packs. Returns how many k there are. */
static int fill_row_of_k(const int *sizes, int groups, int pack_rows, int32_t *row_of_k, int32_t *group_of_kblock) {
    int count = 0, row = 0;
    for (int g = 0; g < groups; g++)
        for (int i = 0; i < (sizes[g] + KBLOCK - 1) / KBLOCK * KBLOCK; i++, count++) {
            group_of_kblock[count / KBLOCK] = g;
            row_of_k[count] = i < sizes[g] ? row++ : -1;
        }
    for (; count % pack_rows; count++) {
        group_of_kblock[count / KBLOCK] = groups - 1;
        row_of_k[count] = -1;
    }
    return count;
}

static int fill_spans(const int32_t *group_of_kblock, int kblocks, int max_span, GroupSpan *spans) {
    int count = 0;
    for (int n = 0; n < kblocks; n++) {
        GroupSpan *last = spans + count - 1;
        if (count && last->group == group_of_kblock[n] && last->kblocks < max_span)
            last->kblocks++;
        else
            spans[count++] = (GroupSpan){n, 1, group_of_kblock[n]};
    }
    return count;
}

static Segment random_segment(RandomMatrix *r, int number, int inputs, int stored_bits, int row, int32_t *input_of_k) {
    Matrix *m = &r->matrix;
    int bits = stored_bits == 7 ? 8 : stored_bits, sizes[600], groups = 0, pack_rows = KBLOCK << (bits & 1);
    int usual_size = random_int(0, 2) ? 16 << random_int(0, 5) : 0;
    for (int left = inputs; left; left -= sizes[groups++]) {
        sizes[groups] = usual_size ? usual_size : random_int(1, 70);
        if (sizes[groups] > left) sizes[groups] = left;
    }
    int32_t *row_of_k = allocate(MAX_INPUTS * sizeof(int32_t));
    int32_t *group_of_kblock = allocate(MAX_KBLOCKS * sizeof(int32_t));
    GroupSpan *spans = allocate(MAX_KBLOCKS * sizeof(GroupSpan));
    int count = fill_row_of_k(sizes, groups, pack_rows, row_of_k, group_of_kblock);
    uint32_t *codes = random_bytes(4l * ((inputs * stored_bits + 31) / 32) * m->outputs, 255);
    Segment s = {.bits = bits, .packs = count / pack_rows, .groups = groups, .spans = spans, .first_k = m->k_padded};
    s.codes = allocate((size_t)((m->outputs + 31) / 32 * 32l * count * bits / 8 + 8192));
    s.span_count = fill_spans(group_of_kblock, count / KBLOCK, m->act_bytes == 1 ? MAX_BYTE_SPAN : MAX_SPAN, spans);
    s.first_span = m->span_count;
    m->span_count += s.span_count;
    s.scales = random_factors(random_int(0, 1) ? F16 : random_int(F16, I8), groups, m->outputs);
    if (random_int(0, 1)) s.minima = random_factors(random_int(0, 1) ? F16 : random_int(F16, U8), groups, m->outputs);
    if (random_int(0, 1)) {
        s.zeros = random_factors(U8, groups, m->outputs);
        s.zeros.super_scales = NULL;
    } else
        s.zero = random_int(0, 1) << (bits - 1);
    if (r->codebooks && bits == 4) s.codebook = random_bytes(16, 255);
    if (s.codebook && !s.zeros.dtype && random_int(0, 2)) s.zero = 128; /* as codebooks of signed numbers have it */
    exlm_repack_panels(codes, m->outputs, stored_bits, bits, row_of_k, s.packs, (uint8_t *)s.codes, random_int(1, 4));
    for (int i = 0; i < count; i++) input_of_k[m->k_padded + i] = row_of_k[i] < 0 ? -1 : row_of_k[i] + row;
    m->k_padded += count;
    r->codes[number] = codes;
    r->row_of_k[number] = row_of_k;
    r->stored_bits[number] = stored_bits;
    return s;
}

/* Inputs in random order or as they come, and perhaps a bias. */
static void random_inputs(Matrix *m, int32_t *input_of_k) {
    int32_t *order = allocate((size_t)m->inputs * sizeof(int32_t));
    int shuffled = random_int(0, 1), identity = 1;
    for (int i = 0; i < m->inputs; i++) {
        int other = random_int(0, i);
        order[i] = order[other];
        order[other] = i;
    }
    for (int i = 0; i < m->k_padded; i++) {
        if (shuffled && input_of_k[i] >= 0) input_of_k[i] = order[input_of_k[i]];
        identity &= input_of_k[i] == i;
    }
    if (!identity) m->input_of_k = input_of_k;
    if (random_int(0, 1)) m->bias = random_floats(m->outputs, 1);
}

/* One to three segments. Widths of 2 to 8 bits take turns. */
static RandomMatrix *random_matrix(int inputs, int outputs, int number, int codebooks, int act_bytes) {
    int32_t *input_of_k = allocate(2 * MAX_INPUTS * sizeof(int32_t));
    int row = 0, parts = random_int(1, 3);
    Segment *segments = allocate(3 * sizeof(Segment));
    RandomMatrix *r = allocate(sizeof(RandomMatrix));
    Matrix *m = &r->matrix;
    *m = (Matrix){.segments = segments, .inputs = inputs, .outputs = outputs, .round_f16 = random_int(0, 1)};
    m->act_bytes = act_bytes;
    r->codebooks = codebooks;
    for (int n = 0; n < parts && row < inputs; n++) {
        int rows = n + 1 < parts ? random_int(1, inputs - row) : inputs - row;
        segments[n] = random_segment(r, n, rows, 2 + (number + 3 * n) % 7, row, input_of_k);
        m->segment_count++;
        row += rows;
    }
    random_inputs(m, input_of_k);
    return r;
}

#if defined(BY_DEFINITION)

static long factor_index(int outputs, int groups, int group, int output) {
    int index = 0;
    while (output >= (panel_at(outputs, index).first + panel_at(outputs, index).tiles) * TILE_N) index++;
    Panel panel = panel_at(outputs, index);
    return table_offset(panel, groups, group) + output - panel.first * TILE_N;
}

static float factor(const FactorTable *f, int outputs, int groups, int group, int output) {
    long at = factor_index(outputs, groups, group, output);
    float value;
    if (f->dtype == F16)
        value = f16_to_f32(((const uint16_t *)f->table)[at]);
    else if (f->dtype == F32)
        value = ((const float *)f->table)[at];
    else if (f->dtype == U8)
        value = ((const uint8_t *)f->table)[at];
    else
        value = ((const int8_t *)f->table)[at];
    if (!f->super_scales) return value;
    return value *
           f16_to_f32(f->super_scales[factor_index(outputs, f->super_groups, group / f->groups_per_super, output)]);
}

/* The number a code stands for, before its zero point is taken off; `k` counts from the segment's first. */
static int code_at(const RandomMatrix *r, int number, int k, int output) {
    int row = r->row_of_k[number][k], stored_bits = r->stored_bits[number], code = 0;
    const uint8_t *codebook = r->matrix.segments[number].codebook;
    for (int bit = 0; row >= 0 && bit < stored_bits; bit++) {
        long at = (long)row * stored_bits + bit;
        code |= (int)(r->codes[number][at / 32 * r->matrix.outputs + output] >> at % 32 & 1) << bit;
    }
    return codebook ? codebook[code] : code;
}

/* Quantises a span of x; returns delta. */
static float quantize_by_definition(const Matrix *m, const float *x, int k, int count, int32_t *q, int32_t *sum) {
    float largest = 0, delta = 0;
    int exponent;
    *sum = 0;
    for (int i = 0; i < count; i++) {
        int input = m->input_of_k ? m->input_of_k[k + i] : k + i;
        float size = input < 0 ? 0 : fabsf(x[input]);
        largest = size > largest ? size : largest;
    }
    if (largest >= ldexpf(1, 27 - 127) && m->act_bytes == 1)
        delta = largest / 127;
    else if (largest >= ldexpf(1, 27 - 127)) {
        frexpf(largest * 1.00398f, &exponent);
        delta = ldexpf(1, exponent - 15);
    }
    for (int i = 0; i < count; i++) {
        int input = m->input_of_k ? m->input_of_k[k + i] : k + i;
        float inverse = m->act_bytes == 1 ? 127 / largest : 1 / delta;
        q[i] = delta == 0 || input < 0 ? 0 : (int32_t)lrintf(x[input] * inverse);
        *sum += q[i];
    }
    return delta;
}

static int zero_point(const Segment *s, int outputs, int group, int output) {
    return s->zeros.dtype ? (int)factor(&s->zeros, outputs, s->groups, group, output) : s->zero;
}

static float add_span(const RandomMatrix *r, int number, const GroupSpan *span, const float *x, int output, float y) {
    const Matrix *m = &r->matrix;
    const Segment *s = m->segments + number;
    int32_t q[MAX_SPAN * KBLOCK], sum;
    int k = span->kblock * KBLOCK, count = span->kblocks * KBLOCK;
    uint32_t dot = 0;
    float delta = quantize_by_definition(m, x, s->first_k + k, count, q, &sum);
    for (int i = 0; i < count; i++) dot += (uint32_t)(code_at(r, number, k + i, output) * q[i]);
    dot -= (uint32_t)zero_point(s, m->outputs, span->group, output) * (uint32_t)sum;
    y = fmaf((float)(int32_t)dot * delta, factor(&s->scales, m->outputs, s->groups, span->group, output), y);
    if (!s->minima.dtype) return y;
    return fmaf(-factor(&s->minima, m->outputs, s->groups, span->group, output), delta * (float)sum, y);
}

static void product_by_definition(const RandomMatrix *r, const float *x, int rows, float *y) {
    const Matrix *m = &r->matrix;
    for (int i = 0; i < rows * m->outputs; i++) {
        int output = i % m->outputs;
        const float *row = x + (long)(i / m->outputs) * m->inputs;
        y[i] = 0;
        for (int n = 0; n < m->segment_count; n++)
            for (int s = 0; s < m->segments[n].span_count; s++)
                y[i] = add_span(r, n, m->segments[n].spans + s, row, output, y[i]);
        if (m->bias) y[i] += m->bias[output];
    }
}

static void column_by_definition(const RandomMatrix *r, int output, float *out) {
    const Matrix *m = &r->matrix;
    for (int n = 0; n < m->segment_count; n++) {
        const Segment *s = m->segments + n;
        for (const GroupSpan *span = s->spans; span < s->spans + s->span_count; span++)
            for (int k = span->kblock * KBLOCK; k < (span->kblock + span->kblocks) * KBLOCK; k++) {
                int at = s->first_k + k, input = m->input_of_k ? m->input_of_k[at] : at;
                if (input < 0) continue;
                int number = code_at(r, n, k, output) - zero_point(s, m->outputs, span->group, output);
                float value = (float)number * factor(&s->scales, m->outputs, s->groups, span->group, output);
                if (s->minima.dtype) value -= factor(&s->minima, m->outputs, s->groups, span->group, output);
                out[input] = m->round_f16 ? f16_to_f32(f16_from_f32(value)) : value;
            }
    }
}

#endif

typedef struct {
    const RandomMatrix *random;
    const float *x;
    int rows;
} Product;

static uint64_t run_product(void *job, int threads) {
    const Product *p = job;
    const Matrix *m = &p->random->matrix;
    long count = (long)p->rows * m->outputs;
    float *y = allocate((size_t)count * sizeof(float));
#if defined(BY_DEFINITION)
    static uint64_t known;
    if (threads == 1) {
        product_by_definition(p->random, p->x, p->rows, y);
        known = digest(0, y, count);
    }
    return known;
#else
    if (exlm_linear(m, p->x, p->rows, y, threads)) abort();
    return digest(0, y, count);
#endif
}

static uint64_t run_columns(void *job, int threads) {
    const RandomMatrix *r = job;
    const Matrix *m = &r->matrix;
    float *out = allocate((size_t)m->outputs * m->inputs * sizeof(float));
    (void)threads;
    for (int64_t i = 0; i < m->outputs; i++) {
#if defined(BY_DEFINITION)
        column_by_definition(r, (int)i, out + i * m->inputs);
#else
        exlm_dequantize_columns(m, &i, 1, out + i * m->inputs);
#endif
    }
    return digest(0, out, (long)m->outputs * m->inputs);
}

static void case_product(int n, int codebooks, int act_bytes) {
    int inputs = n % 4 ? random_int(1, 200) : random_int(300, 900), outputs = random_int(1, 110);
    int rows = n % 70 == 40 ? 100 : 1 + n % 33; /* 100: more than one block of rows */
    if (rows > 50) inputs = 70;
    RandomMatrix *r = random_matrix(inputs, outputs, n, codebooks, act_bytes);
    float *x = random_floats((long)rows * inputs, n % 3 ? 1 : 1e-3f);
    for (int i = 0; i < rows * inputs; i += random_int(1, 400)) x[i] *= 300;
    Product job = {r, x, rows};
    print_digest("product", 2 + n % 7, rows, outputs, run_product, &job);
    job.rows = 1;
    print_digest("one row", 2 + n % 7, inputs, outputs, run_product, &job);
    print_digest("columns", 2 + n % 7, inputs, outputs, run_columns, r);
}

static void case_matrix(int n) { case_product(n, 0, 2); }

static void case_byte_activations(int n) { case_product(n, n % 5 == 2, 1); }

/* The first segment has 4 bits and a codebook, others have other widths. */
static void case_codebook(int n) { case_product(2 + 7 * n, 1, 2); }

typedef struct {
    const Matrix *matrix;
    const float *x;
    int rows;
} FloatProduct;

static uint64_t run_float_product(void *job, int threads) {
    const FloatProduct *p = job;
    long count = (long)p->rows * p->matrix->outputs;
    float *y = allocate((size_t)count * sizeof(float));
    if (exlm_linear(p->matrix, p->x, p->rows, y, threads)) abort();
    return digest(0, y, count);
}

static uint64_t run_bf12_columns(void *job, int threads) {
    const Matrix *m = job;
    int64_t ids[200];
    float *out = allocate((size_t)m->outputs * m->inputs * sizeof(float));
    for (int i = 0; i < m->outputs; i++) ids[i] = i;
    if (threads == 1)
        exlm_dequantize_columns(m, ids, m->outputs, out);
    else
        for (int i = 0; i < m->outputs; i++) exlm_dequantize_columns(m, ids + i, 1, out + (long)i * m->inputs);
    return digest(0, out, (long)m->outputs * m->inputs);
}

/* float16 and bfloat16 matrices, and one number that fits neither. */
static void case_f16(int n) {
    int inputs = LANES * random_int(1, 60), outputs = FLOAT_TILE_N * random_int(1, 9), dtype = n % 2 ? F16 : BF16;
    long count = (long)inputs * outputs;
    uint16_t *halves = random_f16(count), *narrow = allocate((size_t)count * sizeof(uint16_t));
    float *data = allocate((size_t)count * sizeof(float));
    for (long i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)halves[i] << 16 | (uint32_t)(i & 1) << 31;
        if (dtype == F16)
            data[i] = f16_to_f32((uint16_t)(halves[i] | (i & 1) << 15));
        else
            memcpy(data + i, &bits, sizeof bits);
    }
    int lossy = exlm_cast_16bit(data, count, dtype, narrow, random_int(1, 4));
    Segment s = {.codes = (uint8_t *)narrow, .scales = {.dtype = dtype}, .bits = F16_BITS, .packs = inputs / LANES};
    Matrix m = {.segments = &s, .segment_count = 1, .inputs = inputs, .outputs = outputs, .k_padded = inputs};
    FloatProduct job = {&m, random_floats(33l * inputs, 1), 33};
    printf("narrow %d: %d %016llx\n", dtype, lossy, (unsigned long long)digest_bytes(0, narrow, 2 * count));
    print_digest("f16", dtype, inputs, outputs, run_float_product, &job);
    for (job.rows = 1; job.rows < 10; job.rows++)
        print_digest("few rows of f16", dtype, inputs, outputs, run_float_product, &job);
    data[random_int(0, (int)count - 1)] = n < 4 ? 1.00001f : 1e30f;
    printf("lossy %d: %d\n", dtype, exlm_cast_16bit(data, count, dtype, narrow, 2));
}

/* BF12 matrices with zeros and outliers, and one number that BF12 cannot hold. */
static void case_bf12(int n) {
    int inputs = 64 * random_int(1, 20), outputs = FLOAT_TILE_N * random_int(1, 9), begin = 0;
    long count = (long)inputs * outputs;
    float *data = allocate((size_t)count * sizeof(float)), *units = allocate((size_t)outputs * sizeof(float));
    int32_t *outlier_begin = allocate((size_t)(outputs + 1) * sizeof(int32_t));
    for (long i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)random_int(0x3e00, 0x4000) << 16 | (uint32_t)random_int(0, 1) << 31;
        if (!random_int(0, 30)) bits = random_int(0, 1) ? 0 : (uint32_t)random_int(0x3000, 0x3a00) << 16;
        memcpy(data + i, &bits, sizeof bits);
    }
    memset(data + (long)random_int(0, outputs - 1) * inputs, 0, (size_t)inputs * sizeof(float));
    int unsupported = exlm_bf12_plan(data, outputs, inputs, units, outlier_begin, random_int(1, 4));
    for (int i = 0; i <= outputs; i++) {
        int outliers = i < outputs ? outlier_begin[i] : 0;
        outlier_begin[i] = begin;
        begin += outliers;
    }
    Bf12 bf12 = {units, outlier_begin, allocate((size_t)begin * sizeof(int32_t)),
                 allocate((size_t)begin * sizeof(float))};
    uint8_t *codes = allocate((size_t)count * BF12_BITS / 8);
    exlm_bf12_pack(data, outputs, inputs, &bf12, codes, random_int(1, 4));
    Segment s = {.codes = codes, .scales = {.dtype = BF12}, .bits = BF12_BITS, .packs = inputs / 64};
    Matrix m = {.segments = &s, .bf12 = &bf12, .segment_count = 1};
    m.inputs = m.k_padded = inputs;
    m.outputs = outputs;
    FloatProduct job = {&m, random_floats(101l * inputs, 1), 101};
    uint64_t code_digest = digest_bytes(0, codes, count * BF12_BITS / 8);
    printf("bf12 codes: %d %d %016llx\n", unsupported, begin, (unsigned long long)code_digest);
    print_digest("bf12", inputs, outputs, job.rows, run_float_product, &job);
    for (job.rows = 1; job.rows < 10; job.rows++)
        print_digest("few rows of bf12", inputs, outputs, job.rows, run_float_product, &job);
    print_digest("bf12 columns", inputs, outputs, begin, run_bf12_columns, &m);
    data[random_int(0, (int)count - 1)] = n % 2 ? 1.00001f : 1e30f;
    printf("not bf12: %d\n", exlm_bf12_plan(data, outputs, inputs, units, outlier_begin, 2));
}

#endif
