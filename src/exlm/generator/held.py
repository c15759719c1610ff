"""Held: a job's newest tokens, those that nobody has seen yet, and what their text may still become.

It knows which strings are looked for, finds them, says how far the text is out of their reach, and can go
back to before any of its tokens. It does not know why a job stops or what was tried before: see `output`.
Places in its text are counted from the first held letter.
"""

from __future__ import annotations

from typing import NamedTuple

from ..text.detokenize import REPLACEMENT, Detokenizer
from ..text.matching import Cursor, Match, Strings


class _Mark(NamedTuple):
    """Where reading stands between two tokens; the lengths count from anywhere, only differences matter."""

    whole: bool  # no character is under way
    shown: Cursor  # through the text as it is shown, looking for stop strings
    spelled: Cursor  # the same with the hidden tokens' text
    folded: Cursor  # through the shown text without case, looking for banned strings
    settled: int = 0  # how many tokens ever held nothing can reach from here, nor from further back


class _Token(NamedTuple):
    """A held token."""

    number: int
    text: str  # what it added to the shown text, often with the rest of a character begun before
    hidden: str  # what it stands for, if that is not shown
    before: _Mark
    stream: Detokenizer | None  # as it was before, where going back can happen


class Found(NamedTuple):
    """What the newest text completes: a stop string as shown, or as spelled, or a banned string."""

    shown: Match | None
    spelled: Match | None
    banned: Match | None


class Cut(NamedTuple):
    """Where a stop string ends the held text, which one, and the text from there on."""

    place: int
    string: str
    rest: str


class Dropped(NamedTuple):
    """Tokens taken back, and their text."""

    tokens: tuple[int, ...]
    text: str


