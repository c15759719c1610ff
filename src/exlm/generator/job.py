"""One request: what was asked, checked at construction, and what has happened to it so far."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import InputError
from ..filters import FilterStack
from ..sampling import SamplerState, Settings
from .output import Output
from .results import Sampled
from .sequence import Sequence as Tokens

MAX_TOKENS = 2**31


class Texts(Protocol):
    """What a job needs of a tokenizer."""

    eos_token_id: int | None

    def detokenizer(self, decode_special_tokens: bool = False, continues: bool = False) -> Any:
        """Ids to text as they arrive."""
        ...

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """The text of every token."""
        ...

    def get_prefix_id_to_ids_dict(self) -> dict[int, list[int]]:
        """For every token, the tokens whose text starts with its text."""
        ...

    @property
    def extended_id_to_piece(self) -> Any:
        """What special tokens stand for."""
        ...


@dataclass
class Times:
    """When things happened; the differences are what results report, in seconds."""

    asked: float | None = None
    began: float | None = None
    first: float | None = None
    ended: float | None = None

    @property
    def enqueued(self) -> float:
        """From enqueue to the first prefill."""
        return (self.began or self._now) - (self.asked or self._now)

    @property
    def prefill(self) -> float:
        """From there to the first token's forward pass."""
        return (self.first or self._now) - (self.began or self._now)

    @property
    def generate(self) -> float:
        """From there to the end."""
        return (self.ended or self._now) - (self.first or self._now)

    @property
    def _now(self) -> float:
        return self.ended or time.perf_counter()


