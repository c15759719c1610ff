"""The words that the kernels receive describe the rows of a batch, whatever changed since the last batch."""

from __future__ import annotations

import copy
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from exlm.sampling import Sampler, SamplerState, SamplingRequest, Settings, gpu_batch, gpu_kernels
from exlm.sampling.gpu_kernels import variant_of
from exlm.sampling.penalties import PenaltyWindow
from tests.sampling.fake_kernels import FakeKernels, ReceivedRow
from tests.sampling.random_inputs import EDIT_VALUES, ToyTokenizer, neutral

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WIDTH = ToyTokenizer().get_vocab_size()
SETTING_VALUES: dict[str, tuple[Any, ...]] = EDIT_VALUES | {
    "temperature": (1.0, 0.7),
    "top_k": (3, 1, 5, 0),
    "mirostat": (False, True),
    "mirostat_tau": (2.0, 0.5),
    "xtc_probability": (0.0, 0.5),
    "xtc_ignore_tokens": (None, {3, 4}, set()),
}
BLOCKED: tuple[Any, ...] = ((), [], [2, 99], (5,), {1, 2})


class Scenario:
    """Rows that are added, grow, change and are removed, and what the kernels must receive for each."""

    def __init__(
        self, rng: Random, tokenizer: ToyTokenizer, choices: dict[str, tuple[Any, ...]] = SETTING_VALUES
    ) -> None:
        self.choices = choices
        self.rng, self.width = rng, tokenizer.get_vocab_size()
        vocabulary = Sampler(tokenizer).vocabulary
        self.breakers, self.xtc_exempt_ids = vocabulary.dry_breaker_ids, vocabulary.xtc_exempt_ids
        self.rows: list[SamplingRequest] = []
        self.mus: dict[SamplerState, dict[int, float]] = {}
        self.initial_mus: dict[SamplerState, float] = {}
        self.settings = [self.random_settings() for _ in range(3)]

    def random_settings(self) -> Settings:
        rng = self.rng
        chosen = {name: rng.choice(values) for name, values in self.choices.items() if rng.random() < 0.4}
        return neutral(**({"top_k": self.choices["top_k"][0]} | chosen))

    def add_row(self) -> None:
        rng = self.rng
        text = [self.token() for _ in range(rng.choice((0, 1, 7, 40)))]
        settings = rng.choice([*self.settings, self.random_settings()])
        own_history = rng.random() < 0.15
        state = SamplerState(settings, rng.randrange(-5, 5), () if own_history else text)
        row = SamplingRequest(settings, state, text if own_history else None, blocked=rng.choice(BLOCKED))
        self.rows.insert(rng.randint(0, len(self.rows)), row)
        self.mus[state], self.initial_mus[state] = {}, 0.0

    def token(self) -> int:
        """Some tokens come often, and some are outside the vocabulary."""
        return int((self.width + 2) * self.rng.random() ** 2)

    def random_event(self) -> None:
        """A random event for a random row."""
        rng = self.rng
        if not self.rows or rng.random() < 0.1:
            self.add_row()
        row = rng.choice(self.rows)
        kind = rng.choice(EVENTS)
        getattr(self, kind)(row)

    def add_row_of_same_text(self, row: SamplingRequest) -> None:
        """Two rows of one text."""
        self.rows.append(SamplingRequest(row.settings, row.state, row.history))

    def remove_row(self, row: SamplingRequest) -> None:
        self.rows.remove(row)

    def shuffle(self, row: SamplingRequest) -> None:
        self.rng.shuffle(self.rows)

    def rewind(self, row: SamplingRequest) -> None:
        length = self.rng.randint(0, row.position)
        if isinstance(row.history, list):
            del row.history[length:]
        else:
            row.state.truncate(length)
            self.mus[row.state] = {at: v for at, v in self.mus[row.state].items() if at < length}

    def rewind_and_regrow(self, row: SamplingRequest) -> None:
        """To the length at which it would be anyway, but with another text."""
        if row.history is None and len(row.state) > 1:
            length = len(row.state)
            row.state.truncate(length - 2)
            self.mus[row.state] = {at: v for at, v in self.mus[row.state].items() if at < length - 2}
            self.grow(row, 2)

    def grow(self, row: SamplingRequest, count: int = 1) -> None:
        for _ in range(count):
            token = self.token()
            if isinstance(row.history, list):
                row.history.append(token)
            else:
                row.state.accept(token)

    def assign_setting(self, row: SamplingRequest) -> None:
        name = self.rng.choice(list(self.choices))
        setattr(row.settings, name, self.rng.choice(self.choices[name]))

    def other_settings(self, row: SamplingRequest) -> None:
        row.settings = self.rng.choice(self.settings)

    def set_bias(self, row: SamplingRequest) -> None:
        row.settings.token_bias = self.rng.choice((None, torch.randn(self.width), torch.randn(self.width + 3)))

    def edit_bias(self, row: SamplingRequest) -> None:
        if row.settings.token_bias is not None:
            row.settings.token_bias[self.rng.randrange(self.width)] += 1.0

    def set_blocked(self, row: SamplingRequest) -> None:
        row.blocked = self.rng.choice(BLOCKED)

    def edit_blocked(self, row: SamplingRequest) -> None:
        if isinstance(row.blocked, list):
            row.blocked.append(self.rng.randrange(self.width))

    def set_allowed(self, row: SamplingRequest) -> None:
        mask = torch.rand(self.width) < 0.5
        row.allowed = self.rng.choice((None, None, mask, [1, 2, 99]))

    def edit_mask(self, row: SamplingRequest) -> None:
        if isinstance(row.allowed, torch.Tensor):
            row.allowed.logical_not_()

    def set_mu(self, row: SamplingRequest) -> None:
        row.state.mirostat_mu = self.initial_mus[row.state] = self.rng.choice((3.5, 7.25))
        self.mus[row.state] = {}

    def set_num_top_tokens(self, row: SamplingRequest) -> None:
        row.num_top_tokens = self.rng.choice((0, 0, 2))

    def expected(self, row: SamplingRequest, batch_index: int, received: ReceivedRow) -> ReceivedRow:
        """What the kernels must receive for a row."""
        compiled, state = row.settings.compiled(), row.state
        text, position = state.history, row.position
        penalized, decaying = Counter[int](), {}
        if (rule := compiled.penalty_rule) is not None and not rule.decays:
            penalized = Counter(text if rule.sustain is None else text[max(0, len(text) - rule.sustain) :])
        elif rule is not None:
            terms = PenaltyWindow().penalized_tokens(text, rule)
            strengths = terms.strengths or [1.0] * len(terms.ids)
            decaying = {t: (c, s) for t, c, s in zip(terms.ids, terms.counts, strengths, strict=True)}
        searched, breakers = list[int](), frozenset[int]()
        if compiled.dry_rule is not None:
            searched = [token if 0 <= token < self.width else -1 for token in text]
            breakers = self.breakers if compiled.dry_rule.breaker_ids is None else compiled.dry_rule.breaker_ids
        bias = row.settings.token_bias
        allowed: Any = row.allowed
        if isinstance(allowed, torch.Tensor):
            allowed = allowed.nonzero().squeeze(1).tolist()
        xtc_exempt = self.xtc_exempt_ids if compiled.xtc_exempt_ids is None else compiled.xtc_exempt_ids
        return ReceivedRow(
            batch_index,
            (state.seed, position, state.rewind_count),
            self.mu_at(row, position) if "mirostat" in compiled.stateful_steps and row.history is None else received.mu,
            tuple(float(number) for number in compiled.kernel_row),
            {token: many for token, many in penalized.items() if 0 <= token < self.width},
            decaying,
            [token for token in row.blocked if token < self.width],
            searched,
            {token for token in breakers if token < self.width},
            None if bias is None else bias[: self.width].tolist(),
            None if allowed is None else {token for token in allowed if token < self.width},
            set(xtc_exempt) if "xtc" in compiled.probs_steps else set(),
        )

    def record_mu(self, row: SamplingRequest, mu: float | None) -> None:
        """Remember the target after a drawn token."""
        if row.settings.mirostat and mu is not None:
            known = {at: value for at, value in self.mus[row.state].items() if at < row.position}
            self.mus[row.state] = known | {row.position: mu}

    def mu_at(self, row: SamplingRequest, position: int) -> float:
        known = {at: value for at, value in self.mus[row.state].items() if at < position}
        self.mus[row.state] = known
        return known[max(known)] if known else self.initial_mus[row.state] or 2.0 * row.settings.mirostat_tau


