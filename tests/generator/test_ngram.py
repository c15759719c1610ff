"""N-gram drafting equals its reference implementation through every rewind, and its index is cheap."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.generator.speculative import ModelDrafter, NgramDrafter, NgramIndex
from exlm.generator.token_sequence import TokenSequence
from tests.generator.counting import instructions
from tests.generator.ngram_oracle import CheckedNgramDraft, search_draft
from tests.generator.test_engine import make_engine, make_job, run, streaming_results
from tests.generator.test_speculation import repetitive_script

letters = st.integers(0, 2)
changes = st.one_of(
    st.tuples(st.just("append"), st.lists(letters, max_size=6)),
    st.tuples(st.just("rewind"), st.integers(1, 8)),
    st.tuples(st.just("ask"), st.integers(1, 9)),
    st.tuples(st.just("expect")),
)


def test_the_oracle_goes_on_in_circles() -> None:
    assert search_draft([1, 2, 3, 1, 2], 7, 4) == [3, 1, 2, 3, 1, 2, 3]
    assert search_draft([5, 5], 3, 2) == [5, 5, 5]
    assert search_draft([5, 5], 3, 4) == []
    assert search_draft([5, 5, 5], 3, 4) == [5, 5, 5]
    assert search_draft([1, 2, 3], 3, 4) == []
    assert search_draft([1, 2, 9, 3, 2, 8, 1, 2], 1, 2) == [8]
    assert search_draft([1, 2, 9, 3, 2, 8, 1, 2], 1, 3) == [9]


@given(
    st.lists(letters, min_size=1, max_size=20),
    st.booleans(),
    st.lists(changes, max_size=40),
    st.integers(2, 6),
)
def test_drafts_equal_the_reference_implementation(
    prompt: list[int], admitted: bool, changes: list[tuple[Any, ...]], longest: int
) -> None:
    """Tokens are appended and rewound at random between drafts and before the first one.

    An `admitted` prompt is final and never rewound.
    """
    sequence, drafter = TokenSequence(ids=list(prompt), max_length=999), NgramDrafter(longest)
    if admitted:
        sequence.num_final_tokens = len(prompt)
    for kind, *arguments in changes:
        if kind == "append":
            sequence.ids += arguments[0]
        elif kind == "rewind":
            length = max(1, sequence.num_final_tokens, len(sequence.ids) - arguments[0])
            drafter.truncate(sequence, length)
            del sequence.ids[length:]
        elif kind == "ask":
            assert drafter.propose([sequence], arguments) == [search_draft(sequence.ids, arguments[0], longest)]
        else:
            assert drafter.has_candidate(sequence) == bool(search_draft(sequence.ids, 1, longest))
    drafter.release(sequence)
    assert not drafter._indexes


def test_a_rewound_continuation_is_not_drafted() -> None:
    """No draft was requested in between, and the text has its old length again."""
    sequence, drafter = TokenSequence(ids=[1, 2, 3, 4, 1, 2], max_length=99), NgramDrafter(4)
    assert drafter.propose([sequence], [1]) == [[3]]
    sequence.ids += [7, 8, 1, 2]
    assert drafter.propose([sequence], [1]) == [[7]]
    drafter.truncate(sequence, 6)
    sequence.ids[6:] = [9, 9, 2, 7]
    assert drafter.propose([sequence], [3]) == [search_draft(sequence.ids, 3, 4)] == [[]]


def test_a_draft_model_reads_tokens_again_after_a_rewind() -> None:
    """After a rewind and as many other tokens, the draft model reads all of those."""
    prefills: list[tuple[int, list[int]]] = []

    class Small:
        def copy(self, orders: Any) -> None: ...

        def prefill(self, sequence: TokenSequence, start: int, stop: int) -> None:
            prefills.append((start, sequence.ids[start:stop]))

        def decode(self, sequences: Any, past: Sequence[int], tokens: Sequence[Sequence[int]]) -> Any:
            prefills.append((past[0], [*tokens[0]]))
            return [NoLogits()]

    class NoLogits:
        def __getitem__(self, index: int) -> NoLogits:
            return self

        def argmax(self) -> int:
            return 0

    sequence, drafter = TokenSequence(ids=[1, 2, 3], max_length=99), ModelDrafter(Small())
    drafter.prefill(sequence, 0, 2)
    sequence.ids += [4, 5]
    drafter.propose([sequence], [1])
    assert prefills == [(0, [1, 2]), (2, [3, 4, 5])]
    drafter.truncate(sequence, 3)
    sequence.ids[3:] = [6, 7, 8, 9]
    drafter.propose([sequence], [1])
    assert prefills[2] == (3, [6, 7, 8, 9])


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_with_rewinds_drafts_as_the_reference_implementation(seed: int) -> None:
    """Rewinds come from banned strings, token healing and rejected drafts."""
    rng = random.Random(seed)
    drafter = CheckedNgramDraft(rng.randint(2, 5))
    taken_back = []

    def truncate(sequence: TokenSequence, length: int) -> None:
        taken_back.append(len(sequence.ids) - length)
        NgramDrafter.truncate(drafter, sequence, length)

    drafter.truncate = truncate  # type: ignore[method-assign]
    engine = make_engine(repetitive_script, drafter=drafter, num_draft_tokens=7)
    jobs = [
        make_job(
            [rng.randrange(2, 12) for _ in range(rng.choice([1, 7, 40]))],
            60,
            banned_strings=rng.choice([None, ["a", "c"], ["bc", "f"]]),
            token_healing=rng.random() < 0.3,
            stop_conditions=["xyz"],
        )
        for _ in range(6)
    ]
    last = [result for result in streaming_results(run(engine, *jobs)) if result["eos"]]
    assert sum(result["accepted_draft_tokens"] for result in last) > 0
    assert sum(result["rejected_draft_tokens"] for result in last) > 0
    assert taken_back
    assert not drafter._indexes


def test_no_index_is_built_before_a_draft_is_requested() -> None:
    drafter = NgramDrafter(4)
    engine = make_engine(drafter=drafter, num_draft_tokens=7)
    silent, eager = make_job("abcabc", 4, speculative=False), make_job("abcabc", 4)
    for job in (silent, eager):
        engine.enqueue(job)
    engine.step()
    assert [*drafter._indexes] == [id(eager.sequences[0])]


def text(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(500) for _ in range(length)]


def work_of_a_round(context: int) -> int:
    """The bytecode instructions of one round: append tokens, draft, rewind some, draft again."""
    sequence, drafter = TokenSequence(ids=text(context), max_length=99_999), NgramDrafter(4)
    sequence.num_final_tokens = context
    drafter.has_candidate(sequence)

    def work() -> None:
        sequence.ids.extend([7, 8, 9, 7, 8])
        drafter.propose([sequence], [7])
        drafter.truncate(sequence, context + 2)
        del sequence.ids[context + 2 :]
        drafter.propose([sequence], [7])

    return instructions(work)


def test_a_guess_and_a_rewind_cost_the_same_behind_any_context() -> None:
    short, long = work_of_a_round(128), work_of_a_round(16_000)
    assert abs(long - short) < 0.05 * short


def test_the_garbage_collector_has_nothing_to_visit() -> None:
    index = NgramIndex(2, 3, text(1000))
    index.extend(text(1000) + text(500))
    assert not any(gc.is_tracked(positions) for positions in index._ends)


def test_memory_is_a_small_multiple_of_the_context() -> None:
    ids = text(4000)
    tracemalloc.start()
    try:
        index = NgramIndex(2, 3, ids)
        prompt = tracemalloc.get_traced_memory()[0]
        for n in range(50):  # rewinds leave nothing behind
            index.extend([*ids, *text(100 + n)])
            index.truncate([*ids, *text(100 + n)], len(ids) + 1)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert prompt < 400 * len(ids)
    assert after < 1.5 * prompt
    assert index.length == len(ids) + 1
