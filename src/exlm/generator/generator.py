"""The generator users hold: prompts in, completions out, many at once, over one paged cache."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any

from ..errors import InputError
from ..sampling import Settings
from .arguments import OF_GENERATE, names, pass_over, refuse
from .asked import (
    PAGE,
    all_prompts,
    at_least,
    check_parts,
    chunk_size,
    draft_count,
    halves,
    one_each,
    sequence_length,
    token_budget,
    told,
)
from .backlog import Backlog
from .draft import Drafter, ModelDraft, NgramDraft
from .job import ARGUMENTS, Job, lasting
from .loop import Loop
from .pages import PageTable
from .results import Result, StreamingResult, failed

DRAFTED = 4  # guesses in a step, of which each is a pass of a draft model
OVERWRITTEN = (
    "Somebody else has written to the cache while this text was being made, and what it held of it is lost: "
    "give each generator a cache of its own, or let one finish before the other begins."
)
SAME_CACHE = (
    "draft_cache is the model's own cache, where the draft model would write over what the model reads: give "
    "it one of its own, draft_cache=Cache(draft_model, max_seq_len=cache.max_seq_len)."
)
PADDING = 32  # the old library's logits were a multiple of this wide


class Generator:
    """Runs any number of jobs in one continuous batch.

    `cache.max_seq_len` is the budget in tokens for all of them together, a multiple of 256; prompts and their
    completions stay in it for the next request to begin with. `max_queue` is how many jobs may wait to start,
    None for any number. With `paged=False` one sequence runs at a time, over the same pages. At most
    `num_draft_tokens` are guessed in a step: 4 by a draft model, and `max_q_size - 1` from n-grams.
    Calls may come from several threads; one of them runs a round, for everybody, and the others wait for it.
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
        refuse("Generator", unknown, names(Generator), {*ARGUMENTS, *OF_GENERATE}, "a job, or generate(),")
        check_parts(model, cache)
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.draft_model, self.draft_cache = draft_model, draft_cache
        self.current_loras: list[Any] | None = None
        self.paged, self.page_size = paged, PAGE
        self.padded_vocab_size = -(-model.config.vocab_size // PADDING) * PADDING
        usual_rows = max(1, model.config.max_input_len // at_least("max_q_size", max_q_size, 1))
        rows = at_least("max_batch_size", max_batch_size or usual_rows, 1)
        self.max_batch_size = rows if paged else 1
        self.max_seq_len = sequence_length(max_seq_len, model.max_seq_len)
        self.max_chunk_size = chunk_size(max_chunk_size, model.config.max_input_len, paged)
        self.max_total_tokens = token_budget(cache)
        self.max_pages = self.max_total_tokens // PAGE
        self.max_queue = None if max_queue is None else at_least("max_queue", max_queue, 1)
        drafter = self._drafter(use_ngram_draft, max_ngram)
        usual = max(1, max_q_size - 1) if use_ngram_draft else DRAFTED
        self.num_draft_tokens = 0 if drafter is None else draft_count(num_draft_tokens, usual, max_q_size)
        self._loop = Loop(
            model.runner(cache),
            PageTable(self.max_pages, PAGE),
            tokenizer,
            model.config.vocab_size,
            max_batch_size=self.max_batch_size,
            chunk=self.max_chunk_size,
            max_length=self.max_seq_len,
            max_queue=self.max_queue,
            drafter=drafter,
            draft_tokens=self.num_draft_tokens,
            extras=lambda *asked: model.extras(*asked),
        )
        self.awaited: set[Job] = set()
        """Jobs that somebody runs to their ends: what becomes of them is for `results_of`, not `iterate`."""
        self._backlog = Backlog()  # results that were met by somebody who did not wait for them
        # Entered and left by the interpreter itself: Ctrl-C cannot come between taking it and the block.
        self.turn = threading.RLock()  # held by whoever changes the queue, or is in the midst of a round
        self.stepping = False  # in the midst of a round
        self._called_off: set[Job] = set()  # cancelled in the midst of it, by a hook or a filter
        self._tenant: object = None  # who had written to the cache last when a round of ours was over

    @property
    def pending_jobs(self) -> list[Job]:
        """Jobs that wait."""
        return self._loop.scheduler.pending

    @property
    def active_jobs(self) -> list[Job]:
        """Jobs that run."""
        return self._loop.scheduler.active

    @property
    def num_pending_jobs(self) -> int:
        """How many jobs wait; no list of them is made."""
        return self._loop.scheduler.waiting

    @property
    def num_active_jobs(self) -> int:
        """How many jobs run."""
        return self._loop.scheduler.running

    @property
    def pages(self) -> PageTable:
        """Whose the cache's pages are; to look at, not to change."""
        return self._loop.pages

    def enqueue(self, job: Job | Sequence[Job]) -> int | list[int]:
        """Queue one job or several; their serial numbers. Nothing runs yet."""
        if isinstance(job, Job):
            return self._take(job)
        if not isinstance(job, list | tuple) or not all(isinstance(one, Job) for one in job):
            raise InputError(f"A Job, or a list of them, can be enqueued; found {type(job).__name__}.")
        return [self._take(one) for one in job]

    def iterate(self) -> list[Result]:
        """One round of the loop and its results; [] if there is nothing to do. Other threads wait for it."""
        with self.turn:
            found = self._backlog.take_others(self.awaited)
            for result in self._step():
                if result["job"] in self.awaited:
                    self._backlog.keep(result)
                else:
                    found.append(result)
            return found

    def results_of(self, jobs: Collection[Job]) -> list[Result]:
        """What became of these jobs, in rounds for others or else in one more; others' results are kept."""
        with self.turn:
            if found := self._backlog.take(jobs):
                return found
            for result in self._step():
                if result["job"] in jobs:
                    found.append(result)
                else:
                    self._backlog.keep(result)
            return found

    def cancel(self, job: Job) -> None:
        """Drop a job, waiting or running; no result is given for it. Harmless for a finished one."""
        with self.turn:
            self._backlog.take({job})
            if self.stepping:
                self._called_off.add(job)
            self._loop.cancel(job)

    def clear_queue(self) -> None:
        """Drop every job."""
        with self.turn:
            self._backlog.clear()
            if self.stepping:
                self._called_off |= {*self.active_jobs, *self.pending_jobs}
            self._loop.clear()

    def num_remaining_jobs(self) -> int:
        """Jobs that wait or run, and those whose end `iterate` has not told yet."""
        with self.turn:
            return self._loop.scheduler.remaining + self._backlog.ends(but=self.awaited)

    def longest(self, sequences: int = 1) -> int:
        """How long, prompt and answer together, so many sequences of one job may become in an empty cache."""
        return min(self.max_seq_len, self.max_pages // sequences * PAGE)

    def reset_page_table(self) -> None:
        """Forget every cached prompt."""
        with self.turn:
            if remaining := self._loop.scheduler.remaining:
                raise InputError(f"{remaining} jobs use the cache: finish or clear them first.")
            self._loop.pages.clear()

    def set_loras(self, loras: Any) -> None:
        """The adapters of jobs enqueued from now on that name none themselves: one, a list, or None.

        Jobs that wait or run keep theirs, and prompts are reused only by jobs with the same adapters.
        """
        listed = loras if isinstance(loras, list) else [] if loras is None else [loras]
        self.model.extras([], listed)  # refuses what is no adapter of this model
        self._loop.loras = self.current_loras = listed or None

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
        `cfg_scale`. Prompt i uses seed + i. Nothing but `stop_conditions` and the limit ends a text. With
        `return_last_results` the answer is (completions, the last result of each job). A set `abort_event`
        drops the jobs and returns None; a job that fails drops the others and raises. Further arguments are
        `Job`'s; what it does not know either is passed over, with a warning.
        """
        known = {*names(self.generate), *ARGUMENTS} - {"input_ids"}
        job_arguments = pass_over("generate()", job_arguments, known)
        single = isinstance(prompt, str | tuple)
        prompts = all_prompts(prompt)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "stop_conditions": lasting(stop_conditions),
            "decode_special_tokens": decode_special_tokens,
            "filter_prefer_eos": filter_prefer_eos,
            "token_healing": token_healing,
            "banned_strings": lasting(banned_strings),
        } | job_arguments
        count, one_for_all = len(prompts), gen_settings is None or isinstance(gen_settings, Settings)
        settings = [gen_settings] * count if one_for_all else one_each(gen_settings, count, "gen_settings")
        each: dict[str, list[Any]] = {
            "gen_settings": settings,
            "filters": [filters] if single else one_each(filters, count, "filters"),
            "embeddings": self._embeddings(prompts, embeddings, single),
            "seed": [seed + i if isinstance(seed, Integral) else seed for i in range(count)],
        }
        jobs = []
        for one, *own in zip(prompts, *each.values(), strict=True):
            mine = options | dict(zip(each, own, strict=True))
            jobs.append(Job(self._encode(one, add_bos, encode_special_tokens, mine["embeddings"]), **mine))
        last = self._finish(jobs, abort_event)
        if last is None:
            return None
        texts = [told(one, result, completion_only) for one, result in zip(prompts, last, strict=True)]
        answer: Any = texts[0] if single else texts
        return (answer, last[0] if single else last) if return_last_results else answer

    def _encode(self, prompt: Any, add_bos: bool, special: bool, embeddings: list[Any]) -> list[Any]:
        """The ids of a prompt, or of both halves of a pair."""
        options = {"embeddings": embeddings} if embeddings else {}
        return [
            self.tokenizer.encode(half, add_bos=add_bos, encode_special_tokens=special, **options)
            for half in halves(prompt)
        ]

    def _embeddings(self, prompts: list[Any], given: Any, single: bool) -> list[Any]:
        """What each prompt may name, bare vectors wrapped."""
        lists = [given] if single else one_each(given, len(prompts), "embeddings")
        return [
            [] if own is None else self.model.injected(halves(prompt)[0], own)
            for prompt, own in zip(prompts, lists, strict=True)
        ]

    def _finish(self, jobs: list[Job], abort: threading.Event | None) -> list[StreamingResult] | None:
        """Run until these jobs are done, or one of them fails; None if aborted. Whatever is left is dropped.

        Other jobs run along; their results are kept for whoever waits for them.
        """
        done: dict[Job, StreamingResult] = {}
        own = set(jobs)
        try:
            self.awaited |= own
            for job in jobs:
                self._take(job)
            while len(done) < len(jobs):
                error: Exception | None = None
                with self.turn:
                    found = self.results_of(own)
                    idle = not self._loop.busy
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
            self.awaited -= own
            for job in jobs:
                self.cancel(job)
        return [done[job] for job in jobs]

    def _take(self, job: Job) -> int:
        """Queue a job; what the cache held is forgotten if somebody else has written to it since."""
        with self.turn:
            if not self._loop.busy and self.cache.tenant is not self._loop.runner:
                self._loop.pages.clear()
                self.cache.tenant = self._tenant = self._loop.runner
            return self._loop.enqueue(job)

    def _step(self) -> list[Result]:
        """A round of the loop, if anybody waits for one."""
        if self.stepping:
            raise InputError(
                "A hook or a filter asks the generator that waits for it: make another generator for that, "
                "or ask later. It may enqueue and cancel jobs."
            )
        lost = self._overwritten() if self._loop.busy and self.cache.tenant is not self._tenant else []
        try:
            self.stepping = True
            self._called_off.clear()
            found = [*lost, *(self._loop.step() if self._loop.busy else ())]
            return [one for one in found if one["job"] not in self._called_off] if self._called_off else found
        finally:
            self.stepping = False
            self._called_off.clear()
            self._tenant = self.cache.tenant

    def _overwritten(self) -> list[Result]:
        """Somebody else has written to the cache: those who had something in it fail, the others wait on."""
        out: list[Result] = []
        for job in self.active_jobs:
            self._loop.cancel(job)
            out.append(failed(job, InputError(OVERWRITTEN)))
        self._loop.pages.clear()
        return out

    def _drafter(self, ngram: bool, longest: int) -> Drafter | None:
        if self.draft_model is None:
            return NgramDraft(at_least("max_ngram", longest, 0)) if ngram else None
        if ngram:
            raise InputError("Cannot use both draft model and ngram draft.")
        if self.draft_cache is None:
            raise InputError("Must supply cache for draft model.")
        if self.draft_cache is self.cache:
            raise InputError(SAME_CACHE)
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
        return ModelDraft(self.draft_model.runner(self.draft_cache))
