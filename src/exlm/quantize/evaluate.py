"""Evaluates a model, alone or against the one it was made from, and writes the report.

Perplexity, KL divergence, top-1 agreement, relative error behind every layer. Both models run layer by layer
on the same rows, so only one layer of each is in memory. The divergence is KL(source ‖ model) of the
next-token distributions, in nats per token.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Config
from ..errors import InputError, MissingExtra
from ..kvcache import PAGE_SIZE, Cache
from ..model import Model
from ..model.devices import pick_device
from ..model.model_runner import PlainSequence
from ..tokenizer import Tokenizer
from . import calibration
from .allocation import quantized_matrices
from .layer_loader import layer_loader, make_batch, run_block

log = logging.getLogger(__name__)

HELD_OUT_ROWS = 16
"""Rows of the built-in text that are read where no other text is given."""

LOGIT_TOKENS = 1024
"""Tokens whose logits are in memory at once."""

PERCENTILES = (50, 90, 95, 99)

JSON_FILE = "quality.json"
PLOT_FILE = "quality.png"


@dataclass(frozen=True)
class Quality:
    """What an evaluation found; fields that need a second model are None without one."""

    model: str
    tokens: int
    perplexity: float
    bytes: int  # of the weight files
    bits: float  # per weight of the layers' matrices, scales and permutations included
    layer_bits: tuple[float, ...]
    against: str | None = None
    against_perplexity: float | None = None
    kl: float | None = None  # nats per token
    kl_percentiles: dict[str, float] | None = None
    top1: float | None = None  # share of tokens at which both models have the same argmax
    layer_errors: tuple[float, ...] | None = None  # relative error of the hidden states behind each layer
    speed: dict[str, float] | None = None  # tokens per second

    def to_json(self) -> dict[str, Any]:
        """As quality.json has it."""
        return asdict(self)

    def figures(self) -> list[tuple[str, str]]:
        """Names and values of everything but the layers, for people."""
        found = [
            ("perplexity", f"{self.perplexity:.4f} on {self.tokens:,} tokens"),
            ("size", f"{self.bytes / 2**20:,.1f} MiB of weights, {self.bits:.3f} bits a weight in the layers"),
        ]
        if self.kl is not None and self.kl_percentiles is not None and self.top1 is not None:
            percentiles = ", ".join(
                f"{p if p == 'max' else p + ' %'} {value:.4f}" for p, value in self.kl_percentiles.items()
            )
            found += [
                ("perplexity of the source", f"{self.against_perplexity:.4f}"),
                ("KL divergence from it", f"{self.kl:.5f} nats a token ({percentiles})"),
                ("top-1 agreement", f"{self.top1:.2%} of tokens"),
            ]
        if self.speed is not None:
            prompt, decode = self.speed["prompt"], self.speed["generation"]
            found.append(("speed here", f"prompt {prompt:,.0f} tokens/s, decode {decode:,.1f} tokens/s"))
        return found


# -- the evaluation --------------------------------------------------------------------------------


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

    The text is that of a file (`rows` of `length` tokens; 512, or as many as the model can read), or `ids`
    (rows, tokens), or without either the part of the built-in text that is held out from calibration. With
    `speed` the model is also loaded whole and timed.
    """
    device_ = pick_device(device)
    paths = [path for path in (model, against) if path is not None]
    if ids is None:
        if text is not None and length is not None:
            _check_length(length, paths)
        ids = held_out_ids(model) if text is None else _ids_from_file(model, Path(text), rows, length)
    ids = _check_ids(ids, paths)
    batches = [row[None].to(device_) for row in ids]
    models = [_LayerwiseModel(path, ids.shape[1], device_) for path in paths]
    depth = _common_depth(models)
    errors = []
    for one in models:
        one.embed(batches)
    for i in range(depth):
        for one in models:
            one.run_layer(i, batches)
        if against is not None:
            errors.append(_relative_error(models[1].states, models[0].states))
        progress(i + 1, depth + 1)
    perplexities, kl, top1 = _compare_logits(models, batches)
    progress(depth + 1, depth + 1)
    bits, layer_bits = bits_per_weight(models[0].frozen.path)
    quality = Quality(
        model=str(model),
        tokens=ids.numel(),
        perplexity=perplexities[0],
        bytes=models[0].source.files.total_bytes,
        bits=bits,
        layer_bits=layer_bits,
        speed=measure_speed(model, device) if speed else None,
    )
    if against is None:
        return quality
    percentiles = {str(p): float(kl.quantile(p / 100)) for p in PERCENTILES}
    return replace(
        quality,
        against=str(against),
        against_perplexity=perplexities[1],
        kl=float(kl.mean()),
        kl_percentiles=percentiles | {"max": float(kl.max())},
        top1=top1,
        layer_errors=tuple(errors),
    )


