"""`Settings`: how a user wants tokens sampled; checked, and compiled into `CompiledSettings`.

The fields, their order and their defaults are those of exllamav2's `ExLlamaV2Sampler.Settings`; fields that
exllamav2 does not have come last. As there, they may be changed at any time, also while a job runs. Unlike
there an object may be shared by any number of jobs: the sampler writes nothing into it. A misspelt field is
an error, because its effect would be missed silently; a name that resembles no field is kept, with a warning.
`exlm.sampler_chain` defines what the values of a field mean and which ones are valid.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import InputError, report_unknown_attribute
from ..kernels.sampling_layout import STEP_FLAGS
from ..sampler_chain import (
    KERNEL_PARAMS,
    KERNEL_STEPS,
    SETTINGS,
    STATEFUL_STEPS,
    STEPS,
    STEPS_BY_STAGE,
    StepSetting,
    active_steps,
    is_greedy,
    settings_of,
    step_params,
)
from .penalties import DryRule, PenaltyRule


class VersionStamps:
    """Makes version stamps: objects that are equal to no other, one for every change."""

    def __init__(self) -> None:
        self.latest: object = None
        """The newest stamp: if it is the same, no settings, request or state of the process has changed."""
        self.latest_mask_change: object = None
        """A new one whenever any row got or lost a mask."""

    def new_stamp(self) -> object:
        """The stamp of a change that is being made."""
        self.latest = stamp = object()
        return stamp


VERSION_STAMPS = VersionStamps()


VOCAB_MULTIPLE = 32  # exllamav2 padded vocabularies to a multiple of this; a bias made here is as long

GREEDY_CLONE_FIELDS = settings_of("penalties", "dry", "xtc")


class PieceLookup(Protocol):
    """The part of a tokenizer that settings need: how many ids there are, and which id a piece has."""

    def get_vocab_size(self) -> int:
        """One more than the highest id."""

    def single_id(self, piece: str) -> int | None:
        """The id of a piece; None if there is none."""


@dataclass(eq=False)
class Settings:
    """How tokens are chosen. The defaults are those of the old library, and not neutral.

    Off values: penalties 1 and 0, `temperature` 1 (below 0.01 means greedy), `top_k` 0; `top_p`, `min_p`,
    `tfs` and `typical` 0 or 1; `top_a`, `top_n_sigma`, `smoothing_factor`, `skew`, `dry_multiplier`,
    `xtc_probability` 0; dynamic temperature when `max_temp` ≤ `min_temp`; it comes in addition to
    `temperature` unless `temperature_last`.

    `adaptive_target` is off below 0.

    `token_bias` (vocab,) is added to the logits. `cfg_scale` is for jobs with two prompts. Sequence breakers
    and ignored tokens are sets of ids, None for those of the tokenizer. `mirostat_mu` is read and written
    only by the direct call `Sampler.sample`; a job keeps its own. `ngram_*` are accepted for old scripts and
    unused.
    """

    token_repetition_penalty: float = 1.025
    token_repetition_range: int = -1
    token_repetition_decay: int = 0
    token_frequency_penalty: float = 0.0
    token_presence_penalty: float = 0.0
    temperature: float = 0.8
    smoothing_factor: float = 0.0
    min_temp: float = 0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    top_k: int = 50
    top_p: float = 0.8
    top_a: float = 0.0
    min_p: float = 0
    tfs: float = 0
    typical: float = 0
    skew: float = 0
    temperature_last: bool = False
    mirostat: bool = False
    mirostat_tau: float = 1.5
    mirostat_eta: float = 0.1
    mirostat_mu: list[float] | None = None
    token_bias: Tensor | None = None
    cfg_scale: float | None = None
    post_sampling_hooks: list[Callable[..., None]] = field(default_factory=list)
    dry_allowed_length: int = 2
    dry_base: float = 1.75
    dry_multiplier: float = 0.0
    dry_sequence_breakers: Collection[int] | None = None
    dry_range: int = 0
    dry_max_ngram: int = 20
    ngram_trie: dict[int, Any] | None = None
    ngram_index: int = 0
    ngram_history: deque[int] = field(default_factory=deque)
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_ignore_tokens: Collection[int] | None = None
    top_n_sigma: float = 0.0
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    filters: list[Any] | None = field(default=None, init=False, repr=False)
    filter_prefer_eos: bool = field(default=False, init=False, repr=False)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field; it counts from the next token on."""
        if name not in self.__dataclass_fields__ and name not in self.__dict__:  # a subclass may have its own
            report_unknown_attribute("Settings has no field", name, SETTING_NAMES, IGNORED_FIELDS)
        self.__dict__[name] = value
        self.__dict__["_compiled"] = None
        self.__dict__["_version_stamp"] = VERSION_STAMPS.new_stamp()

    @property
    def version_stamp(self) -> object:
        """Another one whenever a field was assigned."""
        return self.__dict__["_version_stamp"]

    @staticmethod
    def greedy(**kwargs: Any) -> Settings:
        """Settings that take the most probable token, with fields changed as given."""
        return Settings(**{"temperature": 1.0, "token_repetition_penalty": 1.0, "top_p": 0.0, "top_k": 1} | kwargs)

    def clone(self) -> Settings:
        """A copy whose fields may be changed without changing these."""
        cloned = copy.copy(self)
        cloned.post_sampling_hooks = list(self.post_sampling_hooks or ())
        cloned.ngram_history = deque(self.ngram_history)
        cloned.mirostat_mu = None if self.mirostat_mu is None else list(self.mirostat_mu)
        return cloned

    def greedy_clone(self) -> Settings:
        """Greedy settings with these penalties, DRY and XTC; without token bias and guidance. For drafts."""
        kept = {name: getattr(self, name) for name in GREEDY_CLONE_FIELDS}
        return Settings(top_k=1, top_p=0.0, **kept)

    def check(self) -> None:
        """Raise InputError, naming the field, for a value that is not valid."""
        values = {name: getattr(self, name) for name in SETTINGS}
        for name, setting in SETTINGS.items():
            _check_setting(setting, values[name])
        for step in STEPS:
            for setting in step.settings:
                violation = setting.active_bounds.describe_violation(values[setting.name])
                if violation is not None and step.is_active(values):
                    raise InputError(f"{setting.name} must be {violation}, found {values[setting.name]!r}.")
        bias = self.token_bias
        if bias is not None and (not isinstance(bias, Tensor) or bias.dim() != 1):
            shape = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
            raise InputError(f"token_bias must be None or a tensor of shape (vocab,), found {shape}.")
        if bias is not None and (bias.is_complex() or bias.is_meta or bias.layout is not torch.strided):
            raise InputError(
                f"token_bias must hold a real number for each token, found {bias.dtype} ({bias.layout}, {bias.device})."
            )
        hooks = self.post_sampling_hooks or ()  # old scripts write None for none
        if not isinstance(hooks, Collection) or not all(map(callable, hooks)):
            raise InputError(f"post_sampling_hooks must be a list of functions, found {hooks!r:.80}.")

    def compiled(self) -> CompiledSettings:
        """These settings compiled; compiled again only after a field was assigned."""
        compiled: CompiledSettings | None = self.__dict__["_compiled"]
        if compiled is None:
            self.check()
            normalized = [_normalized(setting, getattr(self, name)) for name, setting in SETTINGS.items()]
            compiled = self.__dict__["_compiled"] = _compile(tuple(normalized))
        return compiled

    def disallow_tokens(self, tokenizer: PieceLookup, tokens: Iterable[int | str]) -> None:
        """Never sample these tokens: ids, or pieces that are a single token."""
        ids = _resolve_ids(tokenizer, tokens, "disallow_tokens")
        bias = self._bias_copy(tokenizer, 0.0)
        bias[ids] = -torch.inf
        self.token_bias = bias

    def allow_tokens(self, tokenizer: PieceLookup, tokens: Iterable[int | str]) -> None:
        """Sample only these tokens; if there is a bias already, stop excluding them and change no others."""
        ids = _resolve_ids(tokenizer, tokens, "allow_tokens")
        bias = self._bias_copy(tokenizer, -torch.inf)
        bias[ids] = 0.0
        self.token_bias = bias

    def _bias_copy(self, tokenizer: PieceLookup, default: float) -> Tensor:
        """A bias to change: a copy, because clones share the one that is there."""
        size, vocab_size = _vocab_size(tokenizer), tokenizer.get_vocab_size()
        if self.token_bias is not None:
            if len(self.token_bias) < vocab_size:
                raise InputError(f"token_bias has {len(self.token_bias)} entries, the vocabulary {vocab_size}.")
            padding = self.token_bias.new_zeros(max(0, size - len(self.token_bias)))
            return torch.cat((self.token_bias, padding))
        return torch.full((-(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,), default)


SETTING_NAMES = tuple(item.name for item in dataclasses.fields(Settings))
IGNORED_FIELDS = ("token_repetition_penalty_max",)  # a field of exllama, the library before exllamav2


def _vocab_size(tokenizer: PieceLookup) -> int:
    """How many ids the model has, which may be more than the tokenizer has pieces for."""
    config_size = getattr(getattr(tokenizer, "config", None), "vocab_size", None)
    return max(tokenizer.get_vocab_size(), config_size or 0)


def _resolve_ids(tokenizer: PieceLookup, tokens: Iterable[int | str], method_name: str) -> list[int]:
    ids, size = [], _vocab_size(tokenizer)
    for token in tokens:
        token_id: object = tokenizer.single_id(token) if isinstance(token, str) else token
        if token_id is None and isinstance(token, str):
            raise InputError(f"{method_name}: no single token is {token!r}; encode it and name its ids instead.")
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise InputError(
                f"Incorrect type in {method_name} list: expected ids or strings, found {token!r} "
                f"({type(token).__name__})."
            )
        number = token_id.__index__()
        if not 0 <= number < size:
            raise InputError(f"{method_name}: the vocabulary has ids 0 to {size - 1}, found {number}.")
        ids.append(number)
    return ids


REQUEST_STEPS = frozenset({"guidance", "penalties", "dry"})
"""Steps on the logits that depend on more than the logits of the row; `logits_processors` has them."""


@dataclass(frozen=True, eq=False)
class CompiledSettings:
    """Which steps a row takes, and their parameters.

    They follow from the values of `Settings` and from nothing else. Equal settings share one object, and it
    never changes: after an assignment the next token uses another one.

    `logits_steps` change the logits by their values alone, in order; `probs_steps` come after the softmax and
    top-k, and change the candidates' probabilities or the draw; `stateful_steps` have a state that each token
    changes, also in a greedy row, which has no `probs_steps`.
    `params` are the parameters of all steps, `param_row` their values. `kernel_row` are those of the GPU kernels,
    which can sample the row if `kernels_support`.
    With `reads_history` the tokens of the text matter. `greedy_only` settings take the largest logit and use no
    other step.
    """

    greedy: bool
    top_k: int
    logits_steps: tuple[str, ...]
    probs_steps: frozenset[str]
    stateful_steps: tuple[str, ...]
    params: Mapping[str, float]
    param_row: tuple[float, ...]
    kernel_row: tuple[float, ...]
    kernels_support: bool
    penalty_rule: PenaltyRule | None
    dry_rule: DryRule | None
    xtc_exempt_ids: frozenset[int] | None
    reads_history: bool
    greedy_only: bool


@lru_cache(maxsize=1024)
def _compile(ordered: tuple[Any, ...]) -> CompiledSettings:
    values: dict[str, Any] = dict(zip(SETTINGS, ordered, strict=True))
    greedy, active = is_greedy(values), active_steps(values)
    reads_history = not active.isdisjoint(("penalties", "dry"))
    params = step_params(values, active)
    logits_steps = tuple(name for name in STEPS_BY_STAGE["logits"] if name in active - REQUEST_STEPS)
    stateful_steps = tuple(name for name in STATEFUL_STEPS if name in active)
    probs_steps = frozenset() if greedy else active & {*STEPS_BY_STAGE["candidates"], *STEPS_BY_STAGE["draw"]}
    penalty_rule = dry_rule = None
    if "penalties" in active:
        sustain = values["token_repetition_range"]
        penalty_rule = PenaltyRule(
            repetition=values["token_repetition_penalty"],
            frequency=values["token_frequency_penalty"],
            presence=values["token_presence_penalty"],
            sustain=None if sustain < 0 else sustain,
            decay=values["token_repetition_decay"],
        )
    if "dry" in active:
        dry_rule = DryRule(
            multiplier=values["dry_multiplier"],
            base=values["dry_base"],
            allowed_length=values["dry_allowed_length"],
            max_match_length=values["dry_max_ngram"],
            search_range=values["dry_range"],
            breaker_ids=values["dry_sequence_breakers"],
        )
    flags = sum(STEP_FLAGS[name] for name in probs_steps & KERNEL_STEPS) + greedy * STEP_FLAGS["greedy"]
    kernel_params = [params[name] for name in KERNEL_PARAMS]
    return CompiledSettings(
        greedy=greedy,
        top_k=0 if greedy else max(0, values["top_k"]),
        logits_steps=logits_steps,
        probs_steps=probs_steps,
        stateful_steps=stateful_steps,
        params=params,
        param_row=tuple(params.values()),
        kernel_row=(*kernel_params, float(flags), float("mirostat" in active)),
        kernels_support=active <= KERNEL_STEPS,
        penalty_rule=penalty_rule,
        dry_rule=dry_rule,
        xtc_exempt_ids=values["xtc_ignore_tokens"],
        reads_history=reads_history,
        greedy_only=greedy and not stateful_steps and not reads_history,
    )


def _check_setting(setting: StepSetting, value: Any) -> None:
    if setting.optional and value is None:
        return
    if setting.type is frozenset:
        _check_ids(setting.name, value)
    elif setting.type is float:
        expected = "None or a finite number" if setting.optional else "a finite number"
        _check_number(setting, value, Real, expected)
    elif setting.type is int:
        _check_number(setting, value, Integral, "a whole number")


def _check_number(setting: StepSetting, value: Any, kind: type, expected: str) -> None:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number:
        raise InputError(f"{setting.name} must be {expected}, found {value!r} ({type(value).__name__}).")
    found = repr(value)
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        is_finite, found = False, f"one of {int(value).bit_length()} bits, more than a float holds"
    if not is_finite:
        raise InputError(f"{setting.name} must be {expected}, found {found}.")
    violation = setting.bounds.describe_violation(value)
    if violation is not None:
        raise InputError(f"{setting.name} must be {violation}, found {value!r}.")


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
