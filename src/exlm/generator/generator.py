"""The generator users hold: prompts in, completions out, many at once, over one paged cache."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any

from ..errors import InputError
from ..sampling import Settings
from .call_arguments import GENERATE_ARGUMENTS, argument_names, drop_unknown, reject_unknown
from .engine import EngineCore
from .job import JOB_ARGUMENTS, Job, materialize
from .page_table import PageTable
from .pending_results import PendingResults
from .results import Result, StreamingResult, error_result
from .speculative import Drafter, ModelDrafter, NgramDrafter
from .validation import (
    PAGE,
    at_least,
    cache_tokens,
    check_components,
    completion_text,
    one_per_prompt,
    prompt_list,
    prompt_texts,
    resolve_chunk_size,
    resolve_max_seq_len,
    resolve_num_draft_tokens,
)

DEFAULT_DRAFT_TOKENS = 4  # guesses in a step, of which each is a pass of a draft model
CACHE_OVERWRITTEN = (
    "Another caller has written to the cache while this text was generated, and its keys and values are "
    "lost: give each generator a cache of its own, or let one finish before the other begins."
)
DRAFT_SHARES_CACHE = (
    "draft_cache is the model's own cache, where the draft model would write over what the model reads: give "
    "it one of its own, draft_cache=Cache(draft_model, max_seq_len=cache.max_seq_len)."
)
VOCAB_MULTIPLE = 32  # the old library's logits were a multiple of this wide


class Generator:
    """Runs any number of jobs in one continuous batch.

    `cache.max_seq_len` is the budget in tokens for all of them together, a multiple of 256; prompts and their
    completions stay in it for the next request to begin with. `max_queue` is how many jobs may wait to start,
    None for any number. With `paged=False` one sequence runs at a time, over the same pages. At most
    `num_draft_tokens` are guessed in a step: 4 by a draft model, and `max_q_size - 1` from n-grams.
    Calls may come from several threads; one of them runs a step for all jobs, and the others wait for it.
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
        use_ngram_draft: bool = False,
        max_ngram: int = 4,
        max_sampling_threads: int = 16,
        min_sampling_threads: int = 3,
        paged: bool = True,
        filter_background_eval: bool = True,
        max_queue: int | None = None,
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
        self.paged, self.page_size = paged, PAGE
        self.padded_vocab_size = -(-model.config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        default_rows = max(1, model.config.max_input_len // at_least("max_q_size", max_q_size, 1))
        rows = at_least("max_batch_size", max_batch_size or default_rows, 1)
        self.max_batch_size = rows if paged else 1
        self.max_seq_len = resolve_max_seq_len(max_seq_len, model.max_seq_len)
        self.max_chunk_size = resolve_chunk_size(max_chunk_size, model.config.max_input_len, paged)
        self.max_total_tokens = cache_tokens(cache)
        self.max_pages = self.max_total_tokens // PAGE
        self.max_queue = None if max_queue is None else at_least("max_queue", max_queue, 1)
        drafter = self._make_drafter(use_ngram_draft, max_ngram)
        default_draft_tokens = max(1, max_q_size - 1) if use_ngram_draft else DEFAULT_DRAFT_TOKENS
        self.num_draft_tokens = (
            0
            if drafter is None
            else resolve_num_draft_tokens(num_draft_tokens, default_draft_tokens, max_q_size)
        )
        self._engine = EngineCore(
            model.runner(cache),
            PageTable(self.max_pages, PAGE),
            tokenizer,
            model.config.vocab_size,
            max_batch_size=self.max_batch_size,
            chunk_size=self.max_chunk_size,
            max_length=self.max_seq_len,
            max_queue=self.max_queue,
            drafter=drafter,
            num_draft_tokens=self.num_draft_tokens,
            make_extras=lambda *args: model.make_extras(*args),
        )
        self.awaited_jobs: set[Job] = set()
        """Jobs that a call runs to their ends: `results_of` returns their results, not `iterate`."""
        self._pending_results = PendingResults()  # results of jobs that the calling thread did not wait for
        # Entered and left by the interpreter itself: Ctrl-C cannot come between taking it and the block.
        self.lock = threading.RLock()  # held while the queue changes and during a step
        self.in_step = False  # in the midst of a round
        self._cancelled_in_step: set[Job] = set()  # cancelled in the midst of it, by a hook or a filter
        self._last_writer: object = None  # who had written to the cache last when a round of ours was over

    @property
    def pending_jobs(self) -> list[Job]:
        """Jobs that wait."""
        return self._engine.scheduler.pending

    @property
    def active_jobs(self) -> list[Job]:
        """Jobs that run."""
        return self._engine.scheduler.active

    @property
    def num_pending_jobs(self) -> int:
        """How many jobs wait; no list of them is made."""
        return self._engine.scheduler.num_pending

    @property
    def num_active_jobs(self) -> int:
        """How many jobs run."""
        return self._engine.scheduler.running

    @property
    def pages(self) -> PageTable:
        """Whose the cache's pages are; to look at, not to change."""
        return self._engine.page_table

    def enqueue(self, job: Job | Sequence[Job]) -> int | list[int]:
        """Queue one job or several; their serial numbers. Nothing runs yet."""
        if isinstance(job, Job):
            return self._enqueue(job)
        if not isinstance(job, list | tuple) or not all(isinstance(one, Job) for one in job):
            raise InputError(f"A Job, or a list of them, can be enqueued; found {type(job).__name__}.")
        return [self._enqueue(one) for one in job]

    def iterate(self) -> list[Result]:
        """One round of the loop and its results; [] if there is nothing to do. Other threads wait for it."""
        with self.lock:
            found = self._pending_results.take_except(self.awaited_jobs)
            for result in self._step():
                if result["job"] in self.awaited_jobs:
                    self._pending_results.add(result)
                else:
                    found.append(result)
            return found

    def iterate_for(self, jobs: Collection[Job]) -> list[Result]:
        """What became of these jobs, in rounds for others or else in one more; others' results are kept."""
        with self.lock:
            if found := self._pending_results.take(jobs):
                return found
            for result in self._step():
                if result["job"] in jobs:
                    found.append(result)
                else:
                    self._pending_results.add(result)
            return found

    def cancel(self, job: Job) -> None:
        """Drop a job, waiting or running; no result is given for it. Harmless for a finished one."""
        with self.lock:
            self._pending_results.take({job})
            if self.in_step:
                self._cancelled_in_step.add(job)
            self._engine.cancel(job)

    def clear_queue(self) -> None:
        """Drop every job."""
        with self.lock:
            self._pending_results.clear()
            if self.in_step:
                self._cancelled_in_step |= {*self.active_jobs, *self.pending_jobs}
            self._engine.clear()

    def num_remaining_jobs(self) -> int:
        """Jobs that wait or run, and those whose end `iterate` has not told yet."""
        with self.lock:
            return self._engine.scheduler.num_unfinished + self._pending_results.num_finished(
                excluded=self.awaited_jobs
            )

    def max_sequence_length(self, num_sequences: int = 1) -> int:
        """How long, prompt and answer together, so many sequences of one job may become in an empty cache."""
        return min(self.max_seq_len, self.max_pages // num_sequences * PAGE)

    def cap_new_tokens(self, prompts: Sequence[Any], max_new_tokens: Any) -> Any:
        """`max_new_tokens`, or with a warning as many as the model's length leaves behind (1, n) prompts.

        The prompts are those of one job. A prompt that fills the length by itself is refused.
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
        """Forget every cached prompt."""
        with self.lock:
            if remaining := self._engine.scheduler.num_unfinished:
                raise InputError(f"{remaining} jobs use the cache: finish or clear them first.")
            self._engine.page_table.clear()

    def set_loras(self, loras: Any) -> None:
        """The adapters of jobs enqueued from now on that name none themselves: one, a list, or None.

        Jobs that wait or run keep theirs, and prompts are reused only by jobs with the same adapters.
        """
        listed = loras if isinstance(loras, list) else [] if loras is None else [loras]
        self.model.make_extras([], listed)  # refuses what is no adapter of this model
        self._engine.default_loras = self.current_loras = listed or None

    def warmup(self) -> None:
        """Generate a little, so that kernels are ready; the cache forgets it."""
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

        A str gives a str, a list a list in the same order; a pair of prompts (wanted, unwanted) is guided by
        `cfg_scale`. Prompt i uses seed + i. Nothing but `stop_conditions` and the limit ends a text; a limit
        beyond the model's length is lowered to it, with a warning. With
        `return_last_results` the answer is (completions, the last result of each job). A set `abort_event`
        drops the jobs and returns None; a job that fails drops the others and raises. Further arguments are
        `Job`'s; what it does not know either is passed over, with a warning.
        """
        known = {*argument_names(self.generate), *JOB_ARGUMENTS} - {"input_ids"}
        job_arguments = drop_unknown("generate()", job_arguments, known)
        single = isinstance(prompt, str | tuple)
        prompts = prompt_list(prompt)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "stop_conditions": materialize(stop_conditions),
            "decode_special_tokens": decode_special_tokens,
            "filter_prefer_eos": filter_prefer_eos,
            "token_healing": token_healing,
            "banned_strings": materialize(banned_strings),
        } | job_arguments
        count, one_for_all = len(prompts), gen_settings is None or isinstance(gen_settings, Settings)
        settings = (
            [gen_settings] * count if one_for_all else one_per_prompt(gen_settings, count, "gen_settings")
        )
        per_prompt: dict[str, list[Any]] = {
            "gen_settings": settings,
            "filters": [filters] if single else one_per_prompt(filters, count, "filters"),
            "embeddings": self._wrap_embeddings(prompts, embeddings, single),
            "seed": [seed + i if isinstance(seed, Integral) else seed for i in range(count)],
        }
        jobs = []
        for single_prompt, *own_values in zip(prompts, *per_prompt.values(), strict=True):
            job_options = options | dict(zip(per_prompt, own_values, strict=True))
            ids = self._encode(single_prompt, add_bos, encode_special_tokens, job_options["embeddings"])
            job_options["max_new_tokens"] = self.cap_new_tokens(ids, job_options["max_new_tokens"])
            jobs.append(Job(ids, **job_options))
        last = self._run_to_end(jobs, abort_event)
        if last is None:
            return None
        texts = [
            completion_text(single_prompt, result, completion_only)
            for single_prompt, result in zip(prompts, last, strict=True)
        ]
        answer: Any = texts[0] if single else texts
        return (answer, last[0] if single else last) if return_last_results else answer

    def _encode(self, prompt: Any, add_bos: bool, special: bool, embeddings: list[Any]) -> list[Any]:
        """The ids of a prompt, or of both halves of a pair."""
        options = {"embeddings": embeddings} if embeddings else {}
        return [
            self.tokenizer.encode(half, add_bos=add_bos, encode_special_tokens=special, **options)
            for half in prompt_texts(prompt)
        ]

    def _wrap_embeddings(self, prompts: list[Any], given: Any, single: bool) -> list[Any]:
        """What each prompt may name, bare vectors wrapped."""
        lists = [given] if single else one_per_prompt(given, len(prompts), "embeddings")
        return [
            [] if own is None else self.model.wrap_embeddings(prompt_texts(prompt)[0], own)
            for prompt, own in zip(prompts, lists, strict=True)
        ]

    def _run_to_end(self, jobs: list[Job], abort: threading.Event | None) -> list[StreamingResult] | None:
        """Run until these jobs are done, or one of them fails; None if aborted. Whatever is left is dropped.

        Other jobs run along; their results are kept for the calls that wait for them.
        """
        done: dict[Job, StreamingResult] = {}
        own = set(jobs)
        try:
            self.awaited_jobs |= own
            for job in jobs:
                self._enqueue(job)
            while len(done) < len(jobs):
                error: Exception | None = None
                with self.lock:
                    found = self.iterate_for(own)
                    idle = not self._engine.busy
                for result in found:
                    if result["stage"] == "streaming" and result["eos"]:
                        done[result["job"]] = result
                        error = error or result.get("error")
                if error is not None:
                    raise error
                if abort is not None and abort.is_set():
                    return None
                if idle and not found:
                    raise InputError("The request was dropped before its end: the queue was cleared.")
        finally:
            self.awaited_jobs -= own
            for job in jobs:
                self.cancel(job)
        return [done[job] for job in jobs]

    def _enqueue(self, job: Job) -> int:
        """Queue a job; clear the prefix cache first if another caller has written to the cache."""
        with self.lock:
            if not self._engine.busy and self.cache.last_writer is not self._engine.runner:
                self._engine.page_table.clear()
                self.cache.last_writer = self._last_writer = self._engine.runner
            return self._engine.enqueue(job)

    def _step(self) -> list[Result]:
        """A round of the loop, if anybody waits for one."""
        if self.in_step:
            raise InputError(
                "A hook or a filter asks the generator that waits for it: make another generator for that, "
                "or ask later. It may enqueue and cancel jobs."
            )
        overwritten = (
            self._fail_overwritten()
            if self._engine.busy and self.cache.last_writer is not self._last_writer
            else []
        )
        try:
            self.in_step = True
            self._cancelled_in_step.clear()
            found = [*overwritten, *(self._engine.step() if self._engine.busy else ())]
            return (
                [one for one in found if one["job"] not in self._cancelled_in_step]
                if self._cancelled_in_step
                else found
            )
        finally:
            self.in_step = False
            self._cancelled_in_step.clear()
            self._last_writer = self.cache.last_writer

    def _fail_overwritten(self) -> list[Result]:
        """Another caller has written to the cache: running jobs fail, pending jobs stay queued."""
        out: list[Result] = []
        for job in self.active_jobs:
            self._engine.cancel(job)
            out.append(error_result(job, InputError(CACHE_OVERWRITTEN)))
        self._engine.page_table.clear()
        return out

    def _make_drafter(self, ngram: bool, max_ngram: int) -> Drafter | None:
        if self.draft_model is None:
            return NgramDrafter(at_least("max_ngram", max_ngram, 0)) if ngram else None
        if ngram:
            raise InputError("Cannot use both draft model and ngram draft.")
        if self.draft_cache is None:
            raise InputError("Must supply cache for draft model.")
        if self.draft_cache is self.cache:
            raise InputError(DRAFT_SHARES_CACHE)
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
