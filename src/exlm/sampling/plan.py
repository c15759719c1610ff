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
from .dry import DryRule
from .penalties import PenaltyRule

if TYPE_CHECKING:
    from .settings import Settings

COLDEST = 0.01  # temperatures below mean: take the most probable token
Step = Literal["top_p", "top_a", "min_p", "tfs", "typical", "mirostat", "dynamic", "last", "xtc", "skew"]

REALS = (
    "token_repetition_penalty", "token_frequency_penalty", "token_presence_penalty", "temperature",
    "smoothing_factor", "min_temp", "max_temp", "temp_exponent", "top_p", "top_a", "min_p", "tfs", "typical",
    "skew", "mirostat_tau", "mirostat_eta", "dry_base", "dry_multiplier", "xtc_probability", "xtc_threshold",
)  # fmt: skip
WHOLES = (
    "token_repetition_range", "token_repetition_decay", "top_k", "dry_allowed_length", "dry_range",
    "dry_max_ngram",
)  # fmt: skip
LEAST = {
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
MOST = {"xtc_probability": 1, "xtc_threshold": 1}
ABOVE_ZERO = ("token_repetition_penalty", "dry_base")
LARGEST_EXPONENT = 700.0  # beyond, only the most probable token is chosen anyway, and floats end


@dataclass(frozen=True)
class Numbers:
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
    last: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    skew_power: float = 1.0


@dataclass(frozen=True, eq=False)
class Plan:
    """Which steps a row takes, and their numbers.

    `steps` are those after the softmax and top-k; a greedy row has none, but its picks too move the target of
    `mirostat`. `row` is `numbers` as a tuple. `bare` is greedy and nothing else: no text, no memory.
    """

    greedy: bool
    top_k: int
    steps: frozenset[Step]
    mirostat: bool
    numbers: Numbers
    row: tuple[float, ...]
    penalties: PenaltyRule | None
    dry: DryRule | None
    xtc_ignored: frozenset[int] | None
    bare: bool


def check(settings: Settings) -> None:
    """Raise InputError, naming the field, for a value that cannot be meant."""
    for name in REALS:
        _check_number(name, getattr(settings, name), Real, "a finite number")
    for name in WHOLES:
        _check_number(name, getattr(settings, name), Integral, "a whole number")
    for name in ABOVE_ZERO:
        if getattr(settings, name) <= 0:
            raise InputError(f"{name} must be more than 0, found {getattr(settings, name)!r}.")
    if settings.mirostat and settings.mirostat_tau <= 0:
        raise InputError(f"mirostat_tau must be more than 0, found {settings.mirostat_tau!r}.")
    if settings.cfg_scale is not None:
        _check_number("cfg_scale", settings.cfg_scale, Real, "None or a finite number")
    for name in ("dry_sequence_breakers", "xtc_ignore_tokens"):
        _check_ids(name, getattr(settings, name))


def make_plan(settings: Settings) -> Plan:
    """The plan of some settings, checked; the same object for equal settings."""
    check(settings)
    return _plan(
        *(float(getattr(settings, name)) for name in REALS),
        *(int(getattr(settings, name)) for name in WHOLES),
        bool(settings.temperature_last),
        bool(settings.mirostat),
        _ids(settings.dry_sequence_breakers),
        _ids(settings.xtc_ignore_tokens),
    )


@lru_cache(maxsize=1024)
def _plan(*values: Any) -> Plan:
    names = (*REALS, *WHOLES, "temperature_last", "mirostat", "dry_sequence_breakers", "xtc_ignore_tokens")
    asked: dict[str, Any] = dict(zip(names, values, strict=True))
    greedy = asked["top_k"] == 1 or asked["temperature"] < COLDEST
    steps = frozenset() if greedy else _steps(asked)
    numbers = _numbers(asked, steps)
    penalties, dry = _penalties(asked), _dry(asked)
    return Plan(
        greedy=greedy,
        top_k=0 if greedy else max(0, asked["top_k"]),
        steps=steps,
        mirostat=asked["mirostat"],
        numbers=numbers,
        row=tuple(vars(numbers).values()),
        penalties=penalties,
        dry=dry,
        xtc_ignored=asked["xtc_ignore_tokens"],
        bare=greedy and not asked["mirostat"] and penalties is None and dry is None,
    )


def _steps(asked: dict[str, Any]) -> frozenset[Step]:
    on: dict[Step, bool] = {
        "top_p": 0 < asked["top_p"] < 1,
        "top_a": asked["top_a"] > 0,
        "min_p": 0 < asked["min_p"] < 1,
        "tfs": 0 < asked["tfs"] < 1,
        "typical": 0 < asked["typical"] < 1,
        "mirostat": asked["mirostat"],
        "dynamic": asked["max_temp"] > asked["min_temp"],
        "xtc": asked["xtc_probability"] > 0,
        "skew": asked["skew"] != 0,
    }
    # With nothing between the two temperatures, applying it last is the same as applying it first.
    truncates = asked["top_k"] > 0 or any(on[name] for name in ("top_p", "top_a", "min_p", "tfs", "typical"))
    last = asked["temperature_last"] and not on["dynamic"] and (truncates or on["mirostat"])
    on["last"] = last and asked["temperature"] != 1.0
    return frozenset(name for name, active in on.items() if active)


def _numbers(asked: dict[str, Any], steps: frozenset[Step]) -> Numbers:
    held_back = "last" in steps or (asked["temperature_last"] and "dynamic" in steps)
    given: dict[str, float] = {
        "temperature": 1.0 if held_back else asked["temperature"],
        "smoothing": asked["smoothing_factor"],
        "top_k": asked["top_k"] if asked["top_k"] > 0 else math.inf,
    }
    for name in ("top_p", "top_a", "min_p", "tfs", "typical"):
        if name in steps:
            given[name] = asked[name]
    if asked["mirostat"]:
        given |= {"tau": asked["mirostat_tau"], "eta": asked["mirostat_eta"]}
    if "dynamic" in steps:
        given |= {name: asked[name] for name in ("min_temp", "max_temp")}
        given["exponent"] = asked["temp_exponent"]
    if "last" in steps:
        given["last"] = asked["temperature"]
    if "xtc" in steps:
        given |= {name: asked[name] for name in ("xtc_probability", "xtc_threshold")}
    if "skew" in steps:
        given["skew_power"] = math.exp(min(-asked["skew"], LARGEST_EXPONENT))
    return Numbers(**given)


def _penalties(asked: dict[str, Any]) -> PenaltyRule | None:
    repetition = asked["token_repetition_penalty"]
    frequency, presence = asked["token_frequency_penalty"], asked["token_presence_penalty"]
    if repetition == 1 and frequency == 0 and presence == 0:
        return None
    span = asked["token_repetition_range"]
    return PenaltyRule(
        repetition, frequency, presence, None if span < 0 else span, asked["token_repetition_decay"]
    )


def _dry(asked: dict[str, Any]) -> DryRule | None:
    if asked["dry_multiplier"] <= 0:
        return None
    return DryRule(
        asked["dry_multiplier"],
        asked["dry_base"],
        asked["dry_allowed_length"],
        asked["dry_max_ngram"],
        asked["dry_range"],
        asked["dry_sequence_breakers"],
    )


def _check_number(name: str, value: Any, kind: type, expected: str) -> None:
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits:
        raise InputError(f"{name} must be {expected}, found {value!r} ({type(value).__name__}).")
    if not _is_finite(value):
        raise InputError(f"{name} must be {expected}, found {_shown(value)}.")
    least, most = LEAST.get(name), MOST.get(name)
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} must be {bounds}, found {value!r}.")


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: Any) -> str:
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


def _ids(value: Any) -> frozenset[int] | None:
    return None if value is None else frozenset(int(token) for token in value)
