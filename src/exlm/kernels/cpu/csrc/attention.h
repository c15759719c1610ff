/* Paged attention as Python and decoder layers call it: prefill or decode, over float or quantised pages. */

#ifndef EXLM_ATTENTION_H
#define EXLM_ATTENTION_H

#include "attn_decode.h"
#include "attn_decode_quant.h"
#include "attn_prefill.h"

/* Stores the new tokens and computes their attention, over pages of any kind. `longest`: past and new tokens of the
   longest row. Returns 0, or 1 if there is no memory. */
EXPORT int exlm_attention(const AttnArgs *args, int64_t longest, int threads) {
    if (args->tokens > MAX_DECODE_TOKENS) return attn_prefill(args, longest, threads);
    if (args->quant_keys.bits) return attn_decode_quant(args, longest, threads);
    return attn_decode(args, longest, threads);
}

#endif
