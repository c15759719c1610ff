"""Loading with limited address space: it succeeds or raises a typed error, and neither dies nor hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests import tiny
from tests.checkpoint import gguf_models
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no such limit elsewhere")

LIMITS = (0, 1, 4, 16, 40, 64, 72, 80, 88, 96, 112, 128, 144, 160, 176, 192, 1024)
TOKENIZER_LIMITS = (0, 1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 48, 1024)


def outcomes(kind: str, path: Path, limits: tuple[int, ...] = LIMITS) -> dict[int, str]:
    """The outcome of each limit, in MB in addition to what the process has before."""
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.low_memory", kind, str(path), *map(str, limits)],
        cwd=ROOT,
        env={**env, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=600,
    )
    pairs = (line.split(" ", 1) for line in done.stdout.splitlines())
    found = {int(limit): outcome for limit, outcome in pairs}
    assert set(found) == set(limits)
    return found


def check(found: dict[int, str]) -> None:
    assert {outcome.split(":")[0] for outcome in found.values()} == {"ok", "DoesNotFit"}
    assert found[0] != "ok"
    assert found[1024] == "ok"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 59 MB, and a vocabulary of 15,000 tokens."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    model_folder = tiny.make_chat_folder(tmp_path_factory.mktemp("low") / "m", **sizes)
    table = json.loads((model_folder / "tokenizer.json").read_text())
    vocab, merges = table["model"]["vocab"], table["model"]["merges"]
    letters = [piece for piece in vocab if len(piece) == 1]
    for left, right in product(letters, letters[:60]):
        vocab[left + right] = len(vocab)
        merges.append([left, right])
    (model_folder / "tokenizer.json").write_text(json.dumps(table))
    return model_folder


def test_a_model_loads_or_does_not_fit(folder: Path) -> None:
    found = outcomes("model", folder)
    check(found)
    for outcome in found.values():
        if outcome != "ok":
            assert str(folder) in outcome
            assert "59.0 MB of weights" in outcome
            assert "ulimit -v" in outcome


def test_a_tokenizer_is_read_or_does_not_fit(folder: Path) -> None:
    found = outcomes("tokenizer", folder, TOKENIZER_LIMITS)
    check(found)
    assert all(str(folder) in outcome for outcome in found.values() if outcome != "ok")


def test_a_file_larger_than_the_address_space_is_named_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write_model(path, "llama", kind="Q4_0")
    with path.open("r+b") as file:
        file.truncate(2 << 30)
    found = outcomes("model", path, (256, 4096))
    assert found[256].startswith(f"DoesNotFit: {path}: 2,147,483,648 bytes cannot be mapped: there is too little")
    assert found[4096] == "ok"
