"""How much each width harms each matrix: gradients of the model's answers, carried back layer by layer.

For a token the model itself might say next, the gradient of its log-probability at a matrix's outputs,
squared and averaged, is the curvature of the divergence from the float model. With the covariance of the
inputs it turns the error of a rounded matrix into nats. One layer is in memory at a time; which layer comes
when, and what is kept, is decided in `pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..nn import Batch, Head
from ..nn.block import BlockLike
from .exl2_solver import rounding_losses
from .gptq import factorize, inverse_cholesky
from .layer_loader import HookedLinear, run_block
from .measurement import BASE_GROUP_SIZE, BLOCK_ROWS, GROUP_SIZES, PROBE_BITS, Profile
from .two_sided import OutputFactors
from .vocab_clusters import cluster_token_weights

TOKEN_WEIGHT_CAP = 8.0
"""A token counts at most so many times the median one: beyond, the second order says nothing."""

MAX_FULL_OUTPUTS = 2048
"""Outputs up to which their gradients are kept together; of wider matrices each output's alone."""

MEASURED_BITS = (2, 3, 4, 6)
"""Widths that matrices are really rounded at: from 4 bits on, harm falls evenly, so the others follow."""

LOGIT_TOKENS = 512
"""Tokens whose logits are held at once."""

COARSE_SCALE_STEPS = 8
"""Steps of the scale search while measuring."""


class FisherStats(NamedTuple):
    """Sums over tokens of one matrix; |g|² is how much a token's answer matters."""

    inputs: Tensor  # (in, in): |g|² x xᵀ
    gradients: Tensor  # (out, out) or, of a wide matrix, (out,): g gᵀ
    token_weights: tuple[Tensor, ...]  # of each pass: every token's |g|²

    @property
    def tokens(self) -> int:
        """Tokens that reached it."""
        return sum(map(len, self.token_weights))

    def hessian(self) -> Tensor:
        """Of the inputs, tokens weighted by how much they matter."""
        return self.inputs / torch.cat(self.token_weights).sum().clamp(min=1e-30)


