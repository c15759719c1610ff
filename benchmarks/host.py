"""CPU time of the generator's own Python code: `python -m benchmarks.host`.

A fake model returns prepared logits at once, so that only the host's work is left: scheduling, page table,
sampling, detokenisation, results. Jobs are greedy. Because machines differ and are shared, CPU times are
given as multiples of a fixed piece of Python code that is timed in alternation. Timed stretches are short, so
that most of them are not interrupted, and medians are shown.

Tables: a decode step of few and many rows against its target; a decode step behind contexts of different
lengths, without a draft and with n-gram drafting; what a job costs while many others wait. In the latter two
each size is compared with the smaller ones, because none of this work should grow.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from exlm.generator.engine import EngineCore
from exlm.generator.job import Job
from exlm.generator.page_table import PageTable
from exlm.generator.speculative import NgramDrafter
from exlm.sampling import Settings
from exlm.tokenizer.detokenizer import ByteTokenDecoder, Detokenizer

VOCABULARY = 2048
PROMPT = 16
LOGIT_SETS = 8  # sets of logits that the fake model cycles through
WARMUP_CALLS, UNIT_CALLS = 3, 10  # calls before timing; calls of `unit` for each measurement
UNIT = 100e-6
"""Seconds that `unit` takes on the machine for which the targets were set."""


class Case(NamedTuple):
    """A batch size, its target in seconds for each row of a step on that machine, and steps for each turn."""

    rows: int
    target: float
    steps: int


CASES = (Case(1, 60e-6, 40), Case(64, 12e-6, 4))

CONTEXTS = (128, 2_000, 16_000)
MAX_DRAFT_TOKENS = 7  # tokens at most that n-gram drafting proposes for a step, as in a generator
QUEUES = (10, 1_000, 10_000)
GROWTH = 1.2
"""Largest allowed ratio of the cost at the longest context or queue to that at the shortest."""


class _Counter:
    """An object with an attribute and a method, for `unit`."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total


def unit() -> None:
    """The fixed piece of Python: calls, attributes, lists, dicts and strings."""
    counter, kept, text = _Counter(), [], ""
    for number in range(400):
        total = counter.add(number)
        if total % 3:
            kept.append({"number": number, "total": total, "text": text})
        text = text[-8:] + "ab"
    kept.clear()


class FakeTokenizer:
    """A vocabulary of short words that only decodes."""

    eos_token_id: int | None = 0
    extended_id_to_piece: Mapping[int, str] = {0: "</s>"}

    def __init__(self) -> None:
        self.pieces = ["", *(f" {number:x}" for number in range(1, VOCABULARY))]
        self._decoding = ByteTokenDecoder([piece.encode() for piece in self.pieces], False)

    def detokenizer(self, decode_special_tokens: bool = False, continues: bool = False) -> Detokenizer:
        """exlm's own streaming detokenizer."""
        return self._decoding.detokenizer(continues)

    def get_vocab_size(self) -> int:
        """The vocabulary size."""
        return VOCABULARY

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """The text of each token."""
        return self.pieces

    def get_prefix_id_to_ids_dict(self) -> dict[int, list[int]]:
        """Unused: these jobs have no token healing."""
        return {}


class FakeRunner:
    """A model runner that takes no time."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits = [
            torch.rand(rows, 1, VOCABULARY, generator=generator).index_fill_(2, torch.tensor([0]), -1.0)
            for _ in range(LOGIT_SETS)
        ]
        self._step = 0

    def copy_pages(self, orders: Iterable[tuple[int, int, int]]) -> None:
        """Nothing to copy."""

    def prefill(self, sequence: Any, start: int, stop: int) -> None:
        """Nothing to compute."""

    def decode(self, sequences: Sequence[Any], past: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """The next prepared logits."""
        self._step += 1
        return self._logits[self._step % LOGIT_SETS]

    def decode_next(self, sequences: Sequence[Any], past: Sequence[int], tokens: Tensor) -> Tensor:
        """The same for async scheduling, as on a GPU."""
        self._step += 1
        return self._logits[self._step % LOGIT_SETS]


class PeriodicRunner(FakeRunner):
    """A runner of one row that repeats the same few tokens, with or without drafts."""

    def __init__(self) -> None:
        super().__init__(1)
        period = torch.cat(self._logits, 1)
        self._period = period.repeat(1, 2 + MAX_DRAFT_TOKENS // LOGIT_SETS, 1)
        self.text: list[int] = period.argmax(2)[0].tolist()

    def decode(self, sequences: Sequence[Any], past: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits after each input token."""
        start = past[0] % LOGIT_SETS
        return self._period[:, start : start + len(tokens[0])]

    def decode_next(self, sequences: Sequence[Any], past: Sequence[int], tokens: Tensor) -> Tensor:
        """Logits after one token."""
        return self.decode(sequences, past, ((0,),))


