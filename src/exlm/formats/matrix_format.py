"""`MatrixFormat`: one way to store a matrix in safetensors files, and the checks that the formats' readers share.

A new format is one module, with `FORMAT` at its end: the tensor by which it is detected, and functions that read
and describe a matrix, and perhaps write one. `formats.FORMATS` lists them in the order in which they are looked for.
Every error names the matrix, the tensor, what was expected and what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import BadTensor, MissingTensor, Unsupported
from .packed import PackedWeight
from .quantization_config import QuantizationConfig, QuantMethod

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int16, torch.int32, torch.int64)

_REMEDY = "The file is damaged or belongs to another config.json: download or convert it again."


class ReadMatrix(Protocol):
    """Checks the tensors of one matrix, named by their suffixes, and makes a weight of them, without a bias."""

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        in_features: int,
        out_features: int,
        where: str,
        config: QuantizationConfig,
        /,
    ) -> PackedWeight:
        """`where` names file and matrix in errors; `config` is what the JSON beside the weights says."""
        ...


DescribeMatrix = Callable[[Mapping[str, tuple[int, ...]], Callable[[str], Tensor], QuantizationConfig], str]
"""(shapes by suffix, how to read a tensor by its suffix, config) → widths and group sizes in a few words."""


@dataclass(frozen=True)
class MatrixFormat:
    """One way to store a matrix in named tensors of safetensors files.

    A matrix `key` has the tensors `key.suffix`. The one called `marker` tells the format; where two formats
    share it, the `quant_method` in the JSON beside the weights decides.
    """

    name: str  # in `exlm info` and in errors
    marker: str
    tensors: tuple[str, ...] = ()  # suffixes of all its tensors but the bias
    read: ReadMatrix | None = None  # None: exlm cannot read it, and errors name it
    describe: DescribeMatrix | None = None
    quant_method: QuantMethod | None = None  # None: the marker is enough


DENSE = MatrixFormat("dense", "weight", ("weight",))
"""Plain floats. `checkpoint` reads them itself: there is nothing to decode, and they are cast as they are
copied."""


# -- checks ----------------------------------------------------------------------------------------


def bad_tensor(where: str, name: str, expected: object, found: object) -> BadTensor:
    """The error for one tensor of the matrix `where`."""
    return BadTensor(f"{where}: {name}: expected {expected}, found {found}. {_REMEDY}")


def cannot_store(weight: PackedWeight, format_name: str, what: str) -> Unsupported:
    """The error for a matrix that this format cannot represent."""
    shape = f"{weight.in_features} by {weight.out_features}"
    return Unsupported(
        f"This {weight.format_name} matrix ({shape}) cannot be {format_name}, which does not support {what}."
    )


def require_tensor(
    tensors: Mapping[str, Tensor], name: str, where: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
) -> Tensor:
    """The tensor called `name`, of one of these types and this shape (None: any length)."""
    if name not in tensors:
        raise MissingTensor(f"{where}: expected a tensor {name}, found only {', '.join(sorted(tensors))}.")
    tensor = tensors[name]
    found = list(tensor.shape)
    fits = len(found) == len(shape) and all(want in (None, have) for want, have in zip(shape, found, strict=True))
    if tensor.dtype not in dtypes or not fits:
        types = " or ".join(map(_dtype_name, dtypes))
        sizes = ", ".join("any" if want is None else str(want) for want in shape)
        raise bad_tensor(where, name, f"{types} of shape [{sizes}]", f"{_dtype_name(tensor.dtype)} of shape {found}")
    return tensor


def check_features(in_features: int, out_features: int, where: str) -> None:
    """At least one input and one output."""
    if in_features < 1 or out_features < 1:
        raise bad_tensor(where, "matrix", "at least one input and one output", f"{in_features} by {out_features}")


def check_finite(tensor: Tensor, name: str, where: str) -> None:
    """No NaN, no infinity."""
    if odd := int((~torch.isfinite(tensor)).sum()):
        raise bad_tensor(where, name, "finite float16 values", f"{odd} of {tensor.numel()} NaN, infinite or too large")


def check_range(tensor: Tensor, bound: int, name: str, where: str) -> None:
    """Only numbers from 0 to below `bound`."""
    if not tensor.numel():
        return
    low, high = (int(edge) for edge in tensor.aminmax())
    if low < 0 or high >= bound:
        raise bad_tensor(where, name, f"values from 0 to {bound - 1}", low if low < 0 else high)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
