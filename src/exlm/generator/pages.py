"""Which page of the cache belongs to whom. Integers and bytes only: no tensors, no model, no text.

A page that is complete, and whose ids can no longer be taken back, is *named* by a digest of its ids and of
the name of the page before it; equal names mean equal keys and values, so sequences that begin alike share
pages. A page that a prompt will fill is *promised* under its name from the start: prompts that arrive
together share it before it exists, and whoever gets there first fills it. Pages nobody uses keep what they
hold until they are needed; the least recently used go first. What is only partly equal is copied, by order:
the table itself never touches the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ..errors import CacheTooSmall, InputError
from .audit import problems
from .sequence import Sequence, common_length

Lead: TypeAlias = tuple[bytes, int, int]
"""How a page begins: the name of the page before it and its first two ids."""


Slot: TypeAlias = tuple[Sequence, int]
"""A place for a page: which sequence, and which of its pages."""


class Copy(NamedTuple):
    """An order for the cache: write the first `tokens` rows of page `source` to page `target`."""

    source: int
    target: int
    tokens: int


@dataclass(eq=False, slots=True)
class Page:
    """One page of the cache."""

    index: int
    name: bytes | None = None
    """Set once it is complete and settled; `digest(parent, ids)`."""
    promise: bytes | None = None
    """The name it will have when its prompt has filled it."""
    parent: bytes | None = None
    """The name of the page before it, a sequence's root for a first page; None while that is not known."""
    ids: list[int] = field(default_factory=list)
    """Ids whose keys and values are valid here, from the first row on."""
    refs: int = 0
    """How many sequences use it."""
    age: int = 0
    """When it was last used; 0 for a page that holds nothing of use."""
    lead: Lead | None = None
    """How partial reuse finds it; None while its parent is not known or it holds fewer than two ids."""

    @property
    def filled(self) -> int:
        """Rows that hold valid keys and values."""
        return len(self.ids)


