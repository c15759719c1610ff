"""One sequence of token ids, and how far the cache has got with it. It holds numbers and decides nothing: the
page table moves the marks, the generator appends the ids. Here too is what ids are named and compared by."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any


@dataclass(eq=False, slots=True)
class TokenSequence:
    """Token ids with their marks: `sealed · page size ≤ cached ≤ len(ids)`, and `settled ≤ len(ids)`.

    Append to `ids` freely; take ids back only with `PageTable.rewind`.
    """

    ids: list[int]
    """The prompt and what was sampled so far. Injected embeddings are ids like all others."""
    salt: bytes = b""
    """Whatever else makes keys and values differ for equal ids, see `salted`; changed by `resalt` only."""
    max_length: int = 0
    """The longest it may become; pages are reserved for that. Never less than the prompt."""
    num_computed_tokens: int = 0
    """Leading ids whose keys and values are valid in `pages`."""
    num_final_tokens: int = 0
    """Leading ids that can no longer be taken back; the whole prompt from the start."""
    num_published_pages: int = 0
    """Leading pages that bear their name, so that others may share them."""
    num_copying_tokens: int = 0
    """Rows for which a copy was ordered that is not committed yet."""
    pages: list[int] = field(default_factory=list)
    """The pages of the cache it owns or shares, in order; empty while it waits and after its release."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Names of its leading pages: those that the prompt fills, from the start; others, once sealed."""
    cached_pages: int = 0
    """Whole pages of the prompt that were not computed for this sequence."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed for this sequence, those of whole pages included."""
    extras: Any = None
    """What the runner must know besides ids and pages: adapters, embeddings. Not looked into here."""
    root_hash: bytes = field(init=False)
    """What stands for the page before the first one."""

    def __post_init__(self) -> None:
        self.max_length = max(self.max_length, len(self.ids))
        self.set_salt(self.salt)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prefill_done(self) -> bool:
        """Whether only the last id remains to be fed: the next forward pass yields a new token."""
        return self.num_computed_tokens == len(self.ids) - 1

    def set_salt(self, salt: bytes) -> None:
        """Change the salt of a sequence that no page was named for yet."""
        self.salt = salt
        self.root_hash = blake2b(salt, digest_size=16, person=b"first page").digest()

    def parent_hash(self, page_index: int) -> bytes | None:
        """The name of the page before page `i`; None while it has none."""
        if page_index == 0:
            return self.root_hash
        return self.page_hashes[page_index - 1] if page_index <= len(self.page_hashes) else None

    def append_page_hash(self, page_size: int) -> None:
        """Name one page more, the first that has no name yet."""
        start = len(self.page_hashes) * page_size
        parent_hash = self.page_hashes[-1] if self.page_hashes else self.root_hash
        self.page_hashes.append(hash_page(parent_hash, self.ids[start : start + page_size]))


def build_salt(key_parts: Mapping[str, bytes]) -> bytes:
    """One salt from all that keys and values depend on besides ids, by what it is; none from nothing."""
    parts = [part for name, value in sorted(key_parts.items()) if value for part in (name.encode(), value)]
    return b"".join([len(part).to_bytes(8, "little") + part for part in parts])


def hash_page(parent_hash: bytes, ids: list[int]) -> bytes:
    """The name of a page that holds these ids after the page named `parent`."""
    return blake2b(parent_hash + array("q", ids).tobytes(), digest_size=16).digest()


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """How many ids two lists have in common from the beginning."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
