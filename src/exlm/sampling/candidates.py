"""Candidates: the tokens that may be drawn, with their probabilities, for a group of rows; and the draw.

Candidates are the few most probable tokens of each row, in order, found without sorting the vocabulary; or they
have a column for each token of the vocabulary, in rows that exclude nothing, or on devices where the host would
have to wait for the number that remains. The steps work on either. Probabilities are float64: sums
of different lengths then agree far beyond any threshold, so a row's tokens do not depend on its neighbours'.

The draw inverts the cumulative distribution: it goes along the candidates until their probabilities add up to
one uniform number. The same number always gives the same token, whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling_layout import BELOW_ONE, TFS_MIN_PROB, VOCAB_BLOCK
from ..sampler_chain import PARAM_NAMES, STEPS_BY_STAGE
from .settings import CompiledSettings

MAX_DIRECT_COLUMNS = 16384  # wider rows are searched in two passes: block maxima, then the best block
MIN_SPARE_BLOCKS = 32  # top-k searches block maxima first in rows of at least 2 · (k + MIN_SPARE_BLOCKS) blocks


def block_maxima(x: Tensor) -> Tensor:
    """The maximum of every 64 neighbouring columns (rows, blocks); the last block may be short."""
    end = x.shape[1] // VOCAB_BLOCK * VOCAB_BLOCK
    maxima = x[:, :end].reshape(len(x), end // VOCAB_BLOCK, VOCAB_BLOCK).amax(-1) if end else x[:, :0]
    return maxima if end == x.shape[1] else torch.cat((maxima, x[:, end:].amax(-1, keepdim=True)), 1)


def block_sums(x: Tensor) -> Tensor:
    """The sum of every 64 neighbouring columns (rows, blocks), in float64; the last block may be short."""
    end = x.shape[1] // VOCAB_BLOCK * VOCAB_BLOCK
    sums = x[:, :end].reshape(len(x), end // VOCAB_BLOCK, VOCAB_BLOCK).sum(-1).double()
    return sums if end == x.shape[1] else torch.cat((sums, x[:, end:].sum(-1, keepdim=True).double()), 1)


def gather_blocks(x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some blocks (rows, k) as (rows, 64 · k), and their columns; -inf past a row's end."""
    columns = torch.add(_block_offsets(x.device), blocks.unsqueeze(-1), alpha=VOCAB_BLOCK).flatten(1)
    width = x.shape[1]
    if width % VOCAB_BLOCK == 0:
        return x.gather(1, columns), columns
    in_row = columns < width
    columns = columns.clamp_max(width - 1)
    return x.gather(1, columns).masked_fill_(~in_row, -torch.inf), columns


def stable_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum (rows,) and its column, the first of equal ones; a NaN is larger than any number."""
    if x.is_cpu:
        numbers = x.numpy()  # much faster at this than torch
        first = numbers.argmax(1)
        return torch.from_numpy(numbers[np.arange(len(numbers)), first]), torch.from_numpy(first)
    if x.shape[1] <= MAX_DIRECT_COLUMNS:
        top, column = x.max(-1)
        return top, column
    top, block = block_maxima(x).max(-1, keepdim=True)
    values, columns = gather_blocks(x, block)
    return top.squeeze(1), columns.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)


def stable_top_k(x: Tensor, k: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row in descending order, and their columns; both (rows, k)."""
    k = min(k, x.shape[1])
    columns = None
    if (k + MIN_SPARE_BLOCKS) * VOCAB_BLOCK * 2 <= x.shape[1]:
        x, columns = gather_blocks(x, _top_k_columns(block_maxima(x) if maxima is None else maxima, k))
    top_columns = _top_k_columns(x, k)
    values, order = torch.sort(x.gather(1, top_columns), dim=-1, descending=True, stable=True)
    top_columns = top_columns.gather(1, order)
    return values, top_columns if columns is None else columns.gather(1, top_columns)


def _top_k_columns(x: Tensor, k: int) -> Tensor:
    """The columns of the k largest entries (rows, k), ascending; of equal ones the first."""
    if x.is_cpu:
        members = _top_k_by_partition(x.detach().numpy(), k)
        if members is not None:
            return members
    return _top_k_by_key(x, k).sort(-1).values


