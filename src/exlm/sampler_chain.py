"""The sampler chain as a table: its steps in order, and the type, bounds and neutral value of every setting.

A step is one entry of `STEPS` and one function in `exlm.sampling.steps`. The checks of `Settings`, the
compiled parameters, the GPU kernels' parameter layout, the HTTP schema, the CLI's `/set` and `--set`, the web
page's panel and the table in docs/sampling.md read this table. It does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Stage = Literal["logits", "softmax", "candidates", "draw"]
"""What a step changes: the logits; which candidates are found, and with which probabilities (softmax, top-k);
the candidates' probabilities; or the random number that draws one of them."""

Values = Mapping[str, Any]
"""The settings by name, checked."""

MAX_INT = 2**31 - 1
MAX_EXPONENT = 700.0  # exp of more overflows; well before that only the most probable token is drawn
GREEDY_BELOW_TEMPERATURE = 0.01  # temperatures below mean: take the most probable token


@dataclass(frozen=True)
class Bounds:
    """The range of a number; with `exclusive`, the minimum itself is not in it."""

    minimum: float | None = None
    maximum: float | None = None
    exclusive: bool = False

    def describe_violation(self, value: float) -> str | None:
        """The condition that a number violates, as text; None if it is in range."""
        low, high = self.minimum, self.maximum
        if self.exclusive and low is not None and value <= low:
            return f"more than {low}"
        if (low is None or value >= low) and (high is None or value <= high):
            return None
        if high is None:
            return f"at least {low}"
        return f"at most {high}" if low is None else f"from {low} to {high}"


UNBOUNDED = Bounds()
FRACTION = Bounds(0, 1)
UP_TO_100 = Bounds(0, 100)
POSITIVE = Bounds(0, exclusive=True)
POSITIVE_UP_TO_100 = Bounds(0, 100, exclusive=True)
COUNT = Bounds(0, MAX_INT)
PLUS_MINUS_1E5 = Bounds(-1e5, 1e5)


@dataclass(frozen=True)
class WebInput:
    """How the web page's panel shows a setting: in the part that is folded at first, if `folded`."""

    label: str
    hint: str
    folded: bool = True


@dataclass(frozen=True)
class StepSetting:
    """One field of `Settings`.

    `neutral` is the value at which the setting changes nothing; None if it only modifies how its step works.
    `active_bounds` hold in addition while the step is active. `api` are the bounds of the HTTP API, which
    also accepts the setting under its `openai_name`, if any, with bounds of its own.
    """

    name: str
    type: type[float] | type[int] | type[bool] | type[frozenset[int]] = float
    neutral: float | None = None
    bounds: Bounds = UNBOUNDED
    api: Bounds = UNBOUNDED
    active_bounds: Bounds = UNBOUNDED
    optional: bool = False
    openai_name: str | None = None
    openai_bounds: Bounds = UNBOUNDED
    web: WebInput | None = None

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers, not switches or sets of token ids."""
        return self.type in (float, int)


@dataclass(frozen=True)
class StepParam:
    """One number that the step's functions read, and its value for rows that do not use the step."""

    name: str
    off: float
    compute: Callable[[Values], float]


def _from_setting(name: str, off: float) -> StepParam:
    """The parameter that equals the setting of the same name."""
    return StepParam(name, off, lambda values: float(values[name]))


@dataclass(frozen=True)
class SamplingStep:
    """One step of the chain: when it is active, and with which parameters.

    `initial_state` makes the step stateful: each job keeps a number for it, which is this function of the
    parameters at first, changes with every sampled token and is rewound with the text. The Triton kernels
    support steps with `in_kernels`; torch samples rows that use any other step.
    """

    name: str
    stage: Stage
    settings: tuple[StepSetting, ...]
    is_active: Callable[[Values], bool]
    params: tuple[StepParam, ...] = ()
    initial_state: Callable[[Mapping[str, float]], float] | None = None
    in_kernels: bool = field(default=False, kw_only=True)


def _between_0_and_1(name: str) -> Callable[[Values], bool]:
    return lambda values: 0 < values[name] < 1


def _has_penalties(values: Values) -> bool:
    return bool(
        values["token_repetition_penalty"] != 1
        or values["token_frequency_penalty"] != 0
        or values["token_presence_penalty"] != 0
    )


