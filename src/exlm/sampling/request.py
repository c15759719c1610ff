"""What the sampler is given for a row, and what it gives back.

A `SamplingRequest` asks for one token of one text. It names the settings, and the `SamplerState` of the job:
the text so far, its random numbers, the states of stateful steps and the tokens that repeat. Every job has
its own `SamplerState`, so settings may be shared. `accept` or `sync_history` appends the job's new tokens to it,
and `truncate` removes them after a rewind.

A row that cannot be sampled does not affect the others: its token in the `SamplerOutput` is a negative number
that says what is wrong, so the host need not wait for the device to find out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import BadLogits
from ..kernels.sampling_layout import INFINITE_LOGITS, NAN_LOGITS, NO_TOKEN_ALLOWED
from .penalties import DryIndex, DryRule, PenalizedTokens, PenaltyRule, PenaltyWindow
from .rng import PhiloxStream, check_seed
from .settings import VERSION_STAMPS, Settings

STATE_HISTORY_LENGTH = 256  # how many tokens a rewind can go back

StateRecord = tuple[int, Tensor, int]
"""A position, and the state after its token: a tensor (n,) and the index in it."""


class StepState:
    """The state of one stateful step of one text: a number for each position, which stays on its device."""

    def __init__(self) -> None:
        self.records: list[StateRecord] = []
        """By ascending position; always the same list, changed by the methods below alone."""
        self.initial: float | None = None
        """The state before the first token; None for the initial state that the step defines."""

    def latest(self) -> float | None:
        """The state now; None before the first token."""
        if self.records:
            _, values, index = self.records[-1]
            return float(values[index])
        return self.initial

    def record_before(self, position: int) -> StateRecord | None:
        """The record of the last token before a position; None if there is none."""
        for record in reversed(self.records):
            if record[0] < position:
                return record
        return None

    def at(self, position: int, initial: float, device: torch.device) -> Tensor:
        """The state for the token at a position, as a float64 scalar; before any token, `initial`."""
        record = self.record_before(position)
        if record is None:
            value = self.initial or initial
            return torch.full((), value, dtype=torch.float64, device=device)
        _, values, index = record
        return values[index].to(device, non_blocking=True)

    def record(self, position: int, values: Tensor, index: int) -> StateRecord:
        """Record the state after the token at a position: one of some states (n,)."""
        records, record = self.records, (position, values, index)
        if records and records[-1][0] >= position:
            self.truncate(position)
        records.append(record)
        if len(records) > 2 * STATE_HISTORY_LENGTH:
            del records[:STATE_HISTORY_LENGTH]
        return record

    def truncate(self, position: int) -> None:
        """Drop the states after the tokens from a position on."""
        while self.records and self.records[-1][0] >= position:
            self.records.pop()


class SamplerState:
    """The sampler's state of one text."""

    def __init__(
        self, settings: Settings | None = None, seed: int | None = None, prompt_ids: Sequence[int] = ()
    ) -> None:
        """A state for a text that begins with `prompt_ids`. A seed of None is a fresh one (see `seed`).

        Of the settings only a `mirostat_mu` to start from is used.
        """
        self.seed = check_seed(seed)
        self._signed_seed = (self.seed + 2**63) % 2**64 - 2**63
        self.history: list[int] = list(prompt_ids)
        """The text; always the same list, changed by the methods below alone."""
        self.rewind_count = 0
        self.version_stamp = VERSION_STAMPS.new_stamp()
        """A new one after every change but appended tokens, drawn numbers and recorded states of steps."""
        self.last_drawn_position = -1
        """The last position that a random number was drawn for."""
        self._random_numbers = PhiloxStream(self.seed)
        self._penalty_window: PenaltyWindow | None = None  # made when a penalty first needs it
        self._dry_index: DryIndex | None = None
        self._step_states: dict[str, StepState] = {}
        if settings is not None and settings.mirostat_mu:
            self.mirostat_mu = settings.mirostat_mu[0]

    def __len__(self) -> int:
        return len(self.history)

    def accept(self, token: int) -> None:
        """Append a token to the text."""
        self.history.append(token)

    def sync_history(self, ids: Sequence[int]) -> None:
        """Make the history equal to `ids`, which is longer by new tokens, or shorter after a rewind."""
        if len(ids) < len(self.history):
            self.truncate(len(ids))
        elif len(ids) > len(self.history):
            self.history.extend(ids[len(self.history) :])

    def truncate(self, length: int) -> None:
        """Remove every token from this position on.

        The next tokens use fresh random numbers: the old ones would choose the rejected tokens again.
        """
        if length <= self.last_drawn_position:
            self.rewind_count += 1
            self.last_drawn_position = length - 1
        for state in self._step_states.values():
            state.truncate(length)
        if self._penalty_window is not None:
            self._penalty_window.truncate(self.history, length)
        if self._dry_index is not None:
            self._dry_index.truncate(length)
        del self.history[length:]
        self.version_stamp = VERSION_STAMPS.new_stamp()

    def uniform(self, position: int) -> float:
        """The random number in [0, 1) for the token at a position; the same one at each call."""
        if position > self.last_drawn_position:
            self.last_drawn_position = position
        return self._random_numbers.at(position, self.rewind_count)

    def philox_words(self) -> tuple[int, int]:
        """Seed and rewind count as signed 64-bit words, from which `uniform` computes with the position.

        Code that computes it elsewhere must set `last_drawn_position`.
        """
        return self._signed_seed, self.rewind_count

    def penalized_tokens(self, rule: PenaltyRule) -> PenalizedTokens:
        """The tokens of the text that a rule penalises."""
        if self._penalty_window is None:
            self._penalty_window = PenaltyWindow()
        return self._penalty_window.penalized_tokens(self.history, rule)

    def dry_penalties(self, rule: DryRule, breaker_ids: Collection[int], vocab_size: int) -> dict[int, float]:
        """The tokens that DRY penalises, and how much."""
        if self._dry_index is None:
            self._dry_index = DryIndex()
        self._dry_index.extend(self.history[len(self._dry_index) :])
        return self._dry_index.token_penalties(rule, breaker_ids, vocab_size)

    def step_state(self, step: str) -> StepState:
        """The state of a stateful step; always the same object."""
        state = self._step_states.get(step)
        if state is None:
            state = self._step_states[step] = StepState()
        return state

    @property
    def mirostat_mu(self) -> float | None:
        """Mirostat's target now; None before the first token."""
        return self.step_state("mirostat").latest()

    @mirostat_mu.setter
    def mirostat_mu(self, mu: float | None) -> None:
        state = self.step_state("mirostat")
        state.truncate(0)
        state.initial = float(mu or 0.0) or None
        self.version_stamp = VERSION_STAMPS.new_stamp()


