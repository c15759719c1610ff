"""Plan: what a `Settings` object amounts to, worked out once and checked.

Settings are what a user wrote, in any combination; a plan says which steps those values switch on and with
which numbers. Equal settings share one plan, and a plan never changes: assigning to a setting makes the next
pick use another one. It holds no memory of any text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from ..errors import InputError
from ..kernels.sampling_layout import GREEDY_BELOW_TEMPERATURE
from .dry import DryRule
from .penalties import PenaltyRule

if TYPE_CHECKING:
    from .settings import Settings

StepName = Literal[
    "top_p",
    "top_a",
    "min_p",
    "tfs",
    "typical",
    "mirostat",
    "dynamic_temperature",
    "final_temperature",
    "xtc",
    "skew",
]

FLOAT_FIELDS = (
    "token_repetition_penalty", "token_frequency_penalty", "token_presence_penalty", "temperature",
    "smoothing_factor", "min_temp", "max_temp", "temp_exponent", "top_p", "top_a", "min_p", "tfs", "typical",
    "skew", "mirostat_tau", "mirostat_eta", "dry_base", "dry_multiplier", "xtc_probability", "xtc_threshold",
)  # fmt: skip
INT_FIELDS = (
    "token_repetition_range", "token_repetition_decay", "top_k", "dry_allowed_length", "dry_range",
    "dry_max_ngram",
)  # fmt: skip
MIN_VALUES = {
    "token_repetition_range": -1,
    "token_repetition_decay": 0,
    "smoothing_factor": 0,
    "min_temp": 0,
    "temp_exponent": 0,
    "top_a": 0,
    "dry_multiplier": 0,
    "dry_allowed_length": 0,
    "dry_range": 0,
    "dry_max_ngram": 1,
    "xtc_probability": 0,
    "xtc_threshold": 0,
}
MAX_VALUES = {"xtc_probability": 1, "xtc_threshold": 1}
POSITIVE_FIELDS = ("token_repetition_penalty", "dry_base")
MAX_EXPONENT = 700.0  # beyond, only the most probable token is chosen anyway, and floats end


@dataclass(frozen=True)
class StepParams:
    """The parameters of the steps of one row, each neutral if its step is off."""

    temperature: float = 1.0
    smoothing: float = 0.0
    top_k: float = math.inf
    top_p: float = 2.0
    top_a: float = 0.0
    min_p: float = 0.0
    tfs: float = 1.0
    typical: float = 1.0
    tau: float = 0.0
    eta: float = 0.0
    min_temp: float = 0.0
    max_temp: float = 0.0
    exponent: float = 1.0
    final_temperature: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    skew_power: float = 1.0


@dataclass(frozen=True, eq=False)
class CompiledSettings:
    """Which steps a row takes, and their numbers.

    `steps` are those after the softmax and top-k; a greedy row has none, but its picks too move the target of
    `mirostat`. `row` is `numbers` as a tuple. `bare` is greedy and nothing else: no text, no memory.
    """

    greedy: bool
    top_k: int
    steps: frozenset[StepName]
    mirostat: bool
    params: StepParams
    param_row: tuple[float, ...]
    penalty_rule: PenaltyRule | None
    dry_rule: DryRule | None
    xtc_exempt_ids: frozenset[int] | None
    greedy_only: bool


def check_settings(settings: Settings) -> None:
    """Raise InputError, naming the field, for a value that cannot be meant."""
    for name in FLOAT_FIELDS:
        _check_number(name, getattr(settings, name), Real, "a finite number")
    for name in INT_FIELDS:
        _check_number(name, getattr(settings, name), Integral, "a whole number")
    for name in POSITIVE_FIELDS:
        if getattr(settings, name) <= 0:
            raise InputError(f"{name} must be more than 0, found {getattr(settings, name)!r}.")
    if settings.mirostat and settings.mirostat_tau <= 0:
        raise InputError(f"mirostat_tau must be more than 0, found {settings.mirostat_tau!r}.")
    if settings.cfg_scale is not None:
        _check_number("cfg_scale", settings.cfg_scale, Real, "None or a finite number")
    for name in ("dry_sequence_breakers", "xtc_ignore_tokens"):
        _check_ids(name, getattr(settings, name))


def compile_settings(settings: Settings) -> CompiledSettings:
    """The plan of some settings, checked; the same object for equal settings."""
    check_settings(settings)
    return _compile(
        *(float(getattr(settings, name)) for name in FLOAT_FIELDS),
        *(int(getattr(settings, name)) for name in INT_FIELDS),
        bool(settings.temperature_last),
        bool(settings.mirostat),
        _frozen_ids(settings.dry_sequence_breakers),
        _frozen_ids(settings.xtc_ignore_tokens),
    )


@lru_cache(maxsize=1024)
def _compile(*values: Any) -> CompiledSettings:
    names = (
        *FLOAT_FIELDS,
        *INT_FIELDS,
        "temperature_last",
        "mirostat",
        "dry_sequence_breakers",
        "xtc_ignore_tokens",
    )
    given: dict[str, Any] = dict(zip(names, values, strict=True))
    greedy = given["top_k"] == 1 or given["temperature"] < GREEDY_BELOW_TEMPERATURE
    steps = frozenset() if greedy else _active_steps(given)
    params = _step_params(given, steps)
    penalty_rule, dry_rule = _penalty_rule(given), _dry_rule(given)
    return CompiledSettings(
        greedy=greedy,
        top_k=0 if greedy else max(0, given["top_k"]),
        steps=steps,
        mirostat=given["mirostat"],
        params=params,
        param_row=tuple(vars(params).values()),
        penalty_rule=penalty_rule,
        dry_rule=dry_rule,
        xtc_exempt_ids=given["xtc_ignore_tokens"],
        greedy_only=greedy and not given["mirostat"] and penalty_rule is None and dry_rule is None,
    )


def _active_steps(given: dict[str, Any]) -> frozenset[StepName]:
    is_active: dict[StepName, bool] = {
        "top_p": 0 < given["top_p"] < 1,
        "top_a": given["top_a"] > 0,
        "min_p": 0 < given["min_p"] < 1,
        "tfs": 0 < given["tfs"] < 1,
        "typical": 0 < given["typical"] < 1,
        "mirostat": given["mirostat"],
        "dynamic_temperature": given["max_temp"] > given["min_temp"],
        "xtc": given["xtc_probability"] > 0,
        "skew": given["skew"] != 0,
    }
    # With nothing between the two temperatures, applying it last is the same as applying it first.
    truncates = given["top_k"] > 0 or any(
        is_active[name] for name in ("top_p", "top_a", "min_p", "tfs", "typical")
    )
    last = (
        given["temperature_last"]
        and not is_active["dynamic_temperature"]
        and (truncates or is_active["mirostat"])
    )
    is_active["final_temperature"] = last and given["temperature"] != 1.0
    return frozenset(name for name, active in is_active.items() if active)


def _step_params(given: dict[str, Any], steps: frozenset[StepName]) -> StepParams:
    temperature_deferred = "final_temperature" in steps or (
        given["temperature_last"] and "dynamic_temperature" in steps
    )
    params: dict[str, float] = {
        "temperature": 1.0 if temperature_deferred else given["temperature"],
        "smoothing": given["smoothing_factor"],
        "top_k": given["top_k"] if given["top_k"] > 0 else math.inf,
    }
    for name in ("top_p", "top_a", "min_p", "tfs", "typical"):
        if name in steps:
            params[name] = given[name]
    if given["mirostat"]:
        params |= {"tau": given["mirostat_tau"], "eta": given["mirostat_eta"]}
    if "dynamic_temperature" in steps:
        params |= {name: given[name] for name in ("min_temp", "max_temp")}
        params["exponent"] = given["temp_exponent"]
    if "final_temperature" in steps:
        params["final_temperature"] = given["temperature"]
    if "xtc" in steps:
        params |= {name: given[name] for name in ("xtc_probability", "xtc_threshold")}
    if "skew" in steps:
        params["skew_power"] = math.exp(min(-given["skew"], MAX_EXPONENT))
    return StepParams(**params)


def _penalty_rule(given: dict[str, Any]) -> PenaltyRule | None:
    repetition = given["token_repetition_penalty"]
    frequency, presence = given["token_frequency_penalty"], given["token_presence_penalty"]
    if repetition == 1 and frequency == 0 and presence == 0:
        return None
    sustain = given["token_repetition_range"]
    return PenaltyRule(
        repetition, frequency, presence, None if sustain < 0 else sustain, given["token_repetition_decay"]
    )


def _dry_rule(given: dict[str, Any]) -> DryRule | None:
    if given["dry_multiplier"] <= 0:
        return None
    return DryRule(
        given["dry_multiplier"],
        given["dry_base"],
        given["dry_allowed_length"],
        given["dry_max_ngram"],
        given["dry_range"],
        given["dry_sequence_breakers"],
    )


def _check_number(name: str, value: Any, kind: type, expected: str) -> None:
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits:
        raise InputError(f"{name} must be {expected}, found {value!r} ({type(value).__name__}).")
    if not _is_finite(value):
        raise InputError(f"{name} must be {expected}, found {_describe_number(value)}.")
    minimum, maximum = MIN_VALUES.get(name), MAX_VALUES.get(name)
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise InputError(f"{name} must be {bounds}, found {value!r}.")


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
    if value is None:
        return
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise InputError(f"{name} must be None or a set of token ids, found {value!r}.")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InputError(f"{name} must hold token ids, found {token!r} ({type(token).__name__}).")


def _frozen_ids(value: Any) -> frozenset[int] | None:
    return None if value is None else frozenset(int(token) for token in value)
