"""StreamingGenerator: one text, token by token, in the old library's shape.

A stream is a job of the dynamic generator's loop that is asked for one token at a time. What the cache holds
of the last text is found again by the page table; guessing ahead is `foresight`'s.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from .. import Cache, CacheBase, InputError, Model, Settings, Tokenizer
from ..generator.arguments import names, pass_over
from ..generator.generator import OVERWRITTEN, SAME_CACHE
from ..generator.job import split_conditions
from .base_generator import BaseGenerator
from .chunks import Chunk, chunk_of, joined, nothing
from .embeddings import into_ids
from .foresight import Foresight, Guess
from .guessing import DraftGuess, NgramGuess, NgramTable
from .jobs import StreamJob, banned, filtering
from .rows import listed, unpadded


class StreamingGenerator(BaseGenerator):
    """Streams one text: `begin_stream_ex`, then `stream_ex` until its "eos".

    The attributes that tune it count from the next stream on: `num_speculative_tokens` and
    `speculative_prob_threshold` for a draft model, `speculative_ngram` and those that begin like it for
    guesses by n-grams, which come before the draft model. Stop conditions count from the next token on, and
    so do `return_probabilities`, `return_logits` and `return_top_tokens`, which each stream begins with as
    its call says.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheBase,
        tokenizer: Tokenizer,
        draft_model: Model | None = None,
        draft_cache: CacheBase | None = None,
        num_speculative_tokens: int = 5,
    ) -> None:
        """A draft model's cache may be of any size; without one, it gets one like the large model's."""
        super().__init__(model, cache, tokenizer)
        if draft_model is not None and draft_cache is None:
            draft_cache = Cache(draft_model, batch_size=cache.batch_size, max_seq_len=cache.max_seq_len)
        if draft_model is not None and draft_cache is cache:
            raise InputError(SAME_CACHE)
        self.draft_model, self.draft_cache = draft_model, draft_cache
        self.num_speculative_tokens = num_speculative_tokens
        self.speculative_prob_threshold = 0.25
        self.speculative_ngram = False
        self.speculative_ngram_min, self.speculative_ngram_max = 1, 5
        self.speculative_ngram_max_inf = 3
        self.speculative_ngram_threshold = 1
        self.stop_tokens: set[int] = set(tokenizer.eos_token_ids)
        self.stop_strings: set[str] = set()
        self.settings: Settings | None = None
        self.return_probabilities = self.return_logits = False
        self.return_top_tokens = 0
        self._job: StreamJob | None = None
        self._unnamed = 0
        self._bounded = False  # somebody said how many tokens are enough
        self._ngrams: NgramGuess | None = None
        self._preloaded: list[list[int]] = []

    def set_stop_conditions(self, stop_conditions: Collection[int | str]) -> None:
        """End streams at these token ids and strings, instead of those so far; at EOS if nothing was set."""
        tokens, strings = split_conditions(stop_conditions)
        self.stop_tokens, self.stop_strings = set(tokens), set(strings)

    # A stream

    def begin_stream_ex(
        self,
        input_ids: Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: Any = None,
        input_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        return_probabilities: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        abort_event: threading.Event | None = None,
        input_embeddings: Any = None,
        decode_special_tokens: bool = False,
        banned_strings: Sequence[str] | None = None,
        filters: Sequence[Any] | None = None,
        filter_prefer_eos: bool = False,
        *,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        **unknown: Any,
    ) -> None:
        """Read a prompt (1, n), or a padded pair (2, n) for guidance; what the cache has of it is kept.

        The stream ends by itself after `max_new_tokens`. Where the cache is full first, `full()` says so, and
        only a further call brings the end. Without a seed Python's `random` gives one. If `abort_event` is
        set while the prompt is read, the stream is over before it began, and `sequence_ids` is what was read.
        Unknown arguments are passed over, with a warning.
        """
        pass_over("begin_stream_ex()", unknown, names(self.begin_stream_ex))
        if input_embeddings is not None and self.draft_model is not None:
            raise InputError("Can not use input embeddings with draft model, which knows nothing of them.")
        ids, embeddings = into_ids(self.model, input_embeddings, input_ids)
        rows = unpadded(ids, input_mask, position_offsets)
        filtered = filtering(gen_settings, filters, filter_prefer_eos)
        _check(rows, gen_settings)
        room = self._room(rows)
        job = StreamJob(
            rows,
            room if max_new_tokens is None else min(max_new_tokens, room),
            gen_settings=gen_settings,
            seed=random.getrandbits(63) if seed is None else seed,
            stop_conditions=[*self.stop_tokens, *self.stop_strings],
            decode_special_tokens=decode_special_tokens,
            return_top_tokens=return_top_tokens,
            return_logits=return_logits,
            return_probs=return_probabilities,
            token_healing=token_healing,
            banned_strings=banned_strings,
            embeddings=embeddings,
            loras=loras,
            **filtered,
        )
        self.return_probabilities, self.return_logits = return_probabilities, return_logits
        self.return_top_tokens = return_top_tokens
        self.abort_event, self.settings = abort_event, gen_settings
        self._bounded = max_new_tokens is not None and max_new_tokens <= room
        self._begin(job)

    def stream_ex(self, ban_tokens: Collection[int] | None = None, **unknown: Any) -> Chunk:
        """The next token, except `ban_tokens`, and what it lets be seen; after the end, the end again.

        A healed token comes together with the next one and is not among the ids: it was in the prompt.
        """
        pass_over("stream_ex()", unknown, ["ban_tokens"])
        job = self._job
        if job is None:
            raise InputError("There is no stream: call begin_stream_ex() first.")
        if self._aborted or job.is_finished:
            self._loop.cancel(job)
            return nothing(job, self.model.config.vocab_size, eos=True)
        if self.cache.tenant is not self._runner.runner:
            self._loop.cancel(job)
            self._job = None
            raise InputError(OVERWRITTEN)
        self._follow_conditions(job)
        job.banned_now = banned(ban_tokens)
        healing = job.output.healing
        chunk = self._take(job)
        if healing and not job.is_finished and "suppressed" not in chunk:
            chunk = joined(chunk, self._take(job))
        self.cache.current_seq_len = len(job.sequences[0]) - 1
        return chunk

    def begin_stream(
        self,
        input_ids: Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: Any = None,
        input_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        abort_event: threading.Event | None = None,
        **options: Any,
    ) -> None:
        """`begin_stream_ex` with its arguments in an older order; further ones by name."""
        further = pass_over("begin_stream()", options, names(self.begin_stream_ex))
        self.begin_stream_ex(
            input_ids,
            gen_settings,
            token_healing,
            loras,
            input_mask,
            position_offsets,
            abort_event=abort_event,
            **further,
        )

    def stream(self, **unknown: Any) -> tuple[Any, ...]:
        """`stream_ex` as a tuple: chunk, eos, ids, then probabilities and logits if they were asked for.

        Here logits have no dimension for the one row: (tokens, vocabulary).
        """
        pass_over("stream()", unknown, [])
        if self.return_top_tokens:
            raise InputError("stream() has no place for top tokens: call stream_ex().")
        chunk = self.stream_ex()
        wanted = [chunk["probs"]] if "probs" in chunk else []
        wanted += [chunk["logits"][0]] if "logits" in chunk else []
        return (chunk["chunk"], chunk["eos"], chunk["chunk_token_ids"], *wanted)

    def full(self) -> bool:
        """Whether the running sequence is as long as it may become."""
        rows = self._rows or []
        return bool(rows) and max(map(len, rows)) >= self._limit(len(rows))

    # Speculation

    def ngram_preload(self, input_ids: Tensor | Sequence[int]) -> None:
        """Let n-gram guesses know these ids, (rows, n) or just one row, besides the text at hand."""
        self._preloaded += listed(input_ids)
        self._ngrams = None

    @property
    def total_tokens(self) -> int:
        """Tokens asked for while guessing."""
        return self._runner.asked

    @property
    def total_draft_tokens(self) -> int:
        """Tokens guessed."""
        return self._runner.guessed

    @property
    def accepted_draft_tokens(self) -> int:
        """Guesses that were right."""
        return self._runner.right

    def get_sd_stats(self) -> tuple[float, float, int, int, int]:
        """Guesses that were right, of all tokens and of all guesses; tokens, guesses, and right guesses."""
        asked, guessed, right = self.total_tokens, self.total_draft_tokens, self.accepted_draft_tokens
        return right / max(asked, 1), right / max(guessed, 1), asked, guessed, right

    def reset_sd_stats(self) -> None:
        """Count from zero again."""
        self._runner.asked = self._runner.guessed = self._runner.right = 0

    @cached_property
    def _runner(self) -> Foresight:
        return Foresight(self.model.runner(self.cache))

    @cached_property
    def _draft(self) -> DraftGuess | None:
        if self.draft_model is None or self.draft_cache is None:
            return None
        return DraftGuess(self.draft_model, self.draft_cache, self.model.config.vocab_size)

    def _guess(self) -> Guess | None:
        if self.speculative_ngram:
            return self._ngram_guess()
        if self._draft is not None:
            self._draft.most, self._draft.least = self.num_speculative_tokens, self.speculative_prob_threshold
        return self._draft

    def _ngram_guess(self) -> NgramGuess:
        table = NgramTable(self.speculative_ngram_min, self.speculative_ngram_max)
        if self._ngrams is None or self._ngrams.table.sizes != table.sizes:
            for ids in self._preloaded:
                table.count(ids, 0)
            self._ngrams = NgramGuess(table)
        self._ngrams.most = self.speculative_ngram_max_inf - 1
        self._ngrams.threshold = self.speculative_ngram_threshold
        return self._ngrams

    # Inside

    def _limit(self, rows: int) -> int:
        """How long a sequence may become if the cache has to hold so many."""
        pages = self._loop.pages
        return min(self.max_length, pages.num_pages // rows * pages.page_size)

    def _room(self, rows: list[Tensor]) -> int:
        longest, limit = max(row.shape[1] for row in rows), self._limit(len(rows))
        if longest >= limit:
            raise InputError(
                f"A prompt of {longest} tokens leaves no room for a reply in {limit}: shorten it, or make "
                "the cache, and config.max_seq_len, longer."
            )
        return limit - longest

    def _begin(self, job: StreamJob) -> None:
        self._loop.clear()
        self._job = None
        if self.cache.tenant is not self._runner.runner:  # somebody else has written to it
            self._loop.pages.clear()
            self.cache.tenant = self._runner.runner
        self._runner.guess = self._guess()
        self._loop.enqueue(job)
        self._job, self._unnamed = job, int(job.token_healing)
        self._rows = [sequence.ids for sequence in job.sequences]
        first = job.sequences[0]
        while not self._aborted:
            for result in self._loop.read():
                _raise(result)
            self.cache.current_seq_len = first.cached
            if all(sequence.ready for sequence in job.sequences):
                return
        self._rows = [sequence.ids[: sequence.cached] for sequence in job.sequences]
        self._loop.cancel(job)

    def _take_over(self) -> None:
        super()._take_over()
        self._job, self._runner.guess = None, None

    def _take(self, job: StreamJob) -> Chunk:
        """Run until the job has one more token."""
        while True:
            for result in self._loop.step():
                _raise(result)
                if result["stage"] == "streaming":
                    shown = result["token_ids"].shape[1] if "token_ids" in result else 0
                    skip = min(shown, self._unnamed)
                    self._unnamed -= skip
                    chunk = chunk_of(result, self.model.config.vocab_size, skip)
                    # Who asks full() after each token goes on with a shorter prompt; the text has not ended.
                    if result.get("eos_reason") == "max_new_tokens" and not self._bounded:
                        chunk["eos"] = False
                    return chunk

    def _follow_conditions(self, job: StreamJob) -> None:
        """Let a running job know of conditions and wishes that were changed; held text is judged first."""
        if not job.pending:  # those tokens were sampled without what may be wanted now
            job.want(self.return_probabilities, self.return_top_tokens, self.return_logits)
        tokens, strings = frozenset(self.stop_tokens), frozenset(self.stop_strings)
        if (job.stop_tokens, frozenset(job.stop_strings)) != (tokens, strings) and not job.output.held:
            job.stop_tokens, job.stop_strings = tokens, tuple(strings)
            job.output.set_stops(tokens, strings)


def _check(rows: list[Tensor], settings: Settings) -> None:
    """One row, or two for guidance."""
    if len(rows) == 2 and settings.cfg_scale is None:
        raise InputError("Two rows are for guidance, but no CFG scale is set: set gen_settings.cfg_scale.")
    if len(rows) not in (1, 2):
        raise InputError(f"Streaming generator does not support batch size > 1, found {len(rows)} rows.")


def _raise(result: Any) -> None:
    """A job that cannot go on says so in its last result; a stream says so at once."""
    if "error" in result:
        raise result["error"]
