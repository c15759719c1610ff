"""A stand-in for the kernels: it reads what was sent for each row, and does with lists what they would do."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exlm.sampling.fused import Answer, Work
from exlm.sampling.lanes import AT, HEAD
from exlm.sampling.sheets import Sheet, Sheets


@dataclass
class Told:
    """What the kernels are told of one row."""

    place: int
    draw: tuple[int, int, int]
    target: float
    numbers: tuple[float, ...]
    penalised: dict[int, int]
    fading: dict[int, tuple[float, float]]
    blocked: list[int]
    text: list[int]
    breakers: set[int]
    bias: list[float] | None
    allowed: set[int] | None
    spared: set[int]


class Witness:
    """Takes the place of a `Press`. `told` is what it heard, `answers` the targets it gave back for each."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.told: list[Told] = []
        self.answers: list[float] = []
        self.fails = False
        self._given = 1000.0

    def pick(self, x: Tensor, table: Tensor, words: Tensor, work: Work, sheet: Sheet) -> Answer:
        """Listen, and pick token 0; targets are numbers that never come again."""
        if self.fails:
            raise MemoryError
        said = words.numpy()
        for row in range(work.rows):
            self.told.append(self._read(said[row * HEAD :][:HEAD], said, tuple(table[row].tolist()), work))
            place = self.told[-1].place
            sheet.tokens[place], sheet.copy[place], sheet.shares[place] = 0, 0, 1.0
        targets = torch.arange(work.rows, dtype=torch.float64) + self._given
        self._given += work.rows
        self.answers += targets.tolist()
        return Answer(targets)

    def largest(self, x: Tensor, sheet: Sheet) -> None:
        """Nothing is told of such rows."""
        sheet.tokens[:], sheet.copy[:], sheet.shares[:] = 0, 0, 1.0

    def sheet(self, count: int) -> Sheet:
        """On which every row has failed so far."""
        sheet = Sheets(count, torch.device("cpu"), None).next()
        sheet.tokens[:], sheet.copy[:] = -1, -1
        return sheet

    def done(self) -> None:
        """Nobody waits."""

    def _read(self, head: Any, said: Any, numbers: tuple[float, ...], work: Work) -> Told:
        def words(name: str, count: int) -> list[int]:
            return [int(word) for word in head[AT[name] : AT[name] + count]]

        (place,), (seed, position, branch) = words("place", 1), words("draw", 3)
        target = float(head[AT["first"] : AT["first"] + 1].view(np.float64)[0])
        if address := words("target", 1)[0]:
            target = float(there(address, ctypes.c_double, 1)[0])
        start, count = words("fading", 2)
        parts = said[start : start + 3 * count].reshape(3, count)
        fading = zip(parts[0].tolist(), *parts[1:].view(np.float64).tolist(), strict=True)
        block, blocked = words("blocked", 2)
        (bias,), (spared,), (breakers,), (mask,) = (
            words(name, 1) for name in ("bias", "spared", "breakers", "allowed")
        )
        told = Told(
            place,
            (seed, position, branch),
            target,
            numbers,
            self._list(words("listed", 4), words("fresh", 2), said),
            {token: (many, strength) for token, many, strength in fading},
            said[block : block + blocked].tolist(),
            self._text(*words("text", 3)),
            self._tokens(breakers),
            there(bias, ctypes.c_float, self.width).tolist() if bias else None,
            {i for i in range(self.width) if int(said[mask + i // 64]) >> i % 64 & 1} if mask else None,
            self._tokens(spared),
        )
        edits = (told.penalised, told.fading, told.blocked, told.text, told.bias, mask)
        assert work.edited or not any(edits)
        assert work.searches or not told.text
        return told

    def _tokens(self, mask: int) -> set[int]:
        """The tokens of a mask of booleans."""
        return set(np.flatnonzero(there(mask, ctypes.c_bool, self.width)).tolist()) if mask else set()

    def _text(self, address: int, count: int, last: int) -> list[int]:
        """A text, after what the kernels do with it."""
        if not address or not count:
            return []
        ids = there(address, ctypes.c_int32, count)
        ids[-1] = last if 0 <= last < self.width else -1
        return list(map(int, ids))

    def _list(self, listed: list[int], fresh: list[int], said: Any) -> dict[int, int]:
        """The penalised tokens, after what the kernels do with the list."""
        address, size, joined, left = listed
        start, count = fresh
        if not address:
            return {}
        pairs = there(address, ctypes.c_int32, 2 * size).reshape(size, 2)
        if count:
            pairs[:count] = said[start : start + 2 * count].reshape(count, 2)
        for token, change in ((joined, 1), (left, -1)):
            if 0 <= token < self.width:
                found = np.flatnonzero(pairs[:, 0] == token)
                if len(found):
                    pairs[found[0], 1] += change
                else:
                    assert pairs[-1, 0] == -1, "an entry is taken that is not free"
                    pairs[-1] = token, change
        used = pairs[pairs[:, 0] >= 0]
        assert max(Counter(used[:, 0].tolist()).values(), default=1) == 1
        assert (used[:, 1] >= 0).all()
        return {token: many for token, many in used.tolist() if many > 0}


def there(address: int, kind: Any, count: int) -> Any:
    """Numbers at an address."""
    return np.ctypeslib.as_array((kind * count).from_address(address))
