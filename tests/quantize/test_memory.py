"""The predicted peak memory against the peak of a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import exlm
from tests import tiny

JOB = """
import sys
from pathlib import Path
import torch
from exlm import quantize_model

torch.set_num_threads(1)
messages = []
quantize_model(
    sys.argv[1], sys.argv[2], 4.0, rows=int(sys.argv[3]), device="cpu",
    progress=lambda *step: messages.append(step[2]),
)
print(messages[0])
status = Path("/proc/self/status").read_text()  # getrusage would count the parent's peak as well
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


def wide_vocabulary(folder: Path) -> Path:
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 16384}
    return tiny.make(tiny.make_chat_folder(folder), **shape)


def large_states(folder: Path) -> Path:
    """A delta net whose states are larger than everything else."""
    tiny.make_chat_folder(folder)
    config = Qwen3_5TextConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=128,
        max_position_embeddings=512,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["Qwen3_5ForCausalLM"],
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of the peak")
@pytest.mark.parametrize(("make", "rows"), [(wide_vocabulary, 4), (large_states, 8)])
def test_peak_memory_stays_below_the_prediction(make: Callable[[Path], Path], rows: int, tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    paths = os.pathsep.join([str(Path(exlm.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(source), str(tmp_path / "made"), str(rows)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    messages, took = done.stdout.splitlines()
    found = re.search(r"at most ([\d.]+) GB of memory", messages)
    assert found is not None, messages
    assert 0.3 * float(found[1]) < int(took) / 1e9 <= float(found[1])
