"""Rotary settings out of config.json: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from .. import spec
from .hyper import LIMIT, Hyper, is_real

PLAIN = {"default", "none", "mrope"}

UNSCALED = ("rope_theta", "partial_rotary_factor", "mrope_section")
"""What a rotation has whatever stretches it."""

LEAST_TURNS = 1e-9
"""YaRN divides the original length by a number of turns: with a smaller one the quotient is infinite."""

LOCAL = "sliding_attention"
"""The layers that see a window, by the name rotary settings and `layer_types` give them."""


def rope(
    c: Hyper,
    head_dim: int,
    *,
    style: Literal["neox", "gptj"] = "neox",
    theta: float = 10000.0,
    partial: float = 1.0,
    layer_type: str | None = None,
    base_key: str = "rope_theta",
) -> spec.Rope:
    """The rotary settings of one layer type; `theta` and `partial` are the family's defaults.

    `base_key` is where files without a table for each layer type keep this one's base.
    """
    p = Parameters(c, layer_type)
    share = p.real("partial_rotary_factor", partial)
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise c.clash(f"partial_rotary_factor {share} turns {dim} of {head_dim} dimensions; it must be even")
    sections = p.integers("mrope_section")
    if sections and (len(sections) != 3 or sum(sections) * 2 != dim):
        raise c.clash(f"mrope_section {list(sections)} must be three numbers that sum to {dim // 2}")
    base = p.base(c.positive(base_key, "attn_config.rope_theta", default=theta))
    stretched = scaling(p, dim)
    if isinstance(stretched, spec.Yarn) and base == 1:
        raise c.wrong("rope_theta", "another number than 1, at which all dimensions turn alike", base)
    return spec.Rope(theta=base, dim=dim, style=style, scaling=stretched, sections=sections)


def scaling(p: Parameters, dim: int) -> spec.Scaling | None:
    """Which method stretches the frequencies, with its numbers."""
    kind = p.kind
    if kind in PLAIN:
        return None
    if kind == "linear":
        return spec.Linear(p.positive("factor"))
    if kind == "dynamic":
        return spec.Dynamic(p.positive("factor"), p.trained)
    if kind == "llama3":
        return _llama3(p)
    if kind == "yarn":
        return _yarn(p)
    if kind in {"longrope", "su"}:
        return _longrope(p, dim)
    raise p.hyper.wrong(
        "rope_type", "one of default, linear, dynamic, llama3, yarn, longrope, su, mrope", kind
    )


class Parameters:
    """One layer type's rotary settings, whatever the spelling."""

    def __init__(self, c: Hyper, layer_type: str | None) -> None:
        self.hyper = c
        table: Mapping[str, Any] = c.table("rope_parameters")
        shared: Mapping[str, Any] = c.table("rope_scaling")
        nested = layer_type is not None and any(isinstance(v, Mapping) for v in table.values())
        if layer_type == LOCAL:  # one table for all was always that of the layers that see everything
            shared, table = {}, table if nested else {}
        if nested and layer_type is not None:
            own = table.get(layer_type)
            table = own if isinstance(own, Mapping) else {}
        self.table = _joined(table, shared)

    @property
    def kind(self) -> str:
        """The method's name; `rope_type` and the older `type` mean the same."""
        for key in ("rope_type", "type"):
            value = self.table.get(key)
            if value is not None:
                if not isinstance(value, str):
                    raise self.hyper.wrong(key, "a string", value)
                return value
        return "default"

    @property
    def trained(self) -> int:
        """The length the model is described for."""
        return length(self.hyper)

    @property
    def original(self) -> int:
        """The length before any extension; Phi3 keeps it beside, not inside, the rotary settings."""
        key = "original_max_position_embeddings"
        value = self.hyper.get(key) or self.get(key)
        if value is None:
            return self.trained
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < LIMIT:
            raise self.hyper.wrong(key, f"a length from 1 to {LIMIT - 1}", value)
        return int(value)

    def base(self, default: float) -> float:
        """The number whose powers the frequencies are."""
        if self.table.get("rope_theta") is None:
            return default
        theta: float = self.real("rope_theta", default)
        if theta <= 0:
            raise self.hyper.wrong("rope_theta", "a number above 0", theta)
        return theta

    def get(self, key: str) -> Any:
        """As the file has it, or None."""
        return self.table.get(key)

    def real(self, key: str, default: Any) -> Any:
        """A number from the rotary settings, else from the top level, else the default."""
        value = self.table.get(key)
        if value is None:
            return self.hyper.real(key, default=default)
        if not is_real(value):
            raise self.hyper.wrong(key, "a finite number", value)
        return float(value)

    def positive(self, key: str) -> float:
        """A number above zero that must be there."""
        value = self.table.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise self.hyper.wrong(f"rope_scaling.{key}", f"a number above 0 (rope type {self.kind})", value)
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; empty when absent."""
        value = self.table.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise self.hyper.wrong(key, "a list of whole numbers", value)
        return tuple(value)

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        """A list of exactly `count` numbers above zero."""
        value = self.table.get(key)
        good = isinstance(value, list) and all(type(n) in (int, float) and 0 < n < 1e9 for n in value)
        if not good or len(value) != count:  # type: ignore[arg-type]
            raise self.hyper.wrong(f"rope_scaling.{key}", f"a list of {count} numbers above 0", value)
        return tuple(float(n) for n in value)  # type: ignore[union-attr]


def _joined(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` and `rope_scaling` as one.

    Who writes a `rope_scaling` into a file that has the newer table, as the pages of models tell one to for
    long texts, means it: its method takes the place of the other.
    """
    kind = old.get("rope_type") or old.get("type")
    if kind is None:
        return {**old, **new}
    kept = {key: new[key] for key in UNSCALED if key in new}
    return {**kept, **old, "rope_type": kind}


