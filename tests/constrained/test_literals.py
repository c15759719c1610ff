"""PrefixFilter and SelectFilter: the tokens they allow, alone, in a stack, and against the definition."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.constrained import FilterStack, PrefixFilter, SelectFilter, token_sets
from exlm.errors import InputError
from exlm.tokenizer import Codec
from tests.constrained.toy_vocabularies import allowed_ids, byte_codec, run_stack


def test_the_first_prefix_step_matches_exllamav2(letters: Codec) -> None:
    allowed, end = PrefixFilter(None, letters, "Hello w").next()
    assert allowed == {32, 33, 34}
    assert end == set()


def test_a_longer_token_may_complete_the_text(letters: Codec) -> None:
    found = PrefixFilter(None, letters, "Hello w")
    found.begin("")
    found.feed(32)
    assert found.next()[0] == {28, 35}  # " ", and " world" which goes on where " w" is no token
    found.feed(35)
    assert found.next() == (None, set())


def test_everything_is_allowed_after_the_prefix(letters: Codec) -> None:
    stack = FilterStack([PrefixFilter(None, letters, ["ab", "cd"])], letters)
    stack.begin()
    for letter in "cd":
        assert letters.vocab.piece_to_id()[letter] in allowed_ids(stack)
        stack.feed(letters.vocab.piece_to_id()[letter])
    assert stack.allowed().mask is None
    stack.feed(2)
    assert stack.allowed().mask is None


def test_the_shorter_of_two_texts_suffices(letters: Codec) -> None:
    found = PrefixFilter(None, letters, ["hello", "he"])
    for letter in "he":
        found.feed(letters.vocab.piece_to_id()[letter])
    assert found.next()[0] is None


def test_an_empty_text_constrains_nothing(letters: Codec) -> None:
    assert PrefixFilter(None, letters, ["", "abc"]).next() == (None, set())


def test_the_healed_prompt_prefix_comes_first(letters: Codec) -> None:
    found = PrefixFilter(None, letters, "llo w")
    found.begin("He")
    assert found.next()[0] == {32, 33, 34}
    found.begin(["He"])
    assert found.next()[0] == {32, 33, 34}
    found.begin(None)
    assert found.next()[0] == {letters.vocab.piece_to_id()["l"]}


def test_tokens_with_partial_characters_can_be_completed(codec: Codec) -> None:
    table = token_sets.token_trie_of(codec).token_bytes
    source = random.Random(5)
    for text in ("né 🦙", "Ünïcödé", "日本語テキスト"):
        found = PrefixFilter(None, codec, text)
        for _ in range(20):
            found.begin("")
            raw = b""
            while (allowed := found.next()[0]) is not None:
                number = source.choice(sorted(allowed))
                raw += table[number]
                found.feed(number)
            assert raw.startswith(text.encode())


def test_after_a_token_outside_the_texts_nothing_is_allowed(letters: Codec) -> None:
    stack = FilterStack([PrefixFilter(None, letters, "abc")], letters)
    stack.begin()
    stack.feed(letters.vocab.piece_to_id()["x"])
    with pytest.raises(InputError, match=r"Filter excluded all tokens: PrefixFilter \(0 of 36 tokens\).*'x'"):
        stack.allowed()


@pytest.mark.parametrize("wrong", [[], 7, [b"a"], ["a", None], ["\ud800"], ["x" * 300_000], ["Hi"]])
def test_invalid_prefixes_are_refused(letters: Codec, wrong: object) -> None:
    with pytest.raises(InputError):
        PrefixFilter(None, letters, wrong)  # type: ignore[arg-type]


def test_a_filter_needs_a_tokenizer() -> None:
    with pytest.raises(InputError, match=r"exlm\.Tokenizer"):
        PrefixFilter(None, "tokenizer", "a")


ALPHABET = "abAB éÉß🦙Σσς"
OPTIONS = st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=5)


def test_select_steps_match_exllamav2(letters: Codec) -> None:
    ids = letters.vocab.piece_to_id()
    stack = FilterStack([SelectFilter(None, letters, ["dog", "do", "cat"])], letters)
    stack.begin()
    for letter, ends in (("c", False), ("a", False), ("t", True)):
        now = stack.allowed()
        assert (ids[letter] in now.end_ids) is ends
        assert (now.forced_id == ids[letter]) is (letter != "c")
        stack.feed(ids[letter])


def test_the_shorter_option_ends(letters: Codec) -> None:
    ids = letters.vocab.piece_to_id()
    found = SelectFilter(None, letters, ["dog", "do"])
    found.feed(ids["d"])
    assert found.next() == ({ids["o"]}, {ids["o"]})


def test_a_whole_word_may_be_one_token(letters: Codec) -> None:
    assert SelectFilter(None, letters, ["Hello", "Helium"]).next() == ({32, 33, 34}, {32})


def test_an_empty_option_is_selected_by_eos(letters: Codec) -> None:
    ids = letters.vocab.piece_to_id()
    assert SelectFilter(None, letters, ["", "a"]).next() == ({0, ids["a"]}, {0, ids["a"]})


def test_options_that_tokens_cannot_reach_are_refused(letters: Codec) -> None:
    with pytest.raises(InputError, match="no tokens that spell 'Hi'"):
        SelectFilter(None, letters, ["Hello", "Hi"])


def test_tokens_that_lead_to_a_dead_end_are_excluded(letters: Codec) -> None:
    # "He" and "Hel" start "Hellö", but only "Hello" can be finished
    found = SelectFilter(None, letters, ["Hello", "He", "hi"])
    assert found.next()[0] == {32, 33, 34, letters.vocab.piece_to_id()["h"]}
    with pytest.raises(InputError, match="spell 'Hellö'"):
        SelectFilter(None, letters, ["Hellö"])


@pytest.mark.parametrize("wrong", [[], "yes", 3, None, ["a", 1], ["\udfff"], ["y" * 200_000, "z" * 200_000]])
def test_invalid_options_are_refused(letters: Codec, wrong: object) -> None:
    with pytest.raises(InputError):
        SelectFilter(None, letters, wrong)  # type: ignore[arg-type]


def test_the_model_chooses_the_case(trained: Codec) -> None:
    source = random.Random(1)
    options = ["Yes, Émile", "NO", "Straße"]
    seen = set()
    for _ in range(60):
        stack = FilterStack([SelectFilter(None, trained, options, case_insensitive=True)], trained)
        ids, ended = run_stack(stack, lambda allowed, _: source.choice(allowed))
        text = trained.decode(ids, continues=True)
        assert ended
        assert text.casefold() in {option.casefold() for option in options}
        seen.add(text)
    assert len(seen) > 10


def expected_select_step(options: list[str], table: list[bytes], raw: bytes) -> tuple[set[int], set[int]]:
    allowed, end = set(), set()
    for number, token in enumerate(table):
        if token and any(option.encode().startswith(raw + token) for option in options):
            allowed.add(number)
            if raw + token in [option.encode() for option in options]:
                end.add(number)
    return allowed, end


@settings(max_examples=60)
@given(OPTIONS, st.randoms(use_true_random=False))
def test_every_select_step_matches_the_definition(trained: Codec, options: list[str], source: random.Random) -> None:
    table = token_sets.token_trie_of(trained).token_bytes
    found = SelectFilter(None, trained, options)
    raw = b""
    while True:
        expected = expected_select_step(options, list(table), raw)
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
def test_a_small_vocabulary_reaches_no_dead_end(
    tokens: set[bytes], texts: list[str], prefix: bool, source: random.Random
) -> None:
    with TemporaryDirectory() as folder:
        codec = byte_codec(Path(folder), [b"</s>", b"<s>", *sorted(tokens)])
        try:
            made = PrefixFilter(None, codec, texts) if prefix else SelectFilter(None, codec, texts)
        except InputError:
            assert not all(can_be_spelled(text.encode(), tokens, prefix) for text in texts)
            return
        raw = b""
        while True:
            allowed, end = made.next()
            if allowed is None:
                break
            number = source.choice(sorted(allowed))
            raw += token_sets.token_trie_of(codec).token_bytes[number]
            made.feed(number)
            if number in end:
                break
        done = raw.startswith(tuple(text.encode() for text in texts)) if prefix else raw.decode() in texts
        assert done


def can_be_spelled(text: bytes, tokens: set[bytes], open_ended: bool) -> bool:
    reached = {0}
    for position in range(len(text)):
        if position in reached:
            for token in tokens:
                if text.startswith(token, position):
                    reached.add(position + len(token))
                elif open_ended and token.startswith(text[position:]):
                    reached.add(len(text))
    return len(text) in reached
