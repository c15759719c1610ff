/* AVX-512 VNNI: vpdpbusd multiplies unsigned code bytes with signed activation bytes, four products into each int32.

   Two-byte activations (quantize_act.h) take two of them, for high and low bytes. A register is a tile's row. The core
   multiplies two vectors a cycle, floats or bytes, and loads as many; a store costs as much as two products. Hence 4
   rows of x and 3 tiles: 12 sums of a span as integers and 12 as floats stay in registers, and each load is used
   often, an activation quad for three tiles, a quad of codes for four rows. */

#ifndef EXLM_MICROKERNEL_VNNI_H
#define EXLM_MICROKERNEL_VNNI_H

#include "kc_block.h"

enum { MR = 4 }; /* rows of x whose sums fit the registers */

/* As assembly, because GCC copies the sums of the intrinsic between registers. */
#define INT_DOT(sums, codes, qact) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(qact))

/* sums (48) += one row of x times a segment's full panel. */
INLINE void gemv_panel(const Segment *segment, int bits, int has_codebook, int mode, int act_bytes, Panel panel,
                       const uint8_t *qact, const ActScale *act_scale, f32v *sums) {
    enum { tiles = PANEL_TILES, regs = PANEL_REGS };
    const int x_size = qact_bytes(act_bytes);
    const uint8_t *codes = panel_codes(segment, panel);
    i32v codebook = has_codebook ? load_codebook(segment) : i32_set1(0);
    panel.tiles = tiles;
    for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++, act_scale++) {
        i32v high[PANEL_REGS], low[PANEL_REGS];
        EACH_REG(v) high[v] = low[v] = i32_set1(0);
        for (int kblock = span->kblock; kblock < span->kblock + span->kblocks; kblock++, qact += x_size) {
            i32v quads[PANEL_REGS][QUADS];
            EACH_REG(v) {
                unpack_kblock(codes + v * REG_BYTES, bits, tiles, kblock, quads[v]);
                if (has_codebook) lookup_quads(codebook, quads[v]);
            }
            if (bits < 8) prefetch_codes(codes, bits, kblock, PREFETCH_BYTES);
            EACH_QUAD(q) {
                i32v a = broadcast_quad(qact + 4 * q);
                EACH_REG(v) INT_DOT(high[v], quads[v][q], a);
                if (act_bytes == 1) continue;
                i32v b = broadcast_quad(qact + KBLOCK + 4 * q);
                EACH_REG(v) INT_DOT(low[v], quads[v][q], b);
            }
        }
        GroupFactors g;
        load_group_factors(&g, segment, mode, panel, span->group);
        EACH_REG(v) {
            i32v dot = act_bytes == 1 ? high[v] : i32_add(i32_shl(high[v], 8), low[v]);
            if (g.has_zeros || g.shared_zero) dot = i32_add(dot, zero_correction(&g, v, act_scale));
            sums[v] = add_dequantized(sums[v], dot, &g, v, act_scale);
        }
    }
}

/* The codes of a KcBlock: unpacked to (kblocks, quads, tiles, 64 bytes), the form in which 8-bit panels are stored, or
   nibbles as stored, which the microkernel unpacks if it reads them only twice. */
enum { UNPACKED, STORED_4BIT };

INLINE i32v load_quad(const uint8_t *kblock, int storage, int q, int tiles, int v) {
    if (storage != STORED_4BIT) return i32_load(kblock + (q * tiles + v) * REG_BYTES);
    i32v nibbles = i32_load(kblock + (q / 2 * tiles + v) * REG_BYTES);
    return i32_and(q % 2 ? i32_shr(nibbles, 4) : nibbles, i8_set1(15));
}

/* sums += a span's dot products, dequantised. A product with delta, a power of two if activations have two bytes, is
   then an addition to the exponent, which takes none of the multipliers' time. */
INLINE void add_dequantized_rows(i32v (*dot)[PANEL_REGS], const GroupFactors *g, int has_minima, int act_bytes,
                                 const ActScale *act_scale, int rows, int regs, f32v (*sums)[PANEL_REGS]) {
    EACH_ROW(r) {
        f32v delta = f32_set1(act_scale[r].delta), sum = f32_set1(has_minima ? act_scale[r].sum : 0);
        if (act_bytes == 2) delta = _mm512_getexp_ps(delta);
        EACH_REG(v) {
            f32v y = f32_from_i32(dot[r][v]);
            y = act_bytes == 2 ? _mm512_scalef_ps(y, delta) : f32_mul(y, delta);
            sums[r][v] = f32_fma(sums[r][v], y, g->scale[v]);
            if (has_minima) sums[r][v] = f32_fnma(sums[r][v], g->minimum[v], sum);
        }
    }
}

