"""Numbers in config.json and GGUF metadata are bounded before they size a loop or an allocation."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from exlm.errors import ConfigError
from exlm.families import ConfigReader, build_spec
from exlm.families.config_reader import MAX_EXPERTS, MAX_TOTAL_EXPERTS, MAX_VOCAB
from exlm.spec.model import matrices
from tests.conftest import ROOT

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the system limits a process's memory")


@LINUX
@pytest.mark.parametrize(("kind", "min_cases"), [("config", 20_000), ("gguf", 4_000), ("load", 300)])
def test_every_hostile_number_gives_a_spec_or_a_typed_error(kind: str, min_cases: int) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.families.hostile", kind],
        cwd=ROOT,
        env={**env, "EXLM_LOG_LEVEL": "CRITICAL"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *failures, last = done.stdout.splitlines()
    assert failures == []
    assert int(last.removesuffix(" cases")) > min_cases


NUMBERS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "MixtralForCausalLM": ("num_local_experts", {"num_experts_per_tok": 2}),
    "GemmoeForCausalLM": ("num_local_experts", {"num_experts_per_tok": 2}),
    "Qwen3MoeForCausalLM": ("num_experts", {"num_experts_per_tok": 2, "moe_intermediate_size": 8}),
}


@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_are_bounded(architecture: str) -> None:
    key, more = EXPERTS[architecture]
    raw = {"architectures": [architecture], **NUMBERS, **more}
    assert sum(1 for _ in matrices(build_spec(ConfigReader({**raw, key: MAX_EXPERTS})))) > 12 * MAX_EXPERTS
    with pytest.raises(ConfigError, match=rf'"{key}" must be a size from 1 to 4096, found 1000000000\.'):
        build_spec(ConfigReader({**raw, key: 10**9}))


def test_experts_of_dbrx_are_bounded_too() -> None:
    names = {"d_model": 64, "n_heads": 4, "n_layers": 4, "vocab_size": 128}
    ffn = {"ffn_hidden_size": 96, "moe_num_experts": 10**9, "moe_top_k": 2}
    with pytest.raises(ConfigError, match=r'"ffn_config.moe_num_experts" must be a size from 1 to 4096'):
        build_spec(ConfigReader({"architectures": ["DbrxForCausalLM"], **names, "ffn_config": ffn}))


def test_experts_of_all_layers_together_are_bounded() -> None:
    deep = {**NUMBERS, "num_hidden_layers": 4096, "num_experts_per_tok": 2, "num_local_experts": 4096}
    with pytest.raises(ConfigError, match=rf"16777216 experts together; expected at most {MAX_TOTAL_EXPERTS}"):
        build_spec(ConfigReader({"architectures": ["MixtralForCausalLM"], **deep}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 10**9, "head_dim": 8},
            '"num_attention_heads" must be a size from 1 to 16384',
        ),
        (
            {"num_key_value_heads": 10**9, "head_dim": 8},
            '"num_key_value_heads" must be a size from 1 to 16384',
        ),
        ({"head_dim": 10**9}, '"head_dim" must be a size from 1 to 65536'),
        ({"hidden_size": 2**30}, "make heads of 268435456; expected at most 65536"),
        ({"vocab_size": 10**9}, f'"vocab_size" must be a size from 1 to {MAX_VOCAB}'),
        ({"sliding_window": 2**31}, '"sliding_window" must be a number of tokens below 2147483648'),
        ({"rope_theta": 10**400}, '"rope_theta" must be a finite number'),
        ({"rms_norm_eps": 10**400}, '"rms_norm_eps" must be a finite number'),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 10**400}}, '"mscale" must be a finite'),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1e-320}},
            '"beta_fast" must be a number',
        ),
    ],
)
def test_numbers_beyond_any_model_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_spec(ConfigReader({"architectures": ["MistralForCausalLM"], **NUMBERS, **changes}))


def test_head_counts_that_agree_are_refused_before_their_rows_are_listed() -> None:
    many = {**NUMBERS, "num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 8}
    with pytest.raises(ConfigError, match="num_attention_heads"):
        build_spec(ConfigReader({"architectures": ["InternLM2ForCausalLM"], **many}))
