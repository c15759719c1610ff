"""How exact a LoRA is, measured against float64.

To 1e-5 while it changes a model as much as training does. A huge one makes the model itself so touchy that
any rounding grows to more than that, with merged weights as well; one matrix is then still as exact as the
merged one, and the whole model as inexact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm import Config, Lora, Model
from exlm.lora.apply import AdaptedLinear, LoraWeights
from exlm.nn import Linear, LoraRef
from tests import tiny
from tests.lora import float64_llama as wide
from tests.lora import peft_folders as making
from tests.lora.test_lora import runner_logits

SCORE_STD = 4.0
"""How much luck there is in what a touchy model makes of two ways to round; the mean of many is near 1."""


def load(folder: Path) -> Model:
    model = Model(Config(folder))
    model.load()
    return model


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


class Batch:
    """As much of a batch as a matrix looks at."""

    def __init__(self, *adapters: tuple[LoraRef, ...]) -> None:
        self.adapters = adapters


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e3, 1e5])
@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(33, 70, 1), (256, 96, 8), (513, 1031, 64)])
def test_one_matrix(size: float, inputs: int, outputs: int, rank: int) -> None:
    weight, up = torch.randn(inputs, outputs) * inputs**-0.5, torch.randn(rank, outputs) * rank**-0.5
    down, x = torch.randn(rank, inputs) * inputs**-0.5, torch.randn(2, 5, inputs)
    linear: Any = AdaptedLinear(Linear(lambda x: x @ weight, inputs, outputs))
    linear.lora_weights[1] = LoraWeights(down, up)
    change = down.double().T @ up.double() * size
    exact = x.double() @ (weight.double() + change)
    merged = x @ (weight + down.T @ up * size)
    found = linear.forward(x, Batch((LoraRef(1, size),), (LoraRef(1, size),)))
    assert relative_error(found, exact) <= 1.25 * relative_error(merged, exact)
    assert relative_error(merged, exact) < 1e-6


@pytest.mark.parametrize("size", [0.3, 3.0, 30.0])
def test_alone_and_in_a_mixed_batch(size: float, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model", hidden_size=64, intermediate_size=96)
    shapes = making.matrix_shapes(folder)
    first = making.write_adapter(tmp_path / "a", shapes, size=size)
    second = making.write_adapter(tmp_path / "b", shapes, size=size, seed=1, r=8)
    sets: list[list[tuple[making.Adapter, float]]] = [
        [], [(first, 1.0)], [(second, -0.5)], [(first, 1.0), (second, 0.25)],
    ]  # fmt: skip
    model, ids = load(folder), torch.randint(3, 60, (1, 60))
    loras = {id(one): Lora.from_directory(model, one.folder) for one in (first, second)}
    asked = [[(loras[id(adapter)], strength) for adapter, strength in one] for one in sets]
    active = [model.make_extras([], wanted).adapters for wanted in asked]
    mixed = runner_logits(model, [ids[0]] * len(sets), active)
    for number, adapters in enumerate(sets):
        exact = wide.logits(folder, ids, *adapters)
        merged = load(making.merge_into_model(folder, tmp_path / f"merged {number}", *adapters)).forward(ids)
        bound = max(1e-5, SCORE_STD * relative_error(merged, exact))
        assert relative_error(model.forward(ids, loras=asked[number]), exact) <= bound
        assert relative_error(mixed[number], exact[0]) <= bound
        assert size > 0.3 or bound == 1e-5
