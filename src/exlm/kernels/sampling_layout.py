"""What the sampler and its GPU kernels share: constants, and the layout of a row's parameters in memory.

The kernels read two blocks of memory for each row. Its *header* has int64 words that change from token to
token: seed and position, addresses of tensors, and the offsets of lists in the same upload. Its *parameters*
are float64 numbers that follow from its settings: those of the steps in `exlm.sampler_chain` that the kernels
support. This module needs neither torch nor Triton.
"""

from __future__ import annotations

from itertools import accumulate

from ..sampler_chain import GREEDY_BELOW_TEMPERATURE as GREEDY_BELOW_TEMPERATURE
from ..sampler_chain import KERNEL_PARAMS, STEPS

NO_TOKEN_ALLOWED, NAN_LOGITS, INFINITE_LOGITS = -1, -2, -3  # in place of the token of a row that failed
TOO_MANY_CANDIDATES = -4  # more candidates than a kernel sorts: the sampler draws such a row again

BLOCKED_LOGIT = -1e30  # not -inf: where all else is excluded, a blocked token is sampled
MAX_DRY_PENALTY = 1e30  # finite, so that a repeated token that is the only one allowed can still be chosen
THRESHOLD_TOLERANCE = 1e-6  # thresholds count as met within this: float32 logits are not more exact
TFS_MIN_PROB = 1e-8  # tail-free sampling drops less probable tokens before it computes the curvature
BELOW_ONE = 1.0 - 2.0**-50  # keeps the largest uniform number from rounding up to the end of the distribution

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10

VOCAB_BLOCK = 64  # neighbouring columns; searches look at the maxima of blocks first
MAX_VOCAB = 1 << 18  # columns that the kernels support
MAX_TILES = 128  # of a row in the draw kernel

HEADER_FIELDS = {
    "batch_index": 1,  # of the row's logits in the batch
    "seed": 3,  # seed, position, rewind count
    "mu": 1,  # address of mirostat's target, 0 before the first token
    "initial_mu": 1,  # the first target, as the bits of a float64
    "xtc_exempt": 1,  # address of the mask of tokens that XTC never excludes
    "token_counts": 4,  # penalised tokens: address, size, which token entered, which one left; -1 for none
    "new_counts": 2,  # a new list of penalised tokens: where it is, how many there are
    "decaying": 2,  # tokens whose penalty decays: where, how many; their counts and strengths follow
    "blocked": 2,  # where, how many
    "history": 3,  # the text that DRY searches: address, length, last token
    "dry_breakers": 1,  # address of the mask of tokens that end a repetition
    "bias": 1,  # address
    "allowed": 1,  # where the bits are
}
"""The fields of a row's header, and how many words each has. 0 stands for none; offsets ("where") count words
from the first header."""

HEADER_OFFSETS = dict(zip(HEADER_FIELDS, accumulate(HEADER_FIELDS.values(), initial=0), strict=False))
HEADER_WORDS = sum(HEADER_FIELDS.values())

STEP_FLAGS = {
    step: 1 << bit
    for bit, step in enumerate(
        (*(step.name for step in STEPS if step.in_kernels and step.stage in ("candidates", "draw")), "greedy")
    )
}
"""The steps after the softmax that the kernels support, as bits of the parameter "flags"."""

PARAM_FIELDS = (*KERNEL_PARAMS, "flags", "mirostat")  # "mirostat": whether the row's target is updated
PARAM_COLUMNS = {name: column for column, name in enumerate(PARAM_FIELDS)}
PARAM_WIDTH = len(PARAM_FIELDS)
