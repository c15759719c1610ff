"""A random walk over the whole loop: any jobs, on any machine, cancelled at any moment.

A recipe says what a job is, so that the same job can be run again, alone: on a machine of its own, with room
for everything, in one chunk, without guessing. Whatever the walk does, its results must be those. After every
step the page table is checked, and the fake model checks every row it reads.
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
from tests.generator.ngram_oracle import CheckedNgramDraft
from tests.generator.page_table_oracle import check_invariants
from tests.generator.scripted import ID, PIECES, HashingRunner
from tests.generator.toy_model import AsyncToyRunner

Transcript = list[dict[str, Any]]
VARYING_KEYS = ("time_enqueued", "time_prefill", "time_generate", "cached_pages", "cached_tokens")
DRAFT_KEYS = ("accepted_draft_tokens", "rejected_draft_tokens")


@cache
def _choices(recent: tuple[int, ...]) -> list[int]:
    """Letters, mostly from the front of the alphabet, so that texts meet, stop and are banned often."""
    dice = Random(hash(recent))
    return [ID[letter] for letter in dict.fromkeys(dice.choices("abcdeabcdeabcdefghijklmnop. ", k=8))]


def script(prefix: list[int]) -> list[int]:
    """What comes next depends on the last two ids, and a little on the place."""
    return _choices((*prefix[-2:], len(prefix) % 7))


def draft_script(prefix: list[int]) -> list[int]:
    """What a small model would say: often the same."""
    return script(prefix) if hash(tuple(prefix[-3:])) % 3 else _choices((prefix[-1],))


class Scripted(HashingRunner):
    """The walk's model; what it says after equal endings is computed once."""

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
    """The walk's model, running ahead."""


class FailingFilter(Filter):
    """Lets everything pass for a while; then it fails in one of its methods, or lets nothing pass."""

    def __init__(self, after: int, where: str) -> None:
        super().__init__(None, None)
        self.after, self.where, self.fed = after, where, 0

    def begin(self, prefix_str: Any) -> None:
        self.fed = 0

    def feed(self, token: Any) -> None:
        self.fed += 1
        self._fail_if_due("feed")

    def next(self) -> Any:
        self._fail_if_due("next")
        if self.where == "nothing" and self.fed >= self.after:
            return set(), set()
        return set(range(2, len(PIECES))), set()

    def use_background_worker(self) -> bool:
        return self.after % 2 == 1

    def _fail_if_due(self, where: str) -> None:
        if self.where == where and self.fed >= self.after:
            raise RuntimeError(f"tripped in {where}")


@dataclass(frozen=True)
class JobSpec:
    """A job that can be made again."""

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
    """Settings with a hook that writes z for every a; or, after so many tokens, with one that fails."""

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


def random_job_spec(dice: Random, tokenizer: Tokenizer, prefix_lengths: Sequence[int] = (0, 0, 5, 12, 30)) -> JobSpec:
    """A request of any kind; prompts begin alike more often than not, in texts as long as `heads` says."""
    head = [2 + i % 5 for i in range(dice.choice(prefix_lengths))]
    tail = [dice.randrange(2, 12) for _ in range(dice.randint(1, 12))]
    prompts = [tuple(head + tail)]
    settings: Callable[[], Settings] = Settings.greedy
    if dice.random() < 0.12:
        settings = dice.choice((Settings, lambda: Settings(temperature=1.3, top_k=0, top_p=0.0)))
    options: dict[str, Any] = {"return_probs": dice.random() < 0.2, "max_skips": dice.choice((None, 0, 4))}
    filters: Callable[[], list[Any]] | None = None
    kind = dice.random()
    if kind < 0.4:
        options["banned_strings"] = dice.choice((["a"], ["c", "ED"], ["da", "b a", "ee"], ["a.", "bcd", "AB"]))
    elif kind < 0.5:
        words = dice.choice((["dog", "do", "cat"], ["abcd", "bad"], ["a"]))
        filters = lambda: [SelectFilter(None, tokenizer, words)]  # noqa: E731
    elif kind < 0.55:
        filters = lambda: [PrefixFilter(None, tokenizer, "he")]  # noqa: E731
    elif kind < 0.65:
        after, where = dice.randint(0, 4), dice.choice(("feed", "next", "nothing"))
        filters = lambda: [FailingFilter(after, where)]  # noqa: E731
    elif kind < 0.75:
        prompts.append(tuple(dice.randrange(2, 9) for _ in range(dice.randint(1, 9))))
        settings = guided_settings
    elif kind < 0.8:
        settings = hook_settings(dice.choice((0, 0, 2, 5)))
    if dice.random() < 0.5:
        options["stop_conditions"] = dice.choice((["dd", "ce"], [ID["e"]], ["abc", ID["n"]], ["m"]))
        options["min_new_tokens"] = dice.choice((0, 0, 3))
    options["token_healing"] = dice.random() < 0.15
    return JobSpec(tuple(prompts), dice.randint(1, 24), dice.randrange(10**6), settings, options, filters)


def simple_job_spec(dice: Random) -> JobSpec:
    """A request of the kind that runs ahead, or (rarely) one that fails when it is sampled."""
    head = [2 + i % 5 for i in range(dice.choice((0, 0, 5, 12, 30)))]
    prompt = (*head, *(dice.randrange(2, 12) for _ in range(dice.randint(1, 12))))
    warm: dict[str, Any] = {"temperature": 1.2, "top_k": 0, "top_p": 0.9}
    kinds: list[Callable[[], Settings]] = [
        *[Settings.greedy] * 10,
        *[Settings] * 10,
        lambda: Settings(**warm, token_frequency_penalty=0.5, token_presence_penalty=0.5),
        lambda: Settings(**warm, mirostat=True, adaptive_target=0.3),
        lambda: Settings(**warm, dry_multiplier=1.0, top_n_sigma=1.5),
        lambda: Settings.greedy(token_bias=torch.zeros(3)),
    ]
    options = {"stop_conditions": dice.choice((None, None, ["dd", "ce"], [ID["e"]], ["abc", ID["n"]]))}
    return JobSpec((prompt,), dice.randint(1, 24), dice.randrange(10**6), dice.choice(kinds), options)


