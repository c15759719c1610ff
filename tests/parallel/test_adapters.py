"""LoRAs of a tensor-parallel model with ranks as threads: the shards add up to the LoRA, in every family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Config, Lora, Model
from exlm.lora import InstallLora, LoraWeights, ModelHandle, RemoveLora
from exlm.model.loader import LoadedModel
from exlm.model.multiprocess import DriverDecoder, decode_change, encode_change
from exlm.model.strategies import PipelineParallel, TensorParallel
from exlm.nn import LoraRef
from exlm.parallel import Message
from tests import tiny
from tests.lora import peft_folders as peft
from tests.models import zoo
from tests.parallel.thread_ranks import CPU, load_shards, rank0_logits

FAMILIES = [
    "LlamaForCausalLM",
    "Phi3ForCausalLM",  # fused matrices
    "Gemma2ForCausalLM",  # a tied head
    "MixtralForCausalLM",  # experts
    "Olmo2ForCausalLM",  # a norm over all heads
    "DbrxForCausalLM",  # clamped projections
    "GPT2LMHeadModel",  # biases, transposed matrices
]


@dataclass
class ThreadDriver:
    """A `RankDriver` whose workers are threads: `send` returns when the message was handled."""

    ranks: list[LoadedModel]
    lost_reason: None = None

    @property
    def channels(self) -> list[LoadedModel]:
        return self.ranks[1:]

    @property
    def driver(self) -> ThreadDriver:
        return self

    def send(self, rank: int, message: Message) -> None:
        loaded = self.ranks[rank]
        change = decode_change(message, loaded.config.spec, CPU)
        loaded.decoder.replace(change.module_role, change)


class ThreadParallelModel:
    """The parts of a tensor-parallel model that a LoRA needs."""

    def __init__(self, config: Config, size: int) -> None:
        self.frozen = config.freeze()
        self.ranks = load_shards(self.frozen, size)
        role_shard = TensorParallel(self.frozen, size).role_shard
        self.decoder = DriverDecoder(self.ranks[0].decoder, ThreadDriver(self.ranks), role_shard, CPU)  # type: ignore[arg-type]

    def model_handle(self) -> ModelHandle:
        return ModelHandle(self.decoder, self.frozen.spec, lambda role: CPU, torch.float32)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_lora_shards_add_up_in_every_family(architecture: str, tmp_path: Path) -> None:
    folder = zoo.build(architecture, tmp_path / "model").folder
    shapes = peft.matrix_shapes(folder, transposed=architecture == "GPT2LMHeadModel")
    adapter = peft.write_adapter(tmp_path / "lora", shapes, size=0.5).folder
    config = Config(folder)
    single, shared = Model(config), ThreadParallelModel(config, 2)
    single.load()
    ids = torch.randint(0, 100, (3, 12))
    plain = single.forward(ids)
    lora, other = Lora.from_directory(single, adapter), Lora.from_directory(shared, adapter)
    want = torch.cat([single.forward(ids[row : row + 1], loras=(lora, row)) for row in range(3)])
    active: Any = tuple((LoraRef(other.number, float(row)),) for row in range(3))
    assert relative_error(rank0_logits(shared.ranks, ids, active), want) < 1e-5
    assert relative_error(want, plain) > 1e-3
    other.unload()
    assert relative_error(rank0_logits(shared.ranks, ids), plain) < 1e-5
    assert not any("LoraLinear" in str(vars(rank.decoder.blocks[0].mixer)) for rank in shared.ranks)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pipeline_ranks_have_each_matrix_once(tmp_path: Path, size: int) -> None:
    config = Config(tiny.make(tmp_path, num_hidden_layers=5)).freeze()
    for role in ("embed", "head", *(f"layers.{i}.mlp.down" for i in range(5))):
        found = [
            (rank, role_shard)
            for rank in range(size)
            if (role_shard := PipelineParallel(config, size).role_shard(role, rank))
        ]
        assert len(found) == 1
        ((rank, role_shard),) = found
        assert role_shard.part is None
        if role == "embed":
            assert rank == 0
        elif role == "head":
            assert rank == size - 1
        else:  # counted from the rank's first layer on
            before = sum(len(range(5)[n::size]) for n in range(rank))
            assert int(role_shard.role.split(".")[1]) + before == int(role.split(".")[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_changes_are_sent_unchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Config(tiny.make(tmp_path)).spec
    weights = LoraWeights(torch.randn(2, 32).to(dtype), torch.randn(2, 48).to(dtype))
    message = encode_change(InstallLora.for_model(model, 7, "layers.1.mlp.up", weights))
    change = decode_change(message, model, CPU)
    assert isinstance(change, InstallLora)
    assert (change.adapter_id, change.role, change.module_role) == (7, "layers.1.mlp.up", "layers.1.mlp.up")
    assert torch.equal(change.weights.up, weights.up)
    assert change.weights.down.dtype is dtype
    assert decode_change(encode_change(RemoveLora(7, "head")), model, CPU) == RemoveLora(7, "head")
