"""Solves one layer, or the head, on the inputs it will really get: the outputs of quantised layers.

The hidden states of the calibration run through the float model and through the quantised one side by side.
With x the float model's input of a matrix and x̂ the quantised model's, the target of a matrix W is first
corrected so that x̂ W' comes closest to x W (asymmetric calibration, as in GPTAQ): W' = W + Ĥ⁻¹ C W with Ĥ =
mean of x̂ x̂ᵀ and C = mean of x̂ (x - x̂)ᵀ. A matrix whose output is added to the residual stream also
corrects what the stream has lost in the layers before. Then it is rounded, and the matrices behind it get the
outputs of the rounded one.

The columns of the head (the vocabulary) are solved in clusters, each for the tokens where it matters. To
second order a logit that is off by d costs d² p (1 - p) / 2 nats, p being its probability: a column should be
exact where its own token is likely. The calibration says too little about single columns; columns of similar
direction are likely at the same places and share one weighted Hessian. Outputs are rounded independently of
each other: a Hessian over the logits made results worse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..formats import PackedWeight
from ..nn import Batch
from .allocation import QuantGroup
from .coordinate_descent import descend_one_sided
from .gptq import Grid, add_damping, factorize
from .layer_loader import HookedLinear, StopForward
from .matrix_solver import Exl2Solution, solve_exl2
from .options import SolverOptions

MAX_CLUSTERS = 64
MAX_HESSIAN_BYTES = 2**29
"""Bytes that the Hessians of all clusters may take: wide models have fewer clusters."""

KMEANS_STEPS = 12

SHARED_TOKENS_PER_INPUT = 4
"""Weight of the overall Hessian when it is added to a cluster's own, as tokens per input: the text has few tokens for
a single cluster."""

CLUSTER_SWEEPS = 4
"""Sweeps of coordinate descent with a cluster's own Hessian."""

_EXPERT_NUMBER = re.compile(r"\.experts\.\d+")

Forward = Callable[[Tensor, Batch], Tensor]
SolveMatrix = Callable[[str, Tensor, Tensor], tuple[Tensor, PackedWeight]]
"""(role, target (in, out), input Hessian (in, in)) → the rounded matrix (in, out) and its stored form."""


@dataclass
class HiddenStates:
    """The residual stream before the same layer, of the float model and of the quantised one, by batch."""

    float_states: list[Tensor]
    quantized_states: list[Tensor]
    batches: list[Batch] = field(repr=False)

    def to_tensors(self) -> dict[str, Tensor]:
        """As the step store keeps them."""
        pairs = zip(self.float_states, self.quantized_states, strict=True)
        return {f"{key}.{i:04}": x for i, both in enumerate(pairs) for key, x in zip("er", both, strict=True)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], batches: list[Batch]) -> HiddenStates:
        """From what the step store kept."""
        device = batches[0].ids.device
        states = {key: [tensors[f"{key}.{i:04}"].to(device) for i in range(len(batches))] for key in "er"}
        return cls(states["e"], states["r"], batches)

    def relative_error(self) -> float:
        """How far the quantised states are from the float ones, relative to these."""
        pairs = zip(self.float_states, self.quantized_states, strict=True)
        error = sum(float((x - q).square().sum()) for x, q in pairs)
        norm = sum(float(x.square().sum()) for x in self.float_states)
        return float((error / norm) ** 0.5) if norm else 0.0

    def check_finite(self, where: str) -> None:
        """`InputError` names the layer whose outputs are not finite."""
        for name, states in (("source", self.float_states), ("quantised", self.quantized_states)):
            if not all(bool(torch.isfinite(x).all()) for x in states):
                raise InputError(
                    f"{where}: the outputs of the {name} model hold NaN or infinity on the calibration text. "
                    "Calibrate with other text, or check the source model with `exlm eval`."
                )


# -- statistics of the inputs ----------------------------------------------------------------------


