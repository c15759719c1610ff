/* Random matrices in bands. Where there are no products of whole numbers, what they must be is worked out one by one. */

typedef struct {
    Matrix matrix;
    const uint32_t *codes[3]; /* of each run, as they came */
    const int32_t *places[3];
    int stored_bits[3], codebooks; /* codebooks: codes of 4 bits stand for other numbers */
} Banding;

/* A table for whole bands. */
static FactorTable band_factors(int kind, int groups, int columns) {
    int whole = (columns + 31) / 32 * 32;
    FactorTable f = factors(kind, groups, whole);
    if (f.super_scales) return f;
    f.groups_per_super = f.super_groups = 0;
    return f;
}

/* Neighbouring slots of a group, at most sixteen; answers how many spans there are. */
static int spans_of(const int32_t *group_of_kblock, int kblocks, GroupSpan *spans) {
    int count = 0;
    for (int s = 0; s < kblocks; s++) {
        GroupSpan *last = spans + count - 1;
        if (count && last->group == group_of_kblock[s] && last->kblocks < 16) last->kblocks++;
        else spans[count++] = (GroupSpan){s, 1, group_of_kblock[s]};
    }
    return count;
}

static Segment a_banded_run(Banding *b, int number, int inputs, int stored_bits, int row, int32_t *input_of_k) {
    int bits = stored_bits == 7 ? 8 : stored_bits, sizes[600], groups = 0, usual = any(0, 2) ? 16 << any(0, 5) : 0;
    Matrix *m = &b->matrix;
    for (int left = inputs; left; left -= sizes[groups++]) {
        sizes[groups] = usual ? usual : any(1, 70);
        if (sizes[groups] > left) sizes[groups] = left;
    }
    int32_t *own = room(32768 * sizeof(int32_t)), *group_of_kblock = room(2048 * sizeof(int32_t));
    int block = LANES << (bits & 1), count = lay_out(sizes, groups, block, own, group_of_kblock);
    uint32_t *codes = bytes(4l * ((inputs * stored_bits + 31) / 32) * m->outputs, 255);
    GroupSpan *spans = room(2048 * sizeof(GroupSpan));
    Segment segment = {.bits = bits, .packs = count / block, .groups = groups, .spans = spans, .first_k = m->k_padded};
    segment.codes = room((size_t)((m->outputs + 31) / 32 * 32l * count * bits / 8 + 8192));
    segment.span_count = spans_of(group_of_kblock, count / LANES, spans), segment.first_span = m->span_count, m->span_count += segment.span_count;
    segment.scales = band_factors(any(0, 1) ? F16 : any(F16, I8), groups, m->outputs);
    if (any(0, 1)) segment.minima = band_factors(any(0, 1) ? F16 : any(F16, U8), groups, m->outputs);
    if (any(0, 1)) {
        segment.zeros = band_factors(U8, groups, m->outputs);
        segment.zeros.super_scales = NULL;
    } else segment.zero = any(0, 1) << (bits - 1);
    if (b->codebooks && bits == 4) segment.codebook = bytes(16, 255);
    if (segment.codebook && !segment.zeros.kind && any(0, 2)) segment.zero = 128; /* as signed ones have it */
    exlm_repack_panels(codes, m->outputs, stored_bits, bits, own, segment.packs, (uint8_t *)segment.codes, any(1, 4));
    for (int i = 0; i < count; i++) input_of_k[m->k_padded + i] = own[i] < 0 ? -1 : own[i] + row;
    m->k_padded += count;
    b->codes[number] = codes, b->places[number] = own, b->stored_bits[number] = stored_bits;
    return segment;
}

#if defined(BY_DEFINITION)

/* Where the factor of an output and a group lies, and what it is. */
static long factor_at(int outputs, int groups, int group, int output) {
    int number = 0;
    while (output >= (panel_at(outputs, number).first + panel_at(outputs, number).tiles) * LANES) number++;
    Panel panel = panel_at(outputs, number);
    return ((long)panel.first * groups + group * panel.tiles) * LANES + output - panel.first * LANES;
}

