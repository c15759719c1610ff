"""Plans: kept in a file, used for products of the same kind, and never in the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm.errors import CheckpointError
from exlm.kernels.artifact_cache import ArtifactFolder, warn_once
from exlm.kernels.cuda.backend import Few
from exlm.kernels.cuda.linear import Plan
from exlm.kernels.cuda.planner import Kind, Planner, kind_of, plan_for, plans_file
from exlm.kernels.cuda.tiles import alike, arrange
from exlm.version import __version__
from tests.kernels.cuda.emulator import EmulatedWorkshop
from tests.kernels.cuda.oracle import LIMIT, off
from tests.kernels.cuda.oracle import product as right
from tests.kernels.cuda.random_weights import weight


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> EmulatedWorkshop:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedWorkshop(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(autouse=True)
def _anew() -> None:
    warn_once.cache_clear()


def test_what_was_kept_is_used_by_those_of_its_kind_alone(workshop: EmulatedWorkshop, tmp_path: Path) -> None:
    file = plans_file(tmp_path / "kernels", "NVIDIA H200 (80GB)")
    assert file.name == "plans-nvidia-h200-80gb.json"
    tiles = [arrange(weight(kind)) for kind in ("4 bits", "6 and 4 bits")]
    planner = Planner(workshop, file)
    one, other = (planner.product([each]) for each in tiles)
    assert one.plan == one.fitted(plan_for([tiles[0]], None, workshop.processors))
    Kind("", [one]).apply((1, 3, 4))
    assert astuple(one.plan) == (1, 3, 4)
    kept = planner.keep([Kind(kind_of(one.matrices, None), [one])])
    assert [kept] == [*file.parent.iterdir()]
    assert json.loads(kept.read_bytes())["plans"] == {kind_of(one.matrices, None): [1, 3, 4]}
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
    assert {len(setting) for setting in kind.neighbors()} == {3}
    assert kind.config not in kind.neighbors()
    for setting in kind.neighbors():
        kind.apply(setting)
        out = torch.empty(1, packed.out_features).half()
        product(x, [out])
        assert off(out, right(x, packed)) < LIMIT


def test_two_matrices_under_one_act_keep_even_tiles(workshop: EmulatedWorkshop) -> None:
    product = Planner(workshop).product(alike([arrange(weight("4 bits"))] * 2), None, "silu")
    assert all(setting[0] % 2 == 0 for setting in Kind("", [product]).neighbors())


def test_a_planner_keeps_nothing_alive(workshop: EmulatedWorkshop) -> None:
    planner = Planner(workshop)
    product = planner.product([arrange(weight("4 bits"))])
    assert len(planner._made) == 1
    del product
    assert len(planner._made) == 0


BROKEN = {
    "nothing": "",
    "a list": "[]",
    "no version": '{"plans": {}}',
    "no plans": '{"exlm": VERSION}',
    "a number of plans": '{"exlm": VERSION, "plans": 3}',
    "a list of plans": '{"exlm": VERSION, "plans": [[4, 8, 2]]}',
    "a number for a plan": '{"exlm": VERSION, "plans": {"a": 3}}',
    "no JSON": "{\x00",
    "half of it": '{"exlm": VERSION, "plans": {"a": [4, 8',
    "deep": '{"exlm": VERSION, "plans": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "more digits than are read": '{"exlm": VERSION, "plans": {"a": [' + "9" * 5000 + ", 8, 2]}}",
    "long": '{"exlm": VERSION, "plans": {"a": [4, 8, 2]}}' + " " * (1 << 20),
    "half of a character": b'{"exlm": VERSION, "plans": {"\xc3": [4, 8, 2]}}',
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_told_of(workshop: EmulatedWorkshop, tmp_path: Path, text: str) -> None:
    content = BROKEN[text] if isinstance(BROKEN[text], bytes) else BROKEN[text].encode()
    data = content.replace(b"VERSION", json.dumps(__version__).encode())
    ArtifactFolder(tmp_path).put("plans.json", data)
    told = r"plans-[0-9a-f]{32}\.json cannot be read .*delete it, or run `exlm tune` again"
    with pytest.warns(UserWarning, match=told):
        assert Planner(workshop, tmp_path / "plans.json")._known == {}


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "fp8_e5m2": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another plan": lambda path: path.write_text(path.read_text().replace("3", "8")),
    "others may write": lambda path: path.chmod(0o666),
    "a loop": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_told_of_and_replaced(
    workshop: EmulatedWorkshop, tmp_path: Path, damage: str
) -> None:
    file, tiles = tmp_path / "plans.json", [arrange(weight("4 bits"))]
    planner = Planner(workshop, file)
    product = planner.product(tiles)
    usual = product.plan
    kind = Kind(kind_of(tiles, None), [product])
    kind.apply((1, 3, 4))
    kept = planner.keep([kind])
    assert kept is not None
    DAMAGES[damage](kept)
    with pytest.warns(UserWarning, match=r"plans.*\.json is not used.* run `exlm tune` again"):
        again = Planner(workshop, file)
    assert again.product(tiles).plan == usual
    with pytest.warns(UserWarning, match="is not used"):
        assert again.keep([kind]) == kept
    assert astuple(Planner(workshop, file).product(tiles).plan) == (1, 3, 4)


def test_plans_of_earlier_versions_are_read(workshop: EmulatedWorkshop, tmp_path: Path) -> None:
    """Their file's name has no checksum; what it says is validated in any case."""
    file, tiles = tmp_path / "plans.json", [arrange(weight("4 bits"))]
    name = kind_of(tiles, None)
    file.write_text(json.dumps({"exlm": __version__, "plans": {name: [1, 3, 4], "b": [0, 8, 2]}}))
    planner = Planner(workshop, file)
    assert planner._known == {name: (1, 3, 4)}
    kept = planner.keep([Kind(name, [planner.product(tiles)])])
    assert kept is not None
    assert kept != file
    file.write_text('{"exlm": "' + __version__ + '", "plans": {"' + name + '": [2, 2, 2]}}')
    assert Planner(workshop, file)._known == {name: (1, 3, 4)}, "the verified file counts"
    kept.unlink()
    file.write_text("{")
    with pytest.warns(UserWarning, match=r"plans\.json cannot be read .*run `exlm tune` again"):
        assert Planner(workshop, file)._known == {}
    file.chmod(0o666)
    with pytest.warns(UserWarning, match=r"plans\.json is not used, because others may write to it"):
        assert Planner(workshop, file)._known == {}


