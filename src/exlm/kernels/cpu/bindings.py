"""The C library through ctypes: its structs and functions, and where it comes from.

The library is the wheel's own, or one that is compiled at first use and kept in the cache folder. It is
refused if its structs have other sizes than those here. Nothing depends on torch's build.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import KernelError, Unsupported
from ..artifact_cache import CHECKSUM_DIGITS, ArtifactCache, damage, scratch_folder, warn_once, warn_unwritable
from .compile import BuildError, compile_library, prebuilt, sets_here, source_digest

C_DTYPES = {torch.float16: 1, torch.float32: 2, torch.uint8: 3, torch.int8: 4, torch.bfloat16: 5}
BF12_DTYPE = 6
"""The values of FactorTable.dtype (csrc/matrix.h); 0: there is no table."""


def _fields(ctype: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctype) for name in names.split())


# The structs of csrc, field by field, which its headers describe.


class FactorTable(ctypes.Structure):
    """Scales, minima or zero points of a segment."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "table super_scales"),
        *_fields(ctypes.c_int32, "dtype groups_per_super super_groups"),
    )


class GroupSpan(ctypes.Structure):
    """Neighbouring kblocks of one group; repack.py writes an array of them as (spans, 3) int32."""

    _fields_ = _fields(ctypes.c_int32, "kblock kblocks group")


class Segment(ctypes.Structure):
    """Inputs of one bit width."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        *_fields(FactorTable, "scales minima zeros"),
        *_fields(ctypes.c_void_p, "codebook spans"),
        *_fields(ctypes.c_int32, "bits packs groups zero first_k span_count first_span"),
    )


class Bf12(ctypes.Structure):
    """The parts of a BF12 matrix besides its codes."""

    _fields_ = _fields(ctypes.c_void_p, "units outlier_begin inputs values")


class Matrix(ctypes.Structure):
    """A weight matrix."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "segments input_of_k bias bf12"),
        *_fields(ctypes.c_int32, "segment_count inputs outputs k_padded round_f16 span_count act_bytes"),
    )


class FusedMatrices(ctypes.Structure):
    """Matrices that share an input, with a norm before and a gate after them."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "first second third norm"),
        ("eps", ctypes.c_float),
        *_fields(ctypes.c_int32, "count gated"),
    )


class AttnParams(ctypes.Structure):
    """The attention of a layer."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "cos sin"),
        *_fields(ctypes.c_int32, "heads kv_heads head_dim rope_dim interleaved window"),
        ("scale", ctypes.c_float),
    )


class QuantKV(ctypes.Structure):
    """Pages of quantised keys or values; bits 0: there are none."""

    _fields_ = (*_fields(ctypes.c_void_p, "codes scales"), ("bits", ctypes.c_int64))


class AttnArgs(ctypes.Structure):
    """One call of attention."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "params q k v keys values"),
        *_fields(QuantKV, "quant_keys quant_values"),
        *_fields(ctypes.c_void_p, "pages past_lens positions out"),
        ("hadamard_interleave", ctypes.c_int64),
        *_fields(ctypes.c_int32, "rows tokens page_size page_stride kv_f16"),
    )


class LayerWeights(ctypes.Structure):
    """The matrices of a decoder layer."""

    _fields_ = _fields(FusedMatrices, "qkv o gate_up down")


class BatchArgs(ctypes.Structure):
    """The rows of a step, the same for all layers."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "pages past_lens positions"),
        *_fields(ctypes.c_int32, "rows tokens page_stride"),
    )


class RecurrentPass(ctypes.Structure):
    """New tokens of some rows, and a layer's recurrent states."""

    _fields_ = (*_fields(ctypes.c_void_p, "source targets conv matrix"), *_fields(ctypes.c_int32, "rows tokens"))


class ConvWeights(ctypes.Structure):
    """A causal convolution."""

    _fields_ = (*_fields(ctypes.c_void_p, "weight bias"), *_fields(ctypes.c_int32, "kernel channels"))


class DeltaNetWeights(ctypes.Structure):
    """What a delta net has besides its matrices."""

    _fields_ = (
        ("conv", ConvWeights),
        *_fields(ctypes.c_void_p, "neg_a dt_bias norm"),
        *_fields(ctypes.c_float, "norm_eps beta_scale query_scale"),
        *_fields(ctypes.c_int32, "key_heads value_heads key_dim value_dim channel_decay sigmoid_gate"),
    )


class Mamba2Weights(ctypes.Structure):
    """What a Mamba 2 mixer has besides its matrices."""

    _fields_ = (
        ("conv", ConvWeights),
        *_fields(ctypes.c_void_p, "conv_scale neg_a dt_bias d norm"),
        *_fields(ctypes.c_float, "norm_eps z_scale dt_scale dt_min dt_max"),
        *_fields(ctypes.c_int32, "heads head_dim groups state_dim norm_groups norm_before_gate"),
    )


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    FactorTable,
    GroupSpan,
    Segment,
    Bf12,
    Matrix,
    FusedMatrices,
    AttnParams,
    QuantKV,
    AttnArgs,
    LayerWeights,
    BatchArgs,
    RecurrentPass,
    ConvWeights,
    DeltaNetWeights,
    Mamba2Weights,
)


