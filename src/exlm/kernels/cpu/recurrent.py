"""Recurrent mixers as C calls: delta net, Mamba 2 and short convolution, each everything between its projections.

The reference computes states that are not contiguous float32.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ... import spec
from ...errors import Unsupported
from ..interface import (
    AttnMetadata,
    DeltaNetFn,
    DeltaNetParams,
    Mamba2Fn,
    Mamba2Params,
    RecurrentState,
    ShortConvFn,
)
from .bindings import ConvWeights, DeltaNetWeights, Library, Mamba2Weights, RecurrentPass, address

LANES = 16
"""Widths are multiples of this (csrc/simd.h)."""

MAX_CONV_KERNEL = 8
"""Inputs that a convolution may have (csrc/recurrent.h)."""

MAX_KEY_DIM = 256
"""The largest key_dim of a delta net (csrc/delta_net.h)."""


class _Pass:
    """A C call's `RecurrentPass` and the tensors it points to."""

    def __init__(self, rows: int, tokens: int, state: RecurrentState | None, metadata: AttnMetadata) -> None:
        self.struct = RecurrentPass(rows=rows, tokens=tokens)
        slots = metadata.state_slots
        if state is not None and slots is not None:
            self._slots = slots.source.contiguous(), slots.targets.contiguous()
            self.struct.source, self.struct.targets = (slot.data_ptr() for slot in self._slots)
            self.struct.conv, self.struct.matrix = state.conv.data_ptr(), address(state.matrix)

    @property
    def pointer(self) -> int:
        """The struct's address."""
        return ctypes.addressof(self.struct)


