// Packed matrices times a few rows of activations.

#include "products.h"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) multiply(
    const __grid_constant__ Job job, const __grid_constant__ Link link
) {
    extern __shared__ __align__(128) char memory[];
    product(job, memory, &link);
}
