"""Recipes and measurements: groups, stored bits and files, against the reference's own figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exlm.config import Config
from exlm.errors import InputError
from exlm.formats.exl2 import BIT_WIDTHS
from exlm.quantize.allocation import (
    HEAD_RECIPES,
    QuantGroup,
    Recipe,
    candidate_recipes,
    make_recipe,
    quantized_matrices,
)
from exlm.quantize.sensitivity import Measurement, Sensitivity
from exlm.spec.model import Matrix

SQUARE = Matrix("m", 4096, 4096)


@pytest.mark.parametrize(
    ("recipe", "matrix", "bits", "groups"),
    [
        (make_recipe(64, (3, 0.05), (2, 0.95)), SQUARE, 35785728, [4, 60]),
        (make_recipe(128, (4, 0.1), (3, 0.9)), SQUARE, 53085696, [4, 28]),
        (make_recipe(128, (4, 1.0)), SQUARE, 67765760, [32]),
        (make_recipe(32, (4, 1.0)), SQUARE, 69343232, [128]),
        (make_recipe(128, (5, 0.1), (4, 0.9)), SQUARE, 69862912, [4, 28]),
        (make_recipe(128, (6, 1.0)), SQUARE, 101320192, [32]),
        (make_recipe(128, (8, 1.0)), SQUARE, 134874624, [32]),
        (make_recipe(128, (8, 0.15), (6, 0.85)), Matrix("head", 4096, 32000), 831620608, [5, 27]),
        (
            make_recipe((32, 128, 128), (8, 0.05), (4, 0.1), (3, 0.85)),
            Matrix("m", 11008, 4096),
            153776832,
            [18, 9, 73],
        ),
    ],
)
def test_recipe_bits_match_exllamav2(recipe: Recipe, matrix: Matrix, bits: int, groups: list[int]) -> None:
    assert recipe.bits(matrix) == bits
    found = recipe.groups(matrix.in_features)
    assert [sum(g.bits == part.bits for g in found) for part in recipe.parts] == groups
    assert sum(g.rows for g in found) == matrix.in_features


def test_head_recipes_take_little_more_than_those_of_exllamav2() -> None:
    reference = {
        2: make_recipe(32, (4, 0.3), (2, 0.7)),
        3: make_recipe(32, (4, 0.15), (3, 0.85)),
        4: make_recipe(32, (6, 0.15), (4, 0.85)),
        5: make_recipe(128, (6, 0.15), (5, 0.85)),
        6: make_recipe(128, (8, 0.15), (6, 0.85)),
        8: make_recipe(128, (8, 1.0)),
    }
    assert HEAD_RECIPES.keys() == reference.keys()
    for inputs in range(256, 8193, 32):
        head = Matrix("head", inputs, 32000)
        for bits, recipe in HEAD_RECIPES.items():
            more = recipe.bits(head) - reference[bits].bits(head)
            assert more <= 0.13 * inputs * head.out_features


def test_padding_and_bias_are_counted() -> None:
    plain = make_recipe(32, (4, 1.0))
    assert plain.bits(Matrix("m", 64, 33)) == plain.bits(Matrix("m", 64, 64))
    assert plain.bits(Matrix("m", 64, 33, True)) == plain.bits(Matrix("m", 64, 33)) + 16 * 33


def test_recipes_round_trip_through_json() -> None:
    for recipe in candidate_recipes():
        assert Recipe.from_json(json.loads(json.dumps(recipe.to_json())), "here") == recipe


def test_invalid_recipes_are_refused() -> None:
    for sizes, parts in ((64, ((2, 0.5), (3, 0.5))), (48, ((4, 1.0),)), (64, ((7, 1.0),)), (64, ((4, 0.5),))):
        with pytest.raises(InputError):
            make_recipe(sizes, *parts)
    with pytest.raises(InputError, match="multiple of 32"):
        make_recipe(32, (4, 1.0)).groups(48)


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -1.0, 10**400], ids="abcd")
def test_invalid_shares_are_refused(share: float) -> None:
    raw = {"group_size": {"4": 32, "3": 32}, "bits": [4, 3], "bits_prop": [share, 0.5]}
    with pytest.raises(InputError):
        Recipe.from_json(raw, "here")


def test_the_measurement_of_exllamav2_is_read_exactly(fixtures_dir: Path) -> None:
    path = fixtures_dir / "reference" / "measurement.json"
    model = Config(fixtures_dir / "tiny-lm").spec
    found = Measurement.load(path, model)
    raw = json.loads(path.read_text())["measurement"]
    wanted = [[one["total_bits"] for one in options] for options in raw.values() if options]
    assert [[candidate.bits for candidate in candidates] for candidates in found.candidate_sets] == wanted
    assert {role for candidates in found.candidate_sets for role in candidates[0].recipes} == {
        m.role for m in quantized_matrices(model)
    }


def test_measurements_of_other_models_are_refused(fixtures_dir: Path, tmp_path: Path) -> None:
    model = Config(fixtures_dir / "gptqmodel-w4-g128").spec
    odd = tmp_path / "m.json"
    for text in ("{}", "nonsense", '{"exlm_measurement": 1, "matrices": {}}', '{"measurement": {}}'):
        odd.write_text(text)
        with pytest.raises(InputError):
            Measurement.load(odd, model)


@pytest.mark.parametrize("accuracy", [10**400, float("nan"), "much", None], ids="abcd")
def test_an_invalid_accuracy_is_refused(fixtures_dir: Path, tmp_path: Path, accuracy: Any) -> None:
    table = json.loads((fixtures_dir / "reference" / "measurement.json").read_text())
    next(options for options in table["measurement"].values() if options)[0]["accuracy"] = accuracy
    odd = tmp_path / "m.json"
    odd.write_text(json.dumps(table))
    with pytest.raises(InputError, match="not an option with a recipe for each matrix"):
        Measurement.load(odd, Config(fixtures_dir / "tiny-lm").spec)


def test_group_size_factors_depend_on_the_width() -> None:
    harms = {width: (1.0, 10.0, 100.0, 1000.0) for width in BIT_WIDTHS}
    found = Sensitivity(harms, {2: {32: 0.5, 64: 1.0, 128: 2.0}, 4: {32: 0.9, 64: 1.0, 128: 1.1}})
    assert found.kl_cost(QuantGroup(2, 32), 1) == 5
    assert found.kl_cost(QuantGroup(2, 128), 0) == 2222
    assert found.kl_cost(QuantGroup(4, 32), 1) == 9
    assert found.kl_cost(QuantGroup(8, 64), 2) == 1100  # no width is nearer than 4, no size than 64
    assert found.kl_cost(QuantGroup(3, 96), 0) in (111 * 1.0, 111 * 2.0)
    assert Sensitivity.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_version_1_measurements_are_read() -> None:
    harms = {str(width): [1.0, 2.0] for width in BIT_WIDTHS}
    old = Sensitivity.from_json({"harms": harms, "sizes": {"32": 0.7, "64": 1.0, "128": 1.5}})
    assert [old.kl_cost(QuantGroup(width, 32), 1) for width in BIT_WIDTHS] == [1.4] * len(BIT_WIDTHS)
