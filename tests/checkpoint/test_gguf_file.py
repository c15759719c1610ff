"""GGUF files: read as the gguf package reads them; damaged ones raise an error."""

from __future__ import annotations

import os
import random
import shutil
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from exlm.checkpoint import gguf_file
from exlm.checkpoint.gguf_file import GgufFile
from exlm.errors import BadFile, BadTensor, CheckpointError, MissingTensor, ModelNotFound
from tests.checkpoint.gguf_bytes import (
    gguf_bytes,
    metadata_bytes,
    string_bytes,
    tensor_info_bytes,
    write_gguf,
)

Q8 = gguf.GGMLQuantizationType.Q8_0

METADATA: dict[str, Any] = {
    "llama.block_count": 3,
    "llama.rope.freq_base": 10000.5,
    "llama.flag": True,
    "general.name": "ein Modell, größer",
    "tokenizer.ggml.tokens": ["<s>", "a", "größe", ""],
    "tokenizer.ggml.scores": [0.0, -1.5, 2.25, 1e-3],
    "tokenizer.ggml.token_type": [3, 1, 1, 1],
    "some.flags": [True, False, True],
}


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    return {
        "token_embd.weight": rng.standard_normal((6, 32), dtype=np.float32),
        "blk.0.attn_q.weight": rng.standard_normal((4, 32)).astype(np.float16),
        "blk.0.ffn_up.weight": rng.integers(0, 256, (5, 2 * 34), dtype=np.uint8),
        "blk.0.ffn_gate_exps.weight": rng.standard_normal((2, 3, 8), dtype=np.float32),
        "output_norm.weight": rng.standard_normal(32, dtype=np.float32),
    }


@pytest.fixture(scope="module")
def valid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, "llama", tensors(), METADATA, {"blk.0.ffn_up.weight": Q8})


def test_reads_what_the_gguf_package_reads(valid_file: Path) -> None:
    file, by_gguf_package = GgufFile(valid_file), gguf.GGUFReader(valid_file)
    fields = {name: field for name, field in by_gguf_package.fields.items() if not name.startswith("GGUF.")}
    assert {name: field.contents() for name, field in fields.items()} == dict(file.metadata)
    assert type(file.metadata["llama.flag"]) is bool
    assert type(file.metadata["llama.block_count"]) is int
    assert set(file.tensors) == {tensor.name for tensor in by_gguf_package.tensors}
    for tensor in by_gguf_package.tensors:
        entry = file.tensors[tensor.name]
        assert (entry.dtype, entry.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert file.view(tensor.name).numpy().tobytes() == tensor.data.tobytes()
    assert file.total_bytes == sum(tensor.n_bytes for tensor in by_gguf_package.tensors)


def test_rows_are_runs_of_the_innermost_size(valid_file: Path) -> None:
    file, stored = GgufFile(valid_file), tensors()
    raw = file.view_rows("blk.0.ffn_gate_exps.weight", 3, 5)
    expected = torch.from_numpy(stored["blk.0.ffn_gate_exps.weight"]).view(6, 8)[3:5]
    assert torch.equal(raw.view(torch.float32), expected)
    assert file.view_rows("blk.0.ffn_up.weight", 1, 3).shape == (2, 68)
    assert file.view_rows("blk.0.ffn_up.weight", 2, 2).shape == (0, 68)
    with pytest.raises(BadTensor, match="at least 6 rows, found 5"):
        file.view_rows("blk.0.ffn_up.weight", 1, 6)
    with pytest.raises(MissingTensor, match=r"'nothing'"):
        file.view("nothing")


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    values = np.arange(300_000, dtype=np.float32).reshape(3, -1)
    file = GgufFile(write_gguf(tmp_path / "big.gguf", "llama", {"x": values}))
    view = file.view("x")
    file.release("x")
    assert torch.equal(view.view(torch.float32), torch.from_numpy(values))


def test_a_file_that_shrinks_is_not_touched_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {"x": np.arange(8, dtype=np.float32)})
    file = GgufFile(path)
    file.view("x")
    with path.open("r+b") as opened:
        opened.truncate(4)
    with pytest.raises(BadFile, match="as when its header was read, found 4"):
        file.view("x")


