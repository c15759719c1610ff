"""GPTQ models as other readers see them: unpacked nibble by nibble, without code of this package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exlm import Config, Model, quantize_model
from tests import tiny

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def unpack(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor) -> Tensor:
    """(inputs, outputs) float16 by the convention of the older layout, which stores zero points less one."""
    rows, columns = torch.arange(8 * qweight.shape[0]), torch.arange(qweight.shape[1])
    codes = (qweight.long()[rows // 8] >> (4 * (rows % 8))[:, None]) & 15
    zeros = ((qzeros.long()[:, columns // 8] >> (4 * (columns % 8))) & 15) + 1
    group = g_idx.long()
    return ((codes - zeros[group]).float() * scales[group].float()).half()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 inputs make two groups of 128, the second one short."""
    return tiny.make_chat_folder(tmp_path_factory.mktemp("source"), hidden_size=64, intermediate_size=160)


@pytest.fixture(scope="module", params=[32, 128])
def gptq_model(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ model; its group size is the name of the folder above it."""
    group = request.param
    folder = tmp_path_factory.mktemp("gptq_model") / str(group) / "model"
    text = folder.parents[1] / "text.txt"
    text.write_text("Nine ships left the harbour; seven came back before the storm. " * 40)
    options: dict[str, Any] = {"calibration": text, "rows": 6, "length": 64, "report": False}
    quantize_model(source, folder, method="gptq", group_size=group, **options)
    return folder


def test_every_matrix_has_the_tensors_of_the_gptq_layout(gptq_model: Path, source: Path) -> None:
    group, floats, tensors = int(gptq_model.parent.name), load_file(source / "model.safetensors"), {}
    tensors.update(load_file(gptq_model / "model.safetensors"))
    for name, weight in floats.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith(MATRICES):
            assert tensors.pop(name).dtype is torch.float16
            continue
        (outputs, inputs), parts = weight.shape, ("qweight", "qzeros", "scales", "g_idx")
        found = {part: tensors.pop(f"{stem}.{part}") for part in parts}
        groups = -(-inputs // group)
        assert {part: (list(t.shape), t.dtype) for part, t in found.items()} == {
            "qweight": ([inputs // 8, outputs], torch.int32),
            "qzeros": ([groups, outputs // 8], torch.int32),
            "scales": ([groups, outputs], torch.float16),
            "g_idx": ([inputs], torch.int32),
        }
        counts = found["g_idx"].long().bincount(minlength=groups).tolist()
        assert counts == [min(group, inputs - a) for a in range(0, inputs, group)]
        exact = weight.T.float()
        off = (unpack(**found).float() - exact).norm() / exact.norm()
        assert float(off) < 0.25
    assert not tensors


def test_g_idx_is_in_act_order(gptq_model: Path) -> None:
    tensors = load_file(gptq_model / "model.safetensors")
    orders = [t for name, t in tensors.items() if name.endswith("g_idx") and int(t.max()) > 0]
    assert orders
    assert all(bool((order.diff() < 0).any()) for order in orders)


def test_logits_match_a_model_unpacked_by_hand(
    gptq_model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXLM_CPU", "0")  # weights are compared, not what a processor's kernels round
    tensors = load_file(gptq_model / "model.safetensors")
    stems = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    plain = {name: t for name, t in tensors.items() if name.rpartition(".")[0] not in stems}
    for stem in stems:
        parts = {part: tensors[f"{stem}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
        plain[f"{stem}.weight"] = unpack(**parts).T.contiguous()
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    save_file(plain, tmp_path / "model.safetensors")
    ids, logits = torch.arange(3, 60)[None], []
    for folder in (gptq_model, tmp_path):
        model = Model(Config(folder))
        model.load()
        logits.append(model.forward(ids))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_quantization_config_is_complete(gptq_model: Path) -> None:
    config = json.loads((gptq_model / "config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": int(gptq_model.parent.name),
        "desc_act": True,
        "sym": False,
        "checkpoint_format": "gptq",
    }


def test_the_unpacker_reads_files_of_other_tools(fixtures_dir: Path) -> None:
    """`unpack` gives the values that the reference's kernels decode from the fixtures."""
    tensors = load_file(fixtures_dir / "tiny-lm-gptq-g128-act" / "model.safetensors")
    reference = load_file(fixtures_dir / "reference" / "gptq-g128-act.safetensors")
    checked = 0
    for name, wanted in reference.items():
        if name.startswith("dq."):
            stem = name.removeprefix("dq.")
            parts = {part: tensors[f"{stem}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
            assert torch.equal(unpack(**parts), wanted)
            checked += 1
    assert checked


def test_a_quantised_head_of_the_source_is_dequantised(source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rows": 6, "length": 64, "report": False}
    quantize_model(source, tmp_path / "exl2", 6.0, **options)
    quantize_model(tmp_path / "exl2", tmp_path / "gptq", method="gptq", group_size=32, **options)
    tensors = load_file(tmp_path / "gptq" / "model.safetensors")
    heads = {name: tensor.dtype for name, tensor in tensors.items() if name.startswith("lm_head")}
    assert heads == {"lm_head.weight": torch.float16}
    assert not [name for name in tensors if name.endswith((".q_weight", ".q_invperm"))]
    ids = torch.arange(3, 40)[None]
    logits = []
    for name in ("exl2", "gptq"):
        model = Model(Config(tmp_path / name))
        model.load()
        logits.append(model.forward(ids))
    assert (logits[0] - logits[1]).norm() < 0.3 * logits[0].norm()
