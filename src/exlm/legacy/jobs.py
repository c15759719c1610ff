"""The jobs of the old generators: the dynamic one's, but for what was different about filters and bans."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from .. import InputError, Job, Settings
from ..constrained.bitmask import contains
from ..generator.job import TokenizerLike
from ..sampling import SamplingRequest


class LegacyJob(Job):
    """A job whose filters begin with a healed token: what it adds to the prompt obeys them as well."""

    def prepare(self, serial: int, texts: TokenizerLike, vocab: int) -> None:
        """Check it and make what sampling needs, which the old generators change at once."""
        super().prepare(serial, texts, vocab)
        self.begin()

    def next_sampling_request(self) -> SamplingRequest:
        """What the sampler is told of the next token."""
        request = super().next_sampling_request()
        if self.output.healing and self.filter_stack is not None and self._healing_candidates is not None:
            if not self._filters_started:
                self.filter_stack.begin(self.piece(self.prompts[0][-1]))
                self._filters_started = True
            mask = self.filter_stack.allowed().mask
            if mask is not None:
                request.allowed = [token for token in self._healing_candidates if contains(mask, token)]
        return request


class StreamJob(LegacyJob):
    """A job whose tokens are asked for one by one; `banned_now` may not be the next."""

    banned_next: frozenset[int] = frozenset()

    def prepare(self, serial: int, tokenizer: TokenizerLike, vocab_size: int) -> None:
        """Make what running needs; no token is like the others, because bans may come with any."""
        super().prepare(serial, tokenizer, vocab_size)
        self.is_simple = False

    def set_token_details(self, probs: bool, top: int, logits: bool) -> None:
        """Have this told of the tokens that are sampled from now on."""
        self.return_probs, self.return_top_tokens, self.return_logits = probs, top, logits
        self.sampling_request.return_probs, self.sampling_request.num_top_tokens = (
            probs or bool(self.hooks),
            top,
        )

    def next_sampling_request(self) -> SamplingRequest:
        """What the sampler is told of the next token."""
        request = super().next_sampling_request()
        request.blocked = self.banned_next.union(request.blocked)
        return request


def banned_token_set(tokens: Any) -> frozenset[int]:
    """The ids that may not come next: any numbers will do, as in a list or a tensor."""
    try:
        return frozenset(map(index, () if tokens is None else tokens))
    except TypeError as error:
        raise InputError(f"ban_tokens must be a list of token ids, found {tokens!r:.80}.") from error


def filter_arguments(settings: Settings, filters: Sequence[Any] | None, prefer_eos: bool) -> dict[str, Any]:
    """A job's arguments about filters: the call's, or what very old scripts wrote into the settings."""
    if not isinstance(settings, Settings):
        raise InputError(f"gen_settings must be Settings, found {type(settings).__name__}.")
    return {
        "filters": settings.filters if filters is None else filters,
        "filter_prefer_eos": prefer_eos or settings.filter_prefer_eos,
    }
