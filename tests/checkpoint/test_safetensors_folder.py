"""A folder of safetensors files as one set of tensors."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from exlm.checkpoint import SafetensorsFolder
from exlm.errors import BadFile, BadTensor, CheckpointError, MissingTensor, ModelNotFound, UnsafeFile
from tests.checkpoint.safetensors_bytes import (
    TYPES,
    file_bytes,
    header_entry,
    safetensors_bytes,
    same_bits,
    write_index,
    write_safetensors,
)

A, B = torch.arange(12.0).reshape(3, 4), torch.arange(5, dtype=torch.int32)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(TYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    values = torch.randint(0, 2 if dtype == torch.bool else 100, shape)
    return values.to(dtype)


@given(st.dictionaries(st.text(max_size=8), _tensors(), min_size=1, max_size=6), st.integers(0, 9))
def test_written_tensors_are_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor], pad: int
) -> None:
    tensors.pop("__metadata__", None)
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, pad=pad))
    files = SafetensorsFolder(folder)
    for name, tensor in tensors.items():
        info = files.info(name)
        assert (info.dtype, info.shape, info.nbytes) == (
            TYPES[tensor.dtype],
            tuple(tensor.shape),
            tensor.nbytes,
        )
        assert same_bits(files.view(name), tensor)
        if tensor.dim():
            for start in range(len(tensor) + 1):
                for stop in range(start, len(tensor) + 1):
                    assert same_bits(files.view_rows(name, start, stop), tensor[start:stop])


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    save_file({"a": A, "b": B, "c": A.bfloat16()}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    files = SafetensorsFolder(tmp_path)
    assert sorted(files.tensors) == ["a", "b", "c"]
    assert files.total_bytes == A.nbytes + B.nbytes + A.bfloat16().nbytes
    assert all(same_bits(files.view(name), tensor) for name, tensor in (("a", A), ("b", B), ("c", A.bfloat16())))
    assert "a" in files.tensors
    assert "d" not in files.tensors


def test_names_come_from_every_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A}, "output-00001-of-00002.safetensors")
    write_safetensors(tmp_path, {"b": B}, "output-00002-of-00002.safetensors")
    write_safetensors(tmp_path, {"c": B}, "extra.safetensors")
    files = SafetensorsFolder(tmp_path)
    assert set(files.tensors) == {"a", "b", "c"}
    assert [path.name for path in files.paths] == [
        "extra.safetensors",
        "output-00001-of-00002.safetensors",
        "output-00002-of-00002.safetensors",
    ]
    assert files.info("b").file.name == "output-00002-of-00002.safetensors"


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A})
    SafetensorsFolder(tmp_path).view("a").zero_()
    assert same_bits(SafetensorsFolder(tmp_path).view("a"), A)


def test_a_view_outlives_the_files(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A})
    files = SafetensorsFolder(tmp_path)
    view = files.view("a")
    files.close()
    assert same_bits(view, A)
    assert same_bits(files.view("a"), A)


def test_released_memory_is_read_again(tmp_path: Path) -> None:
    big = torch.randn(3000, 16)
    write_safetensors(tmp_path, {"small": A, "big": big, "next": B})
    files = SafetensorsFolder(tmp_path)
    files.release("big")
    view, neighbour = files.view("big"), files.view("next")
    neighbour.add_(1)
    files.release("big", 5, 2000)
    files.release("big")
    files.release("small")
    assert same_bits(view, big)
    assert same_bits(neighbour, B + 1)


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.randn(64, 64) for n in range(24)}
    for n in range(4):
        part = dict(list(tensors.items())[6 * n : 6 * n + 6])
        write_safetensors(tmp_path, part, f"model-{n + 1:05}-of-00004.safetensors")
    files, wrong = SafetensorsFolder(tmp_path), []

    def work() -> None:
        for _ in range(20):
            for name, tensor in tensors.items():
                if not torch.equal(files.view(name), tensor):
                    wrong.append(name)
                files.release(name)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("rows", [(-1, 2), (2, 1), (0, 4), (4, 5)])
def test_rows_beyond_the_tensor_are_refused(tmp_path: Path, rows: tuple[int, int]) -> None:
    files = SafetensorsFolder(write_safetensors(tmp_path, {"a": A}))
    with pytest.raises(BadTensor, match=r"tensor 'a'.*\[3, 4\]"):
        files.view_rows("a", *rows)


def test_a_file_that_shrank_since_is_not_mapped(tmp_path: Path) -> None:
    files = SafetensorsFolder(write_safetensors(tmp_path, {"a": A}))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadFile, match="when its header was read"):
        files.view("a")


def test_a_mapped_file_that_shrinks_is_not_touched_again(tmp_path: Path) -> None:
    """The file is downloaded again while the model loads; touching a truncated page would end the process."""
    files = SafetensorsFolder(write_safetensors(tmp_path, {"a": A}))
    files.view("a")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(4)
    with pytest.raises(BadFile, match="when its header was read, found 4"):
        files.view("a")


def test_a_file_that_was_deleted_is_refused(tmp_path: Path) -> None:
    files = SafetensorsFolder(write_safetensors(tmp_path, {"a": A}))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadFile, match=r"model\.safetensors"):
        files.view("a")


def test_a_stale_index_is_ignored(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A, "b": B}, "output.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "z": "model-00002-of-00002.safetensors"})
    files = SafetensorsFolder(tmp_path)
    assert same_bits(files.view("a"), A)
    with pytest.raises(MissingTensor, match=r"'z'.*model-00002-of-00002\.safetensors.*not in the folder"):
        files.view("z")


@pytest.mark.parametrize("size", [b"24.0", b"1.4e+10", b"NaN"])
def test_the_total_size_of_an_index_is_ignored(tmp_path: Path, size: bytes) -> None:
    write_safetensors(tmp_path, {"a": A})
    content = b'{"metadata": {"total_size": %s}, "weight_map": {"a": "model.safetensors"}}' % size
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    assert same_bits(SafetensorsFolder(tmp_path).view("a"), A)


def test_an_index_that_names_a_file_without_the_tensor(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A})
    write_index(tmp_path, {"z": "model.safetensors"})
    with pytest.raises(MissingTensor, match=r"'z'.*does not hold it"):
        SafetensorsFolder(tmp_path).info("z")


def test_a_missing_tensor_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(MissingTensor, match=r"tensor 'z' is in none of the files\.$"):
        SafetensorsFolder(write_safetensors(tmp_path, {"a": A})).info("z")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A}, "model.safetensors")
    write_safetensors(tmp_path, {"a": A + 1}, "model.fp16.safetensors")
    with pytest.raises(BadFile, match=r"model\.fp16\.safetensors: tensor 'a'.*model\.safetensors"):
        SafetensorsFolder(tmp_path)
    write_index(tmp_path, {"a": "elsewhere.safetensors"})
    with pytest.raises(BadFile, match="which of them counts"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(("chosen", "add"), [("model.safetensors", 0), ("model.fp16.safetensors", 1)])
def test_the_index_chooses_between_two_files(tmp_path: Path, chosen: str, add: int) -> None:
    write_safetensors(tmp_path, {"a": A}, "model.safetensors")
    write_safetensors(tmp_path, {"a": A + 1}, "model.fp16.safetensors")
    write_index(tmp_path, {"a": chosen})
    assert same_bits(SafetensorsFolder(tmp_path).view("a"), A + add)


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd",
        "../model.safetensors",
        "x/../../model.safetensors",
        "..",
        "",
        "C:\\model.safetensors",
        "..\\model.safetensors",
        "\\\\server\\share\\model.safetensors",
        "model.safetensors\0",
    ],
)
def test_an_index_may_not_point_outside(tmp_path: Path, file: str) -> None:
    write_safetensors(tmp_path, {"a": A})
    write_index(tmp_path, {"a": "model.safetensors", "b": file})
    with pytest.raises(BadFile, match=r"index\.json: tensor 'b'.*outside the folder"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"weight_map": {"a": "x", "a": "y"}}',
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    ],
)
def test_an_invalid_index_is_refused(tmp_path: Path, content: bytes) -> None:
    write_safetensors(tmp_path, {"a": A})
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(BadFile, match=r"index\.json"):
        SafetensorsFolder(tmp_path)


def test_shard_numbers_may_begin_with_0(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A}, "model-00000-of-00002.safetensors")
    with pytest.raises(BadFile, match=r"model-00001-of-00002\.safetensors missing; expected 2 files"):
        SafetensorsFolder(tmp_path)
    write_safetensors(tmp_path, {"b": B}, "model-00001-of-00002.safetensors")
    assert set(SafetensorsFolder(tmp_path).tensors) == {"a", "b"}


def test_missing_shards_are_named(tmp_path: Path) -> None:
    for n in (1, 3):
        write_safetensors(tmp_path, {f"t{n}": A}, f"model-{n:05}-of-00005.safetensors")
    with pytest.raises(BadFile) as caught:
        SafetensorsFolder(tmp_path)
    for n in (2, 4, 5):
        assert f"model-{n:05}-of-00005.safetensors" in str(caught.value)
    assert "model-00003-of" not in str(caught.value)


def test_an_absurd_shard_count_takes_no_time(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A}, "model-2-of-999999999.safetensors")
    with pytest.raises(BadFile, match=r"model-1-of-999999999.*and 999999994 more missing"):
        SafetensorsFolder(tmp_path)


def test_pickles_alone_are_refused_with_a_remedy(tmp_path: Path) -> None:
    for name in (
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "x.pt",
        "y.pth",
        "z.ckpt",
    ):
        (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UnsafeFile, match=r"pytorch_model-00001.*(?s:.*)python -c .*save_pretrained"):
        SafetensorsFolder(tmp_path)


def test_pickles_beside_safetensors_are_ignored(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A})
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert list(SafetensorsFolder(tmp_path).tensors) == ["a"]


@pytest.mark.parametrize("name", ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors"])
def test_weights_that_mistral_ships_a_second_time_are_left_out(name: str, tmp_path: Path) -> None:
    save_file({"tok_embeddings.weight": A}, tmp_path / name)
    if "-of-" not in name:
        assert list(SafetensorsFolder(tmp_path).tensors) == ["tok_embeddings.weight"]  # better than nothing
    save_file({"model.embed_tokens.weight": A}, tmp_path / "model.safetensors")
    files = SafetensorsFolder(tmp_path)
    assert list(files.tensors) == ["model.embed_tokens.weight"]
    assert files.total_bytes == A.nbytes


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", ["gone", "file"])
def test_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match=name):
        SafetensorsFolder(tmp_path / name)


def test_hidden_files_do_not_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": A})
    (tmp_path / "._model.safetensors").write_bytes(b"\0\5\x16\7")
    assert list(SafetensorsFolder(tmp_path).tensors) == ["a"]


def test_a_header_of_odd_length_is_read(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}'
    header += b" " * (1 - len(header) % 2)
    assert len(header) % 4 != 0
    data = torch.randn(2, 3)
    (tmp_path / "model.safetensors").write_bytes(file_bytes(header, data.numpy().tobytes()))
    files = SafetensorsFolder(tmp_path)
    assert same_bits(files.view("a"), data)
    assert same_bits(files.view_rows("a", 1, 2), data[1:])


def test_a_tensor_of_an_unknown_type_has_info(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(file_bytes({"a": header_entry("Q9", [3], [0, 5])}, bytes(5)))
    assert (SafetensorsFolder(tmp_path).info("a").dtype, SafetensorsFolder(tmp_path).info("a").nbytes) == (
        "Q9",
        5,
    )