def _has_dynamic_temperature(values: Values) -> bool:
    return bool(values["max_temp"] > values["min_temp"])


def _has_final_temperature(values: Values) -> bool:
    """Without a truncation in between, applying the temperature last is the same as applying it first."""
    truncates = any(_STEPS[name].is_active(values) for name in _TRUNCATIONS)
    return bool(
        values["temperature_last"]
        and truncates
        and not _has_dynamic_temperature(values)
        and values["temperature"] != 1.0
    )


def _softmax_temperature(values: Values) -> float:
    """Dynamic temperature that comes last replaces `temperature`; otherwise it comes in addition."""
    deferred = values["temperature_last"] and _has_dynamic_temperature(values)
    return 1.0 if deferred or _has_final_temperature(values) else float(values["temperature"])


STEPS: tuple[SamplingStep, ...] = (
    SamplingStep(
        "guidance",
        "logits",
        (StepSetting("cfg_scale", api=UP_TO_100, optional=True),),
        lambda values: values["cfg_scale"] is not None,
        in_kernels=True,  # the logits are mixed before the kernels read them
    ),
    SamplingStep(
        "penalties",
        "logits",
        (
            StepSetting(
                "token_repetition_penalty",
                neutral=1,
                bounds=POSITIVE,
                api=POSITIVE_UP_TO_100,
                openai_name="repetition_penalty",
                openai_bounds=POSITIVE_UP_TO_100,
                web=WebInput("Repetition penalty", "1 is none", folded=False),
            ),
            StepSetting("token_repetition_range", int, bounds=Bounds(-1), api=Bounds(-1, MAX_INT)),
            StepSetting("token_repetition_decay", int, bounds=Bounds(0), api=COUNT),
            StepSetting(
                "token_frequency_penalty",
                neutral=0,
                api=PLUS_MINUS_1E5,
                openai_name="frequency_penalty",
                openai_bounds=Bounds(-2, 2),
                web=WebInput("Frequency penalty", "0 is none"),
            ),
            StepSetting(
                "token_presence_penalty",
                neutral=0,
                api=PLUS_MINUS_1E5,
                openai_name="presence_penalty",
                openai_bounds=Bounds(-2, 2),
                web=WebInput("Presence penalty", "0 is none"),
            ),
        ),
        _has_penalties,
        (
            _from_setting("token_repetition_penalty", 1.0),
            _from_setting("token_frequency_penalty", 0.0),
            _from_setting("token_presence_penalty", 0.0),
        ),
        in_kernels=True,
    ),
    SamplingStep(
        "dry",
        "logits",
        (
            StepSetting(
                "dry_multiplier", neutral=0, bounds=Bounds(0), api=UP_TO_100, web=WebInput("DRY multiplier", "0 is off")
            ),
            StepSetting("dry_base", bounds=POSITIVE, api=UP_TO_100, web=WebInput("DRY base", "grows with the length")),
            StepSetting(
                "dry_allowed_length", int, bounds=Bounds(0), api=COUNT, web=WebInput("DRY allowed length", "in tokens")
            ),
            StepSetting("dry_range", int, bounds=Bounds(0), api=COUNT),
            StepSetting("dry_max_ngram", int, bounds=Bounds(1), api=Bounds(1, 1024)),
            StepSetting("dry_sequence_breakers", frozenset, optional=True),
        ),
        lambda values: values["dry_multiplier"] > 0,
        (
            _from_setting("dry_multiplier", 0.0),
            _from_setting("dry_base", 1.0),
            _from_setting("dry_allowed_length", 0.0),
            _from_setting("dry_max_ngram", 0.0),
            _from_setting("dry_range", 0.0),
        ),
        in_kernels=True,
    ),
    SamplingStep(
        "top_n_sigma",
        "logits",
        (
            StepSetting(
                "top_n_sigma",
                neutral=0,
                api=Bounds(-1, 100),  # llama.cpp's clients send -1 for off
                web=WebInput("Top n sigma", "0 cuts nothing off"),
            ),
        ),
        lambda values: values["top_n_sigma"] > 0 and not is_greedy(values),
        (_from_setting("top_n_sigma", 0.0),),
    ),
    SamplingStep(
        "softmax",
        "softmax",
        (
            StepSetting(
                "temperature",
                neutral=1,
                api=UP_TO_100,
                web=WebInput("Temperature", "0: the likeliest only", folded=False),
            ),
            StepSetting("temperature_last", bool),
            StepSetting(
                "smoothing_factor", neutral=0, bounds=Bounds(0), api=UP_TO_100, web=WebInput("Smoothing", "0 is none")
            ),
        ),
        lambda values: True,
        (StepParam("temperature", 1.0, _softmax_temperature), _from_setting("smoothing_factor", 0.0)),
        in_kernels=True,
    ),
    SamplingStep(
        "top_k",
        "softmax",
        (
            StepSetting(
                "top_k",
                int,
                neutral=0,
                api=Bounds(-1, MAX_INT),
                web=WebInput("Top K", "0 cuts nothing off", folded=False),
            ),
        ),
        lambda values: values["top_k"] > 0,
        (_from_setting("top_k", math.inf),),
        in_kernels=True,
    ),
    SamplingStep(
        "top_p",
        "candidates",
        (StepSetting("top_p", neutral=1, api=FRACTION, web=WebInput("Top P", "1 cuts nothing off", folded=False)),),
        _between_0_and_1("top_p"),
        (_from_setting("top_p", 2.0),),  # more than any sum of probabilities
        in_kernels=True,
    ),
    SamplingStep(
        "top_a",
        "candidates",
        (StepSetting("top_a", neutral=0, bounds=Bounds(0), api=FRACTION, web=WebInput("Top A", "0 cuts nothing off")),),
        lambda values: values["top_a"] > 0,
        (_from_setting("top_a", 0.0),),
        in_kernels=True,
    ),
    SamplingStep(
        "min_p",
        "candidates",
        (StepSetting("min_p", neutral=0, api=FRACTION, web=WebInput("Min P", "0 cuts nothing off", folded=False)),),
        _between_0_and_1("min_p"),
        (_from_setting("min_p", 0.0),),
        in_kernels=True,
    ),
    SamplingStep(
        "tfs",
        "candidates",
        (StepSetting("tfs", neutral=0, api=FRACTION, web=WebInput("Tail free", "0 or 1 cuts nothing off")),),
        _between_0_and_1("tfs"),
        (_from_setting("tfs", 1.0),),
        in_kernels=True,
    ),
    SamplingStep(
        "typical",
        "candidates",
        (StepSetting("typical", neutral=0, api=FRACTION, web=WebInput("Typical", "0 or 1 cuts nothing off")),),
        _between_0_and_1("typical"),
        (_from_setting("typical", 1.0),),
        in_kernels=True,
    ),
    SamplingStep(
        "mirostat",
        "candidates",
        (
            StepSetting("mirostat", bool, neutral=False),
            StepSetting("mirostat_tau", api=UP_TO_100, active_bounds=POSITIVE),
            StepSetting("mirostat_eta", api=FRACTION),
        ),
        lambda values: bool(values["mirostat"]),
        (_from_setting("mirostat_tau", 0.0), _from_setting("mirostat_eta", 0.0)),
        initial_state=lambda params: 2.0 * params["mirostat_tau"],
        in_kernels=True,
    ),
    SamplingStep(
        "dynamic_temperature",
        "candidates",
        (
            StepSetting("min_temp", bounds=Bounds(0), api=UP_TO_100),
            StepSetting("max_temp", api=UP_TO_100),
            StepSetting("temp_exponent", bounds=Bounds(0), api=UP_TO_100),
        ),
        _has_dynamic_temperature,
        (_from_setting("min_temp", 0.0), _from_setting("max_temp", 0.0), _from_setting("temp_exponent", 1.0)),
        in_kernels=True,
    ),
    SamplingStep(
        "final_temperature",
        "candidates",
        (),  # `temperature`, if `temperature_last`
        _has_final_temperature,
        (StepParam("final_temperature", 1.0, lambda values: float(values["temperature"])),),
        in_kernels=True,
    ),
    SamplingStep(
        "xtc",
        "candidates",
        (
            StepSetting(
                "xtc_probability", neutral=0, bounds=FRACTION, api=FRACTION, web=WebInput("XTC probability", "0 is off")
            ),
            StepSetting(
                "xtc_threshold", bounds=FRACTION, api=FRACTION, web=WebInput("XTC threshold", "what counts as likely")
            ),
            StepSetting("xtc_ignore_tokens", frozenset, optional=True),
        ),
        lambda values: values["xtc_probability"] > 0,
        (_from_setting("xtc_probability", 0.0), _from_setting("xtc_threshold", 0.0)),
        in_kernels=True,
    ),
    SamplingStep(
        "adaptive_p",
        "candidates",
        (
            StepSetting(
                "adaptive_target",
                neutral=-1,
                bounds=Bounds(maximum=1),
                api=Bounds(-1, 1),
                web=WebInput("Adaptive target", "below 0 is off"),
            ),
            StepSetting(
                "adaptive_decay",
                bounds=Bounds(0, 0.99),
                api=Bounds(0, 0.99),
                web=WebInput("Adaptive decay", "nearer to 1 remembers longer"),
            ),
        ),
        lambda values: values["adaptive_target"] >= 0,
        (_from_setting("adaptive_target", -1.0), _from_setting("adaptive_decay", 0.0)),
        initial_state=lambda params: params["adaptive_target"],
    ),
    SamplingStep(
        "skew",
        "draw",
        (StepSetting("skew", neutral=0, api=Bounds(-20, 20)),),
        lambda values: values["skew"] != 0,
        (StepParam("skew_power", 1.0, lambda values: math.exp(min(-values["skew"], MAX_EXPONENT))),),
        in_kernels=True,
    ),
)
"""The chain, in the order in which it is applied. The request's blocked tokens, `token_bias` and the allowed
tokens of filters, which no simple setting describes, also come between `penalties` and `softmax`."""

