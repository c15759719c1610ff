"""Every family against transformers: tiny random models with published config keys, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exlm import Cache, Config, Model
from exlm.families import FAMILIES, ConfigReader, build_spec
from tests.families.hostile import config_of
from tests.models import zoo
from tests.models.zoo_cases import CASES, RECURRENT, Case

TOKENS = 300
VOCAB = 100
LONG = 2_000
MROPE_ARCHITECTURES = [
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
]
RECURRENT_CASES = [case for case in CASES if case.id in RECURRENT]


def max_difference(got: Tensor, want: Tensor) -> float:
    """The largest relative error of any position's logits."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def load(folder: Path, length: int = TOKENS) -> Model:
    config = Config(folder)
    # Dynamic NTK: the oracle scales for the present tokens, exlm for the configured length; make them equal.
    config.max_seq_len = length
    model = Model(config)
    model.load()
    return model


def test_the_zoo_holds_every_architecture() -> None:
    assert {case.architecture for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    oracle = zoo.build(case.architecture, tmp_path / "model", **case.overrides)
    ids = torch.randint(0, VOCAB, (1, TOKENS))
    want = oracle.logits(ids)
    model = load(oracle.folder)
    assert max_difference(model.forward(ids), want) < 1e-5
    for chunk in (256, 64, 7, 1):
        cache = Cache(model, max_seq_len=TOKENS)
        parts = [model.forward(ids[:, at : at + chunk], cache) for at in range(0, TOKENS, chunk)]
        assert max_difference(torch.cat(parts, 1), want) < 1e-5, f"chunks of {chunk}"
        assert cache.current_seq_len == TOKENS


@pytest.mark.parametrize("case", RECURRENT_CASES, ids=lambda case: case.id)
def test_long_prompts_through_recurrent_states(case: Case, tmp_path: Path) -> None:
    oracle = zoo.build(case.architecture, tmp_path / "model", **case.overrides)
    ids = torch.randint(0, VOCAB, (1, LONG))
    model = load(oracle.folder, LONG)
    assert model.config.spec.is_recurrent
    assert max_difference(model.forward(ids), oracle.logits(ids)) < 1e-4


def test_every_recurrent_family_has_a_long_prompt() -> None:
    recurrent = {case.architecture for case in CASES if build_spec(ConfigReader(config_of(case))).is_recurrent}
    assert {case.architecture for case in RECURRENT_CASES} == recurrent


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_old_and_new_config_keys_describe_the_same_model(case: Case, tmp_path: Path) -> None:
    oracle = zoo.build(case.architecture, tmp_path / "model", **case.overrides)
    described = {}
    for spelling in ("old", "new"):
        zoo.rewrite_config(oracle, spelling)
        described[spelling] = Config(oracle.folder).freeze()
    assert described["old"] == described["new"]


@pytest.mark.parametrize("architecture", MROPE_ARCHITECTURES)
def test_mrope_positions(architecture: str, tmp_path: Path) -> None:
    oracle = zoo.build(architecture, tmp_path / "model")
    ids = torch.randint(0, VOCAB, (2, 60))
    positions = torch.randint(0, TOKENS, (3, 2, 60))
    model = load(oracle.folder)
    assert max_difference(model.forward(ids, positions=positions), oracle.logits_mrope(ids, positions)) < 1e-5
    assert max_difference(model.forward(ids), oracle.logits_mrope(ids, positions)) > 1e-2


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_windowed_layers_may_have_their_own_rope_scaling(kind: str, tmp_path: Path) -> None:
    """Only the new config keys can express this: the old ones have one base for these layers."""
    local = {"rope_type": kind, "factor": 3.0}
    if kind == "yarn":
        local["original_max_position_embeddings"] = 32
    tables = {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": local}
    oracle = zoo.build("Gemma3ForCausalLM", tmp_path / "model", rope_parameters=tables)
    ids = torch.randint(0, VOCAB, (1, TOKENS))
    assert max_difference(load(oracle.folder).forward(ids), oracle.logits(ids)) < 1e-5


OMITTED_KEYS = [
    ("MixtralForCausalLM", "rope_parameters"),
    ("MixtralForCausalLM", "rms_norm_eps"),
    ("SmolLM3ForCausalLM", "rope_parameters"),
    ("Olmo2ForCausalLM", "rms_norm_eps"),
    ("Phi3ForCausalLM", "rms_norm_eps"),
    ("Glm4ForCausalLM", "rms_norm_eps"),
    ("Gemma2ForCausalLM", "attn_logit_softcapping"),
    ("Gemma2ForCausalLM", "final_logit_softcapping"),
    ("Gemma3ForCausalLM", "sliding_window"),
    ("CohereForCausalLM", "rope_parameters"),
    ("Cohere2ForCausalLM", "rope_parameters"),
    ("Cohere2ForCausalLM", "sliding_window"),
    ("Qwen3NextForCausalLM", "norm_topk_prob"),
    ("Qwen3NextForCausalLM", "layer_types"),
    ("Qwen3_5ForCausalLM", "rope_parameters"),
    ("Qwen3_5MoeForCausalLM", "rms_norm_eps"),
    ("NemotronHForCausalLM", "time_step_min"),
    ("NemotronHForCausalLM", "layer_norm_epsilon"),
    ("NemotronHForCausalLM", "norm_topk_prob"),
    ("GraniteMoeHybridForCausalLM", "time_step_limit"),
    ("GraniteMoeHybridForCausalLM", "rms_norm_eps"),
    ("GraniteMoeHybridForCausalLM", "mamba_d_head"),
    ("FalconH1ForCausalLM", "mlp_multipliers"),
    ("FalconH1ForCausalLM", "mamba_norm_before_gate"),
    ("FalconH1ForCausalLM", "rms_norm_eps"),
    ("BambaForCausalLM", "rms_norm_eps"),
    ("BambaForCausalLM", "rope_parameters"),
    ("Lfm2ForCausalLM", "rope_parameters"),
    ("Lfm2ForCausalLM", "norm_eps"),
    ("Lfm2MoeForCausalLM", "routed_scaling_factor"),
    ("KimiLinearForCausalLM", "rms_norm_eps"),
    ("KimiLinearForCausalLM", "mlp_layer_types"),
    ("OlmoHybridForCausalLM", "linear_allow_neg_eigval"),
    ("OlmoHybridForCausalLM", "layer_types"),
]


@pytest.mark.parametrize(("architecture", "key"), OMITTED_KEYS)
def test_absent_keys_have_the_family_defaults(architecture: str, key: str, tmp_path: Path) -> None:
    oracle = zoo.build(architecture, tmp_path / "model")
    config = oracle.config()
    del config[key]
    (oracle.folder / "config.json").write_text(json.dumps(config))
    again = zoo.reload_oracle(oracle)
    ids = torch.randint(0, VOCAB, (1, TOKENS))
    assert max_difference(load(oracle.folder).forward(ids), again.logits(ids)) < 5e-6
