/* Random matrices of every width and every kind of factors: rearranged, multiplied, and taken apart by columns. */

static Factors factors(int kind, int groups, int columns) {
    long whole = (long)(columns + TILE - 1) / TILE * TILE, count = whole * groups;
    Factors f = {.kind = kind, .each = any(1, 3)};
    f.many = (groups + f.each - 1) / f.each;
    if (kind == HALVES) f.table = halves(count);
    else if (kind == FLOATS) f.table = reals(count, any(0, 3) ? 0.1f : any(0, 1) ? 0x1p-18f : 9000.0f);
    else f.table = bytes(count, kind == SIGNED_CODES ? 255 : 63);
    if (kind == SMALL_CODES || kind == SIGNED_CODES) f.supers = halves(whole * f.many);
    return f;
}

/* The places of groups filled up to whole slots, all of it to whole blocks; answers how many there are. */
static int lay_out(const int *sizes, int groups, int block, int32_t *places, int32_t *owners) {
    int count = 0, row = 0;
    for (int g = 0; g < groups; g++)
        for (int i = 0; i < (sizes[g] + LANES - 1) / LANES * LANES; i++, count++) {
            owners[count / LANES] = g;
            places[count] = i < sizes[g] ? row++ : -1;
        }
    for (; count % block; count++) owners[count / LANES] = groups - 1, places[count] = -1;
    return count;
}

/* What codes stand for, the shared zero point taken off. */
static const float *book_of(int bits, int zero, int odd) {
    float *book = room(32 * sizeof(float));
    for (int i = 0; i < 32; i++) book[i] = odd ? real() * 100 : (float)(i % (1 << bits) - zero);
    return book;
}

/* A run of `inputs` rows of chance; its places go to `source`, counted from `row`. */
static Run a_run(int inputs, int columns, int stored, int row, int32_t *source, int *places) {
    int bits = stored == 7 ? 8 : stored, sizes[600], groups = 0, usual = any(0, 2) ? 16 << any(0, 3) : 0;
    for (int left = inputs; left; left -= sizes[groups++]) {
        sizes[groups] = usual ? usual : any(1, 70);
        if (sizes[groups] > left) sizes[groups] = left;
    }
    int32_t *own = room(32768 * sizeof(int32_t)), *owners = room(2048 * sizeof(int32_t));
    int block = slots_of(bits) * LANES, count = lay_out(sizes, groups, block, own, owners);
    int words = (inputs * stored + 31) / 32 * columns;
    uint32_t *codes = bytes(4l * words, 255);
    int moved = any(0, 2) == 0, odd = bits == 4 && !moved && any(0, 3) == 0;
    int zero = moved || odd ? 0 : 1 << (bits - 1);
    long size = (long)(columns + TILE - 1) / TILE * TILE * count * bits / 8;
    Run run = {.codes = room((size_t)size), .owners = owners, .bits = bits, .blocks = count / block};
    run.groups = groups, run.zero = zero;
    run.scales = factors(any(HALVES, SIGNED_CODES), groups, columns);
    if (any(0, 1)) run.minima = factors(any(HALVES, SMALL_CODES), groups, columns);
    if (moved) run.zeros = (Factors){.kind = SMALL_CODES, .table = bytes((columns + 8l) * groups, 1 << (bits - 1))};
    if (bits <= MOST_TABLE_BITS) run.book = book_of(bits, zero, odd);
    exlm_repack(codes, columns, stored, bits, own, run.blocks, (uint8_t *)run.codes, any(1, 4));
    for (int i = 0; i < count; i++) source[*places + i] = own[i] < 0 ? -1 : own[i] + row;
    run.first = *places, *places += count;
    return run;
}

/* The inputs at the matrix's places, in an order of chance or as they come, and perhaps a bias. */
static void take_inputs(Matrix *m, int32_t *source) {
    int32_t *order = room((size_t)m->inputs * sizeof(int32_t));
    int ordered = any(0, 1), same = 1;
    for (int i = 0; i < m->inputs; i++) {
        int other = any(0, i);
        order[i] = order[other], order[other] = i;
    }
    for (int i = 0; i < m->places; i++) {
        if (ordered && source[i] >= 0) source[i] = order[source[i]];
        same &= source[i] == i;
    }
    if (!same) m->source = source;
    if (any(0, 1)) m->bias = reals(m->outputs, 1);
}

