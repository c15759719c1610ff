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

from exlm.constrained import Filter, FilterStack, PrefixFilter, SelectFilter
from exlm.constrained import bitmask as bits
from exlm.constrained.stack import UNCONSTRAINED, FilterThreadPool
from exlm.errors import InputError
from exlm.tokenizer import Codec
from tests.constrained.toy_vocabularies import Enforcer, allowed_ids

IDS = st.sets(st.integers(0, 35))


def filter_answering(*answers: Any) -> Enforcer:
    """A filter that gives these answers one after the other."""
    return Enforcer(lambda ids: answers[len(ids)])


def started_stack(filters: Any, codec: Codec, prefer_eos: bool = False, **more: Any) -> FilterStack:
    stack = FilterStack(filters, codec, prefer_eos, **more)
    stack.begin()
    return stack


@given(st.lists(st.tuples(st.none() | IDS, IDS), min_size=1, max_size=4), st.booleans())
def test_allowed_sets_intersect_and_end_sets_unite(
    g16: Codec, answers: list[tuple[set[int] | None, set[int]]], prefer: bool
) -> None:
    stack = started_stack([filter_answering(answer) for answer in answers], g16, prefer)
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
def test_without_filters_nothing_is_constrained(g16: Codec, none: Any) -> None:
    stack = started_stack(none, g16)
    assert not stack
    assert stack.allowed() is UNCONSTRAINED
    stack.feed(3)
    with ThreadPoolExecutor(1) as pool:
        stack.start_background(pool)
    assert stack.allowed().mask is None
    stack.close()


def test_filters_of_every_kind_work_together(g16: Codec) -> None:
    ids = g16.vocab.piece_to_id()
    enforcer = Enforcer(lambda fed: (set(range(36)) - {32}, set()))
    stack = started_stack(
        [PrefixFilter(None, g16, ["Hel", "cat"]), SelectFilter(None, g16, ["Hello", "dog"]), enforcer], g16
    )
    assert allowed_ids(stack) == {33, 34}
    stack.feed(33)
    assert allowed_ids(stack) == {ids["l"]}
    stack.feed(ids["l"])
    assert stack.allowed().forced_id == ids["o"]
    assert ids["o"] in stack.allowed().end_ids
    assert enforcer.token_sequence == [33, ids["l"]]


def test_the_error_names_filters_and_text(g16: Codec) -> None:
    stack = started_stack([SelectFilter(None, g16, ["cab"]), filter_answering(([4], []), ([7, 9], []))], g16)
    stack.feed(4)
    with pytest.raises(
        InputError,
        match=r"excluded all tokens: SelectFilter \(1 of 36 tokens\) and Enforcer \(2 of 36 tokens\) "
        r"after the text 'c'\. Each lets something pass",
    ):
        stack.allowed()
    with pytest.raises(InputError):
        stack.allowed()
    stack.begin()
    assert allowed_ids(stack) == {4}


def test_prefer_eos_takes_any_eos(g16: Codec) -> None:
    assert started_stack([filter_answering(([0, 5], []))], g16, True).allowed().forced_id == 0
    assert started_stack([filter_answering(([0, 5], []))], g16, False).allowed().forced_id is None
    assert started_stack([filter_answering(([4, 5], []))], g16, True).allowed().forced_id is None
    assert started_stack([filter_answering((None, []))], g16, True).allowed().mask is None


def test_a_model_may_have_more_or_fewer_tokens_than_the_tokenizer(g16: Codec) -> None:
    for width in (20, 32, 36, 64, 100):
        stack = started_stack(
            [PrefixFilter(None, g16, ["Hello", "ab"]), filter_answering((range(36), []))], g16, width=width
        )
        mask = stack.allowed().mask
        assert mask is not None
        assert len(mask) == -(-width // 32)
        assert allowed_ids(stack) == {n for n in (2, 32, 33, 34) if n < width}


def test_background_computation_gives_the_same_masks(g16: Codec) -> None:
    threads = []

    class Slow(Filter):
        def begin(self, prefix_str: Any) -> None: ...

        def feed(self, token: Any) -> None: ...

        def use_background_worker(self) -> bool:
            return True

        def next(self) -> Any:
            threads.append(threading.current_thread())
            return {5, 6}, set()

    slow = Slow(None, g16)
    with ThreadPoolExecutor(2) as pool:
        stack = started_stack([slow, PrefixFilter(None, g16, ["d", "e"])], g16)
        stack.start_background(pool)
        stack.start_background(pool)
        assert allowed_ids(stack) == {5, 6}
        stack.start_background(pool)  # the answer is known already
        stack.feed(5)
        stack.start_background(pool)
        stack.feed(6)  # a mask that was not asked for is dropped
        assert allowed_ids(stack) == {5, 6}
        stack.start_background(pool)
        stack.close()
    assert len(threads) in (2, 3)  # the dropped one may have been cancelled in time
    assert threads[0] is not threading.main_thread()
    assert threads[-1] is threading.main_thread()


def test_an_error_in_the_background_is_raised_by_allowed(g16: Codec) -> None:
    class Broken(Enforcer):
        def use_background_worker(self) -> bool:
            return True

    stack = started_stack([Broken(lambda ids: 1 // 0), PrefixFilter(None, g16, "a")], g16)
    with ThreadPoolExecutor(1) as pool:
        stack.start_background(pool)
        with pytest.raises(InputError, match=r"The filter Broken failed in next\(\): ZeroDivisionError"):
            stack.allowed()
        stack.close()


def test_an_external_filter_serves_one_job_at_a_time(g16: Codec) -> None:
    shared = filter_answering(([3], []))
    one, two = FilterStack([shared], g16), FilterStack([shared], g16)
    one.begin()
    with pytest.raises(InputError, match="still used by another job"):
        two.begin()
    one.close()
    two.begin()
    assert allowed_ids(two) == {3}
    del two
    one.begin()


def test_native_filters_can_be_given_to_many_jobs(g16: Codec) -> None:
    shared = SelectFilter(None, g16, ["ab", "cd"])
    one, two = started_stack([shared, shared], g16), started_stack([shared], g16)
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
def test_objects_that_are_no_filters_are_refused(g16: Codec, wrong: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        FilterStack(wrong, g16)


def test_the_same_external_filter_twice_is_refused(g16: Codec) -> None:
    same = filter_answering(([3], []))
    with pytest.raises(InputError, match="twice"):
        FilterStack([same, same], g16)


def test_masks_are_not_shared(g16: Codec) -> None:
    stack = started_stack([SelectFilter(None, g16, ["ab", "cd"])], g16)
    first = stack.allowed().mask
    assert first is not None
    first[:] = 0
    stack.begin()
    assert allowed_ids(stack) == {2, 4}
    assert bits.count_ids(np.zeros(3, np.int32)) == 0


def test_submitted_functions_are_called() -> None:
    threads = FilterThreadPool()
    assert threads.submit(pow, 2, 5).result(60) == 32
    assert threads.submit(lambda: threading.current_thread().name).result(60).startswith("exlm-filter")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_process_creates_its_own_pool() -> None:
    """A model that was used before `multiprocessing` forks must not wait for threads that are not there."""
    threads = FilterThreadPool()
    assert threads.submit(pow, 2, 5).result(60) == 32
    child = os.fork()
    if child == 0:
        try:
            os._exit(threads.submit(pow, 2, 5).result(20))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 32
    assert threads.submit(pow, 2, 6).result(60) == 64
