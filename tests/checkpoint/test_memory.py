"""Loading takes the memory of the model, not that of its files as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.safetensors_bytes import header_entry

SRC = Path(__file__).resolve().parents[2] / "src"
MB = 2**20

LOAD = """
import json, sys
from pathlib import Path
import torch
from exlm.checkpoint import SafetensorsCheckpoint
from exlm.spec.tensor_names import TensorNames

torch.set_num_threads(1)

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
layers, width, height = map(int, sys.argv[3:])
torch.ones(4, dtype=torch.bfloat16).to(torch.float16).aminmax()
before = peak()
checkpoint = SafetensorsCheckpoint(folder, TensorNames())
opened = peak()
cpu = torch.device("cpu")
kept = [
    checkpoint.weight(f"layers.{n}.attn.q", width, height, bias=False, dtype=dtype, device=cpu)
    for n in range(layers)
]
print(json.dumps([before, opened, peak(), sum(weight.nbytes for weight in kept)]))
"""


def _model(folder: Path, dtype: str, item: int, layers: int, width: int, height: int, odd: int) -> None:
    """A model of zeros in sparse files, which take no disk space."""
    size = width * height * item
    shards = 3
    for shard in range(shards):
        names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(shard, layers, shards)]
        header = {
            name: header_entry(dtype, [height, width], [at * size, (at + 1) * size]) for at, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8 + odd)
        with (folder / f"model-{shard + 1:05}-of-{shards:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size * len(names))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("stored", "item", "wanted", "height", "odd"),
    [
        ("F16", 2, "float32", 3072, 0),
        ("F32", 4, "float32", 3072, 0),
        ("BF16", 2, "float16", 6144, 0),
        ("F16", 2, "float32", 3072, 1),
    ],
)
def test_the_peak_is_the_model(tmp_path: Path, stored: str, item: int, wanted: str, height: int, odd: int) -> None:
    layers, width = 12, 4096
    _model(tmp_path, stored, item, layers, width, height, odd)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), wanted, *map(str, (layers, width, height))],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    before, opened, peak, model = json.loads(done.stdout)
    assert model == 576 * MB
    assert opened - before < 16 * MB  # headers only
    assert peak <= 1.15 * model + 500 * MB
    # What the line above cannot see on a small model: the files' own pages would be 288 or 576 MB more.
    assert peak - before <= 1.05 * model + 32 * MB
