"""GPTQ: one width for the whole matrix, a scale and a zero point for each group of rows in each column.

Reads and writes the tensors of one matrix in the layouts `gptq` (zero points stored less one) and `gptq_v2`.
Rows in act-order are sorted by group here, once; without it codes are taken as they lie. What the JSON beside
the tensors means is said in `gptq_config`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError, Unsupported
from .bits import WORD, pack, pack_across, unpack, unpack_across
from .gptq_config import GPTQ_BITS, GptqConfig
from .packed import PackedWeight, Segment
from .scales import Direct
from .verify import FLOATS, INDICES, bad, check_bias, check_features, check_finite, check_range, fetch

__all__ = ["GptqConfig", "read", "read_scales", "sequential", "shared_zero", "write"]

_MAX_ZERO = 255  # what a zero point that differs between groups is kept in


def read(
    tensors: Mapping[str, Tensor],
    in_features: int,
    out_features: int,
    bias: Tensor | None,
    where: str,
    config: GptqConfig,
) -> PackedWeight:
    """The matrix in qweight, qzeros, scales and perhaps g_idx; a bias of zeros is dropped.

    Without act-order the result may share memory with `tensors`.
    """
    if config.method != "gptq":
        raise CheckpointError(f"{where}: expected a GPTQ layout, found AWQ's {config.checkpoint_format}.")
    check_features(in_features, out_features, where)
    check_bias(bias, out_features, where)
    words = fetch(tensors, "qweight", where, (torch.int32,), (None, out_features))
    bits = _width(words.shape[0], in_features, out_features, where, config)
    scales = read_scales(tensors, out_features, where)
    groups = scales.shape[0]
    packed = fetch(tensors, "qzeros", where, (torch.int32,), (groups, out_features * bits // WORD))
    shift = 1 if config.checkpoint_format == "gptq" else 0
    zeros = unpack_across(packed, bits, out_features)
    if config.borrows:
        shift, zeros = 0, _given_back(packed, bits, out_features)
    owner = _owner(tensors, in_features, groups, where)
    order = None
    if owner is None:
        sizes = sequential(in_features, groups, where, config)
    else:
        counts = torch.bincount(owner, minlength=groups)
        used = counts.nonzero().flatten()  # a group nobody is in has nothing to say
        sizes, scales, zeros = tuple(counts[used].tolist()), scales[used], zeros[used]
        if bool((owner.diff() < 0).any()):
            order = owner.argsort(stable=True)
            words = pack(unpack(words, bits, in_features)[order], bits)
    zero = shared_zero(zeros, shift, where)
    return PackedWeight(
        form="gptq",
        in_features=in_features,
        out_features=out_features,
        segments=(Segment(bits, sizes, words.contiguous(), Direct(scales), zero),),
        dtype=torch.float16,
        order=None if order is None else order.to(torch.int32),
        bias=bias if bias is not None and bool(bias.any()) else None,
    )


def write(weight: PackedWeight, *, v2: bool = False) -> dict[str, Tensor]:
    """The tensors of a matrix: exactly those it was read from, if that had a g_idx and float16 scales.

    g_idx is always written; `v2` writes zero points as they are and not less one. `Unsupported` if GPTQ
    cannot say this matrix.
    """
    segment, scales = _writable(weight)
    shape = (len(segment.sizes), weight.out_features)
    shift = 0 if v2 else 1
    if isinstance(segment.zero, Tensor):
        zeros = segment.zero.to(torch.int16)
    else:
        zeros = torch.full(shape, segment.zero, dtype=torch.int16, device=segment.codes.device)
    low, high = (int(edge) for edge in zeros.aminmax())
    if low < shift or high - shift >= 1 << segment.bits:
        layout = "gptq_v2" if v2 else "gptq"
        raise _cannot(weight, f"zero points from {low} to {high} with {segment.bits} bits as {layout}")
    sizes = torch.tensor(segment.sizes, device=segment.codes.device)
    owner = torch.arange(len(sizes), dtype=torch.int32, device=sizes.device).repeat_interleave(sizes)
    words = segment.codes
    if weight.order is not None:
        order = weight.order.to(torch.int64)
        inverse = order.argsort()
        owner = owner[inverse]
        words = pack(unpack(words, segment.bits, weight.in_features)[inverse], segment.bits)
    tensors = {
        "qweight": words,
        "qzeros": pack_across(zeros - shift, segment.bits),
        "scales": scales.values,
        "g_idx": owner,
    }
    return tensors if weight.bias is None else {**tensors, "bias": weight.bias}


def read_scales(tensors: Mapping[str, Tensor], out_features: int, where: str) -> Tensor:
    """(groups, columns) float16, at least one group."""
    stored = fetch(tensors, "scales", where, FLOATS, (None, out_features))
    if not len(stored):
        raise bad(where, "scales", "at least one group", "none")
    scales = stored.to(torch.float16)
    check_finite(scales, "scales", where)
    return scales


def sequential(in_features: int, groups: int, where: str, config: GptqConfig) -> tuple[int, ...]:
    """The rows of each group where neighbours share one; the last may be short."""
    size = config.group_size
    if size == -1:
        size = in_features
    elif size is None:
        size = _guess(in_features, groups)
    count = -(-in_features // size)
    if count != groups:
        raise bad(where, "scales", f"{count} groups of {size} for {in_features} inputs", groups)
    return (*[size] * (groups - 1), in_features - size * (groups - 1))


def shared_zero(codes: Tensor, shift: int, where: str) -> int | Tensor:
    """Zero points from their codes: one number if all are the same, else (groups, columns) uint8."""
    low, high = (int(edge) + shift for edge in codes.aminmax())
    if low == high:
        return low
    if high > _MAX_ZERO:
        raise bad(
            where, "qzeros", f"zero points up to {_MAX_ZERO}, or the same everywhere", f"{low} to {high}"
        )
    return codes + shift if shift else codes


def _given_back(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Zero points that GPTQModel took less one: a word at a time, and those of 3 bits each for itself."""
    if WORD % bits:
        return (unpack_across(packed, bits, columns) + 1) & ((1 << bits) - 1)
    ones = sum(1 << at for at in range(0, WORD, bits))
    return unpack_across(packed + ones, bits, columns)


