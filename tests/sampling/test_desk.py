"""What the kernels are told of a batch is what its rows say, whatever happened to them since the last one."""

from __future__ import annotations

import copy
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from exlm.sampling import Row, Sampler, SamplerState, Settings, fused, listed, transcript
from exlm.sampling import desk as desk_module
from exlm.sampling.lanes import _numbers, lane_of
from exlm.sampling.penalties import PenaltyHistory
from tests.sampling.drawn import EDITS, Words, neutral
from tests.sampling.witness import Told, Witness

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WIDTH = Words().get_vocab_size()
CHOICES: dict[str, tuple[Any, ...]] = EDITS | {
    "temperature": (1.0, 0.7),
    "top_k": (3, 1, 5, 0),
    "mirostat": (False, True),
    "mirostat_tau": (2.0, 0.5),
    "xtc_probability": (0.0, 0.5),
    "xtc_ignore_tokens": (None, {3, 4}, set()),
}
BLOCKED: tuple[Any, ...] = ((), [], [2, 99], (5,), {1, 2})


class Story:
    """Rows that come, grow, change and go, and what must be said of each."""

    def __init__(self, rng: Random, words: Words, choices: dict[str, tuple[Any, ...]] = CHOICES) -> None:
        self.choices = choices
        self.rng, self.width = rng, words.get_vocab_size()
        vocabulary = Sampler(words).vocabulary
        self.breakers, self.unexcluded = vocabulary.breakers, vocabulary.unexcluded
        self.rows: list[Row] = []
        self.targets: dict[SamplerState, dict[int, float]] = {}
        self.first: dict[SamplerState, float] = {}
        self.settings = [self.asked() for _ in range(3)]

    def asked(self) -> Settings:
        rng = self.rng
        chosen = {name: rng.choice(values) for name, values in self.choices.items() if rng.random() < 0.4}
        return neutral(**({"top_k": self.choices["top_k"][0]} | chosen))

    def join(self) -> None:
        rng = self.rng
        text = [self.token() for _ in range(rng.choice((0, 1, 7, 40)))]
        asked = rng.choice([*self.settings, self.asked()])
        led = rng.random() < 0.15
        state = SamplerState(asked, rng.randrange(-5, 5), () if led else text)
        row = Row(asked, state, text if led else None, blocked=rng.choice(BLOCKED))
        self.rows.insert(rng.randint(0, len(self.rows)), row)
        self.targets[state], self.first[state] = {}, 0.0

    def token(self) -> int:
        """Some often, and some that the vocabulary does not have."""
        return int((self.width + 2) * self.rng.random() ** 2)

    def happen(self) -> None:
        """Something to somebody."""
        rng = self.rng
        if not self.rows or rng.random() < 0.1:
            self.join()
        row = rng.choice(self.rows)
        kind = rng.choice(KINDS)
        getattr(self, kind)(row)

    def twin(self, row: Row) -> None:
        """Two rows of one text."""
        self.rows.append(Row(row.settings, row.state, row.history))

    def leave(self, row: Row) -> None:
        self.rows.remove(row)

    def shuffle(self, row: Row) -> None:
        self.rng.shuffle(self.rows)

    def rewind(self, row: Row) -> None:
        length = self.rng.randint(0, row.position)
        if isinstance(row.history, list):
            del row.history[length:]
        else:
            row.state.truncate(length)
            self.targets[row.state] = {at: v for at, v in self.targets[row.state].items() if at < length}

    def rewind_and_go_on(self, row: Row) -> None:
        """To the length at which it would be anyway, but with another text."""
        if row.history is None and len(row.state) > 1:
            length = len(row.state)
            row.state.truncate(length - 2)
            self.targets[row.state] = {at: v for at, v in self.targets[row.state].items() if at < length - 2}
            self.grow(row, 2)

    def grow(self, row: Row, count: int = 1) -> None:
        for _ in range(count):
            token = self.token()
            if isinstance(row.history, list):
                row.history.append(token)
            else:
                row.state.accept(token)

    def assign(self, row: Row) -> None:
        name = self.rng.choice(list(self.choices))
        setattr(row.settings, name, self.rng.choice(self.choices[name]))

    def other_settings(self, row: Row) -> None:
        row.settings = self.rng.choice(self.settings)

    def set_bias(self, row: Row) -> None:
        row.settings.token_bias = self.rng.choice(
            (None, torch.randn(self.width), torch.randn(self.width + 3))
        )

    def edit_bias(self, row: Row) -> None:
        if row.settings.token_bias is not None:
            row.settings.token_bias[self.rng.randrange(self.width)] += 1.0

    def set_blocked(self, row: Row) -> None:
        row.blocked = self.rng.choice(BLOCKED)

    def edit_blocked(self, row: Row) -> None:
        if isinstance(row.blocked, list):
            row.blocked.append(self.rng.randrange(self.width))

    def restrict(self, row: Row) -> None:
        mask = torch.rand(self.width) < 0.5
        row.allowed = self.rng.choice((None, None, mask, [1, 2, 99]))

    def edit_mask(self, row: Row) -> None:
        if isinstance(row.allowed, torch.Tensor):
            row.allowed.logical_not_()

    def retarget(self, row: Row) -> None:
        row.state.mirostat_mu = self.first[row.state] = self.rng.choice((3.5, 7.25))
        self.targets[row.state] = {}

    def ask_for_top(self, row: Row) -> None:
        row.want_top = self.rng.choice((0, 0, 2))

    def expected(self, row: Row, place: int, told: Told) -> Told:
        """What must be said of a row."""
        plan, state = row.settings.plan(), row.state
        text, position = state.history, row.position
        penalised, fading = Counter[int](), {}
        if (rule := plan.penalties) is not None and not rule.fades:
            penalised = Counter(text if rule.sustain is None else text[max(0, len(text) - rule.sustain) :])
        elif rule is not None:
            terms = PenaltyHistory().terms(text, rule)
            strengths = terms.strengths or [1.0] * len(terms.ids)
            fading = {t: (c, s) for t, c, s in zip(terms.ids, terms.counts, strengths, strict=True)}
        searched, breakers = list[int](), frozenset[int]()
        if plan.dry is not None:
            searched = [token if 0 <= token < self.width else -1 for token in text]
            breakers = self.breakers if plan.dry.breakers is None else plan.dry.breakers
        bias = row.settings.token_bias
        allowed: Any = row.allowed
        if isinstance(allowed, torch.Tensor):
            allowed = allowed.nonzero().squeeze(1).tolist()
        spared = self.unexcluded if plan.xtc_ignored is None else plan.xtc_ignored
        return Told(
            place,
            (state.seed, position, state.branch),
            self.target(row, position) if plan.mirostat and row.history is None else told.target,
            tuple(float(number) for number in _numbers(plan)),
            {token: many for token, many in penalised.items() if 0 <= token < self.width},
            fading,
            [token for token in row.blocked if token < self.width],
            searched,
            {token for token in breakers if token < self.width},
            None if bias is None else bias[: self.width].tolist(),
            None if allowed is None else {token for token in allowed if token < self.width},
            set(spared) if "xtc" in plan.steps else set(),
        )

    def remember(self, row: Row, target: float | None) -> None:
        """A token was picked, and moved the row's target."""
        if row.settings.mirostat and target is not None:
            known = {at: value for at, value in self.targets[row.state].items() if at < row.position}
            self.targets[row.state] = known | {row.position: target}

    def target(self, row: Row, position: int) -> float:
        known = {at: value for at, value in self.targets[row.state].items() if at < position}
        self.targets[row.state] = known
        return known[max(known)] if known else self.first[row.state] or 2.0 * row.settings.mirostat_tau


