"""Packed activations, read and written in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from exlm.kernels.cuda.prepacked_acts import MAX_M16, NO_SLOT, InputLayout, PackedActs
from tests.kernels.cuda.random_weights import matrix, segment
from tests.kernels.cuda.repack_oracle import repack


def input_layout(inputs: int, device: torch.device) -> InputLayout:
    """Of a weight whose codes have one or two digits, with a permutation and padding."""
    parts = (6, [32]), (5, [32]), (4, [32] * (inputs // 32 - 2))
    packed = matrix(tuple(segment(bits, sizes, 16, False, False) for bits, sizes in parts if sizes), 16)
    return InputLayout([repack(packed.to(device))], [0], None)


def slot_places(acts: PackedActs, slots: Tensor) -> Tensor:
    """(rows, …) where slots of each row lie in `packed_x`."""
    rows = torch.arange(acts.rows).view(-1, *[1] * slots.dim())
    if acts.rows <= MAX_M16:
        return (slots // 32 * acts.row_capacity + rows) * 32 + slots % 32
    matrix, number = slots // 32 * 4 + slots % 8 // 2, slots % 32 // 8 * 2 + slots % 2
    return ((matrix * (acts.row_capacity // 8) + rows // 8) * 8 + number) * 8 + rows % 8


def read_back(acts: PackedActs) -> Tensor:
    """(rows, inputs), after checking that all slots of an input agree, and that padding is zero."""
    layout, packed_x = acts.layout, acts.packed_x.cpu()
    slots = layout.slots.cpu().int() & NO_SLOT
    exists = slots != NO_SLOT
    found = packed_x[slot_places(acts, torch.where(exists, slots, slots[:, :1]))]
    assert torch.equal(found, found[..., :1].expand_as(found))
    pad_slots = layout.pad_slots.cpu().int() & NO_SLOT
    assert not packed_x[slot_places(acts, pad_slots)].any()
    assert len(pad_slots) + int(exists.sum()) == layout.num_slots
    return found[..., 0]


def prepack(layout: InputLayout, x: Tensor) -> PackedActs:
    """Rows packed in torch, with two partial sums of squares for each."""
    acts, numbers = layout.allocate(len(x), 2), x.float().cpu()
    acts.packed_x.zero_()
    if acts.rms_partials is not None and layout.norm_weight is not None:
        halves = numbers.double().square().tensor_split(2, 1)
        acts.rms_partials.copy_(torch.stack([one.sum(1) for one in halves], 1).flatten())
        numbers = numbers * layout.norm_weight.cpu()
    slots = layout.slots.cpu().int() & NO_SLOT
    every = numbers.half()[:, :, None].expand(-1, -1, slots.shape[1])
    exists = (slots != NO_SLOT).expand_as(every)
    packed_x = acts.packed_x.cpu()
    packed_x[slot_places(acts, slots)[exists]] = every[exists]
    acts.packed_x.copy_(packed_x)
    return acts