class _LayerwiseModel:
    """One of the models, and its hidden states (1, tokens, hidden) of every row."""

    def __init__(self, path: str | Path, length: int, device: torch.device) -> None:
        self.frozen = Config(path).freeze()
        self.source = self.frozen.open_checkpoint()
        self.loader = layer_loader(self.frozen, self.source, length, device)
        self.states: list[Tensor] = []

    def embed(self, rows: list[Tensor]) -> None:
        embedding = self.loader.load_embedding()
        self.states = [embedding.forward(make_batch(ids)).contiguous() for ids in rows]

    def run_layer(self, i: int, rows: list[Tensor]) -> None:
        block = self.loader.load_layer(i)
        self.states = [run_block(block, x, make_batch(ids)) for x, ids in zip(self.states, rows, strict=True)]


def _compare_logits(models: list[_LayerwiseModel], rows: list[Tensor]) -> tuple[list[float], Tensor, float]:
    """(perplexity of each model, KL of the second's distribution from the first's at each token, top-1 agreement).

    Both heads read the final hidden states, a few tokens at a time.
    """
    heads = [one.loader.load_head() for one in models]
    nll, count, agreed = [0.0] * len(models), 0, 0
    divergences: list[Tensor] = []
    for number, ids in enumerate(rows):
        for a in range(0, ids.shape[1], LOGIT_TOKENS):
            b = min(a + LOGIT_TOKENS, ids.shape[1])
            log_probs = [
                head.forward(one.states[number][:, a:b], None, make_batch(ids[:, a:b]))[0][0].log_softmax(-1)
                for head, one in zip(heads, models, strict=True)
            ]
            next_ids = ids[0, a + 1 : b + 1]
            for i, one in enumerate(log_probs):
                nll[i] += float(F.nll_loss(one[: len(next_ids)], next_ids, reduction="sum"))
            count += len(next_ids)
            if len(log_probs) == 2:
                quantised, exact = log_probs
                divergences.append((exact.exp() * (exact - quantised)).sum(-1).cpu())
                agreed += int((exact.argmax(-1) == quantised.argmax(-1)).sum())
    kl = torch.cat(divergences) if divergences else torch.zeros(1)
    return [math.exp(min(total / count, 700.0)) for total in nll], kl, agreed / len(kl)


def bits_per_weight(path: Path) -> tuple[float, tuple[float, ...]]:
    """Stored bits per weight of the layers' matrices, in all and by layer; reads headers only."""
    frozen = Config(path).freeze()
    source = frozen.open_checkpoint()
    bits, weights = [0] * len(frozen.spec.layers), [0] * len(frozen.spec.layers)
    for m in quantized_matrices(frozen.spec):
        layer = int(m.role.split(".")[1])
        bits[layer] += 8 * source.describe(m.role)[1]
        weights[layer] += m.in_features * m.out_features
    return sum(bits) / sum(weights), tuple(b / w for b, w in zip(bits, weights, strict=True))


def _relative_error(exact: list[Tensor], other: list[Tensor]) -> float:
    error = sum(float((e - o).square().sum()) for e, o in zip(exact, other, strict=True))
    return math.sqrt(error / max(sum(float(e.square().sum()) for e in exact), 1e-30))


def _common_depth(models: list[_LayerwiseModel]) -> int:
    """The number of layers; `InputError` if the models differ in it or in the vocabulary."""
    sizes = [(len(one.frozen.spec.layers), one.frozen.spec.vocab) for one in models]
    if len(set(sizes)) > 1:
        (layers, vocab), (other_layers, other_vocab) = sizes
        raise InputError(
            f"{models[0].frozen.path} has {layers} layers and {vocab:,} tokens, {models[1].frozen.path} has "
            f"{other_layers} and {other_vocab:,}: they cannot be compared."
        )
    return sizes[0][0]


# -- the text --------------------------------------------------------------------------------------


