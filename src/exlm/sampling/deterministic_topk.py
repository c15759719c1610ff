"""The largest entries of each row, in one order everywhere: value descending, then column ascending.

Half-precision models tie often, and `torch.topk` and `torch.sort` order ties as they like, differently for
other batch sizes and devices. Here equal values are ordered by column, so a row's result depends on the row
alone. Rows are first reduced to the maxima of short runs of columns, which is many times faster than any
selection; whatever is wanted lies in the runs with the largest maxima.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling_layout import VOCAB_BLOCK

MAX_UNREDUCED_COLUMNS = 16384  # a row up to here is as quickly searched whole
MIN_SPARE_BLOCKS = 32  # runs a row must have beyond twice the wanted ones to be worth reducing


def block_maxima(x: Tensor) -> Tensor:
    """The maximum of every 64 neighbouring columns (rows, runs); the last run may be short."""
    rows, width = x.shape
    num_full_blocks = width // VOCAB_BLOCK
    maxima = torch.empty(rows, 0, dtype=x.dtype, device=x.device)
    if num_full_blocks:
        maxima = x[:, : num_full_blocks * VOCAB_BLOCK].reshape(rows, num_full_blocks, VOCAB_BLOCK).amax(-1)
    if num_full_blocks * VOCAB_BLOCK == width:
        return maxima
    return torch.cat((maxima, x[:, num_full_blocks * VOCAB_BLOCK :].amax(-1, keepdim=True)), 1)


def block_sums(x: Tensor) -> Tensor:
    """The sum of every 64 neighbouring columns (rows, runs), in float64; the last run may be short."""
    rows, width = x.shape
    num_full_blocks = width // VOCAB_BLOCK
    sums = x[:, : num_full_blocks * VOCAB_BLOCK].reshape(rows, num_full_blocks, VOCAB_BLOCK).sum(-1).double()
    if num_full_blocks * VOCAB_BLOCK == width:
        return sums
    return torch.cat((sums, x[:, num_full_blocks * VOCAB_BLOCK :].sum(-1, keepdim=True).double()), 1)


def gather_blocks(x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some runs (rows, k), as (rows, 64 k), and their columns; -inf where a run is short."""
    columns = torch.add(_block_offsets(x.device), blocks.unsqueeze(-1), alpha=VOCAB_BLOCK).flatten(1)
    width = x.shape[1]
    if width % VOCAB_BLOCK == 0:
        return x.gather(1, columns), columns
    in_row = columns < width
    columns = columns.clamp_max(width - 1)
    return x.gather(1, columns).masked_fill_(~in_row, -torch.inf), columns


def stable_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum (rows,) and its column, the first of equal ones; a NaN is larger than any number."""
    if x.device.type == "cpu":
        numbers = x.detach().numpy()  # many times faster at this than torch
        columns_of_max = numbers.argmax(1)
        return torch.from_numpy(numbers[np.arange(len(numbers)), columns_of_max]), torch.from_numpy(
            columns_of_max
        )
    if x.shape[1] <= MAX_UNREDUCED_COLUMNS:
        top, column = x.max(-1)
        return top, column
    top, block = block_maxima(x).max(-1, keepdim=True)
    values, columns = gather_blocks(x, block)
    return top.squeeze(1), columns.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)


def stable_top_k(x: Tensor, k: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of each row in order, and their columns; both (rows, count)."""
    k = min(k, x.shape[1])
    columns = None
    if (k + MIN_SPARE_BLOCKS) * VOCAB_BLOCK * 2 <= x.shape[1]:
        x, columns = gather_blocks(x, _top_k_columns(block_maxima(x) if maxima is None else maxima, k))
    top_columns = _top_k_columns(x, k)
    values, order = stable_sort_descending(x.gather(1, top_columns))
    top_columns = top_columns.gather(1, order)
    return values, top_columns if columns is None else columns.gather(1, top_columns)


def _top_k_columns(x: Tensor, k: int) -> Tensor:
    """The columns of the `count` largest entries (rows, count), ascending; of equal ones the first."""
    if x.device.type == "cpu":
        members = _top_k_by_partition(x.detach().numpy(), k)
        if members is not None:
            return members
    return _top_k_by_key(x, k).sort(-1).values


def _top_k_by_partition(x: np.ndarray[tuple[int, ...], Any], k: int) -> Tensor | None:
    """`_members`, by finding the smallest of them first; None for rows with a NaN."""
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
    """Each row in order, whole; a last resort, as slow as it sounds."""
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
