"""Settings checked and compiled: which steps of the chain a row takes, and with which parameters.

`CompiledSettings` follow from the values of `Settings` and from nothing else. Equal settings share one
object, and it never changes: after an assignment the next token uses another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..kernels.sampling_layout import STEP_FLAGS
from ..sampler_chain import (
    KERNEL_PARAMS,
    KERNEL_STEPS,
    SETTINGS,
    STATEFUL_STEPS,
    STEPS,
    STEPS_BY_STAGE,
    Bounds,
    StepSetting,
    active_steps,
    is_greedy,
    step_params,
)
from .dry import DryRule
from .penalties import PenaltyRule

if TYPE_CHECKING:
    from .settings import Settings

RULE_STEPS = frozenset({"guidance", "penalties", "dry"})
"""Steps on the logits that depend on the request's text; `logits_processors` applies them."""


@dataclass(frozen=True, eq=False)
class CompiledSettings:
    """Which steps a row takes, and their parameters.

    `logits_steps` change the logits by their values alone, in order; `steps` are those after the softmax and
    top-k; `stateful_steps` have a state that each token moves, also in a greedy row, which has no `steps`.
    `kernel_row` is what the GPU kernels are told of the row. `greedy_only` is greedy and nothing else: the
    largest logit is the answer.
    """

    greedy: bool
    top_k: int
    logits_steps: tuple[str, ...]
    steps: frozenset[str]
    stateful_steps: tuple[str, ...]
    params: Mapping[str, float]
    param_row: tuple[float, ...]
    kernel_row: tuple[float, ...]
    kernels_know: bool
    penalty_rule: PenaltyRule | None
    dry_rule: DryRule | None
    xtc_exempt_ids: frozenset[int] | None
    greedy_only: bool


def check_settings(settings: Settings) -> None:
    """Raise InputError, naming the field, for a value that cannot be meant."""
    values = {name: getattr(settings, name) for name in SETTINGS}
    for name, setting in SETTINGS.items():
        _check_setting(setting, values[name])
    for step in STEPS:
        for setting in step.settings:
            violation = setting.active_bounds.describe_violation(values[setting.name])
            if violation is not None and step.is_active(values):
                raise InputError(f"{setting.name} must be {violation}, found {values[setting.name]!r}.")


def compile_settings(settings: Settings) -> CompiledSettings:
    """What some settings amount to, checked; the same object for equal settings."""
    check_settings(settings)
    return _compile(
        tuple([_normalized(setting, getattr(settings, name)) for name, setting in SETTINGS.items()])
    )


@lru_cache(maxsize=1024)
def _compile(ordered: tuple[Any, ...]) -> CompiledSettings:
    values: dict[str, Any] = dict(zip(SETTINGS, ordered, strict=True))
    greedy, active = is_greedy(values), active_steps(values)
    params = step_params(values, active)
    logits_steps = tuple(name for name in STEPS_BY_STAGE["logits"] if name in active - RULE_STEPS)
    stateful_steps = tuple(name for name in STATEFUL_STEPS if name in active)
    steps = active & {*STEPS_BY_STAGE["candidates"], *STEPS_BY_STAGE["draw"]}
    steps = frozenset() if greedy else steps
    penalty_rule = _penalty_rule(values) if "penalties" in active else None
    dry_rule = _dry_rule(values) if "dry" in active else None
    flags = sum(STEP_FLAGS[name] for name in steps & KERNEL_STEPS) + greedy * STEP_FLAGS["greedy"]
    kernel_params = [params[name] for name in KERNEL_PARAMS]
    return CompiledSettings(
        greedy=greedy,
        top_k=0 if greedy else max(0, values["top_k"]),
        logits_steps=logits_steps,
        steps=steps,
        stateful_steps=stateful_steps,
        params=params,
        param_row=tuple(params.values()),
        kernel_row=(*kernel_params, float(flags), float("mirostat" in active)),
        kernels_know=active <= KERNEL_STEPS,
        penalty_rule=penalty_rule,
        dry_rule=dry_rule,
        xtc_exempt_ids=values["xtc_ignore_tokens"],
        greedy_only=greedy and not stateful_steps and penalty_rule is None and dry_rule is None,
    )


def _penalty_rule(values: Mapping[str, Any]) -> PenaltyRule:
    sustain = values["token_repetition_range"]
    return PenaltyRule(
        values["token_repetition_penalty"],
        values["token_frequency_penalty"],
        values["token_presence_penalty"],
        None if sustain < 0 else sustain,
        values["token_repetition_decay"],
    )


def _dry_rule(values: Mapping[str, Any]) -> DryRule:
    return DryRule(
        values["dry_multiplier"],
        values["dry_base"],
        values["dry_allowed_length"],
        values["dry_max_ngram"],
        values["dry_range"],
        values["dry_sequence_breakers"],
    )


def _check_setting(setting: StepSetting, value: Any) -> None:
    if setting.optional and value is None:
        return
    if setting.type is frozenset:
        _check_ids(setting.name, value)
    elif setting.type is float:
        _check_number(
            setting.name,
            value,
            Real,
            "None or a finite number" if setting.optional else "a finite number",
            setting.bounds,
        )
    elif setting.type is int:
        _check_number(setting.name, value, Integral, "a whole number", setting.bounds)


def _check_number(name: str, value: Any, kind: type, expected: str, bounds: Bounds) -> None:
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits:
        raise InputError(f"{name} must be {expected}, found {value!r} ({type(value).__name__}).")
    if not _is_finite(value):
        raise InputError(f"{name} must be {expected}, found {_describe_number(value)}.")
    violation = bounds.describe_violation(value)
    if violation is not None:
        raise InputError(f"{name} must be {violation}, found {value!r}.")


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _describe_number(value: Any) -> str:
    """The number, unless it is a very long one."""
    if not isinstance(value, Integral):
        return repr(value)
    return f"one of {int(value).bit_length()} bits, more than a float holds"


def _check_ids(name: str, value: Any) -> None:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise InputError(f"{name} must be None or a set of token ids, found {value!r}.")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InputError(f"{name} must hold token ids, found {token!r} ({type(token).__name__}).")


def _normalized(setting: StepSetting, value: Any) -> Any:
    if setting.optional and value is None:
        return None
    if setting.type is frozenset:
        return frozenset(int(token) for token in value)
    return setting.type(value)
