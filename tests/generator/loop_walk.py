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
from exlm.generator.draft import Drafter, ModelDraft
from exlm.generator.loop import Loop
from exlm.generator.pages import PageTable
from tests.generator.ngram_oracle import CheckedNgramDraft
from tests.generator.scripted import ID, PIECES, FlatRunner
from tests.generator.toy import Eager

Transcript = list[dict[str, Any]]
OURS_ALONE = ("time_enqueued", "time_prefill", "time_generate", "cached_pages", "cached_tokens")
DRAFTED = ("accepted_draft_tokens", "rejected_draft_tokens")


@cache
def _choices(recent: tuple[int, ...]) -> list[int]:
    """Letters, mostly from the front of the alphabet, so that texts meet, stop and are banned often."""
    dice = Random(hash(recent))
    return [ID[letter] for letter in dict.fromkeys(dice.choices("abcdeabcdeabcdefghijklmnop. ", k=8))]


def script(prefix: list[int]) -> list[int]:
    """What comes next depends on the last two ids, and a little on the place."""
    return _choices((*prefix[-2:], len(prefix) % 7))


def nearly(prefix: list[int]) -> list[int]:
    """What a small model would say: often the same."""
    return script(prefix) if hash(tuple(prefix[-3:])) % 3 else _choices((prefix[-1],))


class Scripted(FlatRunner):
    """The walk's model; what it says after equal endings is computed once."""

    def _rank(self, prefix: list[int]) -> Tensor:
        return _row(tuple(self.script(prefix)))


@cache
def _row(best: tuple[int, ...]) -> Tensor:
    row = torch.zeros(len(PIECES))
    row[list(best)] = torch.arange(10.0, 10.0 - len(best), -1.0)
    return row


class LaxRunner(Scripted):
    """A draft model: rows may be missing where nobody guessed, which costs guesses and nothing else."""

    def _write(self, sequence: Any, prefix: Sequence[int], fed: Sequence[int]) -> None:
        pass


class EagerScripted(Scripted, Eager):
    """The walk's model, running ahead."""


class Tripwire(Filter):
    """Lets everything pass for a while; then it fails in one of its methods, or lets nothing pass."""

    def __init__(self, after: int, where: str) -> None:
        super().__init__(None, None)
        self.after, self.where, self.fed = after, where, 0

    def begin(self, prefix_str: Any) -> None:
        self.fed = 0

    def feed(self, token: Any) -> None:
        self.fed += 1
        self._trip("feed")

    def next(self) -> Any:
        self._trip("next")
        if self.where == "nothing" and self.fed >= self.after:
            return set(), set()
        return set(range(2, len(PIECES))), set()

    def use_background_worker(self) -> bool:
        return self.after % 2 == 1

    def _trip(self, where: str) -> None:
        if self.where == where and self.fed >= self.after:
            raise RuntimeError(f"tripped in {where}")


@dataclass(frozen=True)
class Recipe:
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
        return Job(
            prompts, self.new, seed=self.seed, gen_settings=self.settings(), filters=filters, **self.options
        )


def guided() -> Settings:
    settings = Settings.greedy()
    settings.cfg_scale = 1.5
    return settings


def hooked(after: int) -> Callable[[], Settings]:
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


def random_recipe(dice: Random, texts: Tokenizer, heads: Sequence[int] = (0, 0, 5, 12, 30)) -> Recipe:
    """A request of any kind; prompts begin alike more often than not, in texts as long as `heads` says."""
    head = [2 + i % 5 for i in range(dice.choice(heads))]
    tail = [dice.randrange(2, 12) for _ in range(dice.randint(1, 12))]
    prompts = [tuple(head + tail)]
    settings: Callable[[], Settings] = Settings.greedy
    if dice.random() < 0.12:
        settings = dice.choice((Settings, lambda: Settings(temperature=1.3, top_k=0, top_p=0.0)))
    options: dict[str, Any] = {"return_probs": dice.random() < 0.2, "max_skips": dice.choice((None, 0, 4))}
    filters: Callable[[], list[Any]] | None = None
    kind = dice.random()
    if kind < 0.4:
        options["banned_strings"] = dice.choice(
            (["a"], ["c", "ED"], ["da", "b a", "ee"], ["a.", "bcd", "AB"])
        )
    elif kind < 0.5:
        words = dice.choice((["dog", "do", "cat"], ["abcd", "bad"], ["a"]))
        filters = lambda: [SelectFilter(None, texts, words)]  # noqa: E731
    elif kind < 0.55:
        filters = lambda: [PrefixFilter(None, texts, "he")]  # noqa: E731
    elif kind < 0.65:
        after, where = dice.randint(0, 4), dice.choice(("feed", "next", "nothing"))
        filters = lambda: [Tripwire(after, where)]  # noqa: E731
    elif kind < 0.75:
        prompts.append(tuple(dice.randrange(2, 9) for _ in range(dice.randint(1, 9))))
        settings = guided
    elif kind < 0.8:
        settings = hooked(dice.choice((0, 0, 2, 5)))
    if dice.random() < 0.5:
        options["stop_conditions"] = dice.choice((["dd", "ce"], [ID["e"]], ["abc", ID["n"]], ["m"]))
        options["min_new_tokens"] = dice.choice((0, 0, 3))
    options["token_healing"] = dice.random() < 0.15
    return Recipe(tuple(prompts), dice.randint(1, 24), dice.randrange(10**6), settings, options, filters)


