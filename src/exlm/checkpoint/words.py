"""How a quantised matrix is stored, in a few words for people: widths and group sizes.

They come from headers and one small tensor. Nothing here is needed to load a matrix, so nothing complains: a
damaged one is told in fewer words, and the reader says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..spec.tensor_names import TensorLocation
from .tensor_index import TensorIndex, key_at

WORD = 32


def exl2_words(lookup: TensorIndex, place: TensorLocation) -> str:
    """`exl2 5/4 bit, groups of 128`."""
    table, words = _shape(lookup, place, "q_groups"), _shape(lookup, place, "q_weight")
    if len(table) != 1 or not words:
        return "exl2"
    pairs = lookup.files.read(lookup.info(key_at(place, "q_groups")).name).long() & 0xFFFF
    rows = words[0]
    bits, starts = pairs[0::2].tolist(), pairs[1::2].tolist()
    sizes = [
        (stop - start) * WORD // width
        for width, start, stop in zip(bits, starts, [*starts[1:], rows], strict=False)
        if width
    ]
    return f"exl2 {_slashed(bits)} bit, groups of {_slashed(sizes)}"


def gptq_words(lookup: TensorIndex, place: TensorLocation) -> str:
    """`gptq 4 bit, groups of 128, act-order`."""
    config = lookup.quantization
    words, scales = _shape(lookup, place, "qweight"), _shape(lookup, place, "scales")
    if not words or not scales:
        return config.method
    zeros = _shape(lookup, place, "qzeros")
    # Matrices may differ in their widths: one zero point for each scale tells this one's.
    bits = config.bits or (zeros[-1] * WORD // max(1, scales[-1]) if zeros else 0) or 4
    rows = words[0] if config.method == "awq" else words[0] * WORD // bits
    ordered = ", act-order" if config.desc_act else ""
    return f"{config.method} {bits} bit, groups of {-(-rows // max(1, scales[0]))}{ordered}"


def _shape(lookup: TensorIndex, place: TensorLocation, suffix: str) -> tuple[int, ...]:
    """Of one of its tensors; nothing for one that is not there, or is a single number."""
    key = key_at(place, suffix)
    return lookup.info(key).shape if key in lookup else ()


def _slashed(numbers: Iterable[int]) -> str:
    return "/".join(str(number) for number in sorted(set(numbers), reverse=True))
