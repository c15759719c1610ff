"""Random jobs, token by token, against an oracle that reads the whole text anew after each token.

The oracle keeps bytes and asks, of each letter, in which token it begins and with which it is complete; it
searches with plain comparisons. Beside it, what must hold of any output is checked without an oracle.
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


class Letter(NamedTuple):
    letter: str
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
    """Start and negative length of everything found."""
    for string in filter(None, strings):
        for start in range(len(text)):
            if text.startswith(string, start):
                yield start, -len(string)


def open_starts(text: str, strings: list[str]) -> list[int]:
    """Where those ends of the text start that could grow into a string."""
    return [place for place in range(len(text)) if any(s.startswith(text[place:]) for s in strings)]


@dataclass
class Oracle:
    case: Case
    tokens: list[int] = field(default_factory=list)  # all that stand, released ones too
    released: int = 0
    char_boundaries: set[int] = field(default_factory=set)  # before these tokens no character is under way any more
    rejected: dict[int, list[int]] = field(default_factory=dict)

    def letters(self, pieces: list[bytes], final: bool, newest: int = -1) -> tuple[list[Letter], bool]:
        """The text of the tokens, and whether a character is under way; the newest may yet be taken back."""
        found: list[Letter] = []
        utf8, start = codecs.getincrementaldecoder("utf-8")("replace"), 0
        for place, piece in enumerate(pieces):
            if place in self.char_boundaries:
                found += [Letter(letter, start, place - 1) for letter in utf8.decode(b"", True)]
                utf8.reset()
            for value in piece:
                before = bool(utf8.getstate()[0])
                for count, letter in enumerate(utf8.decode(bytes([value]))):
                    begins = start if before and not count else place
                    late = letter == REPLACEMENT and begins < place != newest
                    found.append(Letter(letter, begins, place - late, late))
                    before = False
                if not before:
                    start = place
        under_way = bool(utf8.getstate()[0])
        if final:
            found += [Letter(letter, start, len(pieces) - 1) for letter in utf8.decode(b"", True)]
        return found, under_way

    def with_special(self, letters: list[Letter], count: int, silent: bool = False) -> list[tuple[str, int, int]]:
        """Every letter of so many tokens, hidden ones too, its place in the shown text, and its token."""
        out: list[tuple[str, int, int]] = []
        shown = 0
        for place, token in enumerate(self.tokens[:count]):
            if not self.case.pieces[token] and not (silent and place == count - 1):
                out += [(letter, shown, place) for letter in self.case.special.get(token, "")]
            for letter in letters:
                if letter.last_token == place:
                    out.append((letter.letter, shown, letter.first_token))
                    shown += 1
        return out

    def push(self, token: int, ends: bool) -> OutputAction:
        count = len(self.tokens)
        stopping = token in self.case.stop_tokens and count >= self.case.min_tokens
        self.tokens.append(token)
        final = stopping or ends or count + 1 >= self.case.limit
        pieces = [self.case.pieces[token] for token in self.tokens]
        own = pieces[-1].decode("utf-8", "replace")
        if stopping:
            pieces[-1] = b""
        letters, under_way = self.letters(pieces, final, count)
        verdict = self.expected_action(
            letters, self.with_special(letters, count + 1, stopping), under_way and not final
        )
        if verdict is not None:
            return verdict
        rest = "".join([letter.letter for letter in letters if letter.last_token >= self.released])
        if stopping:
            return Stop("stop_token", rest, count - self.released, own, 1, token)
        if final:
            reason: StopReason = "max_new_tokens" if count + 1 >= self.case.limit else "end_filter"
            return Stop(reason, rest, count + 1 - self.released)
        return self.release(pieces)

    def expected_action(
        self, letters: list[Letter], spelled: list[tuple[str, int, int]], under_way: bool
    ) -> Stop | Rewind | None:
        shown = "".join([letter.letter for letter in letters])
        tail = REPLACEMENT if under_way else ""
        folded = [place for place, letter in enumerate(shown) for _ in letter.casefold()]
        bans = sorted(matches(shown.casefold(), [ban.casefold() for ban in self.case.bans]))
        cuts: list[tuple[int, int, str, str]] = []
        whole = "".join([letter for letter, _, _ in spelled])
        for start, length in sorted(matches(whole, self.case.stops))[:1]:
            cuts.append((spelled[start][1], length, whole[start : start - length], whole[start:]))
        for start, length in sorted(matches(shown, self.case.stops))[:1]:
            cuts.append((start, length, shown[start : start - length], shown[start:]))
        cut = min(cuts, key=lambda cut: cut[0], default=None)
        if bans and (cut is None or folded[bans[0][0]] <= cut[0]):
            return self.rewind(letters, letters[folded[bans[0][0]]].first_token, tail)
        if cut is None:
            return None
        before = sum(letter.last_token < self.released for letter in letters)
        held = len(self.tokens) - self.released
        return Stop("stop_string", shown[before : cut[0]], held, cut[3] + tail, 0, cut[2])

    def rewind(self, letters: list[Letter], index: int, tail: str) -> Rewind:
        newest = len(self.tokens) - 1
        dropped = self.tokens[index:]
        text = "".join([letter.letter for letter in letters if letter.last_token >= index]) + tail
        late = any(letter.completed_by_next and letter.last_token + 1 == index for letter in letters)
        self.char_boundaries = {place for place in self.char_boundaries if place <= index}
        if index < newest and late:
            self.char_boundaries.add(index)
        del self.tokens[index:]
        self.rejected = {place: tokens for place, tokens in self.rejected.items() if place <= index}
        self.rejected.setdefault(index, []).append(dropped[0])
        return Rewind(len(dropped), tuple(self.rejected[index]), text, tuple(dropped))

    def release(self, pieces: list[bytes]) -> Emit | Hold:
        letters, _ = self.letters(pieces, False)
        late = {letter.last_token + 1 for letter in letters if letter.completed_by_next}
        end = len(pieces)
        places, seen = [end], {end}
        while places:  # wherever going back may lead, what is open there is open
            place = places.pop()
            opens, bans = self.open_tokens(pieces[:place], place in late)
            end = min([end, *opens])
            places += bans - seen
            seen |= bans
        for letter in reversed(letters):
            if letter.first_token < end <= letter.last_token:
                end = letter.first_token
        count = end - self.released
        if count <= 0:
            return Hold()
        text = "".join([x.letter for x in letters if self.released <= x.last_token < end])
        self.released = end
        self.rejected = {place: tokens for place, tokens in self.rejected.items() if place >= end}
        return Emit(text, count)

    def open_tokens(self, pieces: list[bytes], final: bool) -> tuple[set[int], set[int]]:
        """In which of these tokens something begins that may still be completed; and what may be banned."""
        letters, under_way = self.letters(pieces, final)
        shown = "".join([letter.letter for letter in letters])
        spelled = self.with_special(letters, len(pieces))
        folds = [ban.casefold() for ban in self.case.bans]
        folded = [letters[place].first_token for place, letter in enumerate(shown) for _ in letter.casefold()]
        bans = {folded[place] for place in open_starts(shown.casefold(), folds)}
        if under_way and not final:
            bans.add(self.incomplete_char_start(pieces))
        opens = {letters[place].first_token for place in open_starts(shown, self.case.stops)}
        opens |= {spelled[place][2] for place in open_starts("".join([x[0] for x in spelled]), self.case.stops)}
        return opens | bans, bans if any(self.case.bans) else set()

    def incomplete_char_start(self, pieces: list[bytes]) -> int:
        """The token of the last byte that begins a character."""
        return max(place for place, piece in enumerate(pieces) if any(value >= 0xC0 for value in piece))


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
    """Sample what is not forbidden, until the job ends or for a while."""
    output = case.output()
    chance = random.Random(seed)
    for _ in range(50):
        allowed = [token for token in range(len(case.pieces)) if token not in output.blocked_tokens()]
        if not allowed:
            return
        token, ends = chance.choice(allowed), chance.random() < 0.01
        verdict = output.push(token, ends)
        yield output, token, ends, verdict
        if isinstance(verdict, Stop):
            return


@given(case=cases(), seed=seeds)
@settings(max_examples=400, deadline=None)
def test_every_action_equals_the_oracles(case: Case, seed: int) -> None:
    oracle = Oracle(case)
    for output, token, ends, verdict in steps(case, seed):
        assert verdict == oracle.push(token, ends)
        assert output.new_tokens == len(oracle.tokens)
        if not isinstance(verdict, Stop):
            early = case.stop_tokens if output.new_tokens < case.min_tokens else set()
            assert output.blocked_tokens() == early | set(oracle.rejected.get(len(oracle.tokens), []))


@given(case=cases(), seed=seeds)
@settings(max_examples=400, deadline=None)
def test_every_token_is_emitted_or_held_once_and_no_forbidden_text_is_emitted(case: Case, seed: int) -> None:
    live: list[int] = []
    released = rewinds = 0
    text = ""
    for output, token, _, verdict in steps(case, seed):
        live.append(token)
        match verdict:
            case Emit():
                assert verdict.num_tokens > 0
                released, text = released + verdict.num_tokens, text + verdict.text
            case Rewind():
                assert list(verdict.suppressed_tokens) == live[-verdict.num_tokens :]
                assert len(live) - verdict.num_tokens >= released
                assert verdict.blocked[-1] == live[-verdict.num_tokens]
                del live[-verdict.num_tokens :]
                rewinds += 1
            case Stop():
                text += verdict.text
                assert released + verdict.num_tokens + verdict.num_held_tokens == len(live)
                check_end(case, live, text, verdict, rewinds)
        for ban in filter(None, case.bans):
            assert ban.casefold() not in text.casefold()
            assert ban.lower() not in text.lower()
        assert not any(stop in text for stop in case.stops if stop)
        if not isinstance(verdict, Stop):
            assert output.num_held == len(live) - released
            assert output.num_revocable in (0, output.num_held)
            check_waiting(case, live, output, rewinds)


def check_end(case: Case, live: list[int], text: str, stop: Stop, rewinds: int) -> None:
    """What was emitted in all is the text up to whatever ended it."""
    shown = live[: len(live) - stop.num_held_tokens]
    whole = b"".join([case.pieces[token] for token in shown]).decode("utf-8", "replace")
    if rewinds:  # parts of characters may have been settled by tokens since taken back
        return
    if stop.reason == "stop_string":
        assert whole.startswith(text)
        assert stop.held_text.startswith(str(stop.trigger))
    else:
        assert text == whole


def check_waiting(case: Case, live: list[int], output: OutputProcessor, rewinds: int) -> None:
    """Something is held exactly if a character is under way or a string may be."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    shown, spelled = "", ""
    for token in live:
        part = utf8.decode(case.pieces[token])
        shown, spelled = shown + part, spelled + (part or case.special.get(token, ""))
    folds = [ban.casefold() for ban in case.bans]
    opens = open_starts(shown, case.stops) + open_starts(spelled, case.stops) + open_starts(shown.casefold(), folds)
    waits = bool(utf8.getstate()[0] or opens)
    if not rewinds:
        assert (output.num_held > 0) == waits
    elif not waits:
        assert output.num_held == 0
