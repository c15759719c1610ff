"""StreamingGenerator, exllamav2's token-by-token generator, on the engine of `exlm.Generator`.

A stream is one job; each `stream_ex` runs the engine until the job has one more token. The page table finds
the prefix that a new prompt shares with the last text. `SpeculativeRunner` does speculative decoding.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from ..errors import InputError, Unsupported
from ..generator import Job
from ..generator.generator import CACHE_OVERWRITTEN, DRAFT_SHARES_CACHE
from ..generator.validation import argument_names, drop_unknown, split_stop_conditions
from ..kvcache import Cache, CacheBase
from ..model import Model
from ..sampling import SamplingRequest, Settings
from ..tokenizer import Tokenizer
from .arguments import banned_token_set, embed_in_ids, filter_arguments, id_lists, strip_padding
from .base_generator import BaseGenerator, LegacyJob
from .speculative import DraftFunction, ModelDraftFunction, NgramCounts, NgramDraftFunction, SpeculativeRunner


class StreamJob(LegacyJob):
    """A job whose tokens are requested one by one; ids in `banned_next` cannot be the next one."""

    banned_next: frozenset[int] = frozenset()

    def bind(self, serial: int, tokenizer: Tokenizer, vocab_size: int) -> None:
        """As for any job; not simple, because each call may ban tokens."""
        super().bind(serial, tokenizer, vocab_size)
        self.is_simple = False

    def set_token_details(self, probs: bool, top: int, logits: bool) -> None:
        """Change which details are returned with the tokens sampled from now on."""
        self.return_probs, self.return_top_tokens, self.return_logits = probs, top, logits
        self.sampling_request.return_probs = probs or bool(self.hooks)
        self.sampling_request.num_top_tokens = top

    def next_sampling_request(self) -> SamplingRequest:
        """The request for the next token, without the banned ids."""
        request = super().next_sampling_request()
        request.blocked = self.banned_next.union(request.blocked)
        return request


class StreamingGenerator(BaseGenerator):
    """Streams one text: call `begin_stream_ex`, then `stream_ex` until its "eos" is true.

    Attributes for speculative decoding take effect with the next stream: `num_speculative_tokens` and
    `speculative_prob_threshold` for a draft model; `speculative_ngram…` for n-gram drafts, which take
    precedence. Stop conditions take effect with the next token, and so do `return_probabilities`,
    `return_logits` and `return_top_tokens`, which `begin_stream_ex` sets.
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
        """A draft model's cache may have any size; by default it is created like the model's."""
        super().__init__(model, cache, tokenizer)
        if draft_model is not None and draft_cache is None:
            draft_cache = Cache(draft_model, batch_size=cache.batch_size, max_seq_len=cache.max_seq_len)
        if draft_model is not None and draft_cache is cache:
            raise InputError(DRAFT_SHARES_CACHE)
        if draft_model is not None:
            _refuse_drafts_on_states(cache, draft_cache)
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
        self._num_healed_to_skip = 0
        self._has_token_limit = False  # whether the caller set `max_new_tokens`
        self._ngram_draft: NgramDraftFunction | None = None
        self._preloaded_ids: list[list[int]] = []

    def set_stop_conditions(self, stop_conditions: Collection[int | str]) -> None:
        """Set the token ids and strings that end a stream; the default is EOS."""
        tokens, strings = split_stop_conditions(stop_conditions)
        self.stop_tokens, self.stop_strings = set(tokens), set(strings)

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
        """Prefill a prompt (1, n), or a padded pair (2, n) for guidance, reusing its prefix in the cache.

        The stream ends after `max_new_tokens`. When the cache is full first, `full()` is true, and the next
        call returns the end. Without a seed, one is drawn from Python's `random`. If `abort_event` is set
        during prefill, the stream has ended, and `sequence_ids` is what was prefilled. Unknown arguments are
        ignored with a warning.
        """
        drop_unknown("begin_stream_ex()", unknown, argument_names(self.begin_stream_ex))
        if input_embeddings is not None and self.draft_model is not None:
            raise InputError("Can not use input embeddings with draft model, which takes only tokens.")
        ids, embeddings = embed_in_ids(self.model, input_embeddings, input_ids)
        rows = strip_padding(ids, input_mask, position_offsets)
        filter_options = filter_arguments(gen_settings, filters, filter_prefer_eos)
        _check_row_count(rows, gen_settings)
        tokens_left = self._tokens_left(rows)
        job = StreamJob(
            rows,
            tokens_left if max_new_tokens is None else min(max_new_tokens, tokens_left),
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
            **filter_options,
        )
        self.return_probabilities, self.return_logits = return_probabilities, return_logits
        self.return_top_tokens = return_top_tokens
        self.abort_event, self.settings = abort_event, gen_settings
        self._has_token_limit = max_new_tokens is not None and max_new_tokens <= tokens_left
        self._start(job)

    def stream_ex(self, ban_tokens: Collection[int] | None = None, **unknown: Any) -> Chunk:
        """Sample the next token, which is not in `ban_tokens`; a chunk with the text it releases.

        After the end, the chunk is empty. A healed token is returned together with the next one, without its
        id, which was in the prompt.
        """
        drop_unknown("stream_ex()", unknown, ["ban_tokens"])
        job = self._job
        if job is None:
            raise InputError("There is no stream: call begin_stream_ex() first.")
        if self._aborted or job.is_finished:
            self._engine.cancel(job)
            return empty_chunk(job, self.model.config.vocab_size, eos=True)
        if self.cache.last_writer is not self._runner.runner:
            self._engine.cancel(job)
            self._job = None
            raise InputError(CACHE_OVERWRITTEN)
        self._apply_changed_options(job)
        job.banned_next = banned_token_set(ban_tokens)
        healing = job.output.healing
        chunk = self._next_chunk(job)
        if healing and not job.is_finished and "suppressed" not in chunk:
            chunk = merge_chunks(chunk, self._next_chunk(job))
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
        """`begin_stream_ex` with the older order of arguments; the others by name."""
        known_options = drop_unknown("begin_stream()", options, argument_names(self.begin_stream_ex))
        self.begin_stream_ex(
            input_ids,
            gen_settings,
            token_healing,
            loras,
            input_mask,
            position_offsets,
            abort_event=abort_event,
            **known_options,
        )

    def stream(self, **unknown: Any) -> tuple[Any, ...]:
        """`stream_ex` as a tuple: chunk, eos, ids, then probabilities and logits if requested.

        Logits are (tokens, vocabulary), without the dimension of the row.
        """
        drop_unknown("stream()", unknown, [])
        if self.return_top_tokens:
            raise InputError("stream() has no place for top tokens: call stream_ex().")
        chunk = self.stream_ex()
        details = [chunk["probs"]] if "probs" in chunk else []
        details += [chunk["logits"][0]] if "logits" in chunk else []
        return (chunk["chunk"], chunk["eos"], chunk["chunk_token_ids"], *details)

    def full(self) -> bool:
        """Whether the running sequence has reached its maximum length."""
        rows = self._sequence_rows or []
        return bool(rows) and max(map(len, rows)) >= self._max_length_of(len(rows))

    # Speculative decoding

    def ngram_preload(self, input_ids: Tensor | Sequence[int]) -> None:
        """Add ids, (rows, n) or one row, to the n-gram counts of all streams, besides the stream's own."""
        self._preloaded_ids += id_lists(input_ids)
        self._ngram_draft = None

    @property
    def total_tokens(self) -> int:
        """Tokens requested with speculative decoding."""
        return self._runner.num_requested

    @property
    def total_draft_tokens(self) -> int:
        """Tokens drafted."""
        return self._runner.num_drafted

    @property
    def accepted_draft_tokens(self) -> int:
        """Drafted tokens that were accepted."""
        return self._runner.num_accepted

    def get_sd_stats(self) -> tuple[float, float, int, int, int]:
        """Accepted / tokens, accepted / drafted, and the numbers of tokens, drafted and accepted tokens."""
        tokens, drafted, accepted = self.total_tokens, self.total_draft_tokens, self.accepted_draft_tokens
        return accepted / max(tokens, 1), accepted / max(drafted, 1), tokens, drafted, accepted

    def reset_sd_stats(self) -> None:
        """Reset the counts of `get_sd_stats`."""
        self._runner.num_requested = self._runner.num_drafted = self._runner.num_accepted = 0

    @cached_property
    def _runner(self) -> SpeculativeRunner:
        return SpeculativeRunner(self.model.runner(self.cache))

    @cached_property
    def _model_draft(self) -> ModelDraftFunction | None:
        if self.draft_model is None or self.draft_cache is None:
            return None
        return ModelDraftFunction(self.draft_model, self.draft_cache, self.model.config.vocab_size)

    def _select_draft(self) -> DraftFunction | None:
        if self.speculative_ngram:
            _refuse_drafts_on_states(self.cache)
            return self._make_ngram_draft()
        if self._model_draft is not None:
            self._model_draft.max_tokens = self.num_speculative_tokens
            self._model_draft.min_prob = self.speculative_prob_threshold
        return self._model_draft

    def _make_ngram_draft(self) -> NgramDraftFunction:
        counts = NgramCounts(self.speculative_ngram_min, self.speculative_ngram_max)
        if self._ngram_draft is None or self._ngram_draft.counts.sizes != counts.sizes:
            for ids in self._preloaded_ids:
                counts.count(ids, 0)
            self._ngram_draft = NgramDraftFunction(counts)
        self._ngram_draft.max_tokens = self.speculative_ngram_max_inf - 1
        self._ngram_draft.threshold = self.speculative_ngram_threshold
        return self._ngram_draft

    # Internals

    def _max_length_of(self, num_rows: int) -> int:
        """The maximum length of a sequence if the cache holds `num_rows` of them."""
        page_table = self._engine.page_table
        return min(self.max_length, page_table.num_pages // num_rows * page_table.page_size)

    def _tokens_left(self, rows: list[Tensor]) -> int:
        longest, limit = max(row.shape[1] for row in rows), self._max_length_of(len(rows))
        if longest >= limit:
            raise InputError(
                f"A prompt of {longest} tokens leaves no room for a reply in {limit}: shorten it, or make "
                "the cache, and config.max_seq_len, longer."
            )
        return limit - longest

    def _start(self, job: StreamJob) -> None:
        self._engine.clear()
        self._job = None
        if self.cache.last_writer is not self._runner.runner:  # another caller wrote to the cache
            self._forget_contents()
            self.cache.last_writer = self._runner.runner
        self._runner.draft = self._select_draft()
        self._engine.enqueue(job)
        self._job, self._num_healed_to_skip = job, int(job.token_healing)
        self._sequence_rows = [sequence.ids for sequence in job.sequences]
        first = job.sequences[0]
        while not self._aborted:
            for result in self._engine.step_prefill():
                _raise_error(result)
            self.cache.current_seq_len = first.num_computed_tokens
            if all(sequence.prefill_done for sequence in job.sequences):
                return
        self._sequence_rows = [sequence.ids[: sequence.num_computed_tokens] for sequence in job.sequences]
        self._engine.cancel(job)

    def _reset_cache(self) -> None:
        super()._reset_cache()
        self._job, self._runner.draft = None, None

    def _next_chunk(self, job: StreamJob) -> Chunk:
        """Run the engine until the job has one more token."""
        while True:
            for result in self._engine.step():
                _raise_error(result)
                if result["stage"] == "streaming":
                    num_emitted = result["token_ids"].shape[1] if "token_ids" in result else 0
                    skip = min(num_emitted, self._num_healed_to_skip)
                    self._num_healed_to_skip -= skip
                    chunk = chunk_from_result(result, self.model.config.vocab_size, skip)
                    # A full cache does not end the text: scripts check full() and shorten the prompt.
                    if result.get("eos_reason") == "max_new_tokens" and not self._has_token_limit:
                        chunk["eos"] = False
                    return chunk

    def _apply_changed_options(self, job: StreamJob) -> None:
        """Apply changed stop conditions and returned details to the job, once held text is released."""
        if not job.pending_tokens:  # pending tokens were sampled without the details
            job.set_token_details(self.return_probabilities, self.return_top_tokens, self.return_logits)
        tokens, strings = frozenset(self.stop_tokens), frozenset(self.stop_strings)
        if (job.stop_tokens, frozenset(job.stop_strings)) != (tokens, strings) and not job.output.num_held:
            job.stop_tokens, job.stop_strings = tokens, tuple(strings)
            job.output.set_stop_conditions(tokens, strings)


def _refuse_drafts_on_states(*caches: CacheBase | None) -> None:
    """Refuse speculative decoding if one of the models keeps recurrent states."""
    if any(getattr(cache, "state_bytes", 0) for cache in caches):
        raise Unsupported(
            "The streaming generator computes drafts ahead of the tokens that are requested, and a recurrent state "
            "cannot be taken back from one that is rejected: leave out draft_model and speculative_ngram, or use "
            "Generator(model, cache, tokenizer, use_ngram_draft=True), which keeps the state after each draft token."
        )


def _check_row_count(rows: list[Tensor], settings: Settings) -> None:
    """Refuse all but one row, or two rows with a CFG scale."""
    if len(rows) == 2 and settings.cfg_scale is None:
        raise InputError("Two rows are for guidance, but no CFG scale is set: set gen_settings.cfg_scale.")
    if len(rows) not in (1, 2):
        raise InputError(f"Streaming generator does not support batch size > 1, found {len(rows)} rows.")


def _raise_error(result: Any) -> None:
    """Raise the error of a failed job, which the engine puts into the job's last result."""
    if "error" in result:
        raise result["error"]


CHUNK_KEYS = {
    "token_ids": "chunk_token_ids",
    "token_probs": "probs",
    "top_k_tokens": "top_tokens",
    "top_k_probs": "top_probs",
    "logits": "logits",
}


class Chunk(TypedDict):
    """The result of one `stream_ex` that releases n tokens: ids and probs (1, n), top tokens (1, n, k)."""

    chunk: str
    eos: bool
    chunk_token_ids: Tensor
    probs: NotRequired[Tensor]
    top_tokens: NotRequired[Tensor]
    top_probs: NotRequired[Tensor]
    logits: NotRequired[Tensor]
    suppressed: NotRequired[str]


def empty_chunk(job: Job, vocab_size: int, text: str = "", eos: bool = False) -> Chunk:
    """A chunk without tokens, with an empty tensor for each detail that the job returns."""
    out: Chunk = {"chunk": text, "eos": eos, "chunk_token_ids": torch.empty((1, 0), dtype=torch.long)}
    if job.return_probs:
        out["probs"] = torch.empty((1, 0))
    if top := job.return_top_tokens:
        out["top_tokens"] = torch.empty((1, 0, top), dtype=torch.long)
        out["top_probs"] = torch.empty((1, 0, top))
    if job.return_logits:
        out["logits"] = torch.empty((1, 0, vocab_size))
    return out


def chunk_from_result(result: Any, vocab_size: int, skip: int = 0) -> Chunk:
    """A streaming result as a chunk, without the ids of its first `skip` tokens.

    The ids of a stop string are left out too, like its text.
    """
    out = empty_chunk(result["job"], vocab_size, result.get("text", ""), result["eos"])
    if result.get("eos_reason") != "stop_string":
        visible = {new: result[old][:, skip:] for old, new in CHUNK_KEYS.items() if old in result}
        out.update(visible)  # type: ignore[typeddict-item]
    if "suppressed_text" in result:
        out["suppressed"] = result["suppressed_text"]
    return out


def merge_chunks(first: Chunk, second: Chunk) -> Chunk:
    """Two consecutive chunks as one."""
    out: Chunk = {**second, "chunk": first["chunk"] + second["chunk"]}
    for name in CHUNK_KEYS.values():
        if name in second:
            both = torch.cat((first[name], second[name]), 1)  # type: ignore[literal-required]
            out[name] = both  # type: ignore[literal-required]
    return out
