"""EXL2: inputs sorted by importance, groups of 2 to 8 bits, squared 4-bit scales.

Detects, describes, checks, reads and writes the tensors of one matrix, whose codes are taken as they are
stored and never unpacked:

    q_weight     (words, columns) int32        codes, a bit stream down each column, group after group
    q_scale      (groups, columns / 8) int32   4-bit scale codes along each row (`Exl2Scales`)
    q_scale_max  (groups,) float16             the scale of the largest code
    q_groups     (2 * groups,) int16           bits and first row of q_weight of each group, unsigned
    q_invperm    (inputs,) int16 to int64      the stored row of each input

Columns are padded to a multiple of 32. `checkpoint` finds the tensors; `quantize` chooses widths and codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from .matrix_format import (
    INDEX_DTYPES,
    MatrixFormat,
    bad_tensor,
    cannot_store,
    check_features,
    check_finite,
    check_range,
    require_tensor,
)
from .packed import WORD_BITS, Exl2Scales, PackedWeight, Segment, pack, pack_rows, unpack_rows
from .quantization_config import QuantizationConfig

TENSORS = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
BIT_WIDTHS = (2, 3, 4, 5, 6, 8)
ALIGNMENT = 32  # stored columns come in multiples of this, and so do the rows of one width in what we write

_SCALE_BITS = 4
_PADDING_SCALE = 15  # any scale would do: the codes of padded columns are the zero point
_MAX_OFFSET = 0xFFFF


@dataclass(frozen=True)
class _GroupSpan:
    bits: int
    start: int  # first row of q_weight
    stop: int

    @property
    def in_features(self) -> int:
        return (self.stop - self.start) * WORD_BITS // self.bits


def read(
    tensors: Mapping[str, Tensor],
    in_features: int,
    out_features: int,
    where: str,
    _config: QuantizationConfig | None = None,
) -> PackedWeight:
    """The matrix in the five `TENSORS`; padded columns are dropped.

    Codes are not copied unless columns are dropped: the result may share memory with `tensors`.
    """
    check_features(in_features, out_features, where)
    width = -(-out_features // ALIGNMENT) * ALIGNMENT
    words = require_tensor(tensors, "q_weight", where, (torch.int32,), (None, width)).contiguous()
    groups = _read_groups(tensors, words.shape[0], in_features, where)
    packed = require_tensor(tensors, "q_scale", where, (torch.int32,), (len(groups), width * _SCALE_BITS // WORD_BITS))
    maxima = require_tensor(tensors, "q_scale_max", where, (torch.float16,), (len(groups),))
    check_finite(maxima, "q_scale_max", where)
    perm = _read_perm(tensors, in_features, where)
    scales = Exl2Scales(unpack_rows(packed, _SCALE_BITS, width)[:, :out_features].contiguous(), maxima)
    if width != out_features:
        words = words[:, :out_features].contiguous()
    return PackedWeight(
        format_name="exl2",
        in_features=in_features,
        out_features=out_features,
        segments=_segments(groups, words, scales),
        dtype=torch.float16,
        perm=perm,
    )


def write(weight: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a matrix: exactly those it was read from, if that had no padding and descending widths.

    Padded columns hold zeros. `Unsupported` if EXL2 cannot represent this matrix.
    """
    _check_writable(weight)
    segments, perm = _sort_by_bits(weight)
    padding = -weight.out_features % ALIGNMENT
    scales = [_exl2_scales(weight, segment) for segment in segments]
    codes = torch.cat([scale.codes for scale in scales])
    entries, start = [], 0
    for segment in segments:
        for size in segment.group_sizes:
            entries += [segment.bits, start]
            start += size * segment.bits // WORD_BITS
    if entries[-1] > _MAX_OFFSET:
        raise cannot_store(weight, "EXL2", f"a group that starts at word {entries[-1]}, past {_MAX_OFFSET}")
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(len(perm), device=perm.device)
    tensors = {
        "q_weight": torch.cat([_codes_with_padding(segment, padding) for segment in segments]),
        "q_scale": pack_rows(F.pad(codes, (0, padding), value=_PADDING_SCALE), _SCALE_BITS),
        "q_scale_max": torch.cat([scale.group_max for scale in scales]),
        "q_groups": torch.tensor(entries, dtype=torch.int64, device=perm.device).to(torch.int16),
        "q_invperm": inverse.to(torch.int32),
    }
    return tensors if weight.bias is None else {**tensors, "bias": weight.bias}


