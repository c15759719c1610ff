"""`Sampler.sample` with exllamav2's signature, for scripts that run their own loop.

It applies the steps of `exlm.sampling` to one row after the other. Unlike a batch, the caller passes the
random number, the settings keep mirostat's target, and filters are evaluated during the call.

Which token a random number selects depends on the order of the candidates in the cumulative sum. exllamav2
left candidates in the order of their ids if no step had sorted them, moved those above a threshold to the
front by swapping, and, if k top tokens were requested, ran a quicksort that stopped when the first k were in
order. This module keeps that order, so that scripts that pass `random` get the same tokens. Distributions do
not depend on it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import sampling
from ..errors import BadLogits, InputError
from ..kernels.sampling_layout import INFINITE_LOGITS, NAN_LOGITS, NO_TOKEN_ALLOWED, THRESHOLD_TOLERANCE
from ..sampling import SamplerState, SamplingRequest, Settings
from ..sampling.candidates import (
    DrawnTokens,
    batch_params,
    block_maxima,
    draw_greedy,
    pad_top_tokens,
    stable_sort_descending,
)
from ..sampling.logits_processors import apply_allowed, apply_edits, check_bias, compute_edits, mix_logits
from ..sampling.request import FAILURE_MESSAGES
from ..sampling.rng import uniform
from ..sampling.sampler import apply_logits_steps, final_candidates, update_states
from ..sampling.settings import CompiledSettings
from ..sampling.steps import RowGroup, make_row
from ..sampling.vocabulary import SamplerVocabulary

MAX_SORTED_TOP_K = 500  # up to this k, exllamav2 left the candidates of top-k sorted
SORTING_STEPS = frozenset({"tfs", "typical", "mirostat", "skew"})
NEGLIGIBLE_PROB = 1e-8  # less probable candidates are moved to the end before sorting
MAX_PASSES = 100  # passes over all candidates after which the quicksort stops
TARGET_MASS_FACTOR = 0.9998  # the cumulative probability to reach is this times the random number


class SampleFilterMask:
    """The tokens that filters allow next, and those that end the text."""

    def __init__(self, filters: Sequence[Any], eos: int | None = None) -> None:
        """`eos`, if given, is the only token allowed once the filters allow it."""
        all_can_mask = bool(filters) and all(map(_supports_masks, filters))
        self._masking_filters: Sequence[Any] = filters if all_can_mask else ()
        self._allowed_ids: set[int] | None = None
        self._end_ids: set[int] = set()
        for filter_ in self._masking_filters:
            if not (filter_.get_next(mask=True) if hasattr(filter_, "get_next") else filter_.prepare_logit_mask()):
                raise InputError("Attempting to use precomputed logit mask, but filter is not precomputing mask.")
        for filter_ in () if all_can_mask else filters:
            allowed, ends = filter_.get_next() if hasattr(filter_, "get_next") else filter_.next()
            self._end_ids |= set(ends or ())
            if allowed is not None:
                self._allowed_ids = set(allowed) if self._allowed_ids is None else self._allowed_ids & set(allowed)
        if self._allowed_ids is not None and not self._allowed_ids:
            raise InputError("Filter excluded all tokens: what the filters allow has nothing in common.")
        if eos is not None and self._allowed_ids is not None and eos in self._allowed_ids:
            self._allowed_ids = {eos}

    def apply(self, x: Tensor) -> None:
        """Exclude tokens that the filters do not allow from logits (vocab,), in place."""
        for filter_ in self._masking_filters:
            masked = filter_.mask_logits(x)
            x.copy_(torch.nn.functional.pad(masked, (0, max(0, len(x) - len(masked))), value=-torch.inf)[: len(x)])
        if self._allowed_ids is not None:
            apply_allowed(x, self._allowed_ids)

    def ends_text(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self._end_ids


def _supports_masks(filter_: Any) -> bool:
    return hasattr(filter_, "can_mask_logits") and bool(filter_.can_mask_logits())


@dataclass
class _RowSample:
    token: int
    prob: float
    top_tokens: Tensor | None
    top_probs: Tensor | None
    mu: float | None = None


@dataclass(frozen=True)
class _SampleCall:
    """The arguments of one call that apply to all rows."""

    settings: Settings
    vocabulary: SamplerVocabulary
    filter_mask: SampleFilterMask
    blocked_ids: Collection[int]
    num_top: int

    def sample_row(
        self, x: Tensor, history: list[int], u: float, index: int, healing_ids: Collection[int] | None
    ) -> _RowSample:
        """Sample from logits (vocab,) after `history`, with the random number `u`; `index` is the row's."""
        state = SamplerState(None, 0, history)
        mus = self.settings.mirostat_mu
        state.mirostat_mu = mus[index] if mus and index < len(mus) else None
        request = SamplingRequest(self.settings, state, blocked=self.blocked_ids)
        compiled = self.settings.compiled()
        if self.settings.token_bias is not None:
            check_bias(self.settings.token_bias, len(x))
        edits = compute_edits(request, compiled, self.vocabulary, len(x))
        x = x.float().clone().unsqueeze(0)
        apply_edits(x, [edits])
        self.filter_mask.apply(x[0])
        if healing_ids is not None:
            apply_allowed(x[0], healing_ids)
        width = x.shape[1]
        group = RowGroup([make_row(0, request, compiled, edits, width, x.device)], self.vocabulary, width, x.device)
        apply_logits_steps(x, group)
        maxima = block_maxima(x)
        _check_max_logit(float(maxima.amax()))
        sampled = self._greedy(x, group) if compiled.greedy else self._draw(x, maxima, group, u)
        sampled.mu = state.mirostat_mu
        return sampled

    def _greedy(self, x: Tensor, group: RowGroup) -> _RowSample:
        _, drawn = draw_greedy(x, self.num_top)
        update_states(group, None, drawn)
        return _RowSample(int(drawn.tokens), 1.0, drawn.top_tokens, drawn.top_probs)

    def _draw(self, x: Tensor, maxima: Tensor, group: RowGroup, u: float) -> _RowSample:
        (compiled,), ((_, _, c),) = group.compiled, final_candidates(x, group, maxima)
        p = c.p if c.ids is None else torch.zeros_like(x, dtype=c.p.dtype).scatter_(1, c.ids, c.p)
        sorted_p, ids = stable_sort_descending(p)
        ordered_ids, weights = _exllamav2_order(x, p[0], ids[0], compiled, self.num_top)
        position = inverse_cdf(weights, u ** compiled.params["skew_power"])
        while p[0, ordered_ids[position]] == 0:
            position -= 1
        token = int(ordered_ids[position])
        drawn = DrawnTokens(torch.tensor([token]), p[:, token])
        update_states(group, c, drawn)
        sampled = _RowSample(token, float(p[0, token]), None, None)
        if self.num_top:
            sampled.top_tokens, sampled.top_probs = pad_top_tokens(
                ids[:, : self.num_top], sorted_p[:, : self.num_top], self.num_top
            )
        return sampled


