"""`MmaWeight`: a packed weight in the GPU's layout, tiles of 128 inputs by 16 outputs in MMA fragment order.

The way of one weight W[k, n] of b bits, whose code is row i of a segment (k = perm[i], see formats/packed.py):

    PackedWeight     bits i·b … (i + 1)·b - 1 of the stream of 32-bit words down column n of `Segment.codes`
        │            repack.py: segments of one width side by side, each such run padded to 128 inputs
        ▼
    packed input p   a k block is 128 packed inputs: k block p / 128, place p % 128
        │            a code wider than the tiles' is cut into digits; each digit has a k tile of its own, so the
        ▼            k block of a code with d digits is d neighbouring k tiles
    slot             128 · k tile + p % 128: where activations for it stand, too (prepacked_acts.py)
        │            repack.cu: column n / 16 of tiles, tile of that k tile
        ▼
    tile             k16 step p % 128 / 16, lane 4 · (n % 8) + p % 16 / 4,
        │            register a[n % 16 / 8 + 2 · (p % 4 / 2)], half p % 2; csrc/weight_tile.h draws the words
        ▼
    shared memory    cp.async ring of whole tiles (gemm_m16.h, gemm_m64.cu)
        │            TileFragment::load: a lane's words, 16 bytes at a time
        ▼
    A fragment       TileCodes::unpack: 1024 + code as float16 in a[0 … 3]; then mma.m16n8k16 (or wgmma)

All tiles of a weight have codes of one width, that of most of its codes: a kernel for several widths would need
registers and shared memory for the widest. Narrower codes are widened, wider ones are cut into digits, each with
its own multiple of the scales, so that the sum of the digits is the number. The tiles of these codes are the
`fine` region, which may have smaller groups than the `main` one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported

TILE_K = 128  # inputs
TILE_N = 16  # outputs

BIT_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (4, 4)}
"""Into which planes the codes of a tile are split, by their width; the lowest bits first."""

ZeroPoints = Literal["half", "none", "table"]
"""Zero points: half of the codes' range, zero, or one for each group and output."""

_ZERO_POINTS: dict[ZeroPoints, int] = {"half": 0, "none": 1, "table": 2}


