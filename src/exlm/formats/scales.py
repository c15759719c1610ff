"""Scales: the factor of each group of inputs in each column, in the three ways in which formats store it.

`expand()` gives a (groups, columns) table in the precision that the format defines. The two-level kinds stay
small in memory, and keep what the file holds exactly, so that it can be written back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


class Scales(Protocol):
    """A (groups, columns) table of factors; offsets (`Segment.minimum`) are stored the same way."""

    @property
    def description(self) -> str:
        """The kind in words, for errors."""
        ...

    @property
    def groups(self) -> int:
        """Number of groups: rows of the table."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors held."""
        ...

    def expand(self) -> Tensor:
        """(groups, columns), float16 or float32 as the format defines."""
        ...

    def take_groups(self, groups: Tensor) -> Self:
        """The table of these groups, in this order."""
        ...

    def take_columns(self, index: Tensor) -> Self:
        """The table of these columns, in this order."""
        ...

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same table with every tensor passed through `change` (to move it to a device)."""
        ...


@dataclass(frozen=True, eq=False)
class PlainScales:
    """Factors stored as they are: GPTQ, AWQ, and GGUF's types with one level of scales."""

    values: Tensor  # (groups, columns)

    @property
    def description(self) -> str:
        """`plain float16 scales`."""
        return f"plain {str(self.values.dtype).removeprefix('torch.')} scales"

    @property
    def groups(self) -> int:
        """Number of groups: rows of the table."""
        return int(self.values.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors held."""
        return (self.values,)

    def expand(self) -> Tensor:
        """The values."""
        return self.values

    def take_groups(self, groups: Tensor) -> PlainScales:
        """These groups."""
        return PlainScales(self.values[groups])

    def take_columns(self, index: Tensor) -> PlainScales:
        """These columns."""
        return PlainScales(self.values[:, index])

    def map(self, change: Callable[[Tensor], Tensor]) -> PlainScales:
        """The same scales with `change` applied to every tensor."""
        return PlainScales(change(self.values))


@dataclass(frozen=True, eq=False)
class Exl2Scales:
    """EXL2: (code + 1)² · (group_max / 256), both factors and the product rounded to float16.

    The product is often subnormal, and the quantiser chose its codes for the rounded value: the roundings are
    part of the format.
    """

    codes: Tensor  # (groups, columns) uint8, 0 to 15
    group_max: Tensor  # (groups,) float16, as the file has it

    description = "squared 4-bit scales"

    @property
    def groups(self) -> int:
        """Number of groups: rows of the table."""
        return int(self.codes.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors held."""
        return (self.codes, self.group_max)

    def expand(self) -> Tensor:
        """(groups, columns) float16."""
        unit = (self.group_max.float() / 256).half()
        return self.codes.float().add_(1).square_().mul_(unit.float()[:, None]).half()

    def take_groups(self, groups: Tensor) -> Exl2Scales:
        """These groups."""
        return Exl2Scales(self.codes[groups], self.group_max[groups])

    def take_columns(self, index: Tensor) -> Exl2Scales:
        """These columns."""
        return Exl2Scales(self.codes[:, index], self.group_max)

    def map(self, change: Callable[[Tensor], Tensor]) -> Exl2Scales:
        """The same scales with `change` applied to every tensor."""
        return Exl2Scales(change(self.codes), change(self.group_max))


@dataclass(frozen=True, eq=False)
class KQuantScales:
    """GGUF's K-quants: a small integer per group times the float16 scale of its super-block, in float32."""

    codes: Tensor  # (groups, columns) int8 or uint8
    superblock_scales: Tensor  # (super-blocks, columns) float16
    superblock_of_group: Tensor  # (groups,) int32: the super-block of each group

    description = "two-level scales"

    @property
    def groups(self) -> int:
        """Number of groups: rows of the table."""
        return int(self.codes.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors held."""
        return (self.codes, self.superblock_scales, self.superblock_of_group)

    def expand(self) -> Tensor:
        """(groups, columns) float32."""
        return self.superblock_scales.float()[self.superblock_of_group] * self.codes.float()

    def take_groups(self, groups: Tensor) -> KQuantScales:
        """These groups; super-blocks that none of them uses are dropped."""
        used, parents = torch.unique(self.superblock_of_group[groups], return_inverse=True)
        return KQuantScales(
            self.codes[groups], self.superblock_scales[used], parents.to(self.superblock_of_group.dtype)
        )

    def take_columns(self, index: Tensor) -> KQuantScales:
        """These columns."""
        return KQuantScales(self.codes[:, index], self.superblock_scales[:, index], self.superblock_of_group)

    def map(self, change: Callable[[Tensor], Tensor]) -> KQuantScales:
        """The same scales with `change` applied to every tensor."""
        return KQuantScales(
            change(self.codes), change(self.superblock_scales), change(self.superblock_of_group)
        )
