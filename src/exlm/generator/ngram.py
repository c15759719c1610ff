"""An index of the n-grams of one token sequence, for n-gram drafting.

For every run of 1 to `longest` tokens it keeps where the latest occurrence ended. Appending a token, or
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
        self.length = len(ids)
        """How many tokens it has read."""
        self._ends: list[dict[int, int]] = []
        """For each length: the key of a run, and the end of its latest occurrence."""
        self._earlier = array("i")
        """For each token beyond `base` and each length: where the run that ends with it had ended before."""
        keys = list(ids)
        for size in range(1, longest + 1):
            if size > 1:  # the newest token is in the highest bits
                keys = [key << TOKEN_BITS | token for key, token in zip(keys[1:], ids, strict=False)]
            self._ends.append(dict(zip(keys, range(size, len(ids) + 1), strict=False)))

    @property
    def match(self) -> int | None:
        """Where the longest run at the sequence's end that occurred before ended last; None without any."""
        for end in reversed(self._earlier[-len(self._ends) :]):
            if end != ABSENT:
                return end
        return None

    def extend(self, ids: Sequence[int]) -> None:
        """Read what was appended to the sequence, which is `ids` now."""
        every, longest, remember = self._ends, len(self._ends), self._earlier.append
        for end in range(self.length + 1, len(ids) + 1):
            key, place = 0, end
            for ends in every if end >= longest else every[:end]:
                place -= 1
                key = key << TOKEN_BITS | ids[place]
                remember(ends.get(key, ABSENT))
                ends[key] = end
            if end < longest:  # no run is longer than the sequence
                self._earlier.extend([ABSENT] * (longest - end))
        self.length = max(self.length, len(ids))

    def truncate(self, ids: Sequence[int], length: int) -> None:
        """The sequence `ids` is about to lose its tokens from this position on, all of them beyond `base`."""
        longest = len(self._ends)
        for end in range(self.length, length, -1):
            key, place = 0, end
            for ends, earlier in zip(self._ends[:end], self._earlier[-longest:], strict=False):
                place -= 1
                key = key << TOKEN_BITS | ids[place]
                if earlier == ABSENT:
                    del ends[key]
                else:
                    ends[key] = earlier
            del self._earlier[-longest:]
        self.length = min(self.length, length)
