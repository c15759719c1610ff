/* AVX-512 VNNI: vpdpbusd multiplies unsigned code bytes with signed activation bytes, four products into each int32.

   Two-byte activations (quantize_act.h) take two of them, for high and low bytes. A register is a tile's row: 8 rows
   of x and 3 tiles make 24 sums. The core multiplies two vectors a cycle and loads fewer, so each load is used often:
   an activation quad for three tiles, a quad of codes for eight rows. */

#ifndef EXLM_MICROKERNEL_VNNI_H
#define EXLM_MICROKERNEL_VNNI_H

#include "kc_block.h"

enum { MR = 8 }; /* rows of x whose sums fit the registers */

/* As assembly, because GCC copies the sums of the intrinsic between registers. */
#define INT_DOT(sums, codes, qact) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(qact))

/* sums (48) += one row of x times a segment's full panel. */
INLINE void gemv_panel(const Segment *segment, int bits, int has_codebook, int mode, Panel panel, const uint8_t *qact,
                       const ActScale *act_scale, f32v *sums) {
    enum { tiles = PANEL_TILES, regs = PANEL_REGS };
    const uint8_t *codes = panel_codes(segment, panel);
    i32v codebook = has_codebook ? load_codebook(segment) : i32_set1(0);
    panel.tiles = tiles;
    for (const GroupSpan *span = segment->spans; span < segment->spans + segment->span_count; span++, act_scale++) {
        i32v high[PANEL_REGS], low[PANEL_REGS];
        EACH_REG(v) high[v] = low[v] = i32_set1(0);
        for (int kblock = span->kblock; kblock < span->kblock + span->kblocks; kblock++, qact += QACT_BYTES) {
            i32v quads[PANEL_REGS][QUADS];
            EACH_REG(v) {
                unpack_kblock(codes + v * REG_BYTES, bits, tiles, kblock, quads[v]);
                if (has_codebook) lookup_quads(codebook, quads[v]);
            }
            if (bits < 8) prefetch_codes(codes, bits, kblock, PREFETCH_BYTES);
            EACH_QUAD(q) {
                i32v a = broadcast_quad(qact + 4 * q), b = broadcast_quad(qact + KBLOCK + 4 * q);
                EACH_REG(v) {
                    INT_DOT(high[v], quads[v][q], a);
                    INT_DOT(low[v], quads[v][q], b);
                }
            }
        }
        GroupFactors g;
        load_group_factors(&g, segment, mode, panel, span->group);
        EACH_REG(v) {
            i32v dot = i32_add(i32_shl(high[v], 8), low[v]);
            if (g.has_zeros || g.shared_zero) dot = i32_add(dot, zero_correction(&g, v, act_scale));
            sums[v] = add_dequantized(sums[v], dot, &g, v, act_scale);
        }
    }
}

/* The codes of a KcBlock: unpacked to (kblocks, quads, tiles, 64 bytes), the form in which 8-bit panels are stored, or
   nibbles as stored, which the microkernel unpacks if it reads them only once. */
enum { UNPACKED, STORED_8BIT, STORED_4BIT };

INLINE i32v load_quad(const uint8_t *kblock, int storage, int q, int tiles, int v) {
    if (storage != STORED_4BIT) return i32_load(kblock + (q * tiles + v) * REG_BYTES);
    i32v nibbles = i32_load(kblock + (q / 2 * tiles + v) * REG_BYTES);
    return i32_and(q % 2 ? i32_shr(nibbles, 4) : nibbles, i8_set1(15));
}

/* sums (rows, tiles, 16) += a span's dot products, dequantised. */
INLINE void add_dequantized_rows(i32v (*dot)[PANEL_REGS], const GroupFactors *g, int has_minima,
                                 const ActScale *act_scale, int rows, int regs, float *sums) {
    f32v scale[PANEL_REGS], minimum[PANEL_REGS];
    __asm__ volatile("" : "+r"(sums)); /* or GCC loads sums too early and spills them */
    EACH_REG(v) {
        scale[v] = g->scale[v];
        KEEP_IN_REG(scale[v]);
        if (has_minima) {
            minimum[v] = g->minimum[v];
            KEEP_IN_REG(minimum[v]);
        }
    }
    EACH_ROW(r) {
        f32v delta = f32_set1(act_scale[r].delta), sum = f32_set1(0);
        KEEP_IN_REG(delta);
        if (has_minima) {
            sum = f32_set1(act_scale[r].sum);
            KEEP_IN_REG(sum);
        }
        EACH_REG(v) {
            float *at = sums + (r * regs + v) * LANES;
            f32v y = f32_fma(f32_load(at), f32_mul(f32_from_i32(dot[r][v]), delta), scale[v]);
            if (has_minima) y = f32_fnma(y, minimum[v], sum);
            f32_store(at, y);
        }
    }
}

