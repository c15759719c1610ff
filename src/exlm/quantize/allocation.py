"""Bit allocation: the mixtures of bit widths that a matrix may be stored in, and which of them each one gets.

A `Recipe` is EXL2's parameters of one matrix (exllamav2's `QParams`): shares of the rows, their widths and
group sizes. A `CandidateSet` lists the recipes that one matrix (in exllamav2's measurements, one half of a
layer) may get, each with its stored bits and its KL cost. `minimize_kl` and `minimize_bits` choose one
candidate of each set, on the lower convex hulls of cost over bits. Pure numbers, no tensors; the same input
always gives the same allocation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from .. import spec
from ..errors import InputError
from ..formats.exl2 import ALIGNMENT, BIT_WIDTHS
from ..spec.model import Matrix

GROUP_SIZES = (32, 64, 128)

BIT_PAIRS = ((3, 2), (4, 3), (5, 4), (6, 5), (8, 6))
PAIR_SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
"""Shares of the wider of two widths."""

BIT_TRIPLES = ((4, 3, 2), (5, 3, 2), (6, 3, 2), (5, 4, 3), (6, 4, 3), (8, 4, 3), (6, 5, 4), (8, 5, 4), (8, 6, 5))
TRIPLE_SHARES = ((0.05, 0.15), (0.1, 0.3), (0.05, 0.45), (0.15, 0.5))
"""Shares of the widest and the middle of three widths."""


def quantized_matrices(model: spec.Model) -> Iterator[Matrix]:
    """The matrices that bits are allocated to: those of the layers but for the ones that stay floats."""
    for i, layer in enumerate(model.layers):
        for matrix in layer.matrices(model.hidden):
            if not _stays_float(layer, matrix):
                yield matrix._replace(role=f"layers.{i}.{matrix.role}")


def _stays_float(layer: spec.Layer, matrix: Matrix) -> bool:
    """Whether a matrix has one output for each expert, each head or each token.

    It is small, and one of its numbers decides about a whole expert or a whole state.
    """
    if matrix.role == "delta.a":
        return isinstance(layer.mixer, spec.DeltaNet) and layer.mixer.decay == "head"
    return matrix.role in ("mlp.router", "mlp.shared_gate", "delta.b")


# -- recipes ---------------------------------------------------------------------------------------


class QuantGroup(NamedTuple):
    """Consecutive stored rows that share a width, and one scale per column."""

    bits: int
    rows: int


class BitShare(NamedTuple):
    """A share of a matrix's rows, stored in groups of at most `group_size` rows."""

    bits: int
    share: float
    group_size: int


