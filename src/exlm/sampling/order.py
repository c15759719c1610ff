"""The largest entries of each row, in one order everywhere: value descending, then column ascending.

Half-precision models tie often, and `torch.topk` and `torch.sort` order ties as they like, differently for
other batch sizes and devices. Here equal values are ordered by column, so a row's result depends on the row
alone. Rows are first reduced to the maxima of short runs of columns, which is many times faster than any
selection; whatever is wanted lies in the runs with the largest maxima.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

RUN = 64
SHORT = 16384  # a row up to here is as quickly searched whole
SPARE = 32  # entries looked at beyond the wanted ones when values tie


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
    """Each row's maximum (rows,) and its column, the first of equal ones."""
    if x.shape[1] <= SHORT:
        top, column = x.max(-1)
        return top, column
    top, run = run_maxima(x).max(-1, keepdim=True)
    taken, columns = take_runs(x, run)
    return top.squeeze(1), columns.gather(1, taken.argmax(-1, keepdim=True)).squeeze(1)


def largest(x: Tensor, count: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of each row in order, and their columns; both (rows, count).

    On a CPU it costs little to look whether values tie; only if they do is a slower way taken.
    """
    count = min(count, x.shape[1])
    if (count + SPARE) * RUN * 2 > x.shape[1]:
        maxima = None
    elif maxima is None:
        maxima = run_maxima(x)
    found = _if_apart(x, count, maxima) if x.device.type == "cpu" else None
    if found is not None:
        return found
    if maxima is None:
        places = _by_key(x, count)
        return x.gather(1, places), places
    # Runs in ascending order, so that what is taken from them is in the order of its columns.
    taken, columns = take_runs(x, _by_key(maxima, count).sort(-1).values)
    places = _by_key(taken, count)
    return taken.gather(1, places), columns.gather(1, places)


def _if_apart(x: Tensor, count: int, maxima: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """`largest`, if it is clear which entries those are: none outside equals the smallest of them."""
    values, columns = _some_largest(x, count + 1, maxima)
    if bool((values[:, 1:] < values[:, :-1]).all()):
        return values[:, :count], columns[:, :count]
    values, columns = _some_largest(x, count + SPARE, maxima)
    least = values[:, count - 1]
    if values.shape[1] < x.shape[1] and not bool(((least > values[:, -1]) | (least == -torch.inf)).all()):
        return None
    columns, places = columns.sort(-1)
    values, places = sort_down(values.gather(1, places))
    return values[:, :count], columns.gather(1, places[:, :count])


def sort_down(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in order, whole; a last resort, as slow as it sounds."""
    values, columns = torch.sort(x, dim=-1, descending=True, stable=True)
    return values, columns


def _some_largest(x: Tensor, count: int, maxima: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest entries, descending; which of equal ones, and in which order, is left open."""
    if maxima is None:
        values, columns = x.topk(min(count, x.shape[1]))
        return values, columns
    taken, columns = take_runs(x, maxima.topk(count, sorted=False).indices)
    values, places = taken.topk(count)
    return values, columns.gather(1, places)


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
