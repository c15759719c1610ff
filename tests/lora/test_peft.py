"""Adapter folders: ranks and scaling, and errors that name the file, the key and the remedy."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exlm import (
    BadFile,
    BadTensor,
    CheckpointError,
    Config,
    InputError,
    Lora,
    MissingTensor,
    Model,
    UnsafeFile,
    Unsupported,
)
from tests import tiny
from tests.lora import peft_folders as peft
from tests.models import zoo

UP, DOWN, Q = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"
SHAPES = {UP: (32, 48), DOWN: (48, 32), Q: (32, 32)}
KEY = peft.PREFIX + UP + ".lora_A.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    model = Model(Config(folder))
    model.load()
    return model


def check_equals_merged(model: Model, folder: Path, adapter: peft.Adapter, tmp_path: Path, limit: float = 1e-5) -> None:
    """Compare the adapter's logits with those of its matrices merged."""
    ids = torch.randint(3, 60, (1, 30))
    merged = Model(Config(peft.merge_into_model(folder, tmp_path / "merged", (adapter, 1.0))))
    merged.load()
    lora = Lora.from_directory(model, adapter.folder)
    want = merged.forward(ids)
    assert float((model.forward(ids, loras=lora) - want).norm() / want.norm()) < limit
    lora.unload()


def test_the_scaling_is_alpha_over_rank(model: Model, folder: Path, tmp_path: Path) -> None:
    adapter = peft.write_adapter(tmp_path / "a", SHAPES, r=3, lora_alpha=12, factor=lambda *_: 4.0)
    check_equals_merged(model, folder, adapter, tmp_path)
    lora = Lora.from_directory(model, adapter.folder, 0.5)
    assert (lora.lora_r, lora.lora_alpha, lora.strength) == (3, 12.0, 0.5)
    assert lora.roles == ("layers.0.mlp.up", "layers.1.mlp.down", "layers.1.attn.q")
    assert lora.lora_path.endswith("adapter_model.safetensors")
    assert lora.model is model
    lora.unload()


def test_lora_scaling_is_the_strength_times_alpha_over_rank(model: Model, tmp_path: Path) -> None:
    """As in exllamav2: TabbyAPI shows lora_scaling * lora_r / lora_alpha as the strength."""
    adapter = peft.write_adapter(tmp_path / "a", SHAPES, r=3, lora_alpha=12, factor=lambda *_: 4.0)
    plain = Lora.from_directory(model, adapter.folder)
    assert plain.lora_scaling == 4.0
    plain.unload()
    lora = Lora.from_directory(model, adapter.folder, lora_scaling=0.5)
    assert lora.lora_scaling == 2.0
    assert lora.lora_scaling * lora.lora_r / lora.lora_alpha == lora.strength == 0.5
    assert repr(lora).endswith("lora_scaling=0.5)")
    ids = torch.randint(3, 60, (1, 9))
    half, whole = model.forward(ids, loras=lora), model.forward(ids, loras=(lora, 1.0))
    lora.lora_scaling = 4.0
    assert lora.strength == 1.0
    assert torch.equal(model.forward(ids, loras=lora), whole)
    lora.strength = 0.5
    assert lora.lora_scaling == 2.0
    assert torch.equal(model.forward(ids, loras=lora), half)
    assert not torch.allclose(half, whole, atol=1e-3)
    lora.strength = 0.1
    lora.lora_scaling = lora.lora_scaling
    assert lora.strength == 0.1
    for wrong in ("1", float("nan"), True):
        with pytest.raises(InputError, match="scaling must be a finite number"):
            lora.strength = wrong
        with pytest.raises(InputError, match="scaling must be a finite number"):
            lora.lora_scaling = wrong
    lora.unload()


def test_lora_scaling_of_a_rank_stabilised_adapter(model: Model, tmp_path: Path) -> None:
    adapter = peft.write_adapter(
        tmp_path / "a", SHAPES, r=4, use_rslora=True, factor=lambda _, rank: 8 / math.sqrt(rank)
    )
    lora = Lora.from_directory(model, adapter.folder, 0.5)
    assert (lora.lora_r, lora.lora_alpha, lora.lora_scaling) == (4, 8.0, 2.0)
    lora.unload()


def test_rank_stabilised_adapters(model: Model, folder: Path, tmp_path: Path) -> None:
    adapter = peft.write_adapter(
        tmp_path / "a", SHAPES, r=4, use_rslora=True, factor=lambda _, rank: 8 / math.sqrt(rank)
    )
    check_equals_merged(model, folder, adapter, tmp_path)


