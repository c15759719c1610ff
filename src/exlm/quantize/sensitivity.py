"""Sensitivity: the KL divergence that each bit width costs each matrix, block of rows by block of rows.

Let g be the gradient, at a matrix's outputs, of the log-probability of a token drawn from the model's own
distribution. Then G = mean of g gᵀ is the Fisher information there, which is the curvature of the KL
divergence from the float model; with the input Hessian H = mean of |g|² x xᵀ / mean of |g|², rounding errors
E cost tr(G Eᵀ H E) / 2 nats per token, to second order. One backward pass through the model, a layer at a
time, gives G and H of every matrix; rounding the matrix to a few widths then gives its `Sensitivity`. In
which order layers come, and what is kept on disk, is decided in `pipeline`.

A `Measurement` holds the sensitivities of all matrices. It serves any target and can be saved; measurement.json
of exllamav2's converter is read as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from ..errors import CheckpointError, InputError
from ..formats.exl2 import BIT_WIDTHS
from ..nn import Batch, Head
from ..nn.block import BlockLike
from ..spec.model import Matrix
from ..spec.tensor_names import TensorNames
from .allocation import GROUP_SIZES, Candidate, CandidateSet, QuantGroup, Recipe, candidate_recipes, quantized_matrices
from .gptq import OutputFactors, factorize, inverse_cholesky
from .layer_loader import HookedLinear, run_block
from .layer_solver import cluster_token_weights
from .matrix_solver import rounding_losses

TOKEN_WEIGHT_CAP = 8.0
"""A token weighs at most this many times the median token: beyond, the second order is no approximation."""

MAX_FULL_OUTPUTS = 2048
"""Outputs up to which G is a full matrix; of wider matrices only its diagonal is kept."""

LOGIT_TOKENS = 512
"""Tokens whose logits are in memory at once."""

COARSE_SCALE_STEPS = 8
"""Steps of the scale search while measuring."""

MEASURED_BITS = (2, 3, 4, 6)
"""Widths that are measured by rounding; from 4 bits on the cost falls geometrically, which gives 5 and 8."""

BLOCK_ROWS = 32
"""Stored rows whose KL cost is summed up in one number."""

BASE_GROUP_SIZE = 64
PROBE_BITS = (2, 3, 4)
"""Widths at which other group sizes are measured; wider ones behave like the widest of these."""


# -- the backward pass -----------------------------------------------------------------------------


class FisherStats(NamedTuple):
    """Sums over tokens at one matrix; a token weighs |g|², g being the gradient at its output."""

    input_sum: Tensor  # (in, in): Σ |g|² x xᵀ
    gradient_sum: Tensor  # (out, out) Σ g gᵀ, or (out,) its diagonal for a wide matrix
    token_weights: tuple[Tensor, ...]  # (tokens,) |g|², of each forward pass

    @property
    def tokens(self) -> int:
        """Tokens that reached the matrix."""
        return sum(map(len, self.token_weights))

    def hessian(self) -> Tensor:
        """(in, in) the weighted mean of x xᵀ."""
        return self.input_sum / torch.cat(self.token_weights).sum().clamp(min=1e-30)


class FisherHooks:
    """Accumulates `FisherStats` of some of a layer's matrices while `vjp` runs through the layer."""

    def __init__(self, linears: Mapping[str, HookedLinear]) -> None:
        self.stats: dict[str, FisherStats] = {}
        self._inputs: dict[str, Tensor] = {}
        for role, linear in linears.items():
            linear.on_input = lambda x, role=role: self._input(role, x)
            linear.on_output = lambda y, role=role: self._output(role, y)

    def _input(self, role: str, x: Tensor) -> None:
        self._inputs[role] = x.detach().flatten(0, -2)

    def _output(self, role: str, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(partial(self._gradient, role))  # type: ignore[no-untyped-call]

    def _gradient(self, role: str, gradient: Tensor) -> None:
        x, g = self._inputs.pop(role), gradient.flatten(0, -2)
        weights = g.square().sum(1)
        if len(g):
            factor = (TOKEN_WEIGHT_CAP * weights.median() / weights.clamp(min=1e-30)).clamp(max=1)
            g, weights = g * factor.sqrt()[:, None], weights * factor
        stats = self.stats.get(role)
        if stats is None:
            stats = FisherStats(x.new_zeros(x.shape[1], x.shape[1]), g.new_zeros(()), ())
        stats.input_sum.addmm_((x * weights[:, None]).T, x)
        more = g.T @ g if g.shape[1] <= MAX_FULL_OUTPUTS else g.square().sum(0)
        self.stats[role] = FisherStats(stats.input_sum, stats.gradient_sum + more, (*stats.token_weights, weights))


def head_grad(
    head: Head, x: Tensor, batch: Batch, generator: torch.Generator, membership: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the backward pass begins: the gradient at the head's input `x` (rows, tokens, hidden).

    It is that of -log p(token), with one token drawn from the model's distribution at each place. Also
    returns (rows, tokens, clusters) the tokens' weights for each cluster of the head's columns, which
    `membership` gives. Logits are the largest tensors of the job: only those of LOGIT_TOKENS tokens exist at
    a time.
    """
    uniform = torch.rand(x.shape[:2], generator=generator).to(x.device)
    grads, weights = torch.empty_like(x), x.new_empty(*x.shape[:2], membership.shape[1])
    step = max(1, LOGIT_TOKENS // len(x))
    for a in range(0, x.shape[1], step):
        part = x[:, a : a + step].detach().requires_grad_(True)
        with torch.enable_grad():
            logits, _ = head.forward(part, None, batch)
            with torch.no_grad():
                probs = logits.softmax(-1)
                weights[:, a : a + step] = cluster_token_weights(probs, membership)
                drawn = _sample(probs, uniform[:, a : a + step])
            F.cross_entropy(logits.flatten(0, 1), drawn.flatten(), reduction="sum").backward()  # type: ignore[no-untyped-call]
        assert part.grad is not None
        grads[:, a : a + step] = part.grad
    return grads, weights


def _sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """(rows, tokens) inverse-CDF samples for uniform numbers from 0 to 1; overwrites `probs`."""
    cdf = probs.cumsum_(-1)
    aim = uniform[..., None] * cdf[..., -1:]
    return torch.searchsorted(cdf, aim, right=True)[..., 0].clamp(max=probs.shape[-1] - 1)


def vjp(block: BlockLike, x: Tensor, batch: Batch, grad: Tensor) -> Tensor:
    """The gradient at a layer's input `x` from `grad`, the one at its output; hooks on its matrices run."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        torch.autograd.backward(run_block(block, x, batch), grad)
    assert x.grad is not None
    return x.grad


def output_factors(gradients: Tensor, damping: float) -> OutputFactors | None:
    """G scaled to a mean diagonal of 1, damped, and its factor, columns in the order of falling curvature.

    Columns of low curvature come last, where they absorb the errors of the others. None if only the diagonal
    of G is known, or if all of it is zero.
    """
    if gradients.dim() != 2 or not float(gradients.diagonal().sum()):
        return None
    perm = gradients.diagonal().argsort(descending=True, stable=True)
    g = gradients / gradients.diagonal().mean() + damping * torch.eye(len(gradients), device=gradients.device)
    inv_chol = inverse_cholesky(g[perm][:, perm])
    return None if inv_chol is None else OutputFactors(perm, inv_chol, g)


# -- one matrix ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sensitivity:
    """One matrix: for each width, the KL cost of every block of stored rows, in groups of 64 rows.

    `group_size_factors` has, for some widths, the factor by which each group size changes the cost.
    """

    kl_costs: Mapping[int, Sequence[float]]
    group_size_factors: Mapping[int, Mapping[int, float]]

    def kl_cost(self, group: QuantGroup, block: int) -> float:
        """The cost of a group whose rows begin with this block, scaled as at the nearest measured width and size."""
        table = self.group_size_factors
        factors = table[min(table, key=lambda width: abs(width - group.bits))]
        factor = factors[min(factors, key=lambda size: abs(size - group.rows))]
        return factor * sum(self.kl_costs[group.bits][block : block + group.rows // BLOCK_ROWS])

    def to_json(self) -> dict[str, Any]:
        """As files have it."""
        sizes = {str(width): _str_keys(factors) for width, factors in self.group_size_factors.items()}
        return {"harms": {str(width): list(costs) for width, costs in self.kl_costs.items()}, "sizes": sizes}

    @classmethod
    def from_json(cls, raw: Any) -> Sensitivity:
        """From a file; in files of version 1 the group size factors hold for all widths."""
        costs = {int(width): tuple(map(float, blocks)) for width, blocks in raw["harms"].items()}
        sizes = raw["sizes"]
        if not any(isinstance(one, dict) for one in sizes.values()):
            sizes = {PROBE_BITS[0]: sizes}
        return cls(costs, {int(w): {int(size): float(f) for size, f in one.items()} for w, one in sizes.items()})


def measure_matrix(w: Tensor, stats: FisherStats, damping: float, output_damping: float, where: str) -> Sensitivity:
    """The KL cost of every width for `w` (inputs, columns), from rounding it with GPTQ."""
    tokens = max(1, stats.tokens)
    g = stats.gradient_sum / tokens
    curvature = g if g.dim() == 1 else g.diagonal()
    factors = output_factors(g, output_damping)
    if factors is not None:  # what two-sided GPTQ leaves of a column's curvature: 1 / V_nn²
        curvature = torch.empty_like(curvature)
        curvature[factors.perm] = factors.inv_chol.diagonal().pow(-2) * g.diagonal().mean()
    f = factorize(w, stats.hessian(), damping, where)

    def block_costs(group_size: int, *widths: int) -> dict[int, Tensor]:
        losses = zip(widths, rounding_losses(w, f, group_size, widths, COARSE_SCALE_STEPS), strict=True)
        return {width: (one @ (curvature / 2)).view(-1, BLOCK_ROWS).sum(1) for width, one in losses}

    costs = block_costs(BASE_GROUP_SIZE, *MEASURED_BITS)
    two_bits = costs[6] / costs[4].clamp(min=1e-30)  # the factor of two bits more, where the grid is fine
    costs |= {5: costs[4] * two_bits.sqrt(), 8: costs[6] * two_bits}
    if not all(bool(torch.isfinite(cost).all()) for cost in costs.values()):
        raise InputError(
            f"{where}: its weights, inputs or gradients overflow on the calibration text. Calibrate with "
            "other text, or check the source model with `exlm eval`."
        )
    totals = {width: float(costs[width].sum()) or 1.0 for width in PROBE_BITS}
    sizes = {width: {BASE_GROUP_SIZE: 1.0} for width in PROBE_BITS}
    for size in GROUP_SIZES:
        others = block_costs(size, *PROBE_BITS) if size != BASE_GROUP_SIZE else {}
        for width, cost in others.items():
            sizes[width][size] = float(cost.sum()) / totals[width]
    return Sensitivity({width: costs[width].tolist() for width in sorted(costs)}, sizes)


def parse_sensitivity(raw: Any, path: Path, role: str) -> Sensitivity:
    """One matrix's sensitivity from a file; `InputError` if it is not what `to_json` gives."""
    try:
        sensitivity = Sensitivity.from_json(raw)
        sizes = sensitivity.group_size_factors
        if set(sensitivity.kl_costs) != set(BIT_WIDTHS) or not sizes or not all(sizes.values()):
            raise ValueError(f"widths {sorted(sensitivity.kl_costs)}, group sizes {sizes}")
        factors = chain.from_iterable(one.values() for one in sizes.values())
        if not all(map(math.isfinite, chain(factors, *sensitivity.kl_costs.values()))):
            raise ValueError("a cost that is not a finite number")
        return sensitivity
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path}: the measurement of {role} is malformed ({error!r}).") from error


def _str_keys(table: Mapping[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in table.items()}


# -- the measurement of a model --------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """All matrices of a model's layers, as candidates for the bit allocation."""

    candidate_sets: tuple[CandidateSet, ...]
    sensitivities: Mapping[str, Sensitivity]  # by role; empty for a measurement.json of exllamav2

    @classmethod
    def from_sensitivities(cls, sensitivities: Mapping[str, Sensitivity], model: spec.Model) -> Measurement:
        """One candidate set for each matrix."""
        return cls(tuple(_candidates(m, sensitivities[m.role]) for m in quantized_matrices(model)), sensitivities)

    def save(self, path: Path) -> None:
        """Write the sensitivities, for other targets."""
        table = {role: sensitivity.to_json() for role, sensitivity in self.sensitivities.items()}
        text = json.dumps({"exlm_measurement": 2, "matrices": table}) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"{path}: the measurement could not be written ({error}). Run the same command again with "
                "another path for it: it continues from here."
            ) from error

    @classmethod
    def load(cls, path: Path, model: spec.Model) -> Measurement:
        """Read a measurement of this model: one that `save` wrote, or exllamav2's measurement.json."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: the measurement cannot be read ({error}).") from error
        if isinstance(raw, dict) and isinstance(raw.get("measurement"), dict):
            return cls(tuple(_exllamav2_candidate_sets(raw["measurement"], model, path)), {})
        if not isinstance(raw, dict) or raw.get("exlm_measurement") not in (1, 2):
            raise InputError(f"{path}: expected a measurement of exlm or exllamav2's measurement.json, found neither.")
        wanted = {matrix.role: matrix for matrix in quantized_matrices(model)}
        table = raw.get("matrices")
        if not isinstance(table, dict):
            raise InputError(f"{path}: expected a table of sensitivities in `matrices`, found {table!r:.80}.")
        sensitivities = {role: parse_sensitivity(one, path, role) for role, one in table.items()}
        if sensitivities.keys() != wanted.keys():
            odd = sorted(sensitivities.keys() ^ wanted.keys())[0]
            raise InputError(f"{path} was made for another model: {odd} is in only one of the two.")
        for role, sensitivity in sensitivities.items():
            blocks = wanted[role].in_features // BLOCK_ROWS
            found = {len(costs) for costs in sensitivity.kl_costs.values()}
            if found != {blocks}:
                raise InputError(f"{path}: {role} has {blocks} blocks of rows, the measurement {found}.")
        return cls.from_sensitivities(sensitivities, model)


def _candidates(matrix: Matrix, sensitivity: Sensitivity) -> CandidateSet:
    """Every distinct way to store one matrix."""
    kl_cost = cache(sensitivity.kl_cost)  # recipes share most of their groups
    seen: dict[tuple[QuantGroup, ...], Candidate] = {}
    for recipe in candidate_recipes():
        groups = recipe.groups(matrix.in_features)
        if groups not in seen:
            total, block = 0.0, 0
            for group in groups:
                total += kl_cost(group, block)
                block += group.rows // BLOCK_ROWS
            seen[groups] = Candidate(recipe.bits(matrix), total, {matrix.role: recipe})
    return tuple(seen.values())


def _exllamav2_candidate_sets(table: Mapping[str, Any], model: spec.Model, path: Path) -> Iterator[CandidateSet]:
    """The candidates of exllamav2's converter: the attention and the MLP of each layer.

    Their cost is the squared relative error of the hidden states, not KL divergence.
    """
    for i, layer in enumerate(model.layers):
        moe = isinstance(layer.mlp, spec.Moe)
        halves = {"attn": "self_attn", "mlp": "block_sparse_moe" if moe else "mlp"}
        parallel = _find_by_suffix(table, f"layers.{i}.parallel_decoder")
        for half, name in halves.items():
            key = f"layers.{i}.{name}"
            raw = parallel.get(half) if isinstance(parallel, dict) else _find_by_suffix(table, key)
            own = [m for m in quantized_matrices(model) if m.role.startswith(f"layers.{i}.{half}.")]
            if not raw or not isinstance(raw, list):
                raise InputError(f"{path}: layer {i} of this model has no {name}. Measure it again.")
            yield tuple(_exllamav2_candidate(one, own, model.names, f"{path}: {key}") for one in raw)


def _exllamav2_candidate(raw: Mapping[str, Any], own: Sequence[Matrix], names: TensorNames, where: str) -> Candidate:
    experts = {"gate": "w1", "up": "w3", "down": "w2"}
    try:
        recipes = {}
        for m in own:
            part = m.role.rpartition(".")[2]
            key = experts[part] if ".experts." in m.role else f"{part}_proj"
            recipes[m.role] = Recipe.from_json(raw[key], where)
        error = 1 - float(raw["accuracy"])
        if not math.isfinite(error):
            raise ValueError("an accuracy that is no finite number")
    except (KeyError, TypeError, ValueError, OverflowError) as mistake:
        raise InputError(f"{where}: not an option with a recipe for each matrix ({mistake!r}).") from mistake
    return Candidate(sum(recipes[m.role].bits(m) for m in own), error * error, recipes)


def _find_by_suffix(table: Mapping[str, Any], name: str) -> Any:
    """The entry whose key ends in `name`; keys begin with the model's own prefix."""
    return next((value for key, value in table.items() if key.endswith(name)), None)
