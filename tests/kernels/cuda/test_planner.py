"""Plans: kept in a file, used for products of the same kind, and never in the way."""

from __future__ import annotations

import json
import shutil
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from exlm.errors import CheckpointError
from exlm.kernels.cuda.backend import Few
from exlm.kernels.cuda.linear import Plan
from exlm.kernels.cuda.planner import Kind, Planner, kind_of, plan_for, plans_file
from exlm.kernels.cuda.tiles import alike, arrange
from tests.kernels.cuda.emulator import EmulatedWorkshop
from tests.kernels.cuda.oracle import LIMIT, off
from tests.kernels.cuda.oracle import product as right
from tests.kernels.cuda.random_weights import weight


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> EmulatedWorkshop:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedWorkshop(tmp_path_factory.mktemp("emulated"))


def test_what_was_kept_is_used_by_those_of_its_kind_alone(workshop: EmulatedWorkshop, tmp_path: Path) -> None:
    file = plans_file(tmp_path / "kernels", "NVIDIA H200 (80GB)")
    assert file.name == "plans-nvidia-h200-80gb.json"
    tiles = [arrange(weight(kind)) for kind in ("4 bits", "6 and 4 bits")]
    planner = Planner(workshop, file)
    one, other = (planner.product([each]) for each in tiles)
    assert one.plan == one.fitted(plan_for([tiles[0]], None, workshop.processors))
    Kind("", [one]).turn((1, 3, 4))
    assert astuple(one.plan) == (1, 3, 4)
    assert planner.keep([Kind(kind_of(one.matrices, None), [one])]) == file
    again = Planner(workshop, file)
    assert astuple(again.product([tiles[0]]).plan) == (1, 3, 4)
    assert again.product([tiles[1]]).plan == other.plan
    assert again.product(alike([tiles[0]] * 2), None, "silu").plan.tiles % 2 == 0


def test_only_what_is_used_counts(workshop: EmulatedWorkshop) -> None:
    planner = Planner(workshop)
    packed = weight("4 bits")
    products = [planner.product([arrange(packed)]) for _ in range(3)]
    x = torch.randn(1, packed.in_features).half()
    out = torch.empty(1, packed.out_features).half()
    (kind,) = planner.used(lambda: [Few(one, False)(x, [out]) for one in products[:2]])
    assert {*kind.products} == {*products[:2]}
    assert not planner.used(lambda: None)
    assert planner.keep([kind]) is None


def test_every_setting_nearby_answers_right(workshop: EmulatedWorkshop) -> None:
    planner, packed = Planner(workshop), weight("6 and 4 bits")
    product = planner.product([arrange(packed)])
    kind, x = Kind("", [product]), torch.randn(1, packed.in_features).half()
    assert {len(setting) for setting in kind.nearby()} == {3}
    assert kind.setting not in kind.nearby()
    for setting in kind.nearby():
        kind.turn(setting)
        out = torch.empty(1, packed.out_features).half()
        product(x, [out])
        assert off(out, right(x, packed)) < LIMIT


def test_two_matrices_under_one_act_keep_even_tiles(workshop: EmulatedWorkshop) -> None:
    product = Planner(workshop).product(alike([arrange(weight("4 bits"))] * 2), None, "silu")
    assert all(setting[0] % 2 == 0 for setting in Kind("", [product]).nearby())


def test_a_planner_keeps_nothing_alive(workshop: EmulatedWorkshop) -> None:
    planner = Planner(workshop)
    product = planner.product([arrange(weight("4 bits"))])
    assert len(planner._made) == 1
    del product
    assert len(planner._made) == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"exlm": null, "plans": 3}', '{"plans": {}}', "{\x00"])
def test_a_broken_file_is_told_of(workshop: EmulatedWorkshop, tmp_path: Path, text: str) -> None:
    from exlm.version import __version__

    file = tmp_path / "plans.json"
    file.write_text(text.replace("null", json.dumps(__version__)))
    with pytest.warns(UserWarning, match=r"plans\.json cannot be read .* run `exlm tune` again"):
        assert Planner(workshop, file)._known == {}


def test_other_versions_and_impossible_plans_do_not_count(workshop: EmulatedWorkshop, tmp_path: Path) -> None:
    from exlm.version import __version__

    file = tmp_path / "plans.json"
    plans = {"a": [4, 8, 2], "b": [0, 8, 2], "c": [4, 99, 2], "d": [4, 8], "e": [4, 8, 2, 1]}
    file.write_text(json.dumps({"exlm": __version__, "plans": plans}))
    assert Planner(workshop, file)._known == {"a": (4, 8, 2)}
    file.write_text(json.dumps({"exlm": "0.0.0", "plans": plans}))
    assert Planner(workshop, file)._known == {}


def test_what_cannot_be_written_is_told(workshop: EmulatedWorkshop, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    planner = Planner(workshop, tmp_path / "file" / "plans.json")
    product = planner.product([arrange(weight("4 bits"))], None)
    with pytest.raises(CheckpointError, match="set EXLM_CACHE"):
        planner.keep([Kind("a", [product])])


def test_large_heads_have_small_blocks(workshop: EmulatedWorkshop) -> None:
    class Large:
        tiles, stored = 8016, 32

    assert plan_for([Large()]) == Plan(4, 4, 3)  # type: ignore[list-item]
