"""Random operations on the page table and the scheduler; every invariant is checked after every step.

The driver does what a generator does (start, copy, prefill, commit, decode, settle, rewind, finish) and what
users do to it (queue anything, cancel at any moment), with failures in between. The runner verifies that
every row that is read was computed from exactly that prefix.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from exlm.errors import CacheTooSmall, InputError
from exlm.generator.page_table import Page, PageTable, PageTableEntry
from exlm.generator.scheduler import PrefillChunk, Scheduler
from exlm.generator.token_sequence import TokenSequence
from exlm.testing import ScriptedRunner
from tests.generator.page_table_oracle import check_invariants

IMAGE = 1_000_000_000


@dataclass(eq=False)
class Job:
    """The part of a job that the scheduler uses."""

    sequences: list[TokenSequence]
    max_skips: int | None = 4
    skips: int = 0


class CountingPageTable(PageTable):
    """A page table that counts internal events."""

    def __init__(self, num_pages: int, page_size: int, events: Counter[str]) -> None:
        super().__init__(num_pages, page_size)
        self.counts = events

    def _use_shared_page(self, sequence: TokenSequence, i: int, other: Page) -> Page:
        self.counts["switches"] += sequence.pages[i] != other.index
        return super()._use_shared_page(sequence, i, other)

    def _assign_page(self, page: Page, slots: list[PageTableEntry]) -> None:
        self.counts["rows kept in place"] += bool(page.ids)
        super()._assign_page(page, slots)


class SchedulerFuzz:
    """Random operations on one scheduler and its page table."""

    def __init__(self, rng: Random, page_size: int = 4) -> None:
        self.rng = rng
        pages = rng.randint(2, 24)
        self.counts: Counter[str] = Counter()
        self.page_table = CountingPageTable(pages, page_size, self.counts)
        self.scheduler = Scheduler(self.page_table, rng.randint(1, 6), rng.randint(1, 4 * page_size))
        self.runner = ScriptedRunner(lambda ids: [], pages, page_size, vocab_size=0)
        self.earlier_ids: list[list[int]] = []
        self.computed: Counter[int] = Counter()
        self.prompt_lengths: dict[int, int] = {}

    def check(self) -> None:
        """Check every invariant."""
        self.counts["checks"] += 1
        check_invariants(self.page_table, (s for job in self.scheduler.active for s in job.sequences))

    def step(self) -> None:
        """Perform one random operation."""
        self.counts["steps"] += 1
        draw = self.rng.random()
        if draw < 0.3 and len(self.scheduler.pending) < 12:
            for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
                self.enqueue()
        elif draw < 0.36:
            self.cancel_any(*self.scheduler.pending)
        elif draw < 0.365:
            for job in [*self.scheduler.active, *self.scheduler.pending]:
                self.scheduler.cancel(job)
        elif draw < 0.37:
            self.page_table.clear_prefix_cache()
        else:
            self.round()
        self.check()

    def drain(self) -> None:
        """Run until the queue is empty; then every page must be free."""
        self.rng = Random(len(self.earlier_ids))  # the walk's own may be a constant
        for _ in range(20_000):
            if not self.scheduler.num_unfinished:
                break
            self.counts["steps"] += 1
            self.round()
            self.check()
        assert self.scheduler.num_unfinished == 0
        assert self.page_table.num_free_pages == self.page_table.num_pages

    def enqueue(self) -> None:
        """A random request: a new prompt, a shared prefix, the continuation of an answer, or a guidance pair."""
        rng = self.rng
        room = self.page_table.num_pages * self.page_table.page_size
        salt = rng.choice((b"", b"", b"", b"other"))
        new = rng.choice((0, 1, rng.randint(1, 20)))
        prompts = [self.prompt() for _ in range(rng.choice((1, 1, 1, 2)))]
        if len(prompts) > 1 and rng.random() < 0.3:
            prompts[1] = list(prompts[0])
        job = Job([TokenSequence(ids, salt, len(ids) + new) for ids in prompts], rng.choice((None, 0, 1, 4, 4)))
        need = self.page_table.count_pages(job.sequences)
        try:
            self.scheduler.add(job)
        except CacheTooSmall:
            assert need > self.page_table.num_pages
            self.counts["too large"] += 1
            return
        except InputError:
            assert len(prompts) > self.scheduler.max_batch_size
            return
        assert need * self.page_table.page_size <= room
        for sequence in job.sequences:
            self.prompt_lengths[id(sequence)] = len(sequence) - 1
            self.computed[id(sequence)] = 0
        self.earlier_ids.extend(sequence.ids for sequence in job.sequences)  # grows while the answer does
        del self.earlier_ids[:-20]

    def prompt(self) -> list[int]:
        """Random ids that often share a prefix with others."""
        rng = self.rng
        parts = ((1, 2, 3, 4), (1, 2, 3, 1), (2, 2), (1,), (3, 1, 4, 1, 5), (IMAGE, IMAGE + 1, IMAGE + 2))
        ids: list[int] = []
        if self.earlier_ids and rng.random() < 0.6:
            ids = list(rng.choice(self.earlier_ids))
            if rng.random() < 0.4:
                ids = ids[: rng.randint(0, len(ids))]
        for _ in range(rng.randint(0 if ids else 1, 4)):
            ids += rng.choice(parts)
        return ids[:60]

    def cancel(self, job: Job) -> None:
        """Cancel a job, whether it is pending or active."""
        self.counts["cancels"] += 1
        assert self.scheduler.cancel(job)
        assert not self.scheduler.cancel(job)

    def cancel_any(self, *others: Job) -> None:
        """Cancel one of the active jobs or of these."""
        if jobs := [*self.scheduler.active, *others]:
            self.cancel(self.rng.choice(jobs))

    def round(self) -> None:
        """One iteration of a generator."""
        self.check_admission()
        self.check()
        while batch := self.scheduler.next_prefill_batch():
            self.counts["plans"] += 1
            self.prefill(batch)
            self.check()
        for job in self.scheduler.decode_batch():
            if self.rng.random() < 0.01:
                self.cancel_any()
            if job.sequences[0].pages:
                self.decode(job)
                self.check()

    def check_admission(self) -> None:
        """Admit jobs and check that the order was fair."""
        pending = self.scheduler.pending
        before = [job.skips for job in pending]
        started = self.scheduler.admit()
        rows = sum(len(job.sequences) for job in self.scheduler.active)
        assert rows <= self.scheduler.max_batch_size
        assert started == [job for job in pending if job in started]
        for n, job in enumerate(pending):
            num_overtaken_by = sum(other in started for other in pending[n + 1 :])
            if job not in started:
                assert job.skips == before[n] + num_overtaken_by
                assert job.max_skips is None or job.skips <= job.max_skips
                self.counts["overtaken"] += num_overtaken_by
        if not started and not self.scheduler.active:
            assert not pending
        for job in started:
            self.counts["started"] += 1
            self.counts["reused"] += sum(sequence.num_computed_tokens > 0 for sequence in job.sequences)

    def prefill(self, batch: list[PrefillChunk]) -> None:
        """Run a prefill batch in random order, with an occasional failure or cancellation."""
        self.check_independent(batch)
        copies = [chunk.copy for chunk in batch if chunk.copy is not None]
        self.rng.shuffle(copies)
        self.runner.copy_pages(copies)
        self.counts["copies"] += len(copies)
        chunks = list(batch)
        self.rng.shuffle(chunks)
        for chunk in chunks:
            if self.rng.random() < 0.01:
                self.cancel_any()
            if not chunk.sequence.pages:
                continue
            if self.rng.random() < 0.02:
                self.counts["failures"] += 1
                self.runner.invalidate_rows(chunk.sequence, chunk.start, chunk.end)
                self.cancel(chunk.job)
                continue
            self.runner.prefill(chunk.sequence, chunk.start, chunk.end)
            self.computed[id(chunk.sequence)] += chunk.end - chunk.start
        for chunk in self.rng.sample(chunks, len(chunks)):
            self.page_table.mark_computed(chunk.sequence, chunk.end)
            self.check_computed(chunk)

    def check_computed(self, chunk: PrefillChunk) -> None:
        """Check that every token of a prompt was either computed or found in the cache."""
        sequence = chunk.sequence
        if sequence.pages:
            assert sequence.num_computed_tokens == self.computed[id(sequence)] + sequence.cached_tokens
            assert sequence.cached_pages * self.page_table.page_size <= sequence.cached_tokens

    def check_independent(self, batch: list[PrefillChunk]) -> None:
        """Check that no chunk reads or overwrites rows that another chunk of the batch writes, nor valid rows."""
        size = self.page_table.page_size
        copies = [chunk.copy for chunk in batch if chunk.copy is not None]
        assert not {copy.source for copy in copies} & {copy.target for copy in copies}
        written: set[int] = set()
        for chunk in batch:
            sequence = chunk.sequence
            assert sequence.num_computed_tokens <= chunk.start <= chunk.end < len(sequence)
            assert chunk.end > sequence.num_computed_tokens
            assert chunk.end - chunk.start <= self.scheduler.chunk_size
            assert not written & set(sequence.pages[: -(-chunk.end // size)])
            if chunk.copy is not None:
                assert chunk.copy.num_tokens == chunk.start - sequence.num_computed_tokens >= 2
                assert chunk.copy.num_tokens <= self.page_table.num_cached_tokens(chunk.copy.source)
                assert self.page_table.num_cached_tokens(chunk.copy.target) == 0
            for i in range(sequence.num_computed_tokens // size, -(-chunk.end // size)):
                assert self.page_table.num_cached_tokens(sequence.pages[i]) <= max(
                    0, sequence.num_computed_tokens - i * size
                )
                written.add(sequence.pages[i])
        assert len({id(chunk.sequence) for chunk in batch}) == len(batch)

    def decode(self, job: Job) -> None:
        """Feed the last id and a draft, accept some of it, then finalize or rewind what was accepted."""
        rng = self.rng
        room = min(sequence.max_length - len(sequence) for sequence in job.sequences)
        if room <= 0:
            self.finish(job)
            return
        guesses = [self.token(job.sequences[0], n) for n in range(min(rng.choice((0, 0, 1, 3)), room - 1))]
        for sequence in job.sequences:
            assert sequence.prefill_done
            self.runner.decode([sequence], [sequence.num_computed_tokens], [[sequence.ids[-1], *guesses]])
        accepted = guesses[: rng.randint(0, len(guesses))]
        for token in [*accepted, self.token(job.sequences[0], 0)]:
            for sequence in job.sequences:
                self.page_table.mark_computed(sequence, len(sequence))
                sequence.ids.append(token)
            if not self.finalize_or_rewind(job):
                return

    def finalize_or_rewind(self, job: Job) -> bool:
        """Finalize or rewind after a token; return whether the next accepted token still applies."""
        draw = self.rng.random()
        first = job.sequences[0]
        unfinalized = len(first) - first.num_final_tokens
        if draw < 0.35:
            keep = self.rng.choice((0, 0, 1, 2))
            for sequence in job.sequences:
                self.page_table.mark_final(sequence, len(sequence) - keep)
        elif draw < 0.45 and unfinalized:
            self.counts["rewinds"] += 1
            back = self.rng.choice((unfinalized, self.rng.randint(1, unfinalized)))
            for sequence in job.sequences:
                size = self.page_table.page_size
                self.counts["page rewinds"] += (len(sequence) - 2) // size > (len(sequence) - back - 1) // size
                self.page_table.rewind(sequence, len(sequence) - back)
            return False
        elif draw < 0.47:
            self.finish(job)
            return False
        return True

    def finish(self, job: Job) -> None:
        """Finish a job."""
        for sequence in job.sequences:
            assert self.prompt_lengths[id(sequence)] == self.computed[id(sequence)] + sequence.cached_tokens
        self.scheduler.finish(job)
        self.counts["finished"] += 1

    def token(self, sequence: TokenSequence, n: int) -> int:
        """The next id, mostly a function of the prefix, so that equal texts have equal continuations."""
        if self.rng.random() < 0.15:
            return self.rng.randint(1, 5)
        return (sum(sequence.ids[-3:]) + n) % 4 + 1
