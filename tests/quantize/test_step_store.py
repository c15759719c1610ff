"""Operations are visible at once, written in order, and nothing is written after a failure."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exlm.errors import CheckpointError, ModelNotFound
from exlm.quantize import step_store
from exlm.quantize.step_store import StepStore, open_step_store, store_dir

OPERATIONS = st.tuples(
    st.sampled_from(["save", "save_json", "delete", "has", "load", "load_json"]), st.sampled_from("ab")
)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk."""
    sync = step_store.os.fsync
    monkeypatch.setattr(step_store.os, "fsync", lambda file: (time.sleep(0.002), sync(file)))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(OPERATIONS, max_size=12))
def test_operations_are_visible_at_once(
    slow: None, tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("job")
    store, tensors, values = StepStore(folder), {}, {}
    for number, (operation, name) in enumerate(operations):
        match operation:
            case "save":
                x = torch.full((3,), float(number))
                tensors[name] = x.clone()
                store.save(name, {"x": x, "y": x})
                x.zero_()  # the store has its own copy
            case "save_json":
                values[name] = number
                store.save_json(name, number)
            case "delete":
                tensors.pop(name, None)
                store.delete(name)
            case "has":
                assert store.has(name) == (name in tensors)
            case "load" if name in tensors:
                assert all(torch.equal(found, tensors[name]) for found in store.load(name).values())
            case "load_json":
                assert store.load_json(name) == values.get(name)
    store.close()
    kept = {f"{name}.safetensors" for name in tensors} | {f"{name}.json" for name in values}
    assert {path.name for path in folder.iterdir()} == kept


def test_nothing_is_written_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StepStore(tmp_path)
    store.save_json("before", 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step_store, "save_file", full)
    store.save("a", {"x": torch.ones(2)})
    with suppress(CheckpointError):  # raised here only if the write has failed by then
        store.save_json("behind", 1)
    store.close()
    with pytest.raises(CheckpointError, match=r"a\.safetensors .*Make room"):
        store.has("a")
    assert [path.name for path in tmp_path.iterdir()] == ["before.json"]


def test_a_failure_of_the_last_write_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(step_store, "save_file", broken)
    with (
        pytest.raises(ZeroDivisionError),
        open_step_store(tmp_path / "model", {}, restart=False) as store,
    ):
        store.save("a", {"x": torch.ones(2)})
    assert not store_dir(tmp_path / "model").exists()


def test_a_missing_model_is_not_reported_as_a_write_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelNotFound, match="Can't find"),
        open_step_store(tmp_path / "model", {}, restart=False),
    ):
        raise ModelNotFound("Can't find the source.")


def test_a_name_too_long_is_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"could not be written .*File name too long"),
        open_step_store(tmp_path / ("x" * 250), {}, restart=False),
    ):
        pass


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"{",
    "not UTF-8": b"\xff",
    "deep": b"[" * 100_000,
    "many digits": b"9" * 5000,
    "zeros": bytes(8),
    "a huge header": b"\xff" * 64,
    "more data than the header names": b"\x02" + bytes(7) + b"{}x",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_steps_are_named_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    store = StepStore(tmp_path)
    for name in ("a.json", "b.safetensors"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.json belongs to an unfinished job .*restart"):
        store.load_json("a")
    with pytest.raises(CheckpointError, match=r"b\.safetensors belongs to an unfinished job .*restart"):
        store.load("b")
    store.close()


@pytest.mark.parametrize("content", ["[]", '"text"', "3", "{"])
def test_a_damaged_job_file_is_named_and_restart_removes_it(tmp_path: Path, content: str) -> None:
    folder = store_dir(tmp_path / "model")
    folder.mkdir()
    (folder / "job.json").write_text(content)
    (folder / "ids.safetensors").touch()
    with (
        pytest.raises(CheckpointError, match=r"job\.json belongs to an unfinished job .*restart"),
        open_step_store(tmp_path / "model", {"bits": 4}, restart=False),
    ):
        pass
    with open_step_store(tmp_path / "model", {"bits": 4}, restart=True) as store:
        assert not store.has("ids")
