"""The CUDA backend: packed matrices and the attention of few tokens, in float16, and nothing else.

A few rows are multiplied straight from codes; for many, the matrix is unpacked and multiplied as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...errors import MissingExtra, Unsupported
from ...formats import PackedWeight, Weight
from .. import backend as b
from ..reference import ReferenceBackend
from .attention import HEADS, Attend, Desk
from .lanes import BLOCK
from .linear import ACTS, ALIKE, Normal, Product, Unpacker, unsigned
from .planner import Kind, Planner, plans_file
from .program import Workshop, bindings
from .rearrange import Rearranger
from .tiles import Tiles, alike, arrange
from .wide import MOST, WideProduct


class Few:
    """A product for up to MOST rows: ALIKE of them at a time, or with `wide` more of them at once."""

    def __init__(self, product: Product, wide: bool) -> None:
        self.widths = product.widths
        self._product = product
        self._wide = WideProduct(product) if wide and not product.form.apart else None

    def __call__(self, x: Tensor, out: Sequence[Tensor], residual: Tensor | None = None) -> None:
        """Fill out[i] (rows, outputs) with x (rows, inputs) @ matrix i + residual; all contiguous float16."""
        if len(x) > ALIKE and self._wide is not None:
            return self._wide(x, out, residual)
        for start in range(0, len(x), ALIKE):
            part = slice(start, start + ALIKE)
            rest = None if residual is None else residual.reshape(len(x), -1)[part]
            self._product(x[part], [one[part] for one in out], rest)


class Ordering:
    """Rows in the order in which a matrix stores its inputs. The last are kept: matrices often share them."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, Tensor]] = []  # orders, and the same as the kernel reads them
        self._last: tuple[Tensor, int, Tensor, Tensor] | None = None  # rows, their version, order, answer

    def register(self, source: Tensor, device: torch.device) -> Tensor:
        """An order as the kernel reads it, the same tensor for the same order."""
        for order, words in self._known:
            if order.equal(source):
                return words
        words = unsigned(source).to(device, non_blocking=True)
        self._known = [*self._known[-3:], (source, words)]  # other threads look at the list as it was
        return words

    def __call__(self, unpacker: Unpacker, words: Tensor, rows: Tensor) -> Tensor:
        """Rows (…, inputs) rearranged."""
        version = -1 if rows.is_inference() else rows._version
        if self._last is not None:
            known, then, order, answer = self._last
            same = known.data_ptr() == rows.data_ptr() and known.shape == rows.shape and then == version >= 0
            if same and order is words:
                return answer
        answer = unpacker.reordered(words, rows)
        self._last = rows, version, words, answer
        return answer


class PackedLinear:
    """x @ W + bias for any number of rows."""

    def __init__(self, planner: Planner, tiles: Tiles, ordering: Ordering, wide: bool) -> None:
        self._planner = planner
        self._ordering = ordering
        self._wide = wide
        self.use(tiles)
        device = tiles.main.bricks.device
        self._words = None if tiles.source is None else ordering.register(tiles.source, device)

    def use(self, tiles: Tiles) -> None:
        """Go on with the same numbers in another layout."""
        self.tiles = tiles
        self._unpacker = Unpacker(self._planner.workshop, tiles)
        self.product = Few(self._planner.product([tiles]), self._wide)

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        rows = x.reshape(-1, x.shape[-1])
        y = self._few(rows) if len(rows) <= MOST else self._many(rows)
        return y.view(*x.shape[:-1], self.tiles.out_features)

    def _few(self, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), self.tiles.out_features, dtype=rows.dtype, device=rows.device)
        self.product(rows, [out])
        return out

    def _many(self, rows: Tensor) -> Tensor:
        tiles = self.tiles
        if self._words is not None:
            rows = self._ordering(self._unpacker, self._words, rows)
        elif padding := tiles.blocks * BLOCK - tiles.in_features:
            rows = F.pad(rows, (0, padding))
        return F.linear(rows, self._unpacker.expanded()[: tiles.out_features], tiles.bias)


class Projection:
    """Several matrices in one launch, with what comes before and behind them."""

    def __init__(self, product: Few) -> None:
        self._product = product

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """(…, inputs) → (…, outputs) of each."""
        shape, rows = x.shape[:-1], x.reshape(-1, x.shape[-1])
        out = [x.new_empty(len(rows), width) for width in self._product.widths]
        self._product(rows, out, residual)
        return [one.view(*shape, -1) for one in out]


class CudaBackend:
    """Packed matrices and the attention of few tokens on one GPU; everything else is declined."""

    name = "cuda"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        folder: Path,
        others: b.Backend | None = None,
        wide: bool = False,
    ) -> None:
        """`others` attends to many tokens at once; plain torch if there is nobody better.

        With `wide`, 17 to 64 rows have a kernel of their own.
        """
        if dtype is not torch.float16:
            raise Unsupported(f"computes in float16, not in {str(dtype).removeprefix('torch.')}")
        try:
            bindings()
        except MissingExtra as reason:
            raise Unsupported(str(reason)) from reason
        self.device = device
        self.dtype = dtype
        self._others = others or ReferenceBackend(device, dtype)
        self._workshop = Workshop(device, folder)
        self._planner = Planner(self._workshop, plans_file(folder, torch.cuda.get_device_name(device)))
        self._rearranger = Rearranger(self._workshop)
        self._ordering = Ordering()
        self._wide = wide
        self._desk = Desk(self._workshop, self._workshop.processors)

    def linear(self, weight: Weight) -> b.Linear:
        """Packed weights, rearranged."""
        if not isinstance(weight, PackedWeight):
            raise Unsupported("only packed matrices")
        return PackedLinear(self._planner, arrange(weight, self._rearranger), self._ordering, self._wide)

    def project(
        self, matrices: Sequence[b.Linear], entry: b.Entry | None, act: spec.Activation | None
    ) -> b.Project:
        """Packed matrices in one layout."""
        mine = [one for one in matrices if isinstance(one, PackedLinear)]
        if len(mine) < len(matrices):
            raise Unsupported("matrices that are not packed")
        if act is not None and act not in ACTS:
            raise Unsupported(f"{act} between matrices")
        if entry is not None and (entry.norm.kind != "rms" or entry.norm.bias):
            raise Unsupported("a norm with a mean or a bias")
        if len(mine) == 1 and entry is None and act is None:
            return Projection(mine[0].product)
        normal = None if entry is None else Normal(entry.weight + entry.norm.offset, entry.norm.eps)
        tiles = alike([one.tiles for one in mine])
        product = self._planner.product(tiles, normal, act)
        for linear, same in zip(mine, tiles, strict=True):
            if same.layout != linear.tiles.layout:
                linear.use(same)
        return Projection(Few(product, self._wide))

    def attention(self, attn: spec.Attention, rotate: b.Rotation) -> b.Attend:
        """Few tokens here, many elsewhere."""
        if attn.head_dim not in HEADS:
            raise Unsupported(f"heads of {attn.head_dim} numbers, only of {HEADS[0]} and {HEADS[1]}")
        return Attend(self._desk, attn, rotate, self._others.attention(attn, rotate))

    def used(self, run: Callable[[], object]) -> list[Kind]:
        """The kinds of products that something uses."""
        return self._planner.used(run)

    def keep(self, knobs: Sequence[b.Knob]) -> Path | None:
        """Write down how they are set."""
        return self._planner.keep([one for one in knobs if isinstance(one, Kind)])

    def _declined(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("only packed matrices and attention")

    embedding = norm = add_norm = activation = gated = rotation = experts = _declined
