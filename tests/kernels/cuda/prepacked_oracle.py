"""Rows as products take them, read and written plainly."""

from __future__ import annotations

import torch
from torch import Tensor

from exlm.kernels.cuda.lanes import MAX_M16
from exlm.kernels.cuda.prepacked import NO_SLOT, InputLayout, PackedActs
from exlm.kernels.cuda.repack import repack
from tests.kernels.cuda.random_weights import matrix, segment


def input_layout(inputs: int, device: torch.device) -> InputLayout:
    """Of a matrix whose codes have one or two digits, in any order, with gaps."""
    parts = (6, [32]), (5, [32]), (4, [32] * (inputs // 32 - 2))
    made = matrix(tuple(segment(bits, sizes, 16, False, False) for bits, sizes in parts if sizes), 16)
    return InputLayout([repack(made.to(device))], [0], None)


def spots(handed: PackedActs, places: Tensor) -> Tensor:
    """(rows, …) where stored inputs of each row are among the words."""
    rows = torch.arange(handed.rows).view(-1, *[1] * places.dim())
    if handed.rows <= MAX_M16:
        return (places // 32 * handed.room + rows) * 32 + places % 32
    matrix, number = places // 32 * 4 + places % 8 // 2, places % 32 // 8 * 2 + places % 2
    return ((matrix * (handed.room // 8) + rows // 8) * 8 + number) * 8 + rows % 8


def read_back(handed: PackedActs) -> Tensor:
    """(rows, inputs): each of its copies the same, and zeros in the gaps."""
    input_layout, words = handed.input_layout, handed.words.cpu()
    places = input_layout.places.cpu().int() & NO_SLOT
    there = places != NO_SLOT
    found = words[spots(handed, torch.where(there, places, places[:, :1]))]
    assert torch.equal(found, found[..., :1].expand_as(found))
    gaps = input_layout.gaps.cpu().int() & NO_SLOT
    assert not words[spots(handed, gaps)].any()
    assert len(gaps) + int(there.sum()) == input_layout.stored
    return found[..., 0]


def leave(input_layout: InputLayout, x: Tensor) -> PackedActs:
    """Rows handed over without a kernel, their squares in two shares."""
    handed, numbers = input_layout.open(len(x), 2), x.float().cpu()
    handed.words.zero_()
    if handed.squares is not None and input_layout.norm is not None:
        halves = numbers.double().square().tensor_split(2, 1)
        handed.squares.copy_(torch.stack([one.sum(1) for one in halves], 1).flatten())
        numbers = numbers * input_layout.norm.cpu()
    places = input_layout.places.cpu().int() & NO_SLOT
    every = numbers.half()[:, :, None].expand(-1, -1, places.shape[1])
    there = (places != NO_SLOT).expand_as(every)
    words = handed.words.cpu()
    words[spots(handed, places)[there]] = every[there]
    handed.words.copy_(words)
    return handed
