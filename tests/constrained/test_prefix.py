"""PrefixFilter: what it lets pass, on its own and while walking."""

from __future__ import annotations

import random

import pytest

from exlm.constrained import FilterStack, PrefixFilter, token_trie
from exlm.errors import InputError
from exlm.tokenizer import Codec
from tests.constrained.toy_vocabularies import allowed_ids


def test_the_first_step_matches_exllamav2(g16: Codec) -> None:
    passing, end = PrefixFilter(None, g16, "Hello w").next()
    assert passing == {32, 33, 34}
    assert end == set()


def test_a_longer_token_may_complete_the_text(g16: Codec) -> None:
    found = PrefixFilter(None, g16, "Hello w")
    found.begin("")
    found.feed(32)
    assert found.next()[0] == {28, 35}  # " ", and " world" which goes on where " w" is no token
    found.feed(35)
    assert found.next() == (None, set())


def test_free_after_the_text(g16: Codec) -> None:
    stack = FilterStack([PrefixFilter(None, g16, ["ab", "cd"])], g16)
    stack.begin()
    for letter in "cd":
        assert g16.vocab.piece_to_id()[letter] in allowed_ids(stack)
        stack.feed(g16.vocab.piece_to_id()[letter])
    assert stack.allowed().mask is None
    stack.feed(2)
    assert stack.allowed().mask is None


def test_the_shorter_of_two_texts_suffices(g16: Codec) -> None:
    found = PrefixFilter(None, g16, ["hello", "he"])
    for letter in "he":
        found.feed(g16.vocab.piece_to_id()[letter])
    assert found.next()[0] is None


def test_an_empty_text_constrains_nothing(g16: Codec) -> None:
    assert PrefixFilter(None, g16, ["", "abc"]).next() == (None, set())


def test_the_healed_prompt_prefix_comes_first(g16: Codec) -> None:
    found = PrefixFilter(None, g16, "llo w")
    found.begin("He")
    assert found.next()[0] == {32, 33, 34}
    found.begin(["He"])
    assert found.next()[0] == {32, 33, 34}
    found.begin(None)
    assert found.next()[0] == {g16.vocab.piece_to_id()["l"]}


def test_tokens_with_partial_characters_can_be_completed(codec: Codec) -> None:
    table = token_trie.token_trie_of(codec).token_bytes
    source = random.Random(5)
    for text in ("né 🦙", "Ünïcödé", "日本語テキスト"):
        found = PrefixFilter(None, codec, text)
        for _ in range(20):
            found.begin("")
            raw = b""
            while (passing := found.next()[0]) is not None:
                number = source.choice(sorted(passing))
                raw += table[number]
                found.feed(number)
            assert raw.startswith(text.encode())


def test_after_a_token_off_the_texts_nothing_is_allowed(g16: Codec) -> None:
    stack = FilterStack([PrefixFilter(None, g16, "abc")], g16)
    stack.begin()
    stack.feed(g16.vocab.piece_to_id()["x"])
    with pytest.raises(InputError, match=r"Filter excluded all tokens: PrefixFilter \(0 of 36 tokens\).*'x'"):
        stack.allowed()


@pytest.mark.parametrize("wrong", [[], 7, [b"a"], ["a", None], ["\ud800"], ["x" * 300_000], ["Hi"]])
def test_invalid_prefixes_are_refused(g16: Codec, wrong: object) -> None:
    with pytest.raises(InputError):
        PrefixFilter(None, g16, wrong)  # type: ignore[arg-type]


def test_it_needs_a_tokenizer() -> None:
    with pytest.raises(InputError, match=r"exlm\.Tokenizer"):
        PrefixFilter(None, "tokenizer", "a")
