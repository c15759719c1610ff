"""The error of a LoRA against float64.

It is below 1e-5 while the adapter changes a model as much as training does. A huge adapter makes the model
amplify any rounding beyond that, with merged weights as well: then one matrix must still be as exact as the
merged one, and the whole model's error is compared with the merged model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm import Config, Lora, Model
from exlm.lora.adapter import LoraLinear, LoraWeights
from exlm.nn import Linear, LoraRef
from tests import tiny
from tests.lora import float64_llama
from tests.lora import peft_folders as peft
from tests.lora.test_lora import runner_logits

MAX_ERROR_RATIO = 4.0
"""Bound on the ratio of two models' rounding errors where both amplify them; its mean is near 1."""


def load(folder: Path) -> Model:
    model = Model(Config(folder))
    model.load()
    return model


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


class Batch:
    """The part of a batch that a linear layer reads."""

    def __init__(self, *adapters: tuple[LoraRef, ...]) -> None:
        self.adapters = adapters


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e3, 1e5])
@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(33, 70, 1), (256, 96, 8), (513, 1031, 64)])
def test_one_linear_layer(size: float, inputs: int, outputs: int, rank: int) -> None:
    weight, up = torch.randn(inputs, outputs) * inputs**-0.5, torch.randn(rank, outputs) * rank**-0.5
    down, x = torch.randn(rank, inputs) * inputs**-0.5, torch.randn(2, 5, inputs)
    linear: Any = LoraLinear(Linear(lambda x: x @ weight, inputs, outputs))
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
    shapes = peft.matrix_shapes(folder)
    first = peft.write_adapter(tmp_path / "a", shapes, size=size)
    second = peft.write_adapter(tmp_path / "b", shapes, size=size, seed=1, r=8)
    sets: list[list[tuple[peft.Adapter, float]]] = [
        [], [(first, 1.0)], [(second, -0.5)], [(first, 1.0), (second, 0.25)],
    ]  # fmt: skip
    model, ids = load(folder), torch.randint(3, 60, (1, 60))
    loras = {id(one): Lora.from_directory(model, one.folder) for one in (first, second)}
    requested = [[(loras[id(adapter)], strength) for adapter, strength in one] for one in sets]
    active = [model.make_extras([], wanted).adapters for wanted in requested]
    mixed = runner_logits(model, [ids[0]] * len(sets), active)
    for number, adapters in enumerate(sets):
        exact = float64_llama.logits(folder, ids, *adapters)
        merged = load(peft.merge_into_model(folder, tmp_path / f"merged {number}", *adapters)).forward(ids)
        bound = max(1e-5, MAX_ERROR_RATIO * relative_error(merged, exact))
        assert relative_error(model.forward(ids, loras=requested[number]), exact) <= bound
        assert relative_error(mixed[number], exact[0]) <= bound
        assert size > 0.3 or bound == 1e-5
