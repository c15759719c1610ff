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

RUN = 64
SHORT = 16384  # a row up to here is as quickly searched whole
SPARE = 32  # runs a row must have beyond twice the wanted ones to be worth reducing


def run_maxima(x: Tensor) -> Tensor:
    """The maximum of every 64 neighbouring columns (rows, runs); the last run may be short."""
    rows, width = x.shape
    whole = width // RUN
    maxima = torch.empty(rows, 0, dtype=x.dtype, device=x.device)
    if whole:
        maxima = x[:, : whole * RUN].reshape(rows, whole, RUN).amax(-1)
    if whole * RUN == width:
        return maxima
    return torch.cat((maxima, x[:, whole * RUN :].amax(-1, keepdim=True)), 1)


def run_sums(x: Tensor) -> Tensor:
    """The sum of every 64 neighbouring columns (rows, runs), in float64; the last run may be short."""
    rows, width = x.shape
    whole = width // RUN
    sums = x[:, : whole * RUN].reshape(rows, whole, RUN).sum(-1).double()
    if whole * RUN == width:
        return sums
    return torch.cat((sums, x[:, whole * RUN :].sum(-1, keepdim=True).double()), 1)


def take_runs(x: Tensor, runs: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some runs (rows, k), as (rows, 64 k), and their columns; -inf where a run is short."""
    columns = torch.add(_offsets(x.device), runs.unsqueeze(-1), alpha=RUN).flatten(1)
    width = x.shape[1]
    if width % RUN == 0:
        return x.gather(1, columns), columns
    real = columns < width
    columns = columns.clamp_max(width - 1)
    return x.gather(1, columns).masked_fill_(~real, -torch.inf), columns


def first_largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum (rows,) and its column, the first of equal ones; a NaN is larger than any number."""
    if x.device.type == "cpu":
        numbers = x.detach().numpy()  # many times faster at this than torch
        places = numbers.argmax(1)
        return torch.from_numpy(numbers[np.arange(len(numbers)), places]), torch.from_numpy(places)
    if x.shape[1] <= SHORT:
        top, column = x.max(-1)
        return top, column
    top, run = run_maxima(x).max(-1, keepdim=True)
    taken, columns = take_runs(x, run)
    return top.squeeze(1), columns.gather(1, taken.argmax(-1, keepdim=True)).squeeze(1)


def largest(x: Tensor, count: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of each row in order, and their columns; both (rows, count)."""
    count = min(count, x.shape[1])
    columns = None
    if (count + SPARE) * RUN * 2 <= x.shape[1]:
        x, columns = take_runs(x, _members(run_maxima(x) if maxima is None else maxima, count))
    places = _members(x, count)
    values, order = sort_down(x.gather(1, places))
    places = places.gather(1, order)
    return values, places if columns is None else columns.gather(1, places)


def _members(x: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest entries (rows, count), ascending; of equal ones the first."""
    if x.device.type == "cpu":
        members = _above_least(x.detach().numpy(), count)
        if members is not None:
            return members
    return _by_key(x, count).sort(-1).values


def _above_least(x: np.ndarray[tuple[int, ...], Any], count: int) -> Tensor | None:
    """`_members`, by finding the smallest of them first; None for rows with a NaN."""
    rows, width = x.shape
    least = np.partition(x, width - count, axis=1)[:, width - count, None]
    above = x >= least
    places = np.flatnonzero(above)
    if len(places) != rows * count:
        equal = x == least
        spare = above.sum(1, keepdims=True) - count
        excess = equal & (equal[:, ::-1].cumsum(1)[:, ::-1] <= spare)
        places = np.flatnonzero(above & ~excess)
        if len(places) != rows * count:
            return None
    starts = np.arange(0, rows * width, width)[:, None]
    return torch.from_numpy(places.reshape(rows, count) - starts)


def sort_down(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in order, whole; a last resort, as slow as it sounds."""
    values, columns = torch.sort(x, dim=-1, descending=True, stable=True)
    return values, columns


def _by_key(x: Tensor, count: int) -> Tensor:
    """Selection by keys that never tie: the value's bits, then the column from the right."""
    if x.dtype != torch.float32:
        return sort_down(x)[1][:, :count]
    bits = (x + 0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0, its equal
    rising = (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(torch.int64)
    width = x.shape[1]
    keys = (rising << 32) | torch.arange(width - 1, -1, -1, device=x.device)
    return width - 1 - (keys.topk(count).values & 0xFFFFFFFF)


@lru_cache(maxsize=16)
def _offsets(device: torch.device) -> Tensor:
    return torch.arange(RUN, device=device)