def test_a_folder_that_others_may_write_has_no_plans(
    workshop: EmulatedWorkshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner(workshop, tmp_path / "kernels" / "plans.json")
    kind = Kind("a", [planner.product([arrange(weight("4 bits"))])])
    planner.keep([kind])
    (tmp_path / "kernels").chmod(0o777)
    assert Planner(workshop, tmp_path / "kernels" / "plans.json")._known == {}
    assert "is not used, because others may write to it" in caplog.text
    with pytest.raises(CheckpointError, match=r"others may write to it .*mode 0777.*chmod go-w.*EXLM_CACHE"):
        planner.keep([kind])


def test_other_versions_and_impossible_plans_do_not_count(workshop: EmulatedWorkshop, tmp_path: Path) -> None:
    file, folder = tmp_path / "plans.json", ArtifactFolder(tmp_path)
    plans: dict[str, Any] = {"a": [4, 8, 2], "b": [0, 8, 2], "c": [4, 99, 2], "d": [4, 8], "e": [4, 8, 2, 1]}
    plans |= {"f": [4.0, 8, 2], "g": ["4", 8, 2], "h": [True, 8, 2], "i": [1e999, 8, 2], "j": "482"}
    plans |= {"k": [4, 8, 10**4000], "l": [float("nan"), 8, 2], "m": [[4], 8, 2], "n": [-4, 8, 2], "o": {}}
    folder.put(file.name, json.dumps({"exlm": __version__, "plans": plans}).encode(), only=True)
    assert Planner(workshop, file)._known == {"a": (4, 8, 2)}
    for version in ("0.0.0", None, 1, [], {}):
        folder.put(file.name, json.dumps({"exlm": version, "plans": plans}).encode(), only=True)
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
