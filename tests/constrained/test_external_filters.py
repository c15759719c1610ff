"""Filters as formatron, lm-format-enforcer and scripts for exllamav2 write them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from exllamav2.generator.base import ExLlamaV2Filter
from exlm.constrained import Filter, FilterStack, PrefixFilter
from exlm.constrained.stack import MAX_WHITESPACE_RUN
from exlm.errors import InputError
from exlm.tokenizer import Codec
from tests.constrained.toy_vocabularies import LETTER_PIECES, DuckTypedFilter, allowed_ids


class LogitMaskFilter(ExLlamaV2Filter):
    """Masks logits in the background, and forces EOS when its text is complete, like formatron's filter."""

    def __init__(self, model: Any, tokenizer: Any, wanted: list[int]) -> None:
        super().__init__(model, tokenizer)
        self.wanted = wanted
        self.left = list(wanted)
        self.prepared = 0
        self.eos_logits: torch.Tensor | None = None

    def begin(self, prefix_str: str) -> None:
        prefix_str.encode("utf-8")
        self.left = list(self.wanted)

    def feed(self, token: Any) -> None:
        if self.left:
            assert list(range(100))[token] == self.left.pop(0)  # as an index

    def next(self) -> Any:
        raise AssertionError("mask_logits is preferred")

    def use_background_worker(self) -> bool:
        return True

    def can_mask_logits(self) -> bool:
        return True

    def prepare_logit_mask(self) -> bool:
        self.prepared += 1
        return True

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.dim() == 1
        assert logits.dtype == torch.float32
        if not self.left:
            if self.eos_logits is None:
                self.eos_logits = torch.full_like(logits, float("-inf"))
                self.eos_logits[self.tokenizer.eos_ids[0]] = 0
            return self.eos_logits
        keep = logits[self.left[0]].item()
        logits.fill_(float("-inf"))
        logits[self.left[0]] = keep
        return logits


class TokenListResult:
    """The result type of lm-format-enforcer 0.11."""

    def __init__(self, allowed: list[int], packed: bool = False) -> None:
        self.use_bitmask = packed
        self.allowed_tokens: Any = allowed
        if packed:
            self.allowed_tokens = torch.zeros(2, dtype=torch.int32)
            for number in allowed:
                self.allowed_tokens[number >> 5] |= 1 << (number & 31)


@pytest.mark.parametrize("background", [False, True])
def test_masked_logits(letters: Codec, background: bool) -> None:
    made = LogitMaskFilter(None, letters, [32, 28, 5])
    stack = FilterStack([made], letters, width=64)
    stack.begin()
    with ThreadPoolExecutor(1) as pool:
        for expected in (32, 28, 5, 0, 0):
            if background:
                stack.start_background(pool)
            now = stack.allowed()
            assert now.forced_id == expected
            assert now.end_ids == ({0} if expected == 0 else set())  # EOS ends the text: it is not repeated
            stack.feed(expected)
    assert made.prepared == 5


def test_a_filter_whose_masks_need_a_gpu_falls_back_to_id_lists(letters: Codec) -> None:
    class Pinned(LogitMaskFilter):
        def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no pinned memory")

        def next(self) -> Any:
            return ([self.left[0]], []) if self.left else ([0], [0])

    made = Pinned(None, letters, [5, 6])
    stack = FilterStack([made], letters)
    stack.begin()
    for expected in (5, 6, 0):
        assert stack.allowed().forced_id == expected
        stack.feed(expected)
    assert made.prepared == 1


def test_masks_and_lists_together(letters: Codec) -> None:
    stack = FilterStack([LogitMaskFilter(None, letters, [32, 28]), PrefixFilter(None, letters, "Hello")], letters)
    stack.begin()
    assert allowed_ids(stack) == {32}


def test_mask_bits_above_the_tokenizer_are_cleared(letters: Codec) -> None:
    class Lax(LogitMaskFilter):
        def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
            logits[3] = float("-inf")
            return logits

    stack = FilterStack([Lax(None, letters, [])], letters, width=64)
    stack.begin()
    assert allowed_ids(stack) == set(range(36)) - {3}


class EosAsTextFilter(Filter):
    """Allows EOS as ordinary text until its text is complete, as formatron's engine does."""

    def __init__(self, tokenizer: Any, passing: list[int]) -> None:
        super().__init__(None, tokenizer)
        self.passing, self.completed = passing, False

    def begin(self, prefix_str: Any) -> None:
        self.completed = False

    def feed(self, token: Any) -> None:
        self.completed = int(token) == 2

    def next(self) -> Any:
        return ([0], [0]) if self.completed else (self.passing, [])

    def is_completed(self) -> bool:
        return self.completed


@pytest.mark.parametrize("prefer_eos", [False, True])
def test_eos_is_excluded_while_the_text_is_incomplete(letters: Codec, prefer_eos: bool) -> None:
    stack = FilterStack([EosAsTextFilter(letters, [0, 2, 3])], letters, prefer_eos)
    stack.begin()
    assert allowed_ids(stack) == {2, 3}
    stack.feed(3)
    assert allowed_ids(stack) == {2, 3}
    stack.feed(2)
    assert (stack.allowed().forced_id, stack.allowed().end_ids) == (0, {0})


def test_eos_stays_allowed_where_nothing_else_is(letters: Codec) -> None:
    stack = FilterStack([EosAsTextFilter(letters, [0])], letters)
    stack.begin()
    assert stack.allowed().forced_id == 0


