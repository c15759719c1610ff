"""`Generator`, the public class: runs the jobs of any number of callers and threads over one paged cache."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal

from ..errors import InputError, Unsupported
from ..sampling import Settings
from ..sampling.settings import VOCAB_MULTIPLE
from .engine import EngineCore
from .job import JOB_ARGUMENTS, Job
from .page_table import PageTable
from .results import Result, ResultQueue, StreamingResult, error_result
from .speculative import Drafter, ModelDrafter, NgramDrafter
from .state_table import SLOTS_PER_SEQUENCE, StateTable
from .validation import (
    GENERATE_ARGUMENTS,
    argument_names,
    cache_capacity,
    check_components,
    drop_unknown,
    materialize,
    offset_seed,
    one_per_prompt,
    prompt_list,
    prompt_texts,
    reject_unknown,
    resolve_chunk_size,
    resolve_max_seq_len,
    resolve_num_draft_tokens,
    resolve_state_slots,
    whole_number,
)

AUTO_DRAFT_BATCH_SIZE = 1  # drafts were measured with one sequence only
DEFAULT_DRAFT_TOKENS = 4  # tokens in a draft, each of which is a pass of the draft model
CACHE_OVERWRITTEN = (
    "Another caller has written to the cache while this text was generated, and its keys and values are "
    "lost: give each generator a cache of its own, or let one finish before the other begins."
)
DRAFT_SHARES_CACHE = (
    "draft_cache is the model's own cache, where the draft model would write over what the model reads: give "
    "it one of its own, draft_cache=Cache(draft_model, max_seq_len=cache.max_seq_len)."
)
QUEUE_CLEARED = "The request was dropped before its end: the generator's queue was cleared."


class Generator:
    """Runs any number of jobs in one continuous batch.

    `cache.max_seq_len` is the budget in tokens for all of them together, a multiple of 256; later prompts with
    the same prefix reuse what is in the cache. At most `max_queue` jobs may be pending, None for any number.
    With `paged=False` one sequence runs at a time. A decode pass has at most `max_q_size` tokens of each
    sequence, its last one and a draft. A draft has at most `num_draft_tokens`, by default 4 with a draft model
    and `max_q_size - 1` with n-grams; nothing is drafted while more than `max_draft_batch_size` jobs decode.
    With `use_ngram_draft="auto"` n-grams are used on a CPU, while one job decodes, and not on a GPU. Several
    threads may call it: one of them runs a step for all jobs, and the others wait for it.

    For a model with recurrent layers, `state_cache_bytes` is the memory for their states, by default 2 GiB, or a
    quarter of what a GPU has free. A cached prompt is reused up to a checkpoint of the state: one is kept every
    `state_checkpoint_interval` tokens (0: never) and at the last full page of each prompt.

    `max_sampling_threads`, `min_sampling_threads` and `filter_background_eval` are accepted for old scripts.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        tokenizer: Any,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_chunk_size: int | None = None,
        max_q_size: int = 8,
        draft_model: Any = None,
        draft_cache: Any = None,
        num_draft_tokens: int | None = None,
        use_ngram_draft: bool | Literal["auto"] = False,
        max_ngram: int = 4,
        max_draft_batch_size: int | None = None,
        max_sampling_threads: int = 16,
        min_sampling_threads: int = 3,
        paged: bool = True,
        filter_background_eval: bool = True,
        max_queue: int | None = None,
        state_checkpoint_interval: int = 1024,
        state_cache_bytes: int | None = None,
        **unknown: Any,
    ) -> None:
        reject_unknown(
            "Generator",
            unknown,
            argument_names(Generator),
            {*JOB_ARGUMENTS, *GENERATE_ARGUMENTS},
            "a job, or generate(),",
        )
        check_components(model, cache)
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.draft_model, self.draft_cache = draft_model, draft_cache
        self.current_loras: list[Any] | None = None
        self.paged, self.page_size = paged, int(cache.page_size)
        self.padded_vocab_size = -(-model.config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        default_rows = max(1, model.config.max_input_len // whole_number("max_q_size", max_q_size, 1))
        rows = whole_number("max_batch_size", max_batch_size or default_rows, 1) if paged else 1
        num_state_slots = resolve_state_slots(cache, rows, max_batch_size is None and paged, state_cache_bytes)
        if num_state_slots:
            rows = min(rows, num_state_slots // SLOTS_PER_SEQUENCE)
            cache.allocate_states(num_state_slots)
        self.max_batch_size = rows
        self.max_seq_len = resolve_max_seq_len(max_seq_len, model.max_seq_len)
        self.max_chunk_size = resolve_chunk_size(max_chunk_size, model.config.max_input_len, self.page_size, paged)
        self.max_total_tokens = cache_capacity(cache)
        self.max_pages = self.max_total_tokens // self.page_size
        self.max_queue = None if max_queue is None else whole_number("max_queue", max_queue, 1)
        if use_ngram_draft == "auto":
            on_cpu = {device.type for device in model.cache_devices or ()} == {"cpu"}
            use_ngram_draft = on_cpu and draft_model is None
            max_draft_batch_size = max_draft_batch_size or AUTO_DRAFT_BATCH_SIZE
        drafter = self._make_drafter(use_ngram_draft, max_ngram)
        default_draft_tokens = max(1, max_q_size - 1) if use_ngram_draft else DEFAULT_DRAFT_TOKENS
        self.num_draft_tokens = (
            0 if drafter is None else resolve_num_draft_tokens(num_draft_tokens, default_draft_tokens, max_q_size)
        )
        states = (
            StateTable(
                num_state_slots, self.page_size, whole_number("state_checkpoint_interval", state_checkpoint_interval, 0)
            )
            if num_state_slots
            else None
        )
        self._engine = EngineCore(
            model.runner(cache),
            PageTable(self.max_pages, self.page_size, states),
            tokenizer,
            model.config.vocab_size,
            max_batch_size=self.max_batch_size,
            chunk_size=self.max_chunk_size,
            max_length=self.max_seq_len,
            max_queue=self.max_queue,
            drafter=drafter,
            num_draft_tokens=self.num_draft_tokens,
            max_draft_batch_size=max_draft_batch_size and whole_number("max_draft_batch_size", max_draft_batch_size, 1),
            make_extras=model.make_extras,
        )
        self._results: ResultQueue = deque()
        """Results that `iterate` returns: those of jobs that no call waits for."""
        self._abandoned: deque[Job] = deque()
        """Jobs that `cancel_abandoned` will cancel: each step, `enqueue` and count of jobs calls it first."""
        self.lock = threading.RLock()
        """Held during a step, and while the queue of jobs changes.

        Acquired by `with` alone: Ctrl-C cannot come between the acquisition and the block that releases it.
        """
        self._in_step = False
        self._last_writer: object = None  # `cache.last_writer` at the end of our last step

    @property
    def pending_jobs(self) -> list[Job]:
        """Jobs that have not started."""
        return self._engine.scheduler.pending

    @property
    def active_jobs(self) -> list[Job]:
        """Jobs that run."""
        return self._engine.scheduler.active

    @property
    def num_pending_jobs(self) -> int:
        """How many jobs have not started."""
        return self._engine.scheduler.num_pending

    @property
    def num_active_jobs(self) -> int:
        """How many jobs run."""
        return self._engine.scheduler.num_active

    @property
    def pages(self) -> PageTable:
        """The page table of the cache; read only."""
        return self._engine.page_table

    def enqueue(self, job: Job | Sequence[Job]) -> int | list[int]:
        """Queue one job or several; returns the serial numbers. Nothing runs before the next step."""
        if isinstance(job, Job):
            return self._enqueue(job)
        if not isinstance(job, list | tuple) or not all(isinstance(item, Job) for item in job):
            raise InputError(f"A Job, or a list of them, can be enqueued; found {type(job).__name__}.")
        return [self._enqueue(item) for item in job]

    def iterate(self) -> list[Result]:
        """Run a step for all jobs; returns the results of jobs that no other call waits for, oldest first.

        Other threads wait for the step. [] if there are no jobs.
        """
        with self.lock:
            self._step()
            results = [result for result in self._results if not result["job"].cancelled]
            self._results.clear()
            return results

    def step_unless_results(self, results: ResultQueue, public_name: str = "generator") -> None:
        """Run a step if `results`, the queue of some jobs, is empty; other threads wait for it.

        A thread that waited usually has results then, and runs no step. Raises InputError if there are
        neither results nor jobs, or if a hook or filter calls it during a step (see `check_not_in_step`).
        """
        with self.lock:
            if results:
                return
            self._step(public_name)
            if not (results or self._engine.busy):
                raise InputError(QUEUE_CLEARED)

    def cancel(self, job: Job) -> None:
        """Drop a job, pending or active, and its unread results. Does nothing for a finished one."""
        with self.lock:
            if job in self._engine.scheduler or job.result_queue is self._results:
                job.cancelled = True
            self._engine.cancel(job)

    def clear_queue(self) -> None:
        """Drop every job, and the results that `iterate` would return."""
        with self.lock:
            self._results.clear()
            for job in [*self.active_jobs, *self.pending_jobs]:
                self.cancel(job)

    def abandon(self, jobs: Sequence[Job]) -> None:
        """Drop jobs at the next call. It takes no lock, so that a finaliser may call it at any moment."""
        self._abandoned.extend(jobs)

    def cancel_abandoned(self) -> None:
        """Drop the jobs given to `abandon`."""
        with self.lock:
            while self._abandoned:  # Ctrl-C before `popleft` only has a job cancelled twice
                self.cancel(self._abandoned[0])
                self._abandoned.popleft()

    def num_remaining_jobs(self) -> int:
        """Jobs that are pending or active, and those whose last result `iterate` has not returned yet."""
        with self.lock:
            self.cancel_abandoned()
            unread = sum(result["eos"] and not result["job"].cancelled for result in self._results)
            return self._engine.scheduler.num_unfinished + unread

    def check_not_in_step(self, public_name: str) -> None:
        """Raise InputError if a hook or a filter calls this during a step.

        `public_name` is what the error calls the object that the hook called: "generator" or "LLM".
        """
        with self.lock:  # held by the thread that runs the step
            if self._in_step:
                raise InputError(
                    f"A hook or a filter called the {public_name} during its step, which waits for that hook or "
                    f"filter: call it after the step, or use another {public_name}. Only enqueueing and cancelling "
                    "jobs is allowed here."
                )

    def max_sequence_length(self, num_sequences: int = 1) -> int:
        """The maximum length of each of `num_sequences` sequences of one job in an empty cache."""
        return min(self.max_seq_len, self.max_pages // num_sequences * self.page_size)

    def cap_new_tokens(self, prompts: Sequence[Any], max_new_tokens: Any) -> Any:
        """`max_new_tokens`, lowered with a warning to what the model's length leaves after a job's prompts (1, n).

        A prompt that leaves nothing is refused.
        """
        prompt = max(ids.shape[-1] for ids in prompts)
        if not isinstance(max_new_tokens, Integral) or prompt + int(max_new_tokens) <= self.max_seq_len:
            return max_new_tokens
        if prompt >= self.max_seq_len:
            raise InputError(
                f"The prompt has {prompt} tokens and the model's length is {self.max_seq_len}, which leaves "
                "no token to generate: shorten the prompt."
            )
        left = self.max_seq_len - prompt
        warnings.warn(
            f"max_new_tokens is {max_new_tokens}, and {left} is used: the prompt has {prompt} tokens and the "
            f"model's length is {self.max_seq_len}.",
            stacklevel=3,
        )
        return left

    def reset_page_table(self) -> None:
        """Empty the prefix cache."""
        with self.lock:
            if remaining := self._engine.scheduler.num_unfinished:
                raise InputError(f"{remaining} jobs use the cache: finish or clear them first.")
            self._engine.page_table.clear_prefix_cache()

    def set_loras(self, loras: Any) -> None:
        """Set the adapters, one, a list or None, of jobs enqueued from now on that name none themselves.

        Jobs already enqueued keep theirs. Only jobs with the same adapters share cached prompts.
        """
        adapters = loras if isinstance(loras, list) else [] if loras is None else [loras]
        self.model.make_extras([], adapters)  # raises for what is no adapter of this model
        self._engine.default_loras = self.current_loras = adapters or None

    def warmup(self) -> None:
        """Generate 32 tokens, so that kernels are compiled, and empty the prefix cache."""
        self.generate("Once upon a time,", max_new_tokens=32)
        self.reset_page_table()

    def generate(
        self,
        prompt: str | tuple[str, str] | Sequence[str | tuple[str, str]],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        seed: int | None = None,
        gen_settings: Settings | Sequence[Settings] | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stop_conditions: Any = None,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        completion_only: bool = False,
        filters: Sequence[Any] | None = None,
        filter_prefer_eos: bool = False,
        return_last_results: bool = False,
        embeddings: Sequence[Any] | None = None,
        banned_strings: Any = None,
        **job_arguments: Any,
    ) -> Any:
        """Complete one prompt or several at once; returns when all are finished.

        A str gives a str, a list a list in the same order; a pair (positive, negative) is guided by
        `cfg_scale`. Prompt i uses seed + i. Only `stop_conditions`, filters and the limit end a text; a limit
        beyond the model's length is lowered to it, with a warning. With `return_last_results` it returns
        (completions, last result of each job). A set `abort_event` drops the jobs and returns None; a job
        that fails drops the others and raises. Further arguments are `Job`'s; an argument that `Job` does not
        have either is ignored with a warning.
        """
        known = {*argument_names(self.generate), *JOB_ARGUMENTS} - {"input_ids"}
        job_arguments = drop_unknown("generate()", job_arguments, known)
        single = isinstance(prompt, str | tuple)
        prompts = prompt_list(prompt)
        options: dict[str, Any] = {
            "min_new_tokens": min_new_tokens,
            "stop_conditions": materialize(stop_conditions),
            "decode_special_tokens": decode_special_tokens,
            "filter_prefer_eos": filter_prefer_eos,
            "token_healing": token_healing,
            "banned_strings": materialize(banned_strings),
        } | job_arguments
        count = len(prompts)
        settings_list = one_per_prompt(gen_settings, count, "gen_settings")
        filter_lists = [filters] if single else one_per_prompt(filters, count, "filters")
        embedding_lists = [embeddings] if single else one_per_prompt(embeddings, count, "embeddings")
        jobs = []
        for i, single_prompt in enumerate(prompts):
            ids, wrapped = encode_prompt(
                self.model, self.tokenizer, single_prompt, add_bos, encode_special_tokens, embedding_lists[i]
            )
            jobs.append(
                Job(
                    ids,
                    self.cap_new_tokens(ids, max_new_tokens),
                    gen_settings=settings_list[i],
                    filters=filter_lists[i],
                    embeddings=wrapped,
                    seed=offset_seed(seed, i),
                    **options,
                )
            )
        last = JobGroup(self, jobs).run(abort_event)
        if last is None:
            return None
        texts = [
            ("" if completion_only else prompt_texts(single_prompt)[0]) + result["full_completion"]
            for single_prompt, result in zip(prompts, last, strict=True)
        ]
        completions: Any = texts[0] if single else texts
        return (completions, last[0] if single else last) if return_last_results else completions

    def _enqueue(self, job: Job) -> int:
        """Queue a job; clear the prefix cache first if another caller has written to the cache."""
        with self.lock:
            self.cancel_abandoned()
            if not self._engine.busy and self.cache.last_writer is not self._engine.runner:
                self._engine.page_table.clear_prefix_cache()
                states = self._engine.page_table.states
                if states is not None and self.cache.num_state_slots != states.num_slots:
                    self.cache.allocate_states(states.num_slots)
                self.cache.last_writer = self._last_writer = self._engine.runner
            serial = self._engine.enqueue(job)
            if job.result_queue is None:
                job.result_queue = self._results
            return serial

    def _step(self, public_name: str = "generator") -> None:
        """Run a step, if there are jobs, and put each result into its job's queue."""
        if self._in_step:
            self.check_not_in_step(public_name)
        if self._abandoned:
            self.cancel_abandoned()
        if not self._engine.scheduler.num_unfinished:
            return
        try:
            self._in_step = True
            results: list[Result] = []
            if self.cache.last_writer is not self._last_writer:
                results += self._fail_overwritten()
            results += self._engine.step()
            for result in results:
                queue = result["job"].result_queue
                if queue is not None:
                    queue.append(result)
        finally:
            self._in_step = False
            self._last_writer = self.cache.last_writer

    def _fail_overwritten(self) -> list[Result]:
        """Fail the active jobs after another caller has written to the cache; pending jobs stay queued."""
        out: list[Result] = []
        for job in self.active_jobs:
            self._engine.cancel(job)
            out.append(error_result(job, InputError(CACHE_OVERWRITTEN)))
        self._engine.page_table.clear_prefix_cache()
        return out

    def _make_drafter(self, ngram: bool, max_ngram: int) -> Drafter | None:
        if self.draft_model is None:
            return NgramDrafter(whole_number("max_ngram", max_ngram, 0)) if ngram else None
        if ngram:
            raise InputError("Cannot use both draft model and ngram draft.")
        if self.draft_cache is None:
            raise InputError("Must supply cache for draft model.")
        if self.draft_cache is self.cache:
            raise InputError(DRAFT_SHARES_CACHE)
        if getattr(self.draft_cache, "state_bytes", 0):
            raise Unsupported(
                "The draft model has recurrent layers, whose states cannot follow rejected drafts: use one of "
                "attention alone, or use_ngram_draft=True."
            )
        if self.draft_cache.max_seq_len != self.cache.max_seq_len or self.draft_cache.batch_size != 1:
            raise InputError(
                f"Cache and draft cache must be same dimensions, found {self.cache.max_seq_len} and "
                f"{self.draft_cache.max_seq_len} tokens."
            )
        if self.draft_model.max_seq_len < self.model.max_seq_len:
            raise InputError(
                f"Draft model seq len must be >= model seq len, found "
                f"{self.draft_model.max_seq_len} and {self.model.max_seq_len}."
            )
        return ModelDrafter(self.draft_model.runner(self.draft_cache))


class JobGroup:
    """Jobs that one call runs to completion: they share a result queue and are cancelled together."""

    def __init__(self, generator: Generator, jobs: Sequence[Job], public_name: str = "generator") -> None:
        """`public_name` is as in `Generator.check_not_in_step`."""
        self.unfinished = set(jobs)
        """Jobs whose last result was not read yet."""
        self._generator, self._jobs, self._public_name = generator, jobs, public_name
        self._results: ResultQueue = deque()
        for job in jobs:
            job.result_queue = self._results

    def enqueue(self) -> None:
        """Queue all jobs. Cancel the group even if this raises."""
        self._generator.check_not_in_step(self._public_name)
        for job in self._jobs:
            self._generator.enqueue(job)

    def run(self, abort: threading.Event | None = None) -> list[StreamingResult] | None:
        """The last result of each job; None if aborted. If one of them fails the others are dropped."""
        last: dict[Job, StreamingResult] = {}
        try:
            self.enqueue()
            while self.unfinished:
                result = self.next_result()
                if result is not None and result["stage"] == "streaming":
                    last[result["job"]] = result
                if abort is not None and abort.is_set():
                    return None
        finally:
            self.cancel()
        return [last[job] for job in self._jobs]

    def next_result(self) -> Result | None:
        """The next result, after a step if necessary; None if it gave none. Raises a failed job's error."""
        if not self._results:
            self._generator.step_unless_results(self._results, self._public_name)
        while self._results:
            result = self._results.popleft()
            if result["job"].cancelled:
                continue
            if result["stage"] == "streaming" and result["eos"]:
                self.unfinished.discard(result["job"])
                if "error" in result:
                    raise result["error"]
            return result
        if any(job.cancelled for job in self.unfinished):
            raise InputError(QUEUE_CLEARED)
        return None

    def cancel(self) -> None:
        """Drop the jobs that are not finished."""
        self.abandon()
        self._generator.cancel_abandoned()

    def abandon(self) -> None:
        """Drop the jobs at the generator's next call; for finalisers."""
        self._generator.abandon(self._jobs)


def encode_prompt(
    model: Any, tokenizer: Any, prompt: Any, add_bos: bool, encode_special_tokens: bool, embeddings: Any
) -> tuple[list[Any], list[Any] | None]:
    """The ids of a prompt, or of both prompts of a pair, and its embeddings; tensors become `MMEmbedding`s."""
    texts = prompt_texts(prompt)
    options: dict[str, Any] = {"add_bos": add_bos, "encode_special_tokens": encode_special_tokens}
    if embeddings is not None:
        embeddings = options["embeddings"] = list(model.wrap_embeddings(texts[0], embeddings))
    return [tokenizer.encode(text, **options) for text in texts], embeddings
