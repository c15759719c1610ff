"""Rewinds: banned strings, the tokens blocked after them, and the healed first token."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from exlm.generator.output import Emit, Hold, OutputAction, OutputProcessor, Rewind, Stop
from tests.generator.toy_vocabulary import BYTES, ID, SPECIAL, make_detokenizer, push, toy_detokenizer

# ---- banned strings


def test_the_token_in_which_a_banned_string_begins_is_taken_back_whole() -> None:
    output = OutputProcessor(make_detokenizer([b"so b", b"ad", b"x"]), max_new_tokens=9, banned_strings=["bad"])
    assert [output.push(2), output.push(0), output.push(1)] == [
        Emit("x", 1),
        Hold(),
        Rewind(2, (0,), "so bad", (0, 1)),
    ]


def test_a_banned_string_inside_one_token() -> None:
    output = OutputProcessor(make_detokenizer([b"a BAD one", b"fine"]), max_new_tokens=9, banned_strings=["bad"])
    assert output.push(0) == Rewind(1, (0,), "a BAD one", (0,))
    assert output.push(1) == Emit("fine", 1)


def test_all_tokens_tried_at_a_place_stay_blocked_until_text_is_released() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, banned_strings=["ab", "cd", "e"])
    a, c, e = ID["a"], ID["c"], ID["e"]
    assert push(output, "ab")[1] == Rewind(2, (a,), "ab", (a, ID["b"]))
    assert push(output, "cd")[1] == Rewind(2, (a, c), "cd", (c, ID["d"]))
    assert push(output, "e") == [Rewind(1, (a, c, e), "e", (e,))]
    assert output.blocked_tokens() == {a, c, e}
    assert push(output, "x") == [Emit("x", 1)]
    assert output.blocked_tokens() == frozenset()
    assert push(output, "ab")[1] == Rewind(2, (a,), "ab", (a, ID["b"]))


def test_going_back_further_forgets_what_was_tried_later() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, banned_strings=["abcd", "bx", "ez"])
    a, b = ID["a"], ID["b"]
    assert push(output, "abx")[2] == Rewind(2, (b,), "bx", (b, ID["x"]))
    assert (output.num_held, output.blocked_tokens()) == (1, frozenset({b}))
    output.push(b)  # not forbidden by Output itself: the sampler obeys, or not
    assert push(output, "cd")[1] == Rewind(4, (a,), "abcd", (a, b, ID["c"], ID["d"]))
    assert output.blocked_tokens() == {a}
    assert push(output, "e") == [Hold()]
    assert output.blocked_tokens() == frozenset()


def test_blocked_tokens_and_early_stop_tokens_are_forbidden_together() -> None:
    """Neither list contains ids of the other."""
    output = OutputProcessor(
        toy_detokenizer(), max_new_tokens=9, min_new_tokens=4, stop_tokens=[0], banned_strings=["ab", "cd"]
    )
    a, c = ID["a"], ID["c"]
    assert push(output, "ab")[1] == Rewind(2, (a,), "ab", (a, ID["b"]))
    assert output.blocked_tokens() == {0, a}
    assert push(output, "cd")[1] == Rewind(2, (a, c), "cd", (c, ID["d"]))
    assert output.blocked_tokens() == {0, a, c}


def test_strings_ruled_out_by_a_rejected_token_are_possible_again() -> None:
    """The first "a" is held because of the second: a rewind of that one would emit "ab" in two parts."""
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, banned_strings=["ab"])
    a, b = ID["a"], ID["b"]
    assert push(output, "aab") == [Hold(), Hold(), Rewind(2, (a,), "ab", (a, b))]
    assert push(output, "b") == [Rewind(2, (a,), "ab", (a, b))]
    assert push(output, "c") == [Emit("c", 1)]


def test_an_incomplete_character_may_undo_what_ruled_a_string_out() -> None:
    output = OutputProcessor(
        make_detokenizer([b"x", b"c\xe2", b"\x82\xac", b"b"]), max_new_tokens=9, banned_strings=["xb", "\u20ac"]
    )
    assert [output.push(token) for token in (0, 1, 2, 3)] == [
        Hold(),
        Hold(),
        Rewind(2, (1,), "c\u20ac", (1, 2)),
        Rewind(2, (0,), "xb", (0, 3)),
    ]


def test_stop_strings_hold_no_more_because_of_banned_strings() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=99, stop_strings=["aab"], banned_strings=["xy"])
    assert push(output, "aaaa") == [Hold(), Hold(), Emit("a", 1), Emit("a", 1)]


@pytest.mark.parametrize(
    ("banned", "tokens"),
    [
        ("stra\u00dfe", ["STRA", "SS", "E"]),
        ("STRASSE", ["stra", "\u00df", "e"]),
        ("\u0130x", ["i", "\u0307", "X"]),
        ("i\u0307x", ["\u0130", "", "x"]),
        ("\u03c3\u03c2", ["\u03a3", "", "\u03a3"]),
        ("\ufb01sh", ["f", "I", "SH"]),
    ],
)
def test_case_is_ignored_even_where_it_changes_lengths(banned: str, tokens: list[str]) -> None:
    output = OutputProcessor(
        make_detokenizer([piece.encode() for piece in tokens]), max_new_tokens=9, banned_strings=[banned]
    )
    actions = [output.push(token) for token in range(3)]
    assert actions == [Hold(), Hold(), Rewind(3, (0,), "".join(tokens), (0, 1, 2))]


def test_letters_that_fold_to_several_do_not_move_the_place_of_what_follows() -> None:
    output = OutputProcessor(
        make_detokenizer(["\u00df\u0130\u00dfq".encode(), b"bad"]), max_new_tokens=9, banned_strings=["bad"]
    )
    assert [output.push(0), output.push(1)] == [Emit("\u00df\u0130\u00dfq", 1), Rewind(1, (1,), "bad", (1,))]
    output = OutputProcessor(
        make_detokenizer(["\u00df\u00dfstop bad".encode()]),
        max_new_tokens=9,
        stop_strings=["stop"],
        banned_strings=["bad"],
    )
    assert output.push(0) == Stop("stop_string", "\u00df\u00df", 1, "stop bad", 0, "stop")


def test_of_a_stop_string_and_a_banned_one_the_first_counts() -> None:
    def action_for(text: bytes) -> OutputAction:
        return OutputProcessor(
            make_detokenizer([text]), max_new_tokens=9, stop_strings=["end"], banned_strings=["bad"]
        ).push(0)

    assert action_for(b"an end, bad") == Stop("stop_string", "an ", 1, "end, bad", 0, "end")
    assert action_for(b"a bad end") == Rewind(1, (0,), "a bad end", (0,))
    output = OutputProcessor(make_detokenizer([b"ab"]), max_new_tokens=9, stop_strings=["ab"], banned_strings=["A"])
    assert output.push(0) == Rewind(1, (0,), "ab", (0,))


def test_going_back_into_a_character() -> None:
    output = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=9, banned_strings=["\u20acx"])
    assert [output.push(value) for value in b"\xe2\x82\xacx"] == [
        Hold(),
        Hold(),
        Hold(),
        Rewind(4, (0xE2,), "\u20acx", (0xE2, 0x82, 0xAC, 0x78)),
    ]
    output = OutputProcessor(make_detokenizer([b"\xe2\x82", b"\xacx", b"\xac"]), max_new_tokens=9, banned_strings=["X"])
    assert [output.push(0), output.push(1)] == [Hold(), Rewind(1, (1,), "\u20acx", (1,))]
    assert (output.num_held, output.num_revocable) == (1, 1)
    assert output.push(2) == Emit("\u20ac", 2)


def test_held_tokens_may_be_taken_back_only_where_strings_are_banned() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, stop_strings=["xz"], banned_strings=["Q"])
    push(output, "x")
    assert (output.num_held, output.num_revocable) == (1, 1)


def test_half_a_character_that_was_shown_is_not_continued_after_going_back() -> None:
    output = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=9, banned_strings=["bx"])
    assert [output.push(value) for value in b"\xe2bx"] == [
        Hold(),
        Emit("\ufffd", 1),
        Rewind(2, (0x62,), "bx", (0x62, 0x78)),
    ]
    assert output.push(0x82) == Emit("\ufffd", 1)


class CountingDetokenizer:
    """A stream whose text depends on how many tokens it has read."""

    pending = False

    def __init__(self, read: int = 0) -> None:
        self.read = read

    def push(self, number: int) -> str:
        self.read += 1
        return chr(ord("`") + self.read)

    def feed(self, ids: Iterable[int]) -> str:
        return "".join(map(self.push, ids))

    def flush(self) -> str:
        return ""

    def copy(self) -> CountingDetokenizer:
        return CountingDetokenizer(self.read)


def test_the_detokenizer_is_restored_at_every_rewind() -> None:
    output = OutputProcessor(CountingDetokenizer(), max_new_tokens=9, banned_strings=["CD"])
    assert [output.push(0), output.push(0)] == [Emit("a", 1), Emit("b", 1)]
    for tried in ((1,), (1, 2), (1, 2, 3)):
        assert output.push(tried[-1]) == Hold()
        assert output.push(0) == Rewind(2, tried, "cd", (tried[-1], 0))


# ---- healing


@pytest.mark.parametrize("removed", [0, 34])
def test_the_removed_token_itself_adds_nothing(removed: int) -> None:
    """Id 0 is an ordinary token, and a special token is neither stop string nor stop token here."""
    output = OutputProcessor(
        toy_detokenizer(),
        max_new_tokens=9,
        stop_tokens=[0, 5],
        stop_strings=["</s>"],
        special_texts=SPECIAL,
        healed_token=removed,
    )
    assert output.blocked_tokens() == {0, 5} - {removed}
    assert output.push(removed) == Emit("", 1)
    assert (output.new_tokens, output.blocked_tokens()) == (0, frozenset())


def test_healing_goes_by_bytes() -> None:
    """Covers a space that is dropped at the start of a text, and parts of characters."""
    pieces = [b" a", b" abc", b"\x80", b"\x80\xe2\x82", b"\xac", b"\xf0\x9f", b"\xf0\x9f\x98\x80"]

    def actions_for(*tokens: int) -> list[OutputAction]:
        output = OutputProcessor(make_detokenizer(pieces), max_new_tokens=9, healed_token=tokens[0])
        return [output.push(token) for token in tokens[1:]]

    assert actions_for(0, 1) == [Emit("bc", 1)]
    assert actions_for(2, 2) == [Emit("", 1)]
    assert actions_for(2, 3, 4) == [Hold(), Emit("\u20ac", 2)]
    assert actions_for(5, 6) == [Emit("\U0001f600", 1)]


def test_strings_are_looked_for_in_what_a_healed_token_adds() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, healed_token=ID["He"], stop_strings=["lo"])
    assert push(output, ["Hello"]) == [Stop("stop_string", "l", 1, "lo", 0, "lo")]
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, healed_token=ID["He"], banned_strings=["hell", "LLO"])
    assert push(output, ["Hello"]) == [Rewind(1, (ID["Hello"],), "llo", (ID["Hello"],))]
    assert (output.healing, output.new_tokens) == (True, 0)
    assert output.blocked_tokens() == {ID["Hello"]}
    assert push(output, ["Hel"]) == [Hold()]
    assert push(output, ["d"]) == [Emit("ld", 2)]
    assert output.new_tokens == 1
