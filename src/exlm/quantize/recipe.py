"""How the rows of one matrix are shared among widths: a recipe, the groups it makes and the bits they take.

A recipe knows no numbers of the matrix. Which recipe a matrix gets is decided in `allocate`, the codes in
`solve`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ..errors import InputError
from ..formats.exl2 import ALIGNMENT, BIT_WIDTHS
from ..spec.weight_roles import Matrix


class Group(NamedTuple):
    """Neighbouring stored rows that share a width and a scale in each column."""

    bits: int
    rows: int


class BitShare(NamedTuple):
    """A share of the rows, in groups of at most `size`."""

    bits: int
    share: float
    group_size: int


@dataclass(frozen=True)
class Recipe:
    """Parts from the widest to the narrowest; their shares sum to one."""

    parts: tuple[BitShare, ...]

    def __post_init__(self) -> None:
        """Refuse what EXL2 cannot say."""
        widths = [part.bits for part in self.parts]
        if not widths or widths != sorted(set(widths), reverse=True) or not set(widths) <= set(BIT_WIDTHS):
            raise InputError(f"A recipe needs descending widths out of {BIT_WIDTHS}, found {widths}.")
        sizes = [part.group_size for part in self.parts]
        if any(size < ALIGNMENT or size % ALIGNMENT for size in sizes):
            raise InputError(f"Groups have a multiple of {ALIGNMENT} rows, found {sizes}.")
        shares = [part.share for part in self.parts]
        if not (all(share >= 0 for share in shares) and abs(sum(shares) - 1) <= 1e-6):  # false for NaN too
            raise InputError(f"Shares must sum to one, found {shares}.")

    def __str__(self) -> str:
        widths = "|".join(str(part.bits) for part in self.parts)
        sizes = ",".join(dict.fromkeys(str(part.group_size) for part in self.parts))
        shares = "|".join(f"{part.share:g}" for part in self.parts)
        return f"g{sizes} {widths}" + (f" @ {shares}" if len(self.parts) > 1 else "")

    def groups(self, rows: int) -> tuple[Group, ...]:
        """The groups of a matrix of so many rows, in stored order; the last may be shorter."""
        return _groups_of_rows(self, rows)

    def bits(self, matrix: Matrix) -> int:
        """Stored bits of a matrix: codes, scales, the table of groups, the order and the bias."""
        groups, columns = self.groups(matrix.in_features), padded_columns(matrix.out_features)
        codes = sum(group.rows * group.bits for group in groups) * columns
        bias = 16 * matrix.out_features if matrix.bias else 0
        return codes + len(groups) * (16 + 32 + 4 * columns) + 32 * matrix.in_features + bias

    def to_json(self) -> dict[str, Any]:
        """As measurement files have it."""
        return {
            "group_size": {str(part.bits): part.group_size for part in self.parts},
            "bits": [part.bits for part in self.parts],
            "bits_prop": [part.share for part in self.parts],
            "scale_bits": 4,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: str) -> Recipe:
        """From a measurement file."""
        try:
            sizes = raw["group_size"]
            pairs = zip(raw["bits"], raw["bits_prop"], strict=True)
            parts = tuple(BitShare(int(b), float(share), int(sizes[str(b)])) for b, share in pairs)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError(
                f"{where}: not a recipe of widths, shares and group sizes ({error!r})."
            ) from error
        return cls(parts)


@cache
def _groups_of_rows(made: Recipe, rows: int) -> tuple[Group, ...]:
    """Asked again and again: many matrices have as many rows."""
    if rows < ALIGNMENT or rows % ALIGNMENT:
        raise InputError(f"EXL2 holds matrices of a multiple of {ALIGNMENT} inputs, found {rows}.")
    groups: list[Group] = []
    left = rows
    for part in made.parts:
        count = -(-min(rows * part.share, left) // part.group_size)
        for _ in range(int(count)):
            groups.append(Group(part.bits, min(part.group_size, left)))
            left -= groups[-1].rows
    if left:  # shares whose sum was rounded down
        groups.append(Group(made.parts[-1].bits, left))
    return tuple(groups)


def padded_columns(columns: int) -> int:
    """Columns as they are stored."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def make_recipe(sizes: int | Sequence[int], *parts: tuple[int, float]) -> Recipe:
    """A recipe in short: group sizes, then pairs of a width and a share."""
    each = [sizes] * len(parts) if isinstance(sizes, int) else sizes
    return Recipe(tuple(BitShare(b, share, size) for (b, share), size in zip(parts, each, strict=True)))


HEAD_RECIPES: dict[int, Recipe] = {
    2: make_recipe(32, (3, 0.68), (2, 0.32)),
    3: make_recipe(32, (4, 0.15), (3, 0.85)),
    4: make_recipe(32, (5, 0.38), (4, 0.62)),
    5: make_recipe((128, 32), (6, 0.15), (5, 0.85)),
    6: make_recipe((128, 32), (8, 0.15), (6, 0.85)),
    8: make_recipe(64, (8, 1.0)),
}
"""What the head gets, by the bits asked for: widths near each other, and small groups, harm it least."""