/* sums (rows, tiles, 16) += rows of x, from `row` on, times a KcBlock: of each span all high bytes, then all low. */
INLINE void microkernel(const KcBlock *p, int row, int rows, int storage, int tiles, float *sums) {
    int regs = tiles;
    const uint8_t *codes = p->codes, *qact = p->qact, *prefetch = p->prefetch;
    const ActScale *act_scale = p->act_scales + row;
    long size = (storage == STORED_4BIT ? 2 : 4) * tiles * ROW_BYTES, prefetch_step = row ? 0 : p->prefetch_step;
    for (int n = 0; n < p->count; n++, act_scale += p->rows) {
        long step = (long)p->spans[n].kblocks * QACT_BYTES;
        const uint8_t *end = codes + p->spans[n].kblocks * size;
        i32v dot[MR][PANEL_REGS];
        EACH_ROW(r)
            EACH_REG(v) dot[r][v] = i32_set1(0);
        for (int byte = 0; byte < 2; byte++) {
            const uint8_t *x_bytes = qact + row * step + byte * KBLOCK;
            for (const uint8_t *at = codes; at < end; x_bytes += QACT_BYTES, at += size)
                EACH_QUAD(q) {
                    i32v quads[PANEL_REGS];
                    EACH_REG(v) {
                        quads[v] = load_quad(at, storage, q, tiles, v);
                        KEEP_IN_REG(quads[v]);
                    }
                    if (storage == STORED_8BIT) { /* two lines a quad, and too many for L1 */
                        __builtin_prefetch(prefetch, 0, 2);
                        __builtin_prefetch(prefetch + prefetch_step / 2, 0, 2);
                    } else
                        __builtin_prefetch(prefetch);
                    prefetch += prefetch_step;
                    EACH_ROW(r) {
                        i32v x = broadcast_quad(x_bytes + r * step + 4 * q);
                        EACH_REG(v) INT_DOT(dot[r][v], quads[v], x);
                    }
                }
            if (!byte)
                EACH_ROW(r)
                    EACH_REG(v) dot[r][v] = i32_shl(dot[r][v], 8);
        }
        codes = end;
        qact += step * p->rows;
        const GroupFactors *g = p->factors + n;
        if (g->has_zeros || g->shared_zero)
            EACH_ROW(r)
                EACH_REG(v) dot[r][v] = i32_add(dot[r][v], zero_correction(g, v, act_scale + r));
        if (g->has_minima)
            add_dequantized_rows(dot, g, 1, act_scale, rows, tiles, sums);
        else
            add_dequantized_rows(dot, g, 0, act_scale, rows, tiles, sums);
    }
}

/* One function for each storage of codes and number of rows. */
typedef void Microkernel(const KcBlock *, int, float *);
#define ONE(rows, name, storage, tiles)                                                           \
    static __attribute__((noinline)) void name##_##rows(const KcBlock *p, int row, float *sums) { \
        microkernel(p, row, rows, storage, tiles, sums);                                          \
    }
/* clang-format off */
#define EIGHT(...)                                                                    \
    ONE(1, __VA_ARGS__) ONE(2, __VA_ARGS__) ONE(3, __VA_ARGS__) ONE(4, __VA_ARGS__)   \
    ONE(5, __VA_ARGS__) ONE(6, __VA_ARGS__) ONE(7, __VA_ARGS__) ONE(8, __VA_ARGS__)
/* clang-format on */
EIGHT(unpacked, UNPACKED, PANEL_TILES)
EIGHT(stored_8bit, STORED_8BIT, PANEL_TILES)
EIGHT(stored_4bit, STORED_4BIT, PANEL_TILES)
EIGHT(two_tile, UNPACKED, 2)
#define NAMES(name) {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8}
static Microkernel *const microkernels[][MR] = {NAMES(unpacked), NAMES(stored_8bit), NAMES(stored_4bit)};
static Microkernel *const two_tile_microkernels[] = NAMES(two_tile);
#undef ONE
#undef EIGHT
#undef NAMES

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
    kc->prefetch_step = size / (2 * QUADS);
    if (storage != UNPACKED) {
        kc->codes = codes + (long)first * size;
        kc->prefetch = kc->codes + PREFETCH_BYTES;
        return;
    }
    kc->codes = (const uint8_t *)buffer;
    kc->prefetch = codes + (long)(first + count) * size;
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
    if (segment->bits == 8)
        storage = STORED_8BIT;
    else if (segment->bits == 4 && !segment->codebook && passes == 1 && panel.tiles == PANEL_TILES)
        storage = STORED_4BIT;
    Microkernel *const *by_rows = panel.tiles == PANEL_TILES ? microkernels[storage] : two_tile_microkernels;
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