class WeightParams(ctypes.Structure):
    """The kernels' `MmaWeight`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("fine", "main")),
        *((name, ctypes.c_int) for name in ("fine_k_tiles", "k_tiles", "n_tiles")),
        ("factor", ctypes.c_float),
    )


@dataclass(frozen=True)
class TileLayout:
    """What the tiles of a weight have in common."""

    bits: int
    group_ksteps: int  # k16 steps with one scale: 1, 2, 4 or 8
    fine_ksteps: int  # the same in the fine region
    zero_points: ZeroPoints
    has_mins: bool

    @property
    def num_tables(self) -> int:
        """Numbers of each group and output: scale, perhaps a zero point, perhaps a minimum."""
        return 1 + (self.zero_points == "table") + self.has_mins

    def num_groups(self, fine: bool) -> int:
        """Groups of inputs in a tile."""
        return 8 // (self.fine_ksteps if fine else self.group_ksteps)

    def tile_bytes(self, fine: bool) -> int:
        """Bytes of a tile."""
        return 256 * self.bits + 32 * self.num_tables * self.num_groups(fine)

    @property
    def max_tile_bytes(self) -> int:
        """Bytes of the larger kind of tile."""
        return max(self.tile_bytes(False), self.tile_bytes(True))


@dataclass(frozen=True)
class DigitSpan:
    """Neighbouring k blocks whose codes have the same number of digits."""

    num_digits: int
    k_blocks: int


@dataclass(frozen=True, eq=False)
class TileRegion:
    """Tiles with groups of one size; the digits of a k block are neighbours."""

    tiles: Tensor  # (n_tiles, k_tiles, bytes) uint8
    spans: tuple[DigitSpan, ...]

    @property
    def k_tiles(self) -> int:
        """Tiles of an n16 column."""
        return sum(span.num_digits * span.k_blocks for span in self.spans)


@dataclass(frozen=True, eq=False)
class MmaWeight:
    """A repacked weight."""

    layout: TileLayout
    fine: TileRegion  # codes that had another width; perhaps none
    main: TileRegion
    in_features: int
    out_features: int
    perm: Tensor | None  # (128 · k_blocks,) int32 on the CPU: which input stands there, -1 for padding; None: in order
    factor: float  # of every sum: keeps small float32 scales from vanishing in float16
    bias: Tensor | None  # float16

    @property
    def spans(self) -> tuple[DigitSpan, ...]:
        """Those of both regions, in the order of packed inputs."""
        return self.fine.spans + self.main.spans

    @property
    def k_blocks(self) -> int:
        """Blocks of 128 packed inputs."""
        return sum(span.k_blocks for span in self.spans)

    @property
    def k_tiles(self) -> int:
        """Tiles of an n16 column: k blocks, each as often as its codes have digits."""
        return self.fine.k_tiles + self.main.k_tiles

    @property
    def n_tiles(self) -> int:
        """n16 columns of tiles."""
        return -(-self.out_features // TILE_N)

    @property
    def device(self) -> torch.device:
        """Where the tiles are."""
        return self.main.tiles.device

    @property
    def nbytes(self) -> int:
        """Bytes held, permutation and bias included."""
        held = (self.fine.tiles, self.main.tiles, self.perm, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def params(self) -> WeightParams:
        """The weight as kernels take it."""
        return WeightParams(
            fine=self.fine.tiles.data_ptr(),
            main=self.main.tiles.data_ptr(),
            fine_k_tiles=self.fine.k_tiles,
            k_tiles=self.k_tiles,
            n_tiles=self.n_tiles,
            factor=self.factor,
        )


def tile_defines(layouts: Sequence[TileLayout]) -> dict[str, int]:
    """The -D constants of weight_tile.h for weights that one launch reads; they differ in nothing but the bits."""
    first = layouts[0]
    return {
        "BITS": sum(layout.bits << 4 * place for place, layout in enumerate(layouts)),
        "GROUP_KSTEPS": first.group_ksteps,
        "FINE_KSTEPS": first.fine_ksteps,
        "ZERO_POINTS": _ZERO_POINTS[first.zero_points],
        "HAS_MINS": int(first.has_mins),
        "NUM_WEIGHTS": len(layouts),
    }


def num_digits(bits: int, tile_bits: int, signed: bool) -> int:
    """Into how many digits of `tile_bits` codes of `bits` are cut; signed digits stand for -half … half - 1."""
    if not signed:
        return -(-bits // tile_bits)
    half, low, high, count = 1 << (tile_bits - 1), -(1 << (bits - 1)), (1 << (bits - 1)) - 1, 1
    while low < -half or high >= half:
        low, high, count = (low + half) >> tile_bits, (high + half) >> tile_bits, count + 1
    return count


def pad_to_k_block(perm: Tensor) -> Tensor:
    """Inputs and -1 up to the end of the last k block, int32."""
    return F.pad(perm.to(torch.int32), (0, -len(perm) % TILE_K), value=-1)


def slot_inputs(weight: MmaWeight) -> Tensor:
    """(128 · k_tiles,) which input stands in each slot; -1 for padding."""
    perm = weight.perm
    if perm is None:
        perm = pad_to_k_block(torch.arange(weight.in_features, dtype=torch.int32))
    parts = perm.view(-1, TILE_K).split_with_sizes([span.k_blocks for span in weight.spans])
    return torch.cat(
        [part.repeat_interleave(span.num_digits, 0) for part, span in zip(parts, weight.spans, strict=True)]
    ).flatten()


def unify_groups(weights: Sequence[MmaWeight]) -> list[MmaWeight]:
    """The same weights with groups of one size: scales are repeated where another weight has smaller groups."""
    layouts = [one.layout for one in weights]
    first = layouts[0]
    if any((one.zero_points, one.has_mins) != (first.zero_points, first.has_mins) for one in layouts):
        raise Unsupported("matrices whose zero points or minimums are kept in different ways")
    group = min(one.group_ksteps for one in layouts)
    fine = min([one.layout.fine_ksteps for one in weights if one.fine.spans], default=group)
    return [
        replace(
            one,
            layout=replace(one.layout, group_ksteps=group, fine_ksteps=fine),
            fine=_split_groups(one.fine, one.layout, one.layout.fine_ksteps, fine),
            main=_split_groups(one.main, one.layout, one.layout.group_ksteps, group),
        )
        for one in weights
    ]


def _split_groups(region: TileRegion, layout: TileLayout, old: int, new: int) -> TileRegion:
    """The region with groups of `new` k16 steps, at most the `old` ones."""
    if old == new or not region.spans:
        return region
    code_bytes = 256 * layout.bits
    codes, tables = region.tiles[..., :code_bytes], region.tiles[..., code_bytes:]
    grid = tables.reshape(*tables.shape[:2], layout.num_tables, 8 // old, 32)
    split = grid.repeat_interleave(old // new, -2)
    return replace(region, tiles=torch.cat([codes, split.flatten(-3)], -1))
