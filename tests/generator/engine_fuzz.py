"""Random operations on an engine: any jobs in any configuration, cancelled at any moment.

A JobSpec describes a job, so that the same job can also run alone: in an engine of its own, with room
for everything, in one chunk, without drafts. In the fuzzed engine its results must be the same. After every
step the page table is checked, and the scripted model checks every row it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from exlm import Filter, Job, PrefixFilter, SelectFilter, Settings, Tokenizer
from exlm.errors import CacheTooSmall
from exlm.generator.engine import EngineCore
from exlm.generator.page_table import PageTable
from exlm.generator.speculative import Drafter, ModelDrafter
from exlm.generator.state_table import SLOTS_PER_SEQUENCE, StateTable
from tests.generator.ngram_oracle import CheckedNgramDraft
from tests.generator.page_table_oracle import check_invariants
from tests.generator.scripted import ID, PIECES, HashingRunner
from tests.generator.toy_model import AsyncToyRunner

Transcript = list[dict[str, Any]]
VARYING_KEYS = ("time_enqueued", "time_prefill", "time_generate", "cached_pages", "cached_tokens")
DRAFT_KEYS = ("accepted_draft_tokens", "rejected_draft_tokens")


@cache
def _choices(recent: tuple[int, ...]) -> list[int]:
    """Random letters, mostly the first of the alphabet, so that stop strings and banned strings match often."""
    rng = Random(hash(recent))
    return [ID[piece] for piece in dict.fromkeys(rng.choices("abcdeabcdeabcdefghijklmnop. ", k=8))]


def script(prefix: list[int]) -> list[int]:
    """The next token depends on the last two ids and on the position modulo 7."""
    return _choices((*prefix[-2:], len(prefix) % 7))


def draft_script(prefix: list[int]) -> list[int]:
    """A draft model's script, which often agrees with `script`."""
    return script(prefix) if hash(tuple(prefix[-3:])) % 3 else _choices((prefix[-1],))


class Scripted(HashingRunner):
    """The fuzzed model; logits after equal endings are computed once."""

    def _logits(self, prefix: list[int]) -> Tensor:
        return _row(tuple(self.script(prefix)))


@cache
def _row(best: tuple[int, ...]) -> Tensor:
    row = torch.zeros(len(PIECES))
    row[list(best)] = torch.arange(10.0, 10.0 - len(best), -1.0)
    return row


class UncheckedDraftRunner(Scripted):
    """A draft model: rows may be missing where no job had a draft, which costs drafts only."""

    def _write(self, sequence: Any, prefix: Sequence[int], fed: Sequence[int]) -> None:
        pass


class AsyncScripted(Scripted, AsyncToyRunner):
    """The fuzzed model, with asynchronous scheduling."""


class FailingFilter(Filter):
    """Allows every token `after` times; then one of its methods raises, or it allows no token."""

    def __init__(self, after: int, failing_method: str) -> None:
        super().__init__(None, None)
        self.after, self.failing_method, self.num_tokens = after, failing_method, 0

    def begin(self, prefix_str: Any) -> None:
        self.num_tokens = 0

    def feed(self, token: Any) -> None:
        self.num_tokens += 1
        self._fail_if_due("feed")

    def next(self) -> Any:
        self._fail_if_due("next")
        if self.failing_method == "nothing" and self.num_tokens >= self.after:
            return set(), set()
        return set(range(2, len(PIECES))), set()

    def use_background_worker(self) -> bool:
        return self.after % 2 == 1

    def _fail_if_due(self, failing_method: str) -> None:
        if self.failing_method == failing_method and self.num_tokens >= self.after:
            raise RuntimeError(f"tripped in {failing_method}")


@dataclass(frozen=True)
class JobSpec:
    """A description from which equal jobs are created."""

    prompts: tuple[tuple[int, ...], ...]
    new: int
    seed: int
    settings: Callable[[], Settings]
    options: dict[str, Any] = field(default_factory=dict)
    filters: Callable[[], list[Any]] | None = None

    def job(self) -> Job:
        prompts = [torch.tensor([prompt]) for prompt in self.prompts]
        filters = self.filters() if self.filters is not None else None
        return Job(prompts, self.new, seed=self.seed, gen_settings=self.settings(), filters=filters, **self.options)


def guided_settings() -> Settings:
    settings = Settings.greedy()
    settings.cfg_scale = 1.5
    return settings


def hook_settings(after: int) -> Callable[[], Settings]:
    """Settings with a hook that replaces each a by z and, if `after` is not 0, raises after so many tokens."""

    def make() -> Settings:
        count = 0

        def hook(result: Any) -> None:
            nonlocal count
            count += 1
            if after and count > after:
                raise RuntimeError("tripped in a hook")
            if result.sampled_token == ID["a"]:
                result.sampled_token = ID["z"]

        settings = Settings.greedy()
        settings.post_sampling_hooks.append(hook)
        return settings

    return make