class Held:
    """Tokens without a fate, oldest first; `stream` has read all of them."""

    def __init__(self, stream: Detokenizer, stops: Strings, bans: Strings) -> None:
        """`bans` are folded strings; without any, nothing is remembered for going back."""
        self.stream = stream
        self.returns = bool(bans)
        self._stops = stops
        self._bans = bans
        self._watches = bool(stops) or self.returns
        self._tokens: list[_Token] = []
        self._gone = 0  # how many were held and released
        self._now = _Mark(True, Cursor(), Cursor(), Cursor())
        self._saved = stream.copy() if self.returns else None  # the stream before the next token

    def __len__(self) -> int:
        """How many tokens are held."""
        return len(self._tokens)

    @property
    def text(self) -> str:
        """The shown text of all of them, without a character that is under way."""
        return "".join([token.text for token in self._tokens])

    def looking_for(self, stops: Strings) -> Held:
        """The same for other stop strings; only while nothing is held."""
        return Held(self.stream, stops, self._bans)

    def passes(self, text: str) -> bool:
        """Whether a token that the stream has just read as this text can go by without being held."""
        if self._tokens or self.stream.pending:
            return False
        if self._watches:
            if self._stops.starts_in(text) or (self.returns and self._bans.starts_in(text.casefold())):
                return False
            if self.returns:
                self._saved = self.stream.copy()
        return True

    def take(self, number: int, text: str, hidden: str = "") -> Found:
        """Hold a token that the stream has just read as this text, and look for what it completes."""
        now = self._now
        shown, in_shown = self._stops.scan(now.shown, text)
        if hidden or now.spelled.state != now.shown.state:
            spelled, in_spelled = self._stops.scan(now.spelled, hidden + text)
        else:  # the same state and the same text: they go on alike
            spelled, in_spelled = Cursor(now.spelled.length + len(text), shown.state), None
        folded, banned = now.folded, None
        self._tokens.append(_Token(number, text, hidden, now, self._saved))
        if self.returns:
            folded, banned = self._bans.scan(now.folded, text.casefold())
            self._saved = self.stream.copy()
        self._now = _Mark(not self.stream.pending, shown, spelled, folded)
        return Found(in_shown, in_spelled, banned)

    def cut(self, found: Found) -> Cut | None:
        """The first place where a stop string ends the text; with hidden text first, which is longer."""
        cuts = []
        if found.spelled is not None:
            spelled = "".join([token.hidden + token.text for token in self._tokens])
            start = found.spelled.start - self._tokens[0].before.spelled.length
            string = spelled[start : start + found.spelled.length]
            cuts.append(Cut(self._place_of_spelled(found.spelled.start), string, spelled[start:]))
        if found.shown is not None:
            shown = self.text
            start = found.shown.start - self._tokens[0].before.shown.length
            cuts.append(Cut(start, shown[start : start + found.shown.length], shown[start:]))
        return min(cuts, key=lambda cut: cut.place, default=None)

    def place(self, banned: Match) -> int:
        """Where a banned string starts."""
        holder = self._tokens[self._holder(banned.start)]
        inside = banned.start - holder.before.folded.length
        letters = 0
        while (inside := inside - len(holder.text[letters].casefold())) >= 0:  # folding may lengthen
            letters += 1
        return holder.before.shown.length - self._tokens[0].before.shown.length + letters

    def go_back(self, banned: Match) -> Dropped:
        """Drop the token in which a banned string begins and all after it."""
        index = self._holder(banned.start)
        first = self._tokens[index]
        if banned.start < first.before.folded.length + len(first.text[0].casefold()):
            while not self._tokens[index].before.whole:
                index -= 1
        dropped = self._tokens[index:]
        del self._tokens[index:]
        text = "".join([token.text for token in dropped]) + self.stream.flush()
        self._now, self._saved = dropped[0].before, dropped[0].stream
        if self._saved is not None:
            self.stream = self._saved.copy()
        return Dropped(tuple([token.number for token in dropped]), text)

    def release(self) -> tuple[str, int]:
        """Let go of the tokens that no string and no character under way can reach: their text, how many."""
        self._give_up()
        self._now = self._settle(len(self._tokens), self._now)
        count = self._now.settled - self._gone
        text = "".join([token.text for token in self._tokens[:count]])
        del self._tokens[:count]
        self._gone += count
        return text, count

    def _settle(self, index: int, mark: _Mark) -> _Mark:
        """Work out how many tokens are settled at the mark before the token at `index`.

        What a token has ruled out is possible again once it is taken back, so where going back may lead
        decides. The furthest place speaks for all: whatever is open later was open there, as far as it got.
        """
        shown, spelled = self._stops.settled(mark.shown), self._stops.settled(mark.spelled)
        folded = self._bans.settled(mark.folded)
        count, before = index, mark
        while self.returns and not (before.whole and before.folded.length <= folded):
            count -= 1
            before = self._tokens[count].before
        if count < index:
            return mark._replace(settled=before.settled)
        while not (before.whole and before.shown.length <= shown and before.spelled.length <= spelled):
            count -= 1
            before = self._tokens[count].before
        return mark._replace(settled=self._gone + count)

    def _give_up(self) -> None:
        """Half a character that was not continued is the text of the tokens before, which need not wait."""
        newest = self._tokens[-1]
        if newest.before.whole or not newest.text.startswith(REPLACEMENT):
            return
        _, shown, spelled, folded, _ = newest.before
        shown, _ = self._stops.scan(shown, REPLACEMENT)
        spelled, _ = self._stops.scan(spelled, REPLACEMENT)
        if newest.stream is not None:
            newest.stream.flush()
            folded, _ = self._bans.scan(folded, REPLACEMENT)
        before = self._settle(len(self._tokens) - 1, _Mark(True, shown, spelled, folded))
        self._tokens[-2] = self._tokens[-2]._replace(text=self._tokens[-2].text + REPLACEMENT)
        self._tokens[-1] = newest._replace(text=newest.text[1:], before=before)

    def _holder(self, folded: int) -> int:
        """The token that added a letter of the folded text."""
        index = len(self._tokens) - 1
        while self._tokens[index].before.folded.length > folded:
            index -= 1
        return index

    def _place_of_spelled(self, spelled: int) -> int:
        """Where a letter of the spelled text is in the shown text; a hidden one is where the next text is."""
        holder = next(token for token in reversed(self._tokens) if token.before.spelled.length <= spelled)
        inside = max(spelled - holder.before.spelled.length - len(holder.hidden), 0)
        return holder.before.shown.length - self._tokens[0].before.shown.length + inside
