"""Named shapes: their published sizes, and the bytes that a step of a MoE model reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from exlm import Config
from exlm.bench.benchmark import BenchmarkConfig, run
from exlm.bench.shapes import SHAPES
from exlm.bench.synthetic import synthetic_format, write_model_folder
from exlm.spec.model import matrices

PUBLISHED = {"llama-2-7b": 6.74, "llama-3-8b": 8.03, "mixtral-8x7b": 46.70, "qwen3-30b-a3b": 30.53}
"""Billions of weights of each shape."""


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_weights(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    model = Config(write_model_folder(tmp_path, shape, 64)).freeze().spec
    sizes = sorted((one.in_features, one.out_features) for one in matrices(model))
    named = [(inputs, outputs) for _, inputs, outputs in shape.matrices()] * shape.layers
    assert sizes == sorted([*named, (shape.hidden, shape.vocab)])
    if name in PUBLISHED:
        count = sum(inputs * outputs for inputs, outputs in [*sizes, (shape.hidden, shape.vocab)])
        assert count / 1e9 == pytest.approx(PUBLISHED[name], abs=0.01)


def test_bytes_per_step_count_active_experts_only() -> None:
    shape, packed = SHAPES["tiny-moe"], synthetic_format("exl2")
    prompt, *_ = run(BenchmarkConfig(shape="tiny-moe", device="cpu", contexts=(8,), prompt=16, tokens=4)).rows
    read = packed.nbytes(shape.hidden, shape.vocab, True)
    for name, inputs, outputs in shape.matrices():
        if name.endswith(".gate"):
            read += 2 * inputs * outputs * shape.layers
        else:
            nbytes = packed.nbytes(inputs, outputs, False) * shape.layers
            read += nbytes // 2 if ".experts." in name else nbytes  # two of four
    assert prompt.bytes_read == read
    assert prompt.tokens_per_second is not None
