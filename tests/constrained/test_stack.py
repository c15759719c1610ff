"""FilterStack: intersection, end tokens, EOS, background threads, and errors that concern one job."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.constrained import Filter, FilterStack, PrefixFilter, SelectFilter, token_sets
from exlm.constrained.stack import UNCONSTRAINED, FilterThreadPool
from exlm.errors import InputError
from exlm.tokenizer import Codec
from tests.constrained.toy_vocabularies import DuckTypedFilter, allowed_ids

IDS = st.sets(st.integers(0, 35))


def filter_returning(*answers: Any) -> DuckTypedFilter:
    """A filter that returns these results one after the other."""
    return DuckTypedFilter(lambda ids: answers[len(ids)])


def started_stack(filters: Any, codec: Codec, prefer_eos: bool = False, **more: Any) -> FilterStack:
    stack = FilterStack(filters, codec, prefer_eos, **more)
    stack.begin()
    return stack


@given(st.lists(st.tuples(st.none() | IDS, IDS), min_size=1, max_size=4), st.booleans())
def test_allowed_sets_intersect_and_end_sets_unite(
    letters: Codec, answers: list[tuple[set[int] | None, set[int]]], prefer: bool
) -> None:
    stack = started_stack([filter_returning(answer) for answer in answers], letters, prefer)
    limits = [passing for passing, _ in answers if passing is not None]
    ends = set().union(*(end for _, end in answers))
    if not limits:
        assert stack.allowed().mask is None
        assert stack.allowed().end_ids == ends
        return
    expected = set.intersection(*limits)
    if not expected:
        with pytest.raises(InputError, match="Filter excluded all tokens"):
            stack.allowed()
        return
    now = stack.allowed()
    if expected == {0} or (prefer and 0 in expected):
        assert (allowed_ids(stack), now.forced_id, now.end_ids) == ({0}, 0, ends | {0})
    else:
        assert allowed_ids(stack) == expected
        assert now.end_ids == ends
        assert now.forced_id == (min(expected) if len(expected) == 1 else None)
    assert stack.allowed() is now


@pytest.mark.parametrize("none", [None, [], ()])
def test_without_filters_nothing_is_constrained(letters: Codec, none: Any) -> None:
    stack = started_stack(none, letters)
    assert not stack
    assert stack.allowed() is UNCONSTRAINED
    stack.feed(3)
    with ThreadPoolExecutor(1) as pool:
        stack.start_background(pool)
    assert stack.allowed().mask is None
    stack.close()


def test_filters_of_every_kind_work_together(letters: Codec) -> None:
    ids = letters.vocab.piece_to_id()
    enforcer = DuckTypedFilter(lambda fed: (set(range(36)) - {32}, set()))
    stack = started_stack(
        [
            PrefixFilter(None, letters, ["Hel", "cat"]),
            SelectFilter(None, letters, ["Hello", "dog"]),
            enforcer,
        ],
        letters,
    )
    assert allowed_ids(stack) == {33, 34}
    stack.feed(33)
    assert allowed_ids(stack) == {ids["l"]}
    stack.feed(ids["l"])
    assert stack.allowed().forced_id == ids["o"]
    assert ids["o"] in stack.allowed().end_ids
    assert enforcer.token_sequence == [33, ids["l"]]


def test_the_error_names_filters_and_text(letters: Codec) -> None:
    stack = started_stack([SelectFilter(None, letters, ["cab"]), filter_returning(([4], []), ([7, 9], []))], letters)
    stack.feed(4)
    with pytest.raises(
        InputError,
        match=r"excluded all tokens: SelectFilter \(1 of 36 tokens\) and DuckTypedFilter \(2 of 36 tokens\) "
        r"after the text 'c'\. Each lets something pass",
    ):
        stack.allowed()
    with pytest.raises(InputError):
        stack.allowed()
    stack.begin()
    assert allowed_ids(stack) == {4}


def test_prefer_eos_takes_any_eos(letters: Codec) -> None:
    assert started_stack([filter_returning(([0, 5], []))], letters, True).allowed().forced_id == 0
    assert started_stack([filter_returning(([0, 5], []))], letters, False).allowed().forced_id is None
    assert started_stack([filter_returning(([4, 5], []))], letters, True).allowed().forced_id is None
    assert started_stack([filter_returning((None, []))], letters, True).allowed().mask is None


def test_a_model_may_have_more_or_fewer_tokens_than_the_tokenizer(letters: Codec) -> None:
    for width in (20, 32, 36, 64, 100):
        stack = started_stack(
            [PrefixFilter(None, letters, ["Hello", "ab"]), filter_returning((range(36), []))],
            letters,
            width=width,
        )
        mask = stack.allowed().mask
        assert mask is not None
        assert len(mask) == -(-width // 32)
        assert allowed_ids(stack) == {n for n in (2, 32, 33, 34) if n < width}


def test_background_computation_gives_the_same_masks(letters: Codec) -> None:
    threads = []

    class Slow(Filter):
        def begin(self, prefix_str: Any) -> None: ...

        def feed(self, token: Any) -> None: ...

        def use_background_worker(self) -> bool:
            return True

        def next(self) -> Any:
            threads.append(threading.current_thread())
            return {5, 6}, set()

    slow = Slow(None, letters)
    with ThreadPoolExecutor(2) as pool:
        stack = started_stack([slow, PrefixFilter(None, letters, ["d", "e"])], letters)
        stack.start_background(pool)
        stack.start_background(pool)
        assert allowed_ids(stack) == {5, 6}
        stack.start_background(pool)  # the mask is known already
        stack.feed(5)
        stack.start_background(pool)
        stack.feed(6)  # a mask that was not fetched is dropped
        assert allowed_ids(stack) == {5, 6}
        stack.start_background(pool)
        stack.close()
    assert len(threads) in (2, 3)  # the dropped one may have been cancelled in time
    assert threads[0] is not threading.main_thread()
    assert threads[-1] is threading.main_thread()


def test_an_error_in_the_background_is_raised_by_allowed(letters: Codec) -> None:
    class Broken(DuckTypedFilter):
        def use_background_worker(self) -> bool:
            return True

    stack = started_stack([Broken(lambda ids: 1 // 0), PrefixFilter(None, letters, "a")], letters)
    with ThreadPoolExecutor(1) as pool:
        stack.start_background(pool)
        with pytest.raises(InputError, match=r"The filter Broken failed in next\(\): ZeroDivisionError"):
            stack.allowed()
        stack.close()


def test_an_external_filter_serves_one_job_at_a_time(letters: Codec) -> None:
    shared = filter_returning(([3], []))
    one, two = FilterStack([shared], letters), FilterStack([shared], letters)
    one.begin()
    with pytest.raises(InputError, match="still used by another job"):
        two.begin()
    one.close()
    two.begin()
    assert allowed_ids(two) == {3}
    del two
    one.begin()


def test_native_filters_can_be_given_to_many_jobs(letters: Codec) -> None:
    shared = SelectFilter(None, letters, ["ab", "cd"])
    one, two = started_stack([shared, shared], letters), started_stack([shared], letters)
    one.feed(2)
    assert allowed_ids(one) == {3}
    assert allowed_ids(two) == {2, 4}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (7, "given as a list"),
        ([None], "NoneType, which has no begin and no feed and no next"),
        ([SelectFilter], "the class SelectFilter itself"),
        ([object()], "has no begin"),
    ],
)
def test_objects_that_are_no_filters_are_refused(letters: Codec, wrong: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        FilterStack(wrong, letters)


def test_the_same_external_filter_twice_is_refused(letters: Codec) -> None:
    same = filter_returning(([3], []))
    with pytest.raises(InputError, match="twice"):
        FilterStack([same, same], letters)


def test_masks_are_not_shared(letters: Codec) -> None:
    stack = started_stack([SelectFilter(None, letters, ["ab", "cd"])], letters)
    first = stack.allowed().mask
    assert first is not None
    first[:] = 0
    stack.begin()
    assert allowed_ids(stack) == {2, 4}
    assert token_sets.bitmask_count(np.zeros(3, np.int32)) == 0


def test_submitted_functions_are_called() -> None:
    pool = FilterThreadPool()
    assert pool.submit(pow, 2, 5).result(60) == 32
    assert pool.submit(lambda: threading.current_thread().name).result(60).startswith("exlm-filter")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_process_creates_its_own_pool() -> None:
    """A model that was used before `multiprocessing` forks must not wait for threads that are not there."""
    pool = FilterThreadPool()
    assert pool.submit(pow, 2, 5).result(60) == 32
    child = os.fork()
    if child == 0:
        try:
            os._exit(pool.submit(pow, 2, 5).result(20))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 32
    assert pool.submit(pow, 2, 6).result(60) == 64