def length(c: Hyper) -> int:
    """The longest sequence the model is described for."""
    return c.size(
        "max_sequence_length",
        "model_max_length",
        "max_position_embeddings",
        "max_seq_len",
        "n_positions",
        default=2048,
    )


def _llama3(p: Parameters) -> spec.Llama3:
    low, high = p.positive("low_freq_factor"), p.positive("high_freq_factor")
    if low >= high:
        raise p.hyper.clash(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return spec.Llama3(p.positive("factor"), low, high, p.original)


def _yarn(p: Parameters) -> spec.Yarn:
    factor = p.positive("factor") if p.get("factor") is not None else p.trained / p.original
    magnitude = p.real("attention_factor", None)
    if magnitude is None:
        over, under = p.real("mscale", None), p.real("mscale_all_dim", None)
        sharpness = spec.Yarn.sharpness
        magnitude = (
            sharpness(factor, over) / sharpness(factor, under) if over and under else sharpness(factor)
        )
    return spec.Yarn(
        factor,
        p.original,
        beta_fast=_turns(p, "beta_fast", 32.0),
        beta_slow=_turns(p, "beta_slow", 1.0),
        magnitude=magnitude,
        truncate=p.get("truncate") is not False,
    )


def _turns(p: Parameters, key: str, default: float) -> float:
    """How often a dimension turns within the original length, where YaRN begins or ends."""
    found: float = p.real(key, None) or default
    if found < LEAST_TURNS:
        raise p.hyper.wrong(key, f"a number above {LEAST_TURNS:g}", found)
    return found


def _longrope(p: Parameters, dim: int) -> spec.LongRope:
    factor = p.real("factor", None) or p.trained / p.original
    magnitude = p.real("attention_factor", None)
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(p.original, 2)))
    short, long = p.reals("short_factor", dim // 2), p.reals("long_factor", dim // 2)
    return spec.LongRope(short, long, p.original, magnitude)
