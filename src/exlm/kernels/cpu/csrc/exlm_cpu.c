/* The CPU kernels of exlm: quantised products, attention and what lies between them. Plain C, called through ctypes;
   compiled as one unit, once for each instruction set, from the same source.

   How a product y = x W runs, from exlm_linear (linear.h) to gemm_int8 (gemm_int8.h):

     x (rows, inputs) float32                      codes (words, outputs) as the file has them
           |  quantize_span (quantize_act.h)             |  exlm_repack_panels, once, when the model is loaded
           v                                             v
     integers of two bytes or one, and             panels of 48 outputs, k outermost: w_panels.h has the picture
     a scale for each span of k                          |  unpack_kblock: a byte for each code
           |                                             |  lookup_quads: IQ4 codes become codebook bytes
           +---------------------+-----------------------+
                                 |  fused_panel, panel_product: gemv_panel for one row, gemm_panel for several
                                 v
     int32 sums of a span, for some rows and the panel's outputs: microkernel_vnni.h on AVX-512,
     gemm_narrow_simd.h with microkernel_dotprod.h or microkernel_madd16.h elsewhere
                                 |  add_dequantized (dequant.h): zero points, scales, minima
                                 v
     y (rows, outputs) float32, with bias, residual or silu(gate) * up added before it leaves the cache

   Glossary
     row       a token's activations; also m                     quad    four consecutive k of one output: a 32-bit word
     k, n      input and output of a matrix                      kblock  16 consecutive k: four quads
     group     k that share a scale                              pack    kblocks whose codes fill whole rows of a panel:
     span      kblocks of one group, summed in int32                     one, or two of odd widths
     segment   a range of k of one bit width (EXL2 has several)  tile    16 outputs; a panel is three tiles or two
     qact      quantised activations                             lane    one of the 16 numbers of a vector (f32x16)
     A row of a panel is one quad of each of its outputs; a stored row is the codes of one input in the file's order.

   Headers, from the bottom: simd.h, threadpool.h; matrix.h, w_panels.h, repack_panels.h; norm_act.h, quantize_act.h,
   dequant.h, kc_block.h, microkernel_*.h, gemm_narrow_simd.h, gemm_int8.h; bf12.h, gemm_float.h (float weights);
   linear.h; attn_common.h, kv_quant.h, attn_decode.h, attn_decode_quant.h, attn_prefill.h, attention.h;
   decoder_layer.h; recurrent.h, delta_net.h, mamba2.h (mixers with a state in place of a cache); int8_peak.h.

   AMX is never used: virtual machines announce it without letting programs use it. */

#include "decoder_layer.h"
#include "delta_net.h"
#include "int8_peak.h"
#include "mamba2.h"
#include "repack_panels.h"

/* The size of a struct that bindings.py mirrors, or -1 if there is none of that name. */
EXPORT int exlm_sizeof(const char *name) {
#define SIZE(type) \
    if (!strcmp(name, #type)) return (int)sizeof(type);
    SIZE(FactorTable)
    SIZE(GroupSpan)
    SIZE(Segment)
    SIZE(Bf12)
    SIZE(Matrix)
    SIZE(AttnParams)
    SIZE(QuantKV)
    SIZE(AttnArgs)
    SIZE(FusedMatrices)
    SIZE(LayerWeights)
    SIZE(BatchArgs)
    SIZE(RecurrentPass)
    SIZE(ConvWeights)
    SIZE(DeltaNetWeights)
    SIZE(Mamba2Weights)
#undef SIZE
    return -1;
}