class Library:
    """The functions of one loaded library, `exlm_linear` as `linear` and so on."""

    def __init__(self, instructions: str, path: Path) -> None:
        self.instructions = instructions
        self.prefers_bf12 = instructions in ("avx512", "avx2")  # measured: BF12 is faster than 16 bits there
        self.path = path
        try:
            self._bind(ctypes.CDLL(str(path)))
        except OSError as error:
            raise Unsupported(f"its library cannot be loaded ({error})") from error
        except AttributeError as error:
            raise Unsupported(f"its library lacks a function of this version ({error})") from error

    def _bind(self, loaded: ctypes.CDLL) -> None:
        p, i, n, i64, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_int64, ctypes.c_float
        _check_sizes(_typed(loaded.exlm_sizeof, ctypes.c_char_p))
        self.repack_panels = _typed(loaded.exlm_repack_panels, p, i, i, i, p, i, p, i)
        self.cast_16bit = _typed(loaded.exlm_cast_16bit, p, n, i, p, i)
        self.bf12_plan = _typed(loaded.exlm_bf12_plan, p, n, n, p, p, i)
        self.bf12_pack = _typed(loaded.exlm_bf12_pack, p, n, n, p, p, i)
        self.dequantize_columns = _typed(loaded.exlm_dequantize_columns, p, p, i, p)
        self.rms_norm = _typed(loaded.exlm_rms_norm, p, p, p, f, i, i, p, p, i)
        self.silu_mul = _typed(loaded.exlm_silu_mul, p, p, p, n, i)
        self.rope = _typed(loaded.exlm_rope, p, p, p, i, i, p, i)
        self.short_conv = _typed(loaded.exlm_short_conv, p, p, p, p, i)
        self.delta_net = _allocating(loaded.exlm_delta_net, p, p, p, p, p, p, p, i)
        self.mamba2 = _allocating(loaded.exlm_mamba2, p, p, p, p, i)
        self.int8_peak = _typed(loaded.exlm_int8_peak, i, i)
        self.linear = _allocating(loaded.exlm_linear, p, p, i, p, i)
        self.fused_linear = _allocating(loaded.exlm_fused_linear, p, p, p, i, p, p, p, i)
        self.attention = _allocating(loaded.exlm_attention, p, i64, i)
        self.decoder_layers = _allocating(loaded.exlm_decoder_layers, p, p, i, p, p, p, i64, i)


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's memory; None, which is NULL in C, if there is no tensor."""
    return None if tensor is None else tensor.data_ptr()


def _check_sizes(sizeof: Callable[..., int]) -> None:
    """Refuse a library whose structs have other sizes than those here."""
    for struct in STRUCTS:
        size = sizeof(struct.__name__.encode())
        if size != ctypes.sizeof(struct):
            raise Unsupported(
                f"its library has {size} bytes for {struct.__name__}, this version {ctypes.sizeof(struct)}"
            )


def _typed(function: Any, *types: Any) -> Callable[..., int]:
    """The function with its argument types; a void function's result has no meaning."""
    function.argtypes = types
    return function  # type: ignore[no-any-return]


def _allocating(function: Any, *types: Any) -> Callable[..., int]:
    """A function that returns 1 if malloc fails, which becomes a KernelError."""
    function.errcheck = _check_memory
    return _typed(function, *types)


def _check_memory(failed: int, *_: Any) -> int:
    if failed:
        raise KernelError("The CPU kernels ran out of memory: use a smaller batch or shorter chunks.")
    return failed


def load(folder: Path, instructions: str | None = None) -> Library:
    """The library of an instruction set, by default the best this processor can run.

    It is the wheel's, or one that was compiled before and is intact, or it is compiled now.
    """
    name = instructions or sets_here()[0]
    for path in intact_libraries(name, folder):
        try:
            return Library(name, path)
        except Unsupported as reason:
            warn_once(f"{path} is not used, because {reason}: another one is used or compiled.")
    return _compile_and_keep(name, folder)


def intact_libraries(instructions: str, folder: Path) -> Iterator[Path]:
    """The intact libraries of an instruction set: the wheel's, then those that were compiled before."""
    shipped = prebuilt(instructions)
    if shipped.exists():
        has_checksum = re.search(rf"-[0-9a-f]{{{CHECKSUM_DIGITS}}}$", shipped.stem)
        problem = damage(shipped) if has_checksum else None
        if problem is None:
            yield shipped
        else:
            warn_once(f"{shipped} is not used, because {problem}: install exlm again.")
    for artifact in ArtifactCache(folder).find(_artifact_name(instructions)):
        yield artifact.path


def _compile_and_keep(instructions: str, folder: Path) -> Library:
    """Compile a library and keep it in the first folder that it can be loaded from."""
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
    for cache_folder in ArtifactCache(folder).folders():
        try:
            return Library(instructions, cache_folder.put(_artifact_name(instructions), data))
        except (OSError, Unsupported) as reason:
            warn_unwritable(cache_folder, reason)
            failures.append(str(reason))
    raise Unsupported(f"its library cannot be kept ({'; '.join(failures)})")


def _artifact_name(instructions: str) -> str:
    return f"cpu-{instructions}-{source_digest(instructions)}.so"