NOT_KINDS = ("asked", "join", "happen", "expected", "target", "remember", "token")
KINDS = [name for name in vars(Story) if not name.startswith("_") and name not in NOT_KINDS] + ["grow"] * 3


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "serves", lambda device: True)


def told_of(story: Story, sampler: Sampler, witness: Witness) -> None:
    """Sample once, and compare what was said of every row."""
    rows, rng = story.rows, story.rng
    witness.told, witness.answers = [], []
    witness.fails = rng.random() < 0.05
    sampler.kernels = rng.random() > 0.05
    try:
        sampler.sample_batch(torch.zeros(len(rows), WIDTH), rows)
    except MemoryError:
        return
    found = {told.place: told for told in witness.told}
    assert len(found) == len(witness.told)
    for place, row in enumerate(rows):
        if place in found:
            assert found[place] == story.expected(row, place, found[place])
            assert row.state.drawn >= row.position
        else:
            plan = row.settings.plan()
            assert (
                plan.bare
                or lane_of(plan, WIDTH, max(r.want_top for r in rows)) is None
                or not sampler.kernels
            )
    for told, target in zip(witness.told, witness.answers, strict=True):
        story.remember(rows[told.place], target)
    for place, row in enumerate(rows):
        if place not in found:
            story.remember(row, row.state.mirostat_mu)


@settings(max_examples=60, phases=(Phase.explicit, Phase.generate))  # a story has nothing to shrink
@given(st.integers(0, 2**32))
def test_kernels_are_told_what_rows_say(seed: int) -> None:
    rng = Random(seed)
    witness, story = Witness(WIDTH), Story(rng, Words())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desk_module, "Press", lambda width, device, stream: witness)
        patch.setattr(listed, "LEAST_ROOM", 4)
        patch.setattr(transcript, "LEAST_ROOM", 4)
        sampler = Sampler(Words())
        for _ in range(rng.choice((1, 2, 6))):
            story.join()
        for _ in range(25):
            for _ in range(rng.choice((0, 0, 0, 1, 3))):
                story.happen()
            if not story.rows:
                story.join()
            told_of(story, sampler, witness)
            for row in story.rows if rng.random() < 0.9 else ():
                story.grow(row)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: log(0), overflow
@pytest.mark.parametrize("seed", range(20 if ON_GPU else 3))
def test_tokens_are_those_of_the_plain_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves, over texts' ups and downs, on rows of several spans."""
    pytest.importorskip("triton")
    monkeypatch.setattr(fused, "EDITED", 64)
    monkeypatch.setattr(fused, "PROGRAMS", 8)
    monkeypatch.setattr(listed, "LEAST_ROOM", 4)
    monkeypatch.setattr(transcript, "LEAST_ROOM", 4)
    words = Words("".join(map(chr, range(97, 240))) + ".!\n")
    choices = CHOICES | {"top_k": (3, 1, 5) if ON_GPU else (1,)}  # the interpreter is slow to sort
    story, sampler = Story(Random(seed), words, choices), Sampler(words)
    for _ in range(4):
        story.join()
    for step in range(20 if ON_GPU else 8):
        if step % 3 == 2:
            story.happen()
        x = torch.randn(len(story.rows), story.width) * 2.0
        same = copy.deepcopy(story.rows)
        found = sampler.sample_batch(x.to(DEVICE), story.rows)
        wanted = Sampler(words, kernels=False).sample_batch(x, same)
        assert found.tolist() == wanted.tolist()
        torch.testing.assert_close(found.probs.cpu(), wanted.probs, atol=1e-6, rtol=1e-4)
        for row in story.rows:
            story.grow(row)
