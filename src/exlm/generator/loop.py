"""The loop: plan, run, sample, decide. Each stage returns a value; here values become actions.

No tensor is touched in this room: logits come from a `Runner` and go to a `Sampler` unopened.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from ..errors import ExlmError, InputError
from ..sampling import Row, Sampler
from . import results
from .draft import Drafter, NoDraft
from .job import Job, Texts
from .pages import Copy, PageTable
from .results import Result, Sampled
from .scheduler import Scheduler
from .sequence import Sequence as Tokens
from .verdicts import Emit, Rewind, Stop


class Runner(Protocol):
    """All the loop knows of a model and its cache."""

    def copy(self, orders: Iterable[Copy]) -> None:
        """Duplicate the leading tokens of pages."""
        ...

    def prefill(self, sequence: Tokens, start: int, stop: int) -> None:
        """Compute keys and values of a stretch of ids."""
        ...

    def decode(
        self, sequences: Sequence[Tokens], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Sequence[Any]:
        """Logits (tokens, vocabulary) for each sequence."""
        ...


class Loop:
    """Jobs in, results out, over one runner and one page table."""

    def __init__(
        self,
        runner: Runner,
        pages: PageTable,
        texts: Texts,
        vocab: int,
        *,
        max_batch_size: int = 16,
        chunk: int = 2048,
        max_length: int | None = None,
        drafter: Drafter | None = None,
        draft_tokens: int = 0,
    ) -> None:
        self.runner, self.pages, self.texts, self.vocab = runner, pages, texts, vocab
        self.scheduler: Scheduler[Job] = Scheduler(pages, max_batch_size, chunk)
        self.max_length = max_length
        self.drafter = drafter or NoDraft()
        self.draft_tokens = draft_tokens
        self.sampler = Sampler(None, vocab)
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="exlm-filter")
        self._serial = 0

    @property
    def busy(self) -> bool:
        """Whether any job is waiting or running."""
        return self.scheduler.remaining > 0

    def enqueue(self, job: Job) -> int:
        """Take a job, or say why it can never run."""
        for prompt in job.prompts:
            total = len(prompt) + job.max_new_tokens
            if self.max_length is not None and total > self.max_length:
                raise InputError(
                    f"{len(prompt)} prompt and {job.max_new_tokens} new tokens exceed the model's length of "
                    f"{self.max_length}: lower max_new_tokens or shorten the prompt."
                )
        if job.serial_number >= 0:
            raise InputError(f"{job!r} was enqueued before: a job runs once, make a new one.")
        self.scheduler.add(job)
        try:
            job.prepare(self._serial, self.texts, self.vocab)
        except BaseException:
            self.scheduler.cancel(job)
            raise
        job.drafting = self.draft_tokens > 0
        job.draft_length = max(1, self.draft_tokens)
        self._serial += 1
        return job.serial_number

    def cancel(self, job: Job) -> None:
        """Drop a job, wherever it is; nothing for one that is finished or unknown."""
        if self.scheduler.cancel(job):
            self._let_go(job)

    def clear(self) -> None:
        """Drop every job."""
        for job in self.scheduler.clear():
            self._let_go(job)

    def step(self) -> list[Result]:
        """One round: start what fits, read a chunk of each prompt, a token or more for everybody ready."""
        out: list[Result] = [results.started(job) for job in self.scheduler.start()]
        out += self._prefill()
        ready = self.scheduler.ready()
        if ready:
            out += self._decode(ready)
        return out

    def _prefill(self) -> list[Result]:
        """Run this round's chunks; one result for each job that got further with its prompt."""
        moved: dict[int, Job] = {}
        while plan := self.scheduler.plan():
            now = time.perf_counter()
            copies = plan.copies
            if copies:
                self.runner.copy(copies)
                self.drafter.copy(copies)
            for chunk in plan.prefill:
                chunk.job.times.began = chunk.job.times.began or now
                if chunk.end > chunk.start:
                    self.runner.prefill(chunk.sequence, chunk.start, chunk.end)
                    self.drafter.prefill(chunk.sequence, chunk.start, chunk.end)
                self.pages.commit(chunk.sequence, chunk.end)
                moved[id(chunk.job)] = chunk.job
        out: list[Result] = []
        for job in moved.values():
            done = sum(sequence.cached for sequence in job.sequences)
            out.append(results.prefilled(job, done, sum(len(s.ids) - 1 for s in job.sequences)))
        return out

    def _decode(self, jobs: Sequence[Job]) -> list[Result]:
        """Guess, run, then sample position by position while the guesses hold."""
        now = time.perf_counter()
        for job in jobs:
            job.times.began = job.times.began or now
            job.times.first = job.times.first or now
        guesses = self.drafter.propose(
            [job.sequences[0] for job in jobs], [self._guesses(job) for job in jobs]
        )
        sequences, past, fed, owner = [], [], [], []
        for index, (job, guess) in enumerate(zip(jobs, guesses, strict=True)):
            for sequence in job.sequences:
                sequences.append(sequence)
                past.append(sequence.cached)
                fed.append([*sequence.ids[sequence.cached :], *guess])
                owner.append(index)
        for job in jobs:
            if job.stack is not None and job.filtering:
                job.stack.start_background(self._pool)
        logits = self.runner.decode(sequences, past, fed)
        rows: list[list[Any]] = [[] for _ in jobs]
        for index, answer in zip(owner, logits, strict=True):
            rows[index].append(answer)
        return self._consume(jobs, rows, guesses)

    def _guesses(self, job: Job) -> int:
        """How many guesses are worth making: none while healing, guided or filtered, never past the limit."""
        if not job.drafting or len(job.sequences) > 1 or job.output.healing or job.stack is not None:
            return 0
        return min(job.draft_length, self.draft_tokens, job.max_new_tokens - job.new_tokens - 1)

    def _consume(
        self, jobs: Sequence[Job], rows: Sequence[Sequence[Any]], guesses: Sequence[Sequence[int]]
    ) -> list[Result]:
        """Sample position after position, for every job whose guesses have been right so far."""
        out: list[Result] = []
        going = list(range(len(jobs)))
        position = 0
        while going:
            asked: list[tuple[int, Row]] = []
            for index in going:
                try:
                    asked.append((index, self._row(jobs[index])))
                except ExlmError as error:
                    out.append(self._fail(jobs[index], error))
            raw = [[answer[position] for answer in rows[index]] for index, _ in asked]
            going = []
            for (index, _), sampled in zip(asked, self._sample(raw, [row for _, row in asked]), strict=True):
                job, guess = jobs[index], guesses[index]
                if isinstance(sampled, Exception):
                    out.append(self._fail(job, sampled))
                    continue
                out.append(self._accept(job, sampled))
                agreed = position < len(guess) and guess[position] == sampled.token
                if agreed:
                    job.accepted_draft_tokens += 1
                if agreed and not job.is_finished and not job.blocked:
                    going.append(index)
                elif guess:
                    self._judge(job, position + agreed, len(guess))
            position += 1
        return out

    def _sample(self, raw: Sequence[Sequence[Any]], rows: list[Row]) -> list[Sampled | Exception]:
        """A token for every row, or what is wrong with it; one row's mistake is not the others'."""
        if not rows:
            return []
        try:
            picks = self.sampler.sample_batch(results.stacked(raw), rows)
        except ExlmError as error:
            if len(rows) == 1:
                return [error]
            return [one for pair, row in zip(raw, rows, strict=True) for one in self._sample([pair], [row])]
        return results.unpacked(picks, rows, [pair[0] for pair in raw])

    def _row(self, job: Job) -> Row:
        """What the sampler is told of a job's next token."""
        allowed: Any = None
        if job.output.healing:
            allowed = job.healing
        elif job.stack is not None:
            if not job.filtering:
                job.stack.begin("")
                job.filtering = True
            allowed = results.words(job.stack.allowed().mask)
        return Row(
            settings=job.gen_settings,
            state=job.state,
            blocked=job.forbidden(),
            allowed=allowed,
            want_probs=job.return_probs,
            want_top=job.return_top_tokens,
            guided=len(job.sequences) == 2,
        )

    def _judge(self, job: Job, right: int, guessed: int) -> None:
        """Learn from a window: longer guesses when all were right, shorter when one was wrong."""
        job.rejected_draft_tokens += guessed - right
        full = right == guessed
        job.draft_length = min(self.draft_tokens, job.draft_length + 1) if full else max(1, right + 1)

    def _accept(self, job: Job, sampled: Sampled) -> Result:
        """One sampled token: into the sequences, past the output, and whatever that decides is done."""
        token = sampled.token
        job.pending.append(sampled if job.return_logits else replace(sampled, logits=None))
        job.blocked = ()
        for sequence in job.sequences:
            self.pages.commit(sequence, len(sequence.ids))
            sequence.ids.append(token)
        job.state.accept(token)
        ends = False
        if job.stack is not None and job.filtering:
            ends = token in job.stack.allowed().end
            if not ends:
                job.stack.feed(token)
        verdict = job.output.push(token, ends)
        match verdict:
            case Emit(text=text, tokens=count):
                job.full_completion += text
                self._settle(job)
                return results.streamed(job, text, self._take(job, count))
            case Stop():
                return self._stop(job, verdict)
            case Rewind():
                self._rewind(job, verdict)
                return results.rewound(job, verdict)
        self._settle(job)
        return results.streamed(job)

    def _settle(self, job: Job) -> None:
        """Name the pages whose text can no longer be taken back."""
        held = job.output.held if job.banned_strings else 0
        for sequence in job.sequences:
            self.pages.settle(sequence, len(sequence.ids) - held)

    def _rewind(self, job: Job, verdict: Rewind) -> None:
        for _ in range(verdict.count):
            job.pending.pop()
        for sequence in job.sequences:
            self.pages.rewind(sequence, len(sequence.ids) - verdict.count)
        job.state.truncate(len(job.sequences[0].ids))
        job.blocked = verdict.blocked

    def _stop(self, job: Job, verdict: Stop) -> Result:
        job.full_completion += verdict.text
        shown = self._take(job, verdict.tokens)
        held = self._take(job, len(job.pending))
        self._end(job)
        return results.stopped(job, verdict, shown, held)

    def _fail(self, job: Job, error: Exception) -> Result:
        self._end(job)
        return results.failed(job, error)

    def _end(self, job: Job) -> None:
        job.times.ended = time.perf_counter()
        self.scheduler.finish(job)
        self._let_go(job)

    def _let_go(self, job: Job) -> None:
        job.is_finished = True
        for sequence in job.sequences:
            self.drafter.forget(sequence)
        if job.stack is not None:
            job.stack.close()

    @staticmethod
    def _take(job: Job, count: int) -> list[Sampled]:
        return [job.pending.popleft() for _ in range(count)]
