"""Reads RoPE settings from config.json: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from .. import spec
from .config_reader import MAX_SIZE, ConfigReader, is_finite_number

UNSCALED_TYPES = {"default", "none", "mrope"}

SCALING_INDEPENDENT_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section")
"""Keys of `rope_parameters` that are independent of the scaling method."""

MIN_YARN_BETA = 1e-9
"""YaRN divides the original length by beta; a smaller beta would give infinity."""

SLIDING_ATTENTION = "sliding_attention"
"""The name of windowed layers in `layer_types` and RoPE settings."""


def rope(
    c: ConfigReader,
    head_dim: int,
    *,
    style: Literal["neox", "gptj"] = "neox",
    theta: float = 10000.0,
    rotary_fraction: float = 1.0,
    layer_type: str | None = None,
    theta_key: str = "rope_theta",
) -> spec.Rope:
    """The RoPE of one layer type; `theta` and `rotary_fraction` are the family's defaults.

    `theta_key` is the key of this layer type's theta in files without a table for each type.
    """
    p = RopeParameters(c, layer_type)
    fraction = p.real("partial_rotary_factor", rotary_fraction)
    dim = int(head_dim * fraction)
    if not 0 < dim <= head_dim or dim % 2:
        raise c.inconsistent(
            f"partial_rotary_factor {fraction} rotates {dim} of {head_dim} dimensions; it must be even"
        )
    sections = p.integer_list("mrope_section")
    if sections and (len(sections) != 3 or sum(sections) * 2 != dim):
        raise c.inconsistent(f"mrope_section {list(sections)} must be three numbers that sum to {dim // 2}")
    base = p.theta(c.positive(theta_key, "attn_config.rope_theta", default=theta))
    method = rope_scaling(p, dim)
    if isinstance(method, spec.YarnScaling) and base == 1:
        raise c.invalid_value("rope_theta", "a number other than 1 with YaRN: at 1 all dimensions rotate equally", base)
    return spec.Rope(theta=base, dim=dim, style=style, scaling=method, mrope_sections=sections)


def rope_scaling(p: RopeParameters, dim: int) -> spec.RopeScaling | None:
    """The method of context extension and its numbers; None without one."""
    kind = p.rope_type
    if kind in UNSCALED_TYPES:
        return None
    if kind == "linear":
        return spec.LinearScaling(p.positive("factor"))
    if kind == "dynamic":
        return spec.DynamicNtkScaling(p.positive("factor"), p.max_positions)
    if kind == "llama3":
        return _llama3(p)
    if kind == "yarn":
        return _yarn(p)
    if kind in {"longrope", "su"}:
        return _longrope(p, dim)
    raise p.config.invalid_value(
        "rope_type", "one of default, linear, dynamic, llama3, yarn, longrope, su, mrope", kind
    )


class RopeParameters:
    """The RoPE settings of one layer type, in the older or the newer spelling."""

    def __init__(self, c: ConfigReader, layer_type: str | None) -> None:
        self.config = c
        rope_parameters: Mapping[str, Any] = c.nested("rope_parameters")
        rope_scaling: Mapping[str, Any] = c.nested("rope_scaling")
        nested = layer_type is not None and any(isinstance(v, Mapping) for v in rope_parameters.values())
        # A single table is that of the layers with full attention.
        if layer_type == SLIDING_ATTENTION:
            rope_scaling, rope_parameters = {}, rope_parameters if nested else {}
        if nested and layer_type is not None:
            own = rope_parameters.get(layer_type)
            rope_parameters = own if isinstance(own, Mapping) else {}
        self.table = _merge_tables(rope_parameters, rope_scaling)

    @property
    def rope_type(self) -> str:
        """The method's name; `rope_type` and the older `type` mean the same."""
        for key in ("rope_type", "type"):
            value = self.table.get(key)
            if value is not None:
                if not isinstance(value, str):
                    raise self.config.invalid_value(key, "a string", value)
                return value
        return "default"

    @property
    def max_positions(self) -> int:
        """The context length in config.json."""
        return max_positions(self.config)

    @property
    def original_max_positions(self) -> int:
        """The length before context extension; Phi-3 stores it at the top level of config.json."""
        key = "original_max_position_embeddings"
        value = self.config.get(key) or self.get(key)
        if value is None:
            return self.max_positions
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < MAX_SIZE:
            raise self.config.invalid_value(key, f"a length from 1 to {MAX_SIZE - 1}", value)
        return int(value)

    def theta(self, default: float) -> float:
        """The base of the frequencies."""
        if self.table.get("rope_theta") is None:
            return default
        theta: float = self.real("rope_theta", default)
        if theta <= 0:
            raise self.config.invalid_value("rope_theta", "a number above 0", theta)
        return theta

    def get(self, key: str) -> Any:
        """The value as stored, or None."""
        return self.table.get(key)

    def real(self, key: str, default: Any) -> Any:
        """A number from the RoPE settings, else from the top level, else the default."""
        value = self.table.get(key)
        if value is None:
            return self.config.real(key, default=default)
        if not is_finite_number(value):
            raise self.config.invalid_value(key, "a finite number", value)
        return float(value)

    def positive(self, key: str) -> float:
        """A required number above zero."""
        value = self.table.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise self.config.invalid_value(
                f"rope_scaling.{key}", f"a number above 0 (rope type {self.rope_type})", value
            )
        return float(value)

    def integer_list(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; empty when absent."""
        value = self.table.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise self.config.invalid_value(key, "a list of whole numbers", value)
        return tuple(value)

    def real_list(self, key: str, count: int) -> tuple[float, ...]:
        """A list of exactly `count` numbers above zero."""
        value = self.table.get(key)
        good = isinstance(value, list) and all(type(n) in (int, float) and 0 < n < 1e9 for n in value)
        if not good or len(value) != count:  # type: ignore[arg-type]
            raise self.config.invalid_value(f"rope_scaling.{key}", f"a list of {count} numbers above 0", value)
        return tuple(float(n) for n in value)  # type: ignore[union-attr]


def _merge_tables(rope_parameters: Mapping[str, Any], rope_scaling: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` and `rope_scaling` merged.

    A file with both was edited by its user, as model cards recommend for long texts: the method of
    `rope_scaling` replaces that of `rope_parameters`.
    """
    kind = rope_scaling.get("rope_type") or rope_scaling.get("type")
    if kind is None:
        return {**rope_scaling, **rope_parameters}
    kept = {key: rope_parameters[key] for key in SCALING_INDEPENDENT_KEYS if key in rope_parameters}
    return {**kept, **rope_scaling, "rope_type": kind}


def max_positions(c: ConfigReader) -> int:
    """The context length in config.json."""
    return c.size(
        "max_sequence_length", "model_max_length", "max_position_embeddings", "max_seq_len", "n_positions", default=2048
    )


def _llama3(p: RopeParameters) -> spec.Llama3Scaling:
    low, high = p.positive("low_freq_factor"), p.positive("high_freq_factor")
    if low >= high:
        raise p.config.inconsistent(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return spec.Llama3Scaling(p.positive("factor"), low, high, p.original_max_positions)


def _yarn(p: RopeParameters) -> spec.YarnScaling:
    factor = p.positive("factor") if p.get("factor") is not None else p.max_positions / p.original_max_positions
    attention_factor = p.real("attention_factor", None)
    if attention_factor is None:
        numerator, denominator = p.real("mscale", None), p.real("mscale_all_dim", None)
        mscale = spec.YarnScaling.mscale
        attention_factor = (
            mscale(factor, numerator) / mscale(factor, denominator) if numerator and denominator else mscale(factor)
        )
    return spec.YarnScaling(
        factor,
        p.original_max_positions,
        beta_fast=_yarn_beta(p, "beta_fast", 32.0),
        beta_slow=_yarn_beta(p, "beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=p.get("truncate") is not False,
    )


def _yarn_beta(p: RopeParameters, key: str, default: float) -> float:
    """YaRN's beta_fast or beta_slow: rotations within the original length."""
    found: float = p.real(key, None) or default
    if found < MIN_YARN_BETA:
        raise p.config.invalid_value(key, f"a number above {MIN_YARN_BETA:g}", found)
    return found


def _longrope(p: RopeParameters, dim: int) -> spec.LongRopeScaling:
    factor = p.real("factor", None) or p.max_positions / p.original_max_positions
    attention_factor = p.real("attention_factor", None)
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(p.original_max_positions, 2)))
        )
    short, long = p.real_list("short_factor", dim // 2), p.real_list("long_factor", dim // 2)
    return spec.LongRopeScaling(short, long, p.original_max_positions, attention_factor)
