"""Models with random weights: matrices in each format's layout, a checkpoint of them, config, tokenizer.

Matrices are made on the device they are used on; scales are chosen so that a forward pass stays finite.
`nbytes` is the size a matrix would have in the format's files, which is what a decode step must read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor

from .. import spec
from ..errors import InputError
from ..formats import DenseWeight, Exl2Scales, KQuantScales, PackedWeight, PlainScales, Scales, Segment, Weight
from ..formats.exl2 import BIT_WIDTHS
from ..formats.gguf import BLOCK_LAYOUTS, BlockLayout
from ..formats.packed import num_words
from ..spec.model import matrices
from ..spec.tensor_names import RowRange
from .shapes import FORMATS, Shape

Values = Literal["one", "zero", "conv", "a_log", "dt_bias", "matrix"]
"""What random floats are like: near one or zero, a convolution's, a recurrence's log decay or time step, a matrix's."""

GROUP_SIZE = 128
FINE_GROUP_SIZE = 32  # rows of a group in EXL2's segments of more bits
_SQUARED_SCALE_RMS = 0.482  # root mean square of (k / 16)² for k = 1 to 16, EXL2's scales

CYCLE_LENGTH = 16
"""How many tokens a repetitive model cycles through."""

_RESIDUAL_SCALE = 1 / 512  # scale of what a repetitive model's layers add to the residual stream

FLOAT_MATRICES = (".router", ".shared_gate", ".delta.a", ".delta.b")
"""Roles of matrices that no tool quantises: with an output for each expert or head, or for the token."""

_NORMS = ("attn_norm", "mlp_norm", "attn_post", "mlp_post", "final_norm", "q_norm", "k_norm")  # with the model's offset
_VALUES_BY_PART: Mapping[str, Values] = {
    "conv": "conv",
    "a_log": "a_log",
    "dt_bias": "dt_bias",
    "selection_bias": "zero",
}
_TIME_STEPS = 0.001, 0.1  # least and largest of a recurrence's time steps, as Mamba 2 is initialised
_LARGEST_DECAY = 16.0


class RandomTensors:
    """Random tensors on one device, from a seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def integers(self, rows: int, columns: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """(rows, columns) integers from `low` to `high` - 1."""
        out = torch.empty(rows, columns, dtype=dtype, device=self.device)
        return out.random_(low, high, generator=self._generator)

    def words(self, rows: int, columns: int) -> Tensor:
        """(rows, columns) int32 with random bits: packed codes of any width."""
        return self.integers(rows, columns, -(2**31), 2**31, torch.int32)

    def floats(self, rows: int, columns: int, deviation: float) -> Tensor:
        """(rows, columns) float16 with eight significant bits, since most models are trained in bfloat16."""
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
        return out.normal_(0, deviation, generator=self._generator).half()

    def vector(self, shape: Sequence[int], values: Values) -> Tensor:
        """Floats in float16, as a model has them that no tool quantises."""
        count = torch.Size(shape).numel()
        match values:
            case "one" | "zero":
                found = self.floats(1, count, 0.1) + (1 if values == "one" else 0)
            case "conv" | "matrix":
                found = self.floats(count // shape[-1], shape[-1], shape[-1] ** -0.5)
            case "a_log":
                found = (1 + (_LARGEST_DECAY - 1) * self._uniform(count)).log().half()
            case "dt_bias":
                low, high = _TIME_STEPS
                steps = low * (high / low) ** self._uniform(count)
                found = (steps + (-torch.expm1(-steps)).log()).half()  # the inverse of softplus
        return found.view(*shape)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, device=self.device, generator=self._generator)

    def permutation(self, length: int) -> Tensor:
        """An int32 permutation, the same for each length: matrices that share an input share it in files."""
        generator = torch.Generator(self.device).manual_seed(length)
        return torch.randperm(length, generator=generator, device=self.device, dtype=torch.int32)


class SyntheticFormat(Protocol):
    """A format with its number of bits."""

    name: ClassVar[str]

    def weight(self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float) -> Weight:
        """A random matrix with about this standard deviation; `head`: it is the LM head's."""
        ...

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Bytes of the matrix in files."""
        ...


@dataclass(frozen=True)
class SyntheticExl2:
    """EXL2: several widths with a given average, widest first; the head has its own width."""

    name: ClassVar[str] = "exl2"
    bits: float = 4.1
    head_bits: int = 6

    def segments(self, inputs: int, outputs: int, head: bool) -> list[tuple[int, tuple[int, ...]]]:
        """(bits, rows of each group) of each segment, widest first; a few percent are wider than the rest."""
        all_rows = group_sizes(inputs, GROUP_SIZE)
        if head:
            return [(self.head_bits, all_rows)]
        total = self.bits * inputs * outputs
        base = max((w for w in BIT_WIDTHS if self._bits([(w, all_rows)], outputs) <= total), default=0)
        if not base:
            raise InputError(f"{self.bits} bits are too few for EXL2: it needs at least 2.1 with its scales.")
        gap = total - self._bits([(base, all_rows)], outputs)
        wider = [w for w in BIT_WIDTHS if w > base][:2]
        wide: list[tuple[int, tuple[int, ...]]] = []
        rest = inputs
        for width in reversed(wider):
            extra_bits = FINE_GROUP_SIZE * (width - base) * outputs + 3 * outputs  # and three more scales of 4 bits
            share = gap / 4 if width != wider[0] else gap
            count = min(int(share / extra_bits + 0.5), rest // FINE_GROUP_SIZE - 1)
            if count > 0:
                wide.append((width, (FINE_GROUP_SIZE,) * count))
                rest, gap = rest - FINE_GROUP_SIZE * count, gap - extra_bits * count
        return [*wide, (base, group_sizes(rest, GROUP_SIZE))]

    def weight(self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float) -> Weight:
        """Random codes, scales and permutation."""
        parts = []
        for bits, sizes in self.segments(inputs, outputs, head):
            largest = deviation * unit_scale(bits) / _SQUARED_SCALE_RMS
            scales = Exl2Scales(
                random.integers(len(sizes), outputs, 0, 16, torch.uint8),
                torch.full((len(sizes),), largest, device=random.device).half(),
            )
            codes = random.words(num_words(sum(sizes), bits), outputs)
            parts.append(Segment(bits, sizes, codes, scales, zero=1 << (bits - 1)))
        return PackedWeight("exl2", inputs, outputs, tuple(parts), torch.float16, random.permutation(inputs))

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Codes, 4-bit scales, the largest scale of each group, group table and permutation."""
        return self._bits(self.segments(inputs, outputs, head), outputs) // 8

    @staticmethod
    def _bits(segments: list[tuple[int, tuple[int, ...]]], outputs: int) -> int:
        rows = sum(sum(sizes) for _, sizes in segments)
        codes = sum(bits * sum(sizes) * outputs for bits, sizes in segments)
        return codes + sum(len(sizes) for _, sizes in segments) * (4 * outputs + 48) + 32 * rows