def test_a_closed_file_is_mapped_again_unless_it_changed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {"x": np.arange(8, dtype=np.float32)})
    file = GgufFile(path)
    view = file.view("x")
    file.close()
    file.release("x")
    assert torch.equal(file.view("x"), view)
    file.close()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadFile, match="as when its header was read"):
        file.view("x")


def test_the_header_of_an_open_file_is_not_parsed_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {"x": np.arange(8, dtype=np.float32)}, METADATA)
    first, second = GgufFile(path), GgufFile(path)
    assert all(second.metadata[key] is value for key, value in first.metadata.items())
    assert torch.equal(first.view("x"), second.view("x"))
    time = path.stat().st_mtime_ns
    write_gguf(path, "llama", {"y": np.arange(16, dtype=np.float32)})
    os.utime(path, ns=(time, time))
    assert list(GgufFile(path).tensors) == ["y"]  # another size
    write_gguf(path, "llama", {"z": np.arange(16, dtype=np.float32)})
    os.utime(path, ns=(time, time + 1))
    assert list(GgufFile(path).tensors) == ["z"]  # another time
    assert list(first.tensors) == ["x"]


def test_rope_factors_are_read_as_numbers(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 8.0], dtype=np.float32)
    file = GgufFile(write_gguf(tmp_path / "a.gguf", "llama", {"rope_freqs.weight": factors}))
    assert file.rope_factors() == {"rope_freqs.weight": [1.0, 1.5, 8.0]}
    wide = GgufFile(write_gguf(tmp_path / "b.gguf", "llama", {"rope_freqs.weight": factors.astype(np.float16)}))
    with pytest.raises(BadTensor, match="numbers of F32, found F16"):
        wide.rope_factors()


def test_alignment_comes_from_the_header(tmp_path: Path) -> None:
    data = struct.pack("<8f", *range(8))
    keys = [metadata_bytes("general.alignment", "u32", 64)]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys, [tensor_info_bytes()], data, alignment=64))
    assert GgufFile(tmp_path / "m.gguf").view("x").view(torch.float32).tolist() == [list(range(8))]


def test_arrays_in_arrays(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<2I", 7, 8)
    keys = [metadata_bytes("a", "array", struct.pack("<IQ", 9, 2) + inner + inner)]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys))
    assert GgufFile(tmp_path / "m.gguf").metadata["a"] == [[7, 8], [7, 8]]


F8 = bytes(32)
DEEP = b"".join(struct.pack("<IQ", 9, 1) for _ in range(40))

