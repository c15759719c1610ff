"""The factor of each group of rows in each column, in the three ways formats store it.

All three answer `expand()` with a (groups, columns) table in the precision the format defines; the two-level
ones stay small in memory, and keep exactly what the file said so that it can be written back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


class Scales(Protocol):
    """A table of factors."""

    @property
    def groups(self) -> int:
        """Rows of the table."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything held."""
        ...

    def expand(self) -> Tensor:
        """(groups, columns), float16 or float32 as the format defines."""
        ...

    def take_groups(self, groups: Tensor) -> Self:
        """These rows of the table, in this order."""
        ...

    def take_columns(self, index: Tensor) -> Self:
        """These columns of the table, in this order."""
        ...

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same table with every tensor passed through `change` (to move it to a device)."""
        ...


@dataclass(frozen=True, eq=False)
class PlainScales:
    """Factors as they are."""

    values: Tensor  # (groups, columns)

    @property
    def groups(self) -> int:
        """Rows of the table."""
        return int(self.values.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything held."""
        return (self.values,)

    def expand(self) -> Tensor:
        """The values."""
        return self.values

    def take_groups(self, groups: Tensor) -> PlainScales:
        """These rows."""
        return PlainScales(self.values[groups])

    def take_columns(self, index: Tensor) -> PlainScales:
        """These columns."""
        return PlainScales(self.values[:, index])

    def map(self, change: Callable[[Tensor], Tensor]) -> PlainScales:
        """Every tensor changed."""
        return PlainScales(change(self.values))


@dataclass(frozen=True, eq=False)
class Exl2Scales:
    """EXL2: (code + 1)² / 256 of the group's largest factor, rounded to float16 twice on the way.

    The small product is often subnormal, and the quantiser chose its codes knowing the rounded value: the
    roundings are part of the format.
    """

    codes: Tensor  # (groups, columns) uint8, 0 to 15
    group_max: Tensor  # (groups,) float16, as the file has it

    @property
    def groups(self) -> int:
        """Rows of the table."""
        return int(self.codes.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything held."""
        return (self.codes, self.group_max)

    def expand(self) -> Tensor:
        """(groups, columns) float16."""
        unit = (self.group_max.float() / 256).half()
        return self.codes.float().add_(1).square_().mul_(unit.float()[:, None]).half()

    def take_groups(self, groups: Tensor) -> Exl2Scales:
        """These rows."""
        return Exl2Scales(self.codes[groups], self.group_max[groups])

    def take_columns(self, index: Tensor) -> Exl2Scales:
        """These columns."""
        return Exl2Scales(self.codes[:, index], self.group_max)

    def map(self, change: Callable[[Tensor], Tensor]) -> Exl2Scales:
        """Every tensor changed."""
        return Exl2Scales(change(self.codes), change(self.group_max))


@dataclass(frozen=True, eq=False)
class KQuantScales:
    """GGUF's K family: a small whole number times the float of the super-group it belongs to, in float32."""

    codes: Tensor  # (groups, columns) int8 or uint8
    superblock_scales: Tensor  # (super-groups, columns) float16
    superblock_of_group: Tensor  # (groups,) which super-group

    @property
    def groups(self) -> int:
        """Rows of the table."""
        return int(self.codes.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything held."""
        return (self.codes, self.superblock_scales, self.superblock_of_group)

    def expand(self) -> Tensor:
        """(groups, columns) float32."""
        return self.superblock_scales.float()[self.superblock_of_group] * self.codes.float()

    def take_groups(self, groups: Tensor) -> KQuantScales:
        """These rows; super-groups nobody needs any more are dropped."""
        used, parents = torch.unique(self.superblock_of_group[groups], return_inverse=True)
        return KQuantScales(
            self.codes[groups], self.superblock_scales[used], parents.to(self.superblock_of_group.dtype)
        )

    def take_columns(self, index: Tensor) -> KQuantScales:
        """These columns."""
        return KQuantScales(self.codes[:, index], self.superblock_scales[:, index], self.superblock_of_group)

    def map(self, change: Callable[[Tensor], Tensor]) -> KQuantScales:
        """Every tensor changed."""
        return KQuantScales(
            change(self.codes), change(self.superblock_scales), change(self.superblock_of_group)
        )
