"""Desk: where rows wait for their tokens. It remembers the last batch, so that a step says only what is new.

A batch that comes again, each text a token longer, costs a few comparisons. Rows that came, went, moved or
were changed are seated anew, and only those are read. What it remembers of a text goes when the text's state
does. One desk serves one sampler, from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .editions import EDITIONS
from .fused import Press
from .lanes import Lane, lane_of
from .launch import raw_stream
from .party import Party
from .pick import Picked
from .plan import Plan
from .post import Post
from .rows import Row
from .seats import Seat, Seats, is_unchanged, on_device
from .state import SamplerState
from .vocabulary import Vocabulary


class Batch:
    """Rows as they were seated: the parties they make, and the places of those that no kernel serves.

    `largest` if every row is answered by its largest logit alone; then there are no parties. `masked` if any
    row has a mask now.
    """

    def __init__(self, rows: Sequence[Row], seats: Sequence[Seat], room: Seats) -> None:
        self.count = len(rows)
        self.guided = any([row.guided for row in rows])
        self.wanted = min(room.width, max([row.want_top for row in rows]))
        self.largest = not (self.guided or self.wanted) and all(map(_bare, rows, seats))
        self._masks, self.masked = EDITIONS.masks, _masked(rows)
        self.parties: list[Party] = []
        self.others: list[int] = []
        self._last = EDITIONS.last
        self._rows = list(rows)
        self._states = [row.state for row in rows]
        self._settings = list(dict.fromkeys([row.settings for row in rows]))
        self._editions = self._current()
        self._led = [row for row, seat in zip(rows, seats, strict=True) if _is_led(row, seat.plan)]
        self._blocked = [
            (row, seat.watched) for row, seat in zip(rows, seats, strict=True) if seat.watched is not None
        ]
        self._biases = {id(seat.bias): (seat.bias, seat.version) for seat in seats if seat.bias is not None}
        if not self.largest:
            self._divide(rows, seats, room)

    def _divide(self, rows: Sequence[Row], seats: Sequence[Seat], room: Seats) -> None:
        lanes: dict[Lane, list[int]] = {}
        for place, (row, seat) in enumerate(zip(rows, seats, strict=True)):
            lane = lane_of(seat.plan, room.width, self.wanted)
            if lane is None or on_device(row.allowed):
                self.others.append(place)
            else:
                lanes.setdefault(lane, []).append(place)
        self.parties = [
            Party(lane, self.wanted, some, [rows[i] for i in some], [seats[i] for i in some], room)
            for lane, some in lanes.items()
        ]

    def stands(self, rows: Sequence[Row]) -> bool:
        """Whether rows are those that were seated, in this order, and nothing changed but that texts grew."""
        if list(rows) != self._rows:
            return False
        for row in self._led:
            _lead(row)
        last = EDITIONS.last
        if last is not self._last and self._current() != self._editions:
            return False
        self._last = last
        masks = EDITIONS.masks
        if masks is not self._masks:
            self._masks, self.masked = masks, _masked(rows)
        if self.masked and (self.largest or any([on_device(row.allowed) for row in rows])):
            return False
        for row, blocked in self._blocked:
            if tuple(row.blocked) != blocked:
                return False
        return all([is_unchanged(bias, version) for bias, version in self._biases.values()])

    def _current(self) -> list[object]:
        """The editions of all that a batch was made of."""
        parts = (self._rows, self._states, self._settings)
        return [each.edition for part in parts for each in part]


class Desk:
    """Serves batches by kernels."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._where: tuple[int, torch.device, int] | None = None
        self.forget()

    def forget(self) -> None:
        """Remember nothing, neither of rows nor of what is on a device."""
        self._batch: Batch | None = None
        self._seats: WeakKeyDictionary[SamplerState, Seat] = WeakKeyDictionary()

    def seat(self, rows: Sequence[Row], width: int, device: torch.device) -> Batch:
        """The batch that some rows make; the one before if it still stands."""
        where = (width, device, raw_stream(device))
        if where != self._where:
            self.forget()
            self._room = Seats(self._vocabulary, width, device)
            self._press, self._post = Press(width, device, where[2]), Post(device, where[2])
            self._where = where
        batch = self._batch
        if batch is None or not batch.stands(rows):
            self._batch = None
            batch = Batch(rows, self._seated(rows), self._room)
            self._batch = batch
        return batch

    def pick(self, x: Tensor, batch: Batch) -> list[tuple[list[int], Picked]]:
        """The tokens of a batch's parties, each with their places, from its logits (rows, width).

        They come as one part, told to the host, too, unless rows are left for others or several parties have
        top tokens.
        """
        press, post, masked = self._press, self._post, batch.masked
        sheet = press.sheet(batch.count)
        try:
            if batch.largest:
                press.largest(x, sheet)
                answers = []
            else:
                answers = [party.pick(x, press, post, masked, sheet) for party in batch.parties]
            press.done()
        except BaseException:
            self.forget()  # what was packed for the device may never have reached it
            raise
        tokens, shares = sheet.tokens, sheet.shares
        if batch.others or (batch.wanted and len(answers) > 1):
            return [
                (party.places, Picked(party.of(tokens), party.of(shares), answer.top_tokens, answer.top_p))
                for party, answer in zip(batch.parties, answers, strict=True)
            ]
        tops = answers[0][1:] if batch.wanted else (None, None)
        return [([], Picked(tokens, shares, *tops, sheet.told))]

    def _seated(self, rows: Sequence[Row]) -> list[Seat]:
        """A seat for each row: the one it had if that holds."""
        seats: list[Seat] = []
        taken: set[SamplerState] = set()
        for row in rows:
            if _is_led(row, row.settings.plan()):
                _lead(row)
        for row in rows:
            state = row.state
            seat = self._seats.get(state) if state not in taken else None  # a list moves once in a step
            if seat is None or not seat.holds(row):
                seat = self._room.make(row, seat)
                if state not in taken:
                    self._seats[state] = seat
            taken.add(state)
            seats.append(seat)
        return seats


def _masked(rows: Sequence[Row]) -> bool:
    return [row.allowed for row in rows].count(None) < len(rows)


def _bare(row: Row, seat: Seat) -> bool:
    """Whether a row is answered by its largest logit alone."""
    return seat.plan.bare and not seat.edited and row.allowed is None


def _is_led(row: Row, plan: Plan) -> bool:
    """Whether a row's text is somebody else's, and matters."""
    return row.history is not None and (plan.penalties is not None or plan.dry is not None)


def _lead(row: Row) -> None:
    if row.history is not None:
        row.state.follow(row.history)
