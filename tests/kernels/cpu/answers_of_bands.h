/* Random matrices in bands. Where there are no products of whole numbers, what they must be is worked out one by one. */

typedef struct {
    Matrix matrix;
    const uint32_t *codes[3]; /* of each run, as they came */
    const int32_t *places[3];
    int stored[3];
} Banding;

/* A table for whole bands. */
static Factors band_factors(int kind, int groups, int columns) {
    int whole = (columns + 31) / 32 * 32;
    Factors f = factors(kind, groups, whole);
    if (f.supers) return f;
    f.each = f.many = 0;
    return f;
}

/* Neighbouring slots of a group, at most sixteen; answers how many spans there are. */
static int spans_of(const int32_t *owners, int slots, Span *spans) {
    int count = 0;
    for (int s = 0; s < slots; s++) {
        Span *last = spans + count - 1;
        if (count && last->group == owners[s] && last->slots < 16) last->slots++;
        else spans[count++] = (Span){s, 1, owners[s]};
    }
    return count;
}

static Run a_banded_run(Banding *b, int number, int inputs, int stored, int row, int32_t *source) {
    int bits = stored == 7 ? 8 : stored, sizes[600], groups = 0, usual = any(0, 2) ? 16 << any(0, 5) : 0;
    Matrix *m = &b->matrix;
    for (int left = inputs; left; left -= sizes[groups++]) {
        sizes[groups] = usual ? usual : any(1, 70);
        if (sizes[groups] > left) sizes[groups] = left;
    }
    int32_t *own = room(32768 * sizeof(int32_t)), *owners = room(2048 * sizeof(int32_t));
    int block = LANES << (bits & 1), count = lay_out(sizes, groups, block, own, owners);
    uint32_t *codes = bytes(4l * ((inputs * stored + 31) / 32) * m->outputs, 255);
    Span *spans = room(2048 * sizeof(Span));
    Run run = {.bits = bits, .blocks = count / block, .groups = groups, .spans = spans, .first = m->places};
    run.codes = room((size_t)((m->outputs + 31) / 32 * 32l * count * bits / 8 + 8192));
    run.count = spans_of(owners, count / LANES, spans), run.span = m->spans, m->spans += run.count;
    run.scales = band_factors(any(0, 1) ? HALVES : any(HALVES, SIGNED_CODES), groups, m->outputs);
    if (any(0, 1)) run.minima = band_factors(any(0, 1) ? HALVES : any(HALVES, SMALL_CODES), groups, m->outputs);
    if (any(0, 1)) {
        run.zeros = band_factors(SMALL_CODES, groups, m->outputs);
        run.zeros.supers = NULL;
    } else run.zero = any(0, 1) << (bits - 1);
    exlm_repack_bands(codes, m->outputs, stored, bits, own, run.blocks, (uint8_t *)run.codes, any(1, 4));
    for (int i = 0; i < count; i++) source[m->places + i] = own[i] < 0 ? -1 : own[i] + row;
    m->places += count;
    b->codes[number] = codes, b->places[number] = own, b->stored[number] = stored;
    return run;
}

#if !defined(WHOLE_NUMBERS)

/* Where the factor of an output and a group lies, and what it is. */
static long factor_at(int outputs, int groups, int group, int output) {
    int number = 0;
    while (output >= (band_of(outputs, number).first + band_of(outputs, number).sides) * LANES) number++;
    Band band = band_of(outputs, number);
    return ((long)band.first * groups + group * band.sides) * LANES + output - band.first * LANES;
}

static float factor(const Factors *f, int outputs, int groups, int group, int output) {
    long at = factor_at(outputs, groups, group, output);
    float value;
    if (f->kind == HALVES) value = half(((const uint16_t *)f->table)[at]);
    else if (f->kind == FLOATS) value = ((const float *)f->table)[at];
    else if (f->kind == SMALL_CODES) value = ((const uint8_t *)f->table)[at];
    else value = ((const int8_t *)f->table)[at];
    return f->supers ? value * half(f->supers[factor_at(outputs, f->many, group / f->each, output)]) : value;
}

static int code_at(const Banding *b, int number, int place, int output) {
    int row = b->places[number][place], stored = b->stored[number], code = 0;
    for (int bit = 0; row >= 0 && bit < stored; bit++) {
        long at = (long)row * stored + bit;
        code |= (int)(b->codes[number][at / 32 * b->matrix.outputs + output] >> at % 32 & 1) << bit;
    }
    return code;
}