def _top_k_by_partition(x: np.ndarray[tuple[int, ...], Any], k: int) -> Tensor | None:
    """`_top_k_columns` by finding the k-th value first; None for rows with a NaN."""
    rows, width = x.shape
    kth_value = np.partition(x, width - k, axis=1)[:, width - k, None]
    at_least_kth = x >= kth_value
    positions = np.flatnonzero(at_least_kth)
    if len(positions) != rows * k:
        equal = x == kth_value
        num_excess = at_least_kth.sum(1, keepdims=True) - k
        excess = equal & (equal[:, ::-1].cumsum(1)[:, ::-1] <= num_excess)
        positions = np.flatnonzero(at_least_kth & ~excess)
        if len(positions) != rows * k:
            return None
    starts = np.arange(0, rows * width, width)[:, None]
    return torch.from_numpy(positions.reshape(rows, k) - starts)


def stable_sort_descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each whole row in descending order, and its columns; slow for a large vocabulary."""
    values, columns = torch.sort(x, dim=-1, descending=True, stable=True)
    return values, columns


def _top_k_by_key(x: Tensor, k: int) -> Tensor:
    """Selection by keys that never tie: the value's bits, then the column from the right."""
    if x.dtype != torch.float32:
        return stable_sort_descending(x)[1][:, :k]
    bits = (x + 0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0, its equal
    ordered_bits = (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(torch.int64)
    width = x.shape[1]
    keys = (ordered_bits << 32) | torch.arange(width - 1, -1, -1, device=x.device)
    return width - 1 - (keys.topk(k).values & 0xFFFFFFFF)


@lru_cache(maxsize=16)
def _block_offsets(device: torch.device) -> Tensor:
    return torch.arange(VOCAB_BLOCK, device=device)


STEPS_NEEDING_SORT = frozenset({"top_p", "tfs", "skew"})  # steps that need descending probabilities
CANDIDATE_COUNTS = (64, 512, 4096)  # how many candidates are tried before the whole vocabulary
CPU_CACHE_ELEMENTS = 1 << 19  # numbers that fit a CPU's cache; larger tensors are computed in chunks


class BatchParams:
    """The parameters of some rows as columns (rows, 1), or (1, 1) where the rows agree."""

    def __init__(self, compiled_rows: Sequence[CompiledSettings], device: torch.device) -> None:
        table = torch.tensor([compiled.param_row for compiled in compiled_rows], dtype=torch.float64).to(
            device, non_blocking=True
        )
        self.columns: dict[str, Tensor] = dict(zip(PARAM_NAMES, torch.split(table, 1, 1), strict=True))
        self._temperature = self.columns["temperature"].float()
        self.has_smoothing = any(compiled.params["smoothing_factor"] > 0 for compiled in compiled_rows)

    def unnormalized_probs(self, x: Tensor, top: Tensor) -> Tensor:
        """Unnormalised probabilities of logits, 1 for a logit equal to `top`; in float64."""
        scaled = x.double() - top
        if self.has_smoothing:
            smoothing = self.columns["smoothing_factor"]
            scaled = torch.where(smoothing > 0, -smoothing * scaled * scaled, scaled)
        return scaled.div_(self.columns["temperature"]).exp_()

    def block_prob_sums(self, x: Tensor, top: Tensor) -> Tensor:
        """The sum over every block of unnormalised probabilities (rows, blocks), which are in float32."""
        step = max(1, CPU_CACHE_ELEMENTS // x.shape[1]) if x.is_cpu else len(x)
        one_temperature = len(self._temperature) == 1
        sums = []
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            scaled = x[rows] - top[rows]
            param_rows = slice(None) if one_temperature else rows
            if self.has_smoothing:
                smoothing = self.columns["smoothing_factor"][param_rows].float()
                scaled = torch.where(smoothing > 0, -smoothing * scaled * scaled, scaled)
            sums.append(block_sums(scaled.div_(self._temperature[param_rows]).exp_()))
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def logit_distance(self, log_ratio: Tensor) -> Tensor:
        """How far below the largest logit a weight of exp(log_ratio) lies, with room to spare."""
        distance = (-log_ratio).clamp_min(0.0) * self.columns["temperature"]
        if self.has_smoothing:
            smoothing = self.columns["smoothing_factor"]
            distance = torch.where(smoothing > 0, (distance / smoothing.clamp_min(1e-30)).sqrt(), distance)
        return distance * (1.0 + 1e-5) + 1e-3


def batch_params(compiled_rows: Sequence[CompiledSettings], device: torch.device) -> BatchParams:
    """The parameters of some rows; cached for rows that all have the same settings."""
    if all(compiled is compiled_rows[0] for compiled in compiled_rows):
        return _cached_params(compiled_rows[0], device)
    return BatchParams(compiled_rows, device)


@lru_cache(maxsize=256)
def _cached_params(compiled: CompiledSettings, device: torch.device) -> BatchParams:
    return BatchParams((compiled,), device)


@dataclass
class Candidates:
    """Probabilities `p` (rows, k) and token `ids` (rows, k); ids None if a column is a token.

    A probability of 0 means excluded. With `is_sorted` the columns are in the order that p had when it was
    computed: descending, and among equals by ascending id.
    """

    p: Tensor
    ids: Tensor | None
    is_sorted: bool
    original: tuple[Tensor, Tensor | None] | None = None
    """`p` and `ids` before a step that reshaped the probabilities, if its state depends on them."""

    def sort_descending(self) -> None:
        """Sort by probability, the most probable first, unless it is sorted."""
        if self.is_sorted:
            return
        self.p, columns = stable_sort_descending(self.p)
        self.ids = columns if self.ids is None else self.ids.gather(1, columns)
        self.is_sorted = True

    def original_probs(self, tokens: Tensor) -> Tensor:
        """The probabilities of some tokens (rows, 1) before they were reshaped."""
        p, ids = (self.p, self.ids) if self.original is None else self.original
        return p.gather(1, tokens) if ids is None else torch.where(ids == tokens, p, 0.0).sum(-1, keepdim=True)

    def keep_and_renormalize(self, mask: Tensor, active: Tensor | None) -> None:
        """Drop what is not in the mask and renormalise, in the active rows (None: all)."""
        if active is not None:
            mask = mask | ~active
        kept = torch.where(mask, self.p, 0.0)
        total = kept.sum(-1, keepdim=True)
        self.p = kept / (total if active is None else torch.where(active, total, 1.0))


def top_k_candidates(
    x: Tensor, compiled_rows: Sequence[CompiledSettings], params: BatchParams, maxima: Tensor
) -> Candidates:
    """The top-k of each row, for rows that all have a k, perhaps different ones."""
    count = min(max(compiled.top_k for compiled in compiled_rows), x.shape[1])
    values, ids = stable_top_k(x, count, maxima)
    weights = params.unnormalized_probs(values, values[:, :1])
    if any(compiled.top_k < count for compiled in compiled_rows):
        weights = torch.where(torch.arange(count, device=x.device) < params.columns["top_k"], weights, 0.0)
    return Candidates(weights / weights.sum(-1, keepdim=True), ids, True)


def all_candidates(x: Tensor, compiled_rows: Sequence[CompiledSettings], params: BatchParams) -> Candidates:
    """Every token of the vocabulary."""
    ids, is_sorted = None, any(compiled.probs_steps & STEPS_NEEDING_SORT for compiled in compiled_rows)
    if is_sorted:
        x, ids = stable_sort_descending(x)
    weights = params.unnormalized_probs(x, x.amax(-1, keepdim=True))
    return Candidates(weights / weights.sum(-1, keepdim=True), ids, is_sorted)


def all_candidates_in_chunks(
    x: Tensor, rows: Sequence[int], compiled_rows: Sequence[CompiledSettings]
) -> Iterator[tuple[list[int], Candidates]]:
    """`all_candidates` for some of the rows, on a CPU as many at a time as its cache holds."""
    step = max(1, CPU_CACHE_ELEMENTS // x.shape[1]) if x.is_cpu else len(rows)
    for start in range(0, len(rows), step):
        members = list(rows[start : start + step])
        compiled = [compiled_rows[row] for row in members]
        params = batch_params(compiled, x.device)
        yield members, all_candidates(x if len(members) == len(x) else x[members], compiled, params)


def is_floor_of_total(compiled: CompiledSettings) -> bool:
    """Whether the floor is a fraction of the sum over all tokens; that of min-p is one of the largest probability."""
    earlier = STEPS_BY_STAGE["candidates"][: STEPS_BY_STAGE["candidates"].index("min_p")]
    return "min_p" not in compiled.probs_steps or bool(compiled.probs_steps & {*earlier})


def log_prob_floor(compiled: CompiledSettings, width: int, mu: float | None) -> float:
    """The logarithm of a probability below which every token is excluded; -inf if there is none.

    It is relative to the sum of all tokens if `is_floor_of_total`, else to the most probable token. Dropping
    what lies below must not change what the steps decide about the rest: top-p would exclude it, as its sum is
    less than 1 - p, and no earlier step sums over it. `mu` is mirostat's target.
    """
    if not is_floor_of_total(compiled):
        return math.log(compiled.params["min_p"])
    for step in STEPS_BY_STAGE["candidates"]:
        if step not in compiled.probs_steps:
            continue
        if step == "top_p":
            return math.log((1.0 - compiled.params["top_p"]) / width)
        if step == "tfs":
            return math.log(TFS_MIN_PROB)
        if step == "mirostat" and mu is not None and "top_a" not in compiled.probs_steps:
            return -mu * math.log(2.0)
        if step not in ("top_a", "min_p"):
            return -math.inf
    return -math.inf


def candidates_above_floor(
    x: Tensor, compiled_rows: Sequence[CompiledSettings], params: BatchParams, floors: Sequence[float], maxima: Tensor
) -> Iterator[tuple[list[int], Candidates]]:
    """The tokens of each row above its floor, rows with similarly many together; for the CPU.

    The rows must agree on `is_floor_of_total`.
    """
    top = maxima.amax(-1, keepdim=True)
    total = params.block_prob_sums(x, top).sum(-1, keepdim=True) if is_floor_of_total(compiled_rows[0]) else None
    log_ratios = torch.tensor(floors, dtype=torch.float64).unsqueeze(1)
    min_logit = top - params.logit_distance(log_ratios if total is None else log_ratios + total.log())
    rows, selected = list(range(len(x))), x
    for size in CANDIDATE_COUNTS:
        if size * 4 > x.shape[1]:
            break
        values, ids = stable_top_k(selected, size, maxima)
        weights = torch.where(values >= min_logit, params.unnormalized_probs(values, top), 0.0)
        p = weights / (weights.sum(-1, keepdim=True) if total is None else total)
        no_others_remain = values[:, -1:] < min_logit
        if total is not None:
            no_others_remain |= p.sum(-1, keepdim=True) >= params.columns["top_p"]
        complete = no_others_remain.squeeze(1).tolist()
        if all(complete):
            yield rows, Candidates(p, ids, True)
            return
        if any(complete):
            done = [i for i, is_complete in enumerate(complete) if is_complete]
            left = [i for i, is_complete in enumerate(complete) if not is_complete]
            yield [rows[i] for i in done], Candidates(p[done], ids[done], True)
            rows = [rows[i] for i in left]
            selected, maxima, top, min_logit = selected[left], maxima[left], top[left], min_logit[left]
            total = None if total is None else total[left]
            params = batch_params([compiled_rows[row] for row in rows], x.device)
    yield from all_candidates_in_chunks(x, rows, compiled_rows)


@dataclass
class DrawnTokens:
    """Tokens and their probabilities (rows,); top tokens and their probabilities (rows, num_top), or None."""

    tokens: Tensor
    probs: Tensor
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None


DrawnRows = tuple[list[int], DrawnTokens]
"""Some rows of the batch, by their indices, and their tokens."""


def _inverse_cdf(p: Tensor, uniforms: Tensor) -> Tensor:
    """The first column (rows, 1) at which the sum of p exceeds the number's part of the total."""
    sums = p.cumsum(-1)
    target_mass = uniforms * BELOW_ONE * sums[:, -1:]
    return (sums <= target_mass).sum(-1, keepdim=True).clamp_max_(p.shape[1] - 1)


def draw_from_candidates(
    c: Candidates, uniforms: Tensor, num_top: int, descending: Tensor | bool = False
) -> DrawnTokens:
    """A token of each row for uniform numbers (rows, 1), and `num_top` top tokens.

    The cumulative sum is in the order of ids, because the order in which candidates are found depends on the
    device; or, in all rows or those where `descending` (rows, 1) is true, from the most probable down.
    """
    p, ids = c.p, c.ids
    if ids is not None and descending is not True:
        sort_keys = ids
        if descending is not False:
            sort_keys = torch.where(descending, torch.arange(ids.shape[1], device=ids.device), ids)
        permutation = sort_keys.argsort(-1)
        p, ids = p.gather(1, permutation), ids.gather(1, permutation)
    column = _inverse_cdf(p, uniforms)
    tokens = column if ids is None else ids.gather(1, column)
    output = DrawnTokens(tokens.squeeze(1), p.gather(1, column).squeeze(1))
    if num_top:
        output.top_tokens, output.top_probs = top_tokens_of(p, ids, num_top)
    return output


def top_tokens_of(p: Tensor, ids: Tensor | None, num_top: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens; float32, so that ties do not depend on how candidates were found."""
    top_probs, columns = stable_top_k(p.float(), num_top) if ids is None else stable_sort_descending(p.float())
    top_probs, columns = top_probs[:, :num_top], columns[:, :num_top]
    return pad_top_tokens(columns if ids is None else ids.gather(1, columns), top_probs, num_top)


def draw_from_full_vocab(x: Tensor, top: Tensor, params: BatchParams, uniforms: Tensor, num_top: int) -> DrawnTokens:
    """`draw_from_candidates` for rows that exclude nothing, from logits: draws a block, then a column."""
    cumulative = params.block_prob_sums(x, top).cumsum_(-1)
    target_mass = uniforms * BELOW_ONE * cumulative[:, -1:]
    block = (cumulative <= target_mass).sum(-1, keepdim=True).clamp_max_(cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_min_(0)), 0.0)
    fraction = (target_mass - before) / (cumulative.gather(1, block) - before)
    block_logits, columns = gather_blocks(x, block)
    weights = params.unnormalized_probs(block_logits, top)
    column = _inverse_cdf(weights, fraction.clamp_(0.0, 1.0))
    output = DrawnTokens(
        columns.gather(1, column).squeeze(1), (weights.gather(1, column) / cumulative[:, -1:]).squeeze(1)
    )
    if num_top:
        values, ids = stable_top_k(x, num_top)
        output.top_tokens, output.top_probs = pad_top_tokens(
            ids, params.unnormalized_probs(values, top) / cumulative[:, -1:], num_top
        )
    return output


def draw_greedy(x: Tensor, num_top: int) -> tuple[Tensor, DrawnTokens]:
    """The largest logit of each row (rows,), and its token, the first of equal ones, with probability 1."""
    top, tokens = stable_argmax(x)
    output = DrawnTokens(tokens, x.new_ones(x.shape[0]))
    if num_top:
        output.top_tokens, output.top_probs = pad_top_tokens(tokens.unsqueeze(1), output.probs.unsqueeze(1), num_top)
    return top, output


def pad_top_tokens(ids: Tensor, p: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """`num_top` ids (rows, num_top): those with a probability, then others from 0 on, at 0."""
    missing = num_top - ids.shape[1]
    if missing > 0:
        ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        p = torch.nn.functional.pad(p, (0, missing))
    ids = torch.where(p > 0, ids, -1)
    filler_ids = torch.arange(2 * num_top, device=ids.device).expand(len(ids), -1)
    used = (filler_ids.unsqueeze(-1) == ids.unsqueeze(1)).any(-1)
    unused_ids = torch.sort(used.to(torch.int8), dim=-1, stable=True).indices
    rank = (ids < 0).cumsum(-1) - 1
    return torch.where(ids < 0, unused_ids.gather(1, rank.clamp_min(0)), ids), p