@dataclass(frozen=True)
class Recipe:
    """Shares of the rows from the widest to the narrowest; they sum to one."""

    parts: tuple[BitShare, ...]

    def __post_init__(self) -> None:
        """Refuse what EXL2 cannot store."""
        widths = [part.bits for part in self.parts]
        if not widths or widths != sorted(set(widths), reverse=True) or not set(widths) <= set(BIT_WIDTHS):
            raise InputError(f"A recipe needs descending widths out of {BIT_WIDTHS}, found {widths}.")
        sizes = [part.group_size for part in self.parts]
        if any(size < ALIGNMENT or size % ALIGNMENT for size in sizes):
            raise InputError(f"Group sizes must be multiples of {ALIGNMENT} rows, found {sizes}.")
        shares = [part.share for part in self.parts]
        if not (all(share >= 0 for share in shares) and abs(sum(shares) - 1) <= 1e-6):  # false for NaN too
            raise InputError(f"Shares must sum to one, found {shares}.")

    def __str__(self) -> str:
        widths = "|".join(str(part.bits) for part in self.parts)
        sizes = ",".join(dict.fromkeys(str(part.group_size) for part in self.parts))
        shares = "|".join(f"{part.share:g}" for part in self.parts)
        return f"g{sizes} {widths}" + (f" @ {shares}" if len(self.parts) > 1 else "")

    def groups(self, rows: int) -> tuple[QuantGroup, ...]:
        """The groups of a matrix with so many rows, in stored order; the last may be shorter."""
        return _groups_of_rows(self, rows)

    def bits(self, matrix: Matrix) -> int:
        """Stored bits of a matrix: codes, scales, group table, row permutation and bias."""
        groups = self.groups(matrix.in_features)
        columns = -(-matrix.out_features // ALIGNMENT) * ALIGNMENT  # as they are stored
        codes = sum(group.rows * group.bits for group in groups) * columns
        bias = 16 * matrix.out_features if matrix.bias else 0
        return codes + len(groups) * (16 + 32 + 4 * columns) + 32 * matrix.in_features + bias

    def to_json(self) -> dict[str, Any]:
        """As in exllamav2's measurement.json."""
        return {
            "group_size": {str(part.bits): part.group_size for part in self.parts},
            "bits": [part.bits for part in self.parts],
            "bits_prop": [part.share for part in self.parts],
            "scale_bits": 4,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: str) -> Recipe:
        """From exllamav2's measurement.json; errors name `where`."""
        try:
            sizes = raw["group_size"]
            pairs = zip(raw["bits"], raw["bits_prop"], strict=True)
            parts = tuple(BitShare(int(b), float(share), int(sizes[str(b)])) for b, share in pairs)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError(f"{where}: not a recipe of widths, shares and group sizes ({error!r}).") from error
        return cls(parts)


@cache
def _groups_of_rows(recipe: Recipe, rows: int) -> tuple[QuantGroup, ...]:
    """Cached because many matrices have the same number of rows."""
    if rows < ALIGNMENT or rows % ALIGNMENT:
        raise InputError(f"EXL2 stores matrices with a multiple of {ALIGNMENT} inputs, found {rows}.")
    groups: list[QuantGroup] = []
    left = rows
    for part in recipe.parts:
        count = -(-min(rows * part.share, left) // part.group_size)
        for _ in range(int(count)):
            groups.append(QuantGroup(part.bits, min(part.group_size, left)))
            left -= groups[-1].rows
    if left:  # the shares add up to a little less than one
        groups.append(QuantGroup(recipe.parts[-1].bits, left))
    return tuple(groups)


def make_recipe(sizes: int | Sequence[int], *parts: tuple[int, float]) -> Recipe:
    """A recipe in short: the group size (of all parts, or of each), then pairs of a width and a share."""
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
"""The head's recipe by `head_bits`: neighbouring widths and small groups cost it the least KL."""


@cache
def candidate_recipes() -> tuple[Recipe, ...]:
    """Every recipe that a matrix of a layer may get."""
    recipes = []
    for size in GROUP_SIZES:
        recipes += [make_recipe(size, (width, 1.0)) for width in BIT_WIDTHS]
        for high, low in BIT_PAIRS:
            recipes += [make_recipe(size, (high, share), (low, 1 - share)) for share in PAIR_SHARES]
        for high, middle, low in BIT_TRIPLES:
            for first, second in TRIPLE_SHARES:
                recipes.append(make_recipe(size, (high, first), (middle, second), (low, 1 - first - second)))
    return tuple(recipes)


def min_layer_bits(model: spec.Model) -> int:
    """The fewest bits that the matrices of all layers can take together."""
    return sum(min(recipe.bits(matrix) for recipe in candidate_recipes()) for matrix in quantized_matrices(model))


# -- allocation ------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """One way to store a matrix, or matrices that must be chosen together."""

    bits: int
    kl_cost: float  # expected KL divergence from the float model, nats per token
    recipes: Mapping[str, Recipe]  # by role


CandidateSet = Sequence[Candidate]
"""All ways to store the same matrix or matrices."""


class Allocation(NamedTuple):
    """One candidate of each set."""

    chosen: tuple[Candidate, ...]

    @property
    def bits(self) -> int:
        """Bits of all of them."""
        return sum(candidate.bits for candidate in self.chosen)

    @property
    def kl_cost(self) -> float:
        """KL cost of all of them; costs add up to second order."""
        return sum(candidate.kl_cost for candidate in self.chosen)


def minimize_kl(candidate_sets: Sequence[CandidateSet], budget: int, weights: int) -> Allocation:
    """The least KL cost for at most `budget` bits; `weights`, their number, is for the error message.

    Greedy along the convex hulls, by KL cost saved per bit; what is then left of the budget goes to single
    candidates off the hulls. `InputError` if even the smallest ones take more than the budget.
    """
    hulls = [lower_hull(candidates) for candidates in candidate_sets]
    positions = [0] * len(hulls)
    used = sum(hull[0].bits for hull in hulls)
    if used > budget:
        raise InputError(
            f"{budget / weights:.3f} bits a weight cannot be reached: the smallest this model can be is "
            f"{used / weights:.3f}, scales and row permutations included. Ask for more bits."
        )
    exhausted: set[int] = set()
    for number, step in _hull_steps(hulls):
        more = hulls[number][step + 1].bits - hulls[number][step].bits
        if number in exhausted or used + more > budget:
            exhausted.add(number)
            continue
        used, positions[number] = used + more, step + 1
    chosen = list(_allocation_at(hulls, positions).chosen)
    return Allocation(tuple(_spend_rest(candidate_sets, chosen, budget - used)))


def minimize_bits(candidate_sets: Sequence[CandidateSet], max_kl: float) -> Allocation:
    """The fewest bits whose KL cost is at most `max_kl`; `InputError` if no allocation is that good."""
    hulls = [lower_hull(candidates) for candidates in candidate_sets]
    positions = [0] * len(hulls)
    cost = sum(hull[0].kl_cost for hull in hulls)
    for number, step in _hull_steps(hulls):
        if cost <= max_kl and _allocation_at(hulls, positions).kl_cost <= max_kl:  # a running sum drifts
            break
        cost += hulls[number][step + 1].kl_cost - hulls[number][step].kl_cost
        positions[number] = step + 1
    found = _allocation_at(hulls, positions)
    if found.kl_cost > max_kl:
        raise InputError(
            f"A divergence of {max_kl:g} cannot be reached: at the most bits EXL2 has, about "
            f"{found.kl_cost:.2g} is expected. Allow more."
        )
    return found


def min_kl_cost(candidate_sets: Sequence[CandidateSet]) -> float:
    """The KL cost with as many bits as there can be."""
    return sum(lower_hull(candidates)[-1].kl_cost for candidates in candidate_sets)


def lower_hull(candidates: CandidateSet) -> list[Candidate]:
    """The lower convex hull of KL cost over bits, from few bits to many."""
    hull: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.bits, one.kl_cost)):
        if hull and candidate.kl_cost >= hull[-1].kl_cost:
            continue
        while len(hull) > 1 and _saved_per_bit(hull[-2], hull[-1]) <= _saved_per_bit(hull[-2], candidate):
            hull.pop()
        hull.append(candidate)
    return hull


