"""Adapters on recurrent mixers, latent and gated attention, shared experts; oracle: the adapter merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exlm import BadTensor, Cache, Config, Lora, Model, Unsupported
from exlm.families import FAMILIES
from tests import mixers
from tests.lora import peft_folders as peft

QWEN_MODULES = {
    "linear_attn.in_proj_qkv": ("delta.q", "delta.k", "delta.v"),
    "linear_attn.in_proj_z": ("delta.z",),
    "linear_attn.in_proj_b": ("delta.b",),
    "linear_attn.in_proj_a": ("delta.a",),
    "linear_attn.out_proj": ("delta.o",),
    "self_attn.q_proj": ("attn.q", "attn.gate"),
}
"""Roles by PEFT's module names."""


@pytest.fixture(scope="module", autouse=True)
def every_mixer_family() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, mixers.ARCHITECTURE, lambda _: mixers.MODEL)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixers.make_folder(tmp_path_factory.mktemp("mixers") / "model")


def load(folder: Path) -> Model:
    config = Config(folder)
    config.dtype = torch.float32
    model = Model(config)
    model.load()
    return model


def check_equals_merged(folder: Path, adapter: peft.Adapter, tmp_path: Path) -> tuple[Model, Lora]:
    model, merged = load(folder), load(peft.merge_into_model(folder, tmp_path / "merged", (adapter, 1.0)))
    lora = Lora.from_directory(model, adapter.folder)
    ids = torch.randint(3, 250, (2, 20))
    plain, want = model.forward(ids), merged.forward(ids)
    assert float((plain - want).norm() / want.norm()) > 0.01
    assert float((model.forward(ids, loras=lora) - want).norm() / want.norm()) < 1e-4
    cache = Cache(model, batch_size=2, max_seq_len=64)
    pieces = [model.forward(ids[:, a:b], cache, loras=lora) for a, b in ((0, 9), (9, 10), (10, 20))]
    assert float((torch.cat(pieces, 1) - want).norm() / want.norm()) < 1e-4
    lora.unload()
    assert torch.equal(model.forward(ids), plain)
    return model, lora


def test_every_matrix_has_adapters(folder: Path, tmp_path: Path) -> None:
    shapes = peft.matrix_shapes(folder)
    assert len(shapes) > 60
    _, lora = check_equals_merged(folder, peft.write_adapter(tmp_path / "a", shapes, size=0.1), tmp_path)
    parts = {role.split(".", 2)[-1] for role in lora.roles}
    assert {"mamba.in", "mamba.out", "conv.in", "conv.out", "attn.kv_down", "attn.q_up", "delta.z_up"} <= parts
    assert {"attn.k_up", "attn.v_up", "mlp.shared.up", "mlp.shared_gate", "mlp.experts.3.up"} <= parts


def test_qwen3_5_by_module(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "tiny-qwen3_5"
    shapes = peft.matrix_shapes(source)
    for module, parts in QWEN_MODULES.items():
        own = {name: shape for name, shape in shapes.items() if name.endswith(module)}
        adapter = peft.write_adapter(tmp_path / f"{module}-adapter", own, size=1.0)
        (tmp_path / module).mkdir()
        _, lora = check_equals_merged(source, adapter, tmp_path / module)
        assert {role.split(".", 2)[2] for role in lora.roles} == set(parts)


def test_a_fused_adapter_of_another_width_is_refused(fixtures_dir: Path, tmp_path: Path) -> None:
    model = load(fixtures_dir / "tiny-qwen3_5")
    wrong = {"model.layers.3.self_attn.q_proj": (256, 256)}  # without the gate's rows
    with pytest.raises(BadTensor, match=r"q_proj\.lora_B.*expected shape \[512, 4\], found \[256, 4\]"):
        Lora.from_directory(model, peft.write_adapter(tmp_path / "a", wrong).folder)


def test_an_adapter_of_a_convolution_is_refused(fixtures_dir: Path, tmp_path: Path) -> None:
    model = load(fixtures_dir / "tiny-qwen3_5")
    adapter = peft.write_adapter(tmp_path / "a", {"model.layers.0.linear_attn.conv1d": (4, 512)})
    with pytest.raises(Unsupported, match=r"conv1d\.lora_A.* changes a convolution.*merge_and_unload"):
        Lora.from_directory(model, adapter.folder)
