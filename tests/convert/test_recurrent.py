"""Conversions of models with recurrent mixers, latent and gated attention, shared experts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from exlm import BadTensor, Config, Model, convert_model
from exlm.convert.planners import make_plan
from exlm.families import FAMILIES
from exlm.formats import exl2, gptq
from exlm.kernels.dispatch import BackendList
from exlm.kernels.reference import ReferenceBackend
from exlm.model.builder import Builder
from exlm.parallel.shard import RankSource
from exlm.spec.tensor_names import LAYER_PREFIX, TensorLocation
from tests import mixers
from tests.convert.conversion_helpers import AWQ_JSON, assert_same, read_tensors, update_config, write_awq
from tests.model.random_quantized import random_exl2, random_gptq, replace_matrices
from tests.models import zoo

QWEN_MATRICES = r"(in_proj_qkv|in_proj_z|out_proj|(q|k|v|o|gate|up|down)_proj)\.weight"
GPTQ_JSON = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
QKV, GATED_Q = "model.layers.0.linear_attn.in_proj_qkv", "model.layers.3.self_attn.q_proj"
KV_UP = "model.layers.1.self_attn.kv_b_proj"


@pytest.fixture(scope="module", autouse=True)
def every_mixer_family() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, mixers.ARCHITECTURE, lambda _: mixers.MODEL)
        yield


@pytest.fixture
def qwen(fixtures_dir: Path, tmp_path: Path) -> Path:
    """A writable copy of tiny-qwen3_5."""
    folder = shutil.copytree(fixtures_dir / "tiny-qwen3_5", tmp_path / "qwen", copy_function=shutil.copyfile)
    folder.chmod(0o755)
    return folder


@pytest.fixture(params=["every mixer", "qwen3_5"])
def folder(request: pytest.FixtureRequest, fixtures_dir: Path, tmp_path: Path) -> Path:
    is_qwen = request.param == "qwen3_5"
    return fixtures_dir / "tiny-qwen3_5" if is_qwen else mixers.make_folder(tmp_path / "old")


@pytest.mark.parametrize("to", ["safetensors", "dense"])
def test_floats_keep_their_names_and_bytes(folder: Path, tmp_path: Path, to: str) -> None:
    before, after = read_tensors(folder), read_tensors(convert_model(folder, tmp_path / "new", to))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name


class Recorder(RankSource):
    """A source that notes what is read."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.vectors: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        self.matrices: set[str] = set()

    def tensor(self, role: str, shape: Any, **options: Any) -> Tensor:
        shapes = set(shape) if isinstance(shape[0], tuple) else {tuple(shape)}
        self.vectors[role, options.get("suffix", "weight")] = shapes
        return super().tensor(role, shape, **options)

    def weight(self, role: str, in_features: int, out_features: int, **options: Any) -> Any:
        self.matrices.add(role)
        return super().weight(role, in_features, out_features, **options)


def test_the_plan_has_what_a_model_reads(folder: Path) -> None:
    frozen = Config(folder).freeze()
    source = frozen.open_checkpoint()
    recorder = Recorder(source)
    backends = BackendList([ReferenceBackend(torch.device("cpu"), torch.float32)])
    list(Builder(frozen.spec, recorder, [backends] * (len(frozen.spec.layers) + 2), 64).build())
    plan = make_plan(frozen, source, "safetensors")
    planned = {(v.role, suffix): v for v in plan.vectors for suffix in ("weight", "bias")[: 1 + v.bias]}
    assert planned.keys() == recorder.vectors.keys()
    for (role, suffix), vector in planned.items():
        assert recorder.vectors[role, suffix] & set(vector.shapes_of(suffix)), (role, suffix)
    assert plan.actions.keys() == recorder.matrices


@pytest.mark.parametrize(
    ("write", "config", "to"),
    [
        (gptq.write, GPTQ_JSON, "safetensors"),
        (gptq.write, GPTQ_JSON, "gptq"),
        (gptq.write, GPTQ_JSON, "dense"),
        (write_awq, AWQ_JSON, "dense"),
        (write_awq, AWQ_JSON, "gptq-v2"),
    ],
)
def test_a_fused_matrix_stays_whole_unless_it_is_rewritten(
    qwen: Path, tmp_path: Path, write: Any, config: dict[str, Any], to: str
) -> None:
    replace_matrices(qwen, None, write, random_gptq, QWEN_MATRICES)
    update_config(qwen, quantization_config=config)
    target = convert_model(qwen, tmp_path / "new", to)
    assert_same(qwen, target)
    before, after = read_tensors(qwen), read_tensors(target)
    if to in ("safetensors", "gptq"):
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    elif to == "dense":
        assert after[QKV + ".weight"].shape == (512, 256)
        assert after[GATED_Q + ".weight"].shape == (512, 256)
    else:
        assert f"{QKV}.k.qweight" in after
        assert f"{GATED_Q}.gate.qweight" in after
        assert f"{QKV}.qweight" not in after


