"""The JSON beside GPTQ and AWQ checkpoints: how it is read, and which layouts are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import CheckpointError, ConfigError, ExlmError
from exlm.formats.gptq import QuantizationConfig


@pytest.mark.parametrize(
    ("raw", "config"),
    [
        ({}, QuantizationConfig()),
        (
            {"bits": 4, "group_size": -1, "desc_act": True, "sym": False, "true_sequential": True},
            QuantizationConfig(4, -1, True, False),
        ),
        (
            {"bits": 3, "quant_method": "gptq", "checkpoint_format": "gptq_v2"},
            QuantizationConfig(3, checkpoint_format="gptq_v2"),
        ),
        (
            {"bits": 8, "method": "GPTQ", "format": "gptq_v2"},
            QuantizationConfig(8, checkpoint_format="gptq_v2"),
        ),
        (
            {"bits": 2, "group_size": None, "sym": None, "dynamic": None, "pack_dtype": "int32"},
            QuantizationConfig(2),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"},
            QuantizationConfig(4, 128, False, False, "gemm"),
        ),
        (
            {"zero_point": False, "q_group_size": 64, "w_bit": 4},
            QuantizationConfig(4, 64, False, True, "gemm"),
        ),
        (
            {"quant_method": "awq", "bits": 4, "format": "gemm"},
            QuantizationConfig(4, None, False, False, "gemm"),
        ),
        (
            {"bits": 4, "dynamic": {"-:lm_head": {}, "+:down": {"bits": 4, "sym": False}}},
            QuantizationConfig(4),
        ),
        ({"bits": 4, "group_size": 128, "dynamic": {"down": {"bits": 8}}}, QuantizationConfig(None, 128)),
        (
            {"bits": 4, "group_size": 128, "dynamic": {"+:up": {"group_size": 32}, "x": None}},
            QuantizationConfig(4, None),
        ),
    ],
)
def test_json_gives_the_config(raw: dict[str, Any], config: QuantizationConfig) -> None:
    found = QuantizationConfig.from_json(raw, "config.json")
    assert found == config
    assert found.method == ("awq" if config.checkpoint_format == "gemm" else "gptq")


@pytest.mark.parametrize(
    ("changes", "borrows"),
    [
        ({}, True),
        ({"meta": {"quantizer": "GPTQModel:0.9.1"}}, True),
        ({"sym": True}, False),
        ({"checkpoint_format": "gptq_v2"}, False),
        ({"meta": {"quantizer": ["optimum:1.2", None]}}, False),
        ({"meta": None}, False),
        ({"meta": []}, False),
    ],
)
def test_zeros_decremented_per_word_is_detected(changes: dict[str, Any], borrows: bool) -> None:
    raw = {"bits": 4, "sym": False, "meta": {"quantizer": ["gptqmodel:1.9.0"]}, **changes}
    assert QuantizationConfig.from_json(raw, "config.json").zeros_decremented_per_word == borrows


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"is_marlin_format": True}, "marlin"),
        ({"format": "bitblas"}, "bitblas"),
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, "gptq and gptq_v2"),
        ({"pack_dtype": "int8"}, "int8"),
        ({"bits": 5}, "found 5"),
        ({"bits": 1}, "found 1"),
        ({"dynamic": {"down": {"bits": 6}}}, "'down'.*found 6"),
        ({"dynamic": {"down": {"format": "marlin"}}}, "marlin"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "exl2"}, "exl2"),
        ({"quant_method": "auto-round"}, "auto-round"),
        ({"quant_method": "gptq", "method": "awq"}, "awq, gptq"),
        ({"quant_method": "gptq", "format": "gemm"}, "gemm"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "awq", "version": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 8}, "found 8"),
    ],
)
def test_unreadable_layouts_are_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"^quantize_config.json.*{named}"):
        QuantizationConfig.from_json(raw, "quantize_config.json")


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"bits": "4"}, "bits"),
        ({"bits": True}, "bits"),
        ({"bits": 4.0}, "bits"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": -2}, "group_size"),
        ({"group_size": [128]}, "group_size"),
        ({"desc_act": 1}, "desc_act"),
        ({"sym": "yes"}, "sym"),
        ({"quant_method": 4}, "quant_method"),
        ({"checkpoint_format": ["gptq"]}, "checkpoint_format"),
        ({"dynamic": ["down"]}, "dynamic"),
        ({"dynamic": {"down": 8}}, "down"),
    ],
)
def test_invalid_values_are_refused(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: .*{key}.*: expected .*, found "):
        QuantizationConfig.from_json(raw, "config.json")


KEYS = (
    "bits",
    "group_size",
    "desc_act",
    "sym",
    "quant_method",
    "format",
    "checkpoint_format",
    "version",
    "dynamic",
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["gptq", "awq", "gemm", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(KEYS), json_values))
def test_any_json_is_read_or_refused(raw: dict[str, Any]) -> None:
    try:
        config = QuantizationConfig.from_json(raw, "config.json")
    except ExlmError:
        return
    assert config.bits in (None, 2, 3, 4, 8)


HOSTILE: list[Any] = [
    -1,
    0,
    10**9,
    2**31,
    2**63,
    10**400,
    1e308,
    math.nan,
    True,
    "3",
    "\ud800",
    [],
    {},
    [[1]],
]
FIELDS = (
    *(
        "bits",
        "w_bit",
        "group_size",
        "q_group_size",
        "desc_act",
        "sym",
        "zero_point",
        "quant_method",
        "method",
    ),
    *("checkpoint_format", "format", "version", "is_marlin_format", "pack_dtype", "dynamic", "meta"),
)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("field", FIELDS)
def test_hostile_values_are_read_or_refused_in_printable_messages(method: str, field: str) -> None:
    for value in HOSTILE:
        for raw in ({field: value}, {"dynamic": {"a": {field: value}}}):
            try:
                found = QuantizationConfig.from_json({"quant_method": method, **raw}, "config.json")
            except ExlmError as error:
                str(error).encode()
            else:
                assert found.bits in (None, 2, 3, 4, 8)