FAILURE_MESSAGES = {
    NO_TOKEN_ALLOWED: (
        "No token is left to choose from: filters, token_bias and allowed tokens together exclude all. "
        "Loosen one of them."
    ),
    NAN_LOGITS: (
        "The logits are not numbers (NaN). The weights, the token_bias or a filter's mask are broken; "
        "if the model computes in float16, try bfloat16 or float32."
    ),
    INFINITE_LOGITS: (
        "A logit is infinite. The token_bias or a filter's mask is broken, or the model's numbers overflow; "
        "if it computes in float16, try bfloat16 or float32."
    ),
}


@dataclass(eq=False)
class SamplingRequest:
    """One sequence that needs a token.

    `history` holds all its ids so far, prompt included; None if the state is given each token by `accept`.
    `blocked` ids are taken only if everything else is excluded. `allowed` excludes all others: ids, a mask
    of booleans (vocab,), or one of bits packed into int32 words, the first id in the lowest bit. A request
    with `uses_cfg` stands for two neighbouring rows of logits, which its settings' `cfg_scale` mixes. The
    `num_top_tokens` most probable tokens come back with their probabilities.
    """

    settings: Settings
    state: SamplerState
    history: Sequence[int] | None = None
    blocked: Collection[int] = ()
    allowed: Tensor | Collection[int] | None = None
    return_probs: bool = False
    num_top_tokens: int = 0
    uses_cfg: bool = False
    version_stamp: object = field(default=None, init=False, repr=False)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field: a new version stamp, except for `allowed`, which is read anew for each token."""
        fields = self.__dict__
        if fields.get(name, fields) is not value:
            fields[name] = value
            if name == "allowed":
                VERSION_STAMPS.latest_mask_change = object()
            else:
                fields["version_stamp"] = VERSION_STAMPS.new_stamp()

    @property
    def takes_argmax(self) -> bool:
        """Whether its token is that of the largest logit, and nothing else is asked for."""
        return (
            self.settings.compiled().greedy_only
            and self.settings.token_bias is None
            and self.allowed is None
            and not (self.blocked or self.num_top_tokens or self.uses_cfg)
        )

    def sync_history(self) -> None:
        """Make the state's history equal to the request's own, if it has one."""
        if self.history is not None:
            self.state.sync_history(self.history)

    @property
    def position(self) -> int:
        """The position of the token that is to be sampled."""
        return len(self.state.history if self.history is None else self.history)


@dataclass
class SamplerOutput:
    """The tokens of a batch, on the host; a negative one is a failure (see `error`).

    `probs` (rows,) are their final probabilities in float32. `top_tokens` and `top_probs` (rows, largest
    `num_top_tokens`) are None unless a request asked for them; one that asked for fewer uses the first ones.
    These three are still on the logits' device. `resampled` says that some tokens differ from those that the
    device had first: a row had too many candidates for the kernel and was drawn again.
    """

    tokens: list[int]
    probs: Tensor
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None
    resampled: bool = False
    host_tokens: Tensor | None = None
    """`tokens` as a tensor (rows,), where they were sampled in system memory."""

    @staticmethod
    def error(token: int) -> BadLogits | None:
        """The error that a negative token stands for; None for a token."""
        return None if token >= 0 else BadLogits(FAILURE_MESSAGES[token])
