// Packed matrices times a few rows of activations.

#include "gemm_m16.h"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gemm_m16(
    const __grid_constant__ GemmParams job, const __grid_constant__ ChainArgs link
) {
    extern __shared__ __align__(128) char memory[];
    gemm_block(job, memory, &link);
}
