/* Rows of x made ready: put in the matrix's order and rounded to 16 bits, block by block. */

/* Whole numbers of one block, and its scale. What is not finite makes the whole block not a number. */
static float round_block(const float *x, int16_t *whole) {
    float most[TILE], odd[TILE], top = 0, bad = 0;
    for (int i = 0; i < TILE; i++) {
        float a = fabsf(x[i]), b = fabsf(x[i + TILE]);
        most[i] = a > b ? a : b;
        odd[i] = x[i] * 0 + x[i + TILE] * 0;
    }
    for (int i = 0; i < TILE; i++) {
        top = most[i] > top ? most[i] : top;
        bad += odd[i];
    }
    if (top < 1e-30f || bad != 0) {
        memset(whole, 0, BLOCK * sizeof *whole);
        return bad != 0 ? NAN : 0;
    }
    float inverse = 32767.0f / top;
    for (int i = 0; i < BLOCK; i++) {
        float moved = x[i] * inverse + 12582912.0f; /* 1.5 · 2^23: the lowest bits are the rounded number */
        int32_t bits;
        memcpy(&bits, &moved, sizeof bits);
        whole[i] = (int16_t)(bits - 0x4b400000);
    }
    return top / 32767.0f;
}

static void prepare(const Matrix *m, const float *x, const Rows *ready, int row) {
    int16_t *whole = ready->whole + (long)row * m->blocks * BLOCK;
    float *scale = ready->scale + (long)row * m->blocks, *sum = ready->sum + (long)row * m->groups;
    int32_t *start = ready->start + (long)row * m->blocks * 2;
    for (int n = 0; n < m->count; n++) {
        const Run *run = m->runs + n;
        int group = run->first_group, used = 0;
        for (int i = 0; i < run->blocks; i++) {
            int block = run->first_block + i;
            float moved[BLOCK];
            const float *from = x + (long)block * BLOCK;
            if (m->source) {
                const int32_t *source = m->source + (long)block * BLOCK;
                for (int k = 0; k < BLOCK; k++) moved[k] = source[k] < 0 ? 0 : x[source[k]];
                from = moved;
            }
            int16_t *to = whole + (long)block * BLOCK;
            float s = scale[block] = round_block(from, to);
            int32_t sums[2] = {0, 0};
            for (int k = 0; k < PAIRS; k++) sums[0] += to[k], sums[1] += to[k + PAIRS];
            if (run->fine) {
                for (int side = 0; side < 2; side++) {
                    start[2 * block + side] = -run->zero * sums[side];
                    sum[group++] = s * (float)sums[side];
                }
                continue;
            }
            start[2 * block] = -run->zero * (sums[0] + sums[1]);
            sum[group] = (used ? sum[group] : 0) + s * (float)(sums[0] + sums[1]);
            if (++used == run->spans[group - run->first_group]) group++, used = 0;
        }
    }
}