def _is_readable_by_c(state: RecurrentState | None) -> bool:
    """Whether C can read and write these states."""
    tensors = [] if state is None else [tensor for tensor in state if tensor is not None]
    return all(tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _float32_contiguous(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _check_widths(**widths: int) -> None:
    for name, width in widths.items():
        if width % LANES:
            raise Unsupported(f"{name} {width} is no multiple of {LANES}")


class _Conv:
    """A convolution's weights as C reads them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        channels, kernel = weight.shape
        if kernel > MAX_CONV_KERNEL:
            raise Unsupported(f"convolutions over at most {MAX_CONV_KERNEL} inputs, not over {kernel}")
        _check_widths(channels=channels)
        # C holds the addresses of these.
        self._tensors = _float32_contiguous(weight.t()), None if bias is None else _float32_contiguous(bias)
        self.struct = ConvWeights(*(address(tensor) for tensor in self._tensors), kernel, channels)


class CpuDeltaNet:
    """Convolution, delta rule, norm and gate of a `spec.DeltaNet`."""

    def __init__(self, library: Library, mixer: spec.DeltaNet, params: DeltaNetParams, fallback: DeltaNetFn) -> None:
        _check_widths(key_dim=mixer.key_dim, value_dim=mixer.value_dim)
        if mixer.key_dim > MAX_KEY_DIM:
            raise Unsupported(f"key_dim {mixer.key_dim} is larger than {MAX_KEY_DIM}")
        self._run, self._fallback, self._conv = library.delta_net, fallback, _Conv(params.conv, None)
        self._tensors = [_float32_contiguous(x) for x in (-params.a_log.float().exp(), params.dt_bias, params.norm)]
        self._weights = DeltaNetWeights(
            self._conv.struct,
            *(tensor.data_ptr() for tensor in self._tensors),
            norm_eps=mixer.norm_eps,
            beta_scale=mixer.beta_scale,
            query_scale=mixer.key_dim**-0.5,
            key_heads=mixer.key_heads,
            value_heads=mixer.value_heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            channel_decay=int(mixer.decay == "channel"),
            sigmoid_gate=int(mixer.gate_act == "sigmoid"),
        )
        self._width = mixer.value_width

    def __call__(
        self, qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, state: RecurrentState | None, metadata: AttnMetadata
    ) -> Tensor:
        """(rows, tokens, …) projections → (rows, tokens, value width)."""
        if not _is_readable_by_c(state):
            return self._fallback(qkv, z, a, b, state, metadata)
        rows, tokens = qkv.shape[:2]
        inputs, call = [_float32_contiguous(x) for x in (qkv, z, a, b)], _Pass(rows, tokens, state, metadata)
        out = torch.empty(rows, tokens, self._width)
        pointers = [x.data_ptr() for x in (*inputs, out)]
        self._run(ctypes.addressof(self._weights), call.pointer, *pointers, torch.get_num_threads())
        return out


class CpuMamba2:
    """Convolution, state-space recurrence, gate and norm of a `spec.Mamba2`."""

    def __init__(self, library: Library, mixer: spec.Mamba2, params: Mamba2Params, fallback: Mamba2Fn) -> None:
        norm = mixer.norm if params.norm is not None else None
        group = mixer.width // mixer.norm_groups
        _check_widths(head_dim=mixer.head_dim, state_dim=mixer.state_dim, **({} if norm is None else {"group": group}))
        self._run, self._fallback, self._conv = library.mamba2, fallback, _Conv(params.conv, params.conv_bias)
        z_scale, *conv_scales, dt_scale = mixer.part_scales
        bc_width = mixer.groups * mixer.state_dim
        widths = (mixer.width, bc_width, bc_width)
        scale = torch.cat([torch.full((n,), value) for n, value in zip(widths, conv_scales, strict=True)])
        self._tensors = (
            None if conv_scales == [1.0] * 3 else scale,
            *(_float32_contiguous(x) for x in (-params.a_log.float().exp(), params.dt_bias, params.d)),
            None if norm is None or params.norm is None else _float32_contiguous(params.norm),
        )
        self._weights = Mamba2Weights(
            self._conv.struct,
            *(address(tensor) for tensor in self._tensors),
            norm_eps=0.0 if norm is None else norm.eps,
            z_scale=z_scale,
            dt_scale=dt_scale,
            dt_min=mixer.dt_limits[0],
            dt_max=mixer.dt_limits[1],
            heads=mixer.heads,
            head_dim=mixer.head_dim,
            groups=mixer.groups,
            state_dim=mixer.state_dim,
            norm_groups=mixer.norm_groups,
            norm_before_gate=int(mixer.norm_before_gate),
        )
        self._width = mixer.width

    def __call__(self, projected: Tensor, state: RecurrentState | None, metadata: AttnMetadata) -> Tensor:
        """The projection to z, x, B, C, dt → (rows, tokens, width)."""
        if not _is_readable_by_c(state):
            return self._fallback(projected, state, metadata)
        rows, tokens = projected.shape[:2]
        projected, call = _float32_contiguous(projected), _Pass(rows, tokens, state, metadata)
        out = torch.empty(rows, tokens, self._width)
        pointers = call.pointer, projected.data_ptr(), out.data_ptr()
        self._run(ctypes.addressof(self._weights), *pointers, torch.get_num_threads())
        return out


class CpuShortConv:
    """The gated short convolution of a `spec.ShortConv`."""

    def __init__(
        self, library: Library, mixer: spec.ShortConv, weight: Tensor, bias: Tensor | None, fallback: ShortConvFn
    ) -> None:
        self._run, self._fallback, self._conv = library.short_conv, fallback, _Conv(weight, bias)
        self._width = mixer.width

    def __call__(self, projected: Tensor, state: RecurrentState | None, metadata: AttnMetadata) -> Tensor:
        """The projection to B, C, x → (rows, tokens, width)."""
        if not _is_readable_by_c(state):
            return self._fallback(projected, state, metadata)
        rows, tokens = projected.shape[:2]
        projected, call = _float32_contiguous(projected), _Pass(rows, tokens, state, metadata)
        out = torch.empty(rows, tokens, self._width)
        pointers = call.pointer, projected.data_ptr(), out.data_ptr()
        self._run(ctypes.addressof(self._conv.struct), *pointers, torch.get_num_threads())
        return out