def _width(rows: int, in_features: int, out_features: int, where: str, config: GptqConfig) -> int:
    """The bits of a code, which the shape must confirm."""
    bits = config.bits if config.bits is not None else rows * WORD // in_features
    if bits not in GPTQ_BITS or rows * WORD != in_features * bits:
        wanted = f"{bits} bits" if config.bits is not None else f"{GPTQ_BITS} bits"
        raise bad(
            where, "qweight", f"rows for {in_features} inputs of {wanted}", f"{rows} rows, {rows * WORD} bits"
        )
    if out_features * bits % WORD:
        raise bad(where, "qzeros", f"{out_features} outputs of {bits} bits to fill words", "a remainder")
    return bits


def _owner(tensors: Mapping[str, Tensor], in_features: int, groups: int, where: str) -> Tensor | None:
    """The group of each input, or None for groups of neighbours."""
    if "g_idx" not in tensors:
        return None
    owner = fetch(tensors, "g_idx", where, INDICES, (in_features,)).to(torch.int64)
    check_range(owner, groups, "g_idx", where)
    # Files without act-order may ship zeros; with several groups they cannot be meant.
    return None if groups > 1 and not bool(owner.any()) else owner


def _guess(in_features: int, groups: int) -> int:
    """The group size where no JSON tells: a power of two if one fits, else equal groups."""
    least = -(-in_features // groups)
    power = 1 << (least - 1).bit_length()
    return power if -(-in_features // power) == groups else least


def _writable(weight: PackedWeight) -> tuple[Segment, Direct]:
    """The only segment, or why GPTQ has no way to write it."""
    if weight.dtype is not torch.float16:
        raise _cannot(weight, f"numbers rounded to {weight.dtype}")
    if len(weight.segments) != 1:
        raise _cannot(weight, f"{len(weight.segments)} runs of rows of different widths")
    segment = weight.segments[0]
    scales = segment.scales
    if segment.bits not in GPTQ_BITS:
        raise _cannot(weight, f"{segment.bits}-bit codes; it has {GPTQ_BITS}")
    if not isinstance(scales, Direct) or scales.values.dtype is not torch.float16:
        raise _cannot(weight, f"{type(scales).__name__} scales; it has plain float16 ones")
    if segment.minimum is not None or segment.codebook is not None:
        raise _cannot(weight, "minimums or codebooks")
    for count, what in ((weight.in_features, "inputs"), (weight.out_features, "outputs")):
        if count * segment.bits % WORD:
            raise _cannot(weight, f"{count} {what} of {segment.bits} bits, which do not fill whole words")
    return segment, scales


def _cannot(weight: PackedWeight, what: str) -> Unsupported:
    shape = f"{weight.in_features} by {weight.out_features}"
    return Unsupported(f"This {weight.form} matrix ({shape}) cannot be GPTQ, which has no way to say {what}.")
