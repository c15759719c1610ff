"""`QuantizationConfig`: what the JSON of a GPTQ or AWQ checkpoint says about its tensors.

GPTQ and AWQ use the same tensor names, so only this JSON tells them apart. Layouts that exlm cannot read are
refused by name before any tensor is read. Bits and group sizes are claims, which the readers check against
shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import CheckpointError, ConfigError, shown

CheckpointFormat = Literal["gptq", "gptq_v2", "gemm"]
QuantMethod = Literal["gptq", "awq"]

GPTQ_BITS = (2, 3, 4, 8)
AWQ_BITS = (4,)

_READABLE: dict[str, tuple[CheckpointFormat, ...]] = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}


@dataclass(frozen=True)
class QuantizationConfig:
    """The claims of one checkpoint; None where the JSON makes none and shapes decide."""

    bits: int | None = None
    group_size: int | None = None  # -1: one group for all rows
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: CheckpointFormat = "gptq"
    # GPTQModel subtracted 1 from zero points while they were packed in words: a 0 borrowed from the next zero point.
    zeros_decremented_per_word: bool = False

    @property
    def method(self) -> QuantMethod:
        """The method whose layout this is."""
        return "awq" if self.checkpoint_format == "gemm" else "gptq"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: str) -> QuantizationConfig:
        """From quantize_config.json, or from the quantization_config in config.json.

        `where` names the file in errors: ConfigError for values that make no sense, CheckpointError for
        layouts that cannot be read. Where `dynamic` gives some modules other bits or groups, the shapes
        decide for all.
        """
        method = _method(raw, where)
        layout = _checkpoint_format(raw, method, where)
        allowed = GPTQ_BITS if method == "gptq" else AWQ_BITS
        bits = _bits(raw, allowed, method, where)
        group_size = _group_size(raw, where)
        for pattern, change in _overrides(raw, where):
            place = f"{where}, dynamic {pattern!r}"
            _checkpoint_format({"checkpoint_format": layout, **change}, method, place)
            if _bits(change, allowed, method, place) not in (None, bits):
                bits = None
            if _group_size(change, place) not in (None, group_size):
                group_size = None
        symmetric = not _flag(raw, "zero_point", True, where) if method == "awq" else True
        symmetric = _flag(raw, "sym", symmetric, where)
        return cls(
            bits=bits,
            group_size=group_size,
            desc_act=_flag(raw, "desc_act", False, where),
            sym=symmetric,
            checkpoint_format=layout,
            zeros_decremented_per_word=layout == "gptq" and not symmetric and _written_by_gptqmodel(raw),
        )


def _method(raw: Mapping[str, Any], where: str) -> QuantMethod:
    """The quantisation method; old files leave it out, and AutoAWQ's are recognised by `w_bit`."""
    methods = _names(raw, ("quant_method", "method"), where)
    if not methods:
        return "awq" if "w_bit" in raw else "gptq"
    if methods == {"gptq"}:
        return "gptq"
    if methods == {"awq"}:
        return "awq"
    raise CheckpointError(
        f"{where}: quant_method: expected gptq or awq, found {', '.join(sorted(methods))}, which "
        "stores tensors in another layout. Take a GPTQ, AWQ, EXL2 or GGUF version of the model."
    )


def _written_by_gptqmodel(raw: Mapping[str, Any]) -> bool:
    """Whether `meta.quantizer` (a name with a version, or a list of them) names GPTQModel."""
    meta = raw.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(isinstance(name, str) and name.lower().startswith("gptqmodel") for name in names)


def _checkpoint_format(raw: Mapping[str, Any], method: QuantMethod, where: str) -> CheckpointFormat:
    keys = ("checkpoint_format", "format") + (("version",) if method == "awq" else ())
    layouts = _names(raw, keys, where)
    if _flag(raw, "is_marlin_format", False, where):
        layouts |= {"marlin"}
    word_types = _names(raw, ("pack_dtype",), where) - {"int32"}
    readable = _READABLE[method]
    if len(layouts) > 1 or word_types or not layouts <= set(readable):
        found = " and ".join(sorted(layouts | {f"words of {kind}" for kind in word_types}))
        raise CheckpointError(
            f"{where}: {method} layout: expected {' or '.join(readable)} in words of int32, found {found}. "
            "Take a version of the model saved in one of these layouts."
        )
    return next((layout for layout in readable if layout in layouts), readable[0])


def _overrides(raw: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The changes that `dynamic` makes for some modules; `-:` leaves modules unquantised and is skipped."""
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise _bad_value(where, "dynamic", "an object", dynamic)
    changes = []
    for pattern, change in dynamic.items():
        if str(pattern).startswith("-:"):
            continue
        if not isinstance(change or {}, Mapping):
            raise _bad_value(where, f"dynamic {pattern!r}", "an object", change)
        changes.append((str(pattern), change or {}))
    return changes


def _bits(raw: Mapping[str, Any], allowed: tuple[int, ...], method: QuantMethod, where: str) -> int | None:
    bits = _number(raw, ("bits", "w_bit"), where)
    if bits is not None and bits not in allowed:
        raise CheckpointError(f"{where}: bits: expected {', '.join(map(str, allowed))} for {method}, found {bits}.")
    return bits


def _group_size(raw: Mapping[str, Any], where: str) -> int | None:
    size = _number(raw, ("group_size", "q_group_size"), where)
    if size is not None and size < 1 and size != -1:
        raise _bad_value(where, "group_size", "-1 or a positive number", size)
    return size


def _number(raw: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int | None:
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise _bad_value(where, key, "a whole number", value)
        return value
    return None


def _flag(raw: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _bad_value(where, key, "true or false", value)
    return value


def _names(raw: Mapping[str, Any], keys: tuple[str, ...], where: str) -> set[str]:
    """The values of these keys in lower case; several keys may have the same value."""
    names = set()
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise _bad_value(where, key, "a name", value)
        names.add(ascii(value.lower())[1:-1][:80])  # printable and short, for error messages
    return names


def _bad_value(where: str, key: str, expected: str, found: object) -> ConfigError:
    return ConfigError(f"{where}: {key}: expected {expected}, found {shown(found)}.")