static float factor(const FactorTable *f, int outputs, int groups, int group, int output) {
    long at = factor_at(outputs, groups, group, output);
    float value;
    if (f->kind == F16) value = f16_to_f32(((const uint16_t *)f->table)[at]);
    else if (f->kind == F32) value = ((const float *)f->table)[at];
    else if (f->kind == U8) value = ((const uint8_t *)f->table)[at];
    else value = ((const int8_t *)f->table)[at];
    return f->super_scales ? value * f16_to_f32(f->super_scales[factor_at(outputs, f->super_groups, group / f->groups_per_super, output)]) : value;
}

static int code_at(const Banding *b, int number, int place, int output) {
    int row = b->places[number][place], stored_bits = b->stored_bits[number], code = 0;
    for (int bit = 0; row >= 0 && bit < stored_bits; bit++) {
        long at = (long)row * stored_bits + bit;
        code |= (int)(b->codes[number][at / 32 * b->matrix.outputs + output] >> at % 32 & 1) << bit;
    }
    return b->matrix.segments[number].codebook ? b->matrix.segments[number].codebook[code] : code;
}

/* The digits of a span, by the definition; answers the power of two. */
static float whole_numbers(const Matrix *m, const float *x, int place, int count, int32_t *whole, int32_t *sum) {
    float largest = 0, delta = 0;
    int exponent;
    *sum = 0;
    for (int i = 0; i < count; i++) {
        int input = m->input_of_k ? m->input_of_k[place + i] : place + i;
        float size = input < 0 ? 0 : fabsf(x[input]);
        largest = size > largest ? size : largest;
    }
    if (largest >= ldexpf(1, 27 - 127)) {
        frexpf(largest * 1.00398f, &exponent);
        delta = ldexpf(1, exponent - 15);
    }
    for (int i = 0; i < count; i++) {
        int input = m->input_of_k ? m->input_of_k[place + i] : place + i;
        whole[i] = delta == 0 || input < 0 ? 0 : (int32_t)lrintf(x[input] / delta);
        *sum += whole[i];
    }
    return delta;
}

/* What a span adds to an answer. */
static float with_span(const Banding *b, int number, const GroupSpan *span, const float *x, int output, float answer) {
    const Matrix *m = &b->matrix;
    const Segment *segment = m->segments + number;
    int32_t whole[256], sum;
    int zero = segment->zero, place = span->kblock * LANES, count = span->kblocks * LANES;
    uint32_t total = 0;
    float delta = whole_numbers(m, x, segment->first_k + place, count, whole, &sum);
    for (int i = 0; i < count; i++) total += (uint32_t)(code_at(b, number, place + i, output) * whole[i]);
    if (segment->zeros.kind) zero = (int)factor(&segment->zeros, m->outputs, segment->groups, span->group, output);
    total -= (uint32_t)zero * (uint32_t)sum;
    float scale = factor(&segment->scales, m->outputs, segment->groups, span->group, output);
    answer = fmaf((float)(int32_t)total * delta, scale, answer);
    if (!segment->minima.kind) return answer;
    float minimum = factor(&segment->minima, m->outputs, segment->groups, span->group, output);
    return fmaf(-minimum, delta * (float)sum, answer);
}

static float one_by_one(const Banding *b, const float *x, int output) {
    const Matrix *m = &b->matrix;
    float answer = 0;
    for (int n = 0; n < m->segment_count; n++)
        for (int i = 0; i < m->segments[n].span_count; i++) answer = with_span(b, n, m->segments[n].spans + i, x, output, answer);
    return m->bias ? answer + m->bias[output] : answer;
}