class FisherHooks:
    """Listens to the taps of a layer during one pass back."""

    def __init__(self, taps: Mapping[str, HookedLinear]) -> None:
        self.stats: dict[str, FisherStats] = {}
        self._inputs: dict[str, Tensor] = {}
        for role, tap in taps.items():
            if not role.endswith(".router"):
                tap.on_input = lambda x, role=role: self._input(role, x)
                tap.on_output = lambda y, role=role: self._output(role, y)

    def _input(self, role: str, x: Tensor) -> None:
        self._inputs[role] = x.detach().flatten(0, -2)

    def _output(self, role: str, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(partial(self._gradient, role))  # type: ignore[no-untyped-call]

    def _gradient(self, role: str, gradient: Tensor) -> None:
        x, flat = self._inputs.pop(role), gradient.flatten(0, -2)
        care = flat.square().sum(1)
        if len(flat):
            factor = (TOKEN_WEIGHT_CAP * care.median() / care.clamp(min=1e-30)).clamp(max=1)
            flat, care = flat * factor.sqrt()[:, None], care * factor
        kept = self.stats.get(role)
        if kept is None:
            kept = FisherStats(x.new_zeros(x.shape[1], x.shape[1]), flat.new_zeros(()), ())
        kept.inputs.addmm_((x * care[:, None]).T, x)
        grown = flat.T @ flat if flat.shape[1] <= MAX_FULL_OUTPUTS else flat.square().sum(0)
        self.stats[role] = FisherStats(kept.inputs, kept.gradients + grown, (*kept.token_weights, care))


def head_grad(
    head: Head, x: Tensor, batch: Batch, generator: torch.Generator, belongs: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient, at the state before the head, of the log-probability of tokens drawn from the answer.

    And (rows, tokens, kinds) how much each token's logits matter to each kind that they belong to. Few tokens
    at a time: their logits are the largest tensors there are.
    """
    chances = torch.rand(x.shape[:2], generator=generator).to(x.device)
    slopes, care = torch.empty_like(x), x.new_empty(*x.shape[:2], belongs.shape[1])
    step = max(1, LOGIT_TOKENS // len(x))
    for a in range(0, x.shape[1], step):
        part = x[:, a : a + step].detach().requires_grad_(True)
        with torch.enable_grad():
            logits, _ = head.forward(part, None, batch)
            with torch.no_grad():
                shares = logits.softmax(-1)
                care[:, a : a + step] = cluster_token_weights(shares, belongs)
                drawn = _sample(shares, chances[:, a : a + step])
            F.cross_entropy(logits.flatten(0, 1), drawn.flatten(), reduction="sum").backward()  # type: ignore[no-untyped-call]
        assert part.grad is not None
        slopes[:, a : a + step] = part.grad
    return slopes, care


def _sample(shares: Tensor, chances: Tensor) -> Tensor:
    """(rows, tokens) the token each chance (0 to 1) falls on; takes `shares` for its own."""
    reached = shares.cumsum_(-1)
    aim = chances[..., None] * reached[..., -1:]
    return torch.searchsorted(reached, aim, right=True)[..., 0].clamp(max=shares.shape[-1] - 1)


def vjp(block: BlockLike, x: Tensor, batch: Batch, slope: Tensor) -> Tensor:
    """The gradient at a layer's input from the one at its output; ears on its taps hear what they want."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        torch.autograd.backward(run_block(block, x, batch), slope)
    assert x.grad is not None
    return x.grad


def output_factors(gradients: Tensor, damping: float) -> OutputFactors | None:
    """What the gradients say of the columns, those that matter most first: the others make good for them.

    None where they are not known together or are all zero.
    """
    if gradients.dim() != 2 or not float(gradients.diagonal().sum()):
        return None
    order = gradients.diagonal().argsort(descending=True, stable=True)
    g = gradients / gradients.diagonal().mean() + damping * torch.eye(len(gradients), device=gradients.device)
    upper = inverse_cholesky(g[order][:, order])
    return None if upper is None else OutputFactors(order, upper, g)


def measure_profile(
    w: Tensor, stats: FisherStats, damping: float, output_damping: float, where: str
) -> Profile:
    """The harm of each width to `w` (inputs, columns), from rounding it at every one of them."""
    tokens = max(1, stats.tokens)
    g = stats.gradients / tokens
    care = g if g.dim() == 1 else g.diagonal()
    side = output_factors(g, output_damping)
    if side is not None:  # what is left of an output's curvature once the others make good for it
        care = torch.empty_like(care)
        care[side.perm] = side.inv_chol.diagonal().pow(-2) * g.diagonal().mean()
    f = factorize(w, stats.hessian(), damping, where)

    def blocks(size: int, *widths: int) -> dict[int, Tensor]:
        lost = zip(widths, rounding_losses(w, f, size, widths, COARSE_SCALE_STEPS), strict=True)
        return {width: (one @ (care / 2)).view(-1, BLOCK_ROWS).sum(1) for width, one in lost}

    harms = blocks(BASE_GROUP_SIZE, *MEASURED_BITS)
    step = harms[6] / harms[4].clamp(min=1e-30)  # what two bits more do, where the grid is fine
    harms |= {5: harms[4] * step.sqrt(), 8: harms[6] * step}
    if not all(bool(torch.isfinite(harm).all()) for harm in harms.values()):
        raise InputError(
            f"{where}: its numbers, inputs or gradients overflow on the calibration text. Calibrate with "
            "other text, or check the source model with `exlm eval`."
        )
    wholes = {width: float(harms[width].sum()) or 1.0 for width in PROBE_BITS}
    sizes = {width: {BASE_GROUP_SIZE: 1.0} for width in PROBE_BITS}
    for size in GROUP_SIZES:
        others = blocks(size, *PROBE_BITS) if size != BASE_GROUP_SIZE else {}
        for width, harm in others.items():
            sizes[width][size] = float(harm.sum()) / wholes[width]
    return Profile({width: harms[width].tolist() for width in sorted(harms)}, sizes)