class Job:
    """A request for a completion; single-use.

    `input_ids` is a (1, n) tensor of ids in system memory, or a pair of them for classifier-free guidance.
    Everything else is as in `Generator.generate`. Later changes of `gen_settings`' fields take effect at the
    next token.
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
        salt: bytes = b"",
    ) -> None:
        prompts = input_ids if isinstance(input_ids, list | tuple) else [input_ids]
        self.prompts = [_ids(prompt) for prompt in prompts]
        self.gen_settings = gen_settings if gen_settings is not None else Settings()
        self.seed = random.SystemRandom().getrandbits(63) if seed is None else seed
        self.max_new_tokens = _whole("max_new_tokens", max_new_tokens, 0)
        self.min_new_tokens = _whole("min_new_tokens", min_new_tokens, 0)
        self.max_skips = max_skips
        self.stop_tokens, self.stop_strings = split_conditions(stop_conditions or ())
        self.decode_special_tokens = decode_special_tokens
        self.return_top_tokens = _whole("return_top_tokens", return_top_tokens, 0)
        self.return_logits, self.return_probs = return_logits, return_probs
        self.filters, self.filter_prefer_eos = list(filters or ()), filter_prefer_eos
        self.banned_strings = _strings(banned_strings or ())
        self.token_healing = token_healing and all(len(prompt) > 1 for prompt in self.prompts)
        self.identifier, self.salt = identifier, salt
        self._check()
        healed = 1 if self.token_healing else 0
        self.sequences = [
            Tokens(ids=prompt[: len(prompt) - healed], limit=len(prompt) + self.max_new_tokens, salt=salt)
            for prompt in self.prompts
        ]
        self.serial_number = -1
        self.skips = 0
        self.times = Times()
        self.is_finished = False
        self.full_completion = ""
        self.accepted_draft_tokens = self.rejected_draft_tokens = 0
        self.drafting = False
        self.filtering = False  # the filters have begun: not before a healed token is sampled
        self.draft_length = 1
        self.blocked: tuple[int, ...] = ()
        self.pending: deque[Sampled] = deque()  # sampled, not yet shown
        self._pieces: list[str] = []

    def __repr__(self) -> str:
        """The serial number, once it has one."""
        return f"Job #{self.serial_number}" if self.serial_number >= 0 else "Job (new)"

    def prepare(self, serial: int, texts: Texts, vocab: int) -> None:
        """Make what running needs; called once, by the generator that takes the job."""
        for token in self.stop_tokens:
            if not 0 <= token < vocab:
                raise InputError(f"Stop token {token} is outside the vocabulary of {vocab}.")
        self._pieces = texts.get_id_to_piece_list(include_special_tokens=True)
        healed = self.prompts[0][-1] if self.token_healing else None
        self.output = Output(
            texts.detokenizer(self.decode_special_tokens, continues=True),
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop_tokens=self.stop_tokens,
            stop_strings=self.stop_strings,
            banned_strings=self.banned_strings,
            special=texts.extended_id_to_piece,
            healed=healed,
        )
        self.state = SamplerState(self.gen_settings, self.seed, self.sequences[0].ids)
        self.healing = texts.get_prefix_id_to_ids_dict()[healed] if healed is not None else None
        self.stack = (
            FilterStack(self.filters, texts, self.filter_prefer_eos, width=vocab) if self.filters else None
        )
        self.serial_number = serial
        self.times.asked = time.perf_counter()

    @property
    def prompt_tokens(self) -> int:
        """Length of the first prompt, a healed token included."""
        return len(self.prompts[0])

    @property
    def new_tokens(self) -> int:
        """Tokens sampled and kept, a stop token included, a healed one not."""
        return self.output.new_tokens if self.serial_number >= 0 else 0

    @property
    def held_text(self) -> str:
        """Text that may not be shown yet."""
        return self.output.held_text

    @property
    def cached_pages(self) -> int:
        """Whole pages of the prompt that were found in the cache, on average over the sequences."""
        return sum(sequence.cached_pages for sequence in self.sequences) // len(self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache, on average over the sequences."""
        return sum(sequence.cached_tokens for sequence in self.sequences) // len(self.sequences)

    def piece(self, token: int) -> str:
        """A token's text, special ones included."""
        return self._pieces[token] if token < len(self._pieces) else ""

    def forbidden(self) -> frozenset[int]:
        """Tokens the next sample may not take: stop tokens that come too early, and what a rewind blocked."""
        return self.output.forbidden()

    def _check(self) -> None:
        if len(self.prompts) not in (1, 2):
            raise InputError(f"A job has one prompt, or two for guidance; found {len(self.prompts)}.")
        guided = self.gen_settings.cfg_scale is not None
        if guided != (len(self.prompts) == 2):
            raise InputError(
                f"cfg_scale {self.gen_settings.cfg_scale!r} with {len(self.prompts)} prompt(s): guidance "
                "needs a pair of prompts and a cfg_scale, anything else neither."
            )
        if self.max_skips is not None:
            _whole("max_skips", self.max_skips, 0)
        if self.banned_strings and self.filters:
            raise InputError("Cannot combine banned strings with filters: a filter cannot be taken back.")
        self.gen_settings.check()


def split_conditions(conditions: Iterable[int | str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Stop tokens and stop strings."""
    if isinstance(conditions, str | bytes | int):
        raise InputError(f"stop_conditions must be a list of ids and strings, found {conditions!r}.")
    tokens, strings = set(), []
    for one in conditions:
        if isinstance(one, str):
            strings.append(one)
        elif isinstance(one, int) and not isinstance(one, bool):
            tokens.add(one)
        else:
            raise InputError(f"Unsupported type in stop_conditions: {one!r}; use token ids and strings.")
    return frozenset(tokens), tuple(string for string in strings if string)


def _ids(prompt: Any) -> list[int]:
    """A (1, n) tensor in system memory as a list."""
    shape = getattr(prompt, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != 1:
        raise InputError("input_ids must be a [1, seq_len] tensor, or a list of such tensors.")
    if getattr(prompt.device, "type", "cpu") != "cpu":
        raise InputError("input_ids must reside in system memory: call .cpu() on it.")
    if shape[1] == 0:
        raise InputError("Input IDs cannot be empty: a prompt needs a token (add_bos=True gives one).")
    return [int(number) for number in prompt[0].tolist()]


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MAX_TOKENS:
        raise InputError(f"{name} must be a whole number of at least {least}, found {value!r}.")
    return value


def _strings(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise InputError("banned_strings must be a list of strings.")
    return tuple(value for value in values if value)