def random_job_spec(rng: Random, tokenizer: Tokenizer, prefix_lengths: Sequence[int] = (0, 0, 5, 12, 30)) -> JobSpec:
    """A request of any kind; most prompts share a prefix, whose length is one of `prefix_lengths`."""
    head = [2 + i % 5 for i in range(rng.choice(prefix_lengths))]
    tail = [rng.randrange(2, 12) for _ in range(rng.randint(1, 12))]
    prompts = [tuple(head + tail)]
    settings: Callable[[], Settings] = Settings.greedy
    if rng.random() < 0.12:
        settings = rng.choice((Settings, lambda: Settings(temperature=1.3, top_k=0, top_p=0.0)))
    options: dict[str, Any] = {"return_probs": rng.random() < 0.2, "max_skips": rng.choice((None, 0, 4))}
    filters: Callable[[], list[Any]] | None = None
    kind = rng.random()
    if kind < 0.4:
        options["banned_strings"] = rng.choice((["a"], ["c", "ED"], ["da", "b a", "ee"], ["a.", "bcd", "AB"]))
    elif kind < 0.5:
        words = rng.choice((["dog", "do", "cat"], ["abcd", "bad"], ["a"]))
        filters = lambda: [SelectFilter(None, tokenizer, words)]  # noqa: E731
    elif kind < 0.55:
        filters = lambda: [PrefixFilter(None, tokenizer, "he")]  # noqa: E731
    elif kind < 0.65:
        after, where = rng.randint(0, 4), rng.choice(("feed", "next", "nothing"))
        filters = lambda: [FailingFilter(after, where)]  # noqa: E731
    elif kind < 0.75:
        prompts.append(tuple(rng.randrange(2, 9) for _ in range(rng.randint(1, 9))))
        settings = guided_settings
    elif kind < 0.8:
        settings = hook_settings(rng.choice((0, 0, 2, 5)))
    if rng.random() < 0.5:
        options["stop_conditions"] = rng.choice((["dd", "ce"], [ID["e"]], ["abc", ID["n"]], ["m"]))
        options["min_new_tokens"] = rng.choice((0, 0, 3))
    options["token_healing"] = rng.random() < 0.15
    return JobSpec(tuple(prompts), rng.randint(1, 24), rng.randrange(10**6), settings, options, filters)


def simple_job_spec(rng: Random) -> JobSpec:
    """A request that is scheduled asynchronously, or (rarely) one whose sampling fails."""
    head = [2 + i % 5 for i in range(rng.choice((0, 0, 5, 12, 30)))]
    prompt = (*head, *(rng.randrange(2, 12) for _ in range(rng.randint(1, 12))))
    warm: dict[str, Any] = {"temperature": 1.2, "top_k": 0, "top_p": 0.9}
    kinds: list[Callable[[], Settings]] = [
        *[Settings.greedy] * 10,
        *[Settings] * 10,
        lambda: Settings(**warm, token_frequency_penalty=0.5, token_presence_penalty=0.5),
        lambda: Settings(**warm, mirostat=True, adaptive_target=0.3),
        lambda: Settings(**warm, dry_multiplier=1.0, top_n_sigma=1.5),
        lambda: Settings.greedy(token_bias=torch.zeros(3)),
    ]
    options = {"stop_conditions": rng.choice((None, None, ["dd", "ce"], [ID["e"]], ["abc", ID["n"]]))}
    return JobSpec((prompt,), rng.randint(1, 24), rng.randrange(10**6), rng.choice(kinds), options)


def comparable_result(result: Any) -> dict[str, Any]:
    """The fields of a result that must not depend on other jobs, as comparable values."""
    kept = {key: value for key, value in result.items() if key not in (*VARYING_KEYS, *DRAFT_KEYS, "job", "serial")}
    if "held" in kept:
        kept["held"] = {key: _comparable_value(value) for key, value in kept["held"].items()}
    return {key: _comparable_value(value) for key, value in kept.items()}


def _comparable_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return str(value) if isinstance(value, Exception) else value


SpecsWithResults = list[tuple[JobSpec, Transcript]]
"""Job specs with the results of each when it runs alone."""


def run_alone(spec: JobSpec, tokenizer: Tokenizer) -> Transcript:
    """The streaming results of a job that has an engine to itself."""
    engine = EngineCore(Scripted(script, 256, 4), PageTable(256, 4), tokenizer, len(PIECES))
    engine.enqueue(spec.job())
    out = []
    while engine.busy:
        out += [comparable_result(result) for result in engine.step() if result["stage"] == "streaming"]
    return out


