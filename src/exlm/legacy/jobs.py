"""The jobs of the base and streaming generators, which differ from `Job` in filters and banned tokens."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from ..constrained.token_sets import bitmask_contains
from ..errors import InputError
from ..generator import Job
from ..generator.job import TokenizerLike
from ..sampling import SamplingRequest, Settings


class LegacyJob(Job):
    """A job whose filters apply to the healed token as well: the text it adds to the prompt must match."""

    def bind(self, serial: int, texts: TokenizerLike, vocab: int) -> None:
        """Prepare the job and its sampling state, which these generators change afterwards."""
        super().bind(serial, texts, vocab)
        self.init_sampling()

    def next_sampling_request(self) -> SamplingRequest:
        """The request for the next token; filters restrict a healed token."""
        request = super().next_sampling_request()
        if self.output.healing and self.filter_stack is not None and self._healing_candidates is not None:
            if not self._filters_started:
                self.filter_stack.begin(self.piece(self.prompts[0][-1]))
                self._filters_started = True
            mask = self.filter_stack.allowed().mask
            if mask is not None:
                request.allowed = [
                    token for token in self._healing_candidates if bitmask_contains(mask, token)
                ]
        return request


class StreamJob(LegacyJob):
    """A job whose tokens are requested one by one; `banned_next` excludes ids from the next one."""

    banned_next: frozenset[int] = frozenset()

    def bind(self, serial: int, tokenizer: TokenizerLike, vocab_size: int) -> None:
        """Prepare the job; its tokens are never sampled ahead, because each call may ban some."""
        super().bind(serial, tokenizer, vocab_size)
        self.is_simple = False

    def set_token_details(self, probs: bool, top: int, logits: bool) -> None:
        """Change which details are returned with the tokens sampled from now on."""
        self.return_probs, self.return_top_tokens, self.return_logits = probs, top, logits
        self.sampling_request.return_probs, self.sampling_request.num_top_tokens = (
            probs or bool(self.hooks),
            top,
        )

    def next_sampling_request(self) -> SamplingRequest:
        """The request for the next token, without the banned ids."""
        request = super().next_sampling_request()
        request.blocked = self.banned_next.union(request.blocked)
        return request


def banned_token_set(tokens: Any) -> frozenset[int]:
    """`ban_tokens` as a set: any iterable of ids, such as a list or a tensor."""
    try:
        return frozenset(map(index, () if tokens is None else tokens))
    except TypeError as error:
        raise InputError(f"ban_tokens must be a list of token ids, found {tokens!r:.80}.") from error


def filter_arguments(settings: Settings, filters: Sequence[Any] | None, prefer_eos: bool) -> dict[str, Any]:
    """A job's filter arguments: those of the call, or `settings.filters`, which early scripts set."""
    if not isinstance(settings, Settings):
        raise InputError(f"gen_settings must be Settings, found {type(settings).__name__}.")
    return {
        "filters": settings.filters if filters is None else filters,
        "filter_prefer_eos": prefer_eos or settings.filter_prefer_eos,
    }
