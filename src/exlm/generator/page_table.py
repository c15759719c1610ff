"""The page table: which sequences use which pages of the KV cache, and the prefix cache.

It holds integers and bytes only: no tensors, no model, no text. A page is published under its page hash (a
digest of its ids and of the hash of the page before it) when it is full and its ids are final. Equal hashes
mean equal keys and values, so sequences with a common prefix share pages. A page that a prompt will fill
has a pending hash from the start: prompts that arrive together share it before it is filled, and the first
sequence that gets there fills it. A page without users is free and keeps its content until it is needed; the
least recently used page is evicted first. Where only a part of a page matches, the table returns a copy to be
made; it never touches the cache itself. For a model with recurrent layers, a prefix is reused up to the last page
whose state the state table has kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ..errors import CacheTooSmall, InputError
from .state_table import StateTable
from .token_sequence import TokenSequence, common_prefix_length, hash_page

StartKey: TypeAlias = tuple[bytes, int, int]
"""How a page starts: the hash of the page before it and its first two ids. Pages with equal keys share at
least two tokens."""

PageTableEntry: TypeAlias = tuple[TokenSequence, int]
"""An entry to fill: a sequence, and the index in its `pages`."""


class PageCopy(NamedTuple):
    """A copy for the cache to make: the first `num_tokens` tokens of page `source` to page `target`."""

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
    """The hash it will have once its prompt has filled it."""
    parent_hash: bytes | None = None
    """The hash of the page before it, a sequence's root hash for a first page; None while not known."""
    ids: list[int] = field(default_factory=list)
    """Ids whose keys and values are valid here, from the page's start on."""
    ref_count: int = 0
    """How many sequences use it."""
    last_used: int = 0
    """When it was last used; 0 for a page that holds nothing reusable."""
    start_key: StartKey | None = None
    """Its key for partial reuse; None while its parent is not known or it holds fewer than two ids."""


