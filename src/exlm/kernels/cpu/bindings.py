"""From a shared library to functions: the wheel's own, or one that is built at first use and kept.

What the functions compute is not known here, and nothing depends on torch's build.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...errors import KernelError, Unsupported
from ..artifact_cache import (
    CHECKSUM_DIGITS,
    ArtifactCache,
    damage,
    scratch_folder,
    warn_once,
    warn_unwritable,
)
from .compile import BuildError, compile_library, prebuilt, sets_here, source_digest


class FactorTable(ctypes.Structure):
    """Factors of one run, as C sees them; without a table there are none."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "super_scales")),
        *((name, ctypes.c_int32) for name in ("kind", "groups_per_super", "super_groups")),
    )


class Segment(ctypes.Structure):
    """Blocks of one width, as C sees them."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        *((name, FactorTable) for name in ("scales", "minima", "zeros")),
        *((name, ctypes.c_void_p) for name in ("codebook", "spans")),
        *(
            (name, ctypes.c_int32)
            for name in ("bits", "packs", "groups", "zero", "first_k", "span_count", "first_span")
        ),
    )


class Bf12(ctypes.Structure):
    """What codes of twelve bits leave out, as C sees it."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("units", "outlier_begin", "inputs", "values"))


class Matrix(ctypes.Structure):
    """A packed matrix, as C sees it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("segments", "input_of_k", "bias", "bf12")),
        *(
            (name, ctypes.c_int32)
            for name in ("segment_count", "inputs", "outputs", "k_padded", "round_f16", "span_count")
        ),
    )


class AttnParams(ctypes.Structure):
    """What attention must know of a layer, as C sees it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "turned", "pairs", "window")),
        ("scale", ctypes.c_float),
    )


class LinearGroup(ctypes.Structure):
    """Matrices that are multiplied together, as C sees them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first", "second", "third", "norm")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("count", "gated")),
    )


class LayerWeights(ctypes.Structure):
    """The matrices of a layer, as C sees them."""

    _fields_ = tuple((name, LinearGroup) for name in ("qkv", "o", "gate_up", "down"))


class Library:
    """The functions of one loaded library."""

    def __init__(self, instructions: str, path: Path) -> None:
        self.instructions = instructions
        self.prefers_bf12 = instructions in (
            "avx512",
            "avx2",
        )  # where floats of twelve bits were seen to be faster
        self.path = path
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unsupported(f"its library cannot be loaded ({error})") from error
        try:
            self._bind(loaded)
        except AttributeError as error:
            raise Unsupported(f"its library is another one ({error})") from error

    def _bind(self, loaded: ctypes.CDLL) -> None:
        p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
        self.linear = _function(loaded.exlm_linear, p, p, i, p, i)
        self.columns = _function(loaded.exlm_columns, p, p, i, p)
        self.repack_panels = _function(loaded.exlm_repack_panels, p, i, i, i, p, i, p, i)
        self.narrow = _function(loaded.exlm_narrow, p, n, i, p, i)
        self.bf12_plan = _function(loaded.exlm_bf12_plan, p, n, n, p, p, i)
        self.bf12_pack = _function(loaded.exlm_bf12_pack, p, n, n, p, p, i)
        self.rms_norm = _function(loaded.exlm_rms_norm, p, p, p, ctypes.c_float, i, i, p, p, i)
        self.silu_mul = _function(loaded.exlm_silu_mul, p, p, p, n, i)
        self.rope = _function(loaded.exlm_rope, p, p, p, i, i, p, i)
        self.attention = _function(loaded.exlm_attention, ctypes.c_char_p, ctypes.c_int64, i)
        self.attention_q = _function(loaded.exlm_attention_q, ctypes.c_char_p, ctypes.c_int64, i)
        self.fused_linear = _function(loaded.exlm_fused_linear, p, p, p, i, p, p, p, i)
        text = ctypes.c_char_p
        self.decoder_layers = _function(loaded.exlm_decoder_layers, p, text, i, text, p, p, ctypes.c_int64, i)


def _function(found: Any, *types: Any) -> Callable[..., int]:
    """A function that takes these; what it answers is looked at only where it has an answer."""
    found.argtypes = types
    return found  # type: ignore[no-any-return]


def load(folder: Path, instructions: str | None = None) -> Library:
    """The library of a set, by default the best this processor can run.

    It is the wheel's, or one that was compiled before and is intact, or it is compiled now.
    """
    name = instructions or sets_here()[0]
    for path in intact_libraries(name, folder):
        try:
            return Library(name, path)
        except Unsupported as reason:
            warn_once(f"{path} is not used, because {reason}: another one is used or compiled.")
    return _compiled(name, folder)


def intact_libraries(instructions: str, folder: Path) -> Iterator[Path]:
    """The intact libraries of a set: the wheel's, then those that were compiled before."""
    brought = prebuilt(instructions)
    if brought.exists():
        checked = re.search(rf"-[0-9a-f]{{{CHECKSUM_DIGITS}}}$", brought.stem)
        problem = damage(brought) if checked else None
        if problem is None:
            yield brought
        else:
            warn_once(f"{brought} is not used, because {problem}: install exlm again.")
    for kept in ArtifactCache(folder).find(_file(instructions)):
        yield kept.path


def _compiled(instructions: str, folder: Path) -> Library:
    """A new library, kept in the first folder that it can be loaded from."""
    try:
        with scratch_folder() as scratch:
            target = scratch / "library.so"
            compile_library(instructions, target)
            data = target.read_bytes()
    except BuildError as reason:
        raise Unsupported(str(reason)) from reason
    except OSError as error:
        raise Unsupported(f"its library cannot be compiled ({error})") from error
    failures = []
    for place in ArtifactCache(folder).folders():
        try:
            return Library(instructions, place.put(_file(instructions), data))
        except (OSError, Unsupported) as reason:
            warn_unwritable(place, reason)
            failures.append(str(reason))
    raise Unsupported(f"its library cannot be kept ({'; '.join(failures)})")


def _file(instructions: str) -> str:
    return f"cpu-{instructions}-{source_digest(instructions)}.so"


def check(code: int) -> None:
    """Turn a function's answer into an error."""
    if code:
        raise KernelError("The CPU kernels ran out of memory: use a smaller batch or shorter chunks.")