def _exllamav2_order(
    x: Tensor, p: Tensor, sorted_ids: Tensor, compiled: CompiledSettings, num_top: int
) -> tuple[Tensor, Tensor]:
    """The candidates in exllamav2's order, and their probabilities."""
    if compiled.probs_steps & SORTING_STEPS or 0 < compiled.top_k <= MAX_SORTED_TOP_K:
        members = sorted_ids[: int((p > 0).sum())]
        return members, p[members]
    if compiled.probs_steps & {"top_a", "min_p"} and not compiled.top_k and "top_p" not in compiled.probs_steps:
        members, weights = _above_thresholds(x, p, compiled)
    else:
        members = (
            (p > 0).nonzero().squeeze(1) if compiled.top_k or "top_p" in compiled.probs_steps else torch.arange(len(p))
        )
        weights = p[members]
    if num_top:
        order = torch.tensor(partial_quicksort(weights.float().tolist(), num_top))
        members, weights = members[order], weights[order]
    return members, weights


def _above_thresholds(x: Tensor, p: Tensor, compiled: CompiledSettings) -> tuple[Tensor, Tensor]:
    """The candidates after top-a and min-p, and perhaps one below (`gather_above_threshold`)."""
    before = batch_params([compiled], x.device).unnormalized_probs(x, x.amax(-1, keepdim=True))[0]
    top = 1.0 / float(before.sum())
    threshold = max(compiled.params["top_a"] * top, compiled.params["min_p"]) * (1.0 - THRESHOLD_TOLERANCE)
    members, extra = gather_above_threshold(before >= threshold)
    # Other steps raised the candidates' ratios to a power, or (XTC) do not affect such improbable ones.
    best = before.argmax()
    extra_weight = p[best] * before[extra] ** (1.0 / compiled.params["final_temperature"])
    return torch.cat((members, extra)), torch.cat((p[members], extra_weight))


