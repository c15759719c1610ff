"""SamplerState: what sampling one text has led to: its random numbers, mirostat's target, what it repeats.

Every job has its own, so settings may be shared. A state follows the text it belongs to: tokens that were
appended since are taken over when they are needed, and `truncate` takes back. It chooses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .dry import DryIndex, DryRule
from .penalties import PenaltyRule, PenaltyTerms, PenaltyWindow
from .rng import PhiloxStream, check_seed
from .settings import VERSION_STAMPS, Settings

MU_HISTORY_LENGTH = 256  # how many mirostat targets a rewind can go back

MuRecord = tuple[int, Tensor, int]
"""A position, and the target that its token led to: a tensor (n,) and the place in it."""


class SamplerState:
    """The memory of one job's sampler."""

    def __init__(
        self, settings: Settings | None = None, seed: int | None = None, prompt_ids: Sequence[int] = ()
    ) -> None:
        """A state for a text that begins with `prompt_ids`. A seed of None is a fresh one (see `seed`).

        Of the settings only a `mirostat_mu` to start from is used.
        """
        self.seed = check_seed(seed)
        self._signed_seed = (self.seed + 2**63) % 2**64 - 2**63
        self._history: list[int] = list(prompt_ids)
        self.rewind_count = 0
        self.version_stamp = VERSION_STAMPS.new_stamp()
        """Another one whenever anything changed but by appended tokens, drawn numbers and moved targets."""
        self.last_drawn_position = -1
        """The last position that a random number was drawn for."""
        self._random_numbers = PhiloxStream(self.seed)
        self._penalty_window: PenaltyWindow | None = None
        self._dry_index: DryIndex | None = None
        self.mu_history: list[MuRecord] = []
        """Those that are remembered, ascending; always the same list, changed by the methods below alone."""
        self._initial_mu = 0.0
        if settings is not None and settings.mirostat_mu:
            self.mirostat_mu = settings.mirostat_mu[0]

    def __len__(self) -> int:
        return len(self._history)

    @property
    def history(self) -> list[int]:
        """The text; always the same list, and to be changed by the methods below alone."""
        return self._history

    def accept(self, token: int) -> None:
        """The text grew by a token."""
        self._history.append(token)

    def sync_history(self, ids: Sequence[int]) -> None:
        """Take over what was appended to the text since; a text that became shorter was rewound."""
        if len(ids) < len(self._history):
            self.truncate(len(ids))
        elif len(ids) > len(self._history):
            self._history.extend(ids[len(self._history) :])

    def truncate(self, length: int) -> None:
        """Take back every token from this position on.

        What is sampled next uses fresh random numbers: those of the rejected tokens are what got them chosen.
        """
        if length <= self.last_drawn_position:
            self.rewind_count += 1
            self.last_drawn_position = length - 1
        self._drop_mus_from(length)
        if self._penalty_window is not None:
            self._penalty_window.truncate(self._history, length)
        if self._dry_index is not None:
            self._dry_index.truncate(length)
        del self._history[length:]
        self.version_stamp = VERSION_STAMPS.new_stamp()

    def uniform(self, position: int) -> float:
        """The random number in [0, 1) for the token at a position; asked again, the same one."""
        if position > self.last_drawn_position:
            self.last_drawn_position = position
        return self._random_numbers.at(position, self.rewind_count)

    def philox_words(self) -> tuple[int, int]:
        """What `uniform` is a function of besides the position, as signed 64-bit words: seed and branch.

        Whoever computes it elsewhere must say for which position: see `drawn`.
        """
        return self._signed_seed, self.rewind_count

    def penalty_terms(self, rule: PenaltyRule) -> PenaltyTerms:
        """The tokens of the text that a penalty rule is about."""
        if self._penalty_window is None:
            self._penalty_window = PenaltyWindow()
        return self._penalty_window.terms(self._history, rule)

    def dry_costs(self, rule: DryRule, breaker_ids: Collection[int], vocab_size: int) -> dict[int, float]:
        """What DRY takes off which tokens."""
        if self._dry_index is None:
            self._dry_index = DryIndex()
        self._dry_index.extend(self._history[len(self._dry_index) :])
        return self._dry_index.token_costs(rule, breaker_ids, vocab_size)

    @property
    def mirostat_mu(self) -> float | None:
        """Mirostat's target now; None before the first token."""
        if self.mu_history:
            _, mus, index = self.mu_history[-1]
            return float(mus[index])
        return self._initial_mu or None

    @mirostat_mu.setter
    def mirostat_mu(self, mu: float | None) -> None:
        self.mu_history.clear()
        self._initial_mu = float(mu or 0.0)
        self.version_stamp = VERSION_STAMPS.new_stamp()

    def initial_mu(self, tau: float) -> float:
        """The target for the first token: 2 · tau unless settings said otherwise."""
        return self._initial_mu or 2.0 * tau

    def mu_record_before(self, position: int) -> MuRecord | None:
        """The target for the token at a position, that of the last one before it; None at first.

        Between steps it stays on the device.
        """
        for record in reversed(self.mu_history):
            if record[0] < position:
                return record
        return None

    def mu_at(self, position: int, tau: float, device: torch.device) -> Tensor:
        """The target for the token at a position as a scalar."""
        record = self.mu_record_before(position)
        if record is None:
            return torch.full((), self.initial_mu(tau), dtype=torch.float64, device=device)
        _, mus, index = record
        return mus[index].to(device, non_blocking=True)

    def record_mu(self, position: int, mus: Tensor, index: int) -> MuRecord:
        """Remember the target that the token at a position led to: one of some targets (n,)."""
        records, record = self.mu_history, (position, mus, index)
        if records and records[-1][0] >= position:
            self._drop_mus_from(position)
        records.append(record)
        if len(records) > 2 * MU_HISTORY_LENGTH:
            del records[:MU_HISTORY_LENGTH]
        return record

    def _drop_mus_from(self, position: int) -> None:
        while self.mu_history and self.mu_history[-1][0] >= position:
            self.mu_history.pop()
