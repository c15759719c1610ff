"""BaseGenerator, exllamav2's blocking generator, on the engine of `exlm.Generator`.

Each prompt becomes a job. The pages and recurrent states of the given cache, of any length and batch size, are
allocated to the jobs of one call; nothing is kept for the next call.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Sequence
from functools import cached_property, partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..constrained.token_sets import bitmask_contains
from ..errors import InputError
from ..generator import Job
from ..generator.engine import EngineCore
from ..generator.model_runner import ModelRunner
from ..generator.page_table import PageTable
from ..generator.state_table import SLOTS_PER_SEQUENCE, StateTable
from ..generator.validation import offset_seed, resolve_state_slots
from ..kvcache import CacheBase
from ..model import Model
from ..sampling import SamplingRequest, Settings
from ..tokenizer import Tokenizer
from ..tokenizer.tokenizer import pad_left
from .arguments import TruncationWarning, embed_in_ids, embed_in_texts, filter_arguments

TOKENS_PER_ROW = 8  # the batch has one row for this many tokens of `max_input_len`
MIN_ROWS = 2  # a prompt and its negative one, for guidance
CHECKPOINT_INTERVAL = 1024  # tokens from one checkpoint of a recurrent state to the next, as in `Generator`


class LegacyJob(Job):
    """A job whose filters also apply to the text that a healed token adds to the prompt."""

    def next_sampling_request(self) -> SamplingRequest:
        """The request for the next token; filters restrict a healed token."""
        request = super().next_sampling_request()
        if self.output.healing and self.filter_stack is not None and self._healing_candidates is not None:
            if not self._filters_started:
                self.filter_stack.begin(self.piece(self.prompts[0][-1]))
                self._filters_started = True
            if (mask := self.filter_stack.allowed().mask) is not None:
                request.allowed = [t for t in self._healing_candidates if bitmask_contains(mask, t)]
        return request


class BaseGenerator:
    """Completes prompts with `generate_simple`, which returns when all are finished.

    Each call reallocates the pages of the cache and drops what it holds, so `Model.forward` cannot continue a
    generator's text.
    """

    def __init__(self, model: Model, cache: CacheBase, tokenizer: Tokenizer) -> None:
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.abort_event: threading.Event | None = None
        self._sequence_rows: list[list[int]] | None = None

    @property
    def sequence_ids(self) -> Tensor | None:
        """The ids of the running or last call's sequences (rows, n), padded; None before the first call."""
        rows = self._sequence_rows
        return None if rows is None else pad_left(rows, self.tokenizer.pad_token_id)

    @property
    def max_length(self) -> int:
        """The maximum length of a sequence: the smaller of the model's and the cache's."""
        return min(self.model.max_seq_len, self.cache.max_seq_len)

    def warmup(self) -> None:
        """Run a forward pass without a cache, so that kernels are compiled."""
        self.model.forward(torch.zeros((1, 2), dtype=torch.long), last_id_only=True)

    def full(self) -> bool:
        """Whether the running sequence has reached the maximum length."""
        return max(map(len, self._sequence_rows or ()), default=0) >= self.max_length

    def generate_simple(
        self,
        prompt: str | Sequence[str],
        gen_settings: Settings,
        num_tokens: int,
        seed: int | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        loras: Any = None,
        stop_token: int | None = -1,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        input_embeddings: Any = None,
        completion_only: bool = False,
        filters: Sequence[Any] | None = None,
        filter_prefer_eos: bool = False,
    ) -> str | list[str]:
        """Complete a prompt, or several at once; a str gives a str, a list a list.

        At most `num_tokens` are sampled for each prompt, including a healed token. `stop_token` -1 means EOS,
        None no stop token. Prompt i uses seed + i; without a seed, one is drawn from Python's `random`.
        `input_embeddings` (prompts, n, hidden) replace {{EMBED_HERE}} in the prompts. A prompt that is too
        long is truncated from the left, with a `TruncationWarning`. `abort_event` is cleared first; when it
        is set, the text so far is returned, "" for a prompt that was still in prefill.
        """
        if abort_event is not None:
            abort_event.clear()
        self.abort_event = abort_event
        if not isinstance(prompt, str | Sequence):
            raise InputError(f"prompt must be a string or a list of them, found {type(prompt).__name__}.")
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        prompts = embed_in_texts(self.model, input_embeddings, texts)
        encode = partial(self.tokenizer.encode, add_bos=add_bos, encode_special_tokens=encode_special_tokens)
        rows = self._truncate_prompts([encode(text, embeddings=embeddings) for text, embeddings in prompts], num_tokens)
        options: dict[str, Any] = {
            "gen_settings": gen_settings,
            "token_healing": token_healing,
            "decode_special_tokens": decode_special_tokens,
            "stop_conditions": self._stop_token_list(stop_token),
            "loras": loras,
        } | filter_arguments(gen_settings, filters, filter_prefer_eos)
        first_seed = random.getrandbits(63) if seed is None else seed
        jobs = [
            LegacyJob(row, num_tokens, seed=offset_seed(first_seed, i), embeddings=embeddings, **options)
            for i, (row, (_, embeddings)) in enumerate(zip(rows, prompts, strict=True))
            if num_tokens
        ]
        completions = self._run(jobs) if num_tokens else [""] * len(rows)
        if not completion_only:
            prompt_texts = [self.tokenizer.decode(row[0], decode_special_tokens) for row in rows]
            completions = [
                new if new is None else old + new for old, new in zip(prompt_texts, completions, strict=True)
            ]
        out = [text or "" for text in completions]
        return out[0] if isinstance(prompt, str) else out

    def _run(self, jobs: list[LegacyJob]) -> list[str | None]:
        """Run jobs until all end or an abort; their completions, None for a job that has no token yet."""
        self._reset_cache()
        prompt_lengths = [len(job.sequences[0]) for job in jobs]
        reasons: dict[int, str] = {}
        try:
            for job in jobs:
                self._engine.enqueue(job)
                job.output.max_new_tokens -= job.token_healing
            while self._engine.busy and not self._aborted:
                for result in self._engine.step():
                    if result["stage"] == "streaming" and result["eos"]:
                        if "error" in result:
                            raise result["error"]
                        reasons[id(result["job"])] = result["eos_reason"]
        finally:
            for job in jobs:
                self._engine.cancel(job)
        completions, rows = [], []
        for job, prompt_length in zip(jobs, prompt_lengths, strict=True):
            ids, reason = job.sequences[0].ids, reasons.get(id(job))
            text = job.full_completion if reason else job.full_completion + job.held_text
            completions.append(text if len(ids) > prompt_length else None)
            rows.append((ids[:prompt_length], ids[prompt_length : len(ids) - (reason == "stop_token")]))
        longest = max((len(new) for _, new in rows), default=0)
        pad = self.tokenizer.pad_token_id
        self._sequence_rows = [[*old, *new, *[pad] * (longest - len(new))] for old, new in rows]
        return completions

    @property
    def _aborted(self) -> bool:
        return self.abort_event is not None and self.abort_event.is_set()

    @cached_property
    def _engine(self) -> EngineCore:
        config = self.model.config
        rows = max(MIN_ROWS, config.max_input_len // TOKENS_PER_ROW)
        states = self._make_state_table(rows)
        if states is not None:
            rows = min(rows, states.num_slots // SLOTS_PER_SEQUENCE)
        page_table = PageTable(self.cache.num_pages, states=states)
        page_size = page_table.page_size
        return EngineCore(
            self._runner,
            page_table,
            self.tokenizer,
            config.vocab_size,
            max_batch_size=rows,
            chunk_size=max(page_size, config.max_input_len // page_size * page_size),
            max_length=self.max_length,
            make_extras=self.model.make_extras,
        )

    @cached_property
    def _runner(self) -> ModelRunner:
        return self.model.runner(self.cache)

    def _make_state_table(self, rows: int) -> StateTable | None:
        """Room for the recurrent states of so many rows, or of as many as fit; None for a model without them."""
        slots = resolve_state_slots(self.cache, rows, rows_are_default=True, state_cache_bytes=None)
        if not slots:
            return None
        # `Model.forward` uses two slots of each row of the cache.
        slots = max(slots, MIN_ROWS * SLOTS_PER_SEQUENCE, 2 * self.cache.batch_size)
        return StateTable(slots, self.cache.page_size, CHECKPOINT_INTERVAL)

    def _reset_cache(self) -> None:
        """Drop all jobs and the contents of the cache: other callers may have written to it."""
        self._engine.clear()
        self._forget_contents()
        self.cache.current_seq_len = 0

    def _forget_contents(self) -> None:
        """Count the cache as empty; another caller may have given it other slots for recurrent states."""
        page_table = self._engine.page_table
        page_table.clear_prefix_cache()
        if page_table.states is not None and self.cache.num_state_slots != page_table.states.num_slots:
            self.cache.allocate_states(page_table.states.num_slots)

    def _stop_token_list(self, token: int | None) -> list[int]:
        if token == -1:
            return list(self.tokenizer.eos_token_ids)
        return [] if token is None else [token]

    def _truncate_prompts(self, rows: list[Tensor], num_tokens: int) -> list[Tensor]:
        """The prompts, truncated from the left so that `num_tokens` fit after them."""
        if not isinstance(num_tokens, Integral) or not 0 <= num_tokens < self.max_length:
            raise InputError(
                f"num_tokens must be from 0 to {self.max_length - 1}, a whole number that leaves room for "
                f"one token of the prompt in a sequence of {self.max_length}; found {num_tokens!r}."
            )
        max_prompt = self.max_length - num_tokens
        for row in rows:
            if (excess := row.shape[1] - max_prompt) > 0:
                warnings.warn(
                    f"A prompt of {row.shape[1]} tokens was cut to its last {max_prompt}: {num_tokens} new "
                    f"tokens must fit into {self.max_length} as well, {excess} tokens are lost.",
                    TruncationWarning,
                    stacklevel=3,
                )
        return [row[:, -max_prompt:] for row in rows]

    def _gen_begin_base(
        self,
        input_ids: Tensor,
        mask: Tensor | None = None,
        loras: Any = None,
        position_offsets: Tensor | None = None,
        input_embeddings: Any = None,
    ) -> None:
        """Reset the cache and prefill all but the last token of the prompts, for a script's own loop.

        `input_embeddings` (rows, n, hidden) replace the ids from 10⁹ on.
        """
        self._reset_cache()
        ids, embeddings = embed_in_ids(self.model, input_embeddings, input_ids)
        self._sequence_rows = ids.tolist()
        if ids.shape[1] > 1:
            self.model.forward(
                ids[:, :-1],
                self.cache,
                input_mask=mask,
                preprocess_only=True,
                loras=loras,
                position_offsets=position_offsets,
                abort_event=self.abort_event,
                indexed_embeddings=embeddings or None,
            )