NOT_EVENTS = ("random_settings", "add_row", "random_event", "expected", "mu_at", "record_mu", "token")
EVENTS = [name for name in vars(Scenario) if not name.startswith("_") and name not in NOT_EVENTS] + ["grow"] * 3


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "has_kernels_for", lambda device: True)


def check_step(scenario: Scenario, sampler: Sampler, kernels: FakeKernels) -> None:
    """Sample once, and compare what the kernels received for every row."""
    rows, rng = scenario.rows, scenario.rng
    kernels.received, kernels.returned_mus = [], []
    kernels.raises = rng.random() < 0.05
    sampler.kernels = rng.random() > 0.05
    try:
        sampler.sample_batch(torch.zeros(len(rows), WIDTH), rows)
    except MemoryError:
        return
    found = {received.batch_index: received for received in kernels.received}
    assert len(found) == len(kernels.received)
    for index, row in enumerate(rows):
        if index in found:
            assert found[index] == scenario.expected(row, index, found[index])
            assert row.state.last_drawn_position >= row.position
        else:
            compiled = row.settings.compiled()
            assert (
                compiled.greedy_only
                or variant_of(compiled, WIDTH, max(r.num_top_tokens for r in rows)) is None
                or not sampler.kernels
            )
    for received, mu in zip(kernels.received, kernels.returned_mus, strict=True):
        scenario.record_mu(rows[received.batch_index], mu)
    for index, row in enumerate(rows):
        if index not in found:
            scenario.record_mu(row, row.state.mirostat_mu)


