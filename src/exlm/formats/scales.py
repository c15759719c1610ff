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

    def pick(self, groups: Tensor) -> Self:
        """These rows of the table, in this order."""
        ...

    def columns(self, index: Tensor) -> Self:
        """These columns of the table, in this order."""
        ...

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same table with every tensor passed through `change` (to move it to a device)."""
        ...


@dataclass(frozen=True, eq=False)
class Direct:
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

    def pick(self, groups: Tensor) -> Direct:
        """These rows."""
        return Direct(self.values[groups])

    def columns(self, index: Tensor) -> Direct:
        """These columns."""
        return Direct(self.values[:, index])

    def map(self, change: Callable[[Tensor], Tensor]) -> Direct:
        """Every tensor changed."""
        return Direct(change(self.values))


@dataclass(frozen=True, eq=False)
class Squared:
    """EXL2: (code + 1)² / 256 of the group's largest factor, rounded to float16 twice on the way.

    The small product is often subnormal, and the quantiser chose its codes knowing the rounded value: the
    roundings are part of the format.
    """

    codes: Tensor  # (groups, columns) uint8, 0 to 15
    maxima: Tensor  # (groups,) float16, as the file has it

    @property
    def groups(self) -> int:
        """Rows of the table."""
        return int(self.codes.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything held."""
        return (self.codes, self.maxima)

    def expand(self) -> Tensor:
        """(groups, columns) float16."""
        unit = (self.maxima.float() / 256).half()
        return self.codes.float().add_(1).square_().mul_(unit.float()[:, None]).half()

    def pick(self, groups: Tensor) -> Squared:
        """These rows."""
        return Squared(self.codes[groups], self.maxima[groups])

    def columns(self, index: Tensor) -> Squared:
        """These columns."""
        return Squared(self.codes[:, index], self.maxima)

    def map(self, change: Callable[[Tensor], Tensor]) -> Squared:
        """Every tensor changed."""
        return Squared(change(self.codes), change(self.maxima))


@dataclass(frozen=True, eq=False)
class Nested:
    """GGUF's K family: a small whole number times the float of the super-group it belongs to, in float32."""

    codes: Tensor  # (groups, columns) int8 or uint8
    supers: Tensor  # (super-groups, columns) float16
    parents: Tensor  # (groups,) which super-group

    @property
    def groups(self) -> int:
        """Rows of the table."""
        return int(self.codes.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything held."""
        return (self.codes, self.supers, self.parents)

    def expand(self) -> Tensor:
        """(groups, columns) float32."""
        return self.supers.float()[self.parents] * self.codes.float()

    def pick(self, groups: Tensor) -> Nested:
        """These rows; super-groups nobody needs any more are dropped."""
        used, parents = torch.unique(self.parents[groups], return_inverse=True)
        return Nested(self.codes[groups], self.supers[used], parents.to(self.parents.dtype))

    def columns(self, index: Tensor) -> Nested:
        """These columns."""
        return Nested(self.codes[:, index], self.supers[:, index], self.parents)

    def map(self, change: Callable[[Tensor], Tensor]) -> Nested:
        """Every tensor changed."""
        return Nested(change(self.codes), change(self.supers), change(self.parents))
