"""Damaged and hostile headers: each file is read correctly or refused with a CheckpointError, quickly."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch

from exlm.checkpoint import SafetensorsCheckpoint, SafetensorsFolder
from exlm.checkpoint.safetensors_files import MAX_HEADER, read_header
from exlm.errors import BadFile, CheckpointError
from exlm.spec.tensor_names import TensorNames
from tests.checkpoint.safetensors_bytes import file_bytes, header_entry, safetensors_bytes, same_bits

ENTRY = header_entry()
DATA_2 = 48 * b"\0"
DATA = 24 * b"\0"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"

BAD_FILES = {
    "empty file": (b"", "found 0 bytes"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "found 7 bytes"),
    "length only": (bytes(8), "JSON"),
    "length 2^64-1": (b"\xff" * 8 + b"{}", "18446744073709551615"),
    "length 2^63": ((2**63).to_bytes(8, "little") + b"{}", "9223372036854775808"),
    "length over the limit": ((MAX_HEADER + 1).to_bytes(8, "little") + b"{}", str(MAX_HEADER)),
    "length past the end": ((3).to_bytes(8, "little") + b"{}", "2 follow"),
    "git-lfs pointer": (POINTER, "git lfs pull"),
    "web page": (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "damaged"),
    "zip file": (b"PK\3\4" + bytes(100), "67324752 bytes"),
    "not UTF-8": (file_bytes(b'{"\xff\xfe": 1}'), "UTF-8"),
    "UTF-16": (file_bytes('{"a": 1}'.encode("utf-16-le")), "JSON"),
    "byte order mark": (file_bytes(b"\xef\xbb\xbf{}"), "JSON"),
    "not JSON": (file_bytes(b"hello there"), "JSON"),
    "cut JSON": (file_bytes(b'{"a": {"dtype": "F32", "sha'), "JSON"),
    "two JSONs": (file_bytes(b"{}{}"), "JSON"),
    "trailing comma": (file_bytes(b'{"a": 1,}'), "JSON"),
    "a list": (file_bytes([]), "JSON object"),
    "a number": (file_bytes(12), "JSON object"),
    "null": (file_bytes(None), "JSON object"),
    "a string": (file_bytes("hello"), "JSON object"),
    "not a number": (file_bytes(b'{"a": NaN}'), "whole number"),
    "deep nesting": (file_bytes(b"[" * 100_000), "JSON"),
    "deep objects": (file_bytes(b'{"a":' * 100_000), "JSON"),
    "endless number": (file_bytes(b'{"a": ' + b"9" * 1_000_000 + b"}"), "JSON"),
    "key twice": (
        file_bytes(b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2), DATA),
        "'a' is there twice",
    ),
    "field twice": (
        file_bytes(b'{"a": {"dtype": "F32", "dtype": "I32", "shape": [2, 3], "data_offsets": [0, 24]}}', DATA),
        "'dtype' is there twice",
    ),
    "metadata is a list": (file_bytes({"__metadata__": [], "a": ENTRY}, DATA), "__metadata__"),
    "metadata holds a number": (
        file_bytes({"__metadata__": {"format": 1}, "a": ENTRY}, DATA),
        "__metadata__",
    ),
    "entry is null": (file_bytes({"a": None}), "'a'"),
    "entry is a list": (file_bytes({"a": ["F32", [2, 3], [0, 24]]}, DATA), "'a'"),
    "no dtype": (file_bytes({"a": {"shape": [2, 3], "data_offsets": [0, 24]}}, DATA), "'a'"),
    "no shape": (file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 24]}}, DATA), "'a'"),
    "no offsets": (file_bytes({"a": {"dtype": "F32", "shape": [2, 3]}}, DATA), "'a'"),
    "dtype is a number": (file_bytes({"a": header_entry(32)}, DATA), "found 32"),
    "dtype is null": (file_bytes({"a": header_entry(None)}, DATA), "found None"),
    "shape is a number": (file_bytes({"a": header_entry(shape=6)}, DATA), "found 6"),
    "shape is a string": (file_bytes({"a": header_entry(shape="23")}, DATA), "found '23'"),
    "shape holds a string": (file_bytes({"a": header_entry(shape=["2", 3])}, DATA), "shape"),
    "shape holds true": (file_bytes({"a": header_entry(shape=[True, 6])}, DATA), "shape"),
    "shape holds a fraction": (file_bytes({"a": header_entry(shape=[2.0, 3])}, DATA), "whole number"),
    "shape holds null": (file_bytes({"a": header_entry(shape=[None, 3])}, DATA), "shape"),
    "shape holds a list": (file_bytes({"a": header_entry(shape=[[2], 3])}, DATA), "shape"),
    "negative sizes": (file_bytes({"a": header_entry(shape=[-2, -3])}, DATA), "[-2, -3]"),
    "huge size": (file_bytes({"a": header_entry(shape=[2**64])}, DATA), "shape"),
    "sizes that wrap to 24 bytes": (
        file_bytes({"a": header_entry(shape=[2**62, 2**62 + 6, 1])}, DATA),
        "elements",
    ),
    "empty but huge": (file_bytes({"a": header_entry(shape=[0, 2**62, 2**62], offsets=[0, 0])}), "elements"),
    "a thousand dimensions": (
        file_bytes({"a": header_entry(shape=[1] * 1000, offsets=[0, 4])}, b"1234"),
        "64",
    ),
    "shape too large for the bytes": (
        file_bytes({"a": header_entry(shape=[2, 4])}, DATA),
        "32 bytes",
    ),
    "shape too small for the bytes": (
        file_bytes({"a": header_entry(shape=[2, 2])}, DATA),
        "16 bytes",
    ),
    "type too wide for the bytes": (file_bytes({"a": header_entry("F64")}, DATA), "48 bytes"),
    "offsets are a number": (file_bytes({"a": header_entry(offsets=24)}, DATA), "data_offsets"),
    "one offset": (file_bytes({"a": header_entry(offsets=[24])}, DATA), "data_offsets"),
    "three offsets": (file_bytes({"a": header_entry(offsets=[0, 12, 24])}, DATA), "data_offsets"),
    "offsets fall": (file_bytes({"a": header_entry(offsets=[24, 0])}, DATA), "[24, 0]"),
    "negative offsets": (file_bytes({"a": header_entry(offsets=[-24, 0])}, DATA), "[-24, 0]"),
    "huge offsets": (
        file_bytes({"a": header_entry(offsets=[2**64 - 24, 2**64])}, DATA),
        "data_offsets",
    ),
    "offsets past the end": (
        file_bytes({"a": ENTRY, "b": header_entry(offsets=[24, 48])}, DATA),
        "'b'",
    ),
    "offsets far past the end": (
        file_bytes({"a": header_entry(offsets=[2**40, 2**40 + 24])}, DATA),
        "'a'",
    ),
    "overlap": (
        file_bytes({"a": ENTRY, "b": header_entry(offsets=[20, 44])}, DATA_2[:44]),
        "'a' and 'b' overlap",
    ),
    "the same bytes twice": (file_bytes({"a": ENTRY, "b": ENTRY}, DATA), "overlap"),
    "one inside the other": (
        file_bytes({"a": header_entry(shape=[12], offsets=[0, 48]), "b": ENTRY}, DATA_2),
        "overlap",
    ),
    "misaligned": (
        file_bytes({"a": header_entry("U8", [2], [0, 2]), "b": header_entry(offsets=[2, 26])}, bytes(26)),
        "multiple of 4",
    ),
    "a hole": (
        file_bytes({"a": ENTRY, "b": header_entry(offsets=[28, 52])}, bytes(52)),
        "expected to start at 24",
    ),
    "a hole in front": (
        file_bytes({"a": header_entry(offsets=[24, 48])}, DATA_2),
        "expected to start at 0",
    ),
    "bytes left over": (file_bytes({"a": ENTRY}, DATA + b"x"), "found 25"),
    "bytes and no tensor": (file_bytes({}, DATA), "found 24"),
    "one byte short": (file_bytes({"a": ENTRY}, DATA[:-1]), "found 23"),
    "no data": (file_bytes({"a": ENTRY}), "found 0"),
    "unknown type past the end": (
        file_bytes({"a": header_entry("Q9", [2, 3], [0, 99])}, DATA),
        "found 24",
    ),
    "unknown type overlaps": (
        file_bytes({"a": header_entry("Q9", [2, 3], [0, 24]), "b": ENTRY}, DATA),
        "overlap",
    ),
}


@pytest.mark.parametrize(("content", "says"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    start = time.monotonic()
    with pytest.raises(BadFile) as caught:
        SafetensorsFolder(tmp_path)
    assert time.monotonic() - start < 5
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_the_fixtures_have_enough_bad_files() -> None:
    assert len(BAD_FILES) >= 60


def test_messages_stay_short_and_printable(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes({"\ud800" + "x" * 100_000: [0] * 100_000}))
    with pytest.raises(BadFile) as caught:
        read_header(path)
    assert len(str(caught.value).encode()) < 1500


def test_a_hostile_header_is_refused_in_bounded_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(b'{"a":[' + b"[]," * 20_000_000 + b"0]}"))
    start = time.monotonic()
    with pytest.raises(BadFile, match="brackets"):
        read_header(path)
    assert time.monotonic() - start < 2


def test_a_header_of_many_tensors_is_accepted(tmp_path: Path) -> None:
    header = {f"{n:x}": header_entry("U8", [], [n, n + 1]) for n in range(30_000)}
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) > 2**20
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(text, bytes(30_000)))
    assert len(read_header(path).tensors) == 30_000


def test_a_claimed_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((10**12).to_bytes(8, "little"))
        file.truncate(2 * 10**12)  # sparse: the length is true, and still absurd
    with pytest.raises(BadFile, match=str(10**12)):
        read_header(path)


@pytest.mark.parametrize("make", ["folder", "pipe", "broken link"])
def test_folders_pipes_and_broken_links_are_refused(tmp_path: Path, make: str) -> None:
    path = tmp_path / "model.safetensors"
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "gone")
    with pytest.raises(BadFile, match=r"model\.safetensors"):
        SafetensorsFolder(tmp_path)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    store = tmp_path / "blobs"
    store.mkdir()
    (store / "4d7a").write_bytes(safetensors_bytes({"a": torch.ones(3)}))
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(store / "4d7a")
    assert same_bits(SafetensorsFolder(folder).view("a"), torch.ones(3))


def test_an_unknown_type_is_refused_when_asked_for(tmp_path: Path) -> None:
    data = torch.arange(6.0).reshape(2, 3)
    header = {"a": ENTRY, "b": header_entry("F6_E2M3", [8], [24, 30])}
    (tmp_path / "model.safetensors").write_bytes(file_bytes(header, data.numpy().tobytes() + bytes(6)))
    files = SafetensorsFolder(tmp_path)
    assert same_bits(files.view("a"), data)
    with pytest.raises(BadFile, match=r"model\.safetensors: tensor 'b': type 'F6_E2M3'"):
        files.view("b")


def test_unusual_valid_files_are_read(tmp_path: Path) -> None:
    data = torch.arange(6.0).reshape(2, 3)
    header = {
        "__metadata__": {"format": "pt"},
        "late": header_entry(offsets=[24, 48]),
        "": header_entry(shape=[], offsets=[48, 52]),
        "none": header_entry(shape=[0, 5], offsets=[24, 24]),
        "nothing": header_entry(shape=[3, 0], offsets=[52, 52]),
        "early": {**ENTRY, "comment": "for people"},
    }
    raw = data.numpy().tobytes() + (data + 6).numpy().tobytes() + torch.tensor([7.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(file_bytes(header, raw))
    files = SafetensorsFolder(tmp_path)
    assert same_bits(files.view("early"), data)
    assert same_bits(files.view("late"), data + 6)
    assert same_bits(files.view(""), torch.tensor(7.0))
    assert files.view("none").shape == (0, 5)
    assert files.view_rows("nothing", 1, 3).shape == (2, 0)


def _mutations(good: bytes, header_end: int, rng: random.Random) -> dict[str, bytes]:
    mutations: dict[str, bytes] = {}
    for _ in range(120):
        cut = rng.randrange(len(good))
        mutations[f"cut at {cut}"] = good[:cut]
    for _ in range(400):
        at, bit = rng.randrange(header_end), rng.randrange(8)
        mutations[f"bit {bit} of byte {at}"] = good[:at] + bytes([good[at] ^ (1 << bit)]) + good[at + 1 :]
    digits = [at for at in range(8, header_end) if chr(good[at]).isdigit()]
    for _ in range(200):
        at, new = rng.choice(digits), rng.choice([b"0", b"7", b"-1", b"12", b"1e3", b"99999999999999999999"])
        text = good[8:at] + new + good[at + 1 : header_end]
        mutations[f"{new!r} at {at}"] = file_bytes(text, good[header_end:])
    for _ in range(100):
        at, count = rng.randrange(len(good)), rng.randrange(1, 9)
        mutations[f"{count} bytes out at {at}"] = good[:at] + good[at + count :]
        mutations[f"{count} bytes in at {at}"] = good[:at] + rng.randbytes(count) + good[at:]
    return mutations


def test_a_mutated_file_is_read_correctly_or_refused(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.randn(5, 4),
        "model.norm.weight": torch.randn(4, dtype=torch.float16),
        "lm_head.weight": torch.randn(6, 4).bfloat16(),
    }
    roles = {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    }
    good = safetensors_bytes(tensors, pad=5)
    end = 8 + int.from_bytes(good[:8], "little")
    mutations = _mutations(good, end, random.Random(1))
    assert len(mutations) >= 600
    path, refused = tmp_path / "model.safetensors", 0
    for what, content in mutations.items():
        path.write_bytes(content)
        try:
            checkpoint = SafetensorsCheckpoint(tmp_path, TensorNames())
            for role, name in roles.items():
                wanted = tensors[name]
                read = checkpoint.tensor(role, tuple(wanted.shape), dtype=torch.float32, device=torch.device("cpu"))
                assert same_bits(read, wanted.float()), what
        except CheckpointError:
            refused += 1
    assert refused > len(mutations) // 2
