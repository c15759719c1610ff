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
from exlm.kernels.cuda.backend import GemmDispatch
from exlm.kernels.cuda.gemm_m16 import TileConfig
from exlm.kernels.cuda.tuning import GemmShape, TuneCache, default_config, shape_name, tuned_file
from exlm.kernels.cuda.weight_tile import unify_groups
from exlm.version import __version__
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.oracle import LIMIT, off
from tests.kernels.cuda.oracle import product as right
from tests.kernels.cuda.random_weights import weight
from tests.kernels.cuda.repack_oracle import repack


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModuleCache:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedModuleCache(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(autouse=True)
def _anew() -> None:
    warn_once.cache_clear()


def test_stored_configs_apply_to_gemms_of_their_shape_alone(modules: EmulatedModuleCache, tmp_path: Path) -> None:
    file = tuned_file(tmp_path / "kernels", "NVIDIA H200 (80GB)")
    assert file.name == "plans-nvidia-h200-80gb.json"
    tiles = [repack(weight(kind)) for kind in ("4 bits", "6 and 4 bits")]
    tuned = TuneCache(modules, file)
    one, other = (tuned.gemm([each]) for each in tiles)
    assert one.config == one.fit(default_config([tiles[0]], None, modules.num_sms))
    GemmShape("", [one]).apply((1, 3, 4))
    assert astuple(one.config) == (1, 3, 4)
    kept = tuned.save([GemmShape(shape_name(one.weights, None), [one])])
    assert [kept] == [*file.parent.iterdir()]
    assert json.loads(kept.read_bytes())["plans"] == {shape_name(one.weights, None): [1, 3, 4]}
    again = TuneCache(modules, file)
    assert astuple(again.gemm([tiles[0]]).config) == (1, 3, 4)
    assert again.gemm([tiles[1]]).config == other.config
    assert again.gemm(unify_groups([tiles[0]] * 2), None, "silu").config.warp_tiles % 2 == 0


def test_only_what_is_used_counts(modules: EmulatedModuleCache) -> None:
    tuned = TuneCache(modules)
    packed = weight("4 bits")
    products = [tuned.gemm([repack(packed)]) for _ in range(3)]
    x = torch.randn(1, packed.in_features).half()
    out = torch.empty(1, packed.out_features).half()
    (kind,) = tuned.shapes_used(lambda: [GemmDispatch(one, False)(x, [out]) for one in products[:2]])
    assert {*kind.gemms} == {*products[:2]}
    assert not tuned.shapes_used(lambda: None)
    assert tuned.save([kind]) is None


def test_every_setting_nearby_answers_right(modules: EmulatedModuleCache) -> None:
    tuned, packed = TuneCache(modules), weight("6 and 4 bits")
    product = tuned.gemm([repack(packed)])
    kind, x = GemmShape("", [product]), torch.randn(1, packed.in_features).half()
    assert {len(setting) for setting in kind.neighbors()} == {3}
    assert kind.config not in kind.neighbors()
    for setting in kind.neighbors():
        kind.apply(setting)
        out = torch.empty(1, packed.out_features).half()
        product(x, [out])
        assert off(out, right(x, packed)) < LIMIT


def test_two_matrices_under_one_act_keep_even_tiles(modules: EmulatedModuleCache) -> None:
    product = TuneCache(modules).gemm(unify_groups([repack(weight("4 bits"))] * 2), None, "silu")
    assert all(setting[0] % 2 == 0 for setting in GemmShape("", [product]).neighbors())


def test_a_planner_keeps_nothing_alive(modules: EmulatedModuleCache) -> None:
    tuned = TuneCache(modules)
    product = tuned.gemm([repack(weight("4 bits"))])
    assert len(tuned._gemms) == 1
    del product
    assert len(tuned._gemms) == 0


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
def test_a_broken_file_is_told_of(modules: EmulatedModuleCache, tmp_path: Path, text: str) -> None:
    content = BROKEN[text] if isinstance(BROKEN[text], bytes) else BROKEN[text].encode()
    data = content.replace(b"VERSION", json.dumps(__version__).encode())
    ArtifactFolder(tmp_path).put("plans.json", data)
    warning = r"plans-[0-9a-f]{32}\.json cannot be read .*delete it, or run `exlm tune` again"
    with pytest.warns(UserWarning, match=warning):
        assert TuneCache(modules, tmp_path / "plans.json")._known == {}


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
def test_a_damaged_file_is_told_of_and_replaced(modules: EmulatedModuleCache, tmp_path: Path, damage: str) -> None:
    file, tiles = tmp_path / "plans.json", [repack(weight("4 bits"))]
    tuned = TuneCache(modules, file)
    product = tuned.gemm(tiles)
    usual = product.config
    kind = GemmShape(shape_name(tiles, None), [product])
    kind.apply((1, 3, 4))
    kept = tuned.save([kind])
    assert kept is not None
    DAMAGES[damage](kept)
    with pytest.warns(UserWarning, match=r"plans.*\.json is not used.* run `exlm tune` again"):
        again = TuneCache(modules, file)
    assert again.gemm(tiles).config == usual
    with pytest.warns(UserWarning, match="is not used"):
        assert again.save([kind]) == kept
    assert astuple(TuneCache(modules, file).gemm(tiles).config) == (1, 3, 4)


def test_plans_of_earlier_versions_are_read(modules: EmulatedModuleCache, tmp_path: Path) -> None:
    """Their file's name has no checksum; what it says is validated in any case."""
    file, tiles = tmp_path / "plans.json", [repack(weight("4 bits"))]
    name = shape_name(tiles, None)
    file.write_text(json.dumps({"exlm": __version__, "plans": {name: [1, 3, 4], "b": [0, 8, 2]}}))
    tuned = TuneCache(modules, file)
    assert tuned._known == {name: (1, 3, 4)}
    kept = tuned.save([GemmShape(name, [tuned.gemm(tiles)])])
    assert kept is not None
    assert kept != file
    file.write_text('{"exlm": "' + __version__ + '", "plans": {"' + name + '": [2, 2, 2]}}')
    assert TuneCache(modules, file)._known == {name: (1, 3, 4)}, "the verified file counts"
    kept.unlink()
    file.write_text("{")
    with pytest.warns(UserWarning, match=r"plans\.json cannot be read .*run `exlm tune` again"):
        assert TuneCache(modules, file)._known == {}
    file.chmod(0o666)
    with pytest.warns(UserWarning, match=r"plans\.json is not used, because others may write to it"):
        assert TuneCache(modules, file)._known == {}


def test_a_folder_that_others_may_write_has_no_plans(
    modules: EmulatedModuleCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned = TuneCache(modules, tmp_path / "kernels" / "plans.json")
    kind = GemmShape("a", [tuned.gemm([repack(weight("4 bits"))])])
    tuned.save([kind])
    (tmp_path / "kernels").chmod(0o777)
    assert TuneCache(modules, tmp_path / "kernels" / "plans.json")._known == {}
    assert "is not used, because others may write to it" in caplog.text
    with pytest.raises(CheckpointError, match=r"others may write to it .*mode 0777.*chmod go-w.*EXLM_CACHE"):
        tuned.save([kind])


def test_other_versions_and_impossible_configs_are_ignored(modules: EmulatedModuleCache, tmp_path: Path) -> None:
    file, folder = tmp_path / "plans.json", ArtifactFolder(tmp_path)
    plans: dict[str, Any] = {"a": [4, 8, 2], "b": [0, 8, 2], "c": [4, 99, 2], "d": [4, 8], "e": [4, 8, 2, 1]}
    plans |= {"f": [4.0, 8, 2], "g": ["4", 8, 2], "h": [True, 8, 2], "i": [1e999, 8, 2], "j": "482"}
    plans |= {"k": [4, 8, 10**4000], "l": [float("nan"), 8, 2], "m": [[4], 8, 2], "n": [-4, 8, 2], "o": {}}
    folder.put(file.name, json.dumps({"exlm": __version__, "plans": plans}).encode(), only=True)
    assert TuneCache(modules, file)._known == {"a": (4, 8, 2)}
    for version in ("0.0.0", None, 1, [], {}):
        folder.put(file.name, json.dumps({"exlm": version, "plans": plans}).encode(), only=True)
        assert TuneCache(modules, file)._known == {}


def test_what_cannot_be_written_is_told(modules: EmulatedModuleCache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    tuned = TuneCache(modules, tmp_path / "file" / "plans.json")
    product = tuned.gemm([repack(weight("4 bits"))], None)
    with pytest.raises(CheckpointError, match="set EXLM_CACHE"):
        tuned.save([GemmShape("a", [product])])


def test_large_heads_have_small_blocks(modules: EmulatedModuleCache) -> None:
    class Large:
        n_tiles, k_tiles = 8016, 32

    assert default_config([Large()]) == TileConfig(4, 4, 3)  # type: ignore[list-item]
