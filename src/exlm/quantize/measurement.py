"""What is known of every matrix before bits are given out: the harm of each width, row block by row block.

Harm is the expected divergence from the float model's answers, in nats a token, to second order. A
measurement is made once and serves any target; the files of the old library's converter are read too. How it
is made is said in `measure`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from .. import spec
from ..errors import CheckpointError, InputError
from ..formats.exl2 import BIT_WIDTHS
from ..spec.tensor_names import TensorNames
from ..spec.weight_roles import Matrix, matrices
from .recipe import Group, Recipe, make_recipe

BLOCK_ROWS = 32
"""Rows whose harm is summed up."""

GROUP_SIZES = (32, 64, 128)
BASE_GROUP_SIZE = 64
PROBE_BITS = (2, 3, 4)
"""Widths whose error tells what other group sizes are worth; wider ones are as the widest of these."""

BIT_PAIRS = ((3, 2), (4, 3), (5, 4), (6, 5), (8, 6))
BIT_TRIPLES = (
    (4, 3, 2),
    (5, 3, 2),
    (6, 3, 2),
    (5, 4, 3),
    (6, 4, 3),
    (8, 4, 3),
    (6, 5, 4),
    (8, 5, 4),
    (8, 6, 5),
)
PAIR_SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
TRIPLE_SHARES = ((0.05, 0.15), (0.1, 0.3), (0.05, 0.45), (0.15, 0.5))


class Choice(NamedTuple):
    """One way to store what a slot holds."""

    bits: int
    kl_cost: float
    recipes: Mapping[str, Recipe]  # by role


Slot = Sequence[Choice]


@dataclass(frozen=True)
class Profile:
    """One matrix: for each width, the harm of every block of rows in stored order, in groups of 64.

    `sizes` has, for some widths, the factor by which each group size changes it.
    """

    kl_costs: Mapping[int, Sequence[float]]
    group_size_factors: Mapping[int, Mapping[int, float]]

    def kl_cost(self, group: Group, block: int) -> float:
        """What a group that begins with this block of rows does to the model's answers."""
        factors = self.group_size_factors[
            min(self.group_size_factors, key=lambda width: abs(width - group.bits))
        ]
        factor = factors[min(factors, key=lambda size: abs(size - group.rows))]
        return factor * sum(self.kl_costs[group.bits][block : block + group.rows // BLOCK_ROWS])

    def to_json(self) -> dict[str, Any]:
        """As files have it."""
        sizes = {str(width): _str_keys(factors) for width, factors in self.group_size_factors.items()}
        return {"harms": {str(width): list(harm) for width, harm in self.kl_costs.items()}, "sizes": sizes}

    @classmethod
    def from_json(cls, raw: Any) -> Profile:
        """Out of a file; one of the first version has factors of group sizes for all widths together."""
        harms = {int(width): tuple(map(float, harm)) for width, harm in raw["harms"].items()}
        sizes = raw["sizes"]
        if not any(isinstance(one, dict) for one in sizes.values()):
            sizes = {PROBE_BITS[0]: sizes}
        return cls(
            harms, {int(w): {int(size): float(f) for size, f in one.items()} for w, one in sizes.items()}
        )


@dataclass(frozen=True)
class Measurement:
    """Every matrix of a model's layers, in slots that each get one choice."""

    slots: tuple[Slot, ...]
    profiles: Mapping[str, Profile]  # by role; empty if it comes from another program

    @classmethod
    def from_profiles(cls, profiles: Mapping[str, Profile], model: spec.Model) -> Measurement:
        """From what was measured."""
        return cls(tuple(_slot_choices(m, profiles[m.role]) for m in quantized_matrices(model)), profiles)

    def save(self, path: Path) -> None:
        """Write it for other targets."""
        table = {role: profile.to_json() for role, profile in self.profiles.items()}
        text = json.dumps({"exlm_measurement": 2, "matrices": table}) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"{path}: the measurement could not be written ({error}). Run the same command again with "
                "another place for it: it goes on from here."
            ) from error

    @classmethod
    def load(cls, path: Path, model: spec.Model) -> Measurement:
        """Read a measurement of this model: ours, or the old converter's measurement.json."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: not a measurement that can be read ({error}).") from error
        if isinstance(raw, dict) and isinstance(raw.get("measurement"), dict):
            return cls(tuple(_exllamav2_slots(raw["measurement"], model, path)), {})
        if not isinstance(raw, dict) or raw.get("exlm_measurement") not in (1, 2):
            raise InputError(f"{path}: expected a measurement of exlm or a measurement.json, found neither.")
        wanted = {matrix.role: matrix for matrix in quantized_matrices(model)}
        table = raw.get("matrices")
        if not isinstance(table, dict):
            raise InputError(f"{path}: expected what was measured in `matrices`, found {table!r:.80}.")
        found = {role: parse_profile(one, path, role) for role, one in table.items()}
        if found.keys() != wanted.keys():
            odd = sorted(found.keys() ^ wanted.keys())[0]
            raise InputError(f"{path} was made for another model: {odd} is in only one of the two.")
        for role, profile in found.items():
            blocks, have = wanted[role].in_features // BLOCK_ROWS, {len(h) for h in profile.kl_costs.values()}
            if have != {blocks}:
                raise InputError(f"{path}: {role} has {blocks} blocks of rows, the measurement {have}.")
        return cls.from_profiles(found, model)


def quantized_matrices(model: spec.Model) -> Iterator[Matrix]:
    """The matrices whose bits are given out: those of the layers, without routers."""
    for matrix in matrices(model):
        if matrix.role != "head" and not matrix.role.endswith(".router"):
            yield matrix


@cache
def candidate_recipes() -> tuple[Recipe, ...]:
    """Everything a matrix may get."""
    return tuple(_generate_recipes())


def min_layer_bits(model: spec.Model) -> int:
    """The fewest bits that the matrices of a model's layers can take."""
    return sum(min(made.bits(matrix) for made in candidate_recipes()) for matrix in quantized_matrices(model))


def _generate_recipes() -> Iterator[Recipe]:
    for size in GROUP_SIZES:
        for width in BIT_WIDTHS:
            yield make_recipe(size, (width, 1.0))
        for high, low in BIT_PAIRS:
            for share in PAIR_SHARES:
                yield make_recipe(size, (high, share), (low, 1 - share))
        for high, middle, low in BIT_TRIPLES:
            for first, second in TRIPLE_SHARES:
                yield make_recipe(size, (high, first), (middle, second), (low, 1 - first - second))


def _slot_choices(matrix: Matrix, profile: Profile) -> Slot:
    """Every distinct way to store one matrix."""
    harm = cache(profile.kl_cost)  # recipes share most of their groups
    seen: dict[tuple[Group, ...], Choice] = {}
    for made in candidate_recipes():
        groups = made.groups(matrix.in_features)
        if groups not in seen:
            total, block = 0.0, 0
            for group in groups:
                total += harm(group, block)
                block += group.rows // BLOCK_ROWS
            seen[groups] = Choice(made.bits(matrix), total, {matrix.role: made})
    return tuple(seen.values())


def parse_profile(raw: Any, path: Path, role: str) -> Profile:
    """One matrix's profile out of a file; `InputError` if it is not what `to_json` gives."""
    try:
        found = Profile.from_json(raw)
        if (
            set(found.kl_costs) != set(BIT_WIDTHS)
            or not found.group_size_factors
            or not all(found.group_size_factors.values())
        ):
            raise ValueError(f"widths {sorted(found.kl_costs)}, group sizes {found.group_size_factors}")
        factors = chain.from_iterable(one.values() for one in found.group_size_factors.values())
        if not all(map(math.isfinite, chain(factors, *found.kl_costs.values()))):
            raise ValueError("a harm that is no finite number")
        return found
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path}: {role} is not measured as it should be ({error!r}).") from error


