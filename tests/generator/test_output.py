"""OutputProcessor: the reference's traces as corrected, and each rule by itself."""

from __future__ import annotations

import pytest

from exlm.generator.output import Emit, Hold, OutputProcessor, Rewind, Stop
from tests.generator.toy_vocabulary import (
    BYTES,
    EMOJI,
    ID,
    SPECIAL,
    emit_each,
    make_detokenizer,
    push,
    toy_detokenizer,
)

# ---- golden traces of the specification


def test_g1_every_token_is_shown_until_the_limit() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=6)
    assert push(output, "defghi") == [*emit_each("defgh"), Stop("max_new_tokens", "i", 1)]
    assert output.new_tokens == 6


def test_g2_a_stop_string_is_withheld_and_its_tokens_are_not() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=20, stop_strings=["gh"])
    stop = Stop("stop_string", "", 2, "gh", 0, "gh")
    assert push(output, "defgh") == [*emit_each("def"), Hold(), stop]
    assert output.new_tokens == 5


def test_g3_a_stop_token_is_withheld() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=20, stop_tokens=[8])
    assert push(output, "defg") == [*emit_each("def"), Stop("stop_token", "", 0, "g", 1, 8)]
    assert output.new_tokens == 4


def test_g4_two_tokens() -> None:
    assert push(OutputProcessor(toy_detokenizer(), max_new_tokens=2), "bc") == [
        Emit("b", 1),
        Stop("max_new_tokens", "c", 1),
    ]


def test_g5_a_healed_token_shows_what_is_new_and_does_not_count() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=3, healed_token=ID["He"])
    assert output.healing
    assert push(output, ["Hello"]) == [Emit("llo", 1)]
    assert (output.healing, output.new_tokens) == (False, 0)
    assert push(output, [" world", ".", "."]) == [
        Emit(" world", 1),
        Emit(".", 1),
        Stop("max_new_tokens", ".", 1),
    ]
    assert output.new_tokens == 3


def test_g6_a_banned_string_is_taken_back_and_its_first_token_blocked() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=8, banned_strings=["EF"])
    e, f = ID["e"], ID["f"]
    assert push(output, "def") == [Emit("d", 1), Hold(), Rewind(2, (e,), "ef", (e, f))]
    assert (output.new_tokens, output.blocked_tokens()) == (1, frozenset({e}))
    assert push(output, "l") == [Emit("l", 1)]
    assert output.blocked_tokens() == frozenset()
    assert push(output, "mnopqr") == [*emit_each("mnopq"), Stop("max_new_tokens", "r", 1)]
    assert output.new_tokens == 8


def test_g7_stop_tokens_are_blocked_before_the_minimum() -> None:
    output = OutputProcessor(
        toy_detokenizer(), max_new_tokens=20, min_new_tokens=3, stop_tokens=[0], special_texts=SPECIAL
    )
    for _ in range(3):
        assert output.below_min_tokens
        assert output.blocked_tokens() == {0}
        assert push(output, "!") == [Emit("!", 1)]
    assert output.blocked_tokens() == frozenset()
    assert output.push(0) == Stop("stop_token", "", 0, "", 1, 0)
    assert output.new_tokens == 4


def test_g15_parts_of_a_character_are_shown_together() -> None:
    output = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=9)
    assert [output.push(part) for part in EMOJI] == [Hold(), Hold(), Hold(), Emit("\U0001f600", 4)]


def test_g15_an_end_inside_a_character_shows_what_is_there() -> None:
    output = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=3)
    assert [output.push(part) for part in EMOJI[:3]] == [Hold(), Hold(), Stop("max_new_tokens", "\ufffd", 3)]
    output = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=9, stop_tokens=[33])
    actions = [output.push(part) for part in [*EMOJI[:2], 33]]
    assert actions[2] == Stop("stop_token", "\ufffd", 2, "!", 1, 33)


# ---- ends


