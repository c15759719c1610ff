"""Editions: what tells that a row, its settings or its state were changed by more than another token.

Every such object carries its own edition. The last one that was handed out is known, too: while it stays the
same nothing at all was changed, and nobody has to look at each object. Masks, which come and go with every
token, are counted apart.
"""

from __future__ import annotations


class VersionStamps:
    """Hands out objects that are equal to no other."""

    def __init__(self) -> None:
        self.latest: object = None
        self.latest_mask_change: object = None
        """Another one whenever any row got or lost a mask."""

    def new_stamp(self) -> object:
        """Another edition; to be asked for when the change is made."""
        self.latest = stamp = object()
        return stamp


VERSION_STAMPS = VersionStamps()