@pytest.mark.parametrize(
    ("ranks", "alphas"),
    [
        ({"up_proj": 2}, {"q_proj": 3}),
        ({UP: 2, "mlp.down_proj": 7}, {"layers.1.self_attn.q_proj": 3.5}),
        ({r"model\.layers\.0\.mlp\..*": 2}, {r".*\.q_proj": 3}),
        ({"^model.layers.0.mlp.up_proj": 2, "proj": 9}, {"up|q_proj": 3}),
    ],
)
def test_rank_and_alpha_patterns(
    model: Model, folder: Path, tmp_path: Path, ranks: dict[str, int], alphas: dict[str, float]
) -> None:
    def found(patterns: dict[str, Any], module: str, default: float) -> Any:
        """The first match, as in PEFT."""
        key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
        return default if key is None else patterns[key]

    adapter = peft.write_adapter(
        tmp_path / "a",
        SHAPES,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        ranks={module: found(ranks, module, 4) for module in SHAPES},
        factor=lambda module, rank: found(alphas, module, 8) / rank,
    )
    check_equals_merged(model, folder, adapter, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_precisions(model: Model, folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    check_equals_merged(model, folder, peft.write_adapter(tmp_path / "a", SHAPES, dtype=dtype), tmp_path)


def test_the_base_embedding_may_be_saved_with_the_adapter(model: Model, tmp_path: Path) -> None:
    adapter = peft.write_adapter(tmp_path / "a", SHAPES, embedding=("model.embed_tokens", 64, 32))
    edit_tensors(adapter, {peft.PREFIX + "model.embed_tokens.base_layer.weight": torch.zeros(64, 32)})
    Lora.from_directory(model, adapter.folder).unload()
    edit_tensors(adapter, {peft.PREFIX + "model.embed_tokens.base_layer.weight": torch.zeros(65, 32)})
    with pytest.raises(Unsupported, match=r"\[32, 64\].*\[65, 32\].*resized"):
        Lora.from_directory(model, adapter.folder)


def edit_tensors(adapter: peft.Adapter, new: dict[str, torch.Tensor], drop: tuple[str, ...] = ()) -> None:
    path = adapter.folder / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in drop} | new
    save_file(tensors, path)


WRONG_TENSORS: list[tuple[dict[str, torch.Tensor], tuple[str, ...], type[Exception], str]] = [
    ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)}, (), BadTensor,
     r"layers\.9.*another model"),
    ({"base_model.model.score.lora_A.weight": torch.zeros(4, 32)}, (), BadTensor, "score"),
    ({"something": torch.zeros(1)}, (), BadTensor, r"'something'.*expected base_model\.model\."),
    ({KEY: torch.zeros(5, 32)}, (), BadTensor, r"expected shape \[4, 32\], found \[5, 32\]"),
    ({KEY: torch.zeros(4, 33)}, (), BadTensor, r"expected shape \[4, 32\], found \[4, 33\]"),
    ({KEY: torch.full((4, 32), math.nan)}, (), BadTensor, "found 128 of 128 NaN"),
    ({KEY: torch.zeros(4, 32, dtype=torch.int32)}, (), BadTensor, r"expected one of the types F16.*I32"),
    ({}, (KEY,), MissingTensor, r"up_proj\.lora_B\.weight' is there, but not its other half, A"),
    ({KEY.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(48)}, (), Unsupported, "DoRA"),
    ({KEY.replace("lora_A.weight", "bias"): torch.ones(48)}, (), Unsupported, "trained bias"),
    ({"base_model.model.lm_head.weight": torch.ones(64, 32)}, (), Unsupported, "whole module.*merge_and"),
    ({"base_model.model.model.embed_tokens.modules_to_save.weight": torch.ones(64, 32)}, (), Unsupported,
     "whole module"),
]  # fmt: skip


@pytest.mark.parametrize(("new", "drop", "error", "match"), WRONG_TENSORS)
def test_wrong_tensors(
    model: Model,
    tmp_path: Path,
    new: dict[str, torch.Tensor],
    drop: tuple[str, ...],
    error: type[Exception],
    match: str,
) -> None:
    adapter = peft.write_adapter(tmp_path, SHAPES)
    edit_tensors(adapter, new, drop)
    before = repr(model._require_loaded().decoder.blocks[0].mlp.up)  # type: ignore[attr-defined]
    with pytest.raises(error, match=match) as raised:
        Lora.from_directory(model, adapter.folder)
    assert "adapter_model.safetensors" in str(raised.value)
    assert repr(model._require_loaded().decoder.blocks[0].mlp.up) == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["model.visual.blocks.0.attn.qkv", "visual.merger.mlp.0"])
def test_vision_modules_are_refused(module: str, tmp_path: Path) -> None:
    folder = zoo.build("Qwen2VLForConditionalGeneration", tmp_path / "model").folder
    adapter = peft.write_adapter(tmp_path / "lora", {module: (32, 32)})
    model = Model(Config(folder))
    model.load()
    with pytest.raises(Unsupported, match=r"vision tower.*Merge it"):
        Lora.from_directory(model, adapter.folder)


WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"use_dora": True}, Unsupported, "DoRA"),
    ({"bias": "all"}, Unsupported, 'expected bias "none"'),
    ({"lora_bias": True}, Unsupported, "biases"),
    ({"modules_to_save": ["lm_head"]}, Unsupported, "whole modules"),
    ({"target_parameters": ["experts.w1"]}, Unsupported, "bare parameters"),
    ({"layer_replication": [[0, 1]]}, Unsupported, "repeats layers"),
    ({"peft_type": "IA3"}, Unsupported, "peft_type LORA, found 'IA3'"),
    ({"init_lora_weights": "pissa_niter_16"}, Unsupported, "own weights"),
    ({"r": 0}, BadFile, "above 0 as r"),
    ({"r": None}, BadFile, "above 0 as r"),
    ({"r": 2.5}, BadFile, "whole number"),
    ({"lora_alpha": "8"}, BadFile, "lora_alpha"),
    ({"lora_alpha": math.nan}, BadFile, "lora_alpha"),
    ({"rank_pattern": ["q_proj"]}, BadFile, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": "x"}}, BadFile, "q_proj"),
    ({"rank_pattern": {"(": 2}}, BadFile, "no regular expression"),
    ({"rank_pattern": {"(a+)+$": 2}}, Unsupported, "repeats too much"),
    ({"rank_pattern": {".*.*.*.*.*x": 2}}, Unsupported, "repeats too much"),
    ({"rank_pattern": {f".*.*.*{n}": 2 for n in range(8)}}, Unsupported, "8 patterns in rank_pattern repeat"),
    ({"rank_pattern": {"q{4294967296}": 2}}, BadFile, "no regular expression"),
    ({"rank_pattern": {"(?i)q_proj": 2}}, BadFile, "no regular expression"),
    ({"alpha_pattern": {"a)|(b": 2}}, BadFile, "no regular expression"),
    ({"r": 10**9}, BadFile, "as r, and below 1e9; found 1000000000"),
    ({"r": 10**400}, BadFile, "above 0 as r"),
    ({"lora_alpha": 1e308}, BadFile, "above 0 as lora_alpha"),
    ({"rank_pattern": {"q_proj": 2**63}}, BadFile, "above 0 as rank_pattern"),
]


@pytest.mark.parametrize(("options", "error", "match"), WRONG_OPTIONS)
def test_wrong_options(
    model: Model, tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    adapter = peft.write_adapter(tmp_path, SHAPES)
    config = adapter.folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | options))
    with pytest.raises(error, match=match) as raised:
        Lora.from_directory(model, adapter.folder)
    assert "adapter_config.json" in str(raised.value)


@pytest.mark.parametrize("options", [{"fan_in_fan_out": True}, {"init_lora_weights": "gaussian"},
                                     {"target_modules": ["q_proj"], "unheard_of": None}])  # fmt: skip
def test_options_that_change_nothing(model: Model, folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    check_equals_merged(model, folder, peft.write_adapter(tmp_path / "a", SHAPES, **options), tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"r": "\udcff"}'])
def test_broken_configurations(model: Model, tmp_path: Path, text: str) -> None:
    adapter = peft.write_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadFile, match=r"adapter_config\.json"):
        Lora.from_directory(model, adapter.folder)


def test_pickles_are_not_opened(model: Model, tmp_path: Path) -> None:
    adapter = peft.write_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    Lora.from_directory(model, adapter.folder).unload()
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(UnsafeFile, match=r"pickle.*\n.*weights_only=True"):
        Lora.from_directory(model, adapter.folder)
    with pytest.raises(UnsafeFile, match="pickle"):
        Lora(model, tmp_path / "adapter_config.json", tmp_path / "adapter_model.bin")


def test_folders_without_an_adapter(model: Model, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="No LoRA found in"):
            Lora.from_directory(model, path)
    peft.write_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="No LoRA found in"):
        Lora.from_directory(model, tmp_path)


def test_an_adapter_without_tensors_is_refused(model: Model, tmp_path: Path) -> None:
    peft.write_adapter(tmp_path, {})
    with pytest.raises(BadFile, match="found none among 0"):
        Lora.from_directory(model, tmp_path)


def test_fused_and_separate_modules_together_are_refused(tmp_path: Path) -> None:
    from tests.models import zoo

    folder = zoo.build("Phi3ForCausalLM", tmp_path / "model").folder
    phi = Model(Config(folder))
    phi.load()
    shapes = peft.matrix_shapes(folder)
    fused = next(name for name in shapes if name.endswith("qkv_proj"))
    width = phi.config.spec.hidden
    both = {fused: shapes[fused], fused.replace("qkv_proj", "q_proj"): (width, width)}
    peft.write_adapter(tmp_path / "a", both)
    with pytest.raises(BadFile, match=r"changes layers\.0\.attn\.q, and so does"):
        Lora.from_directory(phi, tmp_path / "a")
    alone = {fused.replace("qkv_proj", "q_proj"): (width, width)}
    assert Lora.from_directory(phi, peft.write_adapter(tmp_path / "b", alone).folder).roles == ("layers.0.attn.q",)
