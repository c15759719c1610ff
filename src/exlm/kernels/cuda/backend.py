"""The CUDA backend: packed matrices, experts made of them and the attention of few tokens, in float16.

A few rows are multiplied straight from codes; for many, the matrix is unpacked and multiplied as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import spec
from ...errors import MissingExtra, Unsupported
from ...formats import PackedWeight, Weight
from .. import interface as b
from ..reference import ReferenceBackend
from .attention import HEADS, Attend, Desk
from .experts import Crew, PackedExperts
from .few import Few
from .layer import WholeLayer, compose
from .linear import ACTS, Normal
from .planner import Kind, Planner, plans_file
from .program import Workshop, bindings
from .rearrange import Rearranger
from .tiles import Tiles, alike, arrange
from .unpack import Many, Unpacker, together
from .wide import MOST


class PackedLinear:
    """x @ W + bias for any number of rows."""

    def __init__(self, planner: Planner, tiles: Tiles, wide: bool) -> None:
        self._planner = planner
        self._wide = wide
        self.use(tiles)

    def use(self, tiles: Tiles) -> None:
        """Go on with the same numbers in another layout."""
        self.tiles = tiles
        self.unpacker = Unpacker(self._planner.workshop, tiles)
        self.product = Few(self._planner.product([tiles]), self._wide)
        self._many = Many([self.unpacker])

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        rows = x.reshape(-1, x.shape[-1])
        (y,) = self._few(rows) if len(rows) <= MOST else self._many(rows)
        return y.view(*x.shape[:-1], self.tiles.out_features)

    def _few(self, rows: Tensor) -> list[Tensor]:
        out = self.product.answers(len(rows))
        self.product(rows.contiguous(), out)
        return out


class Projection(b.FusedLinear):
    """Several matrices in one launch, with what comes before and behind them."""

    def __init__(self, product: Few, matrices: Sequence[PackedLinear]) -> None:
        self.product = product
        self._many = together([one.unpacker for one in matrices])

    def __call__(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """(…, inputs) → (…, outputs) of each."""
        shape, rows = x.shape[:-1], x.reshape(-1, x.shape[-1]).contiguous()
        out = self.product.answers(len(rows))
        self.product(rows, out, residual)
        return [one.view(*shape, -1) for one in out]

    def fuse_layer(
        self,
        attend: b.AttentionFn,
        norm: b.QKNormFn | None,
        o: b.FusedLinear,
        gate: b.FusedLinear,
        down: b.FusedLinear,
    ) -> WholeLayer | None:
        """The whole layer that these begin, if every part is of this kind."""
        if isinstance(o, Projection) and isinstance(gate, Projection) and isinstance(down, Projection):
            return compose((self.product, o.product, gate.product, down.product), attend, norm)
        return None

    def separate(self, x: Tensor) -> list[Tensor]:
        """(…, inputs) → (…, outputs) of each, of many rows and with nothing before or behind."""
        rows = x.reshape(-1, x.shape[-1])
        return [y.view(*x.shape[:-1], y.shape[1]) for many in self._many for y in many(rows)]


class CudaBackend:
    """Packed matrices, experts and the attention of few tokens on one GPU; everything else is declined."""

    name = "cuda"
    max_fused_tokens = b.FUSE_MAX_TOKENS

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
        self._wide = wide
        self._desk = Desk(self._workshop, self._workshop.processors)

    def linear(self, weight: Weight) -> b.LinearFn:
        """Packed weights, rearranged."""
        if not isinstance(weight, PackedWeight):
            raise Unsupported("only packed matrices")
        return PackedLinear(self._planner, arrange(weight, self._rearranger), self._wide)

    def fused_linear(
        self,
        linears: Sequence[b.LinearFn],
        prologue: b.NormPrologue | None,
        act: spec.Activation | None,
        fp32_out: bool = False,
    ) -> b.FusedLinear:
        """Packed matrices in one layout."""
        mine = [one for one in linears if isinstance(one, PackedLinear)]
        if len(mine) < len(linears):
            raise Unsupported("matrices that are not packed")
        if act is not None and act not in ACTS:
            raise Unsupported(f"{act} between matrices")
        if prologue is not None and (prologue.norm.kind != "rms" or prologue.norm.bias):
            raise Unsupported("a norm with a mean or a bias")
        if len(mine) == 1 and prologue is None and act is None and not fp32_out:
            return Projection(mine[0].product, mine)
        normal = (
            None if prologue is None else Normal(prologue.weight + prologue.norm.offset, prologue.norm.eps)
        )
        tiles = alike([one.tiles for one in mine])
        product = self._planner.product(tiles, normal, act, fp32_out)
        _adopt(mine, tiles)
        return Projection(Few(product, self._wide), mine)

    def attention(self, attn: spec.Attention, rope: b.RopeFn) -> b.AttentionFn:
        """Few tokens here, many elsewhere."""
        if attn.head_dim not in HEADS:
            raise Unsupported(f"heads of {attn.head_dim} numbers, only of {HEADS[0]} and {HEADS[1]}")
        return Attend(self._desk, attn, rope, self._others.attention(attn, rope))

    def moe(
        self, moe: spec.Moe, gate: list[b.LinearFn], up: list[b.LinearFn], down: list[b.LinearFn]
    ) -> b.MoeFn:
        """Packed experts, those of a layer in one layout."""
        mine = [one for one in (*gate, *up, *down) if isinstance(one, PackedLinear)]
        if len(mine) < 3 * moe.experts:
            raise Unsupported("experts that are not packed")
        if moe.act not in ACTS:
            raise Unsupported(f"{moe.act} between matrices")
        tiles = [one.tiles for one in mine]
        inner, outer = alike(tiles[: 2 * moe.experts]), alike(tiles[2 * moe.experts :])
        pairs = list(zip(inner[: moe.experts], inner[moe.experts :], strict=True))
        crews = (
            Crew(self._workshop, pairs, moe.active, moe.act),
            Crew(self._workshop, [(one,) for one in outer], moe.active),
        )
        _adopt(mine, (*inner, *outer))
        return PackedExperts(moe, crews, (gate, up, down), self._others.gated(moe.act))

    def tune_spaces(self, run: Callable[[], object]) -> list[Kind]:
        """The kinds of products that something uses."""
        return self._planner.used(run)

    def save_tuned(self, spaces: Sequence[b.TuneSpace]) -> Path | None:
        """Write down how they are set."""
        return self._planner.keep([one for one in spaces if isinstance(one, Kind)])

    def _declined(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("only packed matrices, experts and attention")

    embedding = norm = add_norm = activation = gated = rope = _declined


def _adopt(linears: Sequence[PackedLinear], tiles: Sequence[Tiles]) -> None:
    """Let matrices that were put in one layout go on in it, so that it is held once."""
    for linear, same in zip(linears, tiles, strict=True):
        if same.layout != linear.tiles.layout:
            linear.use(same)
