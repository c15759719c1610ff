"""Rows as products take them, read and written plainly."""

from __future__ import annotations

import torch
from torch import Tensor

from exlm.kernels.cuda.handing import NOWHERE, Handed, Inlet
from exlm.kernels.cuda.lanes import ALIKE
from exlm.kernels.cuda.tiles import arrange
from tests.kernels.cuda.random_weights import matrix, segment


def inlet(inputs: int, device: torch.device) -> Inlet:
    """Of a matrix whose codes have one or two digits, in any order, with gaps."""
    parts = (6, [32]), (5, [32]), (4, [32] * (inputs // 32 - 2))
    made = matrix(tuple(segment(bits, sizes, 16, False, False) for bits, sizes in parts if sizes), 16)
    return Inlet([arrange(made.to(device))], [0], None)


def spots(handed: Handed, places: Tensor) -> Tensor:
    """(rows, …) where stored inputs of each row are among the words."""
    rows = torch.arange(handed.rows).view(-1, *[1] * places.dim())
    if handed.rows <= ALIKE:
        return (places // 32 * handed.room + rows) * 32 + places % 32
    matrix, number = places // 32 * 4 + places % 8 // 2, places % 32 // 8 * 2 + places % 2
    return ((matrix * (handed.room // 8) + rows // 8) * 8 + number) * 8 + rows % 8


def read_back(handed: Handed) -> Tensor:
    """(rows, inputs): each of its copies the same, and zeros in the gaps."""
    inlet, words = handed.inlet, handed.words.cpu()
    places = inlet.places.cpu().int() & NOWHERE
    there = places != NOWHERE
    found = words[spots(handed, torch.where(there, places, places[:, :1]))]
    assert torch.equal(found, found[..., :1].expand_as(found))
    gaps = inlet.gaps.cpu().int() & NOWHERE
    assert not words[spots(handed, gaps)].any()
    assert len(gaps) + int(there.sum()) == inlet.stored
    return found[..., 0]


def leave(inlet: Inlet, x: Tensor) -> Handed:
    """Rows handed over without a kernel, their squares in two shares."""
    handed, numbers = inlet.open(len(x), 2), x.float().cpu()
    handed.words.zero_()
    if handed.squares is not None and inlet.norm is not None:
        halves = numbers.double().square().tensor_split(2, 1)
        handed.squares.copy_(torch.stack([one.sum(1) for one in halves], 1).flatten())
        numbers = numbers * inlet.norm.cpu()
    places = inlet.places.cpu().int() & NOWHERE
    every = numbers.half()[:, :, None].expand(-1, -1, places.shape[1])
    there = (places != NOWHERE).expand_as(every)
    words = handed.words.cpu()
    words[spots(handed, places)[there]] = every[there]
    handed.words.copy_(words)
    return handed
