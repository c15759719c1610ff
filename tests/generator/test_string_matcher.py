"""The matcher finds the same strings in text that arrives in parts as in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exlm.generator.stop_strings import Match, MatcherCursor, StringMatcher
from tests.generator.counting import instructions

words = st.text("ab\u00e9", max_size=5)
sets = st.lists(words, max_size=5)
parts = st.lists(st.text("ab\u00e9x", max_size=6), max_size=8)


def every_match(text: str, strings: list[str]) -> list[Match]:
    """All matches of all strings, by brute force."""
    return [
        Match(start, len(string))
        for string in strings
        for start in range(len(text))
        if string and text.startswith(string, start)
    ]


def first_unfinished(text: str, strings: list[str]) -> int:
    """The start of the longest suffix of the text that is a prefix of a string, or a whole string."""
    starts = (start for start in range(len(text)) if any(s.startswith(text[start:]) for s in strings))
    return next(starts, len(text))


@given(strings=sets, parts=parts)
@example(strings=["cd", "bc"], parts=["abc"])
@settings(max_examples=500)
def test_every_part_yields_the_first_and_longest_of_the_matches_it_completes(
    strings: list[str], parts: list[str]
) -> None:
    finder, cursor, text = StringMatcher(strings), MatcherCursor(), ""
    for part in parts:
        before, text = len(text), text + part
        cursor, matches = finder.scan(cursor, part)
        completed = [match for match in every_match(text, strings) if match.start + match.length > before]
        assert matches == min(completed, key=lambda match: (match.start, -match.length), default=None)
        assert cursor.length == len(text)
        assert finder.num_final(cursor) == first_unfinished(text, strings)


@given(strings=sets, parts=parts)
def test_text_in_which_nothing_starts_changes_no_state(strings: list[str], parts: list[str]) -> None:
    finder = StringMatcher(strings)
    for part in parts:
        if not finder.may_start_in(part):
            assert finder.scan(MatcherCursor(), part) == (MatcherCursor(len(part), 0), None)


def test_an_old_cursor_reads_on_from_where_it_was() -> None:
    finder = StringMatcher(["stop"])
    half, _ = finder.scan(MatcherCursor(), "a st")
    assert finder.scan(half, "ay")[1] is None
    assert finder.scan(half, "op!")[1] == Match(2, 4)


@pytest.mark.parametrize("strings", [[], ["", ""]])
def test_empty_strings_are_never_found(strings: list[str]) -> None:
    finder = StringMatcher(strings)
    assert not finder
    assert not finder.may_start_in("anything")
    assert finder.scan(MatcherCursor(), "anything") == (MatcherCursor(8, 0), None)
    assert finder.num_final(MatcherCursor(8, 0)) == 8


def test_a_string_inside_another_is_found_when_the_longer_one_fails() -> None:
    finder = StringMatcher(["abcd", "bc"])
    assert finder.scan(MatcherCursor(), "abcx") == (MatcherCursor(4, 0), Match(1, 2))
    assert finder.scan(MatcherCursor(), "abcd")[1] == Match(0, 4)


def test_text_that_never_quite_matches_costs_its_length() -> None:
    """The work per character does not depend on the length of the partial match."""
    counts = []
    for length in (200, 2000):
        finder, cursor = StringMatcher(["a" * length + "b"]), MatcherCursor()

        def scan_all(finder: StringMatcher = finder) -> None:
            nonlocal cursor
            for _ in range(5000):
                cursor, match = finder.scan(cursor, "aa")
                assert match is None

        counts.append(instructions(scan_all))
        assert finder.num_final(cursor) == 10_000 - length
    assert counts[1] < 1.1 * counts[0]