def test_a_whitespace_run_is_bounded_in_an_incomplete_text(letters: Codec) -> None:
    space, newline = LETTER_PIECES.index(" "), LETTER_PIECES.index("\n")
    stack = FilterStack([EosAsTextFilter(letters, [space, newline, 3])], letters)
    stack.begin()
    for step in range(MAX_WHITESPACE_RUN):
        assert allowed_ids(stack) == {space, newline, 3}
        stack.feed(newline if step % 2 else space)
    assert allowed_ids(stack) == {3}
    stack.feed(3)
    assert allowed_ids(stack) == {space, newline, 3}
    only_space = FilterStack([EosAsTextFilter(letters, [space])], letters)
    only_space.begin()
    for _ in range(2 * MAX_WHITESPACE_RUN):
        only_space.feed(space)
    assert only_space.allowed().forced_id == space


@pytest.mark.parametrize(
    "answer",
    [
        ({7, 3, 5}, set()),
        ([7, 3, 5], []),
        ([3, 5, 7, 7], []),
        ((n for n in (7, 5, 3)), ()),
        (np.array([5, 7, 3]), np.array([], np.int64)),
        (torch.tensor([5, 7, 3]), []),
        ({3: "a", 5: "b", 7: "c"}, []),
        (TokenListResult([3, 5, 7]), []),
        (TokenListResult([3, 5, 7], packed=True), []),
        TokenListResult([7, 5, 3]),
        TokenListResult([7, 5, 3], packed=True),
        {3, 5, 7},
    ],
    ids=[
        "set",
        "list",
        "twice",
        "generator",
        "numpy",
        "torch",
        "dict",
        "object",
        "packed",
        "alone",
        "bits",
        "bare",
    ],
)
def test_every_form_of_a_result(letters: Codec, answer: Any) -> None:
    stack = FilterStack([DuckTypedFilter(lambda ids: answer)], letters)
    stack.begin()
    assert allowed_ids(stack) == {3, 5, 7}
    assert stack.allowed().end_ids == set()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (([3, None], []), "named None"),
        (([3, -1], []), "named -1; ids of tokens are 0 to 35"),
        (([3, 36], []), "named 36"),
        (([3], [99]), "named 99"),
        ((["a"], []), "named 'a'"),
        ((7, []), "found int"),
        (("abc", []), "found str"),
        (([], []), "excluded all tokens"),
    ],
)
def test_invalid_results_are_refused(letters: Codec, answer: Any, reason: str) -> None:
    stack = FilterStack([DuckTypedFilter(lambda ids: answer)], letters)
    stack.begin()
    with pytest.raises(InputError, match=reason):
        stack.allowed()


def test_ids_the_model_lacks_are_left_out(letters: Codec) -> None:
    stack = FilterStack([DuckTypedFilter(lambda ids: ([3, 5, 35], [35]))], letters, width=20)
    stack.begin()
    assert allowed_ids(stack) == {3, 5}


@pytest.mark.parametrize("method", ["begin", "feed", "next"])
def test_an_exception_of_a_filter_names_it(letters: Codec, method: str) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("lost")

    made = DuckTypedFilter(lambda ids: ([3, 4], []))
    setattr(made, method, fail)
    stack = FilterStack([made], letters)

    def run() -> None:
        stack.begin()
        stack.allowed()
        stack.feed(3)

    with pytest.raises(InputError, match=rf"The filter DuckTypedFilter failed in {method}\(\): KeyError: 'lost'"):
        run()


def test_a_filter_that_prepares_no_mask_is_named(letters: Codec) -> None:
    class Unready(LogitMaskFilter):
        def prepare_logit_mask(self) -> bool:
            return False

    stack = FilterStack([Unready(None, letters, [3])], letters)
    stack.begin()
    with pytest.raises(InputError, match="Unready can mask logits, but"):
        stack.allowed()


def test_the_base_class_has_the_methods_of_exllamav2(letters: Codec) -> None:
    class Counting(Filter):
        def __init__(self, *a: Any) -> None:
            super().__init__(*a)
            self.count = 0

        def begin(self, prefix_str: Any) -> None:
            self.count = 0

        def feed(self, token: Any) -> None:
            self.count += 1

        def next(self) -> Any:
            return [self.count], []

        def prepare_logit_mask(self) -> bool:
            return True

    made = Counting("model", letters)
    assert (made.model, made.tokenizer, made.sequence_str, made.background_result) == (
        "model",
        letters,
        "",
        None,
    )
    assert made.allow_return_type_list
    assert not made.use_background_worker()
    assert not made.can_mask_logits()
    with ThreadPoolExecutor(1) as pool:
        made.background_next(pool)
        with pytest.raises(InputError, match="already has a result"):
            made.background_next(pool)
        assert made.get_next() == ([0], [])
        made.background_next(pool)
        made.background_drop()
        made.feed(None)
        assert made.get_next() == ([1], [])
        made.background_prepare_logit_mask(pool)
        assert made.get_next(mask=True) is True
        assert made.get_next(mask=True) is True
    other = made.clone()
    other.feed(None)
    assert (made.count, other.count) == (1, 2)
    bare = Counting.__new__(Counting)
    made.clone(bare)
    assert bare.tokenizer is letters
    assert bare.background_result is None


@pytest.mark.parametrize("method", ["begin", "feed", "next", "prepare_logit_mask", "mask_logits"])
def test_the_abstract_methods_raise(method: str) -> None:
    made = Filter(None, None)
    with pytest.raises(NotImplementedError):
        getattr(made, method)(*([] if method in ("next", "prepare_logit_mask") else [None]))
