/* Runs every kernel on random odd shapes and prints a line for each call: what it was, and a digest of its result.

   Compiled together with the library, once for each instruction set; the lines must be the same. BY_DEFINITION computes
   quantised products one by one, as csrc/matrix.h and csrc/quantize_act.h define them, instead of calling the library.
   Each call is made with 1 to 4 threads and must give the same bits. */

#include "digest.h"
#include "digest_layers.h"
#include "digest_linear.h"
#include "digest_recurrent.h"

/* Every case has a seed of its own, so that cases can be added without changing others. */
static void run_cases(void run_case(int), int count, uint64_t kind) {
    for (int n = 0; n < count; n++) {
        state = kind << 32 | (uint64_t)n;
        run_case(n);
        free_all();
    }
}

int main(void) {
    run_cases(case_matrix, 140, 1);
    run_cases(case_f16, 8, 2);
    run_cases(case_bf12, 8, 3);
    run_cases(case_norm, 20, 4);
    run_cases(case_silu_mul, 6, 5);
    run_cases(case_attention, 60, 6);
    run_cases(case_layer, 16, 7);
    run_cases(case_codebook, 60, 8);
    run_cases(case_byte_activations, 140, 10);
    run_cases(case_recurrent, 48, 9);
    return 0;
}
