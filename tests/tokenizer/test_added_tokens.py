"""Finding tokens in text: against a plain regular expression, and the stripping rules."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from exlm.tokenizer.added_tokens import AddedTokenMatcher
from exlm.tokenizer.tokenizer_files import AddedToken

WORDS = st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@given(WORDS, st.text("ab<> ", max_size=60))
def test_matches_equal_those_of_a_regular_expression(words: list[str], text: str) -> None:
    pattern = re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
    finder = AddedTokenMatcher(AddedToken(word, n) for n, word in enumerate(words))
    expected = [(match.start(), match.end(), words.index(match.group())) for match in pattern.finditer(text)]
    assert [(start, end, token.id) for start, end, token in finder.find(text)] == expected


def test_no_tokens_match_nothing() -> None:
    assert list(AddedTokenMatcher([]).find("abc")) == []
    assert list(AddedTokenMatcher([AddedToken("", 1)]).find("abc")) == []


def test_stripping_takes_the_spaces_around_a_token_but_not_its_neighbours() -> None:
    finder = AddedTokenMatcher([AddedToken("<l>", 1, lstrip=True), AddedToken("<r>", 2, rstrip=True)])
    assert [tuple(found)[:2] for found in finder.find("a  <l> b <r> \n c")] == [(1, 6), (9, 15)]
    assert [tuple(found)[:2] for found in finder.find("<r>  <l>")] == [(0, 5), (5, 8)]


def test_a_single_word_is_not_found_inside_another() -> None:
    finder = AddedTokenMatcher([AddedToken("cat", 1, single_word=True), AddedToken("ca", 2)])
    assert [(found.start, found.token.id) for found in finder.find("cat cats (cat) _cat")] == [
        (0, 1),
        (4, 2),
        (10, 1),
        (16, 2),
    ]


def test_many_tokens_do_not_make_it_slow() -> None:
    finder = AddedTokenMatcher(AddedToken(f"<unused{n}>", n) for n in range(10_000))
    text = "a < b <unused77> " * 5_000
    assert sum(1 for _ in finder.find(text)) == 5_000
