"""Party: rows that go through the kernels together, and what is said of them for each token.

The heads of its rows stay packed from token to token; what moved since is written into them. It trusts that
its rows are those it was made of, unchanged but for longer texts: whether they are is the desk's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .columns import Fading, Heads, Listed, Masks, Penalties, Targets, Texts, Written
from .fused import Answer, Press, Work
from .lanes import AT, HEAD, Lane, table_of
from .post import Post
from .rows import Row
from .seats import Seat, Seats
from .sheets import Sheet

POSITION, BLOCKED = AT["draw"] + 1, AT["blocked"]


class Party:
    """Some rows of a batch, all in one lane."""

    def __init__(
        self,
        lane: Lane,
        wanted: int,
        places: list[int],
        rows: Sequence[Row],
        seats: Sequence[Seat],
        room: Seats,
    ) -> None:
        """Rows with the places of their logits, and their seats; `wanted` top tokens are asked for."""
        self.places = places
        self._seats = seats  # what their words point to must live
        count = len(rows)
        blocked = [token for seat in seats for token in seat.blocked]
        self._packed = np.empty(count * HEAD + len(blocked), np.int64)
        self._heads = heads = self._packed[: count * HEAD].reshape(count, HEAD)
        heads.reshape(-1)[:] = np.frombuffer(b"".join([seat.words for seat in seats]), np.int64)
        heads[:, AT["place"]] = places
        self._packed[count * HEAD :] = blocked
        heads[:, BLOCKED + 1] = counts = np.array([len(seat.blocked) for seat in seats])
        heads[:, BLOCKED] = count * HEAD + counts.cumsum() - counts
        self._table = table_of(tuple([seat.plan for seat in seats]), room.device)
        edited, moves = any([seat.edited for seat in seats]), any([seat.plan.mirostat for seat in seats])
        searches = any([seat.transcript is not None for seat in seats])
        self._work = Work(count, lane, wanted, edited, moves, searches)
        self._states = [row.state for row in rows]
        self._texts = [row.state.history if row.history is None else row.history for row in rows]
        self._next: list[int] = []
        self._equip(rows, seats, room)

    def _equip(self, rows: Sequence[Row], seats: Sequence[Seat], room: Seats) -> None:
        """What writes the features that the rows use."""
        heads, members = Heads(self._heads, len(self._packed)), list(enumerate(seats))
        listed = [
            Listed(i, seat.listed, rows[i].state.history) for i, seat in members if seat.listed is not None
        ]
        fading = [
            (i, rows[i].state, seat.plan.penalties)
            for i, seat in members
            if seat.plan.penalties is not None and seat.listed is None
        ]
        written = [
            Written(i, seat.transcript, rows[i].state.history)
            for i, seat in members
            if seat.transcript is not None
        ]
        moving = [(i, rows[i].state) for i, seat in members if seat.plan.mirostat]
        self._masks = Masks(heads, rows, room.width)
        self._penalties = Penalties(heads, listed) if listed else None
        self._fading = Fading(heads, fading) if fading else None
        self._searched = Texts(heads, written) if written else None
        self._targets = Targets(heads, moving, room.device) if moving else None

    def pick(self, x: Tensor, press: Press, post: Post, masked: bool, sheet: Sheet) -> Answer:
        """Have a token written for each row, from logits of the whole batch; `masked` if any has a mask."""
        positions = list(map(len, self._texts))
        grown = positions == self._next
        if not grown:
            self._heads[:, POSITION] = positions
        more = array("q")
        if self._penalties is not None:
            self._penalties.write(grown, more)
        if self._fading is not None:
            self._fading.write(more)
        if self._searched is not None:
            self._searched.write(grown)
        work = self._work
        if self._masks.write(masked, more) and not work.edited:
            work = work._replace(edited=True)
        if self._targets is not None:
            self._targets.write(grown, positions)
        answer = press.pick(x, self._table, post.send(self._packed, more), work, sheet)
        self._sent(positions, answer.targets)
        return answer

    def of(self, numbers: Tensor) -> Tensor:
        """The rows' own of what is known of the whole batch."""
        return numbers[torch.tensor(self.places).to(numbers.device, non_blocking=True)]

    def _sent(self, positions: list[int], targets: Tensor) -> None:
        """Make ready for the next tokens, now that the device has enough to do."""
        self._heads[:, POSITION] += 1
        self._next = [position + 1 for position in positions]
        if self._penalties is not None:
            self._penalties.sent()
        if self._searched is not None:
            self._searched.sent()
        if self._targets is not None:
            self._targets.sent(positions, targets)
        for state, position in zip(self._states, positions, strict=True):
            if position > state.drawn:
                state.drawn = position