def comparable_result(result: Any) -> dict[str, Any]:
    """What must not depend on others, comparable."""
    kept = {key: value for key, value in result.items() if key not in (*VARYING_KEYS, *DRAFT_KEYS, "job", "serial")}
    if "held" in kept:
        kept["held"] = {key: _comparable_value(value) for key, value in kept["held"].items()}
    return {key: _comparable_value(value) for key, value in kept.items()}


def _comparable_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return str(value) if isinstance(value, Exception) else value


SpecsWithResults = list[tuple[JobSpec, Transcript]]
"""Recipes, and what each gives alone."""


def run_alone(spec: JobSpec, tokenizer: Tokenizer) -> Transcript:
    """The streaming results of a job that has a machine to itself."""
    engine = EngineCore(Scripted(script, 256, 4), PageTable(256, 4), tokenizer, len(PIECES))
    engine.enqueue(spec.job())
    out = []
    while engine.busy:
        out += [comparable_result(result) for result in engine.step() if result["stage"] == "streaming"]
    return out


class ResultChecker:
    """Hears every result as it comes, and knows what each job says alone."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.expected: dict[int, tuple[Job, Transcript, Transcript]] = {}  # job → what it said, what it must say

    def expect(self, job: Job, wanted: Transcript) -> None:
        self.expected[id(job)] = (job, [], wanted)

    def drop(self, job: Job) -> None:
        """What was said until now stands; nothing more may come."""
        del self.expected[id(job)]
        self.counts["cancels"] += 1

    def check(self, results: Sequence[Any]) -> None:
        for result in results:
            job, received, wanted = self.expected[id(result["job"])]
            self.counts[result["stage"]] += 1
            if result["stage"] != "streaming":
                assert not received
                assert result.get("curr_progress", 0) <= result.get("max_progress", 0)
                continue
            received.append(comparable_result(result))
            assert received[-1] == wanted[len(received) - 1], f"{job!r}, result {len(received)}"
            self.counts["rewinds"] += "suppressed_text" in result
            self.counts["guesses"] += result.get("accepted_draft_tokens", 0)
            if result["eos"]:
                assert len(received) == len(wanted)
                self.counts["finished"] += 1
                self.counts["reused"] += job.cached_tokens > 0
                self.counts[result["eos_reason"]] += 1
                del self.expected[id(job)]


class EngineFuzz:
    """One machine's life; the recipes and what they give alone are shared between lives."""

    def __init__(self, dice: Random, tokenizer: Tokenizer, specs: SpecsWithResults, run_ahead: bool = False) -> None:
        """`ahead`: the model runs ahead, and guesses are rarer."""
        self.dice, self.specs = dice, specs
        self.checker = ResultChecker()
        self.counts = self.checker.counts
        size, pages = dice.choice((2, 4, 4, 8, 16)), dice.randint(8, 28)
        drafter: Drafter | None = None
        if dice.random() < (0.3 if run_ahead else 0.6):
            drafter = (
                CheckedNgramDraft(dice.randint(2, 4))
                if dice.random() < 0.5
                else ModelDrafter(UncheckedDraftRunner(draft_script, pages, size))
            )
        self.engine = EngineCore(
            (AsyncScripted if run_ahead else Scripted)(script, pages, size),
            PageTable(pages, size),
            tokenizer,
            len(PIECES),
            max_batch_size=dice.randint(2, 6),
            chunk_size=dice.choice((1, 3, size, 2 * size, 64)),
            drafter=drafter,
            num_draft_tokens=dice.randint(1, 5) if drafter is not None else 0,
        )

    def step(self) -> None:
        """One thing happens."""
        dice = self.dice.random()
        if dice < 0.3 and len(self.engine.scheduler.pending) < 6:
            self.enqueue()
        elif dice < 0.33:
            self.cancel()
        elif dice < 0.332:
            self.engine.clear()
            self.checker.expected.clear()
        elif dice < 0.335:
            self.engine.page_table.clear_prefix_cache()
        else:
            self.round()
        active = self.engine.scheduler.active
        check_invariants(self.engine.page_table, (s for job in active for s in job.sequences))
        assert sum(len(job.sequences) for job in active) <= self.engine.scheduler.max_batch_size

    def enqueue(self) -> None:
        spec, wanted = self.dice.choice(self.specs)
        job = spec.job()
        try:
            self.engine.enqueue(job)
        except CacheTooSmall:
            self.counts["too large"] += 1
            assert job.serial_number < 0
            return
        self.checker.expect(job, wanted)

    def cancel(self) -> None:
        if expected := self.checker.expected:
            job, _, _ = expected[self.dice.choice(list(expected))]
            self.engine.cancel(job)
            self.engine.cancel(job)
            self.checker.drop(job)

    def round(self) -> None:
        """A step of the loop, and every result compared as it comes."""
        self.counts["rounds"] += 1
        self.checker.check(self.engine.step())

    def drain(self) -> None:
        """Every job ends, and every page is free again."""
        while self.engine.busy:
            self.round()
        assert not self.checker.expected
        assert self.engine.page_table.num_free_pages == self.engine.page_table.num_pages
        check_invariants(self.engine.page_table, [])
