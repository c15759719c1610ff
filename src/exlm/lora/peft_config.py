"""An adapter_config.json as PEFT writes it: what of it decides the numbers, and what of it we refuse.

Which modules an adapter changes is not asked here: its tensors say so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.header import read_small, shown
from ..errors import BadFile, Unsupported

MAX_CONFIG_BYTES = 32 * 2**20

EFFORT = 4_000_000
"""What a table's patterns may cost together: a step each, a hundred times as many for each repetition."""

MERGE_ADVICE = "Merge it into the model with PEFT (merge_and_unload), save that, and load the result."

INITS_CHANGING_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to begin training that also change the model's own weights."""

UNSUPPORTED_OPTIONS = {  # option → what an adapter that uses it does
    "use_dora": "is a DoRA adapter: it rescales the columns of whole matrices",
    "lora_bias": "adds biases",
    "use_qalora": "averages its inputs in groups (QA-LoRA)",
    "layer_replication": "repeats layers of the model",
    "modules_to_save": "replaces whole modules",
    "target_parameters": "changes bare parameters instead of modules",
    "trainable_token_indices": "replaces rows of the embedding",
    "alora_invocation_tokens": "is switched on by tokens of the prompt (activated LoRA)",
    "arrow_config": "chooses between adapters for each token (Arrow)",
    "megatron_config": "is split over machines (Megatron)",
    "ensure_weight_tying": "shares its matrices between embedding and head",
}


@dataclass(frozen=True)
class PeftConfig:
    """The numbers of an adapter_config.json."""

    path: Path
    r: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[re.Pattern[str], int]
    alpha_pattern: Mapping[re.Pattern[str], float]

    @classmethod
    def read(cls, path: Path) -> PeftConfig:
        """A checked configuration; an option that would be ignored is an error."""
        raw = _load(path)
        _check_supported(path, raw)

        def number(name: str, value: object, *, whole: bool) -> Any:
            kind = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e9:
                expected = "a whole number" if whole else "a number"
                raise BadFile(
                    f"{path}: expected {expected} above 0 as {name}, and below 1e9; found {shown(value)}."
                )
            return value

        def table(name: str, *, whole: bool) -> dict[re.Pattern[str], Any]:
            value = raw.get(name) or {}
            if not isinstance(value, dict):
                raise BadFile(f"{path}: expected numbers by module as {name}, found {shown(value)}.")
            if sum(100 ** _repeats(path, name, key) for key in value) > EFFORT:
                raise Unsupported(
                    f"{path}: the {len(value)} patterns in {name} repeat too much to be matched safely: name "
                    "the modules plainly."
                )
            return {
                _compiled(path, name, key): number(f"{name}[{shown(key)}]", one, whole=whole)
                for key, one in value.items()
            }

        return cls(
            path=path,
            r=number("r", raw.get("r"), whole=True),
            alpha=float(number("lora_alpha", raw.get("lora_alpha"), whole=False)),
            rslora=bool(raw.get("use_rslora")),
            rank_pattern=table("rank_pattern", whole=True),
            alpha_pattern=table("alpha_pattern", whole=False),
        )

    def rank(self, module: str) -> int:
        """The rank of a module's change."""
        rank: int = _match_pattern(self.rank_pattern, module, self.r)
        return rank

    @property
    def default_scaling(self) -> float:
        """What changes are multiplied by, but for modules with patterns of their own."""
        return self._factor(self.alpha, self.r)

    def scaling(self, module: str) -> float:
        """What a module's change is multiplied by."""
        return self._factor(_match_pattern(self.alpha_pattern, module, self.alpha), self.rank(module))

    def _factor(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _load(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_small(path, MAX_CONFIG_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(f"{path} is not valid JSON: {error}. Download it again.") from error
    if not isinstance(raw, dict):
        raise BadFile(f"{path}: expected a JSON object, found {shown(raw)}.")
    return raw


def _check_supported(path: Path, raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type", "LORA")
    if str(kind).upper() != "LORA":
        raise Unsupported(
            f"{path}: expected an adapter of peft_type LORA, found {shown(kind)}. {MERGE_ADVICE}"
        )
    for option, what in UNSUPPORTED_OPTIONS.items():
        if raw.get(option):
            raise Unsupported(f"{path}: this adapter {what} ({option}: {shown(raw[option])}). {MERGE_ADVICE}")
    if (bias := raw.get("bias", "none")) != "none":
        raise Unsupported(
            f'{path}: expected bias "none", found {shown(bias)}: it trained biases. {MERGE_ADVICE}'
        )
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(INITS_CHANGING_BASE):
        raise Unsupported(
            f"{path}: init_lora_weights {shown(start)} also changed the model's own weights. Convert the "
            "adapter with PEFT: save_pretrained(…, path_initial_model_for_weight_conversion=…)."
        )


def _repeats(path: Path, name: str, pattern: str) -> int:
    """How often a pattern from a stranger repeats something; refuses one that could run for ever."""
    loops = len(re.findall(r"[*+?{]", pattern))
    if loops > 3 or re.search(r"\)[*+?{]", pattern) or len(pattern) > 500:
        raise Unsupported(
            f"{path}: the pattern {shown(pattern)} in {name} repeats too much to be matched safely: name "
            "the modules plainly."
        )
    return loops


def _compiled(path: Path, name: str, pattern: str) -> re.Pattern[str]:
    """A pattern that must be the whole name of a module, or the end of it."""
    try:
        re.compile(pattern)  # by itself: "a)|(b" is none, and would be one between brackets
        return re.compile(rf"(?:.*\.)?(?:{pattern})")
    except (re.error, OverflowError, RecursionError) as error:
        raise BadFile(f"{path}: {shown(pattern)} in {name} is no regular expression ({error}).") from error


def _match_pattern(patterns: Mapping[re.Pattern[str], Any], module: str, default: Any) -> Any:
    """The value of the first pattern that is the module's name or the end of it."""
    for pattern, value in patterns.items():
        if pattern.fullmatch(module):
            return value
    return default
