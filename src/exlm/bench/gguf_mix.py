"""GGUF files of random weights in which each tensor has the type that llama.cpp's quantiser gives it.

`quantize MODEL Q4_K_M` does not store every matrix as Q4_K: some layers, and the LM head, get more bits. A mix is such
a name. The rules are those of llama.cpp's `llama_tensor_get_type` without an importance matrix, for dense Llama models.
Other engines read these files too: they have a vocabulary, and blocks of every type in llama.cpp's own layout.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import IO, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from ..errors import InputError
from ..formats import gguf
from .shapes import MIXES, Shape
from .synthetic import RandomTensors, word

EMBEDDING, HEAD = "token_embd", "output"

_NUMBER_OF_TYPE = {one.name: number for number, one in gguf.GGUF_TYPES.items()}
_TYPE_BY_NAME = {one.name: one for one in gguf.GGUF_TYPES.values()}

_FALLBACKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}
"""What llama.cpp takes in place of a type whose blocks of 256 do not fit a matrix."""


class MixMatrix(NamedTuple):
    """A matrix of the file."""

    name: str
    inputs: int
    outputs: int
    type_name: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        one = _TYPE_BY_NAME[self.type_name]
        return self.outputs * self.inputs // one.block_size * one.block_bytes


@dataclass(frozen=True)
class Mix:
    """What a file of this shape and mix holds."""

    name: str
    shape: Shape

    def __post_init__(self) -> None:
        if self.name not in MIXES:
            raise InputError(f"--mix must be of {', '.join(MIXES)}, found {self.name!r}.")
        if type(self.shape) is not Shape:
            raise InputError("--mix writes files of dense Llama shapes only, such as tinyllama-1.1b or llama-3-8b.")

    def matrices(self) -> Iterator[MixMatrix]:
        """Every matrix, in the order of the file."""
        shape = self.shape
        keys = shape.head_dim * shape.kv_heads
        yield self._matrix(EMBEDDING, 0, shape.hidden, shape.vocab)
        for layer in range(shape.layers):
            for role, inputs, outputs in (
                ("attn_q", shape.hidden, shape.head_dim * shape.heads),
                ("attn_k", shape.hidden, keys),
                ("attn_v", shape.hidden, keys),
                ("attn_output", shape.head_dim * shape.heads, shape.hidden),
                ("ffn_gate", shape.hidden, shape.mlp),
                ("ffn_up", shape.hidden, shape.mlp),
                ("ffn_down", shape.mlp, shape.hidden),
            ):
                yield self._matrix(role, layer, inputs, outputs)
        yield self._matrix(HEAD, 0, shape.hidden, shape.vocab)

    def _matrix(self, role: str, layer: int, inputs: int, outputs: int) -> MixMatrix:
        name = role if role in (EMBEDDING, HEAD) else f"blk.{layer}.{role}"
        return MixMatrix(f"{name}.weight", inputs, outputs, self.type_of(role, layer, inputs))

    def type_of(self, role: str, layer: int, inputs: int) -> str:
        """The type of a matrix, by its role (`attn_v`, `output`), layer and number of inputs."""
        wanted = self._head_type(inputs) if role == HEAD else self._rule(role, layer)
        if inputs % _TYPE_BY_NAME[wanted].block_size:
            wanted = _FALLBACKS.get(wanted, wanted)
        if inputs % _TYPE_BY_NAME[wanted].block_size:
            raise InputError(f"--mix {self.name} needs matrices of whole blocks of 32 inputs, found {inputs}.")
        return wanted

    def _head_type(self, inputs: int) -> str:
        default = MIXES[self.name]
        return "Q8_0" if default == "Q8_0" or inputs % _TYPE_BY_NAME[default].block_size else "Q6_K"

    def _rule(self, role: str, layer: int) -> str:
        """The type before the size is considered."""
        default, layers = MIXES[self.name], self.shape.layers
        grouped = self.shape.heads // self.shape.kv_heads >= 4
        match role, self.name:
            case "attn_v", _:
                found = self._value_type(layer, grouped)
                # llama.cpp takes every Llama of 80 layers for one of 70B, whose values are shared by eight heads.
                return "Q5_K" if layers == 80 and found in ("Q3_K", "Q4_K") else found
            case "ffn_down", "q2_k":
                return "Q3_K"
            case "ffn_down", "q3_k_m":
                return "Q5_K" if layer < layers // 16 else "Q4_K"
            case "ffn_down", "q4_k_m" | "q5_k_m":
                return "Q6_K" if _gets_more_bits(layer, layers) else default
            case "ffn_down", "q4_k_s" | "iq4_nl" | "iq4_xs":
                return "Q5_K" if layer < layers // 8 else default
            case "attn_output", "q2_k":
                return "Q3_K"
            case "attn_output", "q3_k_m":
                return "Q4_K"
        return default

    def _value_type(self, layer: int, grouped: bool) -> str:
        """The type of `attn_v`; `grouped`: four query heads or more share a key head."""
        default = MIXES[self.name]
        match self.name:
            case "q2_k":
                return "Q4_K" if grouped else "Q3_K"
            case "q3_k_m":
                return "Q5_K" if layer < 2 else "Q4_K"
            case "q4_k_s":
                return "Q5_K" if layer < 4 else default
            case "q4_k_m" | "q5_k_m":
                return "Q6_K" if _gets_more_bits(layer, self.shape.layers) else default
            case "iq4_nl" | "iq4_xs":
                return "Q5_K" if grouped else default
        return default

    @property
    def types(self) -> dict[str, int]:
        """How many matrices have each type, the most frequent first."""
        return dict(Counter(one.type_name for one in self.matrices()).most_common())

    @property
    def bits(self) -> float:
        """Bits per weight of all matrices, as llama.cpp's quantiser prints them."""
        made = list(self.matrices())
        return 8 * sum(one.nbytes for one in made) / sum(one.inputs * one.outputs for one in made)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads: all but the embedding."""
        return sum(one.nbytes for one in self.matrices() if not one.name.startswith(EMBEDDING))

    @property
    def prompt_products(self) -> int:
        """Products of a weight and an activation for one token of a prompt: of the layers, without the head."""
        return sum(one.inputs * one.outputs for one in self.matrices() if one.name.startswith("blk."))


def _gets_more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


# -- files -----------------------------------------------------------------------------------------

_ALIGNMENT = 32
_VERSION = 3
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_INT32 = 5
_UNKNOWN, _CONTROL, _NORMAL, _BYTE = 2, 3, 1, 6  # kinds of tokens

Value = str | bool | int | float | Sequence[str] | Sequence[float] | Sequence[int]


def write_mix(path: Path, mix: Mix) -> None:
    """Write a GGUF file of random weights, the same bytes for the same shape and mix."""
    matrices, norms = list(mix.matrices()), list(_norm_names(mix.shape))
    tensors: list[tuple[str, tuple[int, ...], str, int]]
    tensors = [(one.name, (one.outputs, one.inputs), one.type_name, one.nbytes) for one in matrices]
    tensors += [(name, (mix.shape.hidden,), "F32", 4 * mix.shape.hidden) for name in norms]
    metadata = _metadata(mix)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _value(value))
        offset = 0
        for name, sizes, type_name, nbytes in tensors:
            dimensions = struct.pack(f"<I{len(sizes)}Q", len(sizes), *reversed(sizes))
            file.write(_text(name) + dimensions + struct.pack("<IQ", _NUMBER_OF_TYPE[type_name], offset))
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        _pad(file)
        for one in matrices:
            file.write(random_blocks(one).numpy().data)
            _pad(file)
        for _ in norms:
            file.write(torch.ones(mix.shape.hidden).numpy().data)
            _pad(file)


def _pad(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _norm_names(shape: Shape) -> Iterator[str]:
    yield "output_norm.weight"
    for layer in range(shape.layers):
        yield f"blk.{layer}.attn_norm.weight"
        yield f"blk.{layer}.ffn_norm.weight"


def _metadata(mix: Mix) -> dict[str, Value]:
    """The keys that llama.cpp and exlm need of a Llama, and a SentencePiece vocabulary of bytes and random words."""
    shape = mix.shape
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256]
    if shape.vocab < len(tokens):
        raise InputError(f"--mix needs a shape with a vocabulary of at least {len(tokens)}, found {shape.vocab}.")
    tokens += [f"\u2581{word(number)}" for number in range(shape.vocab - len(tokens))]
    return {
        "general.architecture": "llama",
        "general.name": f"random weights, {mix.name}",
        "general.alignment": _ALIGNMENT,
        "general.quantization_version": 2,
        "llama.block_count": shape.layers,
        "llama.context_length": shape.positions,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.mlp,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": shape.theta,
        "llama.vocab_size": shape.vocab,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(shape.vocab)],
        "tokenizer.ggml.token_type": kinds + [_NORMAL] * (shape.vocab - len(kinds)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    """A value with its kind before it."""
    match value:
        case str():
            return struct.pack("<I", _STRING) + _text(value)
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
    kind = {str: _STRING, float: _FLOAT32, int: _INT32}[type(value[0])]
    start = struct.pack("<IIQ", _ARRAY, kind, len(value))
    if kind == _STRING:
        return start + b"".join(_text(str(one)) for one in value)
    return start + struct.pack(f"<{len(value)}{'f' if kind == _FLOAT32 else 'i'}", *value)


# -- blocks ----------------------------------------------------------------------------------------


class _Factors(NamedTuple):
    """Where in a block its float16 factors are."""

    scale: int
    minimum: int | None = None
    sign: int = 1  # of the stored minimum: -1 where it is added and not subtracted


_FACTORS: dict[str, _Factors] = {
    "Q4_0": _Factors(0),
    "Q4_1": _Factors(0, 2, -1),
    "Q5_0": _Factors(0),
    "Q5_1": _Factors(0, 2, -1),
    "Q8_0": _Factors(0),
    "Q2_K": _Factors(80, 82),
    "Q3_K": _Factors(108),
    "Q4_K": _Factors(0, 2),
    "Q5_K": _Factors(0, 2),
    "Q6_K": _Factors(208),
    "IQ4_NL": _Factors(0),
    "IQ4_XS": _Factors(0),
}

_SAMPLE_BLOCKS = 512


def random_blocks(matrix: MixMatrix) -> Tensor:
    """(outputs, bytes) uint8: random codes and sub-scales, deviation 1 / sqrt(inputs), mean near zero."""
    scale = matrix.inputs**-0.5 / _unit_deviation(matrix.type_name)
    return _blocks(matrix.type_name, matrix.outputs, matrix.inputs, scale, crc32(matrix.name.encode()))


@cache
def _unit_deviation(type_name: str) -> float:
    """The standard deviation of random blocks whose scale is 1."""
    inputs = _SAMPLE_BLOCKS * _TYPE_BY_NAME[type_name].block_size
    weight = gguf.read(_blocks(type_name, 1, inputs, 1.0, 0), type_name, inputs, 1, type_name)
    return float(weight.dequantize().float().std())


def _blocks(type_name: str, outputs: int, inputs: int, scale: float, seed: int) -> Tensor:
    one, factors = _TYPE_BY_NAME[type_name], _FACTORS[type_name]
    sizes = (outputs, inputs // one.block_size, one.block_bytes)
    words = RandomTensors(seed, torch.device("cpu")).words(1, -(-prod(sizes) // 4))
    blocks = words.view(torch.uint8)[0, : prod(sizes)].view(sizes)
    blocks[..., factors.scale : factors.scale + 2] = _half_bytes(scale)
    if factors.minimum is not None:
        middle = ((1 << gguf.BLOCK_LAYOUTS[type_name].bits) - 1) / 2  # of the codes
        blocks[..., factors.minimum : factors.minimum + 2] = _half_bytes(factors.sign * middle * scale)
    return blocks.flatten(1)


def _half_bytes(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float16).view(torch.uint8)