def held_out_ids(model: str | Path) -> Tensor:
    """(rows, length) ids of the built-in text that is held out from calibration, some of every kind."""
    config = Config(model)
    tokenizer = Tokenizer(config)
    length = min(calibration.DEFAULT_LENGTH, config.max_seq_len)
    ids = torch.cat([tokenizer.encode(text)[0] for text in calibration.builtin_texts(held_out=True)])
    ids = calibration.check_vocab(ids, config)
    length = min(length, len(ids))
    rows = ids[: len(ids) // length * length].view(-1, length)
    rows = rows[torch.linspace(0, len(rows) - 1, min(HELD_OUT_ROWS, len(rows))).long()]
    return calibration.prepend_bos(rows, config, tokenizer)


def _ids_from_file(model: str | Path, path: Path, rows: int, length: int | None) -> Tensor:
    if rows < 1:
        raise InputError(f"rows must be at least 1, found {rows}.")
    config = Config(model)
    length = min(calibration.DEFAULT_LENGTH, config.max_seq_len) if length is None else max(length, 1)
    tokenizer = Tokenizer(config)
    texts = calibration.read_documents(path.expanduser())
    ids = calibration.rows_from_texts(texts, tokenizer, rows, length, str(path))
    return calibration.prepend_bos(calibration.check_vocab(ids, config), config, tokenizer)


def _check_ids(ids: Any, models: Sequence[str | Path]) -> Tensor:
    """The ids as int64; `InputError` if they are not (rows, tokens) of ids that all models can read."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype is torch.bool:
        found = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"ids must be a tensor of integers, (rows, tokens), found {found}.")
    if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise InputError(f"ids must be rows of at least two tokens, found shape {tuple(ids.shape)}.")
    _check_length(ids.shape[1], models)
    last = Config(models[0]).vocab_size - 1  # _common_depth compares it with the other model's
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


# -- speed -----------------------------------------------------------------------------------------


def measure_speed(model: str | Path, device: str | None) -> dict[str, float] | None:
    """Tokens per second of a prompt of up to 256 tokens, and of greedy decoding after it.

    None, with a warning, for a model that cannot be loaded whole: the rest of the evaluation does not need
    that.
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
    prompt = [i * 7 % config.vocab_size for i in range(length)]
    read = _recurrent_reader(loaded, cache) if config.spec.is_recurrent else _paged_reader(loaded, cache, prompt)
    for count in (4, steps):  # the first round warms up: a GPU compiles kernels and captures graphs
        cache.reset()
        start = time.perf_counter()
        token = read(prompt, 0)
        prefilled = time.perf_counter()
        for i in range(count):
            token = read([token], length + i)
        end = time.perf_counter()
    loaded.unload()
    return {"prompt": length / (prefilled - start), "generation": steps / (end - prefilled)}


ReadTokens = Callable[[list[int], int], int]
"""(new tokens, tokens before them) → the most likely next token."""


def _recurrent_reader(model: Model, cache: Cache) -> ReadTokens:
    """Reads with `Model.forward`, whose cache alternates between a row's two states."""

    def read(tokens: list[int], _past: int) -> int:
        return int(model.forward(torch.tensor([tokens]), cache, last_id_only=True)[0, -1].argmax())

    return read


def _paged_reader(model: Model, cache: Cache, prompt: list[int]) -> ReadTokens:
    """Reads as the generator does."""
    runner = model.runner(cache)
    sequence = PlainSequence(prompt, list(range(cache.max_seq_len // PAGE_SIZE)))

    def read(tokens: list[int], past: int) -> int:
        if len(tokens) > 1:
            runner.prefill(sequence, past, past + len(tokens) - 1)
        last = past + len(tokens) - 1
        return int(runner.decode([sequence], [last], [tokens[-1:]])[0].argmax())

    return read


# -- the report ------------------------------------------------------------------------------------


def write_report(folder: Path, quality: Quality, facts: Mapping[str, Any], card: str = "quality.md") -> None:
    """Write a card for people and quality.json into a folder, and quality.png if matplotlib is installed.

    `facts`, names and values, say how the model was made.
    """
    plotted = True
    try:
        plot(quality, folder / PLOT_FILE)
    except MissingExtra as reason:
        log.info("no plots: %s", reason)
        plotted = False
    table = {"quality": quality.to_json(), "made_with": dict(facts)}
    (folder / JSON_FILE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    (folder / card).write_text(markdown(quality, facts, plotted), encoding="utf-8")


def markdown(q: Quality, facts: Mapping[str, Any], plotted: bool) -> str:
    """The card."""
    lines = [f"# {q.model}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "## Quality", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in q.figures()]
    lines += ["", "## Layers", "", "| layer | bits a weight | relative error |", "|---|---|---|"]
    for i, bits in enumerate(q.layer_bits):
        error = f"{q.layer_errors[i]:.4f}" if q.layer_errors else "–"
        lines.append(f"| {i} | {bits:.2f} | {error} |")
    if plotted:
        lines += ["", f"![Bits and errors of the layers]({PLOT_FILE})"]
    return "\n".join(lines) + "\n"


def plot(q: Quality, path: Path) -> None:
    """Plot bits and errors by layer; `MissingExtra` without matplotlib."""
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingExtra("Plots need matplotlib: pip install 'exlm[bench]'") from error
    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.bar(range(len(q.layer_bits)), q.layer_bits, color="#b8c7d9")
    axes.set_xlabel("layer")
    axes.set_ylabel("bits a weight")
    if q.layer_errors:
        twin = axes.twinx()
        twin.plot(range(len(q.layer_errors)), q.layer_errors, color="#b3402a", marker=".")
        twin.set_ylabel("relative error behind the layer")
        twin.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
