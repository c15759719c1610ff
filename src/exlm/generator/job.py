"""`Job`: a request, its arguments checked at construction, and its state while it runs."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..constrained import FilterStack
from ..errors import InputError
from ..sampling import SamplerState, SamplingRequest, Settings
from ..sampling.rng import check_seed
from ..tokenizer import EMBEDDING_INDEX, Tokenizer
from .output import OutputProcessor
from .results import CommonFields, JobTokenSequence, ResultQueue, SampledToken, mask_tensor
from .speculative import AdaptiveDraftLength
from .token_sequence import TokenSequence, build_salt
from .validation import (
    GENERATE_ARGUMENTS,
    argument_names,
    banned_string_tuple,
    filter_tuple,
    materialize,
    prompt_ids,
    reject_unknown,
    salt_bytes,
    split_stop_conditions,
    whole_number,
)

MAX_TOKENS = 2**31 - 1
NO_DRAFTING = AdaptiveDraftLength(0)  # drafts nothing, and so never changes


@dataclass
class RequestMetrics:
    """When things happened to a job, by `time.perf_counter`, and the seconds between them."""

    enqueued_at: float | None = None
    prefill_started_at: float | None = None
    first_decode_at: float | None = None
    finished_at: float | None = None

    @property
    def queue_seconds(self) -> float:
        """From enqueue to the first prefill."""
        return (self.prefill_started_at or self._now) - (self.enqueued_at or self._now)

    @property
    def prefill_seconds(self) -> float:
        """From the first prefill to the first decode pass."""
        return (self.first_decode_at or self._now) - (self.prefill_started_at or self._now)

    @property
    def generate_seconds(self) -> float:
        """From the first decode pass to the end."""
        return (self.finished_at or self._now) - (self.first_decode_at or self._now)

    def start_decode(self) -> None:
        """Record the start of the first decode pass."""
        self.first_decode_at = time.perf_counter()
        self.prefill_started_at = self.prefill_started_at or self.first_decode_at

    @property
    def _now(self) -> float:
        return self.finished_at or time.perf_counter()


class Job:
    """A request for a completion; single-use.

    `input_ids` is a (1, n) tensor of ids in system memory, or a pair of them for classifier-free guidance.
    Everything else is as in `Generator.generate`, but for the following. While the job does not fit,
    at most `max_skips` younger ones start before it, None for any number. Results have the tokens, logits and
    probabilities that `return_…` request, and the `identifier`. Later changes of `gen_settings`' fields take effect
    at the next token, except for hooks, which are fixed when the job is enqueued. Before `min_new_tokens`, stop
    tokens are not sampled, but a filter may end the text. Jobs with different `salt`, such as those of
    different tenants, never share cached pages. `embeddings` are the `MMEmbedding` objects whose ids the
    prompt contains; they disable speculative decoding, and so does `speculative=False`. `loras` are the
    adapters to run with, one or a list, each optionally paired with its strength; None means the generator's
    adapters, [] none.
    """

    def __init__(
        self,
        input_ids: Any,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        max_skips: int | None = 4,
        gen_settings: Settings | None = None,
        seed: int | None = None,
        stop_conditions: Collection[int | str] | None = None,
        decode_special_tokens: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters: Sequence[Any] | None = None,
        filter_prefer_eos: bool = False,
        token_healing: bool = False,
        identifier: object = None,
        banned_strings: Iterable[str] | None = None,
        embeddings: Sequence[Any] | None = None,
        loras: Any = None,
        salt: str | bytes = "",
        speculative: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            reject_unknown("Job", unknown, JOB_ARGUMENTS, GENERATE_ARGUMENTS, "generate()")
        prompts = input_ids if isinstance(input_ids, list | tuple) else [input_ids]
        self.prompts = tuple(map(prompt_ids, prompts))
        self.gen_settings = gen_settings if gen_settings is not None else Settings()
        self.seed = random.SystemRandom().getrandbits(63) if seed is None else seed
        self.max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 1, MAX_TOKENS)
        self.min_new_tokens = whole_number("min_new_tokens", min_new_tokens, 0, MAX_TOKENS)
        self.max_skips, self.speculative = max_skips, speculative
        self.stop_tokens, self.stop_strings = split_stop_conditions(materialize(stop_conditions) or ())
        self.decode_special_tokens = decode_special_tokens
        self.return_top_tokens = whole_number("return_top_tokens", return_top_tokens, 0, MAX_TOKENS)
        self.return_logits, self.return_probs = return_logits, return_probs
        self.filters, self.filter_prefer_eos = filter_tuple(filters), filter_prefer_eos
        self.banned_strings = banned_string_tuple(materialize(banned_strings) or ())
        self.token_healing = bool(token_healing) and all(map(_can_heal, self.prompts))
        self.identifier, self.embeddings, self.loras = identifier, tuple(embeddings or ()), loras
        self.cache_key_parts = {"salt": salt_bytes(salt)}
        """What the keys and values depend on besides ids, by name; fixed when the job is enqueued."""
        self._check()
        healed = 1 if self.token_healing else 0
        self.sequences: list[TokenSequence] = [
            JobTokenSequence(list(prompt[: len(prompt) - healed]), len(prompt) + self.max_new_tokens)
            for prompt in self.prompts
        ]
        self.serial_number = -1
        self.skips = 0
        """How many younger jobs started first; counted by the scheduler."""
        self.metrics, self.is_finished, self.cancelled = RequestMetrics(), False, False
        self.result_queue: ResultQueue | None = None
        """Where the generator puts the results; unless set before enqueue, the queue that `iterate` reads."""
        self.final_held_text: str | None = None
        """The text that was never emitted, once the job has stopped; None before, when `output` has the held text."""
        self.accepted_draft_tokens = self.rejected_draft_tokens = 0
        self.draft_length = NO_DRAFTING  # set by an engine that drafts
        self.batch_row = 0
        """The index of its first row in the batch."""
        self._filters_started = False  # they start after a healed token

    def __repr__(self) -> str:
        return f"Job #{self.serial_number}" if self.serial_number >= 0 else "Job (new)"

    def set_cache_salt(self, shared: Mapping[str, bytes]) -> None:
        """Salt the page hashes of its sequences with `cache_key_parts` and those that all jobs share."""
        for sequence in self.sequences:
            sequence.set_salt(build_salt({**shared, **self.cache_key_parts}))

    def bind(self, serial: int, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Check the job against the model and keep the tokenizer; called once, when the job is enqueued."""
        for prompt, sequence in zip(self.prompts, self.sequences, strict=True):
            for token in (min(prompt), max(prompt)):
                if not 0 <= token < vocab_size and sequence.extras is None:
                    raise InputError(f"Id {token} of the prompt is outside the vocabulary of {vocab_size}.")
        for token in self.stop_tokens:
            if not 0 <= token < vocab_size:
                raise InputError(f"Stop token {token} is outside the vocabulary of {vocab_size}.")
        self._tokenizer = tokenizer
        self._healing_candidates = (
            tokenizer.get_prefix_id_to_ids_dict()[self.prompts[0][-1]] if self.token_healing else None
        )
        self.filter_stack = (
            FilterStack(self.filters, tokenizer, self.filter_prefer_eos, width=vocab_size) if self.filters else None
        )
        self.hooks = tuple(self.gen_settings.post_sampling_hooks or ())
        check_seed(self.seed)
        if self.gen_settings.mirostat_mu:
            _ = self.sampler_state  # a mirostat_mu that does not fit is an error now
        returns_details = self.return_probs or self.return_top_tokens or self.return_logits or self.hooks
        # What may be sampled changes from token to token, or depends on a second sequence.
        limits_vary = self.filters or self.token_healing or self.banned_strings or self.min_new_tokens
        self.is_simple = not (returns_details or limits_vary or len(self.sequences) > 1)
        """Whether each token is sampled under the same conditions, and results hold only its text and id."""
        self.serial_number = serial
        self.common_fields: CommonFields = {"eos": False, "serial": serial}
        if self.identifier is not None:
            self.common_fields["identifier"] = self.identifier
        self.metrics.enqueued_at = time.perf_counter()

    @cached_property
    def output(self) -> OutputProcessor:
        """Turns tokens into text; created for the first token, because thousands of jobs may be pending."""
        return OutputProcessor(
            self._tokenizer.detokenizer(self.decode_special_tokens, continues=True),
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop_tokens=self.stop_tokens,
            stop_strings=self.stop_strings,
            banned_strings=self.banned_strings,
            special_texts=self._tokenizer.extended_id_to_piece,
            healed_token=self.prompts[0][-1] if self.token_healing else None,
        )

    @cached_property
    def emitted_texts(self) -> list[str]:
        """The texts emitted so far; like `output`, created for the first token."""
        return []

    @cached_property
    def pending_tokens(self) -> list[SampledToken]:
        """Sampled, not yet emitted; created for the first token."""
        return []

    @cached_property
    def sampler_state(self) -> SamplerState:
        """What sampling keeps between tokens; created for the first one."""
        return SamplerState(self.gen_settings, self.seed, self.sequences[0].ids)

    @cached_property
    def sampling_request(self) -> SamplingRequest:
        """The sampling request of a simple job; of others, see `next_sampling_request`."""
        return SamplingRequest(
            self.gen_settings,
            self.sampler_state,
            return_probs=self.return_probs or bool(self.hooks),
            num_top_tokens=self.return_top_tokens,
            uses_cfg=len(self.sequences) == 2,
        )

    @property
    def prompt_tokens(self) -> int:
        """Length of the first prompt, a healed token included."""
        return len(self.prompts[0])

    @property
    def new_tokens(self) -> int:
        """Tokens sampled and kept; counts a stop token, but not a healed one."""
        return self.output.new_tokens if "output" in vars(self) else 0

    @property
    def full_completion(self) -> str:
        """All text emitted so far."""
        self.emitted_texts = ["".join(self.emitted_texts)]
        return self.emitted_texts[0]

    @property
    def held_text(self) -> str:
        """Text that is not emitted yet; after the end, text that never was."""
        if self.final_held_text is not None:
            return self.final_held_text
        return self.output.held_text if "output" in vars(self) else ""

    @property
    def cached_pages(self) -> int:
        """Full pages of the prompt that were found in the cache, on average over the sequences."""
        return sum(sequence.cached_pages for sequence in self.sequences) // len(self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache, on average over the sequences."""
        return sum(sequence.cached_tokens for sequence in self.sequences) // len(self.sequences)

    @property
    def time_enqueue(self) -> float | None:
        """When the job was enqueued, by `time.time()`; this and the next three are for exllamav2 scripts."""
        return _wall_clock(self.metrics.enqueued_at)

    @property
    def time_first_prefill(self) -> float | None:
        """When its first prefill began."""
        return _wall_clock(self.metrics.prefill_started_at)

    @property
    def time_first_token(self) -> float | None:
        """When its first decode pass began."""
        return _wall_clock(self.metrics.first_decode_at)

    @property
    def time_last_token(self) -> float | None:
        """When it finished."""
        return _wall_clock(self.metrics.finished_at)

    def piece(self, token: int) -> str:
        """A token's text, special ones included."""
        pieces = self._tokenizer.get_id_to_piece_list(include_special_tokens=True)
        return pieces[token] if token < len(pieces) else ""

    def take_pending_tokens(self, count: int) -> list[SampledToken]:
        """Remove and return the oldest pending tokens."""
        taken = self.pending_tokens[:count]
        del self.pending_tokens[:count]
        return taken

    def next_sampling_request(self) -> SamplingRequest:
        """The sampling request of the next token; always the same if the job is simple."""
        self.sampling_request.blocked = self.output.blocked_tokens()
        if self.output.healing:
            self.sampling_request.allowed = self._healing_candidates
        elif self.filter_stack is not None:
            if not self._filters_started:
                self.filter_stack.begin("")
                self._filters_started = True
            self.sampling_request.allowed = mask_tensor(self.filter_stack.allowed().mask)
        else:
            self.sampling_request.allowed = None
        return self.sampling_request

    def prefetch_filter_masks(self, executor: Executor) -> None:
        """Compute the filters' masks for the next token while the model runs."""
        if self.filter_stack is not None and self._filters_started:
            self.filter_stack.start_background(executor)

    def advance_filters(self, token: int) -> bool:
        """Advance the filters by a token; whether they allow nothing after it."""
        if self.filter_stack is None or not self._filters_started:
            return False
        ends = token in self.filter_stack.allowed().end_ids
        if not ends:
            self.filter_stack.feed(token)
        return ends

    @property
    def num_draft_tokens(self) -> int:
        """How many tokens to draft; none during healing, or with guidance, filters or embeddings."""
        if not self.speculative or len(self.sequences) > 1 or self.output.healing:
            return 0
        if self.filter_stack is not None or self.embeddings:
            return 0
        num_generated = self.new_tokens
        return self.draft_length.num_draft_tokens(num_generated, self.max_new_tokens - num_generated - 1)

    def update_acceptance(self, num_accepted: int, num_drafted: int) -> None:
        """Count accepted and rejected draft tokens, and adapt the draft length."""
        self.accepted_draft_tokens += num_accepted
        self.rejected_draft_tokens += num_drafted - num_accepted
        if num_drafted:
            self.draft_length.update(num_accepted, num_drafted, self.new_tokens)

    @property
    def is_stateless_greedy(self) -> bool:
        """Whether each of its tokens is the one with the largest logit, whatever the text before."""
        settings = self.gen_settings
        return self.is_simple and settings.token_bias is None and settings.compiled().greedy_only

    def _check(self) -> None:
        if len(self.prompts) not in (1, 2):
            raise InputError(f"A job has one prompt, or two for guidance; found {len(self.prompts)}.")
        if not isinstance(self.gen_settings, Settings):
            raise InputError(f"gen_settings must be Settings, found {type(self.gen_settings).__name__}.")
        guided = self.gen_settings.cfg_scale is not None
        if guided != (len(self.prompts) == 2):
            raise InputError(
                f"cfg_scale {self.gen_settings.cfg_scale!r} with {len(self.prompts)} prompt(s): guidance "
                "needs a pair of prompts and a cfg_scale, anything else neither."
            )
        if self.max_skips is not None:
            whole_number("max_skips", self.max_skips, 0, MAX_TOKENS)
        if self.banned_strings and self.filters:
            raise InputError("Cannot combine banned strings with filters: a filter cannot be taken back.")
        self.gen_settings.check()


JOB_ARGUMENTS = argument_names(Job)


def _wall_clock(moment: float | None) -> float | None:
    """A `time.perf_counter()` value as a `time.time()` value."""
    return None if moment is None else time.time() - (time.perf_counter() - moment)


def _can_heal(prompt: tuple[int, ...]) -> bool:
    """Whether the last token can be sampled again: it is not the only one, and not an embedding."""
    return len(prompt) > 1 and prompt[-1] < EMBEDDING_INDEX
