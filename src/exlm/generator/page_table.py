"""The page table: which sequences use which pages of the KV cache, and the prefix cache.

It holds integers and bytes only: no tensors, no model, no text. A page is published under its page hash (a
digest of its ids and of the hash of the page before it) when it is full and its ids are final. Equal hashes
mean equal keys and values, so sequences with a common prefix share pages. A page that a prompt will fill
has a pending hash from the start: prompts that arrive together share it before it is filled, and the first
sequence that gets there fills it. A page without users keeps its content until it is needed; the least
recently used page is evicted first. Where only a part of a page matches, the table returns a copy to be
made; it never touches the cache itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from ..errors import CacheTooSmall, InputError
from .token_sequence import TokenSequence, common_prefix_length, hash_page

NO_USERS: Mapping[int, int] = MappingProxyType({})

PrefixKey: TypeAlias = tuple[bytes, int, int]
"""How a page begins: the hash of the page before it and its first two ids."""


PageSlot: TypeAlias = tuple[TokenSequence, int]
"""A page of a sequence: the sequence, and the index among its pages."""


class PageCopy(NamedTuple):
    """A copy for the cache to make: the first `num_tokens` rows of page `source` to page `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(eq=False, slots=True)
class Page:
    """One page of the cache."""

    index: int
    page_hash: bytes | None = None
    """`hash_page(parent_hash, ids)` once it is full and its ids are final."""
    pending_hash: bytes | None = None
    """The hash it will have when its prompt has filled it."""
    parent_hash: bytes | None = None
    """The hash of the page before it, a sequence's root hash for a first page; None while not known."""
    ids: list[int] = field(default_factory=list)
    """Ids whose keys and values are valid here, from the first row on."""
    ref_count: int = 0
    """How many sequences use it."""
    last_used: int = 0
    """When it was last used; 0 for a page that holds nothing reusable."""
    prefix_key: PrefixKey | None = None
    """Its key for partial reuse; None while its parent is not known or it holds fewer than two ids."""

    @property
    def filled(self) -> int:
        """Rows that hold valid keys and values."""
        return len(self.ids)


class PageTable:
    """Owns every page of one cache, and of the draft model's cache, which has the same pages."""

    _by_hash: dict[bytes, Page]
    _by_pending_hash: dict[bytes, Page]
    _by_prefix_key: dict[PrefixKey, dict[int, Page]]

    def __init__(self, num_pages: int, page_size: int = 256) -> None:
        if num_pages < 1 or page_size < 1:
            raise InputError(f"A page table needs pages and rows, found {num_pages} pages of {page_size}.")
        self.num_pages = num_pages
        self.page_size = page_size
        self.version = 0
        """Changes whenever a sequence that did not fit may fit now."""
        self._clock = 0
        self.reset()

    def reset(self) -> None:
        """Empty all pages; sequences that had some have none any more."""
        pages = [Page(index) for index in range(self.num_pages)]
        idle = OrderedDict((page.index, page) for page in pages)
        self._pages, self._idle, self._by_hash, self._by_pending_hash, self._by_prefix_key = (
            pages,
            idle,
            {},
            {},
            {},
        )
        self.version += 1

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence uses."""
        return len(self._idle)

    def num_valid_rows(self, index: int) -> int:
        """Rows of a page that hold valid keys and values."""
        return len(self._pages[index].ids)

    def count_pages(self, sequences: Iterable[TokenSequence]) -> int:
        """Pages that these sequences need together in an empty cache; shared pages count once."""
        hashes, unhashed = self._required_pages(sequences)
        return len(hashes) + unhashed

    def count_free_pages_needed(self, sequences: Iterable[TokenSequence]) -> int:
        """Free pages that these sequences need together."""
        hashes, unhashed = self._required_pages(sequences)
        return unhashed + sum(
            1 for page_hash in hashes if (page := self._lookup(page_hash)) is None or page.ref_count == 0
        )

    def fits(self, sequences: list[TokenSequence]) -> bool:
        """Whether the free pages suffice for these sequences."""
        total = sum(-(-sequence.max_length // self.page_size) for sequence in sequences)
        return total <= len(self._idle) or self.count_free_pages_needed(sequences) <= len(self._idle)

    def allocate(self, sequences: list[TokenSequence]) -> None:
        """Allocate all the pages that a job's sequences may ever need, and reuse what cached pages hold.

        Idle pages that the job can reuse are reserved before any page is evicted.
        """
        if (need := self.count_free_pages_needed(sequences)) > len(self._idle):
            raise CacheTooSmall(
                f"{need} pages are needed but {len(self._idle)} are free: finish a job first."
            )
        missing: dict[Hashable, list[PageSlot]] = {}
        for sequence in sequences:
            sequence.pages = [-1] * -(-sequence.max_length // self.page_size)
            sequence.num_computed_tokens, sequence.num_published_pages, sequence.num_final_tokens = (
                0,
                0,
                len(sequence),
            )
            sequence.cached_pages, sequence.cached_tokens = 0, 0
            for i in range(len(sequence.pages)):
                page_hash = sequence.page_hashes[i] if i < len(sequence.page_hashes) else None
                if page_hash is not None and (page := self._lookup(page_hash)) is not None:
                    self._add_ref(page)
                    sequence.pages[i] = page.index
                else:
                    missing.setdefault(page_hash or (id(sequence), i), []).append((sequence, i))
        self._assign_new_pages(list(missing.values()))
        self.version += 1
        for sequence in sequences:
            self.skip_cached_tokens(sequence)

    def skip_cached_tokens(self, sequence: TokenSequence) -> None:
        """Count the part of the prompt that its pages already hold as computed, but for its last id."""
        sequence.num_copying_tokens = 0
        size, last = self.page_size, len(sequence) - 1
        while sequence.num_computed_tokens < last:
            i, offset = divmod(sequence.num_computed_tokens, size)
            page = self._pages[sequence.pages[i]]
            if i < len(sequence.page_hashes) and len(page.ids) < size:
                page = self._use_shared_page(sequence, i, self._by_hash.get(sequence.page_hashes[i], page))
            rows = len(page.ids) - offset
            if rows <= 0:
                break
            sequence.num_computed_tokens += rows
            sequence.cached_tokens += rows
            sequence.cached_pages += rows == size
        self._publish_pages(sequence)

    def prefix_key(self, sequence: TokenSequence, i: int) -> PrefixKey | None:
        """The prefix key of a sequence's page; None if it is not known or too short for partial reuse."""
        start = i * self.page_size
        parent_hash = sequence.parent_hash(i)
        if parent_hash is None or self.page_size < 2 or start + 2 >= len(sequence):
            return None
        return parent_hash, sequence.ids[start], sequence.ids[start + 1]

    def reusable_ids(self, sequence: TokenSequence, i: int) -> list[int]:
        """The ids of a sequence's page that may be copied from another page: all but the sequence's last."""
        start = i * self.page_size
        return sequence.ids[start : min(start + self.page_size, len(sequence) - 1)]

    def plan_partial_copy(self, sequence: TokenSequence) -> PageCopy | None:
        """The best copy for a sequence that is about to start a page: two rows or more, never the last id.

        Nothing is valid yet, so no target is ever a source: `commit` the rows once they are copied.
        """
        i, offset = divmod(sequence.num_computed_tokens, self.page_size)
        if offset or sequence.prefill_done:
            return None
        source, sequence.num_copying_tokens = self._find_copy_source(sequence, i)
        return (
            None if source is None else PageCopy(source.index, sequence.pages[i], sequence.num_copying_tokens)
        )

    def commit(self, sequence: TokenSequence, upto: int) -> None:
        """Record that keys and values of the ids up to there are valid; nothing for a released sequence."""
        start, size = sequence.num_computed_tokens, self.page_size
        if not sequence.pages or upto <= start:
            return
        while start < upto:
            i = start // size
            page, first, end = self._pages[sequence.pages[i]], i * size, min(upto, (i + 1) * size)
            page.ids.extend(sequence.ids[first + len(page.ids) : end])
            if page.prefix_key is None and page.parent_hash is not None:
                self._index_prefix(page)
            start = end
        sequence.num_computed_tokens = upto
        if sequence.num_copying_tokens:
            sequence.cached_tokens += sequence.num_copying_tokens
            sequence.num_copying_tokens = 0
        if upto // size > sequence.num_published_pages:
            self._publish_pages(sequence)

    def finalize(self, sequence: TokenSequence, upto: int) -> None:
        """Record that the ids up to there can no longer be rewound, and publish the pages they complete."""
        if upto > sequence.num_final_tokens and sequence.pages:
            sequence.num_final_tokens = min(upto, len(sequence.ids))
            if sequence.num_computed_tokens // self.page_size > sequence.num_published_pages:
                self._publish_pages(sequence)

    def rewind(self, sequence: TokenSequence, to: int) -> None:
        """Take back the ids from there on, none of which is final; the last one that is left is fed again."""
        if not sequence.num_final_tokens <= to <= len(sequence):
            raise InputError(
                f"Cannot rewind to {to} tokens: of {len(sequence)} tokens the first "
                f"{sequence.num_final_tokens} are final."
            )
        del sequence.ids[to:]
        if sequence.num_computed_tokens < to:
            return
        sequence.num_computed_tokens = to - 1
        for i in range(sequence.num_computed_tokens // self.page_size, len(sequence.pages)):
            page = self._pages[sequence.pages[i]]
            del page.ids[max(0, sequence.num_computed_tokens - i * self.page_size) :]
            if len(page.ids) < 2:
                self._unindex_prefix(page)

    def release(self, sequence: TokenSequence) -> None:
        """Release the pages. They keep their content until they are evicted, later pages first."""
        self.finalize(sequence, len(sequence))
        for index in reversed(sequence.pages):
            self._drop_ref(self._pages[index])
        sequence.pages, sequence.page_hashes = [], []
        sequence.num_computed_tokens = sequence.num_published_pages = sequence.num_final_tokens = 0
        self.version += 1

    def clear(self) -> None:
        """Forget what idle pages hold; pages in use are not touched."""
        if self.num_free_pages == self.num_pages:
            self.reset()
        for page in [*self._idle.values()]:
            self._clear_page(page)

    def violations(self, num_users: Mapping[int, int] = NO_USERS) -> list[str]:
        """What is inconsistent, one line each, given how many sequences use each page (none if left out)."""
        found = [*_index_violations(self)]
        for page in self._pages:
            problems = _page_violations(self, page, num_users.get(page.index, 0))
            found += (f"page {page.index}: {text}" for text in problems)
        return found

    def _required_pages(self, sequences: Iterable[TokenSequence]) -> tuple[set[bytes], int]:
        """Hashes of the pages that the prompts fill, and how many pages come after those."""
        hashes: set[bytes] = set()
        unhashed = 0
        for sequence in sequences:
            full_pages = (len(sequence) - 1) // self.page_size
            if not sequence.pages:
                while len(sequence.page_hashes) < full_pages:
                    sequence.append_page_hash(self.page_size)
            hashes.update(sequence.page_hashes[:full_pages])
            unhashed += -(-sequence.max_length // self.page_size) - full_pages
        return hashes, unhashed

    def _assign_new_pages(self, groups: list[list[PageSlot]]) -> None:
        """Allocate one page for each group of slots whose hash was not found; a group shares its page.

        An idle page that begins like one of them is given up last, and if it must be, it keeps its rows and
        goes where they are of use.
        """
        sources = [self._find_copy_source(*group[0]) for group in groups]
        for source, _ in sources:
            if source is not None and source.ref_count == 0:
                self._mark_used(source)
        taken = dict(self._idle.popitem(last=False) for _ in groups)
        assigned: list[Page | None] = []
        for source, rows in sources:
            page = taken.pop(source.index, None) if source is not None else None
            if page is not None:
                self._unpublish_page(page)
                del page.ids[rows:]
            assigned.append(page)
        others = iter(taken.values())
        for group, page in zip(groups, assigned, strict=True):
            if page is None:
                page = next(others)
                self._clear_page(page)
            self._assign_page(page, group)

    def _assign_page(self, page: Page, slots: list[PageSlot]) -> None:
        sequence, i = slots[0]
        page.ref_count = len(slots)
        page.parent_hash = sequence.parent_hash(i)
        if i < len(sequence.page_hashes):
            page.pending_hash = sequence.page_hashes[i]
            self._by_pending_hash[page.pending_hash] = page
        for sequence, i in slots:
            sequence.pages[i] = page.index

    def _find_copy_source(self, sequence: TokenSequence, i: int) -> tuple[Page | None, int]:
        """The page with the longest common beginning with a prompt's page, and its length in rows."""
        prefix_key = self.prefix_key(sequence, i)
        found, best = None, 1
        candidates = self._by_prefix_key.get(prefix_key) if prefix_key is not None else None
        if candidates:
            rest = self.reusable_ids(sequence, i)
            for page in candidates.values():
                if len(page.ids) > best and page.ids[best] == rest[best]:
                    rows = common_prefix_length(page.ids, rest)
                    if rows > best:
                        found, best = page, rows
                        if best == len(rest):
                            break
        return (None, 0) if found is None else (found, best)

    def _publish_pages(self, sequence: TokenSequence) -> None:
        """Publish the pages that are full and final.

        The last settled id may be fed again after a rewind, so the page it completes waits for the next one.
        """
        done = min(sequence.num_computed_tokens, sequence.num_final_tokens - 1) // self.page_size
        for i in range(sequence.num_published_pages, done):
            page = self._pages[sequence.pages[i]]
            if i == len(sequence.page_hashes):
                sequence.append_page_hash(self.page_size)
            if page.page_hash is None:
                self._publish_page(sequence, i, page)
            if i + 1 == len(sequence.page_hashes) and i + 1 < len(sequence.pages):
                following = self._pages[sequence.pages[i + 1]]
                following.parent_hash = sequence.page_hashes[i]
                self._index_prefix(following)
            sequence.num_published_pages = i + 1

    def _publish_page(self, sequence: TokenSequence, i: int, page: Page) -> None:
        page_hash = sequence.page_hashes[i]
        other = self._by_hash.get(page_hash)
        if other is not None and other.ref_count:
            self._use_shared_page(sequence, i, other)
            return
        if other is not None:
            self._clear_page(other)
        self._drop_pending_hash(page)
        page.page_hash = page_hash
        self._by_hash[page_hash] = page

    def _use_shared_page(self, sequence: TokenSequence, i: int, other: Page) -> Page:
        """Let the sequence use an equal page instead of its own."""
        own = self._pages[sequence.pages[i]]
        if own is not other:
            self._add_ref(other)
            sequence.pages[i] = other.index
            self._drop_ref(own)
            if own.ref_count == 0:
                self._clear_page(own)
                self.version += 1
        return other

    def _lookup(self, page_hash: bytes) -> Page | None:
        return self._by_hash.get(page_hash) or self._by_pending_hash.get(page_hash)

    def _add_ref(self, page: Page) -> None:
        if page.ref_count == 0:
            del self._idle[page.index]
        page.ref_count += 1

    def _drop_ref(self, page: Page) -> None:
        page.ref_count -= 1
        if page.ref_count == 0:
            self._drop_pending_hash(page)
            self._idle[page.index] = page
            if page.page_hash is None and page.prefix_key is None:
                self._clear_page(page)
            else:
                self._mark_used(page)

    def _mark_used(self, page: Page) -> None:
        self._clock += 1
        page.last_used = self._clock
        self._idle.move_to_end(page.index)

    def _clear_page(self, page: Page) -> None:
        self._unpublish_page(page)
        self._unindex_prefix(page)
        page.ids, page.parent_hash, page.last_used = [], None, 0
        if page.index in self._idle:
            self._idle.move_to_end(page.index, last=False)

    def _unpublish_page(self, page: Page) -> None:
        if page.page_hash is not None:
            del self._by_hash[page.page_hash]
            page.page_hash = None

    def _drop_pending_hash(self, page: Page) -> None:
        """Clear the pending hash: the page is full, or no sequence waits for it."""
        if page.pending_hash is not None:
            del self._by_pending_hash[page.pending_hash]
            page.pending_hash = None

    def _index_prefix(self, page: Page) -> None:
        if page.prefix_key is None and page.parent_hash is not None and len(page.ids) > 1:
            page.prefix_key = (page.parent_hash, page.ids[0], page.ids[1])
            self._by_prefix_key.setdefault(page.prefix_key, {})[page.index] = page

    def _unindex_prefix(self, page: Page) -> None:
        if page.prefix_key is not None:
            pages = self._by_prefix_key[page.prefix_key]
            del pages[page.index]
            if not pages:
                del self._by_prefix_key[page.prefix_key]
            page.prefix_key = None


def _index_violations(table: PageTable) -> Iterator[str]:
    idle = [page.index for page in table._pages if page.ref_count == 0]
    if sorted(table._idle) != idle or table.num_free_pages != len(idle):
        yield f"idle pages are {idle}, listed are {sorted(table._idle)}"
    last_uses = [page.last_used for page in table._idle.values()]
    if last_uses != sorted(last_uses):
        yield f"idle pages are not in the order of their last use: {last_uses}"
    for page_hash, page in table._by_hash.items():
        if page.page_hash != page_hash:
            yield f"page {page.index} is listed under another hash than its own"
    for page_hash, page in table._by_pending_hash.items():
        if page.pending_hash != page_hash:
            yield f"page {page.index} is pending under a hash it will not have"
    for prefix_key, pages in table._by_prefix_key.items():
        if not pages or any(
            page.prefix_key != prefix_key or index != page.index for index, page in pages.items()
        ):
            yield f"pages {sorted(pages)} are listed under another prefix key than theirs"


def _page_violations(table: PageTable, page: Page, uses: int) -> Iterator[str]:
    if page.ref_count != uses:
        yield f"{page.ref_count} references, {uses} users"
    if page.filled > table.page_size:
        yield f"{page.filled} rows in a page of {table.page_size}"
    if page.page_hash is not None:
        if table._by_hash.get(page.page_hash) is not page:
            yield "published, but not found by its hash"
        if page.pending_hash is not None:
            yield "published and still pending"
        if page.filled != table.page_size or page.parent_hash is None:
            yield f"published with {page.filled} rows, parent {page.parent_hash!r}"
        elif page.page_hash != hash_page(page.parent_hash, page.ids):
            yield "its hash is not that of its ids"
    if page.pending_hash is not None:
        if table._by_pending_hash.get(page.pending_hash) is not page:
            yield "pending, but not found by its pending hash"
        if page.ref_count == 0 or page.parent_hash is None:
            yield "pending without a user or a parent"
        elif page.filled == table.page_size and page.pending_hash != hash_page(page.parent_hash, page.ids):
            yield "its pending hash is not that of its ids"
    if (
        page.prefix_key is not None
        and table._by_prefix_key.get(page.prefix_key, {}).get(page.index) is not page
    ):
        yield "not found by its prefix key"
    prefix_key = (
        (page.parent_hash, *page.ids[:2]) if page.parent_hash is not None and page.filled > 1 else None
    )
    if page.prefix_key != prefix_key:
        yield f"its prefix key is {prefix_key}, listed is {page.prefix_key}"
    if (
        page.ref_count == 0
        and page.page_hash is None
        and page.prefix_key is None
        and (page.ids or page.parent_hash or page.last_used)
    ):
        yield "not reusable, but not cleared"
