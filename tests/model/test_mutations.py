"""Models of damaged and hostile files: each loads or raises a typed error, none crashes or hangs."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Config, ExlmError, Model
from exlm.formats import exl2, gptq
from tests import tiny
from tests.checkpoint import gguf_models
from tests.model.random_quantized import random_exl2, random_gptq, replace_matrices

ROUNDS = 130


def make_exl2(folder: Path) -> Path:
    tiny.make(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    replace_matrices(folder, None, exl2.write, random_exl2, r"_proj\.weight|lm_head")
    return folder / "model.safetensors"


def make_gptq(folder: Path) -> Path:
    tiny.make(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    replace_matrices(folder, None, gptq.write, random_gptq, r"_proj\.weight")
    return folder / "model.safetensors"


def make_gguf(folder: Path) -> Path:
    folder.mkdir()
    gguf_models.write_model(folder / "model.gguf", "llama", kind="Q4_0")
    return folder / "model.gguf"


def attempt(folder: Path) -> bool:
    """Whether the model loads and computes; only errors of our own types may be raised."""
    try:
        model = Model(Config(folder))
        model.load()
        model.forward(torch.tensor([[3, 4, 5]]))
    except ExlmError:
        return False
    return True


def flip(data: bytearray, rng: random.Random) -> None:
    """Flip a few bits, most of them in headers."""
    for _ in range(rng.randint(1, 4)):
        end = min(len(data), 4096) if rng.random() < 0.7 else len(data)
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def grow(data: bytearray, rng: random.Random) -> None:
    data += bytes(rng.randrange(256) for _ in range(rng.randint(1, 64)))


def overwrite(data: bytearray, rng: random.Random) -> None:
    """Write a huge or negative number near the front."""
    at = rng.randrange(max(1, min(len(data), 4096) - 8))
    data[at : at + 8] = struct.pack("<q", rng.choice([-1, 2**62, 2**31, 2**40, 0]))


def swap(data: bytearray, rng: random.Random) -> None:
    """Exchange two ranges of bytes."""
    a, b = sorted(rng.sample(range(len(data) - 64), 2))
    data[a : a + 32], data[b : b + 32] = data[b : b + 32], data[a : a + 32]


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [flip, flip, cut, grow, overwrite, swap]


@pytest.mark.parametrize("make", [make_exl2, make_gptq, make_gguf])
def test_damaged_files_load_or_are_refused(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path / "model")
    good = path.read_bytes()
    assert attempt(path.parent)
    rng, refused = random.Random(5), 0
    for _ in range(ROUNDS):
        data = bytearray(good)
        rng.choice(MUTATIONS)(data, rng)
        path.write_bytes(data)
        refused += not attempt(path.parent)
    assert refused > ROUNDS // 3
    path.write_bytes(good)
    assert attempt(path.parent)


HEADER_EDITS: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("a tensor of 2^60 rows", lambda h: h["lm_head.q_weight"].update(shape=[2**60, 64])),
    ("an offset beyond the end", lambda h: h["lm_head.q_weight"].update(data_offsets=[0, 2**50])),
    ("a negative size", lambda h: h["lm_head.q_weight"].update(shape=[-1, 64])),
    ("another type", lambda h: h["lm_head.q_weight"].update(dtype="F32")),
    ("an unknown type", lambda h: h["lm_head.q_weight"].update(dtype="Q7")),
    ("no shape", lambda h: h["lm_head.q_weight"].pop("shape")),
    ("a missing part", lambda h: h.pop("lm_head.q_groups")),
    ("everything gone", lambda h: h.clear()),
]


@pytest.mark.parametrize(("description", "edit"), HEADER_EDITS, ids=[words for words, _ in HEADER_EDITS])
def test_false_headers_are_refused(tmp_path: Path, description: str, edit: Callable[[dict[str, Any]], None]) -> None:
    path = make_exl2(tmp_path / "model")
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    assert not attempt(path.parent), description
