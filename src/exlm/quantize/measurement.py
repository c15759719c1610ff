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
from .recipe import Group, Recipe, recipe

BLOCK = 32
"""Rows whose harm is summed up."""

SIZES = (32, 64, 128)
MIDDLE = 64
PROBES = (2, 3, 4)
"""Widths whose error tells what other group sizes are worth; wider ones are as the widest of these."""

PAIRS = ((3, 2), (4, 3), (5, 4), (6, 5), (8, 6))
TRIPLES = ((4, 3, 2), (5, 3, 2), (6, 3, 2), (5, 4, 3), (6, 4, 3), (8, 4, 3), (6, 5, 4), (8, 5, 4), (8, 6, 5))
SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
THIRDS = ((0.05, 0.15), (0.1, 0.3), (0.05, 0.45), (0.15, 0.5))


class Choice(NamedTuple):
    """One way to store what a slot holds."""

    bits: int
    harm: float
    recipes: Mapping[str, Recipe]  # by role


Slot = Sequence[Choice]


@dataclass(frozen=True)
class Profile:
    """One matrix: for each width, the harm of every block of rows in stored order, in groups of 64.

    `sizes` has, for some widths, the factor by which each group size changes it.
    """

    harms: Mapping[int, Sequence[float]]
    sizes: Mapping[int, Mapping[int, float]]

    def harm(self, group: Group, block: int) -> float:
        """What a group that begins with this block of rows does to the model's answers."""
        factors = self.sizes[min(self.sizes, key=lambda width: abs(width - group.bits))]
        factor = factors[min(factors, key=lambda size: abs(size - group.rows))]
        return factor * sum(self.harms[group.bits][block : block + group.rows // BLOCK])

    def to_json(self) -> dict[str, Any]:
        """As files have it."""
        sizes = {str(width): _keys(factors) for width, factors in self.sizes.items()}
        return {"harms": {str(width): list(harm) for width, harm in self.harms.items()}, "sizes": sizes}

    @classmethod
    def from_json(cls, raw: Any) -> Profile:
        """Out of a file; one of the first version has factors of group sizes for all widths together."""
        harms = {int(width): tuple(map(float, harm)) for width, harm in raw["harms"].items()}
        sizes = raw["sizes"]
        if not any(isinstance(one, dict) for one in sizes.values()):
            sizes = {PROBES[0]: sizes}
        return cls(
            harms, {int(w): {int(size): float(f) for size, f in one.items()} for w, one in sizes.items()}
        )


@dataclass(frozen=True)
class Measurement:
    """Every matrix of a model's layers, in slots that each get one choice."""

    slots: tuple[Slot, ...]
    profiles: Mapping[str, Profile]  # by role; empty if it comes from another program

    @classmethod
    def of(cls, profiles: Mapping[str, Profile], model: spec.Model) -> Measurement:
        """From what was measured."""
        return cls(tuple(_slot(m, profiles[m.role]) for m in quantised(model)), profiles)

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
            return cls(tuple(_old_slots(raw["measurement"], model, path)), {})
        if not isinstance(raw, dict) or raw.get("exlm_measurement") not in (1, 2):
            raise InputError(f"{path}: expected a measurement of exlm or a measurement.json, found neither.")
        wanted = {matrix.role: matrix for matrix in quantised(model)}
        table = raw.get("matrices")
        if not isinstance(table, dict):
            raise InputError(f"{path}: expected what was measured in `matrices`, found {table!r:.80}.")
        found = {role: read_profile(one, path, role) for role, one in table.items()}
        if found.keys() != wanted.keys():
            odd = sorted(found.keys() ^ wanted.keys())[0]
            raise InputError(f"{path} was made for another model: {odd} is in only one of the two.")
        for role, profile in found.items():
            blocks, have = wanted[role].in_features // BLOCK, {len(h) for h in profile.harms.values()}
            if have != {blocks}:
                raise InputError(f"{path}: {role} has {blocks} blocks of rows, the measurement {have}.")
        return cls.of(found, model)


def quantised(model: spec.Model) -> Iterator[Matrix]:
    """The matrices whose bits are given out: those of the layers, without routers."""
    for matrix in matrices(model):
        if matrix.role != "head" and not matrix.role.endswith(".router"):
            yield matrix


@cache
def recipes() -> tuple[Recipe, ...]:
    """Everything a matrix may get."""
    return tuple(_recipes())


def smallest(model: spec.Model) -> int:
    """The fewest bits that the matrices of a model's layers can take."""
    return sum(min(made.bits(matrix) for made in recipes()) for matrix in quantised(model))


def _recipes() -> Iterator[Recipe]:
    for size in SIZES:
        for width in BIT_WIDTHS:
            yield recipe(size, (width, 1.0))
        for high, low in PAIRS:
            for share in SHARES:
                yield recipe(size, (high, share), (low, 1 - share))
        for high, middle, low in TRIPLES:
            for first, second in THIRDS:
                yield recipe(size, (high, first), (middle, second), (low, 1 - first - second))


def _slot(matrix: Matrix, profile: Profile) -> Slot:
    """Every distinct way to store one matrix."""
    harm = cache(profile.harm)  # recipes share most of their groups
    seen: dict[tuple[Group, ...], Choice] = {}
    for made in recipes():
        groups = made.groups(matrix.in_features)
        if groups not in seen:
            total, block = 0.0, 0
            for group in groups:
                total += harm(group, block)
                block += group.rows // BLOCK
            seen[groups] = Choice(made.bits(matrix), total, {matrix.role: made})
    return tuple(seen.values())


def read_profile(raw: Any, path: Path, role: str) -> Profile:
    """One matrix's profile out of a file; `InputError` if it is not what `to_json` gives."""
    try:
        found = Profile.from_json(raw)
        if set(found.harms) != set(BIT_WIDTHS) or not found.sizes or not all(found.sizes.values()):
            raise ValueError(f"widths {sorted(found.harms)}, group sizes {found.sizes}")
        factors = chain.from_iterable(one.values() for one in found.sizes.values())
        if not all(map(math.isfinite, chain(factors, *found.harms.values()))):
            raise ValueError("a harm that is no finite number")
        return found
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path}: {role} is not measured as it should be ({error!r}).") from error


def _keys(table: Mapping[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in table.items()}


def _old_slots(table: Mapping[str, Any], model: spec.Model, path: Path) -> Iterator[Slot]:
    """The old converter's slots: the attention and the MLP of each layer, error relative to the stream."""
    for i, layer in enumerate(model.layers):
        moe = isinstance(layer.mlp, spec.Moe)
        halves = {"attn": "self_attn", "mlp": "block_sparse_moe" if moe else "mlp"}
        parallel = _ending(table, f"layers.{i}.parallel_decoder")
        for half, name in halves.items():
            raw = parallel.get(half) if isinstance(parallel, dict) else _ending(table, f"layers.{i}.{name}")
            own = [m for m in quantised(model) if m.role.startswith(f"layers.{i}.{half}.")]
            if not raw or not isinstance(raw, list):
                raise InputError(f"{path}: layer {i} of this model has no {name}. Measure it again.")
            yield tuple(_old_choice(one, own, model.names, f"{path}: layers.{i}.{name}") for one in raw)


def _old_choice(raw: Mapping[str, Any], own: Sequence[Matrix], names: TensorNames, where: str) -> Choice:
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


def _ending(table: Mapping[str, Any], name: str) -> Any:
    """The entry under a name, whatever stands before it."""
    return next((value for key, value in table.items() if key.endswith(name)), None)
