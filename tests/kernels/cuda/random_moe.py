"""Mixtures of packed experts of every kind, filled with chance, and what they should answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle, islice

import torch
from torch import Tensor

from exlm import spec
from exlm.formats.packed import PackedWeight
from exlm.kernels.reference import ACTIVATIONS, ReferenceMoe, Router
from tests.kernels.cuda.random_weights import matrix, segment

Parts = list[tuple[int, list[int]]]


@dataclass(frozen=True)
class Recipe:
    """Experts take turns with the segments (bits, groups) of their matrices."""

    moe: spec.Moe
    hidden: int
    sides: list[Parts]  # gate, up, gate of the next, …
    down: list[Parts]
    zeros: bool = False
    minima: bool = False
    bias: bool = False
    order: bool = False


RECIPES = {
    "exl2": Recipe(
        spec.Moe(200, 5, 2),
        320,
        [[(6, [32] * 2), (4, [128] * 2)], [(6, [32]), (4, [128] * 2 + [32])], [(4, [128] * 2 + [64])]],
        [[(5, [32] * 2), (3, [128, 8])], [(5, [32]), (3, [128, 40])]],
        order=True,
    ),
    "gptq": Recipe(spec.Moe(72, 9, 3, "gelu"), 256, [[(4, [128] * 2)]], [[(4, [64, 8])]], zeros=True, bias=True),
    "gguf": Recipe(
        spec.Moe(96, 2, 1, "gelu_tanh", renormalize=False),
        256,
        [[(5, [32] * 8)]],
        [[(5, [32] * 3)]],
        minima=True,
    ),
    "any width": Recipe(
        spec.Moe(80, 7, 2),
        128,
        [[(3, [64] * 2)], [(2, [128])], [(6, [32] * 3), (3, [32])], [(5, [32] * 4)], [(4, [32]), (3, [96])]],
        [[(4, [32] * 2 + [16])], [(8, [16]), (3, [64])], [(8, [32] * 2 + [16])], [(2, [80])]],
        order=True,
    ),
    "two widths": Recipe(
        spec.Moe(40, 24, 2, "relu", renormalize=False),
        160,
        [[(8, [32] * 5)], [(2, [32] * 5)]],
        [[(6, [16] * 2 + [8])]],
    ),
    "sigmoids": Recipe(
        spec.Moe(72, 45, 3, routing="sigmoid", selection_bias=True, weight_scale=2.5),
        128,
        [[(4, [128])]],
        [[(4, [64, 8])]],
    ),
}


@dataclass(frozen=True)
class Mixture:
    """Experts' matrices."""

    moe: spec.Moe
    weights: tuple[list[PackedWeight], list[PackedWeight], list[PackedWeight]]  # gate, up, down
    selection_bias: Tensor | None = None

    def to(self, device: torch.device) -> Mixture:
        """The same elsewhere."""
        gate, up, down = ([one.to(device) for one in part] for part in self.weights)
        bias = None if self.selection_bias is None else self.selection_bias.to(device)
        return replace(self, weights=(gate, up, down), selection_bias=bias)

    def tokens(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Activations and logits; some experts are liked by many."""
        torch.manual_seed(seed)
        first = self.weights[0][0]
        x = torch.randn(1, count, first.in_features)
        logits = torch.randn(1, count, self.moe.experts) + 2 * torch.randn(self.moe.experts)
        device = first.segments[0].codes.device
        return x.half().to(device), logits.half().to(device)

    def right(self, x: Tensor, logits: Tensor) -> Tensor:
        """By the reference, in float64."""
        return self._reference(x.double(), logits)

    @cached_property
    def _reference(self) -> ReferenceMoe:
        gate, up, down = ([partial(_product, one.dequantize(), one.bias) for one in p] for p in self.weights)
        return ReferenceMoe(Router(self.moe, self.selection_bias), ACTIVATIONS[self.moe.act], gate, up, down)


def mixture(name: str) -> Mixture:
    """A mixture of a kind."""
    torch.manual_seed(sum(map(ord, name)))
    recipe = RECIPES[name]
    experts = recipe.moe.experts
    sides = [_made(recipe, one, recipe.moe.width) for one in islice(cycle(recipe.sides), 2 * experts)]
    down = [_made(recipe, one, recipe.hidden) for one in islice(cycle(recipe.down), experts)]
    bias = 0.5 * torch.randn(experts) if recipe.moe.selection_bias else None
    return Mixture(recipe.moe, (sides[::2], sides[1::2], down), bias)


def _made(recipe: Recipe, parts: Parts, outputs: int) -> PackedWeight:
    segments = tuple(segment(*one, outputs, recipe.zeros, recipe.minima) for one in parts)
    made = matrix(segments, outputs, False, recipe.bias)
    return replace(made, perm=torch.randperm(made.in_features).int()) if recipe.order else made


def _product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    y = x @ weight.double()
    return y if bias is None else y + bias.double()