DAMAGED_FILES = {
    "not a gguf file": (gguf_bytes(magic=b"GGML"), "begins with b'GGUF', found b'GGML'"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "version 1": (gguf_bytes(version=1), "version 2 or 3, found 1"),
    "version 4": (gguf_bytes(version=4), "version 2 or 3, found 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (gguf_bytes(counts=(2**60, 0)), "at most 1048576 tensors"),
    "more tensors than bytes": (gguf_bytes(counts=(1000, 0)), "1000 tensors do not fit"),
    "many keys": (gguf_bytes(counts=(0, 2**63)), "at most 65536 keys"),
    "more keys than bytes": (gguf_bytes(counts=(0, 9)), "9 keys do not fit"),
    "long name": (gguf_bytes([struct.pack("<Q", 2**40)], counts=(0, 1), data=F8), "name of at most 65536"),
    "long text": (
        gguf_bytes([string_bytes("a") + struct.pack("<IQ", 8, 2**40)], data=F8),
        "needs 1099511627776 bytes",
    ),
    "long array": (
        gguf_bytes([metadata_bytes("a", "array", struct.pack("<IQ", 0, 2**62))]),
        "at most 8388608 values",
    ),
    "array beyond the file": (
        gguf_bytes([metadata_bytes("a", "array", struct.pack("<IQ", 12, 100))]),
        "do not fit",
    ),
    "deep arrays": (gguf_bytes([metadata_bytes("a", "array", DEEP)], data=F8), "at most 4 deep"),
    "unknown kind": (gguf_bytes([string_bytes("a") + struct.pack("<I", 13)], data=F8), "up to 12"),
    "unknown array": (
        gguf_bytes([metadata_bytes("a", "array", struct.pack("<IQ", 77, 1))], data=F8),
        "found 77",
    ),
    "neither true nor false": (
        gguf_bytes([metadata_bytes("a", "bool", 3)], data=F8),
        "expected true or false",
    ),
    "bad text": (gguf_bytes([metadata_bytes("a", "string", string_bytes(b"\xff\xfe"))]), "not UTF-8"),
    "key twice": (gguf_bytes([metadata_bytes("a", "u8", 1)] * 2), "key 'a' is there twice"),
    "tensor twice": (
        gguf_bytes(infos=[tensor_info_bytes(), tensor_info_bytes(offset=32)], data=F8 * 2),
        "'x' is there twice",
    ),
    "no dimensions": (gguf_bytes(infos=[tensor_info_bytes(dims=())], data=F8), "1 to 4 dimensions, found 0"),
    "five dimensions": (
        gguf_bytes(infos=[tensor_info_bytes(dims=(1,) * 5)], data=F8),
        "1 to 4 dimensions, found 5",
    ),
    "size zero": (gguf_bytes(infos=[tensor_info_bytes(dims=(8, 0))], data=F8), r"found \[0, 8\]"),
    "broken block": (
        gguf_bytes(infos=[tensor_info_bytes(dims=(33,), kind=8)], data=F8 * 2),
        "whole Q8_0 blocks of 32",
    ),
    "unknown type": (gguf_bytes(infos=[tensor_info_bytes(kind=99)], data=F8), "unknown type 99"),
    "type given up": (
        gguf_bytes(infos=[tensor_info_bytes(kind=31)], data=F8),
        r"'x' is stored as Q4_0_4_4, .* the Q4_0 file",
    ),
    "other given up": (
        gguf_bytes(infos=[tensor_info_bytes(kind=36)], data=F8),
        "IQ4_NL_4_4, .* the IQ4_NL file",
    ),
    "huge sizes": (gguf_bytes(infos=[tensor_info_bytes(dims=(2**40, 2**40, 2**40))], data=F8), "cut short"),
    "offset outside": (gguf_bytes(infos=[tensor_info_bytes(offset=2**63)], data=F8), "cut short"),
    "odd offset": (gguf_bytes(infos=[tensor_info_bytes(offset=4)], data=F8 * 2), "multiple of 32, found 4"),
    "overlap": (
        gguf_bytes(infos=[tensor_info_bytes(dims=(16,)), tensor_info_bytes("y", offset=32)], data=F8 * 3),
        "'x' and 'y' overlap",
    ),
    "cut short": (gguf_bytes(infos=[tensor_info_bytes()], data=F8[:-1]), "cut short"),
    "alignment of three": (gguf_bytes([metadata_bytes("general.alignment", "u32", 3)]), "power of two"),
    "no alignment": (gguf_bytes([metadata_bytes("general.alignment", "u32", 0)]), "power of two"),
    "alignment as text": (gguf_bytes([metadata_bytes("general.alignment", "string", "32")]), "of kind 4"),
    "empty": (b"", "at least 24 bytes, found 0"),
    "only a start": (b"GGUF\x03\0\0\0", "at least 24 bytes, found 8"),
}


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_refuses(damage: str, tmp_path: Path) -> None:
    content, complaint = DAMAGED_FILES[damage]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=complaint) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_refuses_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        GgufFile(tmp_path / "nothing.gguf")
    with pytest.raises(BadFile, match="found a folder"):
        GgufFile(tmp_path)


def test_arrays_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_ITEMS", 10)
    keys = [metadata_bytes(name, "array", struct.pack("<IQ", 0, 6) + bytes(6)) for name in "ab"]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys))
    with pytest.raises(BadFile, match="at most 4 values, found 6"):
        GgufFile(tmp_path / "m.gguf")


