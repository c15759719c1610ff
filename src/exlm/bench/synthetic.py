"""A model with random weights: its config and tokenizer files, and a checkpoint that makes its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from .. import spec
from ..formats import DenseWeight, Weight
from ..spec.weight_roles import matrices
from .shapes import Shape
from .synthetic_weights import Dense, RandomTensors, WeightFormat

CYCLE_LENGTH = 16
"""How many tokens a repetitive model cycles through."""

_FAINT_SCALE = 1 / 512  # scale of what a repetitive model's layers add to the residual stream


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

    def __init__(
        self, model: spec.Model, form: WeightFormat, *, repetitive: bool = False, seed: int = 0
    ) -> None:
        self._form = form
        self._repetitive = repetitive
        self._seed = seed
        self._sizes = {one.role: (one.in_features, one.out_features) for one in matrices(model)}
        self._sizes["embed"] = model.hidden, model.vocab

    @property
    def files(self) -> NoFiles:
        """No files, but the size they would have."""
        return NoFiles(sum(self.describe(role)[1] for role in self._sizes))

    def has(self, role: str) -> bool:
        """Whether the model has this matrix."""
        return role in self._sizes

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The format's name, and the bytes the matrix would have in files."""
        inputs, outputs = self._sizes[role]
        if role == "embed" or role.endswith(".router"):  # which no tool quantises
            return "dense float16", 2 * inputs * outputs
        return type(self._form).__name__.lower(), self._form.nbytes(inputs, outputs, role == "head")

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
        """Values near one, for norms."""
        first = shape[0]
        sizes = first if isinstance(first, tuple) else (first,)
        values = self._random(role + suffix, device).floats(1, torch.Size(sizes).numel(), 0.1)
        return (values.view(sizes) + 1).to(dtype)

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
        faint = self._repetitive and role.endswith((".o", ".down"))
        deviation = in_features**-0.5 * (_FAINT_SCALE if faint else 1.0)
        form = Dense() if role.endswith(".router") else self._form
        made = form.weight(in_features, out_features, random, role == "head", deviation)
        if isinstance(made, DenseWeight) and dtype is not None:
            return DenseWeight(made.data.to(dtype))
        return made

    def _cycle_embedding(self, device: torch.device) -> Tensor:
        """The embedding that makes every token predict the next one of the cycle."""
        inputs, outputs = self._sizes["head"]
        said = token_cycle(outputs)
        head = self.weight("head", inputs, outputs, bias=False, dtype=None, device=device)
        vectors = head.split(1, [(said.start, said.stop)])[0].dequantize().float().T
        vectors = (vectors / vectors.std()).roll(-1, 0).half()
        return vectors.repeat(-(-outputs // CYCLE_LENGTH), 1)[:outputs].contiguous()

    def _random(self, role: str, device: torch.device) -> RandomTensors:
        return RandomTensors(crc32(role.encode()) ^ self._seed, device)


def token_cycle(vocab: int) -> range:
    """The tokens that a repetitive model generates; others act as the one with the same remainder."""
    first = vocab // 2 // CYCLE_LENGTH * CYCLE_LENGTH
    return range(first, first + CYCLE_LENGTH)


def write_model_folder(folder: Path, shape: Shape, positions: int) -> Path:
    """Write config.json, with at least so many positions, and a tokenizer of the vocabulary's size."""
    config = shape.config()
    config["max_position_embeddings"] = max(positions, shape.positions)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocab)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def _tokenizer(size: int) -> dict[str, object]:
    """tokenizer.json: three special tokens, every byte, and made-up words up to the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"Ġ{_made_up_word(number)}" for number in range(size - len(pieces))]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces[:size])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    out: dict[str, object] = json.loads(made.to_str())
    return out


def _made_up_word(number: int) -> str:
    """A different word for each number."""
    letters = ""
    while number >= 0:
        number, letter = divmod(number, 26)
        letters += chr(97 + letter)
        number -= 1
    return letters