/* A span of codes, and of some rows the activations, `step` bytes apart. */
typedef struct {
    const uint8_t *codes, *end, *x_bytes;
    const uint8_t *prefetch;          /* what is read next, kblock by kblock */
    long size, step, prefetch_stride; /* size: of a kblock of codes; prefetch_stride: an eighth of what is read next */
} DotArgs;

/* dot += a span of codes times one byte of the activations. */
INLINE void dot_bytes(i32v (*dot)[PANEL_REGS], DotArgs p, int storage, int rows, int tiles, int x_size, int prefetch) {
    int regs = tiles;
    for (; p.codes < p.end; p.x_bytes += x_size, p.codes += p.size)
        EACH_QUAD(q) {
            i32v quads[PANEL_REGS];
            EACH_REG(v) {
                quads[v] = load_quad(p.codes, storage, q, tiles, v);
                KEEP_IN_REG(quads[v]);
            }
            if (prefetch) {
                __builtin_prefetch(p.prefetch);
                __builtin_prefetch(p.prefetch + p.prefetch_stride);
                p.prefetch += 2 * p.prefetch_stride;
            }
            EACH_ROW(r) {
                i32v x = broadcast_quad(p.x_bytes + r * p.step + 4 * q);
                EACH_REG(v) INT_DOT(dot[r][v], quads[v], x);
            }
        }
}

/* sums (rows, tiles, 16) += rows of x, from `row` on, times a KcBlock: of each span all high bytes, then all low. */
INLINE void microkernel(const KcBlock *p, int row, int rows, int storage, int tiles, int act_bytes, float *sums) {
    int regs = tiles, x_size = qact_bytes(act_bytes);
    const uint8_t *codes = p->codes, *qact = p->qact, *prefetch = p->prefetch;
    const ActScale *act_scale = p->act_scales + row;
    long size = (storage == STORED_4BIT ? 2 : 4) * tiles * ROW_BYTES;
    long prefetch_stride = row ? rows * x_size / 8 : p->prefetch_stride; /* the next rows, or the next codes */
    f32v y[MR][PANEL_REGS];
    EACH_ROW(r)
        EACH_REG(v) y[r][v] = f32_load(sums + (r * regs + v) * LANES);
    for (int n = 0; n < p->count; n++, act_scale += p->rows) {
        const GroupFactors *g = p->factors + n;
        long kblocks = p->spans[n].kblocks, step = kblocks * x_size;
        if (row) prefetch = qact + row * step + rows * step;
        DotArgs args = {codes, codes + kblocks * size, qact + row * step, prefetch, size, step, prefetch_stride};
        i32v dot[MR][PANEL_REGS];
        EACH_ROW(r)
            EACH_REG(v) dot[r][v] = i32_set1(0);
        dot_bytes(dot, args, storage, rows, tiles, x_size, 1);
        if (act_bytes == 2) {
            EACH_ROW(r)
                EACH_REG(v) dot[r][v] = i32_shl(dot[r][v], 8);
            args.x_bytes += KBLOCK;
            dot_bytes(dot, args, storage, rows, tiles, x_size, 0);
        }
        prefetch += 8 * kblocks * prefetch_stride;
        codes = args.end;
        qact += step * p->rows;
        if (g->has_zeros || g->shared_zero)
            EACH_ROW(r)
                EACH_REG(v) dot[r][v] = i32_add(dot[r][v], zero_correction(g, v, act_scale + r));
        if (g->has_minima)
            add_dequantized_rows(dot, g, 1, act_bytes, act_scale, rows, tiles, y);
        else
            add_dequantized_rows(dot, g, 0, act_bytes, act_scale, rows, tiles, y);
    }
    EACH_ROW(r)
        EACH_REG(v) f32_store(sums + (r * regs + v) * LANES, y[r][v]);
}

/* One function for each storage of codes, number of rows and bytes of activations. */
typedef void Microkernel(const KcBlock *, int, float *);
#define ONE(rows, name, storage, tiles, act_bytes)                                                              \
    static __attribute__((noinline)) void name##_##rows##_##act_bytes(const KcBlock *p, int row, float *sums) { \
        microkernel(p, row, rows, storage, tiles, act_bytes, sums);                                             \
    }