def describe(
    shapes: Mapping[str, tuple[int, ...]], read_tensor: Callable[[str], Tensor], _config: QuantizationConfig
) -> str:
    """`exl2 5/4 bit, groups of 128`, from q_groups; damaged tensors are described in fewer words."""
    table, words = shapes.get("q_groups", ()), shapes.get("q_weight", ())
    if len(table) != 1 or not words:
        return "exl2"
    pairs = read_tensor("q_groups").long() & 0xFFFF
    widths, starts = pairs[0::2].tolist(), pairs[1::2].tolist()
    sizes = [
        (stop - start) * WORD_BITS // bits
        for bits, start, stop in zip(widths, starts, [*starts[1:], words[0]], strict=False)
        if bits
    ]
    return f"exl2 {_with_slashes(widths)} bit, groups of {_with_slashes(sizes)}"


def _with_slashes(numbers: Iterable[int]) -> str:
    return "/".join(str(number) for number in sorted(set(numbers), reverse=True))


def _read_groups(tensors: Mapping[str, Tensor], words: int, in_features: int, where: str) -> list[_GroupSpan]:
    """The groups of q_groups, checked: they tile the rows of q_weight from the first to the last."""
    table = require_tensor(tensors, "q_groups", where, (torch.int16,), (None,))
    if not len(table) or len(table) % 2:
        raise bad_tensor(where, "q_groups", "pairs of a width and a row", f"{len(table)} numbers")
    if len(table) // 2 > words:
        raise bad_tensor(where, "q_groups", f"at most {words} groups, as q_weight has rows", len(table) // 2)
    numbers = (table.to(torch.int64) & 0xFFFF).tolist()  # the int16 are bit patterns of uint16
    starts = numbers[1::2]
    if starts[0] != 0:
        raise bad_tensor(where, "q_groups", "the first group at row 0 of q_weight", f"row {starts[0]}")
    groups = []
    for number, (bits, start, stop) in enumerate(zip(numbers[::2], starts, [*starts[1:], words], strict=True)):
        if bits not in BIT_WIDTHS:
            raise bad_tensor(where, "q_groups", f"widths out of {BIT_WIDTHS}", f"{bits} bits in group {number}")
        if not start < stop <= words:
            raise bad_tensor(
                where, "q_groups", f"ascending rows below {words}", f"group {number} from {start} to {stop}"
            )
        if (stop - start) * WORD_BITS % bits:
            raise bad_tensor(
                where,
                "q_groups",
                "groups that fill their words",
                f"{stop - start} words of {bits}-bit values in group {number}",
            )
        groups.append(_GroupSpan(bits, start, stop))
    rows = sum(group.in_features for group in groups)
    if rows != in_features:
        raise bad_tensor(where, "q_groups", f"groups of {in_features} rows altogether", f"{rows} rows")
    return groups


def _read_perm(tensors: Mapping[str, Tensor], in_features: int, where: str) -> Tensor | None:
    """The input of each stored row, the inverse of q_invperm; None for the identity."""
    stored = require_tensor(tensors, "q_invperm", where, INDEX_DTYPES, (in_features,))
    inverse = stored.to(torch.int64)
    if stored.dtype is torch.int16:
        inverse = inverse & 0xFFFF
    check_range(inverse, in_features, "q_invperm", where)
    counts = torch.bincount(inverse, minlength=in_features)
    if int(counts.max()) > 1:
        raise bad_tensor(where, "q_invperm", "a permutation", f"{int(counts.argmax())} more than once")
    natural = torch.arange(in_features, device=inverse.device)
    if torch.equal(inverse, natural):
        return None
    perm = torch.empty_like(natural)
    perm[inverse] = natural
    return perm.to(torch.int32)


def _segments(groups: list[_GroupSpan], words: Tensor, scales: Exl2Scales) -> tuple[Segment, ...]:
    """Join neighbouring groups of one width: each fills whole words, so their bit streams concatenate."""
    segments, first = [], 0
    for bits, run in groupby(groups, key=lambda group: group.bits):
        members = list(run)
        last = first + len(members)
        segments.append(
            Segment(
                bits=bits,
                group_sizes=tuple(group.in_features for group in members),
                codes=words[members[0].start : members[-1].stop],
                scales=Exl2Scales(scales.codes[first:last], scales.group_max[first:last]),
                zero=1 << (bits - 1),
            )
        )
        first = last
    return tuple(segments)


def _sort_by_bits(weight: PackedWeight) -> tuple[list[Segment], Tensor]:
    """The segments by descending width, which other readers expect, and the permutation to match."""
    device = weight.segments[0].codes.device
    perm = weight.perm
    perm = torch.arange(weight.in_features, device=device) if perm is None else perm.to(torch.int64)
    pieces: tuple[Tensor, ...] = perm.split_with_sizes([segment.in_features for segment in weight.segments])
    pairs = sorted(zip(weight.segments, pieces, strict=True), key=lambda pair: -pair[0].bits)
    return [segment for segment, _ in pairs], torch.cat([piece for _, piece in pairs])


def _codes_with_padding(segment: Segment, padding: int) -> Tensor:
    """The codes, and `padding` more columns whose weights are zero: each code is the zero point."""
    if not padding:
        return segment.codes
    zeros = torch.full((segment.in_features, 1), 1 << (segment.bits - 1), device=segment.codes.device)
    return torch.cat([segment.codes, pack(zeros, segment.bits).expand(-1, padding)], 1)


def _exl2_scales(weight: PackedWeight, segment: Segment) -> Exl2Scales:
    if not isinstance(segment.scales, Exl2Scales):
        raise cannot_store(weight, "EXL2", f"{segment.scales.description}; it has squared 4-bit ones")
    return segment.scales


def _check_writable(weight: PackedWeight) -> None:
    """`Unsupported` with the reason if EXL2 cannot represent this matrix."""
    if weight.dtype is not torch.float16:
        raise cannot_store(weight, "EXL2", f"numbers rounded to {weight.dtype}")
    if weight.in_features % ALIGNMENT:
        raise cannot_store(weight, "EXL2", f"{weight.in_features} inputs, not a multiple of {ALIGNMENT}")
    rows: dict[int, int] = {}
    for segment in weight.segments:
        bits = segment.bits
        if bits not in BIT_WIDTHS:
            raise cannot_store(weight, "EXL2", f"{bits}-bit codes; it has {BIT_WIDTHS}")
        _exl2_scales(weight, segment)
        if segment.minimum is not None or segment.codebook is not None:
            raise cannot_store(weight, "EXL2", "minimums or codebooks")
        if isinstance(segment.zero, Tensor) or segment.zero != 1 << (bits - 1):
            raise cannot_store(weight, "EXL2", f"zero points other than {1 << (bits - 1)} for {bits} bits")
        if odd := [size for size in segment.group_sizes if size * bits % WORD_BITS]:
            raise cannot_store(weight, "EXL2", f"groups of {odd[0]} rows of {bits} bits, which do not fill whole words")
        rows[bits] = rows.get(bits, 0) + segment.in_features
    if uneven := [(count, bits) for bits, count in rows.items() if count % ALIGNMENT]:
        count, bits = uneven[0]
        raise cannot_store(weight, "EXL2", f"{count} rows of {bits} bits, not a multiple of {ALIGNMENT}")


FORMAT = MatrixFormat("exl2", "q_weight", TENSORS, read, describe)
