// The shape of a thread block of gemm_m64 and its map of shared memory, for the main loop (gemm_m64.cu) and the
// epilogue.
//
//     shared memory:  [stage 0 .. STAGES - 1]                                 then BlockEpilogue (OUT/IN_PREPACKED)
//     one stage:      [WARPS][WARP_TILES] weight tiles of MAX_TILE_BYTES | activations of one k tile: ROWS x 256 bytes
//     after the loop: the ring's place holds the sums, (weight, row, output) float32
#pragma once
#define LDMATRIX_LAYOUT 1
#include "pack_activations.h"

#define ROWS (N8_TILES * 8)
#define MATRIX_BYTES (ROWS * 16)              // 8 inputs of all rows: 8 x 8 matrices side by side
#define BLOCK_N_TILES (WEIGHT_TILES * WARPS)  // n16 columns of each weight
#define BLOCK_N (BLOCK_N_TILES * 16)          // outputs
#define ACTS_OFFSET (WARP_TILES * WARPS * MAX_TILE_BYTES)
#define STAGE_BYTES (ACTS_OFFSET + ROWS * 256)
#define RING_BYTES (STAGES * STAGE_BYTES)
#define SUM_BYTES (ROWS * (WARP_TILES * WARPS * 16 + 8) * 4)
#define EPILOGUE_OFFSET (RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES)

typedef EpilogueSmem<BLOCK_N, ROWS> BlockEpilogue;
