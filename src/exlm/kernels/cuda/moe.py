"""A mixture of experts from packed matrices: who answers is found out on the device, which nobody waits for.

Few tokens are multiplied straight from codes, by matrices that their experts have in a table, and a token's
answer is the same bits whatever its company. So are many of small experts. Large ones are unpacked for many
tokens, and the host must know how many each of them gets: one wait for all. What a matrix is, and how it is
unpacked, is decided elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import spec
from .. import interface as b
from .gemm import GemmM16, TileConfig, row_smem_bytes
from .lanes import TILE_K
from .module_cache import ModuleCache
from .repack import MmaWeight
from .tuning import default_config

SOURCE = Path(__file__).with_name("csrc") / "moe.cu"
MIN_EXPERTS_PER_PAIR = 4
"""Experts for each pair of a token and an expert, from which on hardly any two pairs have the same."""

MAX_DIRECT_WORK = 2**31
"""Rows of an expert times its bytes from which on it is unpacked: straight from codes, all are read for
every eight rows."""

_GROUP = 8  # rows that a matrix is multiplied by at once
_PAIRS = 2048  # that find their seats at once
_THREADS = 256
_SEAT = 4  # numbers
_JOB = 256  # bytes that say what is to be done


class _Given(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "widths", "logits", "x", "y")),
        *((name, ctypes.c_void_p) for name in ("words", "seats", "groups")),
        *((name, ctypes.c_int) for name in ("inputs", "outputs", "room", "pairs")),
    )


class AlignedTokens(NamedTuple):
    """Who multiplies which rows: pairs with the same expert sit side by side."""

    seats: Tensor  # (pairs, _SEAT) int32
    places: Tensor  # (pairs,) int32: the seat of each
    groups: Tensor  # int32: the seats they begin at, -1 behind the last


class _Expert(GemmM16):
    """One expert's matrices, which are multiplied by whatever rows are the expert's."""

    def memory(self, rows: int, plan: TileConfig, handed: bool = False) -> int:
        """Bytes of shared memory: before all else, what is to be done."""
        return super().memory(rows, plan, handed) + _JOB


class ExpertGemm:
    """The same matrices of every expert. With `act` they have two each: act(first) · second is the answer."""

    def __init__(
        self, modules: ModuleCache, experts: Sequence[Sequence[MmaWeight]], active: int, act: str | None = None
    ) -> None:
        self._modules = modules
        self._products = [_Expert(modules, tiles, None, act) for tiles in experts]
        self._choices = {"NUM_EXPERTS": len(experts), "TOP_K": active, "RUNTIME_BITS": 0}
        self._active = active
        self._unite()
        self._largest = max(self._products, key=lambda one: one.memory(1, TileConfig()))
        busy = [one for tiles in experts[:active] for one in tiles]
        self._largest.plan = self._largest.fitted(default_config(busy, act, modules.num_sms))
        device = self._largest.device
        table = bytearray(b"".join(bytes(one.parts) for one in self._products))
        self._table = torch.frombuffer(table, dtype=torch.uint8).to(device)
        widths = [sum(one.layout.bits << 4 * i for i, one in enumerate(tiles)) for tiles in experts]
        self._widths = torch.tensor(widths, dtype=torch.int32, device=device)
        self.width = self._largest.widths[0]
        self.nbytes = sum(one.nbytes for tiles in experts for one in tiles)

    def _unite(self) -> None:
        """Have one form for all: that of the widest codes, if they differ, and each told its own."""
        forms = [one.form for one in self._products]
        layouts = forms[0].layouts
        if len({form.layouts for form in forms}) > 1:
            every = [layout for form in forms for layout in form.layouts]
            layouts = (max(every, key=lambda one: one.bits),) * len(layouts)
            self._choices["RUNTIME_BITS"] = sum(1 << bits for bits in {layout.bits for layout in every})
        apart = any(form.apart for form in forms)
        for one in self._products:
            one.form = replace(one.form, layouts=layouts, apart=apart)

    def module(self, rows: int) -> Any:
        """The kernels for rows by themselves (1) or in groups."""
        return self._modules.module(SOURCE, **self._largest.choices(rows), **self._choices)

    def __call__(self, x: Tensor, logits: Tensor, seating: AlignedTokens | None) -> Tensor:
        """(pairs, outputs) in the order of their seats, of x (tokens, inputs), without `act` (pairs, inputs).

        Contiguous float16, and so are the logits (tokens, experts).
        """
        largest, pairs = self._largest, len(logits) * self._active
        out = x.new_empty(pairs, self.width)
        given = _Given(*(one.data_ptr() for one in (self._table, self._widths, logits, x, out)))
        given.inputs, given.outputs, given.pairs = largest.inputs, self.width, pairs
        given.room = largest.bricks * TILE_K // 8
        rows, groups, kept = 1, pairs, None
        if seating is not None:
            rows, groups = _GROUP, len(seating.groups)
            given.seats, given.groups = seating.seats.data_ptr(), seating.groups.data_ptr()
            kept = self._prepared(given)
        plan = largest.plan
        each = plan.tiles // 2 if largest.form.act else plan.tiles
        grid = -(-largest.matrices[0].tiles // each), groups, 1
        memory = largest.memory(rows, plan)
        self.module(rows).launch("moe_gemm", grid, plan.warps * 32, memory, (given,))
        del kept  # not before the launch
        return out

    def _prepared(self, given: _Given) -> Tensor:
        """Every seat's row as its expert wants it."""
        largest, sides = self._largest, 2 if self._largest.form.apart else 1
        size = sides * given.pairs * given.room * 8
        words = torch.empty(size, dtype=torch.float16, device=largest.device)
        given.words = words.data_ptr()
        grid = given.pairs, -(-given.room // _THREADS), sides
        self.module(_GROUP).launch(
            "moe_pack_activations", grid, _THREADS, _JOB + row_smem_bytes(largest.inputs), (given,)
        )
        return words


class CudaMoe:
    """Routes each token to its experts, and adds their answers in the order of choice."""

    def __init__(
        self,
        moe: spec.Moe,
        crews: tuple[ExpertGemm, ExpertGemm],
        matrices: Sequence[Sequence[b.LinearFn]],
        gated: b.GatedActivationFn,
    ) -> None:
        """`crews` are gate with up, and down; `matrices` are gate, up and down, by which many tokens go."""
        self._moe = moe
        self._inner, self._outer = crews
        self._matrices, self._gated = matrices, gated

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """(rows, tokens, hidden) and (rows, tokens, experts) → (rows, tokens, hidden)."""
        flat, scores = x.flatten(0, 1).contiguous(), logits.flatten(0, 1).to(x.dtype).contiguous()
        if not self._straight(len(flat)):
            return self._many(flat, scores).view_as(x)
        each = max(b.FUSE_MAX_TOKENS, _PAIRS // self._moe.active)
        cuts = [slice(start, start + each) for start in range(0, len(flat), each)]
        parts = [self._few(flat[cut], scores[cut]) for cut in cuts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view_as(x)

    def _straight(self, tokens: int) -> bool:
        """Whether codes are better read again and again than unpacked, expert by expert."""
        held = (self._inner.nbytes + self._outer.nbytes) / self._moe.experts
        return tokens <= b.FUSE_MAX_TOKENS or tokens * self._moe.active / self._moe.experts * held <= MAX_DIRECT_WORK

    def _few(self, x: Tensor, logits: Tensor) -> Tensor:
        alone = len(x) == 1 or len(x) * self._moe.active * MIN_EXPERTS_PER_PAIR <= self._moe.experts
        seating = None if alone else self._dealt(logits)
        answers = self._outer(self._inner(x, logits, seating), logits, seating)
        return self._combined(answers, logits, None if seating is None else seating.places, True)

    def _many(self, x: Tensor, logits: Tensor) -> Tensor:
        active, experts = self._moe.active, self._moe.experts
        chosen = torch.empty(len(x) * active, dtype=torch.int32, device=x.device)
        given = _address(logits), _address(chosen), ctypes.c_int(len(x))
        self._outer.module(1).launch("topk", (-(-len(x) // 8), 1, 1), _THREADS, 0, given, pdl=False)
        ordered, order = chosen.sort(stable=True)
        numbers = torch.arange(experts, dtype=torch.int32, device=x.device)
        ends = torch.searchsorted(ordered, numbers, right=True).tolist()
        rows = x.index_select(0, order // active)
        answers = []
        for start, end, gate, up, down in zip([0, *ends[:-1]], ends, *self._matrices, strict=True):
            if start < end:
                part = rows[start:end]
                answers.append(down(self._gated(gate(part), up(part))))
        return self._combined(torch.cat(answers), logits, order.argsort().int(), False)

    def _dealt(self, logits: Tensor) -> AlignedTokens:
        """Seats for all pairs of a token and an expert."""
        pairs, device = len(logits) * self._moe.active, logits.device
        most = min(pairs, self._moe.experts + pairs // _GROUP)  # every expert may have one that is not full
        sizes = (pairs, _SEAT), (pairs,), (most,)
        seating = AlignedTokens(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))
        given = *map(_address, (logits, *seating)), ctypes.c_int(pairs), ctypes.c_int(most)
        memory = 4 * (pairs + self._moe.experts)
        self._inner.module(_GROUP).launch("moe_align", (1, 1, 1), _THREADS, memory, given)
        return seating

    def _combined(self, answers: Tensor, logits: Tensor, places: Tensor | None, pdl: bool) -> Tensor:
        """The answers of each token's experts times their shares, added up."""
        out = answers.new_empty(len(logits), self._outer.width)
        given = (
            *map(_address, (logits, answers, places, out)),
            ctypes.c_int(self._outer.width),
            ctypes.c_int(self._moe.renormalize),
        )
        grid = len(logits), -(-self._outer.width // (8 * _THREADS)), 1
        self._outer.module(1).launch("combine", grid, _THREADS, 0, given, pdl)
        return out


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