@dataclass(frozen=True)
class SyntheticGptq:
    """GPTQ: one width, groups of 128 with zero points; the head stays float16, as GPTQ tools leave it."""

    name: ClassVar[str] = "gptq"
    bits: int = 4

    def weight(self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float) -> Weight:
        """Random codes and zero points, equal scales."""
        if head:
            return DenseWeight(random.floats(outputs, inputs, deviation))
        sizes, centre = group_sizes(inputs, GROUP_SIZE), 1 << (self.bits - 1)
        scales = torch.full((len(sizes), outputs), deviation * unit_scale(self.bits), device=random.device).half()
        zeros = random.integers(len(sizes), outputs, centre - 1, centre + 2, torch.uint8)
        codes = random.words(num_words(inputs, self.bits), outputs)
        segment = Segment(self.bits, sizes, codes, PlainScales(scales), zeros)
        return PackedWeight("gptq", inputs, outputs, (segment,), torch.float16)

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Codes, scales, zero points and the group index of each row."""
        if head:
            return 2 * inputs * outputs
        tables = len(group_sizes(inputs, GROUP_SIZE)) * outputs * (16 + self.bits)
        return (inputs * outputs * self.bits + tables) // 8 + 4 * inputs


@dataclass(frozen=True)
class SyntheticGguf:
    """GGUF: a K-quant if inputs are a multiple of 256, else blocks of 32; the head in Q6_K or Q8_0."""

    name: ClassVar[str] = "gguf"
    kind: str = "Q4_K"
    legacy_kind: str = "Q4_1"  # where inputs are no multiple of 256

    def type_name(self, inputs: int, head: bool) -> str:
        """The GGUF type of a matrix."""
        fits_superblock = inputs % 256 == 0
        if head and self.kind != "Q8_0":
            return "Q6_K" if fits_superblock else "Q8_0"
        return self.kind if fits_superblock else self.legacy_kind

    def weight(self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float) -> Weight:
        """Random codes and scales; minimums are set so that the mean is near zero."""
        name = self.type_name(inputs, head)
        layout = BLOCK_LAYOUTS[name]
        step = deviation * unit_scale(layout.bits)
        sizes = (layout.group_size,) * (inputs // layout.group_size)
        minimum = None
        if not layout.zero:
            minimum = self._scales(inputs, outputs, layout, step * ((1 << layout.bits) - 1) / 2, random)
        segment = Segment(
            layout.bits,
            sizes,
            random.words(num_words(inputs, layout.bits), outputs),
            self._scales(inputs, outputs, layout, step, random),
            layout.zero,
            minimum,
        )
        return PackedWeight(f"gguf {name}", inputs, outputs, (segment,), torch.float32)

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Whole blocks."""
        layout = BLOCK_LAYOUTS[self.type_name(inputs, head)]
        return inputs // layout.block_size * layout.block_bytes * outputs

    @staticmethod
    def _scales(inputs: int, outputs: int, layout: BlockLayout, value: float, random: RandomTensors) -> Scales:
        groups_per_block = layout.block_size // layout.group_size
        if groups_per_block == 1:
            return PlainScales(torch.full((inputs // layout.block_size, outputs), value, device=random.device).half())
        dtype = torch.int8 if layout.zero else torch.uint8
        blocks = torch.arange(inputs // layout.block_size, dtype=torch.int32, device=random.device)
        return KQuantScales(
            random.integers(inputs // layout.group_size, outputs, 32, 64, dtype),
            torch.full((inputs // layout.block_size, outputs), value / 48, device=random.device).half(),
            blocks.repeat_interleave(groups_per_block),
        )


@dataclass(frozen=True)
class SyntheticDense:
    """Dense float16."""

    name: ClassVar[str] = "dense"

    def weight(self, inputs: int, outputs: int, random: RandomTensors, head: bool, deviation: float) -> Weight:
        """Normally distributed values."""
        return DenseWeight(random.floats(outputs, inputs, deviation))

    def nbytes(self, inputs: int, outputs: int, head: bool) -> int:
        """Two bytes a weight."""
        return 2 * inputs * outputs


_GGUF_TYPES = {4.5: ("Q4_K", "Q4_1"), 5.5: ("Q5_K", "Q5_1"), 6.5625: ("Q6_K", "Q8_0"), 8.5: ("Q8_0", "Q8_0")}


def synthetic_format(name: str, bits: float | None = None) -> SyntheticFormat:
    """The format of this name, at this average of bits per weight."""
    if name not in FORMATS:
        raise InputError(f"The format must be one of {', '.join(FORMATS)}, found {name!r}.")
    wanted = FORMATS[name] if bits is None else bits
    if name == "exl2":
        return SyntheticExl2(wanted)
    if name == "gguf":
        if wanted not in _GGUF_TYPES:
            raise InputError(f"GGUF types here have {', '.join(map(str, _GGUF_TYPES))} bits, found {wanted}.")
        return SyntheticGguf(*_GGUF_TYPES[wanted])
    if name == "gptq":
        if wanted not in (2, 3, 4, 8):
            raise InputError(f"GPTQ has 2, 3, 4 or 8 bits, found {wanted}.")
        return SyntheticGptq(int(wanted))
    if wanted != 16:
        raise InputError(f"Dense weights have 16 bits, found {wanted}.")
    return SyntheticDense()


def group_sizes(rows: int, size: int) -> tuple[int, ...]:
    """Rows of each group; the last may be smaller."""
    return (size,) * (rows // size) + ((rows % size,) if rows % size else ())


def unit_scale(bits: int) -> float:
    """The scale that gives uniformly distributed codes of this width a standard deviation of one."""
    return float(12**0.5 / (1 << bits))


class NoFiles:
    """The files of a checkpoint that has none."""

    paths: tuple[Path, ...] = ()

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes


class SyntheticCheckpoint:
    """A checkpoint of random weights, the same for the same seed, role and device.

    A `repetitive` model, for measuring speculation, generates the tokens of `token_cycle` in turn: the
    embedding of each is the head's vector for the next one, and the layers add almost nothing.
    """

    def __init__(self, model: spec.Model, fmt: SyntheticFormat, *, repetitive: bool = False, seed: int = 0) -> None:
        self._format = fmt
        self._repetitive = repetitive
        self._seed = seed
        self._sizes = {m.role: (m.in_features, m.out_features) for m in matrices(model)}
        self._fused = _fused_matrices(model, self._sizes)
        self._sizes["embed"] = model.hidden, model.vocab
        self._norm_offset = model.final_norm.offset

    @property
    def files(self) -> NoFiles:
        """No files, but the size they would have."""
        return NoFiles(sum(self.describe(role)[1] for role in self._sizes))

    def has(self, role: str) -> bool:
        """Whether the model has this matrix, or stores the weights of a convolution as one."""
        return role in self._sizes or role.endswith(".conv")

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The format's name, and the bytes the matrix would have in files."""
        inputs, outputs = self._sizes[role]
        if role == "embed" or role.endswith(FLOAT_MATRICES):
            return "dense float16", 2 * inputs * outputs
        stored = self._fused[role].outputs if role in self._fused else outputs
        return self._format.name, self._format.nbytes(inputs, stored, role == "head") * outputs // stored

    def unused(self) -> list[str]:
        """No tensor is unused."""
        return []

    def tensor(
        self,
        role: str,
        shape: tuple[int, ...] | tuple[tuple[int, ...], ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        suffix: str = "weight",
        finite: bool = False,
    ) -> Tensor:
        """Values near one for norms, or near zero if the model adds one; what a recurrence is initialised to."""
        first = shape[0]
        sizes = first if isinstance(first, tuple) else tuple(one for one in shape if isinstance(one, int))
        return self._random(role + suffix, device).vector(sizes, self._values_of(role, suffix)).to(dtype)

    def _values_of(self, role: str, suffix: str) -> Values:
        part = role.rpartition(".")[2]
        if suffix == "bias" or (part in _NORMS and self._norm_offset == 1.0):
            return "zero"
        return _VALUES_BY_PART.get(part, "one")

    def weight(
        self,
        role: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device,
        fallback: str | None = None,
    ) -> Weight:
        """A random matrix in the chosen format."""
        random = self._random(role, device)
        if role == "embed":
            if self._repetitive:
                return DenseWeight(self._cycle_embedding(device))
            return DenseWeight(random.floats(out_features, in_features, 1.0))
        writes_residual = self._repetitive and role.endswith((".o", ".down", ".out"))
        deviation = in_features**-0.5 * (_RESIDUAL_SCALE if writes_residual else 1.0)
        fmt = SyntheticDense() if role.endswith(FLOAT_MATRICES) else self._format
        fused = self._fused.get(role)
        if fused is None:
            weight = fmt.weight(in_features, out_features, random, role == "head", deviation)
        else:
            whole = fmt.weight(in_features, fused.outputs, self._random(fused.name, device), False, deviation)
            weight = _take_outputs(whole, fused.rows)
        if isinstance(weight, DenseWeight) and dtype is not None:
            return DenseWeight(weight.data.to(dtype))
        return weight

    def _cycle_embedding(self, device: torch.device) -> Tensor:
        """The embedding that makes every token predict the next one of the cycle."""
        inputs, outputs = self._sizes["head"]
        cycle = token_cycle(outputs)
        head = self.weight("head", inputs, outputs, bias=False, dtype=None, device=device)
        vectors = head.split(1, [(cycle.start, cycle.stop)])[0].dequantize().float().T
        vectors = (vectors / vectors.std()).roll(-1, 0).half()
        return vectors.repeat(-(-outputs // CYCLE_LENGTH), 1)[:outputs].contiguous()

    def _random(self, role: str, device: torch.device) -> RandomTensors:
        return RandomTensors(crc32(role.encode()) ^ self._seed, device)


class FusedMatrix(NamedTuple):
    """Where a matrix is stored together with others."""

    name: str
    outputs: int  # of all of them
    rows: tuple[RowRange, ...]


def _fused_matrices(model: spec.Model, roles: Iterable[str]) -> dict[str, FusedMatrix]:
    """The matrices that a family stores as rows of another; each is one for a tool that quantises."""
    located = {role: model.names.locations_of(role)[0] for role in roles}
    names = {role: f"{one.key} {one.expert_rows or ''}" for role, one in located.items() if one.rows}
    outputs: dict[str, int] = {}
    for role, name in names.items():
        outputs[name] = max(outputs.get(name, 0), *(stop for _, stop in located[role].rows))
    return {role: FusedMatrix(name, outputs[name], located[role].rows) for role, name in names.items()}


def _take_outputs(weight: Weight, rows: Sequence[RowRange]) -> Weight:
    """These outputs of a matrix, in this order."""
    index = torch.cat([torch.arange(*span) for span in rows])
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.data[index.to(weight.data.device)])
    assert isinstance(weight, PackedWeight)
    return weight.take_columns(index.to(weight.segments[0].codes.device))


def token_cycle(vocab: int) -> range:
    """The tokens that a repetitive model generates; any other acts as its remainder mod CYCLE_LENGTH."""
    first = vocab // 2 // CYCLE_LENGTH * CYCLE_LENGTH
    return range(first, first + CYCLE_LENGTH)


def write_model_folder(folder: Path, shape: Shape, positions: int) -> Path:
    """Write config.json, with at least this many positions, and a tokenizer of the vocabulary's size."""
    config = shape.config()
    config["max_position_embeddings"] = max(positions, shape.positions)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocab)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def _tokenizer(size: int) -> dict[str, object]:
    """tokenizer.json: three special tokens, every byte, and random words up to the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"Ġ{word(number)}" for number in range(size - len(pieces))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces[:size])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    content: dict[str, object] = json.loads(tokenizer.to_str())
    return content


def word(number: int) -> str:
    """A different word for each number."""
    letters = ""
    while number >= 0:
        number, letter = divmod(number, 26)
        letters += chr(97 + letter)
        number -= 1
    return letters