def test_a_stop_token_releases_held_text() -> None:
    """The held text and its tokens are emitted."""
    output = OutputProcessor(
        toy_detokenizer(), max_new_tokens=9, stop_tokens=[0], stop_strings=["fz"], banned_strings=["EX"]
    )
    assert push(output, "d") == [Emit("d", 1)]
    assert push(output, "f") == [Hold()]
    assert output.push(0) == Stop("stop_token", "f", 1, "", 1, 0)
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, stop_tokens=[0], banned_strings=["EX"])
    assert [*push(output, "e"), output.push(0)] == [Hold(), Stop("stop_token", "e", 1, "", 1, 0)]


def test_the_token_limit_releases_held_text() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=2, stop_strings=["fgh"], banned_strings=["FGX"])
    assert push(output, "fg") == [Hold(), Stop("max_new_tokens", "fg", 2)]


def test_a_stop_string_completed_at_the_limit_wins() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=2, stop_strings=["gh"])
    assert push(output, "gh")[1] == Stop("stop_string", "", 2, "gh", 0, "gh")


def test_a_banned_string_completed_at_the_limit_is_taken_back() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=2, banned_strings=["gh"])
    assert push(output, "gh")[1] == Rewind(2, (ID["g"],), "gh", (ID["g"], ID["h"]))
    assert push(output, "ab") == [Emit("a", 1), Stop("max_new_tokens", "b", 1)]


def test_a_stop_token_at_the_limit_is_a_stop_token() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=1, stop_tokens=[5])
    assert output.push(5) == Stop("stop_token", "", 0, "d", 1, 5)


def test_the_end_of_a_filter_is_shown() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, stop_strings=["tz"])
    assert push(output, "ca") == emit_each("ca")
    assert output.push(ID["t"], filter_done=True) == Stop("end_filter", "t", 1)
    assert OutputProcessor(toy_detokenizer(), max_new_tokens=1).push(ID["t"], filter_done=True) == Stop(
        "max_new_tokens", "t", 1
    )
    action = OutputProcessor(toy_detokenizer(), max_new_tokens=9, stop_strings=["t"]).push(ID["t"], filter_done=True)
    assert action == Stop("stop_string", "", 1, "t", 0, "t")


def test_stop_strings_ignore_the_minimum_and_stop_tokens_do_not() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, min_new_tokens=5, stop_tokens=[5], stop_strings=["e"])
    assert push(output, "d") == [Emit("d", 1)]
    assert push(output, "e") == [Stop("stop_string", "", 1, "e", 0, "e")]


# ---- stop strings


def test_a_stop_string_may_begin_and_end_inside_tokens() -> None:
    output = OutputProcessor(make_detokenizer([b"one\nUs", b"er: two"]), max_new_tokens=9, stop_strings=["\nUser:"])
    assert [output.push(0), output.push(1)] == [
        Hold(),
        Stop("stop_string", "one", 2, "\nUser: two", 0, "\nUser:"),
    ]


@pytest.mark.parametrize("strings", [["cd", "bc"], ["bc", "cd"]])
def test_a_complete_match_stops_although_a_longer_one_is_possible(strings: list[str]) -> None:
    output = OutputProcessor(make_detokenizer([b"abc"]), max_new_tokens=9, stop_strings=strings)
    assert output.push(0) == Stop("stop_string", "a", 1, "bc", 0, "bc")


def test_the_first_match_wins_and_of_those_the_longest() -> None:
    strings = ["c", "bcd", "b", "cde", "bcx"]
    output = OutputProcessor(make_detokenizer([b"abcde"]), max_new_tokens=9, stop_strings=strings)
    assert output.push(0) == Stop("stop_string", "a", 1, "bcde", 0, "bcd")


def test_empty_strings_stop_and_ban_nothing() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, stop_strings=["", "z"], banned_strings=[""])
    assert push(output, "abc") == emit_each("abc")
    assert output.num_revocable == 0


def test_a_false_alarm_is_released_as_far_as_it_is_over() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=99, stop_strings=["aab"])
    assert push(output, "aaaa") == [Hold(), Hold(), Emit("a", 1), Emit("a", 1)]
    assert (output.num_held, output.held_text, output.num_revocable) == (2, "aa", 0)
    assert push(output, "c") == [Emit("aac", 3)]
    assert (output.num_held, output.held_text) == (0, "")