def _reads_or_refuses(path: Path) -> bool:
    """Whether a file reads; one that does not must be refused as damaged."""
    try:
        file = GgufFile(path)
        for name, entry in file.tensors.items():
            assert file.view(name).sum().item() >= 0
            assert file.view(name).nbytes == entry.nbytes
        file.rope_factors()
    except CheckpointError:
        return False
    return True


def test_a_file_cut_anywhere_is_refused(valid_file: Path, tmp_path: Path) -> None:
    content = valid_file.read_bytes()
    path = tmp_path / "cut.gguf"
    last = max(entry.offset + entry.nbytes for entry in GgufFile(valid_file).tensors.values())
    for size in sorted({*range(0, len(content), 7), last - 1, last, len(content)}):
        path.write_bytes(content[:size])
        assert _reads_or_refuses(path) == (size >= last), size


def _mutate(content: bytes, source: random.Random, header: int) -> bytes:
    """A file with random changes, mostly in its header: bits, numbers, lengths, runs of bytes."""
    data = bytearray(content)
    for _ in range(source.choice((1, 1, 1, 2, 5))):
        at = source.randrange(header)
        kind = source.randrange(5)
        if kind == 0:
            data[at] ^= 1 << source.randrange(8)
        elif kind == 1:
            huge = source.choice((0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1))
            data[at : at + 8] = huge.to_bytes(8, "little")
        elif kind == 2:
            data[at : at + 4] = source.randbytes(4)
        elif kind == 3:
            del data[at : at + source.randrange(1, 20)]
        else:
            data[at:at] = source.randbytes(source.randrange(1, 20))
    return bytes(data)


def test_mutations_read_or_are_refused(valid_file: Path, tmp_path: Path) -> None:
    content, source = valid_file.read_bytes(), random.Random(11)
    header = min(entry.offset for entry in GgufFile(valid_file).tensors.values())
    path = tmp_path / "mutated.gguf"
    read = 0
    tracemalloc.start()
    for _ in range(500):
        path.write_bytes(_mutate(content, source, header))
        started = time.perf_counter()
        read += _reads_or_refuses(path)
        assert time.perf_counter() - started < 5
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < read < 500
    assert peak < 16 * 2**20, f"{peak} bytes for a file of {len(content)}"


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    write_gguf(
        tmp_path / "model.gguf",
        "llama",
        tensors(),
        METADATA,
        {"blk.0.ffn_up.weight": Q8},
        split_max_tensors=2,
    )
    return sorted(tmp_path.glob("model-*.gguf"))


def test_a_split_model_reads_from_any_of_its_files(split: list[Path], valid_file: Path) -> None:
    assert [path.name for path in split] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    one = GgufFile(valid_file)
    for path in split:
        file = GgufFile(path)
        assert file.paths == tuple(split)
        assert {name: entry.shape for name, entry in file.tensors.items()} == {
            name: entry.shape for name, entry in one.tensors.items()
        }
        for name in one.tensors:
            assert torch.equal(file.view(name), one.view(name))
        assert file.metadata["tokenizer.ggml.tokens"] == METADATA["tokenizer.ggml.tokens"]


def test_a_split_model_needs_all_its_files(split: list[Path]) -> None:
    split[1].unlink()
    with pytest.raises(BadFile, match=r"expected 3 files, model-00002-of-00003\.gguf missing"):
        GgufFile(split[0])


def test_files_of_a_split_model_keep_their_names_and_places(split: list[Path], tmp_path: Path) -> None:
    renamed = tmp_path / "part.gguf"
    shutil.copy(split[0], renamed)
    with pytest.raises(BadFile, match="must keep its name"):
        GgufFile(renamed)
    shutil.copy(split[0], split[1])
    with pytest.raises(BadFile, match=r"expected file 1 of 3 by its own count, found 0 of 3"):
        GgufFile(split[2])