def plain_recipe(dice: Random) -> Recipe:
    """A request of the kind that runs ahead, or (rarely) one that fails when it is sampled."""
    head = [2 + i % 5 for i in range(dice.choice((0, 0, 5, 12, 30)))]
    prompt = (*head, *(dice.randrange(2, 12) for _ in range(dice.randint(1, 12))))
    warm: dict[str, Any] = {"temperature": 1.2, "top_k": 0, "top_p": 0.9}
    kinds: list[Callable[[], Settings]] = [
        *[Settings.greedy] * 10,
        *[Settings] * 10,
        lambda: Settings(**warm, token_frequency_penalty=0.5, token_presence_penalty=0.5),
        lambda: Settings(**warm, mirostat=True),
        lambda: Settings(**warm, dry_multiplier=1.0),
        lambda: Settings.greedy(token_bias=torch.zeros(3)),
    ]
    options = {"stop_conditions": dice.choice((None, None, ["dd", "ce"], [ID["e"]], ["abc", ID["n"]]))}
    return Recipe((prompt,), dice.randint(1, 24), dice.randrange(10**6), dice.choice(kinds), options)


def seen_by_user(result: Any) -> dict[str, Any]:
    """What must not depend on others, comparable."""
    kept = {
        key: value for key, value in result.items() if key not in (*OURS_ALONE, *DRAFTED, "job", "serial")
    }
    if "held" in kept:
        kept["held"] = {key: _plain(value) for key, value in kept["held"].items()}
    return {key: _plain(value) for key, value in kept.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return str(value) if isinstance(value, Exception) else value


Cookbook = list[tuple[Recipe, Transcript]]
"""Recipes, and what each gives alone."""


def alone(recipe: Recipe, texts: Tokenizer) -> Transcript:
    """The streaming results of a job that has a machine to itself."""
    machine = Loop(Scripted(script, 256, 4), PageTable(256, 4), texts, len(PIECES))
    machine.enqueue(recipe.job())
    out = []
    while machine.busy:
        out += [seen_by_user(result) for result in machine.step() if result["stage"] == "streaming"]
    return out


class Witness:
    """Hears every result as it comes, and knows what each job says alone."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.told: dict[int, tuple[Job, Transcript, Transcript]] = {}  # job → what it said, what it must say

    def expect(self, job: Job, wanted: Transcript) -> None:
        self.told[id(job)] = (job, [], wanted)

    def forget(self, job: Job) -> None:
        """What was said until now stands; nothing more may come."""
        del self.told[id(job)]
        self.seen["cancels"] += 1

    def hear(self, results: Sequence[Any]) -> None:
        for result in results:
            job, said, wanted = self.told[id(result["job"])]
            self.seen[result["stage"]] += 1
            if result["stage"] != "streaming":
                assert not said
                assert result.get("curr_progress", 0) <= result.get("max_progress", 0)
                continue
            said.append(seen_by_user(result))
            assert said[-1] == wanted[len(said) - 1], f"{job!r}, result {len(said)}"
            self.seen["rewinds"] += "suppressed_text" in result
            self.seen["guesses"] += result.get("accepted_draft_tokens", 0)
            if result["eos"]:
                assert len(said) == len(wanted)
                self.seen["finished"] += 1
                self.seen["reused"] += job.cached_tokens > 0
                self.seen[result["eos_reason"]] += 1
                del self.told[id(job)]


class LoopWalk:
    """One machine's life; the recipes and what they give alone are shared between lives."""

    def __init__(self, dice: Random, texts: Tokenizer, cookbook: Cookbook, ahead: bool = False) -> None:
        """`ahead`: the model runs ahead, and guesses are rarer."""
        self.dice, self.cookbook = dice, cookbook
        self.witness = Witness()
        self.seen = self.witness.seen
        size, pages = dice.choice((2, 4, 4, 8, 16)), dice.randint(8, 28)
        drafter: Drafter | None = None
        if dice.random() < (0.3 if ahead else 0.6):
            drafter = (
                CheckedNgramDraft(dice.randint(2, 4))
                if dice.random() < 0.5
                else ModelDraft(LaxRunner(nearly, pages, size))
            )
        self.loop = Loop(
            (EagerScripted if ahead else Scripted)(script, pages, size),
            PageTable(pages, size),
            texts,
            len(PIECES),
            max_batch_size=dice.randint(2, 6),
            chunk=dice.choice((1, 3, size, 2 * size, 64)),
            drafter=drafter,
            draft_tokens=dice.randint(1, 5) if drafter is not None else 0,
        )

    def step(self) -> None:
        """One thing happens."""
        dice = self.dice.random()
        if dice < 0.3 and len(self.loop.scheduler.pending) < 6:
            self.enqueue()
        elif dice < 0.33:
            self.cancel()
        elif dice < 0.332:
            self.loop.clear()
            self.witness.told.clear()
        elif dice < 0.335:
            self.loop.pages.clear()
        else:
            self.round()
        active = self.loop.scheduler.active
        self.loop.pages.check(s for job in active for s in job.sequences)
        assert sum(len(job.sequences) for job in active) <= self.loop.scheduler.max_batch_size

    def enqueue(self) -> None:
        recipe, wanted = self.dice.choice(self.cookbook)
        job = recipe.job()
        try:
            self.loop.enqueue(job)
        except CacheTooSmall:
            self.seen["too large"] += 1
            assert job.serial_number < 0
            return
        self.witness.expect(job, wanted)

    def cancel(self) -> None:
        if told := self.witness.told:
            job, _, _ = told[self.dice.choice(list(told))]
            self.loop.cancel(job)
            self.loop.cancel(job)
            self.witness.forget(job)

    def round(self) -> None:
        """A step of the loop, and every result compared as it comes."""
        self.seen["rounds"] += 1
        self.witness.hear(self.loop.step())

    def drain(self) -> None:
        """Everybody comes to an end, and everything comes back."""
        while self.loop.busy:
            self.round()
        assert not self.witness.told
        assert self.loop.pages.free == self.loop.pages.num_pages
        self.loop.pages.check([])
