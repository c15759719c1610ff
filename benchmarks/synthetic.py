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
from exlm.bench.synthetic import Dense, Exl2, RandomTensors, SyntheticFormat
from exlm.checkpoint import save_sharded
from exlm.formats import DenseWeight, PackedWeight, Weight, exl2

SHARD = 512 * 2**20
DONE = "synthetic.json"  # describes the model in the folder; written last
LLAMA_7B = SHAPES["llama-2-7b"]


def write_exl2(folder: Path, shape: Shape, bits: float = 4.1, seed: int = 0) -> Path:
    """Write an EXL2 model."""
    return _write(folder, shape, Exl2(bits), seed)


def write_dense(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write a float16 model."""
    return _write(folder, shape, Dense(), seed)


def _write(folder: Path, shape: Shape, form: Exl2 | Dense, seed: int) -> Path:
    # Through JSON and back: tuples would not equal the lists that come from the file.
    said = json.loads(json.dumps({"form": repr(form), "seed": seed, "shape": asdict(shape)}))
    done = folder / DONE
    if done.exists() and json.loads(done.read_text()) == said:
        return folder
    done.unlink(missing_ok=True)
    random = RandomTensors(seed, torch.device("cpu"))
    save_sharded(folder, _tensors(shape, form, random), shard_bytes=SHARD, overwrite=True)
    config = shape.config()
    if isinstance(form, Exl2):
        config["quantization_config"] = {"quant_method": "exl2", "head_bits": form.head_bits}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    done.write_text(json.dumps(said, indent=2))
    return folder


def _tensors(shape: Shape, form: SyntheticFormat, random: RandomTensors) -> Iterator[tuple[str, Tensor]]:
    hidden = shape.hidden

    def matrix(name: str, inputs: int, outputs: int, head: bool = False) -> Iterator[tuple[str, Tensor]]:
        weight = form.weight(inputs, outputs, random, head, inputs**-0.5)
        for suffix, tensor in _stored(weight).items():
            yield f"{name}.{suffix}", tensor

    yield "model.embed_tokens.weight", random.floats(shape.vocab, hidden, 1.0)
    for number in range(shape.layers):
        at = f"model.layers.{number}."
        yield at + "input_layernorm.weight", random.floats(1, hidden, 0.1)[0] + 1
        for name, inputs, outputs in shape.matrices():
            yield from matrix(at + name, inputs, outputs)
        yield at + "post_attention_layernorm.weight", random.floats(1, hidden, 0.1)[0] + 1
    yield from matrix("lm_head", hidden, shape.vocab, head=True)
    yield "model.norm.weight", random.floats(1, hidden, 0.1)[0] + 1


def _stored(weight: Weight) -> dict[str, Tensor]:
    """The tensors of one matrix by suffix."""
    if isinstance(weight, DenseWeight):
        return {"weight": weight.data}
    assert isinstance(weight, PackedWeight)
    return exl2.write(weight)