/* What a weight is, at its input. */
static void column_one_by_one(const Banding *b, int output, float *out) {
    const Matrix *m = &b->matrix;
    for (int n = 0; n < m->segment_count; n++) {
        const Segment *segment = m->segments + n;
        for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++)
            for (int i = 0; i < span->kblocks * LANES; i++) {
                int place = span->kblock * LANES + i, at = segment->first_k + place, input = m->input_of_k ? m->input_of_k[at] : at;
                if (input < 0) continue;
                int zero = segment->zero, code = code_at(b, n, place, output);
                if (segment->zeros.kind) zero = (int)factor(&segment->zeros, m->outputs, segment->groups, span->group, output);
                float value = (float)(code - zero) * factor(&segment->scales, m->outputs, segment->groups, span->group, output);
                if (segment->minima.kind) value -= factor(&segment->minima, m->outputs, segment->groups, span->group, output);
                f32v rounded = f32_round_f16(f32_set1(value));
                if (m->round_f16) memcpy(&value, &rounded, sizeof value);
                out[input] = value;
            }
    }
}
#endif

typedef struct {
    const Banding *banding;
    const float *x;
    int rows;
} Multiplying_bands;

static uint64_t banded_answer(void *job, int threads) {
    const Multiplying_bands *p = job;
    const Matrix *m = &p->banding->matrix;
    float *y = room((size_t)p->rows * m->outputs * sizeof(float));
#if !defined(BY_DEFINITION)
    if (exlm_linear(m, p->x, p->rows, y, threads)) abort();
#else
    for (int i = 0; threads == 1 && i < p->rows * m->outputs; i++)
        y[i] = one_by_one(p->banding, p->x + (long)(i / m->outputs) * m->inputs, i % m->outputs);
    static uint64_t known;
    if (threads > 1) return known;
    known = digest(0, y, (long)p->rows * m->outputs);
#endif
    return digest(0, y, (long)p->rows * m->outputs);
}

static uint64_t banded_columns(void *job, int threads) {
    const Banding *b = job;
    const Matrix *m = &b->matrix;
    float *out = room((size_t)m->outputs * m->inputs * sizeof(float));
    for (int64_t i = 0; i < m->outputs; i++) {
#if !defined(BY_DEFINITION)
        (void)threads, exlm_columns(m, &i, 1, out + i * m->inputs);
#else
        (void)threads, column_one_by_one(b, (int)i, out + i * m->inputs);
#endif
    }
    return digest(0, out, (long)m->outputs * m->inputs);
}

/* A matrix of one to three runs. Widths 2 to 8 come in turn. */
static Banding *a_matrix(int inputs, int outputs, int number, int codebooks) {
    int32_t *input_of_k = room(65536 * sizeof(int32_t));
    int row = 0, parts = any(1, 3);
    Segment *segments = room(3 * sizeof(Segment));
    Banding *b = room(sizeof(Banding));
    b->matrix = (Matrix){.segments = segments, .inputs = inputs, .outputs = outputs, .round_f16 = any(0, 1)};
    Matrix *m = &b->matrix;
    b->codebooks = codebooks;
    for (int k = 0; k < parts && row < inputs; k++) {
        int some = k + 1 < parts ? any(1, inputs - row) : inputs - row;
        segments[k] = a_banded_run(b, k, some, 2 + (number + 3 * k) % 7, row, input_of_k);
        m->segment_count++, row += some;
    }
    take_inputs(m, input_of_k);
    return b;
}

static void try_matrix(int n, int codebooks) {
    int inputs = n % 4 ? any(1, 200) : any(300, 900), outputs = any(1, 110), rows = n % 70 == 40 ? 100 : 1 + n % 33;
    if (rows > 50) inputs = 70;
    Banding *b = a_matrix(inputs, outputs, n, codebooks);
    float *x = reals((long)rows * inputs, n % 3 ? 1 : 1e-3f);
    for (int i = 0; i < rows * inputs; i += any(1, 400)) x[i] *= 300;
    Multiplying_bands job = {b, x, rows};
    tell("bands", 2 + n % 7, rows, outputs, banded_answer, &job);
    job.rows = 1;
    tell("one row of bands", 2 + n % 7, inputs, outputs, banded_answer, &job);
    tell("columns of bands", 2 + n % 7, inputs, outputs, banded_columns, b);
}

static void try_bands(int n) { try_matrix(n, 0); }

/* Every run is of 4 bits, every other one of others. */
static void try_codebooks(int n) { try_matrix(2 + 7 * n, 1); }
