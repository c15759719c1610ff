"""`exlm cache`, run end to end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exlm import InputError
from exlm.cli.__main__ import app
from exlm.kernels import packed_store
from exlm.kernels.packed_store import PARTIAL, PackedStore, write_all

NAMES = ("tinyllama.gguf", "other.gguf")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with the matrices of two models."""
    monkeypatch.setenv("EXLM_CACHE", str(tmp_path))
    monkeypatch.delenv("EXLM_PACKED_CACHE", raising=False)
    monkeypatch.setattr(packed_store, "RESERVED_BYTES", 0)
    store = PackedStore(tmp_path / "packed", 1 << 30)
    for number, name in enumerate(NAMES):
        data = bytes(3 << 20)
        assert store.write(
            f"{number:032}", f"/models/{name}", len(data), lambda file, data=data: write_all(file, memoryview(data))
        )
        os.utime(store.folder / f"{number:032}.packed", (1_700_000_000 + 86_400 * number,) * 2)
    return store.folder


def run(*arguments: str) -> str:
    done = CliRunner(env={"COLUMNS": "160", "TZ": "UTC"}).invoke(app, ["cache", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_models_are_listed_with_size_and_last_use(folder: Path) -> None:
    lines = run().splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["model", "size", "last", "use"],
        ["/models/other.gguf", "3.0", "MiB", "2023-11-15", "22:13"],
        ["/models/tinyllama.gguf", "3.0", "MiB", "2023-11-14", "22:13"],
    ]
    assert lines[3] == f"6.0 MiB in {folder} (at most 20.00 GiB: EXLM_PACKED_CACHE)"
    assert "other.gguf" not in run("tinyllama.gguf")


def test_one_model_or_all_are_removed(folder: Path) -> None:
    (folder / f"{PARTIAL}0").write_bytes(b"half")
    os.utime(folder / f"{PARTIAL}0", (0, 0))
    assert run("/models/tinyllama.gguf", "--clear") == "files removed: 1 (3.0 MiB)\n"
    assert "tinyllama.gguf" not in run()
    assert run("--clear") == "files removed: 1 (3.0 MiB)\n"
    assert [*folder.iterdir()] == []
    assert run() == f"0 bytes in {folder} (at most 20.00 GiB: EXLM_PACKED_CACHE)\n"


def test_a_damaged_file_is_listed_and_removed(folder: Path) -> None:
    path = folder / f"{0:032}.packed"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"damaged: {path.name}" in run()
    run("--clear")
    assert not path.exists()


def test_a_model_without_a_copy_is_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match=r"no packed matrices of else\.gguf"):
        run("else.gguf")


def test_the_bound_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXLM_PACKED_CACHE", "0")
    assert "none are kept" in run()
