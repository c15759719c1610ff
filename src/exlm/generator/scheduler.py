"""Who runs next. It decides and leaves the doing to the generator, one round of which is

    started = scheduler.start()                      # pending jobs that fit now have their pages
    while plan := scheduler.plan():                  # usually one plan, none when nothing is left to prefill
        runner.copy(plan.copies)                     # all copies first, in any order
        runner.prefill(plan.prefill)                 # then the chunks, in any order or all at once
        for chunk in plan.prefill:
            pages.commit(chunk.sequence, chunk.end)  # skip this for a chunk that failed, and cancel its job
    rows = scheduler.ready()                         # one generation step for these

Prompts that begin alike are prefilled in consecutive plans of one round, so that the later ones find what the
first has just computed; prompts that differ run in the same plan. A round gives each sequence at most one
chunk, so that a long prompt delays the others but does not stop them. No model, no text, no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..errors import CacheTooSmall, InputError
from .audit import problems
from .pages import Copy, Lead, PageTable
from .sequence import Sequence, common_length

LOOK_AHEAD = 64
"""How many pending jobs that do not fit are passed by in search of one that does."""


class Schedulable(Protocol):
    """What the scheduler knows of a job. Jobs are told apart by identity."""

    skips: int
    """How often a younger job started first; the scheduler counts."""

    @property
    def sequences(self) -> list[Sequence]:
        """One, or two for classifier-free guidance; each takes a row of the batch."""

    @property
    def max_skips(self) -> int | None:
        """After this many no younger job may start first; None: however many."""


J = TypeVar("J", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[J]):
    """Feed the ids from `start` to `end` of a sequence; nothing to feed when they are equal.

    Rows before `start` are valid once `copy`, if there is one, was carried out.
    """

    job: J
    sequence: Sequence
    start: int
    end: int
    copy: Copy | None = None


@dataclass(frozen=True, slots=True)
class Plan(Generic[J]):
    """Chunks that do not depend on each other; every sequence named here gets on with its prompt."""

    prefill: list[Chunk[J]]

    @property
    def copies(self) -> list[Copy]:
        """To be carried out before any chunk. No page is both a source and a target."""
        return [chunk.copy for chunk in self.prefill if chunk.copy is not None]


class _Wave(Generic[J]):
    """A plan in the making: which pages it writes, and what prompts may soon find in them."""

    def __init__(self) -> None:
        self.chunks: list[Chunk[J]] = []
        self.written: set[int] = set()
        self.leads: dict[Lead | None, list[list[int]]] = {}

    def add(self, chunk: Chunk[J], pages: PageTable) -> None:
        """Take a chunk in."""
        sequence, size = chunk.sequence, pages.page_size
        self.chunks.append(chunk)
        for i in range(sequence.cached // size, -(-chunk.end // size)):
            self.written.add(sequence.pages[i])
            if (lead := pages.lead(sequence, i)) is not None:
                self.leads.setdefault(lead, []).append(
                    sequence.ids[i * size : min(chunk.end, (i + 1) * size)]
                )

    def offers(self, pages: PageTable, sequence: Sequence, more: int) -> bool:
        """Whether this plan leaves a page that holds more than `more` rows of use to the sequence."""
        slot = sequence.cached // pages.page_size
        found = self.leads.get(pages.lead(sequence, slot))
        if not found:
            return False
        rest = pages.opening(sequence, slot)
        return more < len(rest) and any(
            len(ids) > more and ids[more] == rest[more] and common_length(ids, rest) > more for ids in found
        )


class Scheduler(Generic[J]):
    """First come, first served, as many at a time as the batch and the cache have room for."""

    def __init__(self, pages: PageTable, max_batch_size: int, chunk: int) -> None:
        if max_batch_size < 1 or chunk < 1:
            raise InputError(
                f"A scheduler needs max_batch_size and chunk of at least 1, found {max_batch_size}, {chunk}."
            )
        self.pages = pages
        self.max_batch_size = max_batch_size
        self.chunk = chunk
        self._pending: OrderedDict[int, J] = OrderedDict()
        self._active: dict[int, J] = {}
        self._filling: dict[int, J] = {}  # active jobs whose prompts are not done
        self._turn: list[tuple[J, Sequence]] = []  # sequences still to be served in this round
        self._rows = 0
        self._stuck: tuple[int, int] | None = None  # the state of things in which nothing could start

    def __contains__(self, job: J) -> bool:
        """Whether a job is pending or active."""
        return id(job) in self._pending or id(job) in self._active

    @property
    def pending(self) -> list[J]:
        """Jobs that wait, oldest first."""
        return list(self._pending.values())

    @property
    def active(self) -> list[J]:
        """Jobs that have pages, in the order they started."""
        return list(self._active.values())

    @property
    def reading(self) -> bool:
        """Whether there are jobs to start, or prompts that are not done."""
        return bool(self._pending or self._filling)

    @property
    def waiting(self) -> int:
        """How many jobs are pending."""
        return len(self._pending)

    @property
    def running(self) -> int:
        """How many jobs are active."""
        return len(self._active)

    @property
    def remaining(self) -> int:
        """How many jobs are pending or active."""
        return len(self._pending) + len(self._active)

    def add(self, job: J) -> None:
        """Queue a job, or say why it can never run."""
        if job in self:
            raise InputError("This job is already in the queue: make a new one for each request.")
        sequences = job.sequences
        if not sequences or any(len(sequence) == 0 for sequence in sequences):
            raise InputError("Input ids cannot be empty: a job needs at least one token to go on from.")
        if any(sequence.pages for sequence in sequences) or len({*map(id, sequences)}) < len(sequences):
            raise InputError("A sequence of this job is in use: make new ones for each job.")
        if len(sequences) > self.max_batch_size:
            raise InputError(
                f"Job requires a minimum batch size of {len(sequences)}, but max_batch_size is "
                f"{self.max_batch_size}: create the generator with max_batch_size={len(sequences)} or more, "
                "and not with paged=False."
            )
        self._check_size(sequences)
        self._pending[id(job)] = job
        self._stuck = None

    def start(self) -> list[J]:
        """Open a round: give pages to pending jobs that fit, and say which.

        A job that does not fit may be overtaken by younger ones, `max_skips` times.
        """
        started = self._admit()
        for job in started:
            del self._pending[id(job)]
            self._filling[id(job)] = job
        self._turn = [
            (job, sequence)
            for job in self._filling.values()
            for sequence in job.sequences
            if not sequence.ready
        ]
        return started

    def plan(self) -> Plan[J] | None:
        """The next chunks of this round, None when there are no more. Commit each plan before the next."""
        if not self._filling:
            return None
        wave: _Wave[J] = _Wave()
        deferred = []
        for job, sequence in self._turn:
            if id(job) in self._active and not self._join(wave, job, sequence):
                deferred.append((job, sequence))
        self._turn = deferred
        return Plan(wave.chunks) if wave.chunks else None

    def ready(self) -> list[J]:
        """Active jobs whose prompts are done, in the order they started."""
        jobs = []
        for job in self._active.values():
            for sequence in job.sequences:
                if sequence.cached != len(sequence.ids) - 1:
                    break
            else:
                jobs.append(job)
        if self._filling:
            for job in jobs:
                self._filling.pop(id(job), None)
        return jobs

    def finish(self, job: J) -> None:
        """Take an active job out; its pages stay as prompt cache until they are needed."""
        del self._active[id(job)]
        self._filling.pop(id(job), None)
        self._rows -= len(job.sequences)
        for sequence in job.sequences:
            self.pages.release(sequence)

    def cancel(self, job: J) -> bool:
        """Take a job out wherever it is, at any moment; False if it is neither pending nor active."""
        self._stuck = None
        waited = self._pending.pop(id(job), None) is not None  # one that is just starting is in both
        if id(job) in self._active:
            self.finish(job)
            return True
        return waited

    def tidied(self) -> bool:
        """Make good what an interrupt (Ctrl-C) left half done: with no job left, nobody has rows or pages.

        False, and nothing is done, while there are jobs.
        """
        if self.remaining:
            return False
        self._filling, self._turn, self._rows = {}, [], 0
        if problems(self.pages, []):
            self.pages.reset()
        return True

    def clear(self) -> list[J]:
        """Take every job out; returns them."""
        jobs = [*self._active.values(), *self._pending.values()]
        for job in jobs:
            self.cancel(job)
        return jobs

    def _check_size(self, sequences: list[Sequence]) -> None:
        need, have, size = self.pages.pages_for(sequences), self.pages.num_pages, self.pages.page_size
        if need <= have:
            return
        prompt = sum(map(len, sequences))
        new = sum(sequence.limit - len(sequence) for sequence in sequences)
        raise CacheTooSmall(
            f"Job requires {need} pages (only {have} available) and cannot be enqueued. Total cache "
            f"allocated is {have} * {size} = {have * size} tokens; the job has {prompt} prompt tokens and up "
            f"to {new} new ones. Shorten the prompt, lower max_new_tokens, or create the cache with "
            f"max_seq_len={need * size} or more."
        )

    def _admit(self) -> list[J]:
        started: list[J] = []
        skipped: list[J] = []
        if self._stuck == (self.pages.version, self._rows):
            return started
        for job in self._pending.values():
            if id(job) in self._active:  # an interrupt came before it had left the queue
                started.append(job)
                continue
            if self._rows >= self.max_batch_size or not self.pages.free or len(skipped) > LOOK_AHEAD:
                break
            sequences = job.sequences
            if self._rows + len(sequences) > self.max_batch_size or not self.pages.fits(sequences):
                if job.max_skips is not None and job.skips >= job.max_skips:
                    break
                skipped.append(job)
                continue
            for passed in skipped:
                passed.skips += 1
            exhausted = any(p.max_skips is not None and p.skips >= p.max_skips for p in skipped)
            self.pages.allocate(sequences)
            self._rows += len(sequences)
            self._active[id(job)] = job
            started.append(job)
            if exhausted:
                break
        if not started:
            self._stuck = (self.pages.version, self._rows)
        return started

    def _join(self, wave: _Wave[J], job: J, sequence: Sequence) -> bool:
        """Give a sequence its chunk in this wave; False if it does better to wait for the next one."""
        self.pages.advance(sequence)
        if sequence.ready:
            return True
        slot, offset = divmod(sequence.cached, self.pages.page_size)
        if sequence.pages[slot] in wave.written:
            return False
        start, copy = sequence.cached, None
        if offset == 0:
            copy = self.pages.partial(sequence)
            start += copy.tokens if copy is not None else 0
            if wave.offers(self.pages, sequence, start - sequence.cached):
                return False
        wave.add(Chunk(job, sequence, start, self._end(sequence, start), copy), self.pages)
        return True

    def _end(self, sequence: Sequence, start: int) -> int:
        """Where a chunk that begins there ends: on a page boundary, if there is one within reach."""
        size = self.pages.page_size
        boundary = (start + self.chunk) // size * size
        return min(boundary if boundary > start else start + self.chunk, len(sequence) - 1)
