/* Rows times bands by products of bytes: codes, and each activation's high and low digit. A register is a side.

   Eight rows and three sides are 24 sums. Processors multiply twice as many vectors in a cycle as they load, so what
   is loaded must be used often: each four digits for three sides, each quad of codes for eight rows. */

#ifndef EXLM_ROWS_AVX512_H
#define EXLM_ROWS_AVX512_H

/* sums + bytes · digits, four to a sum; written out, because the compiler copies sums to and fro otherwise. */
#define INT_DOT(sums, codes_v, qact) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes_v), "v"(qact))

/* sums += one row · a run's band, a wide one. */
INLINE void gemv_panel(const Segment *segment, int bits, int has_codebook, int mode, Panel panel, const uint8_t *qact, const ActScale *act_scale,
                    f32v *sums) {
    enum { tiles = PANEL_TILES, regs = PANEL_REGS };
    const uint8_t *codes = panel_codes(segment, panel);
    i32v codebook = has_codebook ? load_codebook(segment) : i32_set1(0);
    panel.tiles = tiles;
    for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++, act_scale++) {
        i32v high[PANEL_REGS], low[PANEL_REGS];
        EACH_REG high[v] = low[v] = i32_set1(0);
        for (int kblock = span->kblock; kblock < span->kblock + span->kblocks; kblock++, qact += QACT_BYTES) {
            i32v quads[PANEL_REGS][QUADS];
            EACH_REG {
                unpack_kblock(codes + v * 64, bits, tiles, kblock, quads[v]);
                if (has_codebook) lookup_quads(codebook, quads[v]);
            }
            if (bits < 8) prefetch_codes(codes, bits, kblock, PREFETCH_BYTES);
            EACH_QUAD {
                i32v a = broadcast_quad(qact + 4 * q), b = broadcast_quad(qact + LANES + 4 * q);
                EACH_REG {
                    INT_DOT(high[v], quads[v][q], a);
                    INT_DOT(low[v], quads[v][q], b);
                }
            }
        }
        Dequant g;
        load_dequant(&g, segment, mode, panel, span->group);
        EACH_REG {
            i32v dot = i32_add(i32_shl(high[v], 8), low[v]);
            if (g.has_zeros || g.shared_zero) dot = i32_add(dot, zero_correction(&g, v, act_scale));
            sums[v] = add_dequantized(sums[v], dot, &g, v, act_scale);
        }
    }
}

enum { MR = 8 }; /* rows whose sums fit the registers */

/* How a piece's codes lie: (slots, quads, sides, 64) a byte for each, put down or as they are in bands of 8 bits, or as
   they are in bands of 4 bits. */
enum { UNPACKED, STORED_8BIT, STORED_4BIT };

#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

/* sums (rows, sides, 16) += what a span adds to them. */
INLINE void add_dequantized_rows(i32v (*dot)[PANEL_REGS], const Dequant *g, int has_minima, const ActScale *act_scale, int rows,
                        int regs, float *sums) {
    f32v scale[PANEL_REGS], minimum[PANEL_REGS];
    __asm__ volatile("" : "+r"(sums)); /* or else sums are loaded before it is known how, and wait in memory */
    EACH_REG {
        scale[v] = g->scale[v];
        KEEP_IN_REG(scale[v]);
        if (has_minima) {
            minimum[v] = g->minimum[v];
            KEEP_IN_REG(minimum[v]);
        }
    }
    EACH_ROW {
        f32v delta = f32_set1(act_scale[r].delta), sum = f32_set1(0);
        KEEP_IN_REG(delta);
        if (has_minima) {
            sum = f32_set1(act_scale[r].sum);
            KEEP_IN_REG(sum);
        }
        EACH_REG {
            float *at = sums + (r * regs + v) * LANES;
            f32v own = f32_fma(f32_load(at), f32_mul(f32_from_i32(dot[r][v]), delta), scale[v]);
            if (has_minima) own = f32_fnma(own, minimum[v], sum);
            f32_store(at, own);
        }
    }
}

/* Quad q of a slot, in bytes. */
INLINE i32v load_quad(const uint8_t *kblock, int kind, int q, int tiles, int v) {
    if (kind != STORED_4BIT) return i32_load(kblock + (q * tiles + v) * 64);
    i32v two = i32_load(kblock + (q / 2 * tiles + v) * 64);
    return i32_and(q % 2 ? i32_shr(two, 4) : two, i8_set1(15));
}