/* A matrix of one run, or of some. Widths 2 to 8 come in turn. */
static Matrix a_matrix(int inputs, int outputs, int number) {
    int32_t *source = room(65536 * sizeof(int32_t));
    Run *runs = room(3 * sizeof(Run));
    Matrix m = {.runs = runs, .inputs = inputs, .outputs = outputs, .rounded = any(0, 1)};
    int row = 0, parts = any(1, 3);
    for (int n = 0; n < parts && row < inputs; n++) {
        int some = n + 1 < parts ? any(1, inputs - row) : inputs - row;
        runs[m.count++] = a_run(some, outputs, 2 + (number + 3 * n) % 7, row, source, &m.places);
        row += some;
    }
    take_inputs(&m, source);
    return m;
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
    if (exlm_product(p->matrix, p->x, p->rows, y, threads)) abort();
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

static void try_matrix(int n) {
    int inputs = n % 5 ? any(1, 300) : any(800, 1700), outputs = any(1, 70);
    int rows = n == 66 ? 200 : 1 + n % 33; /* more than are taken at a time, once */
    Matrix m = a_matrix(inputs, outputs, n);
    Multiplying job = {&m, reals((long)rows * inputs, 1), rows};
    tell("product", 2 + n % 7, rows, outputs, product_answer, &job);
    job.rows = 1;
    tell("one row", 2 + n % 7, inputs, outputs, product_answer, &job);
    tell("columns", 2 + n % 7, inputs, outputs, column_answer, &m);
}

/* Dense matrices of 16 bits, and what becomes of numbers that need more. */
static void try_floats(int n) {
    int inputs = LANES * any(1, 60), outputs = TILE * any(1, 9), kind = n % 2 ? HALVES : BRAINS;
    long count = (long)inputs * outputs;
    uint16_t *plain = halves(count), *narrow = room((size_t)count * sizeof(uint16_t));
    float *wide = room((size_t)count * sizeof(float));
    for (long i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)plain[i] << 16 | (uint32_t)(i & 1) << 31;
        if (kind == HALVES) wide[i] = half((uint16_t)(plain[i] | (i & 1) << 15));
        else memcpy(wide + i, &bits, sizeof bits);
    }
    int lost = exlm_narrow(wide, count, kind, narrow, any(1, 4));
    Run run = {.codes = (uint8_t *)narrow, .scales = {.kind = kind}, .bits = FLOAT_BITS, .blocks = inputs / LANES};
    Matrix m = {.runs = &run, .count = 1, .inputs = inputs, .outputs = outputs, .places = inputs};
    Multiplying job = {&m, reals(33l * inputs, 1), 33};
    printf("narrow %d: %d %016llx\n", kind, lost, (unsigned long long)digest_bytes(0, narrow, 2 * count));
    tell("floats", kind, inputs, outputs, product_answer, &job);
    for (job.rows = 1; job.rows < 10; job.rows++)
        tell("few rows of floats", kind, inputs, outputs, product_answer, &job);
    wide[any(0, (int)count - 1)] = n < 4 ? 1.00001f : 1e30f;
    printf("too wide %d: %d\n", kind, exlm_narrow(wide, count, kind, narrow, 2));
}

/* Dense matrices of 12 bits, some numbers zero and some listed, and what is no such matrix. */
static void try_lean(int n) {
    int inputs = 64 * any(1, 20), outputs = TILE * any(1, 9), begin = 0;
    long count = (long)inputs * outputs;
    float *wide = room((size_t)count * sizeof(float)), *units = room((size_t)outputs * sizeof(float));
    int32_t *begins = room((size_t)(outputs + 1) * sizeof(int32_t));
    for (long i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)any(0x3e00, 0x4000) << 16 | (uint32_t)any(0, 1) << 31;
        if (!any(0, 30)) bits = any(0, 1) ? 0 : (uint32_t)any(0x3000, 0x3a00) << 16; /* at the edge of codes, and below */
        memcpy(wide + i, &bits, sizeof bits);
    }
    memset(wide + (long)any(0, outputs - 1) * inputs, 0, (size_t)inputs * sizeof(float));
    int refused = exlm_look_lean(wide, outputs, inputs, units, begins, any(1, 4));
    for (int i = 0; i <= outputs; i++) {
        int many = i < outputs ? begins[i] : 0;
        begins[i] = begin, begin += many;
    }
    Lean lean = {units, begins, room((size_t)begin * sizeof(int32_t)), room((size_t)begin * sizeof(float))};
    uint8_t *codes = room((size_t)count * LEAN_BITS / 8);
    exlm_repack_lean(wide, outputs, inputs, &lean, codes, any(1, 4));
    Run run = {.codes = codes, .scales = {.kind = LEAN}, .bits = LEAN_BITS, .blocks = inputs / 64};
    Matrix m = {.runs = &run, .lean = &lean, .count = 1, .inputs = inputs, .outputs = outputs, .places = inputs};
    Multiplying job = {&m, reals(101l * inputs, 1), 101};
    printf("lean: %d %d %016llx\n", refused, begin, (unsigned long long)digest_bytes(0, codes, count * LEAN_BITS / 8));
    tell("lean", inputs, outputs, job.rows, product_answer, &job);
    for (job.rows = 1; job.rows < 10; job.rows++) tell("few rows of lean", inputs, outputs, job.rows, product_answer, &job);
    tell("lean columns", inputs, outputs, begin, column_answer, &m);
    wide[any(0, (int)count - 1)] = n % 2 ? 1.00001f : 1e30f;
    printf("not lean: %d\n", exlm_look_lean(wide, outputs, inputs, units, begins, 2));
}