def test_another_library_reads_the_floats(qwen: Path, tmp_path: Path) -> None:
    replace_matrices(qwen, None, gptq.write, random_gptq, QWEN_MATRICES)
    update_config(qwen, quantization_config=GPTQ_JSON)
    target = convert_model(qwen, tmp_path / "new", "dense")
    ids = torch.arange(5, 60)[None]
    config = Config(target)
    config.dtype = torch.float32
    model = Model(config)
    model.load()
    with zoo.silence_transformers(), torch.no_grad():
        want = Qwen3_5ForCausalLM.from_pretrained(target, dtype=torch.float32)(ids, use_cache=False).logits
    torch.testing.assert_close(model.forward(ids), want, rtol=1e-4, atol=1e-4)


def test_matrices_stored_alone_are_fused_as_floats(tmp_path: Path) -> None:
    source = mixers.make_folder(tmp_path / "old")
    tensors = load_file(source / "model.safetensors")
    for part, outputs in (("k_up", 64), ("v_up", 96)):
        weight = random_exl2(64, outputs)
        tensors |= {f"{KV_UP}.{part}.{suffix}": t.contiguous() for suffix, t in exl2.write(weight).items()}
    del tensors[KV_UP + ".weight"]
    save_file(tensors, source / "model.safetensors")
    kept = convert_model(source, tmp_path / "kept")
    assert_same(source, kept)
    assert read_tensors(kept).keys() == tensors.keys()
    target = convert_model(source, tmp_path / "new", "dense")
    assert_same(source, target)
    assert read_tensors(target).keys() == mixers.tensors().keys()


def test_a_fused_tensor_of_another_shape_is_refused(qwen: Path, tmp_path: Path) -> None:
    tensors = load_file(qwen / "model.safetensors")
    tensors[QKV + ".weight"] = tensors[QKV + ".weight"][:-64].clone()
    save_file(tensors, qwen / "model.safetensors")
    with pytest.raises(BadTensor, match=r"in_proj_qkv.*expected shape \[512, 256\].*found \[448, 256\]"):
        convert_model(qwen, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_fused_tensor_with_other_rows_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows between the heads belong to no matrix of the model."""
    source = mixers.make_folder(tmp_path / "old")
    tensors, starts = load_file(source / "model.safetensors"), [48 * head for head in range(4)]
    stored = tensors[KV_UP + ".weight"]
    tensors[KV_UP + ".weight"] = torch.cat([F.pad(head, (0, 0, 0, 8)) for head in stored.split(40)])[:-8].contiguous()
    save_file(tensors, source / "model.safetensors")
    key = KV_UP.replace("layers.1.", "layers.{i}.")
    names = mixers.MODEL.names.with_locations(
        attn__k_up=TensorLocation(key, rows=tuple((start, start + 16) for start in starts)),
        attn__v_up=TensorLocation(key, rows=tuple((start + 16, start + 40) for start in starts)),
    )
    monkeypatch.setitem(FAMILIES, mixers.ARCHITECTURE, lambda _: replace(mixers.MODEL, names=names))
    target = convert_model(source, tmp_path / "new")
    assert_same(source, target)
    assert KV_UP + ".weight" not in read_tensors(target)
    assert read_tensors(target)[KV_UP + ".v_up.weight"].shape == (96, 64)


def test_experts_known_only_as_stacked_stay_stacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, parts = mixers.make_folder(tmp_path / "old"), {"gate": 32, "up": 32, "down": 64}
    stacks = {part: TensorLocation(LAYER_PREFIX + f"mlp.{part}_stack", rows_per_expert=n) for part, n in parts.items()}
    names = mixers.MODEL.names.with_locations(**{f"mlp__experts__{part}": at for part, at in stacks.items()})
    monkeypatch.setitem(FAMILIES, mixers.ARCHITECTURE, lambda _: replace(mixers.MODEL, names=names))
    stacked, alone = dict(load_file(source / "model.safetensors")), {}
    for layer, part in ((1, "up"), (1, "down"), (3, "gate"), (3, "up"), (3, "down")):
        at = f"model.layers.{layer}.mlp."
        experts = [stacked.pop(f"{at}experts.{e}.{part}_proj.weight") for e in range(4)]
        stacked[f"{at}{part}_stack.weight"] = torch.stack(experts)
        alone |= {f"{at}{part}_stack.{e}.{part}.weight": expert for e, expert in enumerate(experts)}
    others = {name: tensor for name, tensor in stacked.items() if "_stack" not in name}
    for number, stored in enumerate((stacked, others | alone)):
        save_file(stored, source / "model.safetensors")
        target = convert_model(source, tmp_path / f"new-{number}")
        assert_same(source, target)
        found = read_tensors(target)
        assert found.keys() == stacked.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in stacked.items())