class PageTable:
    """Owns every page of one cache, and of the draft model's cache, which has the same pages."""

    def __init__(self, num_pages: int, page_size: int = 256, states: StateTable | None = None) -> None:
        """`states`, for a model with recurrent layers: a cached prefix is then reused up to a checkpoint."""
        if num_pages < 1 or page_size < 1:
            raise InputError(f"A page table needs pages, found {num_pages} pages of {page_size} tokens.")
        self.num_pages, self.page_size = num_pages, page_size
        self.states = states
        self.capacity_version = 0
        """Changes whenever a sequence that did not fit may fit now."""
        self._clock = 0
        self.reset()

    def reset(self) -> None:
        """Empty all pages; no sequence may use its pages any more."""
        pages = [Page(index) for index in range(self.num_pages)]
        free = OrderedDict((page.index, page) for page in pages)  # least recently used first
        by_hash: dict[bytes, Page] = {}
        by_pending_hash: dict[bytes, Page] = {}
        by_start_key: dict[StartKey, dict[int, Page]] = {}
        # One statement, which Ctrl-C cannot interrupt halfway.
        self._pages, self._free, self._by_hash, self._by_pending_hash, self._by_start_key = (
            pages,
            free,
            by_hash,
            by_pending_hash,
            by_start_key,
        )
        if self.states is not None:
            self.states.reset()
        self.capacity_version += 1

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence uses."""
        return len(self._free)

    def num_cached_tokens(self, index: int) -> int:
        """How many tokens of a page have valid keys and values."""
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
        return total <= len(self._free) or self.count_free_pages_needed(sequences) <= len(self._free)

    def allocate(self, sequences: list[TokenSequence]) -> None:
        """Allocate all the pages that a job's sequences may ever need, and reuse what cached pages hold.

        Free pages that the job can reuse are reserved before any page is evicted.
        """
        if (need := self.count_free_pages_needed(sequences)) > len(self._free):
            raise CacheTooSmall(f"{need} pages are needed but {len(self._free)} are free: finish a job first.")
        missing: dict[Hashable, list[PageTableEntry]] = {}
        for sequence in sequences:
            sequence.pages = [-1] * -(-sequence.max_length // self.page_size)
            sequence.num_computed_tokens = sequence.num_published_pages = 0
            sequence.num_final_tokens = len(sequence)
            sequence.cached_pages = sequence.cached_tokens = 0
            sequence.last_prompt_border = (len(sequence) - 1) // self.page_size * self.page_size
            shareable = self._num_shareable_pages(sequence)
            for i in range(len(sequence.pages)):
                page_hash = sequence.page_hashes[i] if i < shareable else None
                if page_hash is not None and (page := self._lookup(page_hash)) is not None:
                    self._add_ref(page)
                    sequence.pages[i] = page.index
                else:
                    missing.setdefault(page_hash or (id(sequence), i), []).append((sequence, i))
        self._assign_new_pages(list(missing.values()))
        self.capacity_version += 1
        for sequence in sequences:
            self.skip_cached_tokens(sequence)

    def skip_cached_tokens(self, sequence: TokenSequence) -> None:
        """Count the part of the prompt that its pages already hold as computed, but for its last id."""
        sequence.num_pending_copy_tokens = 0
        if self.states is not None:
            self._restore_checkpoint(sequence, self.states)
            return
        size, last = self.page_size, len(sequence) - 1
        while sequence.num_computed_tokens < last:
            i, offset = divmod(sequence.num_computed_tokens, size)
            page = self._pages[sequence.pages[i]]
            if i < len(sequence.page_hashes) and len(page.ids) < size:
                page = self._use_shared_page(sequence, i, self._by_hash.get(sequence.page_hashes[i], page))
            num_tokens = len(page.ids) - offset
            if num_tokens <= 0:
                break
            sequence.num_computed_tokens += num_tokens
            sequence.cached_tokens += num_tokens
            sequence.cached_pages += num_tokens == size
        self._publish_pages(sequence)

    def start_key(self, sequence: TokenSequence, i: int) -> StartKey | None:
        """The key of page `i` of a sequence; None if it is not known yet or too short for partial reuse."""
        start = i * self.page_size
        parent_hash = sequence.parent_hash(i)
        if parent_hash is None or self.page_size < 2 or start + 2 >= len(sequence):
            return None
        return parent_hash, sequence.ids[start], sequence.ids[start + 1]

    def copyable_ids(self, sequence: TokenSequence, i: int) -> list[int]:
        """The ids of page `i` that may be copied from another page: all but the sequence's last."""
        start = i * self.page_size
        return sequence.ids[start : min(start + self.page_size, len(sequence) - 1)]

    def plan_partial_copy(self, sequence: TokenSequence) -> PageCopy | None:
        """The longest copy for a sequence that is about to start a page: two tokens or more, never the last.

        The target stays empty until `mark_computed`, so no target is a source in the meantime.
        """
        i, offset = divmod(sequence.num_computed_tokens, self.page_size)
        if offset or sequence.prefill_done or self.states is not None:
            return None
        source, sequence.num_pending_copy_tokens = self._find_copy_source(sequence, i)
        if source is None:
            return None
        return PageCopy(source.index, sequence.pages[i], sequence.num_pending_copy_tokens)

    def plan_prefill_states(self, sequence: TokenSequence, start: int, end: int) -> None:
        """Set where a chunk finds and leaves recurrent states, if the model has any."""
        if self.states is not None:
            self.states.plan_prefill(sequence, start, end)

    def plan_decode_states(self, sequence: TokenSequence, past: int, count: int) -> None:
        """Set where a pass of `count` tokens finds and leaves recurrent states, if the model has any: one per token."""
        if self.states is not None:
            self.states.plan_decode(sequence, past, count)

    def mark_computed(self, sequence: TokenSequence, upto: int) -> None:
        """Record that keys and values of the ids before `upto` are in the cache, and publish full pages.

        Does nothing for a released sequence.
        """
        start, size = sequence.num_computed_tokens, self.page_size
        if not sequence.pages or upto <= start:
            return
        while start < upto:
            i = start // size
            page, first, end = self._pages[sequence.pages[i]], i * size, min(upto, (i + 1) * size)
            page.ids.extend(sequence.ids[first + len(page.ids) : end])
            if page.start_key is None and page.parent_hash is not None:
                self._add_start_key(page)
            start = end
        sequence.num_computed_tokens = upto
        if sequence.num_pending_copy_tokens:
            sequence.cached_tokens += sequence.num_pending_copy_tokens
            sequence.num_pending_copy_tokens = 0
        if upto // size > sequence.num_published_pages:
            self._publish_pages(sequence)
        if self.states is not None:
            self.states.forget_unneeded(sequence)

    def mark_final(self, sequence: TokenSequence, upto: int) -> None:
        """Record that the ids before `upto` cannot be rewound any more, and publish the pages they fill."""
        if upto > sequence.num_final_tokens and sequence.pages:
            sequence.num_final_tokens = min(upto, len(sequence.ids))
            if sequence.num_computed_tokens // self.page_size > sequence.num_published_pages:
                self._publish_pages(sequence)
            if self.states is not None:
                self.states.forget_unneeded(sequence)

    def rewind(self, sequence: TokenSequence, to: int) -> None:
        """Remove the ids from `to` on, none of which is final; the last id that is left is fed again.

        So are the ids after the last recurrent state that is still there, if the model has such states.
        """
        if not sequence.num_final_tokens <= to <= len(sequence):
            raise InputError(
                f"Cannot rewind to {to} tokens: of {len(sequence)} tokens the first "
                f"{sequence.num_final_tokens} are final."
            )
        del sequence.ids[to:]
        if sequence.num_computed_tokens < to:
            return
        sequence.num_computed_tokens = to - 1 if self.states is None else self.states.rewind(sequence, to - 1)
        for i in range(sequence.num_computed_tokens // self.page_size, len(sequence.pages)):
            page = self._pages[sequence.pages[i]]
            del page.ids[max(0, sequence.num_computed_tokens - i * self.page_size) :]
            if len(page.ids) < 2:
                self._remove_start_key(page)

    def release(self, sequence: TokenSequence) -> None:
        """Release the pages. They keep their content until they are evicted, later pages first."""
        self.mark_final(sequence, len(sequence))
        if self.states is not None:
            self.states.release(sequence)
        for index in reversed(sequence.pages):
            self._drop_ref(self._pages[index])
        sequence.pages, sequence.page_hashes = [], []
        sequence.num_computed_tokens = sequence.num_published_pages = sequence.num_final_tokens = 0
        self.capacity_version += 1

    def clear_prefix_cache(self) -> None:
        """Empty all free pages; pages in use are not touched."""
        if self.num_free_pages == self.num_pages:
            self.reset()
        for page in [*self._free.values()]:
            self._clear_page(page)

    def violations(self, num_users: Mapping[int, int] | None = None) -> list[str]:
        """Broken invariants, one line each.

        `num_users`: page index → how many sequences use the page; pages that it lacks have no users.
        """
        found = [*self._lookup_violations()]
        for page in self._pages:
            uses = (num_users or {}).get(page.index, 0)
            found += (f"page {page.index}: {text}" for text in self._page_violations(page, uses))
        if self.states is not None:
            found += self.states.violations()
            orphans = [h for h in self.states.checkpoint_hashes if h not in self._by_hash]
            found += (f"checkpoint {page_hash.hex()} without its page" for page_hash in orphans)
        return found

    def _required_pages(self, sequences: Iterable[TokenSequence]) -> tuple[set[bytes], int]:
        """Hashes of the pages that the prompts fill, and how many pages follow these."""
        hashes: set[bytes] = set()
        unhashed = 0
        for sequence in sequences:
            full_pages = (len(sequence) - 1) // self.page_size
            if not sequence.pages:
                while len(sequence.page_hashes) < full_pages:
                    sequence.append_page_hash(self.page_size)
            full_pages = min(full_pages, self._num_shareable_pages(sequence))
            hashes.update(sequence.page_hashes[:full_pages])
            unhashed += -(-sequence.max_length // self.page_size) - full_pages
        return hashes, unhashed

    def _num_shareable_pages(self, sequence: TokenSequence) -> int:
        """How many of a prompt's leading pages it may share: all, or those before the last checkpoint found.

        After a checkpoint a sequence computes keys and values again, in pages of its own: in shared ones their last
        bits could change under another sequence.
        """
        if self.states is None:
            return len(sequence.page_hashes)
        shareable = 0
        for i, page_hash in enumerate(sequence.page_hashes[: (len(sequence) - 1) // self.page_size]):
            if page_hash not in self._by_hash:
                break
            if self.states.has_checkpoint(page_hash):
                shareable = i + 1
        return shareable

    def _restore_checkpoint(self, sequence: TokenSequence, states: StateTable) -> None:
        """Continue from the last checkpoint of the prompt, if that is farther than the sequence is."""
        first, pages = -(-sequence.num_computed_tokens // self.page_size), self._num_shareable_pages(sequence)
        if pages * self.page_size <= sequence.num_computed_tokens:
            return
        for i in range(first if sequence.num_computed_tokens % self.page_size == 0 else first - 1, pages):
            self._use_shared_page(sequence, i, self._by_hash[sequence.page_hashes[i]])
        position = pages * self.page_size
        states.restore(sequence, sequence.page_hashes[pages - 1], position)
        sequence.cached_tokens += position - sequence.num_computed_tokens
        sequence.cached_pages += pages - sequence.num_computed_tokens // self.page_size
        sequence.num_computed_tokens = position
        self._publish_pages(sequence)

    def _assign_new_pages(self, groups: list[list[PageTableEntry]]) -> None:
        """Allocate one page for each group of entries whose hash was not found; a group shares its page.

        Free pages that a group could copy from are evicted last. If such a page is evicted after all, the
        group gets the page itself, with the tokens that match.
        """
        sources = [self._find_copy_source(*group[0]) if self.states is None else (None, 0) for group in groups]
        for source, _ in sources:
            if source is not None and source.ref_count == 0:
                self._mark_used(source)
        taken = dict(self._free.popitem(last=False) for _ in groups)
        assigned: list[Page | None] = []
        for source, num_tokens in sources:
            page = taken.pop(source.index, None) if source is not None else None
            if page is not None:
                self._unpublish_page(page)
                del page.ids[num_tokens:]
            assigned.append(page)
        others = iter(taken.values())
        for group, page in zip(groups, assigned, strict=True):
            if page is None:
                page = next(others)
                self._clear_page(page)
            self._assign_page(page, group)

    def _assign_page(self, page: Page, entries: list[PageTableEntry]) -> None:
        sequence, i = entries[0]
        page.ref_count = len(entries)
        page.parent_hash = sequence.parent_hash(i)
        if i < len(sequence.page_hashes) and self.states is None:
            page.pending_hash = sequence.page_hashes[i]
            self._by_pending_hash[page.pending_hash] = page
        for sequence, i in entries:
            sequence.pages[i] = page.index

    def _find_copy_source(self, sequence: TokenSequence, i: int) -> tuple[Page | None, int]:
        """The page that shares most leading tokens with page `i` of a prompt, and how many these are."""
        found, best = None, 1
        key = self.start_key(sequence, i)
        candidates = self._by_start_key.get(key) if key is not None else None
        if candidates:
            wanted_ids = self.copyable_ids(sequence, i)
            for page in candidates.values():
                if len(page.ids) > best and page.ids[best] == wanted_ids[best]:
                    num_tokens = common_prefix_length(page.ids, wanted_ids)
                    if num_tokens > best:
                        found, best = page, num_tokens
                        if best == len(wanted_ids):
                            break
        return (None, 0) if found is None else (found, best)

    def _publish_pages(self, sequence: TokenSequence) -> None:
        """Publish the pages that are full and final.

        The last final id may be fed again after a rewind, so the page it fills is published one token later; with
        recurrent states, all ids after the rewind floor may be.
        """
        computed = sequence.num_computed_tokens
        if self.states is None:
            done = min(computed, sequence.num_final_tokens - 1) // self.page_size
        else:
            done = self.states.rewind_floor(sequence, computed) // self.page_size
        for i in range(sequence.num_published_pages, done):
            page = self._pages[sequence.pages[i]]
            if i == len(sequence.page_hashes):
                sequence.append_page_hash(self.page_size)
            if page.page_hash is None:
                self._publish_page(sequence, i, page)
            if self.states is not None:
                self.states.checkpoint(sequence, i)
            if i + 1 == len(sequence.page_hashes) and i + 1 < len(sequence.pages):
                following = self._pages[sequence.pages[i + 1]]
                following.parent_hash = sequence.page_hashes[i]
                self._add_start_key(following)
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
                self.capacity_version += 1
        return other

    def _lookup(self, page_hash: bytes) -> Page | None:
        return self._by_hash.get(page_hash) or self._by_pending_hash.get(page_hash)

    def _add_ref(self, page: Page) -> None:
        if page.ref_count == 0:
            del self._free[page.index]
        page.ref_count += 1

    def _drop_ref(self, page: Page) -> None:
        page.ref_count -= 1
        if page.ref_count == 0:
            self._drop_pending_hash(page)
            self._free[page.index] = page
            if page.page_hash is None and page.start_key is None:
                self._clear_page(page)
            else:
                self._mark_used(page)

    def _mark_used(self, page: Page) -> None:
        self._clock += 1
        page.last_used = self._clock
        self._free.move_to_end(page.index)

    def _clear_page(self, page: Page) -> None:
        self._unpublish_page(page)
        self._remove_start_key(page)
        page.ids, page.parent_hash, page.last_used = [], None, 0
        if page.index in self._free:
            self._free.move_to_end(page.index, last=False)

    def _unpublish_page(self, page: Page) -> None:
        if page.page_hash is not None:
            if self.states is not None:
                self.states.drop_checkpoint(page.page_hash)
            del self._by_hash[page.page_hash]
            page.page_hash = None

    def _drop_pending_hash(self, page: Page) -> None:
        """Clear the pending hash: the page is full, or no sequence waits for it."""
        if page.pending_hash is not None:
            del self._by_pending_hash[page.pending_hash]
            page.pending_hash = None

    def _add_start_key(self, page: Page) -> None:
        if page.start_key is None and page.parent_hash is not None and len(page.ids) > 1:
            page.start_key = (page.parent_hash, page.ids[0], page.ids[1])
            self._by_start_key.setdefault(page.start_key, {})[page.index] = page

    def _remove_start_key(self, page: Page) -> None:
        if page.start_key is not None:
            pages = self._by_start_key[page.start_key]
            del pages[page.index]
            if not pages:
                del self._by_start_key[page.start_key]
            page.start_key = None

    def _lookup_violations(self) -> Iterator[str]:
        free = [page.index for page in self._pages if page.ref_count == 0]
        if sorted(self._free) != free or self.num_free_pages != len(free):
            yield f"free pages are {free}, listed are {sorted(self._free)}"
        last_uses = [page.last_used for page in self._free.values()]
        if last_uses != sorted(last_uses):
            yield f"free pages are not in the order of their last use: {last_uses}"
        for page_hash, page in self._by_hash.items():
            if page.page_hash != page_hash:
                yield f"page {page.index} is listed under another hash than its own"
        for page_hash, page in self._by_pending_hash.items():
            if page.pending_hash != page_hash:
                yield f"page {page.index} is pending under a hash it will not have"
        for key, pages in self._by_start_key.items():
            misplaced = [i for i, page in pages.items() if (page.start_key, page.index) != (key, i)]
            if misplaced or not pages:
                yield f"pages {sorted(pages)} are listed under another start key than theirs"

    def _page_violations(self, page: Page, uses: int) -> Iterator[str]:
        if page.ref_count != uses:
            yield f"{page.ref_count} references, {uses} users"
        if len(page.ids) > self.page_size:
            yield f"{len(page.ids)} tokens in a page of {self.page_size}"
        if page.page_hash is not None:
            if self._by_hash.get(page.page_hash) is not page:
                yield "published, but not found by its hash"
            if page.pending_hash is not None:
                yield "published and still pending"
            if len(page.ids) != self.page_size or page.parent_hash is None:
                yield f"published with {len(page.ids)} tokens, parent {page.parent_hash!r}"
            elif page.page_hash != hash_page(page.parent_hash, page.ids):
                yield "its hash is not that of its ids"
        if page.pending_hash is not None:
            if self._by_pending_hash.get(page.pending_hash) is not page:
                yield "pending, but not found by its pending hash"
            if page.ref_count == 0 or page.parent_hash is None:
                yield "pending without a user or a parent"
            elif len(page.ids) == self.page_size and page.pending_hash != hash_page(page.parent_hash, page.ids):
                yield "its pending hash is not that of its ids"
        key = page.start_key
        if key is not None and self._by_start_key.get(key, {}).get(page.index) is not page:
            yield "not found by its start key"
        has_key = page.parent_hash is not None and len(page.ids) > 1
        expected_key = (page.parent_hash, *page.ids[:2]) if has_key else None
        if key != expected_key:
            yield f"its start key is {expected_key}, listed is {key}"
        is_reusable = page.ref_count or page.page_hash is not None or key is not None
        if not is_reusable and (page.ids or page.parent_hash or page.last_used):
            yield "not reusable, but not cleared"