/* sums (rows, sides, 16) += a few rows · a piece: of each span all high digits, then all low. */
INLINE void microkernel(const KcBlock *p, int row, int rows, int kind, int tiles, float *sums) {
    int regs = tiles;
    const uint8_t *codes = p->codes, *qact = p->qact, *prefetch = p->prefetch;
    const ActScale *act_scale = p->act_scales + row;
    long size = (kind == STORED_4BIT ? 4 : 8) * tiles * 32, prefetch_step = row ? 0 : p->prefetch_step;
    for (int n = 0; n < p->count; n++, act_scale += p->rows) {
        long step = (long)p->spans[n].kblocks * QACT_BYTES;
        const uint8_t *at, *end = codes + p->spans[n].kblocks * size;
        i32v dot[MR][PANEL_REGS];
        EACH_ROW EACH_REG dot[r][v] = i32_set1(0);
        for (int byte = 0; byte < 2; byte++) {
            const uint8_t *own = qact + row * step + byte * LANES;
            for (at = codes; at < end; own += QACT_BYTES, at += size)
                EACH_QUAD {
                    i32v codes_v[PANEL_REGS];
                    EACH_REG {
                        codes_v[v] = load_quad(at, kind, q, tiles, v);
                        KEEP_IN_REG(codes_v[v]);
                    }
                    if (kind == STORED_8BIT) { /* 96 bytes at a time, and too many for the first cache */
                        __builtin_prefetch(prefetch, 0, 2);
                        __builtin_prefetch(prefetch + prefetch_step / 2, 0, 2);
                    } else __builtin_prefetch(prefetch);
                    prefetch += prefetch_step;
                    EACH_ROW {
                        i32v four = broadcast_quad(own + r * step + 4 * q);
                        EACH_REG INT_DOT(dot[r][v], codes_v[v], four);
                    }
                }
            if (!byte) EACH_ROW EACH_REG dot[r][v] = i32_shl(dot[r][v], 8);
        }
        codes = end, qact += step * p->rows;
        const Dequant *g = p->dequants + n;
        if (g->has_zeros || g->shared_zero)
            EACH_ROW EACH_REG dot[r][v] = i32_add(dot[r][v], zero_correction(g, v, act_scale + r));
        if (g->has_minima) add_dequantized_rows(dot, g, 1, act_scale, rows, tiles, sums);
        else add_dequantized_rows(dot, g, 0, act_scale, rows, tiles, sums);
    }
}

typedef void Microkernel(const KcBlock *, int, float *);
#define ROWS(rows, name, kind, tiles)                                                                            \
    static __attribute__((noinline)) void name##_##rows(const KcBlock *p, int row, float *sums) {                  \
        microkernel(p, row, rows, kind, tiles, sums);                                                               \
    }
#define ALL(...)                                                                                                 \
    ROWS(1, __VA_ARGS__) ROWS(2, __VA_ARGS__) ROWS(3, __VA_ARGS__) ROWS(4, __VA_ARGS__)                          \
    ROWS(5, __VA_ARGS__) ROWS(6, __VA_ARGS__) ROWS(7, __VA_ARGS__) ROWS(8, __VA_ARGS__)
ALL(codes_v, UNPACKED, PANEL_TILES) ALL(stored_8bit, STORED_8BIT, PANEL_TILES) ALL(stored_4bit, STORED_4BIT, PANEL_TILES) ALL(narrow, UNPACKED, 2)
#define NAMES(name) {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8}
static Microkernel *const microkernels[][MR] = {NAMES(codes_v), NAMES(stored_8bit), NAMES(stored_4bit)};
static Microkernel *const narrow_microkernels[] = NAMES(narrow);
#undef ROWS
#undef ALL
#undef NAMES
#undef EACH_ROW

/* A band's codes as bytes, (slots, quads, sides, 64). */
INLINE void unpack_panel(const uint8_t *panel, int bits, const Segment *lookup, int tiles, int first, int kblocks,
                         i32v *codes) {
    int regs = tiles;
    i32v codebook = lookup ? load_codebook(lookup) : i32_set1(0);
    for (int kblock = first; kblock < first + kblocks; kblock++, codes += QUADS * tiles)
        EACH_REG {
            i32v quads[QUADS];
            unpack_kblock(panel + v * 64, bits, tiles, kblock, quads);
            if (lookup) lookup_quads(codebook, quads);
            EACH_QUAD codes[q * tiles + v] = quads[q];
        }
}

/* The codes of a piece. Those that can be multiplied as they lie stay there, others are put down in `room`. */
static void take_kc_codes(KcBlock *kc, const Segment *segment, Panel panel, int kind, i32v *buffer) {
    int size = segment->bits * panel.tiles * 32, first = kc->spans->kblock;
    const uint8_t *codes = panel_codes(segment, panel);
    kc->prefetch_step = size / (2 * QUADS);
    kc->codes = codes + (long)first * size, kc->prefetch = kc->codes + PREFETCH_BYTES;
    if (kind != UNPACKED) return;
    kc->codes = (const uint8_t *)buffer, kc->prefetch = codes + (long)(first + kc->kblocks) * size;
#define OWN(own) case own: unpack_panel(codes, own, NULL, panel.tiles, first, kc->kblocks, buffer); break;
    if (segment->codebook) unpack_panel(codes, 4, segment, panel.tiles, first, kc->kblocks, buffer);
    else
    switch (segment->bits) { OWN(2) OWN(3) OWN(4) OWN(5) OWN(6) }
#undef OWN
}

/* sums (rows, sides, 16) += rows · a run's band; one row too, if the band is a narrow one. Codes of 4 bits become bytes
   on the way if it happens only once. */
static void gemm_panel(const GemmArgs *p, const Segment *segment, Panel panel, float *sums) {
    i32v buffer[MAX_SPAN * QUADS * PANEL_TILES];
    KcBlock kc; /* not cleared: its meanings are large */
    int passes = (p->rows + MR - 1) / MR, rows_per_pass = (p->rows + passes - 1) / passes;
    int kind = segment->bits == 8 ? STORED_8BIT : segment->bits == 4 && !segment->codebook && passes == 1 && panel.tiles == PANEL_TILES ? STORED_4BIT : UNPACKED;
    Microkernel *const *some = panel.tiles == PANEL_TILES ? microkernels[kind] : narrow_microkernels;
    for (int n = 0; n < segment->span_count;) {
        n += next_kc_block(&kc, p, segment, n, panel, MAX_SPAN);
        take_kc_codes(&kc, segment, panel, kind, buffer);
        for (int row = 0; row < p->rows; row += rows_per_pass)
            some[(p->rows - row < rows_per_pass ? p->rows - row : rows_per_pass) - 1](&kc, row, sums + row * panel.tiles * LANES);
    }
}

#endif
