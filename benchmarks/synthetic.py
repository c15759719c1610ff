"""Model folders of any size without any model: true file layouts, random codes.

The numbers mean nothing, but scales are chosen so that a forward pass stays finite. Tensors are made one at a
time and written in shards, so a large model needs little memory. A folder that is already there is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exlm.checkpoint import save
from exlm.formats import Direct, PackedWeight, Segment, Squared, exl2, gptq
from exlm.formats.bits import words_for

SHARD = 512 * 2**20
DONE = "synthetic.json"  # what was written, there once all of it is
_SQUARED_MEAN = 0.482  # root mean square of (k / 16)² for k = 1 to 16, EXL2's scales

Tensors = dict[str, Tensor]
Make = Callable[[int, int], Tensors]
"""(in, out) → the tensors of one matrix by suffix."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int = 4096

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "torch_dtype": "float16",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(name within a layer, in, out), as files order them."""
        hidden, kv = self.hidden, self.kv_heads * self.head_dim
        yield "mlp.down_proj", self.mlp, hidden
        yield "mlp.gate_proj", hidden, self.mlp
        yield "mlp.up_proj", hidden, self.mlp
        yield "self_attn.k_proj", hidden, kv
        yield "self_attn.o_proj", hidden, hidden
        yield "self_attn.q_proj", hidden, hidden
        yield "self_attn.v_proj", hidden, kv


LLAMA_7B = Shape(hidden=4096, layers=32, mlp=11008, heads=32, kv_heads=32, vocab=32000)


class Source:
    """Random tensors from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def words(self, rows: int, columns: int) -> Tensor:
        """(rows, columns) int32, every bit random: codes of any width that fills its words."""
        return torch.from_numpy(self._random.integers(-(2**31), 2**31, (rows, columns), np.int32))

    def codes(self, rows: int, columns: int, below: int) -> Tensor:
        """(rows, columns) uint8."""
        return torch.from_numpy(self._random.integers(0, below, (rows, columns), np.uint8))

    def floats(self, rows: int, columns: int, deviation: float) -> Tensor:
        """(rows, columns) float16."""
        normal = self._random.standard_normal((rows, columns), np.float32)
        return torch.from_numpy((normal * deviation).astype(np.float16))

    def order(self, length: int) -> Tensor:
        """A permutation, int32."""
        return torch.from_numpy(self._random.permutation(length).astype(np.int32))

    def exl2(self, inputs: int, outputs: int, widths: tuple[tuple[int, float], ...], group: int) -> Tensors:
        """A matrix whose groups have these widths in these shares, the widest first; the rest in the last."""
        groups = -(-inputs // group)
        sizes = [min(group, inputs - n * group) for n in range(groups)]
        segments, first = [], 0
        for number, (bits, share) in enumerate(widths):
            last = groups if number + 1 == len(widths) else first + max(1, round(share * groups))
            rows = sum(sizes[first:last])
            largest = _unit(inputs, bits) / _SQUARED_MEAN
            segments.append(
                Segment(
                    bits,
                    tuple(sizes[first:last]),
                    self.words(words_for(rows, bits), outputs),
                    Squared(
                        self.codes(last - first, outputs, 16), torch.full((last - first,), largest).half()
                    ),
                    zero=1 << (bits - 1),
                )
            )
            first = last
        return exl2.write(
            PackedWeight("exl2", inputs, outputs, tuple(segments), torch.float16, self.order(inputs))
        )

    def gptq(self, inputs: int, outputs: int, bits: int, group: int, act_order: bool) -> Tensors:
        """A matrix of one width; in act-order the inputs of a group are anywhere."""
        groups = -(-inputs // group)
        sizes = tuple(min(group, inputs - n * group) for n in range(groups))
        scales = torch.full((groups, outputs), _unit(inputs, bits)).half()
        zeros = self.codes(groups, outputs, 3) + ((1 << (bits - 1)) - 1)
        segment = Segment(bits, sizes, self.words(words_for(inputs, bits), outputs), Direct(scales), zeros)
        tensors = gptq.write(PackedWeight("gptq", inputs, outputs, (segment,), torch.float16))
        if act_order:
            # The codes are random, so they fit any order of the groups.
            tensors["g_idx"] = tensors["g_idx"][self.order(inputs).long()]
        return tensors


def write_exl2(
    folder: Path,
    shape: Shape,
    *,
    widths: tuple[tuple[int, float], ...] = ((5, 0.0625), (4, 1.0)),
    group: int = 128,
    head_bits: int = 6,
    seed: int = 0,
) -> Path:
    """An EXL2 model: `widths` are (bits, share of the groups), by default about 4.1 bits a weight."""
    source = Source(seed)
    recipe = {"form": "exl2", "widths": widths, "group": group, "head_bits": head_bits, "seed": seed}
    quantization = {"quant_method": "exl2", "head_bits": head_bits}
    return _write(
        folder,
        shape,
        recipe,
        quantization,
        source,
        lambda k, n: source.exl2(k, n, widths, group),
        lambda k, n: source.exl2(k, n, ((head_bits, 1.0),), group),
    )


def write_gptq(
    folder: Path, shape: Shape, *, bits: int = 4, group: int = 128, act_order: bool = False, seed: int = 0
) -> Path:
    """A GPTQ model with a float16 head, as its tools leave it."""
    source = Source(seed)
    recipe = {"form": "gptq", "bits": bits, "group": group, "act_order": act_order, "seed": seed}
    quantization = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": False,
        "checkpoint_format": "gptq",
    }
    return _write(
        folder,
        shape,
        recipe,
        quantization,
        source,
        lambda k, n: source.gptq(k, n, bits, group, act_order),
        lambda k, n: {"weight": source.floats(n, k, k**-0.5)},
    )


def write_dense(folder: Path, shape: Shape, *, seed: int = 0) -> Path:
    """A float16 model."""
    source = Source(seed)

    def make(inputs: int, outputs: int) -> Tensors:
        return {"weight": source.floats(outputs, inputs, inputs**-0.5)}

    return _write(folder, shape, {"form": "dense", "seed": seed}, None, source, make, make)


def _write(
    folder: Path,
    shape: Shape,
    recipe: dict[str, Any],
    quantization: dict[str, Any] | None,
    source: Source,
    make: Make,
    make_head: Make,
) -> Path:
    # Through JSON and back: tuples would not equal the lists that come from the file.
    said = json.loads(json.dumps({**recipe, "shape": asdict(shape)}))
    done = folder / DONE
    if done.exists() and json.loads(done.read_text()) == said:
        return folder
    done.unlink(missing_ok=True)
    save(folder, _tensors(shape, source, make, make_head), shard_bytes=SHARD, overwrite=True)
    config = shape.config()
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    done.write_text(json.dumps(said, indent=2))
    return folder


def _tensors(shape: Shape, source: Source, make: Make, make_head: Make) -> Iterator[tuple[str, Tensor]]:
    hidden = shape.hidden
    yield "model.embed_tokens.weight", source.floats(shape.vocab, hidden, 1.0)
    for number in range(shape.layers):
        at = f"model.layers.{number}."
        yield at + "input_layernorm.weight", source.floats(1, hidden, 0.1)[0] + 1
        for name, inputs, outputs in shape.matrices():
            for suffix, tensor in make(inputs, outputs).items():
                yield f"{at}{name}.{suffix}", tensor
        yield at + "post_attention_layernorm.weight", source.floats(1, hidden, 0.1)[0] + 1
    for suffix, tensor in make_head(hidden, shape.vocab).items():
        yield f"lm_head.{suffix}", tensor
    yield "model.norm.weight", source.floats(1, hidden, 0.1)[0] + 1


def _unit(inputs: int, bits: int) -> float:
    """The factor that gives uniform codes of this width a deviation of inputs^-½."""
    return float((12 / inputs) ** 0.5 / (1 << bits))
