"""Stored rows to a tensor of our own: a few megabytes at a time, in the wanted type, on the wanted device.

The copy never shares memory with the file, and the file's pages are given back as they are used. Which rows
and why is the reader's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..spec.tensor_names import RowRange
from .files import TensorFiles
from .folder import TensorInfo

CHUNK = 8 * 2**20


@dataclass
class Misfits:
    """Values that a copy could not carry over as they should be."""

    overflowed: int = 0  # finite as stored, infinite in the wanted type
    unbounded: int = 0  # NaN or infinite as stored


def copy_rows(
    files: TensorFiles,
    info: TensorInfo,
    spans: Sequence[RowRange],
    target: torch.Tensor,
    *,
    check: bool = False,
) -> Misfits:
    """Fill `target` with these rows of a tensor, one span after the other.

    Misfits are counted where the wanted type is narrower than the stored one, and elsewhere if asked to
    `check`.
    """
    misfits = Misfits()
    if not info.shape:
        _put(files.read(info.name), target, misfits, check)
        return misfits
    as_stored = target.device.type == "cpu" and target.dtype is files.dtype(info.name)
    at = 0
    for first, last in spans:
        part = target[at : at + last - first]
        if as_stored:
            files.load_rows(info, first, part)
            _inspect(part, part, misfits, check)
        else:
            _convert_rows(files, info, (first, last), part, misfits, check)
        at += last - first
    return misfits


def copy_columns(
    files: TensorFiles, info: TensorInfo, rows: RowRange, spans: Sequence[RowRange], target: torch.Tensor
) -> Misfits:
    """Fill `target` with the transpose of these columns of some rows, one span after the other."""
    misfits = Misfits()
    for start, stop in _chunks(info, *rows):
        source = files.read_rows(info, start, stop).to(target.device)
        at = 0
        for first, last in spans:
            part = target[at : at + last - first, start - rows[0] : stop - rows[0]]
            _put(source[:, first:last].T, part, misfits, check=False)
            at += last - first
        files.release(info, start, stop)
    files.release(info)
    return misfits


def _convert_rows(
    files: TensorFiles, info: TensorInfo, rows: RowRange, target: torch.Tensor, misfits: Misfits, check: bool
) -> None:
    for start, stop in _chunks(info, *rows):
        part = target[start - rows[0] : stop - rows[0]]
        _put(files.read_rows(info, start, stop), part, misfits, check)
        files.release(info, start, stop)
    files.release(info)


def _chunks(info: TensorInfo, first: int, last: int) -> Iterator[RowRange]:
    rows = info.shape[0]
    step = max(1, CHUNK * rows // max(1, info.nbytes))
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _put(source: torch.Tensor, target: torch.Tensor, misfits: Misfits, check: bool) -> None:
    # Converted where it goes: blocks of this size that come and go on the CPU's heap between others leave
    # holes that are never filled, and the process grows by as much with each tensor.
    source = source.to(target.device)
    target.copy_(source)
    narrows = torch.finfo(target.dtype).max < torch.finfo(source.dtype).max
    _inspect(source, target, misfits, check or narrows)


def _inspect(source: torch.Tensor, target: torch.Tensor, misfits: Misfits, check: bool) -> None:
    if not check or not target.numel():
        return
    # Both ends tell in one pass whether anything is amiss; NaN comes through as NaN.
    low, high = torch.aminmax(target)
    if not (low.isfinite() and high.isfinite()):
        unbounded = source.numel() - int(source.isfinite().sum())
        misfits.unbounded += unbounded
        misfits.overflowed += target.numel() - int(target.isfinite().sum()) - unbounded