class HessianStats(NamedTuple):
    """Weighted means over the tokens that reached a matrix; x̂ is its input in the quantised model."""

    hessian: Tensor  # (in, in) Ĥ: x̂ x̂ᵀ
    cross: Tensor | None  # (in, in) C: x̂ (x - x̂)ᵀ; None for experts, which may get other tokens in each model
    residual_cross: Tensor | None  # (in, out) x̂ rᵀ, r: float minus quantised residual stream behind it
    tokens: int
    effective_tokens: float  # (Σ weight)² / Σ weight²

    def correct_weights(self, w: Tensor, damping: float) -> Tensor:
        """The matrix (in, out) that from quantised inputs comes closest to the float outputs.

        Most of the residual stream's error does not depend on this input: correcting it is damped more, the
        less text there is.
        """
        if self.cross is None:
            return w
        input_error = self.cross @ w
        change = self._ridge_solve(input_error, damping)
        if self.residual_cross is not None:
            rest = self.residual_cross - input_error
            change = change + self._ridge_solve(rest, max(damping, len(w) / self.tokens))
        return w + change if bool(torch.isfinite(change).all()) else w

    def correct_columns(self, w: Tensor, corrected: Tensor, damping: float) -> Tensor:
        """Correct columns of `w` further, which were corrected together with others."""
        if self.cross is None:
            return corrected
        rest = self.cross @ w - self.hessian @ (corrected - w)
        change = self._ridge_solve(rest, max(damping, len(w) / max(self.effective_tokens, 1.0)))
        return corrected + change if bool(torch.isfinite(change).all()) else corrected

    def blend(self, other: HessianStats, tokens: float) -> Tensor:
        """This Hessian and another, the other as if it came from so many tokens."""
        total = self.effective_tokens + tokens
        return (self.effective_tokens * self.hessian + tokens * other.hessian) / total

    def _ridge_solve(self, right: Tensor, damping: float) -> Tensor:
        """(Ĥ + damping · mean(diag Ĥ) · I)⁻¹ right."""
        eye = torch.eye(len(self.hessian), device=right.device)
        solved, failed = torch.linalg.solve_ex(self.hessian + damping * self.hessian.diagonal().mean() * eye, right)
        # All inputs are zero behind a layer that is switched off: there is nothing to correct.
        return torch.zeros_like(right) if int(failed) else solved


class HessianAccumulator:
    """The sums of which `HessianStats` are the means."""

    def __init__(self, matrix: Tensor) -> None:
        width = matrix.shape[1]
        self.hessian, self.cross = matrix.new_zeros(2, width, width)
        self.residual_cross: Tensor | None = None
        self.weight_sum, self.squared_weight_sum = matrix.new_zeros(2)
        self.tokens, self.paired = 0, True

    def add(self, x: Tensor, input_error: Tensor | None, residual_error: Tensor | None, weights: Tensor) -> None:
        """More tokens: x̂, x - x̂, the error of the residual stream behind the matrix, each token's weight."""
        weighted = (x * weights[:, None]).T
        self.hessian.addmm_(weighted, x)
        self.weight_sum += weights.sum()
        self.squared_weight_sum += weights.square().sum()
        self.tokens += len(x)
        if input_error is None:
            self.paired = False
        else:
            self.cross.addmm_(weighted, input_error)
        if residual_error is not None:
            more = weighted @ residual_error
            self.residual_cross = more if self.residual_cross is None else self.residual_cross.add_(more)

    def mean(self) -> HessianStats:
        """The weighted means; the identity as Hessian if no token with a weight came."""
        if not float(self.weight_sum):
            eye = torch.eye(len(self.hessian), device=self.hessian.device)
            return HessianStats(eye, None, None, 0, 0.0)
        cross = self.cross / self.weight_sum if self.paired else None
        residual_cross = None if self.residual_cross is None else self.residual_cross / self.weight_sum
        effective_tokens = float(self.weight_sum.square() / self.squared_weight_sum)
        return HessianStats(self.hessian / self.weight_sum, cross, residual_cross, self.tokens, effective_tokens)


# -- layers ----------------------------------------------------------------------------------------


def solve_layer(
    linears: Mapping[str, HookedLinear],
    forward: Forward,
    states: HiddenStates,
    solve_matrix: SolveMatrix,
    damping: float,
    token_weights: Mapping[str, Tensor],
    residual_roles: Collection[str] = (),
) -> dict[str, PackedWeight]:
    """Solve these matrices of a layer; `linears` end up with the rounded ones, `states` stay as they are.

    `token_weights` has, for some roles, each token's weight; for other roles all weigh the same. The outputs
    of `residual_roles` are added to the residual stream without a norm or scale between.
    """
    floats = {role: linear.weight for role, linear in linears.items()}
    packed: dict[str, PackedWeight] = {}
    for group in input_groups(linears):
        shared = [role for role in group if not (".experts." in role and role.endswith(".down"))]
        for roles in [shared] if shared else [[role] for role in group]:
            current = {role: linear.weight for role, linear in linears.items()}
            to_residual = roles[0] in residual_roles
            stats = _input_stats(
                linears, roles, forward, states, floats, current, token_weights, to_residual=to_residual
            )
            for role in roles:
                w = stats[role].correct_weights(floats[role].T, damping)
                values, packed[role] = solve_matrix(role, w.contiguous(), stats[role].hessian)
                current[role] = values.T.contiguous()
            _set_weights(linears, current)
    return packed