_vocabulary_cache: WeakKeyDictionary[Any, SamplerVocabulary] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> SamplerVocabulary:
    """A tokenizer's `SamplerVocabulary`, cached for the tokenizer's lifetime."""
    if tokenizer is None:
        return SamplerVocabulary()
    try:
        if tokenizer not in _vocabulary_cache:
            _vocabulary_cache[tokenizer] = SamplerVocabulary(tokenizer)
        return _vocabulary_cache[tokenizer]
    except TypeError:  # an object that cannot be a weak key
        return SamplerVocabulary(tokenizer)


@torch.no_grad()
def sample(
    logits: Tensor,
    settings: Settings,
    sequence_ids: Tensor,
    random: float,
    tokenizer: Any,
    prefix_token: Tensor | None = None,
    return_top_tokens: int = 0,
    blocked_tokens: Collection[int] | None = None,
    filters: Sequence[Any] | None = None,
    filter_prefer_eos: bool = False,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """Sample a token for each row of logits (rows, 1, vocab) after sequence_ids (rows, n).

    `random` in [0, 1) selects the first row's token; those of further rows are derived from it.
    `prefix_token` (rows, 1) restricts each row to tokens whose text starts with that token's. `cfg_scale`
    combines two rows into one. Returns tokens (rows, 1), top tokens and their probabilities (rows, 1, k), on
    the meta device if none are requested, the tokens' final probabilities (rows, 1), and whether a filter
    ended the text; everything else is on the CPU. `mirostat_mu` of the settings is read and written, with a
    number for each row. `sync` has no effect.
    """
    x = _logits_rows(logits, settings, sequence_ids, random, prefix_token)
    _check_stateful_steps(settings)
    filters = (settings.filters if filters is None else filters) or ()
    if filters and len(x) > 1:
        raise InputError("Filters not implemented for batch size > 1.")
    prefer_eos = bool(filters) and (filter_prefer_eos or settings.filter_prefer_eos)
    vocabulary = vocabulary_of(tokenizer)
    x = x[:, : vocabulary.width(x.shape[1])]
    call = _SampleCall(
        settings,
        vocabulary,
        SampleFilterMask(filters, tokenizer.eos_token_id if prefer_eos else None),
        blocked_tokens or (),
        min(return_top_tokens, x.shape[1]),
    )
    samples = []
    for index, (row, history) in enumerate(zip(x, sequence_ids.tolist(), strict=False)):
        u = random if index == 0 else uniform(_seed_from_float(random), index)
        healing_ids = None
        if prefix_token is not None:
            healing_ids = tokenizer.get_prefix_id_to_ids_dict()[int(prefix_token[index, 0])]
        samples.append(call.sample_row(row, history, u, index, healing_ids))
    if settings.mirostat:
        settings.mirostat_mu = [sampled.mu or 0.0 for sampled in samples]
    ends_text = any(call.filter_mask.ends_text(sampled.token) for sampled in samples)
    tokens = torch.tensor([[sampled.token] for sampled in samples])
    return (tokens, *_stack_top_tokens(samples), torch.tensor([[sampled.prob] for sampled in samples]), ends_text)


def _stack_top_tokens(samples: list[_RowSample]) -> tuple[Tensor, Tensor]:
    ids = [sampled.top_tokens for sampled in samples if sampled.top_tokens is not None]
    probs = [sampled.top_probs for sampled in samples if sampled.top_probs is not None]
    if not ids:
        shape = (len(samples), 1, 0)
        return torch.empty(shape, dtype=torch.long, device="meta"), torch.empty(shape, device="meta")
    return torch.stack(ids), torch.stack(probs).float()


def _logits_rows(
    logits: Tensor, settings: Settings, sequence_ids: Tensor, number: float, prefix_token: Tensor | None
) -> Tensor:
    """The logits (rows, vocab) to sample from; with `cfg_scale`, one row from two."""
    if logits.dim() != 3 or logits.shape[1] != 1:
        raise InputError(
            f"Logits tensor is incorrect shape, must be (bsz, 1, vocab_size): found {tuple(logits.shape)}."
        )
    if sequence_ids.dim() != 2 or len(sequence_ids) != len(logits):
        raise InputError(
            f"sequence_ids must be ({len(logits)}, n), like the logits, found {tuple(sequence_ids.shape)}."
        )
    if prefix_token is not None and len(prefix_token) != len(logits):
        raise InputError("Prefix token list doesn't match batch shape.")
    if not 0.0 <= number <= 1.0:
        raise InputError(f"random must be from 0 to 1, found {number!r}.")
    x = logits[:, 0].float().cpu()
    if settings.cfg_scale is None:
        return x
    if len(x) != 2:
        raise InputError(f"CFG requires logits to be bsz 2, found {len(x)}.")
    return mix_logits(x[:1], x[1:], torch.tensor([[float(settings.cfg_scale)]]))


def _check_stateful_steps(settings: Settings) -> None:
    """Refuse steps whose state only a job keeps; mirostat's target is in the settings."""
    if others := [step for step in settings.compiled().stateful_steps if step != "mirostat"]:
        raise InputError(
            f"Sampler.sample keeps no state for {others[0]} between tokens: run a job of a generator, or "
            f"switch {others[0]} off."
        )


def _check_max_logit(logit: float) -> None:
    if not math.isfinite(logit):
        code = NAN_LOGITS if math.isnan(logit) else INFINITE_LOGITS if logit > 0 else NO_TOKEN_ALLOWED
        raise BadLogits(FAILURE_MESSAGES[code])


def _seed_from_float(number: float) -> int:
    """The bits of a float as a seed, from which further rows derive their random numbers."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", number))
    return int(bits)


def partial_quicksort(p: list[float], num_top: int) -> list[int]:
    """The order of candidates after exllamav2's quicksort: the `num_top` most probable first, then the rest.

    A full sort replaces it where quicksort would be quadratic, on nearly sorted input.
    """
    order = list(range(len(p)))
    ranges = [(0, _move_negligible_to_end(p, order))]
    comparisons_left = MAX_PASSES * len(p)
    while ranges:
        low, high = ranges.pop()
        if low < high and low <= num_top:
            comparisons_left -= high - low
            if comparisons_left < 0:
                return sorted(range(len(p)), key=lambda i: -p[i])
            middle = _partition(p, order, low, high)
            ranges += ((low, middle - 1), (middle + 1, high))
    return order


def gather_above_threshold(above: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the candidates above a threshold (n,) in exllamav2's order, and of one below it, if any.

    A two-pointer loop swapped each low candidate with the last high one behind it. It did not compare where
    the pointers met: a low candidate there, just swapped or the very last, was included.
    """
    count = int(above.sum())
    positions = torch.arange(count, device=above.device)
    low = (~above[:count]).nonzero().squeeze(1)
    positions[low] = above[count:].nonzero().squeeze(1).flip(0) + count
    if count < len(above) and bool(above[count]):
        return positions, low[-1:]
    return positions, torch.full((1 if count == len(above) - 1 else 0,), count, device=above.device)


def inverse_cdf(p: Tensor, u: float) -> int:
    """The position in probabilities (n,) that a uniform number selects; never one with probability 0."""
    nonzero = p.nonzero().squeeze(1)
    sums = p.double().cumsum(0)
    position = int((sums < TARGET_MASS_FACTOR * u * sums[-1]).sum())
    return min(max(position, int(nonzero[0])), int(nonzero[-1]))


def _move_negligible_to_end(p: list[float], order: list[int]) -> int:
    """Swap negligible candidates to the end; the last position before them."""
    i, end = 0, len(order) - 1
    while i <= end:
        if p[order[i]] < NEGLIGIBLE_PROB:
            order[i], order[end] = order[end], order[i]
            end -= 1
        else:
            i += 1
    return end


def _partition(p: list[float], order: list[int], low: int, high: int) -> int:
    """Lomuto partition in descending order, with the last candidate as pivot; the pivot's new position."""
    pivot, border = p[order[high]], low
    for i in range(low, high):
        if p[order[i]] > pivot:
            order[border], order[i] = order[i], order[border]
            border += 1
    order[border], order[high] = order[high], order[border]
    return border


class Sampler(sampling.Sampler):
    """The sampler of the engine, with exllamav2's `sample` for scripts that run their own loop."""

    sample = staticmethod(sample)
