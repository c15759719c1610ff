"""Writes model folders of any size with random weights in real file layouts.

Tensors are made one at a time and written in shards, so that large models need little memory. An existing
folder is kept. (`exlm bench` makes random weights without files.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from exlm.bench.shapes import SHAPES, Shape
from exlm.bench.synthetic import RandomTensors, SyntheticDense, SyntheticExl2, write_model_folder
from exlm.checkpoint import save_sharded
from exlm.formats import DenseWeight, PackedWeight, exl2

SHARD_BYTES = 512 * 2**20
DONE = "synthetic.json"  # describes the model in the folder; written last
LLAMA_7B = SHAPES["llama-2-7b"]


def write_exl2(folder: Path, shape: Shape, bits: float = 4.1, *, shared_layers: bool = False) -> Path:
    """Write an EXL2 model; with `shared_layers` all layers have the same weights, which is faster."""
    return _write(folder, shape, SyntheticExl2(bits), shared_layers)


def write_dense(folder: Path, shape: Shape) -> Path:
    """Write a float16 model."""
    return _write(folder, shape, SyntheticDense(), shared_layers=False)


def _write(folder: Path, shape: Shape, fmt: SyntheticExl2 | SyntheticDense, shared_layers: bool) -> Path:
    # Through JSON and back: tuples would not equal the lists that come from the file.
    content = {"format": repr(fmt), "shape": asdict(shape), "shared_layers": shared_layers}
    content = json.loads(json.dumps(content))
    done = folder / DONE
    if done.exists() and json.loads(done.read_text()) == content:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    save_sharded(folder, _tensors(shape, fmt, shared_layers), shard_bytes=SHARD_BYTES, overwrite=True)
    write_model_folder(folder, shape, shape.positions)
    if isinstance(fmt, SyntheticExl2):
        config = shape.config()
        config["quantization_config"] = {"quant_method": "exl2", "head_bits": fmt.head_bits}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    done.write_text(json.dumps(content, indent=2))
    return folder


def _tensors(shape: Shape, fmt: SyntheticExl2 | SyntheticDense, shared_layers: bool) -> Iterator[tuple[str, Tensor]]:
    random = RandomTensors(0, torch.device("cpu"))

    def norm(name: str) -> tuple[str, Tensor]:
        return f"{name}.weight", random.floats(1, shape.hidden, 0.1)[0] + 1

    def matrix(name: str, inputs: int, outputs: int, head: bool = False) -> Iterator[tuple[str, Tensor]]:
        weight = fmt.weight(inputs, outputs, random, head, inputs**-0.5)
        if isinstance(weight, DenseWeight):
            yield f"{name}.weight", weight.data
            return
        assert isinstance(weight, PackedWeight)
        for suffix, tensor in exl2.write(weight).items():
            yield f"{name}.{suffix}", tensor

    def layer() -> Iterator[tuple[str, Tensor]]:
        yield norm("input_layernorm")
        for name, inputs, outputs in shape.matrices():
            yield from matrix(name, inputs, outputs)
        yield norm("post_attention_layernorm")

    yield "model.embed_tokens.weight", random.floats(shape.vocab, shape.hidden, 1.0)
    shared = list(layer()) if shared_layers else None
    for number in range(shape.layers):
        for name, tensor in shared or layer():
            yield f"model.layers.{number}.{name}", tensor
    yield from matrix("lm_head", shape.hidden, shape.vocab, head=True)
    yield norm("model.norm")