class PageTable:
    """The owner of every page of one cache (and of its twin, the draft model's cache, page for page)."""

    _named: dict[bytes, Page]
    _promised: dict[bytes, Page]
    _leads: dict[Lead, dict[int, Page]]

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
        """Begin anew with empty pages; who had some has none any more."""
        pages = [Page(index) for index in range(self.num_pages)]
        idle = OrderedDict((page.index, page) for page in pages)
        self._pages, self._idle, self._named, self._promised, self._leads = pages, idle, {}, {}, {}
        self.version += 1

    @property
    def free(self) -> int:
        """Pages nobody uses."""
        return len(self._idle)

    def held(self, index: int) -> int:
        """Rows of a page that hold valid keys and values."""
        return len(self._pages[index].ids)

    def pages_for(self, sequences: Iterable[Sequence]) -> int:
        """Pages that these sequences take together in an empty cache; what they share counts once."""
        names, fresh = self._needs(sequences)
        return len(names) + fresh

    def cost(self, sequences: Iterable[Sequence]) -> int:
        """Pages that these sequences would take together from the free ones."""
        names, fresh = self._needs(sequences)
        return fresh + sum(1 for name in names if (page := self._find(name)) is None or page.refs == 0)

    def fits(self, sequences: list[Sequence]) -> bool:
        """Whether the free pages suffice for these sequences."""
        total = sum(-(-sequence.limit // self.page_size) for sequence in sequences)
        return total <= len(self._idle) or self.cost(sequences) <= len(self._idle)

    def allocate(self, sequences: list[Sequence]) -> None:
        """Give a job's sequences all the pages they may ever need, and move them over what is already there.

        What the job can use of the idle pages is set aside before any page is given up.
        """
        if (need := self.cost(sequences)) > len(self._idle):
            raise CacheTooSmall(
                f"{need} pages are needed but {len(self._idle)} are free: finish a job first."
            )
        missing: dict[Hashable, list[Slot]] = {}
        for sequence in sequences:
            sequence.pages = [-1] * -(-sequence.limit // self.page_size)
            sequence.cached, sequence.sealed, sequence.settled = 0, 0, len(sequence)
            sequence.cached_pages, sequence.cached_tokens = 0, 0
            for i in range(len(sequence.pages)):
                name = sequence.names[i] if i < len(sequence.names) else None
                if name is not None and (page := self._find(name)) is not None:
                    self._take(page)
                    sequence.pages[i] = page.index
                else:
                    missing.setdefault(name or (id(sequence), i), []).append((sequence, i))
        self._fill(list(missing.values()))
        self.version += 1
        for sequence in sequences:
            self.advance(sequence)

    def advance(self, sequence: Sequence) -> None:
        """Move over the part of the prompt that its pages already hold, never past its last id."""
        sequence.copying = 0
        size, last = self.page_size, len(sequence) - 1
        while sequence.cached < last:
            i, offset = divmod(sequence.cached, size)
            page = self._pages[sequence.pages[i]]
            if i < len(sequence.names) and len(page.ids) < size:
                page = self._switch(sequence, i, self._named.get(sequence.names[i], page))
            rows = len(page.ids) - offset
            if rows <= 0:
                break
            sequence.cached += rows
            sequence.cached_tokens += rows
            sequence.cached_pages += rows == size
        self._seal(sequence)

    def lead(self, sequence: Sequence, i: int) -> Lead | None:
        """How the sequence's page `i` begins; None if that is not known or too little for partial reuse."""
        start = i * self.page_size
        parent = sequence.parent(i)
        if parent is None or self.page_size < 2 or start + 2 >= len(sequence):
            return None
        return parent, sequence.ids[start], sequence.ids[start + 1]

    def opening(self, sequence: Sequence, i: int) -> list[int]:
        """The ids of the sequence's page `i` that may come from another page: all but the sequence's last."""
        start = i * self.page_size
        return sequence.ids[start : min(start + self.page_size, len(sequence) - 1)]

    def partial(self, sequence: Sequence) -> Copy | None:
        """The best copy for a sequence that is about to begin a page: two rows or more, never the last id.

        Nothing is valid yet, so no target is ever a source: `commit` the rows once they are copied.
        """
        i, offset = divmod(sequence.cached, self.page_size)
        if offset or sequence.ready:
            return None
        source, sequence.copying = self._source(sequence, i)
        return None if source is None else Copy(source.index, sequence.pages[i], sequence.copying)

    def commit(self, sequence: Sequence, upto: int) -> None:
        """Keys and values of the ids up to there are valid now. Does nothing after the sequence's release."""
        start, size = sequence.cached, self.page_size
        if not sequence.pages or upto <= start:
            return
        while start < upto:
            i = start // size
            page, first, end = self._pages[sequence.pages[i]], i * size, min(upto, (i + 1) * size)
            page.ids.extend(sequence.ids[first + len(page.ids) : end])
            if page.lead is None and page.parent is not None:
                self._list(page)
            start = end
        sequence.cached = upto
        if sequence.copying:
            sequence.cached_tokens += sequence.copying
            sequence.copying = 0
        if upto // size > sequence.sealed:
            self._seal(sequence)

    def settle(self, sequence: Sequence, upto: int) -> None:
        """The ids up to there can no longer be taken back: others may share the pages they complete."""
        if upto > sequence.settled and sequence.pages:
            sequence.settled = min(upto, len(sequence.ids))
            if sequence.cached // self.page_size > sequence.sealed:
                self._seal(sequence)

    def rewind(self, sequence: Sequence, to: int) -> None:
        """Take back the ids from `to` on, all unsettled; the last one that is left is to be fed again."""
        if not sequence.settled <= to <= len(sequence):
            raise InputError(
                f"Of {len(sequence)} ids the first {sequence.settled} are settled: cannot go back to {to}."
            )
        del sequence.ids[to:]
        if sequence.cached < to:
            return
        sequence.cached = to - 1
        for i in range(sequence.cached // self.page_size, len(sequence.pages)):
            page = self._pages[sequence.pages[i]]
            del page.ids[max(0, sequence.cached - i * self.page_size) :]
            if len(page.ids) < 2:
                self._unlist(page)

    def release(self, sequence: Sequence) -> None:
        """Give the pages back. They keep what they hold until they are needed, ends go before beginnings."""
        self.settle(sequence, len(sequence))
        for index in reversed(sequence.pages):
            self._drop(self._pages[index])
        sequence.pages, sequence.names = [], []
        sequence.cached = sequence.sealed = sequence.settled = 0
        self.version += 1

    def clear(self) -> None:
        """Forget what idle pages hold; pages in use are not touched."""
        if self.free == self.num_pages:
            self.reset()
        for page in [*self._idle.values()]:
            self._blank(page)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if any invariant is broken, given every sequence that has pages."""
        if found := problems(self, sequences):
            raise AssertionError("\n".join(found))

    def _needs(self, sequences: Iterable[Sequence]) -> tuple[set[bytes], int]:
        """Names of the pages the prompts fill, and how many pages come after those."""
        names: set[bytes] = set()
        fresh = 0
        for sequence in sequences:
            whole = (len(sequence) - 1) // self.page_size
            if not sequence.pages:
                while len(sequence.names) < whole:
                    sequence.extend_names(self.page_size)
            names.update(sequence.names[:whole])
            fresh += -(-sequence.limit // self.page_size) - whole
        return names, fresh

    def _fill(self, groups: list[list[Slot]]) -> None:
        """Put one page each in slots for which none was found by name; a group of slots shares its page.

        An idle page that begins like one of them is given up last, and if it must be, it keeps its rows and
        goes where they are of use.
        """
        sources = [self._source(*group[0]) for group in groups]
        for source, _ in sources:
            if source is not None and source.refs == 0:
                self._rest(source)
        taken = dict(self._idle.popitem(last=False) for _ in groups)
        homes: list[Page | None] = []
        for source, rows in sources:
            home = taken.pop(source.index, None) if source is not None else None
            if home is not None:
                self._unname(home)
                del home.ids[rows:]
            homes.append(home)
        others = iter(taken.values())
        for group, home in zip(groups, homes, strict=True):
            if home is None:
                home = next(others)
                self._blank(home)
            self._give(home, group)

    def _give(self, page: Page, slots: list[Slot]) -> None:
        sequence, i = slots[0]
        page.refs = len(slots)
        page.parent = sequence.parent(i)
        if i < len(sequence.names):
            page.promise = sequence.names[i]
            self._promised[page.promise] = page
        for sequence, i in slots:
            sequence.pages[i] = page.index

    def _source(self, sequence: Sequence, i: int) -> tuple[Page | None, int]:
        """The page that begins most like page `i` of the prompt, and how many rows are equal."""
        lead = self.lead(sequence, i)
        found, best = None, 1
        candidates = self._leads.get(lead) if lead is not None else None
        if candidates:
            rest = self.opening(sequence, i)
            for page in candidates.values():
                if len(page.ids) > best and page.ids[best] == rest[best]:
                    rows = common_length(page.ids, rest)
                    if rows > best:
                        found, best = page, rows
                        if best == len(rest):
                            break
        return (None, 0) if found is None else (found, best)

    def _seal(self, sequence: Sequence) -> None:
        """Name the pages that are complete and cannot change.

        The last settled id may be fed again after a rewind, so the page it completes waits for the next one.
        """
        done = min(sequence.cached, sequence.settled - 1) // self.page_size
        for i in range(sequence.sealed, done):
            page = self._pages[sequence.pages[i]]
            if i == len(sequence.names):
                sequence.extend_names(self.page_size)
            if page.name is None:
                self._name(sequence, i, page)
            if i + 1 == len(sequence.names) and i + 1 < len(sequence.pages):
                following = self._pages[sequence.pages[i + 1]]
                following.parent = sequence.names[i]
                self._list(following)
            sequence.sealed = i + 1

    def _name(self, sequence: Sequence, i: int, page: Page) -> None:
        name = sequence.names[i]
        other = self._named.get(name)
        if other is not None and other.refs:
            self._switch(sequence, i, other)
            return
        if other is not None:
            self._blank(other)
        self._keep_promise(page)
        page.name = name
        self._named[name] = page

    def _switch(self, sequence: Sequence, i: int, other: Page) -> Page:
        """Let the sequence use an equal page instead of its own."""
        own = self._pages[sequence.pages[i]]
        if own is not other:
            self._take(other)
            sequence.pages[i] = other.index
            self._drop(own)
            if own.refs == 0:
                self._blank(own)
                self.version += 1
        return other

    def _find(self, name: bytes) -> Page | None:
        return self._named.get(name) or self._promised.get(name)

    def _take(self, page: Page) -> None:
        if page.refs == 0:
            del self._idle[page.index]
        page.refs += 1

    def _drop(self, page: Page) -> None:
        page.refs -= 1
        if page.refs == 0:
            self._keep_promise(page)
            self._idle[page.index] = page
            if page.name is None and page.lead is None:
                self._blank(page)
            else:
                self._rest(page)

    def _rest(self, page: Page) -> None:
        self._clock += 1
        page.age = self._clock
        self._idle.move_to_end(page.index)

    def _blank(self, page: Page) -> None:
        self._unname(page)
        self._unlist(page)
        page.ids, page.parent, page.age = [], None, 0
        if page.index in self._idle:
            self._idle.move_to_end(page.index, last=False)

    def _unname(self, page: Page) -> None:
        if page.name is not None:
            del self._named[page.name]
            page.name = None

    def _keep_promise(self, page: Page) -> None:
        """A promise ends: the page is there, or nobody waits for it any more."""
        if page.promise is not None:
            del self._promised[page.promise]
            page.promise = None

    def _list(self, page: Page) -> None:
        if page.lead is None and page.parent is not None and len(page.ids) > 1:
            page.lead = (page.parent, page.ids[0], page.ids[1])
            self._leads.setdefault(page.lead, {})[page.index] = page

    def _unlist(self, page: Page) -> None:
        if page.lead is not None:
            pages = self._leads[page.lead]
            del pages[page.index]
            if not pages:
                del self._leads[page.lead]
            page.lead = None
