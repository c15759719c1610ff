"""The writer: saved tensors are read back equal, and no model is ever left half-written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from exlm.checkpoint import SafetensorsFolder, save_sharded, writer
from exlm.errors import BadTensor, CheckpointError, InputError
from tests.checkpoint.safetensors_bytes import TYPES, same_bits, write_safetensors

INDEX = "model.safetensors.index.json"


def _tensors(count: int = 6, add: int = 0) -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.arange(n, n + 10.0) + add for n in range(count)}


@given(
    st.dictionaries(
        st.text(max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(TYPES)), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 200),
)
def test_saved_tensors_are_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: dict[str, tuple[torch.dtype, list[int]]],
    shard_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("m") / "new"
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in kinds.items()}
    progress: list[tuple[int, int]] = []
    paths = save_sharded(folder, tensors.items(), shard_bytes=shard_bytes, progress=lambda *done: progress.append(done))
    files = SafetensorsFolder(folder)
    assert files.paths == tuple(paths)
    assert set(files.tensors) == set(tensors)
    assert all(same_bits(files.view(name), tensor) for name, tensor in tensors.items())
    assert progress[-1] == (len(tensors), files.total_bytes)
    assert len(progress) == len(paths)
    for path in paths:
        inside = [tensor for name, tensor in tensors.items() if files.info(name).file == path]
        assert len(inside) == 1 or sum(tensor.nbytes for tensor in inside) <= shard_bytes
        with safe_open(path, "pt") as opened:  # another reader agrees
            assert len(list(opened.keys())) == len(inside)
    expected = {path.name for path in paths} | ({INDEX} if len(paths) > 1 else set())
    assert set(os.listdir(folder)) == expected


def test_one_file(tmp_path: Path) -> None:
    [path] = save_sharded(tmp_path, _tensors().items(), shard_bytes=10**6, metadata={"made": "here"})
    assert os.listdir(tmp_path) == ["model.safetensors"]
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "made": "here"}


def test_several_files_and_their_index(tmp_path: Path) -> None:
    paths = save_sharded(tmp_path, _tensors().items(), shard_bytes=80)
    assert [path.name for path in paths] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 6 * 40
    assert index["weight_map"] == {f"t{n}": paths[n // 2].name for n in range(6)}


def test_views_and_shared_memory(tmp_path: Path) -> None:
    full = torch.randn(8, 8)
    tensors = {
        "full": full,
        "again": full,
        "rows": full[2:4],
        "columns": full[:, 1:3],
        "turned": full.T,
        "grown": torch.ones(1).expand(5),
        "learned": torch.nn.Parameter(full[0]),
    }
    save_sharded(tmp_path, tensors.items(), shard_bytes=10**6)
    files = SafetensorsFolder(tmp_path)
    assert all(same_bits(files.view(name), tensor.detach()) for name, tensor in tensors.items())


def test_tensors_that_were_read_can_be_saved(tmp_path: Path) -> None:
    files = SafetensorsFolder(write_safetensors(tmp_path / "a", _tensors()))
    save_sharded(tmp_path / "b", ((name, files.view(name)) for name in files.tensors), shard_bytes=100)
    again = SafetensorsFolder(tmp_path / "b")
    assert all(same_bits(again.view(name), tensor) for name, tensor in _tensors().items())


def test_only_one_shard_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0]
    real = writer._ShardWriter.add

    def add(self: writer._ShardWriter, name: str, tensor: torch.Tensor) -> None:
        real(self, name, tensor)
        most[0] = max(most[0], sum(tensor.nbytes for tensor in self._held.values()))

    monkeypatch.setattr(writer._ShardWriter, "add", add)
    save_sharded(tmp_path, ((f"t{n}", torch.zeros(10)) for n in range(20)), shard_bytes=120)
    assert most == [120]


class TestRefusals:
    """Models are not overwritten or mixed unless asked."""

    @pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", INDEX])
    def test_weights_are_there(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"precious")
        with pytest.raises(CheckpointError, match=f"already holds weights \\({name}\\).*overwrite"):
            save_sharded(tmp_path, _tensors().items(), shard_bytes=100)
        assert (tmp_path / name).read_bytes() == b"precious"
        assert os.listdir(tmp_path) == [name]

    def test_other_weights_are_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "output.safetensors").write_bytes(b"precious")
        with pytest.raises(CheckpointError, match=r"output\.safetensors.*Remove it"):
            save_sharded(tmp_path, _tensors().items(), shard_bytes=100, overwrite=True)

    def test_a_name_twice(self, tmp_path: Path) -> None:
        pairs = [("a", torch.ones(1)), ("a", torch.ones(1))]
        with pytest.raises(CheckpointError, match="'a' is reserved or was given twice"):
            save_sharded(tmp_path, pairs, shard_bytes=100)
        with pytest.raises(CheckpointError, match="__metadata__"):
            save_sharded(tmp_path, [("__metadata__", torch.ones(1))], shard_bytes=100)
        assert os.listdir(tmp_path) == []

    def test_unsupported_tensors_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadTensor, match="complex128"):
            save_sharded(tmp_path, [("a", torch.ones(1, dtype=torch.complex128))], shard_bytes=100)
        with pytest.raises(BadTensor, match="sparse"):
            save_sharded(tmp_path, [("a", torch.ones(2).to_sparse())], shard_bytes=100)

    def test_saving_no_tensors_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no tensors"):
            save_sharded(tmp_path, [], shard_bytes=100)
        with pytest.raises(InputError, match="shard_bytes"):
            save_sharded(tmp_path, _tensors().items(), shard_bytes=0)

    def test_an_unwritable_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match="could not be written"):
            save_sharded(tmp_path / "file", _tensors().items(), shard_bytes=100)


@pytest.mark.parametrize(("before", "after"), [(80, 80), (80, 10**6), (10**6, 80), (10**6, 10**6), (40, 120)])
def test_a_model_is_replaced_as_a_whole(tmp_path: Path, before: int, after: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_sharded(tmp_path, _tensors(7).items(), shard_bytes=before)
    save_sharded(tmp_path, _tensors(6, add=1).items(), shard_bytes=after, overwrite=True)
    files = SafetensorsFolder(tmp_path)
    assert set(files.tensors) == set(_tensors(6))
    assert all(same_bits(files.view(name), tensor) for name, tensor in _tensors(6, add=1).items())
    assert (tmp_path / "config.json").exists()
    assert (tmp_path / INDEX).exists() == (after != 10**6)


class Crash(BaseException):
    """An error that no handler expects."""


def test_a_crash_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from _tensors().items()
        raise Crash

    with pytest.raises(Crash):
        save_sharded(tmp_path, tensors(), shard_bytes=80)
    assert os.listdir(tmp_path) == []
    save_sharded(tmp_path, _tensors().items(), shard_bytes=80)
    with pytest.raises(Crash):
        save_sharded(tmp_path, tensors(), shard_bytes=10**6, overwrite=True)
    assert all(same_bits(SafetensorsFolder(tmp_path).view(name), tensor) for name, tensor in _tensors().items())


@pytest.mark.parametrize("step", range(12))
@pytest.mark.parametrize(("before", "after"), [(80, 80), (80, 10**6), (10**6, 80), (10**6, 10**6)])
def test_a_crash_while_renaming_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, before: int, after: int
) -> None:
    old, new = _tensors(), _tensors(add=1)
    save_sharded(tmp_path, old.items(), shard_bytes=before)
    steps = iter(range(100))

    def crash_at(real: str) -> None:
        method = getattr(Path, real)

        def moved(self: Path, *args: object) -> object:
            if next(steps) == step:
                raise Crash
            return method(self, *args)

        monkeypatch.setattr(Path, real, moved)

    crash_at("replace")
    crash_at("unlink")
    with suppress(Crash):
        save_sharded(tmp_path, new.items(), shard_bytes=after, overwrite=True)
    monkeypatch.undo()
    try:
        files = SafetensorsFolder(tmp_path)
    except CheckpointError:
        return
    read = {name: files.view(name) for name in files.tensors}
    assert any(
        set(read) == set(model) and all(same_bits(read[name], model[name]) for name in model) for model in (old, new)
    )
