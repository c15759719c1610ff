"""How good a model is, alone or against the one it was made from: perplexity, divergence, agreement.

Both models run layer by layer on the same rows, so that only one layer of each is in memory and every layer's
error is seen. Divergence is that of the float model's next-token distribution from the other's, in nats.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint import open_source
from ..config import Config
from ..errors import InputError
from ..kvcache import PAGE_SIZE, Cache
from ..model import Model
from ..model.devices import pick_device
from ..model.model_runner import PagedModelRunner
from ..tokenizer import Tokenizer
from . import calibration as calibrate
from .layer_loader import LayerLoader, layer_loader, make_batch, run_block
from .measurement import quantized_matrices

log = logging.getLogger(__name__)

HELD_OUT_ROWS = 16
"""Rows of the built-in text that models are compared on."""

LOGIT_TOKENS = 1024
"""Tokens whose logits are held together."""

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Quality:
    """What was found; fields about another model are None where there was none."""

    model: str
    tokens: int
    perplexity: float
    bytes: int  # of the weight files
    bits: float  # a weight of the layers' matrices, scales and orders included
    layer_bits: tuple[float, ...]
    against: str | None = None
    against_perplexity: float | None = None
    kl: float | None = None
    kl_percentiles: dict[str, float] | None = None
    top1: float | None = None  # how often both would say the same token
    layer_errors: tuple[float, ...] | None = None  # of the residual stream behind each layer, relative
    speed: dict[str, float] | None = None  # tokens a second

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    def figures(self) -> list[tuple[str, str]]:
        """Names and values of everything but the layers, for people."""
        found = [
            ("perplexity", f"{self.perplexity:.4f} on {self.tokens:,} tokens"),
            (
                "size",
                f"{self.bytes / 2**20:,.1f} MiB of weights, {self.bits:.3f} bits a weight in the layers",
            ),
        ]
        if self.kl is not None and self.kl_percentiles is not None and self.top1 is not None:
            spread = ", ".join(
                f"{p if p == 'max' else p + ' %'} {value:.4f}" for p, value in self.kl_percentiles.items()
            )
            found += [
                ("perplexity of the source", f"{self.against_perplexity:.4f}"),
                ("KL divergence from it", f"{self.kl:.5f} nats a token ({spread})"),
                ("same first choice", f"{self.top1:.2%} of tokens"),
            ]
        if self.speed is not None:
            reading, writing = self.speed["prompt"], self.speed["generation"]
            found.append(("speed here", f"{reading:,.0f} tokens/s reading, {writing:,.1f} writing"))
        return found


class _LayerwiseModel:
    """One of the models, and its states."""

    def __init__(self, path: str | Path, length: int, device: torch.device) -> None:
        self.frozen = Config(path).freeze()
        self.source = open_source(self.frozen.path, self.frozen.spec.names, self.frozen.quantization)
        self.loader: LayerLoader = layer_loader(self.frozen, self.source, length, device)
        self.states: list[Tensor] = []

    def embed(self, rows: list[Tensor]) -> None:
        embedding = self.loader.load_embedding()
        self.states = [embedding.forward(make_batch(ids)).contiguous() for ids in rows]

    def run_layer(self, i: int, rows: list[Tensor]) -> None:
        block = self.loader.load_layer(i)
        self.states = [run_block(block, x, make_batch(ids)) for x, ids in zip(self.states, rows, strict=True)]


@torch.no_grad()
def evaluate_model(
    model: str | Path,
    against: str | Path | None = None,
    *,
    text: str | Path | None = None,
    rows: int = 16,
    length: int | None = None,
    ids: Tensor | None = None,
    device: str | None = None,
    speed: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Quality:
    """Read some text with a model and, with `against`, with the one to compare it to.

    The text is that of a file (`rows` of `length` tokens; 512, or as many as the model reads), or `ids`
    (rows, tokens), or without either the part of the built-in one that nothing is calibrated with. With
    `speed` the model is also loaded whole and timed.
    """
    place = pick_device(device)
    paths = [path for path in (model, against) if path is not None]
    if ids is None:
        if text is not None and length is not None:
            _check_length(length, paths)
        ids = held_out_ids(model) if text is None else _ids_from_file(model, Path(text), rows, length)
    ids = _check_ids(ids, paths)
    lines = [row[None].to(place) for row in ids]
    sides = [_LayerwiseModel(path, ids.shape[1], place) for path in paths]
    depth = _common_depth(sides)
    errors = []
    for side in sides:
        side.embed(lines)
    for i in range(depth):
        for side in sides:
            side.run_layer(i, lines)
        if against is not None:
            errors.append(_relative_error(sides[1].states, sides[0].states))
        progress(i + 1, depth + 1)
    found = _logit_stats(sides, lines)
    progress(depth + 1, depth + 1)
    bits, layer_bits = bits_per_weight(sides[0].frozen.path)
    return Quality(
        model=str(model),
        tokens=ids.numel(),
        perplexity=found.perplexities[0],
        bytes=sides[0].source.files.total_bytes,
        bits=bits,
        layer_bits=layer_bits,
        speed=measure_speed(model, device) if speed else None,
        **({} if against is None else found.comparison(str(against), errors)),
    )


@dataclass(frozen=True)
class _LogitStats:
    perplexities: list[float]
    divergences: Tensor
    top1: float

    def comparison(self, against: str, errors: list[float]) -> dict[str, Any]:
        d = self.divergences
        return {
            "against": against,
            "against_perplexity": self.perplexities[1],
            "kl": float(d.mean()),
            "kl_percentiles": {str(p): float(d.quantile(p / 100)) for p in PERCENTILES}
            | {"max": float(d.max())},
            "top1": self.top1,
            "layer_errors": tuple(errors),
        }


def _logit_stats(sides: list[_LayerwiseModel], rows: list[Tensor]) -> _LogitStats:
    """Both heads on the last states, a few tokens at a time."""
    heads = [side.loader.load_head() for side in sides]
    sums, count, agreed = [0.0] * len(sides), 0, 0
    divergences: list[Tensor] = []
    for number, ids in enumerate(rows):
        for a in range(0, ids.shape[1], LOGIT_TOKENS):
            b = min(a + LOGIT_TOKENS, ids.shape[1])
            parts = zip(heads, sides, strict=True)
            logs = [
                head.forward(side.states[number][:, a:b], None, make_batch(ids[:, a:b]))[0][0].log_softmax(-1)
                for head, side in parts
            ]
            wanted = ids[0, a + 1 : b + 1]
            for i, one in enumerate(logs):
                sums[i] += float(F.nll_loss(one[: len(wanted)], wanted, reduction="sum"))
            count += len(wanted)
            if len(logs) == 2:
                quantised, exact = logs
                divergences.append((exact.exp() * (exact - quantised)).sum(-1).cpu())
                agreed += int((exact.argmax(-1) == quantised.argmax(-1)).sum())
    seen = torch.cat(divergences) if divergences else torch.zeros(1)
    return _LogitStats([math.exp(min(s / count, 700.0)) for s in sums], seen, agreed / len(seen))


def bits_per_weight(path: Path) -> tuple[float, tuple[float, ...]]:
    """Bits a weight of the layers' matrices, from headers: in all, and of each layer."""
    frozen = Config(path).freeze()
    source = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    used, have = [0] * len(frozen.spec.layers), [0] * len(frozen.spec.layers)
    for m in quantized_matrices(frozen.spec):
        layer = int(m.role.split(".")[1])
        used[layer] += 8 * source.describe(m.role)[1]
        have[layer] += m.in_features * m.out_features
    return sum(used) / sum(have), tuple(u / h for u, h in zip(used, have, strict=True))


