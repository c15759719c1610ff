"""Lanes: which way a row takes through the fused kernels, and its numbers as the kernels read them.

Plain numbers that host and kernels agree on; nothing here needs Triton. A plan that has no lane goes through
`pipeline.py` on the device, too: only slower.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .dry import DryRule
from .params import CompiledSettings, StepName, StepParams

MAX_VOCAB = 1 << 18  # columns that a program can look at
MAX_TILES = 128
VOCAB_BLOCK = 64  # neighbouring columns of which the largest is known
SORT_SIZES = (
    128,
    512,
    1024,
    2048,
)  # how many candidates a program sorts: twice the tokens it can be asked for
GATHER_SIZE = 1024  # how many it gathers where top-k does not say how many there are

HEADER_FIELDS = {
    "batch_index": 1,  # of the row's logits in the batch
    "seed": 3,  # seed, position, branch
    "mu": 1,  # address of mirostat's target, 0 at first
    "initial_mu": 1,  # the first target, as the bits of a float64
    "xtc_exempt": 1,  # address of the tokens that XTC spares
    "token_counts": 4,  # penalised tokens: address, how many, which one joined, which one left; -1 for none
    "new_counts": 2,  # a new list of penalised tokens: where it is, how many there are
    "decaying": 2,  # fading tokens: where, how many; their counts and strengths follow
    "blocked": 2,  # where, how many
    "history": 3,  # what DRY searches: address, how many tokens, the last one
    "dry_breakers": 1,  # address of the tokens that end a repetition
    "bias": 1,  # address
    "allowed": 1,  # where the bits are
}
"""The words of a row's head, and how many each has. 0 stands for none; places count from the first head."""

HEADER_OFFSETS = dict(zip(HEADER_FIELDS, accumulate(HEADER_FIELDS.values(), initial=0), strict=False))
HEADER_WORDS = sum(HEADER_FIELDS.values())

FLAG_ORDER = (
    "top_p",
    "top_a",
    "min_p",
    "tfs",
    "typical",
    "mirostat",
    "dynamic_temperature",
    "final_temperature",
    "xtc",
    "skew",
    "greedy",
)
STEP_FLAGS = {step: 1 << bit for bit, step in enumerate(FLAG_ORDER)}
TABLE_FIELDS = (
    *StepParams.__dataclass_fields__, "flags", "mirostat", "repetition", "frequency", "presence",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_max_match_length", "dry_search_range",
)  # fmt: skip
TABLE_COLUMNS = {name: column for column, name in enumerate(TABLE_FIELDS)}
TABLE_WIDTH = len(TABLE_FIELDS)

STEPS_IN_TOP_K_VARIANT = frozenset[StepName](
    {"top_p", "top_a", "min_p", "skew"}
)  # after top-k not worth a kernel of their own
THRESHOLD_STEPS = frozenset[StepName]({"top_p", "top_a", "min_p", "mirostat"})
STEPS_BEFORE_MIROSTAT = frozenset[StepName]({"tfs", "typical"})


class SamplingKernelVariant(NamedTuple):
    """Which kernel a row needs: how many candidates it sorts, for rows without top-k, with every step."""

    sort_size: int
    full_vocab: bool
    all_steps: bool


@lru_cache(maxsize=1024)
def variant_of(compiled: CompiledSettings, width: int, num_top: int) -> SamplingKernelVariant | None:
    """The lane of a plan for a vocabulary; None if it must go another way."""
    num_sorted, full_vocab, all_steps = num_top, False, False
    if 0 < compiled.top_k < width:
        num_sorted, all_steps = max(num_top, compiled.top_k), not compiled.steps <= STEPS_IN_TOP_K_VARIANT
    elif not compiled.greedy:
        full_vocab, all_steps = True, not compiled.steps <= THRESHOLD_STEPS
        thresholds = compiled.steps & (
            THRESHOLD_STEPS - {"mirostat"} if compiled.steps & STEPS_BEFORE_MIROSTAT else THRESHOLD_STEPS
        )
        if all_steps and not thresholds:
            return None  # those steps are for few tokens, and nothing makes them few
        num_sorted = max(num_top, GATHER_SIZE // 2 if all_steps else 0)
    sort_size = next((size for size in SORT_SIZES if size >= 2 * num_sorted), 0)
    return (
        SamplingKernelVariant(sort_size, full_vocab, all_steps) if sort_size and width <= MAX_VOCAB else None
    )


@lru_cache(maxsize=64)
def param_table(plans: tuple[CompiledSettings, ...], device: torch.device) -> Tensor:
    """The numbers of some plans (rows, TABLE) in float64; kept, because the next step asks for the same."""
    rows = torch.tensor([_table_row(compiled) for compiled in plans], dtype=torch.float64)
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


def _table_row(compiled: CompiledSettings) -> tuple[float, ...]:
    flags = sum(STEP_FLAGS[step] for step in compiled.steps) + compiled.greedy * STEP_FLAGS["greedy"]
    rule = compiled.penalty_rule
    rates = (1.0, 0.0, 0.0) if rule is None else (rule.repetition, rule.frequency, rule.presence)
    return (*compiled.param_row, flags, compiled.mirostat, *rates, *_dry_columns(compiled.dry_rule))


def _dry_columns(rule: DryRule | None) -> tuple[float, ...]:
    if rule is None:
        return (0.0, 1.0, 0.0, 0.0, 0.0)
    return (rule.multiplier, rule.base, rule.allowed_length, rule.max_match_length, rule.search_range)
