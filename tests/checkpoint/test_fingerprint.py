"""What identifies a model's files: their contents and times, not where they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from exlm.checkpoint import GgufCheckpoint, SafetensorsCheckpoint
from exlm.checkpoint.tensor_files import SAMPLE_BYTES, SAMPLED_BEGIN, SAMPLES, _sample_offsets
from exlm.formats.quantization_config import QuantizationConfig
from exlm.spec import TensorNames
from tests import tiny
from tests.checkpoint import gguf_models


def of_folder(folder: Path, quantization: QuantizationConfig | None = None) -> str:
    return SafetensorsCheckpoint(folder, TensorNames(), quantization).fingerprint()


def test_a_copy_with_its_times_is_the_same(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model")
    before = of_folder(folder)
    assert of_folder(folder) == before
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy2)
    assert of_folder(tmp_path / "copy") == before
    gguf_models.write_model(tmp_path / "a.gguf", "llama", kind="Q8_0")
    before = GgufCheckpoint(tmp_path / "a.gguf").fingerprint()
    (tmp_path / "a.gguf").rename(tmp_path / "b.gguf")
    assert GgufCheckpoint(tmp_path / "b.gguf").fingerprint() == before


def test_a_changed_byte_another_time_or_another_reading_is_not(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model")
    found = {of_folder(folder), of_folder(folder, QuantizationConfig(bits=4))}
    weights = folder / "model.safetensors"
    times = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    found.add(of_folder(folder))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    found.add(of_folder(folder))
    assert len(found) == 4


@pytest.mark.parametrize("size", [0, 1, SAMPLE_BYTES, SAMPLE_BYTES + 1, SAMPLED_BEGIN, SAMPLED_BEGIN + 1, 1 << 33])
def test_samples_cover_begin_and_end(size: int) -> None:
    offsets = [*_sample_offsets(size)]
    begin = min(size, SAMPLED_BEGIN)
    assert set(range(0, begin, SAMPLE_BYTES)) <= set(offsets)
    assert offsets[-1] == max(0, size - SAMPLE_BYTES)
    assert len(offsets) <= SAMPLED_BEGIN // SAMPLE_BYTES + SAMPLES + 2
    assert all(0 <= offset <= size for offset in offsets)
