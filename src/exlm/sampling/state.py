"""SamplerState: what sampling one text has led to: its random numbers, mirostat's target, what it repeats.

Every job has its own, so settings may be shared. A state follows the text it belongs to: tokens that were
appended since are taken over when they are needed, and `truncate` takes back. It chooses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .dry import DryIndex, DryRule
from .editions import EDITIONS
from .penalties import PenaltyHistory, PenaltyRule, Terms
from .random import Uniforms, check_seed
from .settings import Settings

REMEMBERED = 256  # how many mirostat targets a rewind can go back

Target = tuple[int, Tensor, int]
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
        self._seed_word = (self.seed + 2**63) % 2**64 - 2**63
        self._history: list[int] = list(prompt_ids)
        self.branch = 0
        self.edition = EDITIONS.new()
        """Another one whenever anything changed but by appended tokens, drawn numbers and moved targets."""
        self.drawn = -1
        """The last position that a random number was drawn for."""
        self._uniforms = Uniforms(self.seed)
        self._penalties: PenaltyHistory | None = None
        self._dry: DryIndex | None = None
        self.targets: list[Target] = []
        """Those that are remembered, ascending; always the same list, changed by the methods below alone."""
        self._start = 0.0
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

    def follow(self, ids: Sequence[int]) -> None:
        """Take over what was appended to the text since; a text that became shorter was rewound."""
        if len(ids) < len(self._history):
            self.truncate(len(ids))
        elif len(ids) > len(self._history):
            self._history.extend(ids[len(self._history) :])

    def truncate(self, length: int) -> None:
        """Take back every token from this position on.

        What is sampled next uses fresh random numbers: those of the rejected tokens are what got them chosen.
        """
        if length <= self.drawn:
            self.branch += 1
            self.drawn = length - 1
        self._forget_targets(length)
        if self._penalties is not None:
            self._penalties.truncate(self._history, length)
        if self._dry is not None:
            self._dry.truncate(length)
        del self._history[length:]
        self.edition = EDITIONS.new()

    def uniform(self, position: int) -> float:
        """The random number in [0, 1) for the token at a position; asked again, the same one."""
        if position > self.drawn:
            self.drawn = position
        return self._uniforms.at(position, self.branch)

    def draws(self) -> tuple[int, int]:
        """What `uniform` is a function of besides the position, as signed 64-bit words: seed and branch.

        Whoever computes it elsewhere must say for which position: see `drawn`.
        """
        return self._seed_word, self.branch

    def penalty_terms(self, rule: PenaltyRule) -> Terms:
        """The tokens of the text that a penalty rule is about."""
        if self._penalties is None:
            self._penalties = PenaltyHistory()
        return self._penalties.terms(self._history, rule)

    def repeats(self, rule: DryRule, breakers: Collection[int], limit: int) -> dict[int, float]:
        """What DRY takes off which tokens."""
        if self._dry is None:
            self._dry = DryIndex()
        self._dry.extend(self._history[len(self._dry) :])
        return self._dry.repeats(rule, breakers, limit)

    @property
    def mirostat_mu(self) -> float | None:
        """Mirostat's target now; None before the first token."""
        if self.targets:
            _, targets, place = self.targets[-1]
            return float(targets[place])
        return self._start or None

    @mirostat_mu.setter
    def mirostat_mu(self, target: float | None) -> None:
        self.targets.clear()
        self._start = float(target or 0.0)
        self.edition = EDITIONS.new()

    def first_target(self, tau: float) -> float:
        """The target for the first token: 2 · tau unless settings said otherwise."""
        return self._start or 2.0 * tau

    def last_target(self, position: int) -> Target | None:
        """The target for the token at a position, that of the last one before it; None at first.

        Between steps it stays on the device.
        """
        for target in reversed(self.targets):
            if target[0] < position:
                return target
        return None

    def target(self, position: int, tau: float, device: torch.device) -> Tensor:
        """The target for the token at a position as a scalar."""
        found = self.last_target(position)
        if found is None:
            return torch.full((), self.first_target(tau), dtype=torch.float64, device=device)
        _, targets, place = found
        return targets[place].to(device, non_blocking=True)

    def set_target(self, position: int, targets: Tensor, place: int) -> Target:
        """Remember the target that the token at a position led to: one of some targets (n,)."""
        known, target = self.targets, (position, targets, place)
        if known and known[-1][0] >= position:
            self._forget_targets(position)
        known.append(target)
        if len(known) > 2 * REMEMBERED:
            del known[:REMEMBERED]
        return target

    def _forget_targets(self, position: int) -> None:
        while self.targets and self.targets[-1][0] >= position:
            self.targets.pop()
