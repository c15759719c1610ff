"""Copies rows of stored floats into a tensor: cast to its type, on its device, a few megabytes at a time.

The copy shares no memory with the file, and the file's pages are released as they are used. Values that the
type cannot hold are counted in a `CastErrors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..spec.tensor_names import RowRange
from .safetensors_folder import SafetensorsFolder, TensorInfo

COPY_CHUNK = 8 * 2**20


@dataclass
class CastErrors:
    """Counts of values that a copy could not represent."""

    overflowed: int = 0  # finite as stored, infinite in the target's type
    non_finite: int = 0  # NaN or infinite as stored


def copy_rows(
    files: SafetensorsFolder,
    info: TensorInfo,
    spans: Sequence[RowRange],
    target: torch.Tensor,
    *,
    check: bool = False,
) -> CastErrors:
    """Fill `target` with these rows of a tensor, one span after the other.

    Errors are counted where the target's type is narrower than the stored one, and elsewhere with `check`.
    """
    errors = CastErrors()
    if not info.shape:
        _cast_into(files.read(info.name), target, errors, check)
        return errors
    as_stored = target.device.type == "cpu" and target.dtype is files.dtype(info.name)
    at = 0
    for first, last in spans:
        part = target[at : at + last - first]
        if as_stored:
            files.load_rows(info, first, part)
            _count_errors(part, part, errors, check)
        else:
            _cast_rows(files, info, (first, last), part, errors, check)
        at += last - first
    return errors


def copy_transposed(
    files: SafetensorsFolder,
    info: TensorInfo,
    rows: RowRange,
    spans: Sequence[RowRange],
    target: torch.Tensor,
) -> CastErrors:
    """Fill `target` with the transpose of these columns of some rows, one span after the other."""
    errors = CastErrors()
    for start, stop in _chunks(info, *rows):
        source = files.read_rows(info, start, stop).to(target.device)
        at = 0
        for first, last in spans:
            part = target[at : at + last - first, start - rows[0] : stop - rows[0]]
            _cast_into(source[:, first:last].T, part, errors, check=False)
            at += last - first
        files.release(info, start, stop)
    files.release(info)
    return errors


def _cast_rows(
    files: SafetensorsFolder,
    info: TensorInfo,
    rows: RowRange,
    target: torch.Tensor,
    errors: CastErrors,
    check: bool,
) -> None:
    for start, stop in _chunks(info, *rows):
        part = target[start - rows[0] : stop - rows[0]]
        _cast_into(files.read_rows(info, start, stop), part, errors, check)
        files.release(info, start, stop)
    files.release(info)


def _chunks(info: TensorInfo, first: int, last: int) -> Iterator[RowRange]:
    rows = info.shape[0]
    step = max(1, COPY_CHUNK * rows // max(1, info.nbytes))
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _cast_into(source: torch.Tensor, target: torch.Tensor, errors: CastErrors, check: bool) -> None:
    # Cast on the target's device and into the target: temporary blocks of this size would fragment the CPU's
    # heap, and the process would grow by as much with each tensor.
    source = source.to(target.device)
    target.copy_(source)
    narrows = torch.finfo(target.dtype).max < torch.finfo(source.dtype).max
    _count_errors(source, target, errors, check or narrows)


def _count_errors(source: torch.Tensor, target: torch.Tensor, errors: CastErrors, check: bool) -> None:
    if not check or not target.numel():
        return
    # One pass finds whether anything is not finite: aminmax propagates NaN.
    low, high = torch.aminmax(target)
    if not (low.isfinite() and high.isfinite()):
        unbounded = source.numel() - int(source.isfinite().sum())
        errors.non_finite += unbounded
        errors.overflowed += target.numel() - int(target.isfinite().sum()) - unbounded
