"""The loop: plan, run, sample, decide. Each stage returns a value; here values become actions.

No tensor is touched in this room: logits come from a `Runner` and go to a `Sampler` unopened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ..errors import ExlmError, InputError, QueueFull
from ..filters.threads import Threads
from ..sampling import Sampler, call_hooks
from . import results
from .draft import Drafter, NoDraft, Pace
from .job import Job, Texts
from .lookahead import Launcher, Lookahead
from .pages import Copy, PageTable
from .results import Result, Sampled, StreamingResult
from .scheduler import Scheduler
from .sequence import Sequence as Tokens
from .verdicts import Emit, Rewind, Stop, Verdict


class Runner(Launcher, Protocol):
    """All the loop knows of a model and its cache."""

    def copy(self, orders: Iterable[Copy]) -> None:
        """Duplicate the leading tokens of pages."""
        ...

    def prefill(self, sequence: Tokens, start: int, stop: int) -> None:
        """Compute keys and values of a stretch of ids."""
        ...

    def decode(
        self, sequences: Sequence[Tokens], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Any:
        """Logits (tokens, vocabulary) for each sequence: a list, or one tensor if all feed equally many."""
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
        max_queue: int | None = None,
        drafter: Drafter | None = None,
        draft_tokens: int = 0,
        extras: Callable[[list[int], Any, Any], Any] | None = None,
    ) -> None:
        """`max_length` is the longest a sequence may become, `max_queue` how many jobs may wait to start.

        `extras` makes of ids, adapters and embeddings what the runner must know of them.
        """
        self.runner, self.pages, self.texts, self.vocab = runner, pages, texts, vocab
        self.scheduler: Scheduler[Job] = Scheduler(pages, max_batch_size, chunk)
        self.max_length, self.max_queue = max_length, max_queue
        self.drafter = drafter or NoDraft()
        self.draft_tokens = draft_tokens
        self.extras = extras
        self.loras: Any = None
        """Adapters of jobs that do not say which they want."""
        self.key: dict[str, bytes] = {}
        """What besides ids the keys and values of every job depend on, by what it is: see `Job.key`."""
        self.sampler = Sampler(texts, vocab)
        self._ahead = Lookahead(runner)
        self._pool = Threads()
        self._serial = 0
        self._cut = False  # in the midst of a round; after it only if an interrupt or an error has ended it
        self._adapted: dict[bytes, dict[int, Job]] = {}  # by adapters, which may be unloaded under them

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
        if self.max_queue is not None and self.scheduler.waiting >= self.max_queue:
            raise QueueFull(
                f"{self.scheduler.waiting} jobs are waiting and max_queue is {self.max_queue}: try again "
                "when some have started, or create the generator with a longer queue."
            )
        self._equip(job)
        job.seal(self.key)
        self._cut = self._cut and not self.scheduler.tidied()
        try:
            self.scheduler.add(job)
            job.prepare(self._serial, self.texts, self.vocab)
        except BaseException:
            self.scheduler.cancel(job)
            raise
        if adapters := job.key.get("adapters"):
            self._adapted.setdefault(adapters, {})[id(job)] = job
        job.pace = Pace(self.draft_tokens) if self.draft_tokens else job.pace
        self._serial += 1
        return job.serial_number

    def cancel(self, job: Job) -> None:
        """Drop a job, wherever it is; nothing for one that is finished or unknown."""
        if job in self.scheduler:
            cut, self._cut = self._cut, True
            self._let_go(job)
            try:
                self.scheduler.cancel(job)
            except LookupError:  # what an interrupt left half done; `tidied` makes it good
                if not cut:
                    raise
            self._cut = cut

    def clear(self) -> None:
        """Drop every job."""
        for job in [*self.scheduler.active, *self.scheduler.pending]:
            self.cancel(job)

    def step(self) -> list[Result]:
        """One round: start what fits, read a chunk of each prompt, a token or more for everybody ready."""
        out = self.read()
        ready = self.scheduler.ready()
        if ready:
            self._cut = True
            out += self._decode(ready)
            self._cut = False
        return out

    def read(self) -> list[Result]:
        """The first half of a round: start what fits and read a chunk of each prompt; nobody gets a token."""
        out: list[Result] = [*self._orphans()] if self._adapted else []
        if self.scheduler.reading:
            self._cut = True
            out += map(results.started, self.scheduler.start())
            out += self._prefill()
            self._cut = False
        return out

    def _equip(self, job: Job) -> None:
        """Give its sequences what they bring besides tokens, which explains ids that are none."""
        loras = self.loras if job.loras is None else job.loras
        for sequence in job.sequences:
            if sequence.extras is None and (loras or job.embeddings or max(sequence.ids) >= self.vocab):
                if self.extras is None:
                    raise InputError(f"This model knows nothing but tokens below {self.vocab}.")
                sequence.extras = self.extras(sequence.ids, loras, job.embeddings)
                job.key["adapters"] = sequence.extras.salt

    def _orphans(self) -> list[StreamingResult]:
        """End the jobs whose adapters are gone: they would go on as if they had asked for none."""
        out = []
        for adapters, jobs in [*self._adapted.items()]:
            if not jobs:
                del self._adapted[adapters]
            elif next(iter(jobs.values())).sequences[0].extras.lost():  # and so for all of these
                for job in [*jobs.values()]:
                    self.cancel(job)
                    out.append(results.failed(job, job.sequences[0].extras.lost()))
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

    def _decode(self, jobs: Sequence[Job]) -> Sequence[Result]:
        """One pass of the model, and a token for everybody; more for those whose guesses were right."""
        guesses: Sequence[Sequence[int]] = [()] * len(jobs)
        logits, plain = self._ahead.take(jobs), True
        if logits is None:
            for job in jobs:
                if job.times.first is None:
                    job.begin()
                    job.times.sampled()
            if self.draft_tokens:
                wanted = [job.reach for job in jobs]
                guesses = self.drafter.propose([job.sequences[0] for job in jobs], wanted)
            logits, plain = self._pass(jobs, guesses)
        if not self.draft_tokens:
            return self._sample(jobs, logits, 0, ahead=plain)
        return self._check_guesses(jobs, logits, guesses, plain)

    def _pass(self, jobs: Sequence[Job], guesses: Sequence[Sequence[int]]) -> tuple[Any, bool]:
        """Everybody's last token and guesses through the model; logits, and whether all jobs are plain."""
        plain = True
        sequences: list[Tokens] = []
        past: list[int] = []
        fed: list[list[int]] = []
        for job, guess in zip(jobs, guesses, strict=True):
            if not job.plain:
                plain = False
                job.look_ahead(self._pool)
            job.place = len(past)
            for sequence in job.sequences:
                sequences.append(sequence)
                past.append(sequence.cached)
                fed.append([sequence.ids[-1], *guess])
        return self.runner.decode(sequences, past, fed), plain

    def _check_guesses(
        self, jobs: Sequence[Job], logits: Any, guesses: Sequence[Sequence[int]], plain: bool
    ) -> list[Result]:
        """Take position after position, for every job whose guesses have been right so far.

        Without guesses the next pass may be launched, unless somebody hopes to have some by then.
        """
        guessed = any(guesses)
        answers = results.at_once(self.sampler, logits, jobs, guesses) if guessed else None
        ahead = plain and not guessed and not self._expects(jobs)
        out: list[Result] = []
        going = list(zip(jobs, guesses, strict=True))
        position = 0
        while going:
            if answers is None:
                told = self._sample([job for job, _ in going], logits, position, ahead)
            else:
                told = [self._flow(job, *answers[id(job)][position]) for job, _ in going]
            out += told
            right = []
            for (job, guess), result in zip(going, told, strict=True):
                gone = "error" in result or "suppressed_text" in result  # nothing new stands at this position
                agreed = position < len(guess) and not gone and job.sequences[0].ids[-1] == guess[position]
                if agreed and not result["eos"]:
                    right.append((job, guess))
                    continue
                job.learn(position + agreed, len(guess))
                if result["eos"]:
                    results.count_guesses(job, result)
            going = right
            position += 1
        return out

    def _expects(self, jobs: Sequence[Job]) -> bool:
        """Whether somebody may guess after the next token, which must then be known before the next pass."""
        return any(job.reach > 0 and self.drafter.expects(job.sequences[0]) for job in jobs)

    def _sample(
        self, jobs: Sequence[Job], logits: Any, position: int, ahead: bool = False
    ) -> list[StreamingResult]:
        """A token for every job and what it leads to; one job's mistake is not the others'.

        `ahead` if these are all the jobs that the logits are for and the next pass may be launched.
        """
        try:
            rows = [job.row if job.plain else job.next_row() for job in jobs]
            raw = results.rows(logits, jobs, position)
            picks = self.sampler.sample_batch(raw, rows)
        except ExlmError as error:
            if len(jobs) == 1:
                return [self._fail(jobs[0], error)]
            return [self._sample([job], logits, position)[0] for job in jobs]
        tokens, slips = self._ahead.run(jobs, picks, raw) if ahead else results.fetched(picks)
        out: list[StreamingResult] = []
        details: list[Sampled] = []
        for i, (job, token, slip) in enumerate(zip(jobs, tokens, slips, strict=True)):
            if (problem := picks.error(token)) is not None:
                out.append(self._fail(job, problem))
            elif job.plain:
                out.append(self._flow(job, token, slip))
            else:
                details = details or results.unpacked(picks, tokens, jobs, raw)
                out.append(self._accept(job, details[i]))
        return out

    def _flow(self, job: Job, token: int, slip: Any) -> StreamingResult:
        """A token of a plain job: nothing is kept of it unless its text must wait."""
        sequence = job.sequences[0]
        self.pages.commit(sequence, len(sequence.ids))
        sequence.ids.append(token)
        self.pages.settle(sequence, len(sequence.ids))
        job.state.accept(token)
        verdict = job.output.push(token)
        if type(verdict) is Emit and not job.pending:
            job.shown.append(verdict.text)
            return results.flowed(job, verdict.text, slip)
        job.pending.append(Sampled(token))
        return self._carry_out(job, verdict)

    def _accept(self, job: Job, sampled: Sampled) -> StreamingResult:
        """A token of any job: past the hooks, into the sequences, past filters and output."""
        try:
            sampled, feeds = self._hooked(job, sampled) if job.hooks else (sampled, True)
            job.output.check(sampled.token)
            for sequence in job.sequences:
                self.pages.commit(sequence, len(sequence.ids))
                sequence.ids.append(sampled.token)
            job.state.accept(sampled.token)
            ends = feeds and job.feed(sampled.token)
        except ExlmError as error:
            return self._fail(job, error)
        job.pending.append(sampled)
        return self._carry_out(job, job.output.push(sampled.token, ends))

    def _hooked(self, job: Job, sampled: Sampled) -> tuple[Sampled, bool]:
        """What the hooks made of a token, and whether filters are told of it."""
        token, prob, tops, shares, logits = sampled
        try:
            result = call_hooks(
                job.hooks, token, prob or 0.0, (tops, shares) if tops and shares else None, logits
            )
            token = result.token
        except Exception as error:
            raise InputError(f"A post-sampling hook failed: {type(error).__name__}: {error}") from error
        if not 0 <= token < self.vocab:
            raise InputError(f"A post-sampling hook chose {token}; tokens are 0 to {self.vocab - 1}.")
        kept = sampled._replace(
            token=token,
            prob=prob if job.return_probs else None,
            logits=logits if job.return_logits else None,
        )
        return kept, result.feed_filters

    def _carry_out(self, job: Job, verdict: Verdict) -> StreamingResult:
        match verdict:
            case Emit(text=text, tokens=count):
                job.shown.append(text)
                self._settle(job)
                return results.streamed(job, text, job.take(count))
            case Stop():
                return self._stop(job, verdict)
            case Rewind():
                self._rewind(job, verdict)
                return results.rewound(job, verdict)
        self._settle(job)
        return results.streamed(job)

    def _settle(self, job: Job) -> None:
        """Name the pages whose text can no longer be taken back."""
        for sequence in job.sequences:
            self.pages.settle(sequence, len(sequence.ids) - job.output.revocable)

    def _rewind(self, job: Job, verdict: Rewind) -> None:
        del job.pending[-verdict.count :]
        for sequence in job.sequences:
            length = len(sequence.ids) - verdict.count
            self.drafter.truncate(sequence, length)
            self.pages.rewind(sequence, length)
        job.state.truncate(len(job.sequences[0].ids))

    def _stop(self, job: Job, verdict: Stop) -> StreamingResult:
        job.shown.append(verdict.text)
        job.unshown = verdict.held_text
        shown, held = job.take(verdict.tokens), job.take(len(job.pending))
        self._end(job)
        return results.stopped(job, verdict, shown, held)

    def _fail(self, job: Job, error: Exception) -> StreamingResult:
        self._end(job)
        return results.failed(job, error)

    def _end(self, job: Job) -> None:
        job.times.ended = time.perf_counter()
        if job in self.scheduler:  # else a hook or a filter of this round has cancelled it
            self._let_go(job)
            self.scheduler.finish(job)

    def _let_go(self, job: Job) -> None:
        """Close what a job has opened, while it still has its pages."""
        job.is_finished = True
        self._adapted.get(job.key.get("adapters", b""), {}).pop(id(job), None)
        if self.scheduler.remaining == 1:
            self._ahead.forget()
        for sequence in job.sequences:
            self.drafter.forget(sequence)
        if job.stack is not None:
            job.stack.close()
