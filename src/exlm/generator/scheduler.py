"""The scheduler: admission, chunked prefill and the decode batch. It decides; the engine acts in each step:

    started = scheduler.admit()                        # pending jobs that fit have their pages now
    while chunks := scheduler.next_prefill_batch():    # usually once; [] when no prompt has a chunk left
        runner.copy_pages(copies of the chunks)        # all copies first, in any order
        for chunk in chunks:                           # then the chunks, in any order
            runner.prefill(chunk.sequence, chunk.start, chunk.end)
            page_table.mark_computed(chunk.sequence, chunk.end)  # if it failed, cancel the job instead
    jobs = scheduler.decode_batch()                    # one decode pass for these

Prompts with a common prefix are prefilled in consecutive batches of one step, so that the later ones find
what the first has computed; prompts without one run in the same batch. A step gives each sequence at most
one chunk, so that a long prompt delays other jobs but does not stop them.

Of a job it reads `sequences` and `max_skips`, and counts `skips`. Jobs are compared by identity.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CacheTooSmall, InputError
from .page_table import PageCopy, PageTable, StartKey
from .token_sequence import TokenSequence, common_prefix_length

if TYPE_CHECKING:
    from .job import Job

RECOMPUTED_CHUNK = 8
"""Tokens of a chunk that computes generated text again. So few run on the kernels that decoding uses, so that keys,
values and recurrent states get the bits that they had before."""

MAX_ADMISSION_SCAN = 64
"""How many pending jobs that do not fit are skipped in search of one that does."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The ids from `start` to `end` of a sequence, to be computed; none if they are equal.

    `copy`, if there is one, provides the keys and values before `start`.
    """

    job: Job
    sequence: TokenSequence
    start: int
    end: int
    copy: PageCopy | None = None


class _PrefillBatchBuilder:
    """Collects chunks, the pages they write, and the ids there that other prompts may reuse afterwards."""

    def __init__(self) -> None:
        self.chunks: list[PrefillChunk] = []
        self.written_pages: set[int] = set()
        self.ids_by_key: dict[StartKey | None, list[list[int]]] = {}

    def add(self, chunk: PrefillChunk, page_table: PageTable) -> None:
        sequence, size = chunk.sequence, page_table.page_size
        self.chunks.append(chunk)
        for i in range(sequence.num_computed_tokens // size, -(-chunk.end // size)):
            self.written_pages.add(sequence.pages[i])
            if (start_key := page_table.start_key(sequence, i)) is not None:
                self.ids_by_key.setdefault(start_key, []).append(
                    sequence.ids[i * size : min(chunk.end, (i + 1) * size)]
                )

    def computes_longer_match(self, page_table: PageTable, sequence: TokenSequence, num_tokens: int) -> bool:
        """Whether the batch writes a page of which the sequence can reuse more than `num_tokens` tokens."""
        page_index = sequence.num_computed_tokens // page_table.page_size
        found = self.ids_by_key.get(page_table.start_key(sequence, page_index))
        if not found:
            return False
        wanted_ids = page_table.copyable_ids(sequence, page_index)
        return num_tokens < len(wanted_ids) and any(
            len(ids) > num_tokens
            and ids[num_tokens] == wanted_ids[num_tokens]
            and common_prefix_length(ids, wanted_ids) > num_tokens
            for ids in found
        )


class Scheduler:
    """Starts jobs in the order they come, as many at a time as fit into the batch and the cache."""

    def __init__(self, page_table: PageTable, max_batch_size: int, chunk_size: int) -> None:
        if max_batch_size < 1 or chunk_size < 1:
            raise InputError(
                f"A scheduler needs max_batch_size and chunk of at least 1, found {max_batch_size} and {chunk_size}."
            )
        self.page_table, self.max_batch_size, self.chunk_size = page_table, max_batch_size, chunk_size
        self._pending: OrderedDict[int, Job] = OrderedDict()
        self._active: dict[int, Job] = {}
        self._prefilling: dict[int, Job] = {}  # active jobs whose prompts are not done
        self._recomputing: set[int] = set()  # active jobs that compute generated tokens again
        self._prefill_queue: list[tuple[Job, TokenSequence]] = []  # sequences without a chunk in this step yet
        self._num_rows = 0  # rows of the batch that active jobs take
        self._admission_blocked_at: tuple[int, int] | None = None
        """The capacity version and row count at which no pending job could start."""

    def __contains__(self, job: Job) -> bool:
        """Whether a job is pending or active."""
        return id(job) in self._pending or id(job) in self._active

    @property
    def pending(self) -> list[Job]:
        """Jobs that wait, oldest first."""
        return list(self._pending.values())

    @property
    def active(self) -> list[Job]:
        """Jobs that have pages, in the order they started."""
        return list(self._active.values())

    @property
    def has_prefill(self) -> bool:
        """Whether there are jobs to start, or prompts that are not done."""
        return bool(self._pending or self._prefilling)

    @property
    def num_pending(self) -> int:
        """How many jobs are pending."""
        return len(self._pending)

    @property
    def num_active(self) -> int:
        """How many jobs are active."""
        return len(self._active)

    @property
    def num_unfinished(self) -> int:
        """How many jobs are pending or active."""
        return len(self._pending) + len(self._active)

    def add(self, job: Job) -> None:
        """Queue a job; raises InputError or CacheTooSmall for one that can never run."""
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
        self._admission_blocked_at = None

    def admit(self) -> list[Job]:
        """Allocate pages to pending jobs that fit, which are returned, and start a step's prefill.

        A job that does not fit may be overtaken by younger ones, `max_skips` times.
        """
        if not (self._pending or self._prefilling):
            return []
        started = self._allocate_pending()
        for job in started:
            del self._pending[id(job)]
            self._prefilling[id(job)] = job
        self._prefill_queue = [
            (job, sequence)
            for job in self._prefilling.values()
            for sequence in job.sequences
            if not sequence.prefill_done
        ]
        return started

    def next_prefill_batch(self) -> list[PrefillChunk]:
        """Chunks of this step that do not depend on each other, [] when there are no more.

        Make all their copies first: no page is both a source and a target. Call `PageTable.mark_computed` for
        every chunk before the next batch.
        """
        if not self._prefilling:
            return []
        builder = _PrefillBatchBuilder()
        deferred = []
        for job, sequence in self._prefill_queue:
            if id(job) in self._active and not self._add_chunk(builder, job, sequence):
                deferred.append((job, sequence))
        self._prefill_queue = deferred
        return builder.chunks

    def decode_batch(self) -> list[Job]:
        """Active jobs whose prompts are done, in the order they started."""
        jobs = []
        for job in self._active.values():
            for sequence in job.sequences:
                if sequence.num_computed_tokens != len(sequence.ids) - 1:
                    break
            else:
                jobs.append(job)
        if self._prefilling:
            for job in jobs:
                self._prefilling.pop(id(job), None)
                self._recomputing.discard(id(job))
        return jobs

    def resume_prefill(self, job: Job) -> None:
        """Compute again what an active job lost in a rewind, as if it were the rest of its prompt."""
        self._prefilling[id(job)] = job
        self._recomputing.add(id(job))

    def finish(self, job: Job) -> None:
        """Remove an active job; its pages stay in the prefix cache until they are evicted."""
        del self._active[id(job)]
        self._prefilling.pop(id(job), None)
        self._recomputing.discard(id(job))
        self._num_rows -= len(job.sequences)
        for sequence in job.sequences:
            self.page_table.release(sequence)

    def cancel(self, job: Job) -> bool:
        """Remove a job at any moment; False if it is neither pending nor active."""
        self._admission_blocked_at = None
        was_pending = self._pending.pop(id(job), None) is not None  # while `admit` runs, a job may be both
        if id(job) in self._active:
            self.finish(job)
            return True
        return was_pending

    def reset_after_interrupt(self) -> bool:
        """Repair what an interrupt (Ctrl-C) left inconsistent; while there are jobs, only return False.

        The prefix cache is kept if it is consistent.
        """
        if self.num_unfinished:
            return False
        self._prefilling, self._prefill_queue, self._num_rows = {}, [], 0
        self._recomputing.clear()
        if self.page_table.violations():
            self.page_table.reset()
        return True

    def _check_size(self, sequences: list[TokenSequence]) -> None:
        need, have = self.page_table.count_pages(sequences), self.page_table.num_pages
        size = self.page_table.page_size
        if need <= have:
            return
        prompt = sum(map(len, sequences))
        new = sum(sequence.max_length - len(sequence) for sequence in sequences)
        raise CacheTooSmall(
            f"Job requires {need} pages (only {have} available) and cannot be enqueued. Total cache "
            f"allocated is {have} * {size} = {have * size} tokens; the job has {prompt} prompt tokens and up "
            f"to {new} new ones. Shorten the prompt, lower max_new_tokens, or create the cache with "
            f"max_seq_len={need * size} or more."
        )

    def _allocate_pending(self) -> list[Job]:
        started: list[Job] = []
        skipped: list[Job] = []
        if self._admission_blocked_at == (self.page_table.capacity_version, self._num_rows):
            return started
        for job in self._pending.values():
            if id(job) in self._active:  # an interrupt came before it left the queue
                started.append(job)
                continue
            if (
                self._num_rows >= self.max_batch_size
                or not self.page_table.num_free_pages
                or len(skipped) > MAX_ADMISSION_SCAN
            ):
                break
            sequences = job.sequences
            if self._num_rows + len(sequences) > self.max_batch_size or not self.page_table.fits(sequences):
                if job.max_skips is not None and job.skips >= job.max_skips:
                    break
                skipped.append(job)
                continue
            for overtaken in skipped:
                overtaken.skips += 1
            exhausted = any(p.max_skips is not None and p.skips >= p.max_skips for p in skipped)
            self.page_table.allocate(sequences)
            self._num_rows += len(sequences)
            self._active[id(job)] = job
            started.append(job)
            if exhausted:
                break
        if not started:
            self._admission_blocked_at = (self.page_table.capacity_version, self._num_rows)
        return started

    def _add_chunk(self, builder: _PrefillBatchBuilder, job: Job, sequence: TokenSequence) -> bool:
        """Add a chunk of a sequence to this batch; False if the next batch lets it reuse more."""
        self.page_table.skip_cached_tokens(sequence)
        if sequence.prefill_done:
            return True
        page_index, offset = divmod(sequence.num_computed_tokens, self.page_table.page_size)
        if sequence.pages[page_index] in builder.written_pages:
            return False
        start, copy = sequence.num_computed_tokens, None
        if offset == 0:
            copy = self.page_table.plan_partial_copy(sequence)
            start += copy.num_tokens if copy is not None else 0
            if builder.computes_longer_match(self.page_table, sequence, start - sequence.num_computed_tokens):
                return False
        size = min(self.chunk_size, RECOMPUTED_CHUNK) if id(job) in self._recomputing else self.chunk_size
        builder.add(PrefillChunk(job, sequence, start, self._chunk_end(sequence, start, size), copy), self.page_table)
        return True

    def _chunk_end(self, sequence: TokenSequence, start: int, chunk_size: int) -> int:
        """Where a chunk from `start` on ends: on a page boundary, if one is within `chunk_size`."""
        size = self.page_table.page_size
        boundary = (start + chunk_size) // size * size
        return min(boundary if boundary > start else start + chunk_size, len(sequence) - 1)