/* The digits of a span, by the definition; answers the power of two. */
static float whole_numbers(const Matrix *m, const float *x, int place, int count, int32_t *whole, int32_t *sum) {
    float largest = 0, unit = 0;
    int exponent;
    *sum = 0;
    for (int i = 0; i < count; i++) {
        int input = m->source ? m->source[place + i] : place + i;
        float size = input < 0 ? 0 : fabsf(x[input]);
        largest = size > largest ? size : largest;
    }
    if (largest >= ldexpf(1, 27 - 127)) {
        frexpf(largest * 1.00398f, &exponent);
        unit = ldexpf(1, exponent - 15);
    }
    for (int i = 0; i < count; i++) {
        int input = m->source ? m->source[place + i] : place + i;
        whole[i] = unit == 0 || input < 0 ? 0 : (int32_t)lrintf(x[input] / unit);
        *sum += whole[i];
    }
    return unit;
}

/* What a span adds to an answer. */
static float with_span(const Banding *b, int number, const Span *span, const float *x, int output, float answer) {
    const Matrix *m = &b->matrix;
    const Run *run = m->runs + number;
    int32_t whole[256], sum;
    int zero = run->zero, place = span->slot * LANES, count = span->slots * LANES;
    uint32_t total = 0;
    float unit = whole_numbers(m, x, run->first + place, count, whole, &sum);
    for (int i = 0; i < count; i++) total += (uint32_t)(code_at(b, number, place + i, output) * whole[i]);
    if (run->zeros.kind) zero = (int)factor(&run->zeros, m->outputs, run->groups, span->group, output);
    total -= (uint32_t)zero * (uint32_t)sum;
    float scale = factor(&run->scales, m->outputs, run->groups, span->group, output);
    answer = fmaf((float)(int32_t)total * unit, scale, answer);
    if (!run->minima.kind) return answer;
    float minimum = factor(&run->minima, m->outputs, run->groups, span->group, output);
    return fmaf(-minimum, unit * (float)sum, answer);
}

static float one_by_one(const Banding *b, const float *x, int output) {
    const Matrix *m = &b->matrix;
    float answer = 0;
    for (int n = 0; n < m->count; n++)
        for (int i = 0; i < m->runs[n].count; i++) answer = with_span(b, n, m->runs[n].spans + i, x, output, answer);
    return m->bias ? answer + m->bias[output] : answer;
}

/* What a weight is, at its input. */
static void column_one_by_one(const Banding *b, int output, float *out) {
    const Matrix *m = &b->matrix;
    for (int n = 0; n < m->count; n++) {
        const Run *run = m->runs + n;
        for (const Span *span = run->spans; span < run->spans + run->count; span++)
            for (int i = 0; i < span->slots * LANES; i++) {
                int place = span->slot * LANES + i, at = run->first + place, input = m->source ? m->source[at] : at;
                if (input < 0) continue;
                int zero = run->zero, code = code_at(b, n, place, output);
                if (run->zeros.kind) zero = (int)factor(&run->zeros, m->outputs, run->groups, span->group, output);
                float value = (float)(code - zero) * factor(&run->scales, m->outputs, run->groups, span->group, output);
                if (run->minima.kind) value -= factor(&run->minima, m->outputs, run->groups, span->group, output);
                Real rounded = r_rounded(r_all(value));
                if (m->rounded) memcpy(&value, &rounded, sizeof value);
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
#if defined(WHOLE_NUMBERS)
    if (exlm_product(m, p->x, p->rows, y, threads)) abort();
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
#if defined(WHOLE_NUMBERS)
        (void)threads, exlm_columns(m, &i, 1, out + i * m->inputs);
#else
        (void)threads, column_one_by_one(b, (int)i, out + i * m->inputs);
#endif
    }
    return digest(0, out, (long)m->outputs * m->inputs);
}

static void try_bands(int n) {
    int inputs = n % 4 ? any(1, 200) : any(300, 900), outputs = any(1, 110), rows = n == 40 ? 100 : 1 + n % 19;
    int32_t *source = room(65536 * sizeof(int32_t));
    int row = 0, parts = any(1, 3);
    Run *runs = room(3 * sizeof(Run));
    Banding b = {.matrix = {.runs = runs, .inputs = inputs, .outputs = outputs, .rounded = any(0, 1)}};
    Matrix *m = &b.matrix;
    if (rows > 50) inputs = m->inputs = 70;
    for (int k = 0; k < parts && row < inputs; k++) {
        int some = k + 1 < parts ? any(1, inputs - row) : inputs - row;
        runs[k] = a_banded_run(&b, k, some, 2 + (n + 3 * k) % 7, row, source);
        m->count++, row += some;
    }
    take_inputs(m, source);
    float *x = reals((long)rows * inputs, n % 3 ? 1 : 1e-3f);
    for (int i = 0; i < rows * inputs; i += any(1, 400)) x[i] *= 300;
    Multiplying_bands job = {&b, x, rows};
    tell("bands", 2 + n % 7, rows, outputs, banded_answer, &job);
    job.rows = 1;
    tell("one row of bands", 2 + n % 7, inputs, outputs, banded_answer, &job);
    tell("columns of bands", 2 + n % 7, inputs, outputs, banded_columns, &b);
}
