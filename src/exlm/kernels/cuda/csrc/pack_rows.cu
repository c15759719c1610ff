// Writes rows of float16 in the order of the packed activations that a GEMM reads (prepacked_acts.h), times sigmoid(gate)
// if there is one. Nothing is quantised. For mixers whose own kernels do not pack their output.

#include "prepacked_acts.h"

struct PackRowsParams {
    const u16 *x, *gate;  // (rows, inputs); gate may be null
    i64 x_stride, gate_stride;  // of a row
    EpilogueTarget target;
    int rows, inputs;
};
CHECK_SIZEOF(PackRowsParams);

// Grid: (256 inputs, row).
extern "C" __global__ void __launch_bounds__(256) pack_rows(const __grid_constant__ PackRowsParams params) {
    const int input = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    const bool in_range = input < params.inputs;
    uint4 slots = {~0u, ~0u, ~0u, ~0u};
    if (in_range) slots = params.target.slots[input];
    PadWriter pads;
    pads.locate(params.target, (row * gridDim.x + blockIdx.x) * 256 + threadIdx.x);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (in_range) {
        u16 value = params.x[row * params.x_stride + input];
        if (params.gate) {
            const float gate = cvt_f32_f16(params.gate[row * params.gate_stride + input]);
            value = cvt_f16_f32(__fdividef(cvt_f32_f16(value), 1.0f + __expf(-gate)));
        }
        store_prepacked(params.target, slots, row, value);
    }
    pads.write(params.target, gridDim.x * gridDim.y * 256);
}