#define FOUR(name, storage, tiles, act_bytes)                                                       \
    ONE(1, name, storage, tiles, act_bytes)                                                         \
    ONE(2, name, storage, tiles, act_bytes)                                                         \
    ONE(3, name, storage, tiles, act_bytes)                                                         \
    ONE(4, name, storage, tiles, act_bytes)                                                         \
    static Microkernel *const name##_##act_bytes[MR] = {name##_1_##act_bytes, name##_2_##act_bytes, \
                                                        name##_3_##act_bytes, name##_4_##act_bytes};
#define EIGHT(name, storage, tiles) FOUR(name, storage, tiles, 1) FOUR(name, storage, tiles, 2)
EIGHT(unpacked, UNPACKED, PANEL_TILES)
EIGHT(stored_4bit, STORED_4BIT, PANEL_TILES)
EIGHT(two_tile, UNPACKED, 2)
#undef ONE
#undef FOUR
#undef EIGHT

/* The bytes of some kblocks, (kblocks, quads, tiles, 64); `lookup`: the segment with the codebook, or NULL. */
INLINE void unpack_panel(const uint8_t *codes, int bits, const Segment *lookup, int tiles, int first, int kblocks,
                         i32v *to) {
    int regs = tiles;
    i32v codebook = lookup ? load_codebook(lookup) : i32_set1(0);
    for (int kblock = first; kblock < first + kblocks; kblock++, to += QUADS * tiles)
        EACH_REG(v) {
            i32v quads[QUADS];
            unpack_kblock(codes + v * REG_BYTES, bits, tiles, kblock, quads);
            if (lookup) lookup_quads(codebook, quads);
            EACH_QUAD(q) to[q * tiles + v] = quads[q];
        }
}

/* Points kc to its codes: in the panel if the microkernel reads them there, else unpacked into the buffer. */
static void set_kc_codes(KcBlock *kc, const Segment *segment, Panel panel, int storage, i32v *buffer) {
    int size = segment->bits * panel.tiles * 32, first = kc->spans->kblock, tiles = panel.tiles, count = kc->kblocks;
    const uint8_t *codes = panel_codes(segment, panel);
    kc->prefetch = codes + (long)(first + count) * size;
    kc->prefetch_stride = size / 8;
    if (storage == STORED_4BIT || segment->bits == 8) {
        kc->codes = codes + (long)first * size;
        return;
    }
    kc->codes = (const uint8_t *)buffer;
    if (segment->codebook) {
        unpack_panel(codes, 4, segment, tiles, first, count, buffer);
        return;
    }
#define UNPACK(bits) unpack_panel(codes, bits, NULL, tiles, first, count, buffer)
    SWITCH_BITS(segment->bits, UNPACK)
#undef UNPACK
}

/* sums (rows, tiles, 16) += the rows of x times a segment's panel, MR rows at a time. */
static void gemm_panel(const GemmArgs *p, const Segment *segment, Panel panel, float *sums) {
    i32v buffer[MAX_SPAN * QUADS * PANEL_TILES];
    KcBlock kc; /* large: not cleared */
    int passes = (p->rows + MR - 1) / MR, per_pass = (p->rows + passes - 1) / passes, storage = UNPACKED;
    int is_full = panel.tiles == PANEL_TILES, act_bytes = p->matrix->act_bytes;
    if (segment->bits == 4 && !segment->codebook && passes <= 2 && is_full) storage = STORED_4BIT;
    Microkernel *const *by_rows = act_bytes == 1 ? two_tile_1 : two_tile_2;
    if (is_full && storage == STORED_4BIT)
        by_rows = act_bytes == 1 ? stored_4bit_1 : stored_4bit_2;
    else if (is_full)
        by_rows = act_bytes == 1 ? unpacked_1 : unpacked_2;
    for (int n = 0; n < segment->span_count;) {
        n += next_kc_block(&kc, p, segment, n, panel, MAX_SPAN);
        set_kc_codes(&kc, segment, panel, storage, buffer);
        for (int row = 0; row < p->rows; row += per_pass) {
            int rows = p->rows - row < per_pass ? p->rows - row : per_pass;
            by_rows[rows - 1](&kc, row, sums + row * panel.tiles * TILE_N);
        }
    }
}

#endif
