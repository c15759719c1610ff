"""The draw: from one uniform number to one token, and the most probable tokens for rows that ask for them.

A walk along the candidates until their probabilities add up to the number: the same number always gives the
same token, whatever else is in the batch. Sums are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.sampling_layout import BELOW_ONE
from .candidates import (
    BatchParams,
    Candidates,
    gather_blocks,
    stable_argmax,
    stable_sort_descending,
    stable_top_k,
)


@dataclass
class DrawnTokens:
    """Each row's token and its probability (rows,), and its top tokens and theirs (rows, num_top) or None."""

    tokens: Tensor
    probs: Tensor
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None


def _inverse_cdf(p: Tensor, uniforms: Tensor) -> Tensor:
    """The first column (rows, 1) at which the sum of p exceeds the number's part of the total."""
    sums = p.cumsum(-1)
    target_mass = uniforms * BELOW_ONE * sums[:, -1:]
    return (sums <= target_mass).sum(-1, keepdim=True).clamp_max_(p.shape[1] - 1)


def draw_from_candidates(
    c: Candidates, uniforms: Tensor, num_top: int, descending: Tensor | bool = False
) -> DrawnTokens:
    """A token of each row for uniform numbers (rows, 1), and `num_top` top tokens.

    The walk is in the order of ids, however candidates were found, since that depends on the device; or, in
    all rows or those where `descending` (rows, 1) is true, from the most probable down.
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
    top_probs, columns = (
        stable_top_k(p.float(), num_top) if ids is None else stable_sort_descending(p.float())
    )
    top_probs, columns = top_probs[:, :num_top], columns[:, :num_top]
    return pad_top_tokens(columns if ids is None else ids.gather(1, columns), top_probs, num_top)


def draw_from_full_vocab(
    x: Tensor, top: Tensor, params: BatchParams, uniforms: Tensor, num_top: int
) -> DrawnTokens:
    """The same for rows that exclude nothing, from logits: draws a block of columns, then a column."""
    cumulative = params.block_weight_sums(x, top).cumsum_(-1)
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


def greedy_output(x: Tensor, num_top: int) -> tuple[Tensor, DrawnTokens]:
    """The largest logit of each row (rows,), and its token, the first of equal ones, as a certainty."""
    top, tokens = stable_argmax(x)
    output = DrawnTokens(tokens, torch.ones(len(x), device=x.device))
    if num_top:
        output.top_tokens, output.top_probs = pad_top_tokens(
            tokens.unsqueeze(1), output.probs.unsqueeze(1), num_top
        )
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
