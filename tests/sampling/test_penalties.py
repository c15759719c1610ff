"""Penalties: the published numbers, and a window that agrees with a count from scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from exlm.sampling import Sampler, SamplerState, SamplingRequest, Settings
from exlm.sampling.logits_processors import apply_edits, compute_edits
from exlm.sampling.penalties import PenaltyWindow
from exlm.sampling.vocabulary import SamplerVocabulary
from tests.sampling import oracle
from tests.sampling.random_inputs import logits, neutral, settings_for_edits

TEXT = st.lists(st.integers(0, 9), max_size=40)


def edited(x: torch.Tensor, settings: Settings, context: list[int]) -> torch.Tensor:
    row = SamplingRequest(settings, SamplerState(settings, 0, context))
    y = x.clone()
    apply_edits(y, [compute_edits(row, settings.compiled(), SamplerVocabulary(), x.shape[1])])
    return y[0]


def test_frequency_and_presence() -> None:
    x = torch.ones(1, 12)
    x[0, 9] = -1.0
    settings = neutral(token_repetition_penalty=1.5, token_frequency_penalty=0.25, token_presence_penalty=0.5)
    y = edited(x, settings, [5, 7, 5, 9])
    torch.testing.assert_close(y[[5, 7, 9]], torch.tensor([-0.3333, -0.0833, -2.25]), atol=1e-4, rtol=0)
    assert y[[0, 1, 6, 8]].eq(1.0).all()


@pytest.mark.parametrize(
    ("span", "decay", "expected"),
    [
        (2, 2, {6: 0.5, 5: 0.5, 4: 0.5, 3: 0.6667}),
        (0, 4, {6: 0.5, 5: 0.5714, 4: 0.6667, 3: 0.8}),
        (2, 0, {6: 0.5, 5: 0.5}),
        (0, 0, {}),
        (-1, 3, dict.fromkeys(range(1, 7), 0.5)),
    ],
)
def test_range_and_decay(span: int, decay: int, expected: dict[int, float]) -> None:
    settings = neutral(token_repetition_penalty=2.0, token_repetition_range=span, token_repetition_decay=decay)
    y = edited(torch.ones(1, 8), settings, [1, 2, 3, 4, 5, 6])
    wanted = torch.tensor([expected.get(token, 1.0) for token in range(8)])
    torch.testing.assert_close(y, wanted, atol=1e-4, rtol=0)


def test_ids_outside_the_vocabulary_are_skipped() -> None:
    settings = neutral(token_repetition_penalty=2.0)
    y = edited(torch.ones(1, 4), settings, [10**9, 2, 10**9 + 1, -1])
    assert y.tolist() == [1.0, 1.0, 0.5, 1.0]


@given(logits(rows=1, width=10), TEXT, settings_for_edits())
def test_edits_agree_with_the_oracle(x: torch.Tensor, context: list[int], settings: Settings) -> None:
    found = edited(x, settings, context)
    wanted = torch.tensor(
        oracle.edit_logits(x[0].tolist(), settings, context, breakers=settings.dry_sequence_breakers or ())
    )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@given(st.lists(st.tuples(TEXT, settings_for_edits()), min_size=1, max_size=6), st.data())
def test_rows_with_different_rules_are_independent(rows: list[tuple[list[int], Settings]], data: st.DataObject) -> None:
    x = data.draw(logits(rows=len(rows), width=10))
    y = x.clone()
    apply_edits(
        y,
        [
            compute_edits(
                SamplingRequest(settings, SamplerState(settings, 0, text)),
                settings.compiled(),
                SamplerVocabulary(),
                10,
            )
            for text, settings in rows
        ],
    )
    for place, (text, settings) in enumerate(rows):
        torch.testing.assert_close(y[place], edited(x[place : place + 1], settings, text), atol=0, rtol=0)


@given(TEXT, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8))
def test_a_window_can_move_to_any_range(text: list[int], windows: list[tuple[int, int]]) -> None:
    window = PenaltyWindow()
    for low, high in windows:
        start, end = sorted((min(low, len(text)), min(high, len(text))))
        window.move_to(text, start, end)
        ids, counts = window.ids[:], window.counts[:]
        wanted = {token: text[start:end].count(token) for token in text[start:end]}
        assert dict(zip(ids, map(int, counts), strict=True)) == wanted


class PenaltyStateMachine(RuleBasedStateMachine):
    """A text that grows and is rewound; its penalties are compared at any time, with any settings."""

    @initialize(prompt=TEXT)
    def begin(self, prompt: list[int]) -> None:
        """Start from a prompt."""
        self.text = list(prompt)
        self.state = SamplerState(None, 0, prompt)

    @rule(token=st.integers(0, 9))
    def grow(self, token: int) -> None:
        """A token more."""
        self.text.append(token)
        self.state.accept(token)

    @rule(length=st.integers(0, 40))
    def rewind(self, length: int) -> None:
        """Some tokens less."""
        del self.text[length:]
        self.state.truncate(length)

    @rule(settings=settings_for_edits())
    def ask(self, settings: Settings) -> None:
        """The incremental answer is the one from scratch."""
        x = torch.linspace(-2, 2, 10).unsqueeze(0)
        y = x.clone()
        apply_edits(
            y,
            [compute_edits(SamplingRequest(settings, self.state), settings.compiled(), SamplerVocabulary(), 10)],
        )
        breakers = settings.dry_sequence_breakers or ()
        wanted = torch.tensor(oracle.edit_logits(x[0].tolist(), settings, self.text, breakers=breakers))
        torch.testing.assert_close(y[0], wanted, atol=1e-4, rtol=1e-4)


TestHistory = PenaltyStateMachine.TestCase
TestHistory.settings = settings_of_hypothesis(max_examples=30, stateful_step_count=20)


def test_settings_are_read_live_and_texts_by_reference_or_by_accepting() -> None:
    settings: Any = neutral(token_repetition_penalty=2.0, top_k=1)
    x = torch.tensor([[3.0, 2.0, 1.0]])
    sampler = Sampler()
    by_history, by_accepting = SamplerState(), SamplerState(None, None, [0])
    text = [0]
    assert sampler.sample_batch(x, [SamplingRequest(settings, by_history, text)]).tokens == [1]
    assert sampler.sample_batch(x, [SamplingRequest(settings, by_accepting)]).tokens == [1]
    text.append(1)
    by_accepting.accept(1)
    assert sampler.sample_batch(x, [SamplingRequest(settings, by_history, text)]).tokens == [0]
    settings.token_repetition_range = 1
    assert sampler.sample_batch(x, [SamplingRequest(settings, by_history, text)]).tokens == [0]
    text.append(0)
    assert sampler.sample_batch(x, [SamplingRequest(settings, by_history, text)]).tokens == [1]
    del text[1:]
    assert sampler.sample_batch(x, [SamplingRequest(settings, by_history, text)]).tokens == [1]
    assert by_history.history == [0]