def _common_depth(sides: list[_LayerwiseModel]) -> int:
    """How many layers the models have, which must be as many."""
    sizes = [(len(side.frozen.spec.layers), side.frozen.spec.vocab) for side in sides]
    if len(set(sizes)) > 1:
        (layers, vocab), (other_layers, other_vocab) = sizes
        raise InputError(
            f"{sides[0].frozen.path} has {layers} layers and {vocab:,} tokens, {sides[1].frozen.path} has "
            f"{other_layers} and {other_vocab:,}: they cannot be compared."
        )
    return sizes[0][0]


def held_out_ids(model: str | Path) -> Tensor:
    """(rows, length) ids of the built-in text that nothing is calibrated with, some of every kind."""
    config = Config(model)
    tokenizer = Tokenizer(config)
    length = min(calibrate.DEFAULT_LENGTH, config.max_seq_len)
    ids = torch.cat([tokenizer.encode(text)[0] for text in calibrate.builtin_texts(held_out=True)])
    ids = calibrate.check_vocab(ids, config)
    length = min(length, len(ids))
    rows = ids[: len(ids) // length * length].view(-1, length)
    rows = rows[torch.linspace(0, len(rows) - 1, min(HELD_OUT_ROWS, len(rows))).long()]
    return calibrate.prepend_bos(rows, config, tokenizer)


def _check_ids(ids: Any, models: Sequence[str | Path]) -> Tensor:
    """Rows of tokens that these models can read."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype is torch.bool:
        found = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"ids must be a tensor of whole numbers, (rows, tokens), found {found}.")
    if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise InputError(f"ids must be rows of at least two tokens, found shape {tuple(ids.shape)}.")
    _check_length(ids.shape[1], models)
    last = Config(models[0]).vocab_size - 1  # another model must have as many
    if int(ids.min()) < 0 or int(ids.max()) > last:
        raise InputError(f"ids must be from 0 to {last}, found {int(ids.min())} to {int(ids.max())}.")
    return ids.long()


def _check_length(length: int, models: Sequence[str | Path]) -> None:
    for config in map(Config, models):
        if length > config.max_seq_len:
            raise InputError(
                f"A row of {length:,} tokens is longer than {config.model_dir} can read: take a length of at "
                f"most {config.max_seq_len:,}."
            )


def _ids_from_file(model: str | Path, path: Path, rows: int, length: int | None) -> Tensor:
    if rows < 1:
        raise InputError(f"rows must be at least 1, found {rows}.")
    config = Config(model)
    length = min(calibrate.DEFAULT_LENGTH, config.max_seq_len) if length is None else max(length, 1)
    tokenizer = Tokenizer(config)
    found = calibrate.read_documents(path.expanduser())
    ids = calibrate.pack_rows(found, tokenizer, rows, length, str(path))
    return calibrate.prepend_bos(calibrate.check_vocab(ids, config), config, tokenizer)


def measure_speed(model: str | Path, device: str | None) -> dict[str, float] | None:
    """Tokens a second: reading 256 of them, and then one after the other.

    None for a model that cannot be loaded whole: all else was found layer by layer, and must not be lost.
    """
    config, steps = Config(model), 16
    config.device = str(pick_device(device or config.device))
    loaded = Model(config)
    length = min(256, config.max_seq_len // 2, config.max_seq_len - steps)
    if length < 1 or not loaded.plan(length + steps).fits:
        log.warning("%s is not timed: it is too %s.", model, "short" if length < 1 else "large to load here")
        return None
    loaded.load()
    cache = Cache(loaded, max_seq_len=-(-(length + steps) // PAGE_SIZE) * PAGE_SIZE)
    runner = loaded.runner(cache)
    text = _PagedPrompt(
        [i * 7 % config.vocab_size for i in range(length)], list(range(cache.max_seq_len // PAGE_SIZE))
    )
    for count in (4, steps):  # once to warm up: a GPU compiles and records what it meets for the first time
        begun = time.perf_counter()
        if length > 1:
            runner.prefill(text, 0, length - 1)
        token = _next_token(runner, text, length - 1, text.ids[-1])
        read = time.perf_counter()
        for i in range(count):
            token = _next_token(runner, text, length + i, token)
        end = time.perf_counter()
    loaded.unload()
    return {"prompt": length / (read - begun), "generation": steps / (end - read)}


@dataclass(frozen=True)
class _PagedPrompt:
    """A prompt in pages, as a generator would have it."""

    ids: list[int]
    pages: list[int]
    extras: None = None


def _next_token(runner: PagedModelRunner, text: _PagedPrompt, past: int, token: int) -> int:
    """What follows the token."""
    return int(runner.decode([text], [past], [[token]])[0].argmax())


def _relative_error(exact: list[Tensor], other: list[Tensor]) -> float:
    off = sum(float((e - o).square().sum()) for e, o in zip(exact, other, strict=True))
    return math.sqrt(off / max(sum(float(e.square().sum()) for e in exact), 1e-30))
