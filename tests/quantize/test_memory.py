"""The predicted peak memory against the peak of a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    sys.argv[1], sys.argv[2], 4.0, rows=4, device="cpu", progress=lambda *step: messages.append(step[2])
)
print(messages[0])
status = Path("/proc/self/status").read_text()  # getrusage would count the parent's peak as well
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of the peak")
def test_peak_memory_stays_below_the_prediction(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 16384}
    source = tiny.make(tiny.make_chat_folder(tmp_path / "source"), **shape)
    paths = os.pathsep.join([str(Path(exlm.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(source), str(tmp_path / "made")],
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
