// y = x W for 1 to 16 rows: see gemm_m16.h.

#include "gemm_m16.h"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gemm_m16(
    const __grid_constant__ GemmParams params, const __grid_constant__ ChainArgs chain
) {
    extern __shared__ __align__(128) char smem[];
    gemm_block(params, smem, &chain);
}