def _allocation_at(hulls: Sequence[Sequence[Candidate]], positions: Sequence[int]) -> Allocation:
    return Allocation(tuple(hull[at] for hull, at in zip(hulls, positions, strict=True)))


def _saved_per_bit(a: Candidate, b: Candidate) -> float:
    """KL cost saved by each bit of the step from a to b."""
    return (a.kl_cost - b.kl_cost) / (b.bits - a.bits)


def _hull_steps(hulls: Sequence[Sequence[Candidate]]) -> list[tuple[int, int]]:
    """(number of the set, step along its hull), the most KL saved per bit first; ties in the sets' order."""
    steps = [
        (-_saved_per_bit(hull[i], hull[i + 1]), n, i) for n, hull in enumerate(hulls) for i in range(len(hull) - 1)
    ]
    return [(number, step) for _, number, step in sorted(steps)]


def _spend_rest(candidate_sets: Sequence[CandidateSet], chosen: list[Candidate], left: int) -> list[Candidate]:
    """Spend the `left` bits, each time on the affordable candidate that saves the most KL."""
    while True:
        best, where = 0.0, None
        for number, candidates in enumerate(candidate_sets):
            for candidate in candidates:
                saved = chosen[number].kl_cost - candidate.kl_cost
                if saved > best and candidate.bits - chosen[number].bits <= left:
                    best, where = saved, (number, candidate)
        if where is None:
            return chosen
        number, candidate = where
        left -= candidate.bits - chosen[number].bits
        chosen[number] = candidate
