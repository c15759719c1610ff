"""Random jobs, token by token, against a reference that decodes the whole text after each token.

The reference keeps bytes and finds for each character the tokens in which it begins and is complete; it
searches with plain comparisons. Properties of any output are also checked without it.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.generator.output import Emit, Hold, OutputAction, OutputProcessor, Rewind, Stop, StopReason
from exlm.tokenizer.detokenizer import ByteTokenDecoder

REPLACEMENT = "\ufffd"


class DecodedChar(NamedTuple):
    char: str
    first_token: int  # the token of its first byte
    last_token: int  # the token that makes it complete; the one before, if what followed only showed it broken
    completed_by_next: bool = False  # the latter


@dataclass
class Case:
    pieces: list[bytes]
    special: dict[int, str] = field(default_factory=dict)
    stop_tokens: set[int] = field(default_factory=set)
    stops: list[str] = field(default_factory=list)
    bans: list[str] = field(default_factory=list)
    limit: int = 40
    min_tokens: int = 0

    def output(self) -> OutputProcessor:
        return OutputProcessor(
            ByteTokenDecoder(self.pieces, False).detokenizer(True),
            max_new_tokens=self.limit,
            min_new_tokens=self.min_tokens,
            stop_tokens=self.stop_tokens,
            stop_strings=self.stops,
            banned_strings=self.bans,
            special_texts=self.special,
        )


def matches(text: str, strings: list[str]) -> Iterator[tuple[int, int]]:
    """Start and negative length of each match."""
    for string in filter(None, strings):
        for start in range(len(text)):
            if text.startswith(string, start):
                yield start, -len(string)


def open_starts(text: str, strings: list[str]) -> list[int]:
    """The starts of suffixes of the text that could be completed to a string."""
    return [start for start in range(len(text)) if any(s.startswith(text[start:]) for s in strings)]


@dataclass
class Oracle:
    case: Case
    tokens: list[int] = field(default_factory=list)  # all that stand, released ones too
    released: int = 0
    char_boundaries: set[int] = field(default_factory=set)  # before these tokens no character is under way any more
    rejected: dict[int, list[int]] = field(default_factory=dict)

    def decoded_chars(self, pieces: list[bytes], final: bool, newest: int = -1) -> tuple[list[DecodedChar], bool]:
        """The characters of the tokens, and whether one is incomplete; the newest may yet be rewound."""
        chars: list[DecodedChar] = []
        utf8, start = codecs.getincrementaldecoder("utf-8")("replace"), 0
        for index, piece in enumerate(pieces):
            if index in self.char_boundaries:
                chars += [DecodedChar(char, start, index - 1) for char in utf8.decode(b"", True)]
                utf8.reset()
            for value in piece:
                before = bool(utf8.getstate()[0])
                for count, char in enumerate(utf8.decode(bytes([value]))):
                    begins = start if before and not count else index
                    completed_late = char == REPLACEMENT and begins < index != newest
                    chars.append(DecodedChar(char, begins, index - completed_late, completed_late))
                    before = False
                if not before:
                    start = index
        under_way = bool(utf8.getstate()[0])
        if final:
            chars += [DecodedChar(char, start, len(pieces) - 1) for char in utf8.decode(b"", True)]
        return chars, under_way

    def with_special(self, chars: list[DecodedChar], count: int, silent: bool = False) -> list[tuple[str, int, int]]:
        """Each character of the first tokens, hidden ones too, with its position in the shown text and its token."""
        out: list[tuple[str, int, int]] = []
        shown = 0
        for index, token in enumerate(self.tokens[:count]):
            if not self.case.pieces[token] and not (silent and index == count - 1):
                out += [(char, shown, index) for char in self.case.special.get(token, "")]
            for char in chars:
                if char.last_token == index:
                    out.append((char.char, shown, char.first_token))
                    shown += 1
        return out

    def push(self, token: int, ends: bool) -> OutputAction:
        count = len(self.tokens)
        stopping = token in self.case.stop_tokens and count >= self.case.min_tokens
        self.tokens.append(token)
        final = stopping or ends or count + 1 >= self.case.limit
        pieces = [self.case.pieces[token] for token in self.tokens]
        token_text = pieces[-1].decode("utf-8", "replace")
        if stopping:
            pieces[-1] = b""
        chars, under_way = self.decoded_chars(pieces, final, count)
        action = self.expected_action(chars, self.with_special(chars, count + 1, stopping), under_way and not final)
        if action is not None:
            return action
        remaining = "".join([char.char for char in chars if char.last_token >= self.released])
        if stopping:
            return Stop("stop_token", remaining, count - self.released, token_text, 1, token)
        if final:
            reason: StopReason = "max_new_tokens" if count + 1 >= self.case.limit else "end_filter"
            return Stop(reason, remaining, count + 1 - self.released)
        return self.release(pieces)

    def expected_action(
        self, chars: list[DecodedChar], with_hidden: list[tuple[str, int, int]], under_way: bool
    ) -> Stop | Rewind | None:
        shown = "".join([char.char for char in chars])
        tail = REPLACEMENT if under_way else ""
        folded = [index for index, char in enumerate(shown) for _ in char.casefold()]
        bans = sorted(matches(shown.casefold(), [ban.casefold() for ban in self.case.bans]))
        stop_matches: list[tuple[int, int, str, str]] = []
        full_text = "".join([char for char, _, _ in with_hidden])
        for start, length in sorted(matches(full_text, self.case.stops))[:1]:
            stop_matches.append((with_hidden[start][1], length, full_text[start : start - length], full_text[start:]))
        for start, length in sorted(matches(shown, self.case.stops))[:1]:
            stop_matches.append((start, length, shown[start : start - length], shown[start:]))
        stop_match = min(stop_matches, key=lambda stop_match: stop_match[0], default=None)
        if bans and (stop_match is None or folded[bans[0][0]] <= stop_match[0]):
            return self.rewind(chars, chars[folded[bans[0][0]]].first_token, tail)
        if stop_match is None:
            return None
        before = sum(char.last_token < self.released for char in chars)
        num_held = len(self.tokens) - self.released
        return Stop("stop_string", shown[before : stop_match[0]], num_held, stop_match[3] + tail, 0, stop_match[2])

    def rewind(self, chars: list[DecodedChar], index: int, tail: str) -> Rewind:
        newest = len(self.tokens) - 1
        dropped = self.tokens[index:]
        text = "".join([char.char for char in chars if char.last_token >= index]) + tail
        completed_late = any(char.completed_by_next and char.last_token + 1 == index for char in chars)
        self.char_boundaries = {position for position in self.char_boundaries if position <= index}
        if index < newest and completed_late:
            self.char_boundaries.add(index)
        del self.tokens[index:]
        self.rejected = {position: tokens for position, tokens in self.rejected.items() if position <= index}
        self.rejected.setdefault(index, []).append(dropped[0])
        return Rewind(len(dropped), tuple(self.rejected[index]), text, tuple(dropped))

    def release(self, pieces: list[bytes]) -> Emit | Hold:
        chars, _ = self.decoded_chars(pieces, False)
        completed_late = {char.last_token + 1 for char in chars if char.completed_by_next}
        end = len(pieces)
        to_visit, seen = [end], {end}
        while to_visit:  # wherever going back may lead, what is open there is open
            index = to_visit.pop()
            opens, bans = self.open_tokens(pieces[:index], index in completed_late)
            end = min([end, *opens])
            to_visit += bans - seen
            seen |= bans
        for char in reversed(chars):
            if char.first_token < end <= char.last_token:
                end = char.first_token
        count = end - self.released
        if count <= 0:
            return Hold()
        text = "".join([x.char for x in chars if self.released <= x.last_token < end])
        self.released = end
        self.rejected = {index: tokens for index, tokens in self.rejected.items() if index >= end}
        return Emit(text, count)

    def open_tokens(self, pieces: list[bytes], final: bool) -> tuple[set[int], set[int]]:
        """The tokens in which a match begins that may still be completed; and those of banned strings."""
        chars, under_way = self.decoded_chars(pieces, final)
        shown = "".join([char.char for char in chars])
        with_hidden = self.with_special(chars, len(pieces))
        folds = [ban.casefold() for ban in self.case.bans]
        folded = [chars[index].first_token for index, char in enumerate(shown) for _ in char.casefold()]
        bans = {folded[index] for index in open_starts(shown.casefold(), folds)}
        if under_way and not final:
            bans.add(self.incomplete_char_start(pieces))
        opens = {chars[index].first_token for index in open_starts(shown, self.case.stops)}
        opens |= {with_hidden[index][2] for index in open_starts("".join([x[0] for x in with_hidden]), self.case.stops)}
        return opens | bans, bans if any(self.case.bans) else set()

    def incomplete_char_start(self, pieces: list[bytes]) -> int:
        """The token of the last byte that begins a character."""
        return max(index for index, piece in enumerate(pieces) if any(value >= 0xC0 for value in piece))


LETTERS = [b"a", b"b", b"A", b"ab", b"ba", b"bab"]
PARTS = [b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\xaca", b"b\xe2", b"\xff", b"\xf0\x9f", b"a", b"b"]
OTHERS = [b"s", b"i", b"", b"\xc3", b"\xa9", b"\xef\xbf", b"\xbd"]
OTHERS += [text.encode() for text in ("\u00df", "\u0130", "\u00c9", REPLACEMENT, "a\u00dfb", "\u20acb")]
ALPHABETS = ["aab", "abA", "ab\u20ac" + REPLACEMENT, "abs<i\u00df\u00e9\u20ac" + REPLACEMENT]
strings = st.sampled_from(ALPHABETS).flatmap(lambda letters: st.lists(st.text(letters, max_size=4), max_size=3))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pool = draw(st.sampled_from([LETTERS, PARTS, LETTERS + PARTS + OTHERS]))
    pieces = draw(st.lists(st.sampled_from(pool), min_size=2, max_size=8))
    special = dict(enumerate(draw(st.lists(st.sampled_from(["<a>", "ab", "b", "<"]), max_size=2)), len(pieces)))
    pieces = pieces + [b""] * len(special)
    numbers = st.integers(0, len(pieces) - 1)
    return Case(
        pieces,
        special,
        draw(st.sets(numbers, max_size=1)),
        draw(strings),
        draw(strings),
        draw(st.sampled_from([40, 8, 3, 1])),
        draw(st.sampled_from([0, 0, 4])),
    )


seeds = st.integers(0, 2**32)


def steps(case: Case, seed: int) -> Iterator[tuple[OutputProcessor, int, bool, OutputAction]]:
    """Push random tokens that are not blocked until the job ends, 50 at most."""
    output = case.output()
    chance = random.Random(seed)
    for _ in range(50):
        allowed = [token for token in range(len(case.pieces)) if token not in output.blocked_tokens()]
        if not allowed:
            return
        token, ends = chance.choice(allowed), chance.random() < 0.01
        action = output.push(token, ends)
        yield output, token, ends, action
        if isinstance(action, Stop):
            return


@given(case=cases(), seed=seeds)
@settings(max_examples=400, deadline=None)
def test_every_action_equals_the_oracles(case: Case, seed: int) -> None:
    oracle = Oracle(case)
    for output, token, ends, action in steps(case, seed):
        assert action == oracle.push(token, ends)
        assert output.new_tokens == len(oracle.tokens)
        if not isinstance(action, Stop):
            ignored_stops = case.stop_tokens if output.new_tokens < case.min_tokens else set()
            assert output.blocked_tokens() == ignored_stops | set(oracle.rejected.get(len(oracle.tokens), []))


@given(case=cases(), seed=seeds)
@settings(max_examples=400, deadline=None)
def test_every_token_is_emitted_or_held_once_and_no_forbidden_text_is_emitted(case: Case, seed: int) -> None:
    kept: list[int] = []
    released = rewinds = 0
    text = ""
    for output, token, _, action in steps(case, seed):
        kept.append(token)
        match action:
            case Emit():
                assert action.num_tokens > 0
                released, text = released + action.num_tokens, text + action.text
            case Rewind():
                assert list(action.suppressed_tokens) == kept[-action.num_tokens :]
                assert len(kept) - action.num_tokens >= released
                assert action.blocked[-1] == kept[-action.num_tokens]
                del kept[-action.num_tokens :]
                rewinds += 1
            case Stop():
                text += action.text
                assert released + action.num_tokens + action.num_held_tokens == len(kept)
                check_end(case, kept, text, action, rewinds)
        for ban in filter(None, case.bans):
            assert ban.casefold() not in text.casefold()
            assert ban.lower() not in text.lower()
        assert not any(stop in text for stop in case.stops if stop)
        if not isinstance(action, Stop):
            assert output.num_held == len(kept) - released
            assert output.num_revocable in (0, output.num_held)
            check_waiting(case, kept, output, rewinds)


def check_end(case: Case, kept: list[int], text: str, stop: Stop, rewinds: int) -> None:
    """The emitted text must be the text up to the stop."""
    emitted = kept[: len(kept) - stop.num_held_tokens]
    full_text = b"".join([case.pieces[token] for token in emitted]).decode("utf-8", "replace")
    if rewinds:  # parts of characters may have been settled by tokens since taken back
        return
    if stop.reason == "stop_string":
        assert full_text.startswith(text)
        assert stop.held_text.startswith(str(stop.trigger))
    else:
        assert text == full_text


def check_waiting(case: Case, kept: list[int], output: OutputProcessor, rewinds: int) -> None:
    """Text must be held exactly if a character is incomplete or a string may still be completed."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    emitted, spelled = "", ""
    for token in kept:
        part = utf8.decode(case.pieces[token])
        emitted, spelled = emitted + part, spelled + (part or case.special.get(token, ""))
    folds = [ban.casefold() for ban in case.bans]
    opens = open_starts(emitted, case.stops) + open_starts(spelled, case.stops) + open_starts(emitted.casefold(), folds)
    waits = bool(utf8.getstate()[0] or opens)
    if not rewinds:
        assert (output.num_held > 0) == waits
    elif not waits:
        assert output.num_held == 0