def test_stop_strings_match_special_tokens_that_are_not_shown() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, stop_strings=["</s>"], special_texts=SPECIAL)
    assert push(output, "a") == [Emit("a", 1)]
    assert output.push(0) == Stop("stop_string", "", 1, "</s>", 0, "</s>")
    action = OutputProcessor(
        toy_detokenizer(special=True), max_new_tokens=9, stop_strings=["</s>"], special_texts=SPECIAL
    )
    assert action.push(0) == Stop("stop_string", "", 1, "</s>", 0, "</s>")


def test_stop_strings_match_across_the_edge_of_a_special_token() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, stop_strings=["b</s>c"], special_texts=SPECIAL)
    assert [output.push(token) for token in (ID["a"], ID["b"], 0, ID["c"])] == [
        Emit("a", 1),
        Hold(),
        Hold(),
        Stop("stop_string", "", 3, "b</s>c", 0, "b</s>c"),
    ]


def test_stop_strings_match_what_is_shown_across_a_hidden_token() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, stop_strings=["bc", "x"], special_texts=SPECIAL)
    assert [output.push(token) for token in (ID["a"], ID["b"], 0, ID["c"])] == [
        Emit("a", 1),
        Hold(),
        Hold(),
        Stop("stop_string", "", 3, "bc", 0, "bc"),
    ]


@pytest.mark.parametrize(
    ("strings", "expected"),
    [
        (["ab", "c"], ("", "abc", "ab")),
        (["a<>b", "c"], ("", "a<>bc", "a<>b")),
        ([">bc"], ("a", ">bc", ">bc")),
    ],
)
def test_the_first_match_counts_with_or_without_special_text(
    strings: list[str], expected: tuple[str, str, str]
) -> None:
    output = OutputProcessor(
        make_detokenizer([b"a", b"", b"bc"]),
        max_new_tokens=9,
        stop_strings=[*strings, "aq"],
        special_texts={1: "<>"},
    )
    text, rest, string = expected
    assert [output.push(token) for token in range(3)] == [
        Hold(),
        Hold(),
        Stop("stop_string", text, 3, rest, 0, string),
    ]


def test_a_hidden_token_is_released_without_text() -> None:
    output = OutputProcessor(toy_detokenizer(), max_new_tokens=9, stop_strings=["zz"], special_texts=SPECIAL)
    assert output.push(1) == Emit("", 1)
    assert [output.push(ID["z"]), output.push(1), output.push(ID["a"])] == [Hold(), Hold(), Emit("za", 3)]


# ---- characters


def test_a_stray_byte_is_emitted_at_once() -> None:
    output = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=99, stop_strings=["zz"])
    assert [output.push(value) for value in (0x61, 0xFF, 0x62)] == [
        Emit("a", 1),
        Emit("\ufffd", 1),
        Emit("b", 1),
    ]


def test_a_replacement_character_from_the_model_is_text() -> None:
    output = OutputProcessor(make_detokenizer(["\ufffd".encode(), b"a"]), max_new_tokens=99)
    assert [output.push(token) for token in (0, 0, 1)] == emit_each("\ufffd\ufffda")


def test_endless_incomplete_characters_do_not_pile_up() -> None:
    output = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=99, banned_strings=["zz"])
    assert output.push(0xE2) == Hold()
    assert [output.push(0xE2) for _ in range(20)] == [Emit("\ufffd", 1)] * 20
    assert [output.push(0x82), output.push(0xAC)] == [Hold(), Emit("\u20ac", 3)]


def test_half_a_character_can_complete_a_string_at_the_end() -> None:
    half = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=9, stop_tokens=[33], banned_strings=["a\ufffd"])
    assert [half.push(0x61), half.push(0xE2)] == [Hold(), Hold()]
    assert half.push(33) == Rewind(3, (0x61,), "a\ufffd", (0x61, 0xE2, 33))
    assert half.new_tokens == 0
    half = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=1, stop_strings=["\ufffd"])
    assert half.push(0xE2) == Stop("stop_string", "", 1, "\ufffd", 0, "\ufffd")
    half = OutputProcessor(make_detokenizer(BYTES), max_new_tokens=9, stop_tokens=[33], stop_strings=["\ufffd"])
    assert [half.push(0xE2), half.push(33)] == [Hold(), Stop("stop_string", "", 2, "\ufffd", 0, "\ufffd")]
