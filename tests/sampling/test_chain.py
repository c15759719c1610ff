"""The table of the chain's steps is complete, imports no torch, and agrees with the settings and the kernels."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Collection
from typing import Any, get_type_hints

import pytest

from exlm.kernels.sampling_layout import PARAM_COLUMNS, STEP_FLAGS
from exlm.sampler_chain import (
    KERNEL_PARAMS,
    PARAM_NAMES,
    SETTINGS,
    STEPS,
    STEPS_BY_STAGE,
    Bounds,
    SamplingStep,
    StepSetting,
    active_steps,
    step_params,
)
from exlm.sampling import Settings
from exlm.sampling.settings import REQUEST_STEPS
from exlm.sampling.steps import CANDIDATES_STEPS, DRAW_STEPS, LOGITS_STEPS, STATE_UPDATES
from tests.sampling.random_inputs import neutral

NUMBERS = [setting for setting in SETTINGS.values() if setting.is_number]


def test_every_step_has_its_torch_function() -> None:
    assert {*LOGITS_STEPS} == {*STEPS_BY_STAGE["logits"]} - REQUEST_STEPS
    assert {*CANDIDATES_STEPS} == {*STEPS_BY_STAGE["candidates"]}
    assert {*DRAW_STEPS} == {*STEPS_BY_STAGE["draw"]}
    assert STEPS_BY_STAGE["softmax"] == ("softmax", "top_k")
    assert {*STATE_UPDATES} == {step.name for step in STEPS if step.initial_state is not None}


def test_stages_follow_each_other() -> None:
    stages = [step.stage for step in STEPS]
    assert stages == sorted(stages, key=list(STEPS_BY_STAGE).index)
    assert [name for names in STEPS_BY_STAGE.values() for name in names] == [step.name for step in STEPS]


def test_names_are_unique() -> None:
    assert len(SETTINGS) == sum(len(step.settings) for step in STEPS)
    assert len({*PARAM_NAMES}) == len(PARAM_NAMES) == sum(len(step.params) for step in STEPS)


def test_every_setting_is_a_field_of_its_type() -> None:
    hints = get_type_hints(Settings)
    for name, setting in SETTINGS.items():
        plain: dict[Any, Any] = {float: float, int: int, bool: bool, frozenset: Collection[int]}
        expected = plain[setting.type]
        assert hints[name] == (expected | None if setting.optional else expected), name


def test_settings_without_an_entry_are_no_numbers_and_no_switches() -> None:
    """But two that old scripts have, which no step reads."""
    hints = get_type_hints(Settings)
    others = {field.name for field in dataclasses.fields(Settings)} - SETTINGS.keys()
    simple = (float, int, bool, float | None, int | None)
    assert {name for name in others if hints[name] in simple} == {"ngram_index", "filter_prefer_eos"}


def test_neutral_settings_activate_no_step() -> None:
    values = {name: getattr(neutral(), name) for name in SETTINGS}
    values |= {name: setting.neutral for name, setting in SETTINGS.items() if setting.neutral is not None}
    assert active_steps(values) == {"softmax"}
    params = step_params(values, active_steps(values))
    assert params == {param.name: param.off for step in STEPS for param in step.params}


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: str(setting.name))
def test_the_api_allows_nothing_that_settings_refuse(setting: StepSetting) -> None:
    """With two exceptions, which the library's own check then refuses with its own message."""
    named = [setting.api] if setting.openai_name is None else [setting.api, setting.openai_bounds]
    for api in named:
        assert api.minimum is not None
        assert api.maximum is not None
        low = api.minimum + (1e-9 if api.exclusive else 0)
        refused = [value for value in (low, api.maximum) if setting.bounds.describe_violation(value)]
        assert refused == ([0] if setting.name == "dry_base" else [])


NAMES = [step.name for step in STEPS]
TRUNCATIONS = STEPS[NAMES.index("top_k") : NAMES.index("dynamic_temperature")]


@pytest.mark.parametrize("step", TRUNCATIONS, ids=lambda step: str(step.name))
def test_temperature_last_comes_after_any_truncation(step: SamplingStep) -> None:
    switch = step.settings[0]
    value = {bool: True, int: 5}.get(switch.type, 0.5)
    settings = neutral(temperature=2.0, temperature_last=True, **{switch.name: value})
    assert step.is_active({name: getattr(settings, name) for name in SETTINGS})
    assert "final_temperature" in settings.compiled().probs_steps


def test_bounds_say_what_a_number_must_be() -> None:
    assert Bounds(0).describe_violation(-1) == "at least 0"
    assert Bounds(maximum=1).describe_violation(2) == "at most 1"
    assert Bounds(0, 1).describe_violation(1.5) == "from 0 to 1"
    assert Bounds(0, exclusive=True).describe_violation(0) == "more than 0"
    assert [Bounds(0, 1).describe_violation(value) for value in (0, 0.5, 1)] == [None] * 3


def test_the_kernels_have_a_column_for_each_parameter_and_a_flag_for_each_step() -> None:
    assert list(PARAM_COLUMNS) == [*KERNEL_PARAMS, "flags", "mirostat"]
    known = {step.name for step in STEPS if step.in_kernels}
    assert {*STEP_FLAGS} - {"greedy"} == {*STEPS_BY_STAGE["candidates"], *STEPS_BY_STAGE["draw"]} & known
    row = neutral(top_k=7, mirostat=True).compiled().kernel_row
    assert len(row) == len(PARAM_COLUMNS)
    assert (row[PARAM_COLUMNS["top_k"]], row[PARAM_COLUMNS["mirostat"]]) == (7.0, 1.0)
    assert row[PARAM_COLUMNS["flags"]] == STEP_FLAGS["mirostat"]


def test_the_table_needs_no_torch() -> None:
    code = "import sys, exlm.sampler_chain; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