class ResultChecker:
    """Compares each result, as it comes, with that of the same job run alone."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.expected: dict[
            int, tuple[Job, Transcript, Transcript]
        ] = {}  # id(job) → job, its results so far, the expected ones

    def expect(self, job: Job, expected: Transcript) -> None:
        self.expected[id(job)] = (job, [], expected)

    def drop(self, job: Job) -> None:
        """Expect no further results of a cancelled job."""
        del self.expected[id(job)]
        self.counts["cancels"] += 1

    def check(self, results: Sequence[Any]) -> None:
        for result in results:
            job, received, expected = self.expected[id(result["job"])]
            self.counts[result["stage"]] += 1
            if result["stage"] != "streaming":
                assert not received
                assert result.get("curr_progress", 0) <= result.get("max_progress", 0)
                continue
            received.append(comparable_result(result))
            assert received[-1] == expected[len(received) - 1], f"{job!r}, result {len(received)}"
            self.counts["rewinds"] += "suppressed_text" in result
            self.counts["guesses"] += result.get("accepted_draft_tokens", 0)
            if result["eos"]:
                assert len(received) == len(expected)
                self.counts["finished"] += 1
                self.counts["reused"] += job.cached_tokens > 0
                self.counts[result["eos_reason"]] += 1
                del self.expected[id(job)]


class EngineFuzz:
    """Random operations on one engine; `specs` are shared between instances."""

    def __init__(
        self,
        rng: Random,
        tokenizer: Tokenizer,
        specs: SpecsWithResults,
        run_ahead: bool = False,
        recurrent: bool = False,
    ) -> None:
        """With `run_ahead`, scheduling is asynchronous and drafters are rarer. `recurrent`: the model keeps states."""
        self.rng, self.specs = rng, specs
        self.checker = ResultChecker()
        self.counts = self.checker.counts
        size, pages = rng.choice((2, 4, 4, 8, 16)), rng.randint(8, 28)
        drafter: Drafter | None = None
        if rng.random() < (0.3 if run_ahead else 0.6):
            drafter = (
                CheckedNgramDraft(rng.randint(2, 4))
                if rng.random() < 0.5
                else ModelDrafter(UncheckedDraftRunner(draft_script, pages, size))
            )
        rows = rng.randint(2, 6)
        slots = SLOTS_PER_SEQUENCE * rows + rng.choice((0, 1, 4, 40)) if recurrent else 0
        states = StateTable(slots, size, rng.choice((0, size, 3 * size))) if recurrent else None
        self.engine = EngineCore(
            (AsyncScripted if run_ahead else Scripted)(script, pages, size, state_slots=slots),
            PageTable(pages, size, states),
            tokenizer,
            len(PIECES),
            max_batch_size=rows,
            chunk_size=rng.choice((1, 3, size, 2 * size, 64)),
            drafter=drafter,
            num_draft_tokens=rng.randint(1, 5) if drafter is not None else 0,
        )

    def step(self) -> None:
        """Perform one random operation and check the invariants."""
        rng = self.rng.random()
        if rng < 0.3 and len(self.engine.scheduler.pending) < 6:
            self.enqueue()
        elif rng < 0.33:
            self.cancel()
        elif rng < 0.332:
            self.engine.clear()
            self.checker.expected.clear()
        elif rng < 0.335:
            self.engine.page_table.clear_prefix_cache()
        else:
            self.round()
        active = self.engine.scheduler.active
        check_invariants(self.engine.page_table, (s for job in active for s in job.sequences))
        assert sum(len(job.sequences) for job in active) <= self.engine.scheduler.max_batch_size

    def enqueue(self) -> None:
        spec, expected = self.rng.choice(self.specs)
        job = spec.job()
        try:
            self.engine.enqueue(job)
        except CacheTooSmall:
            self.counts["too large"] += 1
            assert job.serial_number < 0
            return
        self.checker.expect(job, expected)

    def cancel(self) -> None:
        if expected := self.checker.expected:
            job, _, _ = expected[self.rng.choice(list(expected))]
            self.engine.cancel(job)
            self.engine.cancel(job)
            self.checker.drop(job)

    def round(self) -> None:
        """Step the engine and compare every result."""
        self.counts["rounds"] += 1
        self.checker.check(self.engine.step())

    def drain(self) -> None:
        """Run until every job has ended; then every page must be free."""
        while self.engine.busy:
            self.round()
        assert not self.checker.expected
        assert self.engine.page_table.num_free_pages == self.engine.page_table.num_pages
        check_invariants(self.engine.page_table, [])
