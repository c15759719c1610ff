"""GPTQ: one width for the whole matrix, a scale and a zero point for each group of rows in each column.

Detects, describes, checks, reads and writes the tensors of one matrix:

    qweight  (inputs * bits / 32, columns) int32   codes, a bit stream down each column
    qzeros   (groups, columns * bits / 32) int32   zero points along each row; the layout `gptq` stores them
                                                   less one, `gptq_v2` as they are
    scales   (groups, columns) float16
    g_idx    (inputs,) int32                       the group of each input; may be absent

With act-order the inputs are sorted by group when a matrix is read; without it codes are taken as they are
stored. `quantization_config` reads the JSON beside the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from .matrix_format import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    MatrixFormat,
    bad_tensor,
    cannot_store,
    check_features,
    check_finite,
    check_range,
    require_tensor,
)
from .packed import WORD_BITS, PackedWeight, PlainScales, Segment, pack, pack_rows, unpack, unpack_rows
from .quantization_config import GPTQ_BITS, QuantizationConfig

TENSORS = ("qweight", "qzeros", "scales", "g_idx")

_MAX_ZERO = 255  # zero points that differ between groups are kept as uint8


def read(
    tensors: Mapping[str, Tensor],
    in_features: int,
    out_features: int,
    where: str,
    config: QuantizationConfig,
) -> PackedWeight:
    """The matrix in qweight, qzeros, scales and perhaps g_idx.

    Without act-order the result may share memory with `tensors`.
    """
    if config.method != "gptq":
        raise CheckpointError(f"{where}: expected a GPTQ layout, found AWQ's {config.checkpoint_format}.")
    check_features(in_features, out_features, where)
    words = require_tensor(tensors, "qweight", where, (torch.int32,), (None, out_features))
    bits = _infer_bits(words.shape[0], in_features, out_features, where, config)
    scales = read_scales(tensors, out_features, where)
    groups = scales.shape[0]
    packed = require_tensor(tensors, "qzeros", where, (torch.int32,), (groups, out_features * bits // WORD_BITS))
    shift = 1 if config.checkpoint_format == "gptq" else 0
    zeros = unpack_rows(packed, bits, out_features)
    if config.zeros_decremented_per_word:
        shift, zeros = 0, _undo_word_decrement(packed, bits, out_features)
    group_of_input = _read_g_idx(tensors, in_features, groups, where)
    perm = None
    if group_of_input is None:
        sizes = sequential_group_sizes(in_features, groups, where, config)
    else:
        counts = torch.bincount(group_of_input, minlength=groups)
        used = counts.nonzero().flatten()  # drop empty groups
        sizes, scales, zeros = tuple(counts[used].tolist()), scales[used], zeros[used]
        if bool((group_of_input.diff() < 0).any()):
            perm = group_of_input.argsort(stable=True)
            words = pack(unpack(words, bits, in_features)[perm], bits)
    zero = collapse_zeros(zeros, shift, where)
    return PackedWeight(
        format_name="gptq",
        in_features=in_features,
        out_features=out_features,
        segments=(Segment(bits, sizes, words.contiguous(), PlainScales(scales), zero),),
        dtype=torch.float16,
        perm=None if perm is None else perm.to(torch.int32),
    )


def write(weight: PackedWeight, *, v2: bool = False) -> dict[str, Tensor]:
    """The tensors of a matrix: exactly those it was read from, if that had a g_idx and float16 scales.

    g_idx is always written; `v2` writes zero points as they are and not less one. `Unsupported` if GPTQ
    cannot represent this matrix.
    """
    segment, scales = _check_writable(weight)
    shape = (len(segment.group_sizes), weight.out_features)
    shift = 0 if v2 else 1
    if isinstance(segment.zero, Tensor):
        zeros = segment.zero.to(torch.int16)
    else:
        zeros = torch.full(shape, segment.zero, dtype=torch.int16, device=segment.codes.device)
    low, high = (int(edge) for edge in zeros.aminmax())
    if low < shift or high - shift >= 1 << segment.bits:
        layout = "gptq_v2" if v2 else "gptq"
        raise cannot_store(weight, "GPTQ", f"zero points from {low} to {high} with {segment.bits} bits as {layout}")
    sizes = torch.tensor(segment.group_sizes, device=segment.codes.device)
    group_of_input = torch.arange(len(sizes), dtype=torch.int32, device=sizes.device).repeat_interleave(sizes)
    words = segment.codes
    if weight.perm is not None:
        perm = weight.perm.to(torch.int64)
        inverse = perm.argsort()
        group_of_input = group_of_input[inverse]
        words = pack(unpack(words, segment.bits, weight.in_features)[inverse], segment.bits)
    tensors = {
        "qweight": words,
        "qzeros": pack_rows(zeros - shift, segment.bits),
        "scales": scales.values,
        "g_idx": group_of_input,
    }
    return tensors if weight.bias is None else {**tensors, "bias": weight.bias}


def describe(
    shapes: Mapping[str, tuple[int, ...]], _read_tensor: Callable[[str], Tensor], config: QuantizationConfig
) -> str:
    """`gptq 4 bit, groups of 128, act-order`, of a GPTQ or AWQ matrix; fewer words for a damaged one."""
    words, scales = shapes.get("qweight", ()), shapes.get("scales", ())
    if not words or not scales:
        return config.method
    zeros = shapes.get("qzeros", ())
    # Where the config says no width, as matrices may differ, one zero point for each scale tells it.
    bits = config.bits or (zeros[-1] * WORD_BITS // max(1, scales[-1]) if zeros else 0) or 4
    inputs = words[0] if config.method == "awq" else words[0] * WORD_BITS // bits
    act_order = ", act-order" if config.desc_act else ""
    return f"{config.method} {bits} bit, groups of {-(-inputs // max(1, scales[0]))}{act_order}"


def read_scales(tensors: Mapping[str, Tensor], out_features: int, where: str) -> Tensor:
    """(groups, columns) float16, at least one group."""
    stored = require_tensor(tensors, "scales", where, FLOAT_DTYPES, (None, out_features))
    if not len(stored):
        raise bad_tensor(where, "scales", "at least one group", "none")
    scales = stored.to(torch.float16)
    check_finite(scales, "scales", where)
    return scales


def sequential_group_sizes(in_features: int, groups: int, where: str, config: QuantizationConfig) -> tuple[int, ...]:
    """The size of each group where neighbouring inputs form the groups; the last may be short."""
    size = config.group_size
    if size == -1:
        size = in_features
    elif size is None:
        size = _infer_group_size(in_features, groups)
    count = -(-in_features // size)
    if count != groups:
        raise bad_tensor(where, "scales", f"{count} groups of {size} for {in_features} inputs", groups)
    return (*[size] * (groups - 1), in_features - size * (groups - 1))


def collapse_zeros(codes: Tensor, shift: int, where: str) -> int | Tensor:
    """Zero points (codes + shift): one number if all are the same, else (groups, columns) uint8."""
    low, high = (int(edge) + shift for edge in codes.aminmax())
    if low == high:
        return low
    if high > _MAX_ZERO:
        raise bad_tensor(where, "qzeros", f"zero points up to {_MAX_ZERO}, or the same everywhere", f"{low} to {high}")
    return codes + shift if shift else codes


def _undo_word_decrement(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Zero points as they were before GPTQModel subtracted 1 from each, with borrows inside a word except at 3 bits."""
    if WORD_BITS % bits:
        return (unpack_rows(packed, bits, columns) + 1) & ((1 << bits) - 1)
    ones = sum(1 << at for at in range(0, WORD_BITS, bits))
    return unpack_rows(packed + ones, bits, columns)


