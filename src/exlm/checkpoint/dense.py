"""Plain floats from a checkpoint: a tensor, a matrix, a bias; checked, cut, turned round and converted.

Nothing here knows where a role is stored (`lookup`) or how bytes are copied (`convert`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import BadTensor
from ..formats import DenseWeight
from ..spec.tensor_names import RowRange
from .cast_copy import CastErrors, copy_rows, copy_transposed
from .safetensors_header import DTYPES
from .safetensors_index import TensorInfo, flatten_experts
from .tensor_index import TensorIndex, WeightRequest, key_at, num_rows


def read_dense(lookup: TensorIndex, wanted: WeightRequest) -> DenseWeight:
    """A matrix of plain floats: a whole tensor or some of its rows, turned round if stored the other way."""
    place, n, k = wanted.location, wanted.out_features, wanted.in_features
    info = lookup.use_floats(key_at(place, "weight"))
    info = flatten_experts(info) if place.expert_rows else info
    outputs = lookup.stored_outputs(wanted.role, place, n)
    rows, columns = (k, outputs) if place.transposed else (outputs, k)
    spans = place.rows or ((0, n),)
    slab = place.expert_rows or (0, rows)
    # How many experts are stacked is not for one of them to know, only that it is among them.
    stored = max((slab[1], *info.shape[:1])) if place.expert_rows else rows
    if info.shape != (stored, columns) or num_rows(spans) != n or num_rows([slab]) != rows:
        cut = f" ({num_rows(spans)} of {outputs} outputs)" if place.rows else ""
        raise lookup.wrong_shape(info, wanted.role, f"{[stored, columns]}{cut}")
    dtype = wanted.dtype or DTYPES[info.dtype]
    if place.transposed:
        data = torch.empty((n, k), dtype=dtype, device=wanted.device)
        _report(info, data, copy_transposed(lookup.files, info, slab, spans, data))
    else:
        spans = tuple((slab[0] + start, slab[0] + stop) for start, stop in spans)
        data = copy(lookup, info, spans, (n, k), dtype, wanted.device)
    return DenseWeight(data, read_bias(lookup, wanted))


def read_bias(lookup: TensorIndex, wanted: WeightRequest) -> torch.Tensor | None:
    """The bias of a matrix, there if the architecture has one; one of zeros may be there in any case."""
    place, n = wanted.location, wanted.out_features
    beside = f"{place.key}.bias"
    key = next((one for one in (beside, *wanted.own_bias) if one in lookup), None)
    if key is None:
        if wanted.bias:
            raise lookup.missing(f"the bias of {wanted.role}", (beside, *wanted.own_bias))
        return None
    info = lookup.use_floats(key)
    spans: tuple[RowRange, ...] = ((0, n),)
    length = n
    if place.rows and key == beside:
        spans, length = place.rows, lookup.stored_outputs(wanted.role, place, n)
    if info.shape != (length,) or num_rows(spans) != n:
        raise lookup.wrong_shape(info, f"the bias of {wanted.role}", str([length]))
    if wanted.bias:
        return copy(lookup, info, spans, (n,), wanted.dtype or DTYPES[info.dtype], wanted.device)
    stored = copy(lookup, info, spans, (n,), DTYPES[info.dtype], torch.device("cpu"))
    if odd := int(torch.count_nonzero(stored)):
        raise BadTensor(
            f"{info}: expected no bias for {wanted.role}, or one of zeros; found {odd} of {n} not zero. "
            "config.json describes another architecture than these weights have."
        )
    return None


def copy(
    lookup: TensorIndex,
    info: TensorInfo,
    spans: Sequence[RowRange],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    finite: bool = False,
) -> torch.Tensor:
    """These rows of a tensor in memory of their own; BadTensor if values overflow, or are not `finite`."""
    target = torch.empty(shape, dtype=dtype, device=device)
    misfits = copy_rows(lookup.files, info, spans, target, check=finite)
    _report(info, target, misfits)
    if finite and misfits.non_finite:
        raise BadTensor(
            f"{info}: expected finite values, found {misfits.non_finite} of {target.numel()} NaN or "
            "infinite. Download or convert the file again."
        )
    return target


def _report(info: TensorInfo, copied: torch.Tensor, misfits: CastErrors) -> None:
    if misfits.overflowed:
        dtype = str(copied.dtype).removeprefix("torch.")
        raise BadTensor(
            f"{info}: {misfits.overflowed} of {copied.numel()} values are too large for {dtype} (stored as "
            f"{info.dtype}). Compute in bfloat16 or float32 instead."
        )
