"""Lanes: which way a row takes through the fused kernels, and its numbers as the kernels read them.

Plain numbers that host and kernels agree on; nothing here needs Triton. A plan that has no lane goes through
`pipeline.py` on the device, too: only slower.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.sampling_layout import MAX_VOCAB, STEP_FLAGS
from .dry import DryRule
from .params import CompiledSettings, StepName

SORT_SIZES = (
    128,
    512,
    1024,
    2048,
)  # how many candidates a program sorts: twice the tokens it can be asked for
GATHER_SIZE = 1024  # how many it gathers where top-k does not say how many there are

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
    rows = torch.tensor([param_row_of(compiled) for compiled in plans], dtype=torch.float64)
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


def param_row_of(compiled: CompiledSettings) -> tuple[float, ...]:
    flags = sum(STEP_FLAGS[step] for step in compiled.steps) + compiled.greedy * STEP_FLAGS["greedy"]
    rule = compiled.penalty_rule
    rates = (1.0, 0.0, 0.0) if rule is None else (rule.repetition, rule.frequency, rule.presence)
    return (*compiled.param_row, flags, compiled.mirostat, *rates, *_dry_columns(compiled.dry_rule))


def _dry_columns(rule: DryRule | None) -> tuple[float, ...]:
    if rule is None:
        return (0.0, 1.0, 0.0, 0.0, 0.0)
    return (rule.multiplier, rule.base, rule.allowed_length, rule.max_match_length, rule.search_range)