def _infer_bits(rows: int, in_features: int, out_features: int, where: str, config: QuantizationConfig) -> int:
    """Bits of a code, from the config or the shape of qweight, which must agree with it."""
    bits = config.bits if config.bits is not None else rows * WORD_BITS // in_features
    if bits not in GPTQ_BITS or rows * WORD_BITS != in_features * bits:
        wanted = f"{bits} bits" if config.bits is not None else f"{GPTQ_BITS} bits"
        raise bad_tensor(
            where, "qweight", f"rows for {in_features} inputs of {wanted}", f"{rows} rows, {rows * WORD_BITS} bits"
        )
    if out_features * bits % WORD_BITS:
        raise bad_tensor(where, "qzeros", f"{out_features} outputs of {bits} bits to fill words", "a remainder")
    return bits


def _read_g_idx(tensors: Mapping[str, Tensor], in_features: int, groups: int, where: str) -> Tensor | None:
    """The group of each input, or None if neighbouring inputs form the groups."""
    if "g_idx" not in tensors:
        return None
    group_of_input = require_tensor(tensors, "g_idx", where, INDEX_DTYPES, (in_features,)).to(torch.int64)
    check_range(group_of_input, groups, "g_idx", where)
    # Files without act-order may hold a g_idx of zeros; with several groups that cannot be right.
    return None if groups > 1 and not bool(group_of_input.any()) else group_of_input


def _infer_group_size(in_features: int, groups: int) -> int:
    """The group size where no JSON says it: a power of two if one fits, else equal groups."""
    least = -(-in_features // groups)
    power = 1 << (least - 1).bit_length()
    return power if -(-in_features // power) == groups else least


def _check_writable(weight: PackedWeight) -> tuple[Segment, PlainScales]:
    """The only segment and its scales; `Unsupported` with the reason if GPTQ cannot represent them."""
    if weight.dtype is not torch.float16:
        raise cannot_store(weight, "GPTQ", f"numbers rounded to {weight.dtype}")
    if len(weight.segments) != 1:
        raise cannot_store(weight, "GPTQ", f"{len(weight.segments)} runs of rows of different widths")
    segment = weight.segments[0]
    scales = segment.scales
    if segment.bits not in GPTQ_BITS:
        raise cannot_store(weight, "GPTQ", f"{segment.bits}-bit codes; it has {GPTQ_BITS}")
    if not isinstance(scales, PlainScales) or scales.values.dtype is not torch.float16:
        raise cannot_store(weight, "GPTQ", f"{scales.description}; it has plain float16 ones")
    if segment.minimum is not None or segment.codebook is not None:
        raise cannot_store(weight, "GPTQ", "minimums or codebooks")
    for count, what in ((weight.in_features, "inputs"), (weight.out_features, "outputs")):
        if count * segment.bits % WORD_BITS:
            raise cannot_store(weight, "GPTQ", f"{count} {what} of {segment.bits} bits, which do not fill whole words")
    return segment, scales


FORMAT = MatrixFormat("gptq", "qweight", TENSORS, read, describe, quant_method="gptq")
