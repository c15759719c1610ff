"""The engine: each step schedules jobs, runs the model, and processes the sampled tokens.

The scheduler, the page table and the output processing return decisions, and the engine carries them out.
Logits go from the `ModelRunner` to the `Sampler` unread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..constrained import FilterThreadPool
from ..errors import ExlmError, InputError, QueueFull
from ..sampling import Sampler, call_hooks
from ..tokenizer import Tokenizer
from .async_scheduling import InFlightDecode
from .job import Job
from .model_runner import ModelRunner
from .output import Emit, Hold, OutputAction, Rewind, Stop
from .page_table import PageTable
from .results import (
    Result,
    SampledToken,
    StreamingResult,
    add_draft_counts,
    error_result,
    logits_of_jobs,
    prefill_result,
    rewind_result,
    sample_all_positions,
    sampled_tokens,
    started_result,
    stop_result,
    streaming_result,
    token_id_tensors,
)
from .scheduler import Scheduler
from .speculative import AdaptiveDraftLength, Drafter
from .token_sequence import TokenSequence

NO_DRAFTS: Sequence[Sequence[int]] = ()


class EngineCore:
    """Runs jobs to results, with one model runner and one page table."""

    def __init__(
        self,
        runner: ModelRunner,
        page_table: PageTable,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        max_batch_size: int = 16,
        chunk_size: int = 2048,
        max_length: int | None = None,
        max_queue: int | None = None,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
        max_draft_batch_size: int | None = None,
        make_extras: Callable[[list[int], Any, Any], Any] | None = None,
    ) -> None:
        """`max_length` limits prompt and completion together, `max_queue` the number of pending jobs.

        Jobs are drafted for while at most `max_draft_batch_size` of them decode, None for any number.
        `make_extras` turns ids, adapters and embeddings into a sequence's extras.
        """
        self.runner, self.page_table = runner, page_table
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.scheduler = Scheduler(page_table, max_batch_size, chunk_size)
        self.max_length, self.max_queue = max_length, max_queue
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.max_draft_batch_size = max_batch_size if max_draft_batch_size is None else max_draft_batch_size
        self.make_extras = make_extras
        self.default_loras: Any = None
        """Adapters of jobs that name none."""
        self.cache_key_parts: dict[str, bytes] = {}
        """What the keys and values of all jobs depend on besides ids, by name; exlm leaves it empty."""
        self.sampler = Sampler(tokenizer, vocab_size)
        self.in_flight = InFlightDecode(runner)
        self._filter_executor = FilterThreadPool()
        self._next_serial = 0
        self._dirty = False
        """Whether a step or a cancellation is changing the state; stays True if an interrupt or an error ends it."""
        self._jobs_by_adapters: dict[bytes, dict[int, Job]] = {}

    @property
    def busy(self) -> bool:
        """Whether any job is waiting or running."""
        return self.scheduler.num_unfinished > 0

    def enqueue(self, job: Job) -> int:
        """Queue a job; raises InputError for one that can never run."""
        for prompt in job.prompts:
            total = len(prompt) + job.max_new_tokens
            if self.max_length is not None and total > self.max_length:
                raise InputError(
                    f"{len(prompt)} prompt and {job.max_new_tokens} new tokens exceed the model's length of "
                    f"{self.max_length}: lower max_new_tokens or shorten the prompt."
                )
        if job.serial_number >= 0:
            raise InputError(f"{job!r} was enqueued before: a job runs once, make a new one.")
        if self.max_queue is not None and self.scheduler.num_pending >= self.max_queue:
            raise QueueFull(
                f"{self.scheduler.num_pending} jobs are waiting and max_queue is {self.max_queue}: try again "
                "when some have started, or create the generator with a longer queue."
            )
        self._attach_extras(job)
        job.set_cache_salt(self.cache_key_parts)
        self._dirty = self._dirty and not self.scheduler.reset_after_interrupt()
        try:
            self.scheduler.add(job)
            job.bind(self._next_serial, self.tokenizer, self.vocab_size)
        except BaseException:
            self.scheduler.cancel(job)
            raise
        if adapters := job.cache_key_parts.get("adapters"):
            self._jobs_by_adapters.setdefault(adapters, {})[id(job)] = job
        if self.num_draft_tokens:
            job.draft_length = AdaptiveDraftLength(self.num_draft_tokens)
        self._next_serial += 1
        return job.serial_number

    def cancel(self, job: Job) -> None:
        """Drop a job, pending or active; does nothing for one that is finished or unknown."""
        if job in self.scheduler:
            was_dirty, self._dirty = self._dirty, True
            self._release_resources(job)
            try:
                self.scheduler.cancel(job)
            except LookupError:  # an interrupt left it inconsistent; `reset_after_interrupt` repairs it
                if not was_dirty:
                    raise
            self._dirty = was_dirty

    def clear(self) -> None:
        """Drop every job."""
        for job in [*self.scheduler.active, *self.scheduler.pending]:
            self.cancel(job)

    def step(self) -> list[Result]:
        """Admit jobs, prefill a chunk of each prompt, decode a batch, verify and apply its tokens."""
        self._dirty = True
        results = self._admit()
        if self.scheduler.has_prefill:
            results += self._prefill_chunks()
        if batch := self.scheduler.decode_batch():
            logits, drafts = self._decode(batch)
            results += self._verify_and_apply(batch, logits, drafts)
        self._dirty = False
        return results

    def step_prefill(self) -> list[Result]:
        """A step without decoding: only prompts make progress."""
        self._dirty = True
        results = self._admit()
        results += self._prefill_chunks()
        self._dirty = False
        return results

    def _admit(self) -> list[Result]:
        """Start the pending jobs that fit; fail those whose adapters were unloaded."""
        results: list[Result] = [*self._fail_unloaded_adapters()] if self._jobs_by_adapters else []
        if started := self.scheduler.admit():
            results += map(started_result, started)
        return results

    def _attach_extras(self, job: Job) -> None:
        """Set `extras` of a job's sequences: adapters, and embeddings for the ids beyond the vocabulary."""
        loras = self.default_loras if job.loras is None else job.loras
        for sequence in job.sequences:
            if sequence.extras is None and (loras or job.embeddings or max(sequence.ids) >= self.vocab_size):
                if self.make_extras is None:
                    raise InputError(f"This model has no embeddings but those of tokens below {self.vocab_size}.")
                sequence.extras = self.make_extras(sequence.ids, loras, job.embeddings)
                job.cache_key_parts["adapters"] = sequence.extras.salt

    def _fail_unloaded_adapters(self) -> list[StreamingResult]:
        """Fail the jobs whose adapters were unloaded, rather than run them without."""
        out = []
        for adapters, jobs in [*self._jobs_by_adapters.items()]:  # all jobs of an entry have the same adapters
            if not jobs:
                del self._jobs_by_adapters[adapters]
            elif next(iter(jobs.values())).sequences[0].extras.unloaded_error():
                for job in [*jobs.values()]:
                    self.cancel(job)
                    out.append(error_result(job, job.sequences[0].extras.unloaded_error()))
        return out

    def _prefill_chunks(self) -> list[Result]:
        """Run the step's chunks; one result for each job whose prompt advanced."""
        advanced: dict[int, Job] = {}
        runners = (self.runner,) if self.drafter is None else (self.runner, self.drafter)
        while chunks := self.scheduler.next_prefill_batch():
            now = time.perf_counter()
            if copies := [chunk.copy for chunk in chunks if chunk.copy is not None]:
                for runner in runners:
                    runner.copy_pages(copies)
            for chunk in chunks:
                chunk.job.metrics.prefill_started_at = chunk.job.metrics.prefill_started_at or now
                if chunk.end > chunk.start:
                    self.page_table.plan_prefill_states(chunk.sequence, chunk.start, chunk.end)
                    for runner in runners:
                        runner.prefill(chunk.sequence, chunk.start, chunk.end)
                self.page_table.mark_computed(chunk.sequence, chunk.end)
                if chunk.job.metrics.first_decode_at is None:  # not what a rewind lost
                    advanced[id(chunk.job)] = chunk.job
        return [prefill_result(job) for job in advanced.values()]

    def _propose_drafts(self, jobs: Sequence[Job]) -> Sequence[Sequence[int]]:
        """The drafter's tokens for each job; a job's decoding time begins here."""
        for job in jobs:
            if job.metrics.first_decode_at is None:
                job.metrics.start_decode()
        if self.drafter is None or len(jobs) > self.max_draft_batch_size:
            return NO_DRAFTS
        counts = [job.num_draft_tokens for job in jobs]
        if self.page_table.states is not None:  # the state after each draft token is kept until it is verified
            num_sequences = sum(len(job.sequences) for job in self.scheduler.active)
            spare = self.page_table.states.num_spare_slots(num_sequences) // len(jobs)
            counts = [min(count, spare) for count in counts]
        return self.drafter.propose([job.sequences[0] for job in jobs], counts)

    def _decode(self, jobs: Sequence[Job]) -> tuple[Any, Sequence[Sequence[int]]]:
        """Logits of each job's last token and drafts, and the drafts; of the pass in flight if it is of these jobs."""
        logits = self.in_flight.take(jobs)
        if logits is not None:
            return logits, NO_DRAFTS
        drafts = self._propose_drafts(jobs)
        sequences: list[TokenSequence] = []
        past: list[int] = []
        token_rows: list[list[int]] = []
        for job, draft in zip(jobs, drafts or [()] * len(jobs), strict=True):
            if not job.is_simple:
                job.prefetch_filter_masks(self._filter_executor)
            job.batch_row = len(past)
            for sequence in job.sequences:
                self.page_table.plan_decode_states(sequence, sequence.num_computed_tokens, 1 + len(draft))
                sequences.append(sequence)
                past.append(sequence.num_computed_tokens)
                token_rows.append([sequence.ids[-1], *draft])
        return self.runner.decode(sequences, past, token_rows), drafts

    def _verify_and_apply(self, jobs: Sequence[Job], logits: Any, drafts: Sequence[Sequence[int]]) -> Sequence[Result]:
        """Sample a token for every job, and further ones for as long as they equal the job's draft.

        The next pass is launched before the host reads the tokens if all jobs are simple and no draft depends
        on these tokens.
        """
        all_simple = all([job.is_simple for job in jobs])
        if self.drafter is None:
            return self._sample_and_apply(jobs, logits, 0, launch_next=all_simple)
        drafts = drafts or [()] * len(jobs)
        any_drafts = any(drafts)
        sampled = sample_all_positions(self.sampler, logits, jobs, drafts) if any_drafts else None
        launch_next = all_simple and not any_drafts and not self._may_draft_next(jobs, self.drafter)
        results: list[Result] = []
        unfinished = list(zip(jobs, drafts, strict=True))
        position = 0
        while unfinished:
            if sampled is None:
                position_results = self._sample_and_apply([job for job, _ in unfinished], logits, position, launch_next)
            else:
                position_results = [
                    self._append_simple_token(job, *sampled[id(job)][position]) for job, _ in unfinished
                ]
            results += position_results
            accepted = []
            for (job, draft), result in zip(unfinished, position_results, strict=True):
                appended = not ("error" in result or "suppressed_text" in result)
                matches = appended and position < len(draft) and job.sequences[0].ids[-1] == draft[position]
                if matches and not result["eos"]:
                    accepted.append((job, draft))
                    continue
                job.update_acceptance(position + matches, len(draft))
                if result["eos"]:
                    add_draft_counts(job, result)
            unfinished = accepted
            position += 1
        return results

    def _may_draft_next(self, jobs: Sequence[Job], drafter: Drafter) -> bool:
        """Whether a job may have a draft after its next token; then the next pass waits for that token."""
        return len(jobs) <= self.max_draft_batch_size and any(
            job.num_draft_tokens > 0 and drafter.has_candidate(job.sequences[0]) for job in jobs
        )

    def _sample_and_apply(
        self, jobs: Sequence[Job], logits: Any, position: int, launch_next: bool = False
    ) -> list[StreamingResult]:
        """Sample a token for every job at one position and apply it; a job that fails fails alone.

        `launch_next` launches the next pass before the tokens are read; `jobs` are then all jobs of `logits`.
        """
        try:
            requests = [job.sampling_request if job.is_simple else job.next_sampling_request() for job in jobs]
            row_logits = logits_of_jobs(logits, jobs, position)
            pending = self.sampler.launch(row_logits, requests)
        except ExlmError as error:
            if len(jobs) == 1:
                return [self._fail(jobs[0], error)]
            return [self._sample_and_apply([job], logits, position)[0] for job in jobs]
        if launch_next:
            self.in_flight.launch_next(jobs, pending.tokens, self.page_table)
        output = pending.wait()
        if output.resampled:
            self.in_flight.discard()  # it was fed tokens that have been replaced
        out: list[StreamingResult] = []
        details: list[SampledToken] = []
        token_ids = token_id_tensors(output.tokens, output.host_tokens)
        for i, (job, token) in enumerate(zip(jobs, output.tokens, strict=True)):
            if token < 0 and (failure := output.error(token)) is not None:
                out.append(self._fail(job, failure))
            elif job.is_simple:
                out.append(self._append_simple_token(job, token, token_ids[i]))
            else:
                details = details or sampled_tokens(output, jobs, row_logits)
                out.append(self._append_token(job, details[i]))
        return out

    def _append_simple_token(self, job: Job, token: int, token_ids: Any) -> StreamingResult:
        """Append a token of a simple job: no hooks, no filters, and mostly its text is emitted at once."""
        sequence = job.sequences[0]
        self.page_table.mark_computed(sequence, len(sequence.ids))
        sequence.ids.append(token)
        self.page_table.mark_final(sequence, len(sequence.ids))
        job.sampler_state.accept(token)
        action = job.output.push(token)
        if type(action) is Emit and not job.pending_tokens:
            job.emitted_texts.append(action.text)
            result = streaming_result(job, action.text)
            result["token_ids"] = token_ids
            return result
        job.pending_tokens.append(SampledToken(token))
        return self._apply_action(job, action)

    def _append_token(self, job: Job, sampled: SampledToken) -> StreamingResult:
        """Append a token of any job: run its hooks, then update its sequences, filters and output."""
        try:
            sampled, feed_filters = self._apply_hooks(job, sampled) if job.hooks else (sampled, True)
            job.output.check_retries(sampled.token)
            for sequence in job.sequences:
                self.page_table.mark_computed(sequence, len(sequence.ids))
                sequence.ids.append(sampled.token)
            job.sampler_state.accept(sampled.token)
            filter_done = feed_filters and job.advance_filters(sampled.token)
        except ExlmError as error:
            return self._fail(job, error)
        job.pending_tokens.append(sampled)
        return self._apply_action(job, job.output.push(sampled.token, filter_done))

    def _apply_hooks(self, job: Job, sampled: SampledToken) -> tuple[SampledToken, bool]:
        """The token after the post-sampling hooks, and whether filters are fed with it."""
        token, prob, top_tokens, top_probs, logits = sampled
        try:
            result = call_hooks(
                job.hooks, token, prob or 0.0, (top_tokens, top_probs) if top_tokens and top_probs else None, logits
            )
            token = result.token
        except Exception as error:
            raise InputError(f"A post-sampling hook failed: {type(error).__name__}: {error}") from error
        if not 0 <= token < self.vocab_size:
            raise InputError(f"A post-sampling hook chose {token}; tokens are 0 to {self.vocab_size - 1}.")
        kept = sampled._replace(
            token=token, prob=prob if job.return_probs else None, logits=logits if job.return_logits else None
        )
        return kept, result.feed_filters

    def _apply_action(self, job: Job, action: OutputAction) -> StreamingResult:
        match action:
            case Stop():
                return self._stop(job, action)
            case Rewind():
                self._rewind(job, action)
                return rewind_result(job, action)
            case Hold():
                text, emitted = "", []
            case Emit():
                text, emitted = action.text, job.take_pending_tokens(action.num_tokens)
                job.emitted_texts.append(text)
        self._mark_final(job)
        return streaming_result(job, text, emitted)

    def _mark_final(self, job: Job) -> None:
        """Record the tokens that can no longer be rewound."""
        for sequence in job.sequences:
            self.page_table.mark_final(sequence, len(sequence.ids) - job.output.num_revocable)

    def _rewind(self, job: Job, action: Rewind) -> None:
        del job.pending_tokens[-action.num_tokens :]
        for sequence in job.sequences:
            length = len(sequence.ids) - action.num_tokens
            if self.drafter is not None:
                self.drafter.truncate(sequence, length)
            self.page_table.rewind(sequence, length)
            if not sequence.prefill_done:
                self.scheduler.resume_prefill(job)
        job.sampler_state.truncate(len(job.sequences[0].ids))

    def _stop(self, job: Job, action: Stop) -> StreamingResult:
        job.emitted_texts.append(action.text)
        job.final_held_text = action.held_text
        emitted = job.take_pending_tokens(action.num_tokens)
        held = job.take_pending_tokens(len(job.pending_tokens))
        self._finish(job)
        return stop_result(job, action, emitted, held)

    def _fail(self, job: Job, error: Exception) -> StreamingResult:
        self._finish(job)
        return error_result(job, error)

    def _finish(self, job: Job) -> None:
        job.metrics.finished_at = time.perf_counter()
        if job in self.scheduler:  # not if a hook or a filter cancelled it during this step
            self._release_resources(job)
            self.scheduler.finish(job)

    def _release_resources(self, job: Job) -> None:
        """Release everything a job holds but its pages, which the scheduler releases."""
        job.is_finished = True
        self._jobs_by_adapters.get(job.cache_key_parts.get("adapters", b""), {}).pop(id(job), None)
        if self.scheduler.num_unfinished == 1:
            self.in_flight.discard()
        if self.drafter is not None:
            for sequence in job.sequences:
                self.drafter.release(sequence)
        if job.filter_stack is not None:
            job.filter_stack.close()
