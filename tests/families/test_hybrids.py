"""Descriptions of hybrid models: what each layer is, what is refused, and what is left out."""

from __future__ import annotations

import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exlm import Config, Model, spec
from exlm.errors import ConfigError, MissingTensor
from exlm.families import ConfigReader, build_spec
from exlm.kernels.reference import RotaryEmbedding
from exlm.model.summary import MIXER_NAMES
from tests.families.hostile import config_of
from tests.models import zoo
from tests.models.zoo_cases import CASES

CONFIGS = {case.id: config_of(case) for case in CASES}


def describe(name: str, **changes: Any) -> spec.Model:
    raw = {key: value for key, value in (CONFIGS[name] | changes).items() if value != "absent"}
    return build_spec(ConfigReader(raw))


LAYERS: dict[str, dict[str, int]] = {
    "qwen3-next": {"delta net": 3, "attention": 1},
    "qwen3-next-interval": {"delta net": 2, "attention": 2},
    "qwen3.5-vl": {"delta net": 3, "attention": 1},
    "nemotron-h": {"Mamba 2": 2, "attention": 1, "MLP alone": 3},
    "granite-hybrid": {"Mamba 2": 3, "attention": 1},
    "falcon-h1": {"attention beside Mamba 2": 4},
    "bamba": {"Mamba 2": 3, "attention": 1},
    "lfm2": {"short convolution": 2, "attention": 2},
    "kimi-linear": {"delta net": 3, "latent attention": 1},
    "olmo-hybrid": {"delta net": 3, "attention": 1},
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_kind_of_each_layer(name: str) -> None:
    assert Counter(MIXER_NAMES[type(layer.mixer)] for layer in describe(name).layers) == LAYERS[name]


KIMI_LISTS = {"head_dim": 16, "num_heads": 3, "full_attn_layers": [2, 4], "kda_layers": [1, 3]}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3.5", {"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers and the model has 4"),
    ("qwen3.5", {"layer_types": ["ring_attention"] * 4}, r"each one of linear_attention.*found \['ring_attention'"),
    ("qwen3.5", {"layer_types": "full_attention"}, "a list of names.*found 'full_attention'"),
    ("qwen3.5", {"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads evenly"),
    ("qwen3.5", {"linear_conv_kernel_dim": 257}, r'"linear_conv_kernel_dim" must be a size from 1 to 256, found 257'),
    ("qwen3.5", {"linear_key_head_dim": 2**16, "linear_value_head_dim": 2**16}, "has 17179869184 numbers; expected at"),
    ("qwen3.5", {"hidden_act": "gelu"}, r'"hidden_act" must be \'silu\', the only one known'),
    ("qwen3.5", {"mtp_num_hidden_layers": -1}, r'"mtp_num_hidden_layers" must be a number of layers from 0 to 4096'),
    ("qwen3-next", {"mlp_only_layers": [4]}, r'"mlp_only_layers" must be a list of layers from 0 to 3, found \[4\]'),
    ("qwen3-next", {"num_experts_per_tok": 9}, "9 experts for each token but only 8 exist"),
    ("nemotron-h", {"hybrid_override_pattern": "M-*E"}, "says M-.E and layers_block_type means M-.EME"),
    ("nemotron-h", {"hybrid_override_pattern": "M-*X"}, "1 to 4096 letters M"),
    ("nemotron-h", {"num_hidden_layers": 5}, "layers_block_type names 6 layers and the model has 5"),
    ("nemotron-h", {"layers_block_type": "absent"}, "a list of the layers' kinds, or hybrid_override_pattern"),
    ("nemotron-h", {"layers_block_type": ["mamba2"]}, r"each one of linear_attention, mamba.*found \['mamba2'\]"),
    ("nemotron-h", {"n_groups": 4}, "6 Mamba heads cannot share 4 groups evenly"),
    ("nemotron-h", {"n_group": 3}, "8 experts cannot form 3 equal groups of which 1 are selected"),
    ("nemotron-h", {"num_experts_per_tok": 5}, "5 experts for each token but 1 of 2 groups hold fewer"),
    ("granite-hybrid", {"mamba_d_head": 12}, "8 Mamba heads of 12 do not make the width 128"),
    ("granite-hybrid", {"mamba_n_heads": 7}, "width 128 cannot be cut into 7 equal heads"),
    ("granite-hybrid", {"position_embedding_type": "alibi"}, "nope, rope or null, found 'alibi'"),
    ("granite-hybrid", {"time_step_limit": [0.5, 0.1]}, "the first at least 0 and below the second"),
    ("falcon-h1", {"ssm_multipliers": [1.0] * 4}, r'"ssm_multipliers" must be a list of 5 finite numbers'),
    ("bamba", {"attn_layer_indices": [0, 9]}, "a list of layers from 0 to 3"),
    ("lfm2", {"intermediate_size": 2**31 - 1, "block_ffn_dim_multiplier": 2}, "makes an MLP of width 2863311536"),
    ("lfm2-moe", {"layer_types": "absent"}, r'"layer_types" must be a list of 4 names'),
    (
        "kimi-linear",
        {"layer_types": None, "linear_attn_config": KIMI_LISTS | {"kda_layers": [1]}},
        "2 layers with full att",
    ),
    (
        "kimi-linear",
        {"layer_types": None, "linear_attn_config": KIMI_LISTS | {"kda_layers": [1, 2, 3]}},
        "1 of them twice",
    ),
    ("kimi-linear", {"mla_use_nope": False}, r'"mla_use_nope" must be True, the only one known'),
    ("kimi-linear", {"attention_bias": True}, r'"attention_bias" must be false with latent attention'),
    ("kimi-linear", {"moe_router_activation_func": "softmax"}, "must be 'sigmoid', the only one known"),
    ("kimi-linear", {"v_head_dim": 25}, "values of 25 dimensions do not fit in the cache of keys of 24"),
]


@pytest.mark.parametrize(("name", "changes", "complaint"), REFUSED)
def test_contradictions_and_unknown_kinds_are_refused(name: str, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        describe(name, **changes)
    assert "config.json" in str(caught.value)


def test_kimi_lists_count_from_one() -> None:
    model = describe("kimi-linear", layer_types=None, linear_attn_config=KIMI_LISTS)
    assert [isinstance(layer.mixer, spec.LatentAttention) for layer in model.layers] == [False, True, False, True]


@pytest.mark.parametrize("infinity", [math.inf, {"__float__": "Infinity"}])
def test_the_largest_time_step_may_be_infinite(infinity: Any) -> None:
    model = describe("bamba", time_step_limit=[0.25, infinity])
    mamba = model.layers[0].mixer
    assert isinstance(mamba, spec.Mamba2)
    assert mamba.dt_limits == (0.25, math.inf)


def test_interleaved_mrope_takes_planes_in_turn() -> None:
    rope = spec.Rope(theta=1e4, dim=20, mrope_sections=(4, 3, 3), mrope_interleaved=True)
    axes = RotaryEmbedding(rope, 8, torch.device("cpu")).mrope_axis
    assert axes.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    runs = spec.Rope(theta=1e4, dim=20, mrope_sections=(4, 3, 3))
    assert RotaryEmbedding(runs, 8, torch.device("cpu")).mrope_axis.tolist() == [0] * 4 + [1] * 3 + [2] * 3


def rewritten(oracle: zoo.Oracle, remove: str = "", **more: torch.Tensor) -> Path:
    """The oracle's folder without some tensors, and with more."""
    path = oracle.folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not remove or remove not in name}
    save_file(tensors | more, path, metadata={"format": "pt"})
    return oracle.folder


def load(folder: Path) -> Model:
    model = Model(Config(folder))
    model.load()
    return model


@pytest.mark.parametrize(
    ("architecture", "key", "tensors"),
    [
        ("Qwen3_5ForCausalLM", "mtp_num_hidden_layers", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"]),
        ("NemotronHForCausalLM", "num_nextn_predict_layers", ["mtp.layers.0.mixer.q_proj.weight"]),
        ("KimiLinearForCausalLM", "num_nextn_predict_layers", ["model.layers.4.self_attn.q_proj.weight"]),
    ],
)
def test_prediction_layers_are_ignored(
    architecture: str, key: str, tensors: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = zoo.build(architecture, tmp_path / "model")
    ids = torch.randint(0, 100, (1, 20))
    folder = rewritten(oracle, **{name: torch.ones(4, 4) for name in tensors})
    config = oracle.config() | {key: 1}
    oracle.modern.update(config)
    zoo.rewrite_config(oracle, "new")
    with caplog.at_level(logging.WARNING):
        logits = load(folder).forward(ids)
    # the first test of a new checkout compiles the C kernels, with a warning of its own
    assert not [record for record in caplog.records if record.name != "exlm.kernels.cpu.compile"]
    assert float((logits - oracle.logits(ids)).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("Qwen3NextForCausalLM", "linear_attn.A_log"),
        ("Qwen3_5ForCausalLM", "linear_attn.conv1d.weight"),
        ("NemotronHForCausalLM", "mixer.dt_bias"),
        ("GraniteMoeHybridForCausalLM", "mamba.D"),
        ("FalconH1ForCausalLM", "mamba.conv1d.bias"),
        ("Lfm2ForCausalLM", "conv.conv.weight"),
        ("KimiLinearForCausalLM", "self_attn.v_conv1d.weight"),
        ("OlmoHybridForCausalLM", "linear_attn.o_norm.weight"),
    ],
)
def test_missing_state_tensors_are_named(architecture: str, tensor: str, tmp_path: Path) -> None:
    oracle = zoo.build(architecture, tmp_path / "model")
    with pytest.raises(MissingTensor, match=tensor.replace(".", r"\.")):
        load(rewritten(oracle, remove=tensor))
