"""One layer quantised on what it will really read: the answers of the quantised layers before it.

Two streams of states run side by side, the float model's and the quantised one's. Each matrix is first moved
so that from the quantised stream's inputs it gives the float stream's answers, then rounded; the matrices
behind it hear the rounded ones. A matrix whose answers are added to the stream also makes good for what the
stream has lost before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..formats import PackedWeight
from ..nn import Batch
from .layer_loader import HookedLinear, StopForward

Forward = Callable[[Tensor, Batch], Tensor]
Solver = Callable[[str, Tensor, Tensor], tuple[Tensor, PackedWeight]]
"""(role, target (in, out), covariance of the inputs) → the rounded matrix (in, out) and its stored form."""


@dataclass
class HiddenStates:
    """The residual stream of every row, before the same layer: as it should be, and as it is."""

    float_states: list[Tensor]
    quantized_states: list[Tensor]
    batches: list[Batch] = field(repr=False)

    def to_tensors(self) -> dict[str, Tensor]:
        """To be kept."""
        pairs = zip(self.float_states, self.quantized_states, strict=True)
        return {
            f"{kind}.{i:04}": x for i, both in enumerate(pairs) for kind, x in zip("er", both, strict=True)
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], batches: list[Batch]) -> HiddenStates:
        """From what was kept."""
        device = batches[0].ids.device
        kept = {
            kind: [tensors[f"{kind}.{i:04}"].to(device) for i in range(len(batches))] for kind in ("e", "r")
        }
        return cls(kept["e"], kept["r"], batches)

    def relative_error(self) -> float:
        """How far apart they are, relative to the exact one."""
        off = sum(
            float((e - r).square().sum())
            for e, r in zip(self.float_states, self.quantized_states, strict=True)
        )
        whole = sum(float(e.square().sum()) for e in self.float_states)
        return float((off / whole) ** 0.5) if whole else 0.0


def input_groups(roles: Iterable[str]) -> list[list[str]]:
    """Roles that read the same input together, in the order in which they can be quantised; no routers."""
    sets: dict[tuple[str, str], list[str]] = {}
    names = {"q": "in", "k": "in", "v": "in", "o": "out", "gate": "in", "up": "in", "down": "out"}
    for role in roles:
        part = role.rpartition(".")[2]
        if part == "router":
            continue
        half = "mlp" if ".mlp." in role else "attn" if ".attn." in role else role
        sets.setdefault((half, names.get(part, part)), []).append(role)
    return list(sets.values())


def solve_layer(
    taps: Mapping[str, HookedLinear],
    forward: Forward,
    streams: HiddenStates,
    solver: Solver,
    ridge: float,
    care: Mapping[str, Tensor],
    adding: Collection[str] = (),
) -> dict[str, PackedWeight]:
    """Every matrix of a module, the taps left with the rounded ones; the streams stay where they are.

    `care` has for some roles how much each token matters; for the others all matter alike. The answers of
    roles in `adding` are added to the stream as they are.
    """
    exact = {role: tap.data for role, tap in taps.items()}
    made: dict[str, PackedWeight] = {}
    for together in input_groups(taps):
        shared = [role for role in together if not (".experts." in role and role.endswith(".down"))]
        for roles in [shared] if shared else [[role] for role in together]:
            now = {role: tap.data for role, tap in taps.items()}
            whole = roles[0] in adding
            heard = _accumulate(taps, roles, forward, streams, exact, now, care, whole=whole)
            for role in roles:
                w = heard[role].correct_weights(exact[role].T, ridge)
                values, made[role] = solver(role, w.contiguous(), heard[role].hessian)
                now[role] = values.T.contiguous()
            _set_weights(taps, now)
    return made


def accumulate_clusters(
    tap: HookedLinear, forward: Forward, s: HiddenStates, care: Tensor
) -> tuple[HessianAccumulator, list[HessianAccumulator]]:
    """What a module with one matrix is asked, for all its columns and for each kind of them.

    `care` (tokens, kinds) has how much each token matters to each kind.
    """
    whole, kinds = HessianAccumulator(tap.data), [HessianAccumulator(tap.data) for _ in range(care.shape[1])]
    past = 0
    for i, batch in enumerate(s.batches):
        exact, x = (
            _capture_inputs([tap], forward, stream[i], batch, stop=True)[0]
            for stream in (s.float_states, s.quantized_states)
        )
        own = care[past : past + len(x)].to(x.device)
        off = exact - x
        whole.add(x, off, None, own.sum(1))
        for kind, each in zip(kinds, own.T, strict=True):
            kind.add(x, off, None, each)
        past += len(x)
    return whole, kinds


def advance(
    taps: Mapping[str, HookedLinear], exact: Mapping[str, Tensor], forward: Forward, s: HiddenStates
) -> None:
    """Both streams through the module, each with its own matrices; the rounded ones stay in the taps."""
    rounded = {role: tap.data for role, tap in taps.items()}
    for tensors, stream in ((exact, s.float_states), (rounded, s.quantized_states)):
        _set_weights(taps, tensors)
        for i, batch in enumerate(s.batches):
            stream[i] = forward(stream[i], batch)
    _set_weights(taps, rounded)


def check_finite(streams: HiddenStates, where: str) -> None:
    """`InputError` names the layer whose answers are not numbers."""
    for kind, stream in (("source", streams.float_states), ("quantised", streams.quantized_states)):
        if not all(bool(torch.isfinite(x).all()) for x in stream):
            raise InputError(
                f"{where}: the {kind} model's answers hold NaN or infinity on the calibration text. "
                "Calibrate with other text, or check the source model with `exlm eval`."
            )


def _accumulate(
    taps: Mapping[str, HookedLinear],
    roles: list[str],
    forward: Forward,
    s: HiddenStates,
    exact: Mapping[str, Tensor],
    now: Mapping[str, Tensor],
    care: Mapping[str, Tensor],
    *,
    whole: bool,
) -> dict[str, HessianStats]:
    """For each role what the rounded stream asks it; with `whole`, also what the stream has lost by then."""
    paired = not any(".experts." in role for role in roles)
    ears = [taps[roles[0]]] if paired else [taps[r] for r in roles if not r.endswith(".up")]
    device = s.batches[0].ids.device
    weighted = {role: care[role].to(device) for role in roles if role in care and float(care[role].sum())}
    sums = {role: HessianAccumulator(taps[role].data) for role in weighted} | {
        "": HessianAccumulator(taps[roles[0]].data)
    }
    if whole:
        exact, now = ({**tensors, **_zeroed_mlp(tensors, roles[0])} for tensors in (exact, now))
    past = 0
    for i, batch in enumerate(s.batches):
        heard, behind = [], []
        for tensors, stream in ((exact, s.float_states), (now, s.quantized_states)):
            if tensors is exact and not paired:
                continue
            _set_weights(taps, tensors)
            inputs, end = _capture_inputs(ears, forward, stream[i], batch, stop=paired and not whole)
            heard.append(inputs)
            behind.append(end)
        x, off = heard[-1], heard[0] - heard[1] if paired else None
        lost = (behind[0] - behind[1]).flatten(0, -2) if whole else None
        for role, each in weighted.items():
            sums[role].add(x, off, lost, each[past : past + len(x)])
        if len(weighted) < len(roles):
            sums[""].add(x, off, lost, x.new_ones(len(x)))
        past += len(x)
    return {role: sums[role if role in weighted else ""].mean() for role in roles}


class HessianStats(NamedTuple):
    """Means over tokens, of the inputs with themselves, with how they are off, and with what the stream lost.

    `cross` is None for experts: the two streams may send a token to different ones.
    """

    hessian: Tensor  # (in, in)
    cross: Tensor | None  # (in, in)
    residual_error: Tensor | None  # (in, out), if the answers are added to the stream
    tokens: int
    effective_tokens: float  # tokens that would tell as much if all mattered alike

    def correct_weights(self, w: Tensor, ridge: float) -> Tensor:
        """The matrix that from the rounded inputs comes closest to the exact answers.

        What the stream lost before it is made good with more care the less text there is: most of that has
        nothing to do with the inputs.
        """
        if self.cross is None:
            return w
        off = self.cross @ w
        moved = self._ridge_solve(off, ridge)
        if self.residual_error is not None:
            moved = moved + self._ridge_solve(self.residual_error - off, max(ridge, len(w) / self.tokens))
        return w + moved if bool(torch.isfinite(moved).all()) else w

    def correct_columns(self, w: Tensor, so_far: Tensor, ridge: float) -> Tensor:
        """Columns that were moved with others, further to where these means want them."""
        if self.cross is None:
            return so_far
        moved = self._ridge_solve(
            self.cross @ w - self.hessian @ (so_far - w), max(ridge, len(w) / max(self.effective_tokens, 1.0))
        )
        return so_far + moved if bool(torch.isfinite(moved).all()) else so_far

    def blend(self, others: HessianStats, tokens: float) -> Tensor:
        """The covariance, with that of others as if so many of their tokens were heard as well."""
        return (self.effective_tokens * self.hessian + tokens * others.hessian) / (
            self.effective_tokens + tokens
        )

    def _ridge_solve(self, wanted: Tensor, ridge: float) -> Tensor:
        eye = torch.eye(len(self.hessian), device=wanted.device)
        solved, failed = torch.linalg.solve_ex(
            self.hessian + ridge * self.hessian.diagonal().mean() * eye, wanted
        )
        # Inputs that are never anything but zero, behind a layer that is switched off, tell nothing.
        return torch.zeros_like(wanted) if int(failed) else solved


class HessianAccumulator:
    """What `Means` has the means of."""

    def __init__(self, matrix: Tensor) -> None:
        width = matrix.shape[1]
        self.hessian, self.cross = matrix.new_zeros(2, width, width)
        self.residual_error: Tensor | None = None
        self.total, self.squares = matrix.new_zeros(2)
        self.tokens, self.paired = 0, True

    def add(self, x: Tensor, off: Tensor | None, lost: Tensor | None, care: Tensor) -> None:
        """More tokens: their inputs, how those are off, what the stream lost, and how much each matters."""
        weighted = (x * care[:, None]).T
        self.hessian.addmm_(weighted, x)
        self.total += care.sum()
        self.squares += care.square().sum()
        self.tokens += len(x)
        if off is None:
            self.paired = False
        else:
            self.cross.addmm_(weighted, off)
        if lost is not None:
            grown = weighted @ lost
            self.residual_error = grown if self.residual_error is None else self.residual_error.add_(grown)

    def mean(self) -> HessianStats:
        """Over all tokens so far, as much as each mattered."""
        if not float(self.total):
            return HessianStats(torch.eye(len(self.hessian), device=self.hessian.device), None, None, 0, 0.0)
        cross = self.cross / self.total if self.paired else None
        lost = None if self.residual_error is None else self.residual_error / self.total
        worth = float(self.total.square() / self.squares)
        return HessianStats(self.hessian / self.total, cross, lost, self.tokens, worth)


def _capture_inputs(
    ears: list[HookedLinear], forward: Forward, x: Tensor, batch: Batch, *, stop: bool
) -> tuple[Tensor, Tensor]:
    """What the taps are asked in one pass, and its end; with `stop` it ends at the first of them."""
    heard: list[Tensor] = [x.new_zeros(0, ears[0].data.shape[1])]
    for ear in ears:
        ear.on_input, ear.stops_forward = lambda y: heard.append(y.flatten(0, -2)), stop
    with suppress(StopForward):
        x = forward(x, batch)
    for ear in ears:
        ear.on_input, ear.stops_forward = None, False
    return torch.cat(heard), x


def _zeroed_mlp(tensors: Mapping[str, Tensor], role: str) -> dict[str, Tensor]:
    """With these, what comes behind a role's half of the layer adds nothing to the stream."""
    if ".attn." not in role:
        return {}
    behind = (r for r in tensors if ".mlp." in r and r.endswith(".down"))
    return {r: tensors[r].new_zeros(()).expand_as(tensors[r]) for r in behind}


def _set_weights(taps: Mapping[str, HookedLinear], tensors: Mapping[str, Tensor]) -> None:
    for role, tap in taps.items():
        tap.data = tensors[role]