MODULE_INPUT_PARTS = ("q", "k", "v", "z", "a", "b", "gate", "up", "q_down", "kv_down", "z_down", "a_down")
"""The last parts of the roles that read what their module (a mixer, an MLP, the experts) reads."""

LATENT_PARTS = ("k_up", "v_up")
"""Those that read the latent of keys and values."""


def input_groups(roles: Iterable[str]) -> list[list[str]]:
    """Roles that share an input, in the order in which they can be solved."""
    groups: dict[tuple[str, str], list[str]] = {}
    for role in roles:
        module, _, part = role.rpartition(".")
        module = _EXPERT_NUMBER.sub(".experts", module)  # all experts of a layer read parts of one input
        source = "input" if part in MODULE_INPUT_PARTS else "latent" if part in LATENT_PARTS else part
        groups.setdefault((module, source), []).append(role)
    return list(groups.values())


def propagate(
    linears: Mapping[str, HookedLinear], floats: Mapping[str, Tensor], forward: Forward, states: HiddenStates
) -> None:
    """Both hidden states through the layer, each with its own matrices; `linears` keep the rounded ones."""
    rounded = {role: linear.weight for role, linear in linears.items()}
    for matrices, xs in ((floats, states.float_states), (rounded, states.quantized_states)):
        _set_weights(linears, matrices)
        for i, batch in enumerate(states.batches):
            xs[i] = forward(xs[i], batch)
    _set_weights(linears, rounded)


def _input_stats(
    linears: Mapping[str, HookedLinear],
    roles: list[str],
    forward: Forward,
    states: HiddenStates,
    floats: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
    token_weights: Mapping[str, Tensor],
    *,
    to_residual: bool,
) -> dict[str, HessianStats]:
    """The statistics of roles that share an input; with `to_residual`, also of the residual stream.

    Experts have no counterpart in the float model, whose router may send a token elsewhere: their inputs are
    those of the quantised model alone.
    """
    paired = not any(".experts." in role for role in roles)
    # An expert's gate and up read the same input.
    hooked = [linears[r] for r in roles if not (r.endswith(".up") and f"{r.removesuffix('up')}gate" in linears)]
    hooked = hooked[:1] if paired else hooked
    device = states.batches[0].ids.device
    weights = {
        role: token_weights[role].to(device)
        for role in roles
        if role in token_weights and float(token_weights[role].sum())
    }
    unweighted = HessianAccumulator(linears[roles[0]].weight)
    weighted = {role: HessianAccumulator(linears[role].weight) for role in weights}
    if to_residual:
        floats, current = ({**matrices, **_zeros_for_mlp_down(matrices, roles[0])} for matrices in (floats, current))
    past = 0
    for i, batch in enumerate(states.batches):
        input_error = residual_error = None
        if paired:
            _set_weights(linears, floats)
            float_x, float_end = _capture_inputs(hooked, forward, states.float_states[i], batch, stop=not to_residual)
        _set_weights(linears, current)
        stop = paired and not to_residual
        x, end = _capture_inputs(hooked, forward, states.quantized_states[i], batch, stop=stop)
        if paired:
            input_error = float_x - x
            residual_error = (float_end - end).flatten(0, -2) if to_residual else None
        for role, accumulator in weighted.items():
            accumulator.add(x, input_error, residual_error, weights[role][past : past + len(x)])
        if len(weighted) < len(roles):
            unweighted.add(x, input_error, residual_error, x.new_ones(len(x)))
        past += len(x)
    return {role: weighted.get(role, unweighted).mean() for role in roles}


def _capture_inputs(
    hooked: list[HookedLinear], forward: Forward, x: Tensor, batch: Batch, *, stop: bool
) -> tuple[Tensor, Tensor]:
    """Inputs (tokens, in) of some matrices in one pass, and its output; `stop` ends it at the first."""
    inputs: list[Tensor] = [x.new_zeros(0, hooked[0].weight.shape[1])]
    for linear in hooked:
        linear.on_input, linear.stops_forward = lambda y: inputs.append(y.flatten(0, -2)), stop
    with suppress(StopForward):
        x = forward(x, batch)
    for linear in hooked:
        linear.on_input, linear.stops_forward = None, False
    return torch.cat(inputs), x


def _zeros_for_mlp_down(matrices: Mapping[str, Tensor], role: str) -> dict[str, Tensor]:
    """For a role of the mixer: zeros for the MLP's `down`, so that the MLP adds nothing in a pass."""
    if ".mlp." in role:
        return {}
    downs = (r for r in matrices if ".mlp." in r and r.endswith(".down"))
    return {r: matrices[r].new_zeros(()).expand_as(matrices[r]) for r in downs}


