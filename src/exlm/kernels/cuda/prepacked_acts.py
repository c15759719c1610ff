"""Prepacked activations: an epilogue writes its output as the next GEMM's packed input (csrc/prepacked_acts.h).

The next weight's act-order permutation is folded into that store, and so is the weight of an RMS norm between
the two: the epilogue multiplies by the norm's weight and leaves partial sums of squares; the next GEMM's own
epilogue multiplies by 1 / rms. The norm's weight is divided by a power of two to be at most 1, so that no number
overflows float16 on the way.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import Unsupported
from .weight_tile import TILE_K, MmaWeight, slot_inputs

MAX_M16 = 16
"""Rows up to which gemm_m16 runs; it reads packed activations in another layout than gemm_m64."""

NO_SLOT = 65535
MAX_SLOTS = 8
"""Slots that one input may have: a code may have several digits, and each weight may have its own permutation."""


class EpilogueTarget(ctypes.Structure):
    """The kernels' `EpilogueTarget`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "pad_slots", "norm_weight", "packed_x", "rms_partials")),
        *((name, ctypes.c_int) for name in ("num_pads", "row_capacity", "num_partials", "fragment_layout")),
    )


class ChainArgs(ctypes.Structure):
    """The kernels' `ChainArgs`."""

    _fields_ = (
        ("target", EpilogueTarget),
        ("rms_partials", ctypes.c_void_p),
        ("num_partials", ctypes.c_int),
        ("norm_scale", ctypes.c_float),
    )


class InputLayout:
    """Where a GEMM reads each of its inputs, for the epilogues that write them."""

    def __init__(self, weights: Sequence[MmaWeight], perm_owners: Sequence[int], norm_weight: Tensor | None) -> None:
        """`perm_owners`: for each weight, the first one with the same permutation, whose activations it shares."""
        owners = list(dict.fromkeys(perm_owners))
        orders = [fragment_order(slot_inputs(weights[owner])) for owner in owners]
        starts = dict(zip(owners, accumulate(map(len, orders[:-1]), initial=0), strict=True))
        self.first_slots = [starts[owner] for owner in perm_owners]
        """Of each weight, among the slots of all permutations."""
        device, inputs = weights[0].device, torch.cat(orders).numpy()
        self.num_slots = len(inputs)
        self.pad_slots = as_uint16(torch.from_numpy(np.flatnonzero(inputs < 0))).to(device, non_blocking=True)
        self.slots = as_uint16(_slots_of_inputs(inputs, weights[0].in_features)).to(device, non_blocking=True)
        self._norm_weight = norm_weight

    @cached_property
    def norm_scale(self) -> float:
        """The power of two that the norm's weight is divided by; reading it the first time waits for the device."""
        return 1.0 if self._norm_weight is None else 2.0 ** math.frexp(float(self._norm_weight.abs().max()))[1]

    @cached_property
    def norm_weight(self) -> Tensor | None:
        """What epilogues multiply by: at most 1."""
        return None if self._norm_weight is None else self._norm_weight.float().contiguous() / self.norm_scale

    def allocate(self, rows: int, num_partials: int) -> PackedActs:
        """Memory for rows that a kernel will write, with so many partial sums of squares for each."""
        row_capacity = rows if rows <= MAX_M16 else -(-rows // 16) * 16
        packed_x = torch.empty(self.num_slots * row_capacity, dtype=torch.float16, device=self.slots.device)
        rms_partials = None
        if self._norm_weight is not None:
            rms_partials = torch.empty(rows * num_partials, dtype=torch.float32, device=self.slots.device)
        return PackedActs(self, rows, row_capacity, packed_x, rms_partials, num_partials)


@dataclass(frozen=True, eq=False)
class PackedActs:
    """Activations as a GEMM reads them, packed by the kernel that computed them."""

    layout: InputLayout
    rows: int
    row_capacity: int
    packed_x: Tensor
    rms_partials: Tensor | None
    num_partials: int

    def __len__(self) -> int:
        return self.rows

    @property
    def addresses(self) -> list[int]:
        """Of each weight's packed activations."""
        return [self.packed_x.data_ptr() + slot * self.row_capacity * 2 for slot in self.layout.first_slots]

    def target(self) -> EpilogueTarget:
        """As the kernel that writes them takes it."""
        layout = self.layout
        return EpilogueTarget(
            slots=layout.slots.data_ptr(),
            pad_slots=layout.pad_slots.data_ptr(),
            norm_weight=None if layout.norm_weight is None else layout.norm_weight.data_ptr(),
            packed_x=self.packed_x.data_ptr(),
            rms_partials=None if self.rms_partials is None else self.rms_partials.data_ptr(),
            num_pads=len(layout.pad_slots),
            row_capacity=self.row_capacity,
            num_partials=self.num_partials,
            fragment_layout=self.rows <= MAX_M16,
        )


def chain_args(packed_in: PackedActs | None, packed_out: PackedActs | None) -> ChainArgs:
    """A GEMM's arguments for the prepacked activations that it reads and writes."""
    args = ChainArgs()
    if packed_in is not None:
        args.norm_scale = packed_in.layout.norm_scale
        if packed_in.rms_partials is not None:
            args.rms_partials, args.num_partials = packed_in.rms_partials.data_ptr(), packed_in.num_partials
    if packed_out is not None:
        if packed_in is None:
            raise Unsupported("prepacked output of rows that were not prepacked")
        args.target = packed_out.target()
    return args


def chain_defines(in_prepacked: bool, out_prepacked: bool) -> dict[str, int]:
    """The -D constants for that; none for a GEMM that is not chained."""
    if not (in_prepacked or out_prepacked):
        return {}
    return {"IN_PREPACKED": int(in_prepacked), "OUT_PREPACKED": int(out_prepacked)}


def epilogue_smem_bytes(outputs: int, rows: int) -> int:
    """Bytes of `EpilogueSmem`: slots and norm weight of each output, 1 / rms of each row."""
    return outputs * (2 * MAX_SLOTS + 4) + rows * 4


def fragment_order(slot_values: Tensor) -> Tensor:
    """Values of all slots in the order of packed activations: (k tile, pair of k16 steps, c, step, 4)."""
    return slot_values.view(-1, TILE_K // 32, 2, 4, 4).transpose(2, 3).flatten()


def as_uint16(values: Tensor) -> Tensor:
    """Their lowest 16 bits, in torch's signed type; -1 becomes NO_SLOT."""
    return values.to(torch.int16)


def _slots_of_inputs(slot_inputs: npt.NDArray[np.int32], num_inputs: int) -> Tensor:
    """(inputs, MAX_SLOTS) the slots of each input, then -1.

    In numpy: torch would wake all its threads for so little work, once for each weight that is loaded.
    """
    if len(slot_inputs) >= NO_SLOT:
        raise Unsupported(f"{len(slot_inputs)} stored inputs, which must be below {NO_SLOT}")
    used = np.flatnonzero(slot_inputs >= 0)
    inputs = slot_inputs[used]
    order = np.argsort(inputs, kind="stable")
    counts = np.bincount(inputs, minlength=num_inputs)
    if int(counts.max()) > MAX_SLOTS:
        raise Unsupported(f"an input that is stored {int(counts.max())} times, more than {MAX_SLOTS}")
    inputs, first = inputs[order], counts.cumsum() - counts
    slots = np.full((num_inputs, MAX_SLOTS), -1, dtype=np.int32)
    slots[inputs, np.arange(len(inputs)) - first[inputs]] = used[order]
    return torch.from_numpy(slots)