_STEPS = {step.name: step for step in STEPS}
_ORDER = tuple(_STEPS)
_TRUNCATIONS = _ORDER[_ORDER.index("top_k") : _ORDER.index("dynamic_temperature")]

SETTINGS: Mapping[str, StepSetting] = MappingProxyType(
    {setting.name: setting for step in STEPS for setting in step.settings}
)
"""Every setting of the chain by name, in the order of the chain."""

STEPS_BY_STAGE: Mapping[Stage, tuple[str, ...]] = MappingProxyType(
    {
        stage: tuple(step.name for step in STEPS if step.stage == stage)
        for stage in ("logits", "softmax", "candidates", "draw")
    }
)
STATEFUL_STEPS: Mapping[str, Callable[[Mapping[str, float]], float]] = MappingProxyType(
    {step.name: step.initial_state for step in STEPS if step.initial_state is not None}
)
"""The initial state of each stateful step, as a function of the parameters."""

KERNEL_STEPS = frozenset(step.name for step in STEPS if step.in_kernels)


def settings_of(*steps: str) -> tuple[str, ...]:
    """The names of the settings of some steps."""
    return tuple(setting.name for name in steps for setting in _STEPS[name].settings)


def is_greedy(values: Values) -> bool:
    """Whether the most probable token is taken."""
    return bool(values["top_k"] == 1 or values["temperature"] < GREEDY_BELOW_TEMPERATURE)


def active_steps(values: Values) -> frozenset[str]:
    """The steps that some settings switch on; in a greedy row those on logits, and stateful ones, because its
    tokens change their states."""
    greedy = is_greedy(values)
    return frozenset(
        step.name
        for step in STEPS
        if step.is_active(values) and not (greedy and step.stage != "logits" and step.initial_state is None)
    )


def step_params(values: Values, active: frozenset[str]) -> dict[str, float]:
    """Every parameter of the chain; those of steps that are not active have their `off` value."""
    return {
        param.name: param.compute(values) if step.name in active else param.off
        for step in STEPS
        for param in step.params
    }


PARAM_NAMES = tuple(param.name for step in STEPS for param in step.params)
"""The names of all parameters, in the order of `step_params`."""

KERNEL_PARAMS = tuple(param.name for step in STEPS if step.in_kernels for param in step.params)
"""The names of the parameters that the GPU kernels read."""