def _set_weights(linears: Mapping[str, HookedLinear], matrices: Mapping[str, Tensor]) -> None:
    for role, linear in linears.items():
        linear.weight = matrices[role]


# -- the head --------------------------------------------------------------------------------------


def cluster_count(inputs: int, columns: int) -> int:
    """How many clusters a head of this shape gets."""
    return max(1, min(MAX_CLUSTERS, MAX_HESSIAN_BYTES // (8 * inputs * inputs), columns // 16))


def cluster_columns(matrix: Tensor, count: int, seed: int) -> Tensor:
    """(columns, count) one-hot clusters of the columns of `matrix` (columns, inputs): spherical k-means."""
    columns = len(matrix)
    first = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))[:count]
    centres = F.normalize(matrix[first.to(matrix.device)], dim=1)
    lengths = matrix.norm(dim=1).clamp(min=1e-30)
    for step in range(KMEANS_STEPS):
        nearest = (matrix @ centres.T).argmax(1)  # a column's own length does not change which is nearest
        membership = F.one_hot(nearest, count).to(matrix.dtype)
        if step + 1 < KMEANS_STEPS:
            centres = torch.where(
                membership.sum(0)[:, None] > 0, F.normalize((membership / lengths[:, None]).T @ matrix, dim=1), centres
            )
    return membership


def cluster_token_weights(probs: Tensor, membership: Tensor) -> Tensor:
    """(…, clusters) each token's weight for each cluster: the sum of p (1 - p) over the cluster's columns.

    `probs` (…, columns) are the model's probabilities at those tokens.
    """
    return torch.addcmul(probs, probs, probs, value=-1).clamp_(min=0) @ membership


def accumulate_clusters(
    linear: HookedLinear, forward: Forward, states: HiddenStates, token_weights: Tensor
) -> tuple[HessianAccumulator, list[HessianAccumulator]]:
    """The statistics of a module with one matrix, of all its columns and of each cluster of them.

    `token_weights` (tokens, clusters) are the tokens' weights for each cluster.
    """
    overall = HessianAccumulator(linear.weight)
    clusters = [HessianAccumulator(linear.weight) for _ in range(token_weights.shape[1])]
    past = 0
    for i, batch in enumerate(states.batches):
        exact, x = (
            _capture_inputs([linear], forward, xs[i], batch, stop=True)[0]
            for xs in (states.float_states, states.quantized_states)
        )
        weights = token_weights[past : past + len(x)].to(x.device)
        input_error = exact - x
        overall.add(x, input_error, None, weights.sum(1))
        for cluster, own in zip(clusters, weights.T, strict=True):
            cluster.add(x, input_error, None, own)
        past += len(x)
    return overall, clusters


def solve_head(
    w: Tensor,
    overall: HessianAccumulator,
    clusters: Sequence[HessianAccumulator],
    membership: Tensor,
    groups: Sequence[QuantGroup],
    options: SolverOptions,
    damping: float,
) -> Exl2Solution:
    """Codes and scales for `w` (inputs, columns), with the statistics of all columns and of each cluster's.

    All columns are solved together with the overall Hessian, then each cluster's codes descend with its own.
    """
    common = overall.mean()
    target = common.correct_weights(w, damping)
    members = [
        (accumulator, membership[:, n].nonzero()[:, 0]) for n, accumulator in enumerate(clusters) if len(clusters) > 1
    ]
    for accumulator, columns in members:
        target[:, columns] = accumulator.mean().correct_columns(w[:, columns], target[:, columns], damping)
    f = factorize(target, common.hessian, damping, "head")
    solution = solve_exl2(target, f, groups, options)
    target, scales = target[f.perm], solution.group_scales()
    for accumulator, columns in members:
        own = accumulator.mean()
        if len(columns) and own.effective_tokens:
            h = own.blend(common, SHARED_TOKENS_PER_INPUT * len(w))[f.perm][:, f.perm]
            _descend_columns(solution, target[:, columns], scales[:, columns], columns, add_damping(h, damping))
    return solution


def _descend_columns(solution: Exl2Solution, target: Tensor, scales: Tensor, columns: Tensor, h: Tensor) -> None:
    """Improve the codes of some columns under their own Hessian `h`; `target` and `scales` are theirs."""
    codes, scales = solution.codes[:, columns].contiguous(), scales.contiguous()
    grids = list(map(Grid, scales, -solution.half_ranges, solution.half_ranges - 1))
    values = (codes * scales[solution.group_of]).half().float()
    gradient = h @ (target - values)
    for _ in range(CLUSTER_SWEEPS):
        descend_one_sided(codes, gradient, h, solution.sizes, grids)
    solution.codes[:, columns] = codes
