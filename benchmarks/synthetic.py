"""Writes model folders of any size with random weights in real file layouts: EXL2, GPTQ, floats.

Tensors are made one at a time and written in shards, so that large models need little memory. An existing
folder is kept. (`exlm bench` makes random weights without files.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from exlm.bench.shapes import SHAPES, Shape
from exlm.bench.synthetic import (
    GROUP_SIZE,
    RandomTensors,
    SyntheticDense,
    SyntheticExl2,
    SyntheticGptq,
    write_model_folder,
)
from exlm.checkpoint import save_sharded
from exlm.formats import DenseWeight, PackedWeight, exl2, gptq

from .stored_tensors import floats, matrices, norm_values, other_names

SHARD_BYTES = 512 * 2**20
DONE = "synthetic.json"  # describes the model in the folder; written last
LLAMA_7B = SHAPES["llama-2-7b"]

FileFormat = SyntheticExl2 | SyntheticGptq | SyntheticDense


def write_exl2(folder: Path, shape: Shape, bits: float = 4.1, *, shared_layers: bool = False) -> Path:
    """Write an EXL2 model; with `shared_layers` all layers of a kind have the same weights, which is faster."""
    return _write(folder, shape, SyntheticExl2(bits), shared_layers)


def write_dense(folder: Path, shape: Shape) -> Path:
    """Write a float16 model."""
    return _write(folder, shape, SyntheticDense(), shared_layers=False)


def write_gptq(folder: Path, shape: Shape, bits: int = 4) -> Path:
    """Write a GPTQ model."""
    return _write(folder, shape, SyntheticGptq(bits), shared_layers=False)


def _write(folder: Path, shape: Shape, fmt: FileFormat, shared_layers: bool) -> Path:
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
    if not isinstance(fmt, SyntheticDense):
        config = shape.config() | {"quantization_config": _quantization_config(fmt)}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    done.write_text(json.dumps(content, indent=2))
    return folder


def _quantization_config(fmt: SyntheticExl2 | SyntheticGptq) -> Mapping[str, object]:
    if isinstance(fmt, SyntheticExl2):
        return {"quant_method": "exl2", "head_bits": fmt.head_bits}
    return {"quant_method": "gptq", "bits": fmt.bits, "group_size": GROUP_SIZE, "desc_act": False, "sym": False}


def _tensors(shape: Shape, fmt: FileFormat, shared_layers: bool) -> Iterator[tuple[str, Tensor]]:
    random = RandomTensors(0, torch.device("cpu"))

    def matrix(name: str, inputs: int, outputs: int, head: bool = False) -> Iterator[tuple[str, Tensor]]:
        weight = fmt.weight(inputs, outputs, random, head, inputs**-0.5)
        if isinstance(weight, DenseWeight):
            if not (head and shape.tied):
                yield f"{name}.weight", weight.data
            return
        assert isinstance(weight, PackedWeight)
        write = exl2.write if isinstance(fmt, SyntheticExl2) else gptq.write
        for suffix, tensor in write(weight).items():
            yield f"{name}.{suffix}", tensor

    def layer(number: int) -> Iterator[tuple[str, Tensor]]:
        for name, inputs, outputs in matrices(shape, number):
            yield from matrix(name, inputs, outputs)
        for name, sizes, values in floats(shape, number):
            yield name, random.vector(sizes, values)

    made: dict[object, list[tuple[str, Tensor]]] = {}  # by the layer's tensors
    names = other_names(shape)
    yield names.embed, random.floats(shape.vocab, shape.hidden, 1.0)
    for number in range(shape.layers):
        kind = (*matrices(shape, number), *floats(shape, number))
        if shared_layers and kind not in made:
            made[kind] = list(layer(number))
        for name, tensor in made[kind] if shared_layers else layer(number):
            yield names.layer.format(number) + name, tensor
    yield from matrix("lm_head", shape.hidden, shape.vocab, head=True)
    yield names.final_norm, random.vector([shape.hidden], norm_values(shape))