def engine_in_decode(rows: int, steps: int) -> EngineCore:
    """An engine with so many jobs in the middle of decoding."""
    pages = rows * -(-(PROMPT + steps + 4) // 256)
    tokenizer: Any = FakeTokenizer()
    engine = EngineCore(FakeRunner(rows), PageTable(pages), tokenizer, VOCABULARY, max_batch_size=rows)
    settings = Settings.greedy()
    for number in range(rows):
        prompt = torch.arange(number, number + PROMPT)[None]
        engine.enqueue(Job(prompt, steps + 4, gen_settings=settings, stop_conditions=[0]))
    engine.step()
    return engine


def seconds(work: Callable[[], object], times: int) -> float:
    """CPU seconds of one call, averaged over several."""
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times


def measure(case: Case, repeats: int) -> list[tuple[float, float]]:
    """(seconds of a step per row, seconds of the unit) of each repetition."""
    found = []
    for _ in range(repeats):
        engine = engine_in_decode(case.rows, case.steps + WARMUP_CALLS)
        seconds(unit, WARMUP_CALLS)
        before = seconds(unit, UNIT_CALLS)
        seconds(engine.step, WARMUP_CALLS)
        step = seconds(engine.step, case.steps) / case.rows
        after = seconds(unit, UNIT_CALLS)
        found.append((step, (before + after) / 2))
    return found


def engine_after_context(context: int, steps: int, drafts: bool) -> EngineCore:
    """An engine with one job after a prompt of so many tokens, which continues its pattern."""
    runner = PeriodicRunner()
    tokenizer: Any = FakeTokenizer()
    new = (steps + 4) * (1 + MAX_DRAFT_TOKENS)
    engine = EngineCore(
        runner,
        PageTable(-(-(context + new) // 256)),
        tokenizer,
        VOCABULARY,
        max_batch_size=1,
        drafter=NgramDrafter() if drafts else None,
        num_draft_tokens=MAX_DRAFT_TOKENS if drafts else 0,
    )
    prompt = torch.tensor([[runner.text[(place - 1) % LOGIT_SETS] for place in range(context)]])
    engine.enqueue(Job(prompt, new, gen_settings=Settings.greedy(), stop_conditions=[0]))
    while engine.scheduler.has_prefill:
        engine.step()
    return engine


def measure_step_after_context(context: int, drafts: bool, steps: int) -> dict[str, float]:
    """Seconds of a decode step after a context of this length."""
    engine = engine_after_context(context, steps + WARMUP_CALLS, drafts)
    seconds(engine.step, WARMUP_CALLS)
    return {"step": seconds(engine.step, steps)}


def measure_queue(count: int) -> dict[str, float]:
    """Seconds to create, enqueue and cancel a job among so many, and of a step while they wait."""
    engine = engine_in_decode(1, 3 * UNIT_CALLS)
    jobs: list[Job] = []
    made = iter(range(count))

    def make() -> None:
        prompt = torch.arange(PROMPT)[None] + next(made) % 1000
        jobs.append(Job(prompt, 100, gen_settings=Settings.greedy(), stop_conditions=[0]))

    found = {"make": seconds(make, count)}
    entering, leaving = iter(jobs), iter(jobs)
    found["enqueue"] = seconds(lambda: engine.enqueue(next(entering)), count)
    seconds(engine.step, WARMUP_CALLS)
    found["step"] = seconds(engine.step, UNIT_CALLS)
    found["cancel"] = seconds(lambda: engine.cancel(next(leaving)), count)
    return found


def measure_cases(
    cases: Sequence[Callable[[], dict[str, float]]], repeats: int
) -> list[dict[str, tuple[float, float]]]:
    """For each case and quantity: (median seconds, median in multiples of the unit)."""
    turns: list[list[tuple[dict[str, float], float]]] = [[] for _ in cases]
    for _ in range(repeats):
        for case, found in zip(cases, turns, strict=True):
            gc.collect()  # every stretch starts without garbage of the one before
            before = seconds(unit, UNIT_CALLS)
            times = case()
            found.append((times, (before + seconds(unit, UNIT_CALLS)) / 2))
    return [
        {
            name: (
                median(times[name] for times, _ in found),
                median(times[name] / one for times, one in found),
            )
            for name in found[0][0]
        }
        for found in turns
    ]


def measure_queues(repeats: int) -> list[dict[str, tuple[float, float]]]:
    """`measure_queue` for each of `QUEUES`, with what is loaded now frozen, as in `exlm serve`.

    Otherwise the garbage collector visits 180,000 objects of imported modules for each 85,000 that jobs create.
    """
    gc.collect()
    gc.freeze()
    try:
        return measure_cases([partial(measure_queue, count) for count in QUEUES], repeats)
    finally:
        gc.unfreeze()


def growth_table(title: str, sizes: Sequence[int], found: Sequence[Mapping[str, tuple[float, float]]]) -> Table:
    """The table of costs at each size, with the largest growth from any size to a larger one."""
    table = Table(title=title)
    for name in ("", *(f"{size:,}" for size in sizes), "units", "growth", "at most", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for name in found[0]:
        units = [one[name][1] for one in found]
        ratio = max(later / earlier for earlier, later in combinations(units, 2))
        table.add_row(
            name,
            *(f"{one[name][0] * 1e6:.1f} µs" for one in found),
            " ".join(f"{one[name][1]:.3f}" for one in found),
            f"{ratio:.2f}",
            f"{GROWTH:.2f}",
            "flat" if ratio <= GROWTH else "grows",
        )
    return table


def measure_batches(repeats: int) -> tuple[Table, list[dict[str, float]]]:
    """The table of decode steps against their targets, and its values."""
    numbers: list[dict[str, float]] = []
    table = Table(title="Python of a decode step, plain greedy jobs")
    for name in ("batch", "µs per row", "unit in µs", "units per row", "at most", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for case in CASES:
        turns = measure(case, repeats)
        ratio, most = median(step / one for step, one in turns), case.target / UNIT
        seconds_each, unit_seconds = median(step for step, _ in turns), median(one for _, one in turns)
        numbers.append({"batch": case.rows, "seconds": seconds_each, "unit": unit_seconds, "ratio": ratio})
        table.add_row(
            str(case.rows),
            f"{seconds_each * 1e6:.1f}",
            f"{unit_seconds * 1e6:.1f}",
            f"{ratio:.3f}",
            f"{most:.2f}",
            "met" if ratio <= most else "missed",
        )
    return table, numbers


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description="The generator's own cost.")
    parser.add_argument("--repeats", type=int, default=61)
    parser.add_argument("--json", type=Path, help="write the numbers of the first table to a file, too")
    parser.add_argument("--batches-only", action="store_true", help="measure the first table only")
    chosen = parser.parse_args()
    repeats = chosen.repeats
    torch.set_num_threads(1)
    console = Console()
    table, numbers = measure_batches(repeats)
    console.print(table)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(numbers, indent=1))
    if chosen.batches_only:
        return
    for drafts in (False, True):
        cases = [partial(measure_step_after_context, context, drafts, CASES[0].steps) for context in CONTEXTS]
        title = "n-gram drafting, every guess right" if drafts else "no draft"
        console.print(growth_table(f"A decode step behind a context, {title}", CONTEXTS, measure_cases(cases, repeats)))
    waiting = measure_queues(-(-repeats // 8))
    console.print(growth_table("For each job, while so many wait", QUEUES, waiting))
    console.print(f"A unit is a fixed piece of Python: {UNIT * 1e6:.0f} µs on the machine the targets are for.")


if __name__ == "__main__":
    main()