def _str_keys(table: Mapping[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in table.items()}


def _exllamav2_slots(table: Mapping[str, Any], model: spec.Model, path: Path) -> Iterator[Slot]:
    """The old converter's slots: the attention and the MLP of each layer, error relative to the stream."""
    for i, layer in enumerate(model.layers):
        moe = isinstance(layer.mlp, spec.Moe)
        halves = {"attn": "self_attn", "mlp": "block_sparse_moe" if moe else "mlp"}
        parallel = _find_by_suffix(table, f"layers.{i}.parallel_decoder")
        for half, name in halves.items():
            raw = (
                parallel.get(half)
                if isinstance(parallel, dict)
                else _find_by_suffix(table, f"layers.{i}.{name}")
            )
            own = [m for m in quantized_matrices(model) if m.role.startswith(f"layers.{i}.{half}.")]
            if not raw or not isinstance(raw, list):
                raise InputError(f"{path}: layer {i} of this model has no {name}. Measure it again.")
            yield tuple(_exllamav2_choice(one, own, model.names, f"{path}: layers.{i}.{name}") for one in raw)


def _exllamav2_choice(
    raw: Mapping[str, Any], own: Sequence[Matrix], names: TensorNames, where: str
) -> Choice:
    experts = {"gate": "w1", "up": "w3", "down": "w2"}
    try:
        made = {}
        for m in own:
            part = m.role.rpartition(".")[2]
            key = experts[part] if ".experts." in m.role else f"{part}_proj"
            made[m.role] = Recipe.from_json(raw[key], where)
        error = 1 - float(raw["accuracy"])
        if not math.isfinite(error):
            raise ValueError("an accuracy that is no finite number")
    except (KeyError, TypeError, ValueError, OverflowError) as mistake:
        raise InputError(f"{where}: not an option with a recipe for each matrix ({mistake!r}).") from mistake
    return Choice(sum(made[m.role].bits(m) for m in own), error * error, made)


def _find_by_suffix(table: Mapping[str, Any], name: str) -> Any:
    """The entry under a name, whatever stands before it."""
    return next((value for key, value in table.items() if key.endswith(name)), None)