@settings(max_examples=60, phases=(Phase.explicit, Phase.generate))  # a scenario cannot be shrunk
@given(st.integers(0, 2**32))
def test_kernels_receive_the_state_of_every_row(seed: int) -> None:
    rng = Random(seed)
    kernels, scenario = FakeKernels(WIDTH), Scenario(rng, ToyTokenizer())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_batch, "SamplingKernels", lambda width, device, stream: kernels)
        patch.setattr(gpu_batch, "MIN_COUNTS_CAPACITY", 4)
        patch.setattr(gpu_batch, "MIN_HISTORY_CAPACITY", 4)
        sampler = Sampler(ToyTokenizer())
        for _ in range(rng.choice((1, 2, 6))):
            scenario.add_row()
        for _ in range(25):
            for _ in range(rng.choice((0, 0, 0, 1, 3))):
                scenario.random_event()
            if not scenario.rows:
                scenario.add_row()
            check_step(scenario, sampler, kernels)
            for row in scenario.rows if rng.random() < 0.9 else ():
                scenario.grow(row)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: log(0), overflow
@pytest.mark.parametrize("seed", range(20 if ON_GPU else 3))
def test_kernels_and_torch_draw_the_same_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves, while texts grow and are rewound, on rows of several tiles."""
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_kernels, "EDIT_TILE", 64)
    monkeypatch.setattr(gpu_kernels, "EDIT_PROGRAMS", 8)
    monkeypatch.setattr(gpu_batch, "MIN_COUNTS_CAPACITY", 4)
    monkeypatch.setattr(gpu_batch, "MIN_HISTORY_CAPACITY", 4)
    tokenizer = ToyTokenizer("".join(map(chr, range(97, 240))) + ".!\n")
    choices = SETTING_VALUES | {"top_k": (3, 1, 5) if ON_GPU else (1,)}  # the interpreter is slow to sort
    scenario, sampler = Scenario(Random(seed), tokenizer, choices), Sampler(tokenizer)
    for _ in range(4):
        scenario.add_row()
    for step in range(20 if ON_GPU else 8):
        if step % 3 == 2:
            scenario.random_event()
        x = torch.randn(len(scenario.rows), scenario.width) * 2.0
        same = copy.deepcopy(scenario.rows)
        found = sampler.sample_batch(x.to(DEVICE), scenario.rows)
        wanted = Sampler(tokenizer, kernels=False).sample_batch(x, same)
        assert found.tokens == wanted.tokens
        torch.testing.assert_close(found.probs.cpu(), wanted.probs, atol=1e-6, rtol=1e-4)
        for row in scenario.rows:
            scenario.grow(row)
