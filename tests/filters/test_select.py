"""SelectFilter against its definition: a token passes when an option starts with the text it would make."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.errors import InputError
from exlm.filters import FilterStack, PrefixFilter, SelectFilter, lexicon
from exlm.text import Codec
from tests.filters.toy import byte_codec, walk

ALPHABET = "abAB éÉß🦙Σσς"
OPTIONS = st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=5)


def test_the_golden_trace(g16: Codec) -> None:
    ids = g16.vocab.piece_to_id()
    stack = FilterStack([SelectFilter(None, g16, ["dog", "do", "cat"])], g16)
    stack.begin()
    for letter, ends in (("c", False), ("a", False), ("t", True)):
        now = stack.allowed()
        assert (ids[letter] in now.end) is ends
        assert (now.forced == ids[letter]) is (letter != "c")
        stack.feed(ids[letter])


def test_the_shorter_option_ends(g16: Codec) -> None:
    ids = g16.vocab.piece_to_id()
    found = SelectFilter(None, g16, ["dog", "do"])
    found.feed(ids["d"])
    assert found.next() == ({ids["o"]}, {ids["o"]})


def test_a_whole_word_may_be_one_token(g16: Codec) -> None:
    assert SelectFilter(None, g16, ["Hello", "Helium"]).next() == ({32, 33, 34}, {32})


def test_an_empty_option_is_an_end(g16: Codec) -> None:
    ids = g16.vocab.piece_to_id()
    assert SelectFilter(None, g16, ["", "a"]).next() == ({0, ids["a"]}, {0, ids["a"]})


def test_options_that_tokens_cannot_reach_are_refused(g16: Codec) -> None:
    with pytest.raises(InputError, match="no tokens that spell 'Hi'"):
        SelectFilter(None, g16, ["Hello", "Hi"])


def test_no_step_leads_where_no_token_goes_on(g16: Codec) -> None:
    # "He" and "Hel" start "Hellö", but only "Hello" can be finished
    found = SelectFilter(None, g16, ["Hello", "He", "hi"])
    assert found.next()[0] == {32, 33, 34, g16.vocab.piece_to_id()["h"]}
    with pytest.raises(InputError, match="spell 'Hellö'"):
        SelectFilter(None, g16, ["Hellö"])


@pytest.mark.parametrize("wrong", [[], "yes", 3, None, ["a", 1], ["\udfff"], ["y" * 200_000, "z" * 200_000]])
def test_what_cannot_be_an_option(g16: Codec, wrong: object) -> None:
    with pytest.raises(InputError):
        SelectFilter(None, g16, wrong)  # type: ignore[arg-type]


def test_case_is_the_models_choice(trained: Codec) -> None:
    source = random.Random(1)
    options = ["Yes, Émile", "NO", "Straße"]
    seen = set()
    for _ in range(60):
        stack = FilterStack([SelectFilter(None, trained, options, case_insensitive=True)], trained)
        ids, ended = walk(stack, lambda passing, _: source.choice(passing))
        text = trained.decode(ids, continues=True)
        assert ended
        assert text.casefold() in {option.casefold() for option in options}
        seen.add(text)
    assert len(seen) > 10


def reference(options: list[str], table: list[bytes], raw: bytes) -> tuple[set[int], set[int]]:
    passing, end = set(), set()
    for number, token in enumerate(table):
        if token and any(option.encode().startswith(raw + token) for option in options):
            passing.add(number)
            if raw + token in [option.encode() for option in options]:
                end.add(number)
    return passing, end


@settings(max_examples=60)
@given(OPTIONS, st.randoms(use_true_random=False))
def test_every_step_is_the_definition(trained: Codec, options: list[str], source: random.Random) -> None:
    table = lexicon.lexicon_of(trained).table
    found = SelectFilter(None, trained, options)
    raw = b""
    while True:
        expected = reference(options, list(table), raw)
        assert found.next() == expected
        number = source.choice(sorted(expected[0]))
        found.feed(number)
        raw += table[number]
        if number in expected[1]:
            break
    assert raw.decode() in options


@settings(max_examples=80)
@given(
    st.sets(st.text("ab\u00e9", min_size=1, max_size=3).map(str.encode), min_size=1, max_size=8),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=6), min_size=1, max_size=4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_poor_vocabulary_never_gets_stuck(
    tokens: set[bytes], texts: list[str], prefix: bool, source: random.Random
) -> None:
    with TemporaryDirectory() as folder:
        codec = byte_codec(Path(folder), [b"</s>", b"<s>", *sorted(tokens)])
        try:
            made = PrefixFilter(None, codec, texts) if prefix else SelectFilter(None, codec, texts)
        except InputError:
            assert not all(spelled(text.encode(), tokens, prefix) for text in texts)
            return
        raw = b""
        while True:
            passing, end = made.next()
            if passing is None:
                break
            number = source.choice(sorted(passing))
            raw += lexicon.lexicon_of(codec).table[number]
            made.feed(number)
            if number in end:
                break
        done = raw.startswith(tuple(text.encode() for text in texts)) if prefix else raw.decode() in texts
        assert done


def spelled(text: bytes, tokens: set[bytes], beyond: bool) -> bool:
    reached = {0}
    for place in range(len(text)):
        if place in reached:
            for token in tokens:
                if text.startswith(token, place):
                    reached.add(place + len(token))
                elif beyond and token.startswith(text[place:]):
                    reached.add(len(text))
    return len(text) in reached
