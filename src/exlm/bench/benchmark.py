"""A whole benchmark: make or read a model, measure the machine, measure the model, report."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import CACHES, Cache, Config, InputError, Summary, Tokenizer, env, spec
from ..model.devices import free_bytes, pick_device
from .machine import facts, forget_peak, peak_memory, since_start
from .measure import ROOM, Timing, Work, let_go, tokens_needed
from .peaks import Peaks, peaks
from .report import Report, Row, bound
from .shapes import SHAPES
from .synthetic import Synthetic, describe_in
from .watch import WatchedModel
from .weights import form

PROMPTS = 3
"""Before those that are timed, and again so many of these, of which the one in the middle counts: passes are
recorded at first, and experts meet products of sizes that are new."""


SPARE = 1 << 30
"""Bytes of a device's memory that a cache must leave for the model's workspace."""

Tell = Callable[[str, int, int], object]
"""(what is being done, how many pieces are done, how many there are)"""


@dataclass(frozen=True)
class Plan:
    """What to measure. Every batch is run at the first context, every context with the first batch."""

    model: Path | None = None  # or else a shape
    shape: str = "llama-2-7b"
    form: str = "exl2"
    bits: float | None = None
    device: str | None = None
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (512,)
    caches: tuple[str, ...] = ("fp16",)
    prompt: int = 2048
    tokens: int = 64
    ngram: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.model is None and self.shape not in SHAPES:
            raise InputError(f"--shape must be one of {', '.join(SHAPES)}, found {self.shape!r}.")
        if unknown := [name for name in self.caches if name not in CACHES]:
            raise InputError(f"--cache must be of {', '.join(CACHES)}, found {', '.join(unknown)}.")
        if not (self.batches and self.contexts and self.caches):
            raise InputError("There must be at least one batch, one context and one cache.")
        if min(*self.batches, *self.contexts, self.prompt, self.tokens) < 1:
            raise InputError("Batches, contexts, the prompt and the tokens are all at least 1.")

    @property
    def length(self) -> int:
        """The longest sequence."""
        return max(self.prompt, *self.contexts) + self.tokens + ROOM

    def rows(self) -> list[Row]:
        """What is to be measured, in order."""
        first, *longer = self.contexts
        shapes = [(batch, first) for batch in self.batches]
        shapes += [(self.batches[0], context) for context in longer]
        kinds = ["decode", "ngram"] if self.ngram else ["decode"]
        prompt = Row("prompt", self.caches[0], self.prompt, 1)
        return [prompt] + [
            Row(work, cache, context, batch)
            for cache in self.caches
            for batch, context in shapes
            for work in kinds
        ]


def run(plan: Plan, tell: Tell = lambda *_: None) -> Report:
    """Measure everything in a plan."""
    env.cap_onednn_isa()  # must come before torch computes anything
    device = pick_device(plan.device or env.default_device())
    asked = plan.rows()
    total = len(asked) + 3
    tell("loading", 0, total)
    with opened(plan, device) as (model, load):
        tokenizer = Tokenizer(model.config)
        first = _first_token(model, tokenizer)
        loading = peak_memory(device)
        tell("the machine", 2, total)
        summary, limits = model.summary(), peaks(device, model.backends[0].dtype)
        forget_peak(device)  # of what measuring the machine took
        bench = _Bench(model, tokenizer, summary, limits, device, *_costs(model, summary))
        rows = []
        for done, row in enumerate(asked, 3):
            words = f"{row.work}, {row.cache} cache, {row.batch} × {row.context}"
            tell(words, done, total)
            rows.append(bench.measured(row, plan))
        tell("done", total, total)
        memory = max(loading, peak_memory(device))
        return _report(plan, bench, tuple(rows), load, first, memory)


@contextmanager
def opened(plan: Plan, device: torch.device) -> Iterator[tuple[WatchedModel, float]]:
    """The model in memory, and the seconds until it was."""
    with tempfile.TemporaryDirectory(prefix="exlm-bench-") as folder:
        path = plan.model
        if path is None:
            path = describe_in(Path(folder), SHAPES[plan.shape], plan.length)
        config = Config(path)
        _check_length(plan, config)
        config.device = str(device)
        config.max_seq_len = max(config.max_seq_len, plan.length)  # a few tokens around the last context
        model = WatchedModel(config)
        if plan.model is None:
            made = form(plan.form, plan.bits)
            model.open_checkpoint = lambda frozen: Synthetic(frozen.spec, made, repetitive=plan.ngram)
        start = time.perf_counter()
        model.load()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        try:
            yield model, time.perf_counter() - start
        finally:
            model.unload()


def _check_length(plan: Plan, config: Config) -> None:
    """Refuse sequences that a model was not made for; a shape is made as long as it takes."""
    for option, longest in (("--context", max(plan.contexts)), ("--prompt", plan.prompt)):
        if longest > config.max_seq_len:
            raise InputError(
                f"{option} {longest} is more than this model has: {config.max_seq_len} tokens. Ask for less, "
                "or measure a --shape, which has no end."
            )


def _first_token(model: WatchedModel, tokenizer: Tokenizer) -> float | None:
    """Seconds from the start of this process to the end of its first step."""
    Work(model, tokenizer, Cache(model, max_seq_len=256), 1).prompt(8)
    return since_start()


@dataclass(frozen=True)
class _Bench:
    """A model and what it is held against."""

    model: WatchedModel
    tokenizer: Tokenizer
    summary: Summary
    limits: Peaks
    device: torch.device
    read: int  # bytes of matrices that a step reads
    products: int  # numbers that are multiplied for one token

    def measured(self, row: Row, plan: Plan) -> Row:
        """The row with its numbers; as it is, if its cache does not fit."""
        kind = CACHES[row.cache]
        # A prompt is read several times, and later times must not be found in the cache.
        times = PROMPTS + 1 if row.work == "prompt" else 1
        tokens = tokens_needed(row.batch, row.context, plan.tokens) * times
        held = sum(kind(self.model, max_seq_len=tokens, lazy=True).layer_bytes())
        let_go(self.device)
        if held + SPARE > free_bytes(self.device):
            return row
        work = Work(
            self.model, self.tokenizer, kind(self.model, max_seq_len=tokens), row.batch, row.work == "ngram"
        )
        if row.work == "prompt":
            timings = [work.prompt(row.context, row=other) for other in range(2 * PROMPTS)]
            return self._judged(row, sorted(timings[PROMPTS:])[PROMPTS // 2], 0.0, row.context)
        before = max(1, row.context - plan.tokens // 2)  # so that the steps lie around the context
        timing = work.decode(row.batch, before, plan.tokens, plan.ngram)
        seen = row.batch * (before + plan.tokens / 2)
        return self._judged(row, timing, held / tokens * seen, row.batch)

    def _judged(self, row: Row, timing: Timing, cached: float, products: int) -> Row:
        """Times as rates and shares; `cached` bytes are read beside the matrices."""
        step = timing.seconds / timing.steps
        read = self.read + round(cached)
        idle = max(0.0, 1 - timing.passing / timing.seconds)
        bandwidth = read / step / self.limits.bandwidth
        share = 2 * self.products * products / step / self.limits.products
        return Row(
            row.work,
            _cache_name(row.cache, self.model.cache_dtype),
            row.context,
            row.batch,
            timing.tokens / timing.seconds,
            step,
            read,
            bandwidth,
            share,
            idle,
            bound(bandwidth, share, idle, self.device.type == "cuda"),
            timing.tokens / timing.steps / row.batch,
        )


def _costs(model: WatchedModel, summary: Summary) -> tuple[int, int]:
    """Bytes of a step's matrices as files have them, and products of a token; of experts, those of one token.

    A head that is the embedding's matrix has the embedding's bytes.
    """
    source = model.open_checkpoint(model.config.freeze())
    read = products = 0.0
    for m in summary.matrices:
        share = 1.0
        if ".experts." in m.role:
            moe = summary.spec.layers[int(m.role.split(".")[1])].mlp
            share = moe.active / moe.experts if isinstance(moe, spec.Moe) else 1.0
        read += share * (m.nbytes or source.describe("embed")[1])
        products += share * m.in_features * m.out_features
    return round(read), round(products)


def _cache_name(name: str, dtype: torch.dtype) -> str:
    """Sixteen bits are those that the model computes in, if it does."""
    return "bf16" if name == "fp16" and dtype is torch.bfloat16 else name


def _report(
    plan: Plan, bench: _Bench, rows: tuple[Row, ...], load: float, first: float | None, memory: int
) -> Report:
    summary, device = bench.summary, bench.device
    layers = [m for m in summary.matrices if m.role != "head"]
    forms = Counter(m.form for m in layers)
    return Report(
        model=plan.shape if plan.model is None else plan.model.name,
        form=forms.most_common(1)[0][0],
        parameters=summary.parameters,
        weights=bench.read,
        bits=8 * sum(m.nbytes for m in layers) / sum(m.in_features * m.out_features for m in layers),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        backends=tuple(name for name, _ in Counter(m.backend for m in summary.matrices).most_common()),
        threads=torch.get_num_threads(),
        load=load,
        first=first,
        memory=memory,
        bandwidth=bench.limits.bandwidth,
        products=bench.limits.products,
        rows=rows,
        system={fact.name: fact.value for fact in facts()},
    )
