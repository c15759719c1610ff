"""An index of the n-grams of one token sequence, for n-gram drafting.

For every run of 1 to `longest` tokens it knows where the latest occurrence ended. Appending a token, or
removing one, takes one dictionary operation for each length, however long the sequence is. Keys and values
are integers, so Python's garbage collector, which walks through all containers of objects now and then, has
nothing to visit in these dictionaries.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_BITS = 32
"""Bits of a key for each token of a run; ids are smaller than that."""

ABSENT = -1


class NgramIndex:
    """Where each run of tokens of a sequence last ended; `extend` and `truncate` follow the sequence."""

    def __init__(self, longest: int, ids: Sequence[int] = ()) -> None:
        """An index of `ids`, all at once; only tokens that come later can be removed again."""
        self.base = len(ids)
        """Leading tokens that stay; `match` is known, and `truncate` possible, beyond them."""
        self._length = len(ids)
        self._ends: list[dict[int, int]] = []
        """For each length: the key of a run, and the end of its latest occurrence."""
        # For each token beyond `base`: keys of the runs that end with it, and where these had ended before.
        self._keys: list[int] = []
        self._earlier = array("q")
        keys = list(ids)
        for size in range(1, longest + 1):
            if size > 1:  # the newest token is in the highest bits
                keys = [key << TOKEN_BITS | token for key, token in zip(keys[1:], ids, strict=False)]
            self._ends.append(dict(zip(keys, range(size, len(ids) + 1), strict=False)))

    def __len__(self) -> int:
        """How many tokens it has read."""
        return self._length

    @property
    def match(self) -> int | None:
        """Where the longest run at the sequence's end that occurred before ended last; None without any."""
        for end in reversed(self._earlier[-len(self._ends) :]):
            if end != ABSENT:
                return end
        return None

    def extend(self, ids: Sequence[int]) -> None:
        """Read what was appended to the sequence, which is `ids` now."""
        keys, earlier, longest = self._keys, self._earlier, len(self._ends)
        for end in range(self._length + 1, len(ids) + 1):
            key, place = 0, end
            for ends in self._ends if end >= longest else self._ends[:end]:
                place -= 1
                key = key << TOKEN_BITS | ids[place]
                keys.append(key)
                earlier.append(ends.get(key, ABSENT))
                ends[key] = end
            for _ in range(end, longest):  # no run is longer than the sequence
                keys.append(ABSENT)
                earlier.append(ABSENT)
        self._length = max(self._length, len(ids))

    def truncate(self, length: int) -> None:
        """Remove all tokens from this position on, which is beyond `base`."""
        for _ in range(length, self._length):
            for ends in reversed(self._ends):
                key, end = self._keys.pop(), self._earlier.pop()
                if end != ABSENT:
                    ends[key] = end
                else:
                    ends.pop(key, None)
        self._length = min(self._length, length)
