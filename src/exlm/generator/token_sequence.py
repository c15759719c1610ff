"""`TokenSequence`: token ids, how far they are computed, and the cache pages that hold them; page hashes.

The page table updates the counters, the engine appends the ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

NO_STATES: dict[int, int] = {}
"""The states of a sequence that has none: one object for all, which stays empty."""


@dataclass(eq=False, slots=True)
class TokenSequence:
    """Token ids with counters: num_published_pages · page size ≤ num_computed_tokens ≤ len(ids).

    Append to `ids` freely, but remove ids only with `PageTable.rewind`.
    """

    ids: list[int]
    """The prompt and what was sampled so far. Injected embeddings are ids like all others."""
    salt: bytes = b""
    """What keys and values depend on besides ids (see `build_salt`); changed by `set_salt` only."""
    max_length: int = 0
    """The longest it may become; pages are reserved for that. Never less than the prompt."""
    num_computed_tokens: int = 0
    """Leading ids whose keys and values are valid in `pages`."""
    num_final_tokens: int = 0
    """Leading ids that can no longer be rewound; the whole prompt from the start."""
    num_published_pages: int = 0
    """Leading pages that are published under their hash, so that others may share them."""
    num_pending_copy_tokens: int = 0
    """Tokens of a planned page copy that `PageTable.mark_computed` has not counted yet."""
    pages: list[int] = field(default_factory=list)
    """The cache pages it owns or shares, in order; empty before admission and after its release."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Hashes of its leading pages: those that the prompt fills, and later ones once published."""
    cached_pages: int = 0
    """Full pages of the prompt that were found in the cache."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the cache, including those of `cached_pages`."""
    extras: Any = None
    """What the model runner needs besides ids and pages: adapters, embeddings."""
    states: dict[int, int] = field(default_factory=lambda: NO_STATES)
    """Slots of its recurrent states by position, the number of tokens each has seen; the state table changes them."""
    state_source: int = -1
    """The slot of the state that the planned pass continues; -1: none, it starts from zeros."""
    state_targets: Sequence[tuple[int, int]] = ()
    """(token of the planned pass, slot for the state after it)."""
    last_prompt_border: int = 0
    """The last page border of the prompt, before its last token."""
    rolling_checkpoint: bytes | None = None
    """The page hash of the newest checkpoint in generated text, if this sequence made it; the next one replaces it."""
    root_hash: bytes = field(init=False)
    """The hash before the first page."""

    def __post_init__(self) -> None:
        self.max_length = max(self.max_length, len(self.ids))
        self.set_salt(self.salt)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prefill_done(self) -> bool:
        """Whether only the last id is left to compute: the next pass gives a new token."""
        return self.num_computed_tokens == len(self.ids) - 1

    def set_salt(self, salt: bytes) -> None:
        """Change the salt of a sequence that has no page hashes yet."""
        self.salt = salt
        self.root_hash = blake2b(salt, digest_size=16, person=b"first page").digest()

    def parent_hash(self, page_index: int) -> bytes | None:
        """The hash of the page before page `page_index`; None while it has none."""
        if page_index == 0:
            return self.root_hash
        return self.page_hashes[page_index - 1] if page_index <= len(self.page_hashes) else None

    def append_page_hash(self, page_size: int) -> None:
        """Hash the first page that has no hash yet."""
        start = len(self.page_hashes) * page_size
        parent_hash = self.page_hashes[-1] if self.page_hashes else self.root_hash
        self.page_hashes.append(hash_page(parent_hash, self.ids[start : start + page_size]))


def build_salt(key_parts: Mapping[str, bytes]) -> bytes:
    """One salt from everything that keys and values depend on besides ids; empty from nothing."""
    parts = [part for name, value in sorted(key_parts.items()) if value for part in (name.encode(), value)]
    return b"".join([len(part).to_bytes(8, "little") + part for part in parts])


def hash_page(parent_hash: bytes, ids: list[int]) -> bytes:
    """The hash of a page that holds these ids after the page with hash `parent_hash`."""
    return blake2b(parent_hash + array("q", ids).tobytes(), digest_size=16).digest()


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """How many ids two lists have in common from the beginning."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
