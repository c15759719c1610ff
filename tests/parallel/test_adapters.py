"""Adapters of a shared model, its ranks as threads: the parts of a change add up to it, in every family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Config, Lora, Model
from exlm.lora import InstallLora, LoraWeights, ModelHandle, RemoveLora
from exlm.model import adapting
from exlm.model.led import Led
from exlm.model.loading import Loaded
from exlm.model.ways import Pipeline, Tensors
from exlm.nn import Active
from exlm.parallel import Order
from tests import tiny
from tests.lora import peft_folders as making
from tests.models import zoo
from tests.parallel.threads import CPU, logits, shares

FAMILIES = [
    "LlamaForCausalLM",
    "Phi3ForCausalLM",  # fused matrices
    "Gemma2ForCausalLM",  # a tied head
    "MixtralForCausalLM",  # experts
    "Olmo2ForCausalLM",  # a norm over all heads
    "DbrxForCausalLM",  # clamped projections
    "GPT2LMHeadModel",  # biases, matrices turned round
]


@dataclass
class Crew:
    """Rank 0's hold on ranks that are threads: what it tells is done at once."""

    ranks: list[Loaded]
    lost: None = None

    @property
    def channels(self) -> list[Loaded]:
        return self.ranks[1:]

    @property
    def leader(self) -> Crew:
        return self

    def tell_one(self, rank: int, order: Order) -> None:
        loaded = self.ranks[rank]
        change = adapting.unpack(order, loaded.config.spec, CPU)
        loaded.decoder.replace(change.module_role, change)


class Shared:
    """A shared model, as an adapter sees it."""

    def __init__(self, config: Config, size: int) -> None:
        self.frozen = config.freeze()
        self.ranks = shares(self.frozen, size)
        held = partial(Tensors().held, self.frozen, size=size)
        self.net = Led(self.ranks[0].decoder, Crew(self.ranks), held, CPU)  # type: ignore[arg-type]

    def opened(self) -> ModelHandle:
        return ModelHandle(self.net, self.frozen.spec, lambda role: CPU, torch.float32)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_with_an_adapter(architecture: str, tmp_path: Path) -> None:
    folder = zoo.build(architecture, tmp_path / "model").folder
    shapes = making.matrix_shapes(folder, transposed=architecture == "GPT2LMHeadModel")
    adapter = making.write_adapter(tmp_path / "lora", shapes, size=0.5).folder
    config = Config(folder)
    whole, shared = Model(config), Shared(config, 2)
    whole.load()
    ids = torch.randint(0, 100, (3, 12))
    plain = whole.forward(ids)
    lora, other = Lora.from_directory(whole, adapter), Lora.from_directory(shared, adapter)
    want = torch.cat([whole.forward(ids[row : row + 1], loras=(lora, row)) for row in range(3)])
    active: Any = tuple((Active(other.number, float(row)),) for row in range(3))
    assert distance(logits(shared.ranks, ids, active), want) < 1e-5
    assert distance(want, plain) > 1e-3
    other.unload()
    assert distance(logits(shared.ranks, ids), plain) < 1e-5
    assert not any("Adapted" in str(vars(rank.decoder.blocks[0].attn)) for rank in shared.ranks)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_pipelines_ranks_have_each_matrix_once(tmp_path: Path, size: int) -> None:
    config = Config(tiny.make(tmp_path, num_hidden_layers=5)).freeze()
    for role in ("embed", "head", *(f"layers.{i}.mlp.down" for i in range(5))):
        found = [(rank, held) for rank in range(size) if (held := Pipeline().held(config, role, rank, size))]
        assert len(found) == 1
        ((rank, held),) = found
        assert held.cut is None
        if role == "embed":
            assert rank == 0
        elif role == "head":
            assert rank == size - 1
        else:  # counted from the rank's first layer on
            before = sum(len(range(5)[n::size]) for n in range(rank))
            assert int(held.role.split(".")[1]) + before == int(role.split(".")[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_changes_cross_the_line_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Config(tiny.make(tmp_path)).spec
    pair = LoraWeights(torch.randn(2, 32).to(dtype), torch.randn(2, 48).to(dtype))
    order = adapting.pack(InstallLora.for_model(model, 7, "layers.1.mlp.up", pair))
    change = adapting.unpack(order, model, CPU)
    assert isinstance(change, InstallLora)
    assert (change.adapter_id, change.role, change.module_role) == (7, "layers.1.mlp.up", "layers.1.mlp.up")
    assert torch.equal(change.weights.up, pair.up)
    assert change.weights.down.dtype is dtype
    assert adapting.unpack(adapting.pack(RemoveLora(7, "head")), model, CPU) == RemoveLora(7, "head")
