"""Recurrent mixers in CUDA C++: gated delta net and KDA (delta_net.cu), Mamba 2 (mamba2.cu), short_conv.cu.

Up to MAX_STEP_TOKENS tokens of each row are one launch. More are three (inputs, scan, outputs) with a workspace in
float32 between them; the scan walks through the tokens one after the other. Both sum in the same order, so a state and
an output do not depend on how tokens were divided into passes. Launches
depend on the numbers of rows and tokens alone, and slots are read on the device, so that CUDA graphs can capture them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from ... import spec
from ...errors import KernelError, Unsupported
from .. import interface as b
from .attention import SplitCounters
from .gemm_m16 import balance_occupancy
from .module_cache import ModuleSource, sizeof_defines

CSRC = Path(__file__).with_name("csrc")
DELTA_NET_SOURCE = CSRC / "delta_net.cu"
MAMBA2_SOURCE = CSRC / "mamba2.cu"
SHORT_CONV_SOURCE = CSRC / "short_conv.cu"

MAX_STEP_TOKENS = 16
"""Tokens of a row that one launch takes: decode steps and drafts."""

MAX_STATE_THREADS = 512
"""Threads of a thread block that has a whole head: each may have 128 registers."""

MAX_STATE_REGISTERS = 128
"""Numbers of a state that a thread keeps, at most."""

_INPUT_TOKENS = 8  # INPUT_TOKENS of the sources
_INPUT_WARPS = 4  # of a thread block
_INPUT_THREADS = 32 * _INPUT_WARPS
_SHORT_CONV_THREADS = 256
_SCRATCH_BYTES = 128


class _TokenRows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("row_stride", ctypes.c_longlong), ("token_stride", ctypes.c_longlong))


class _StateSlots(ctypes.Structure):
    _fields_ = (("source", ctypes.c_void_p), ("targets", ctypes.c_void_p))


class _CausalConv(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "states")),
        ("channels", ctypes.c_longlong),
    )


class _DeltaNetParams(ctypes.Structure):
    _fields_ = (
        *((name, _TokenRows) for name in ("qkv", "z", "a", "b")),
        ("out", ctypes.c_void_p),
        ("conv", _CausalConv),
        *((name, ctypes.c_void_p) for name in ("decay_rate", "dt_bias", "norm", "states")),
        ("slots", _StateSlots),
        *((name, ctypes.c_void_p) for name in ("keys", "gates", "values")),
        ("tokens", ctypes.c_longlong),
        *((name, ctypes.c_float) for name in ("norm_eps", "beta_scale")),
    )


class _Mamba2Params(ctypes.Structure):
    _fields_ = (
        ("projected", _TokenRows),
        ("out", ctypes.c_void_p),
        ("conv", _CausalConv),
        *((name, ctypes.c_void_p) for name in ("decay_rate", "dt_bias", "d", "norm", "states")),
        ("slots", _StateSlots),
        *((name, ctypes.c_void_p) for name in ("groups", "gates", "values", "arrivals")),
        ("tokens", ctypes.c_longlong),
        *((name, ctypes.c_float) for name in ("norm_eps", "dt_min", "dt_max")),
        *((name, ctypes.c_float) for name in ("z_scale", "x_scale", "b_scale", "c_scale", "dt_scale")),
    )


class _ShortConvParams(ctypes.Structure):
    _fields_ = (
        ("projected", _TokenRows),
        ("out", ctypes.c_void_p),
        ("conv", _CausalConv),
        ("slots", _StateSlots),
        ("tokens", ctypes.c_longlong),
    )


@dataclass(frozen=True)
class ScanConfig:
    """How a head's state is divided. A line is a column of a delta net's state, or a row of Mamba 2's.

    `line_threads` fixes the order of summation of a state, and `step_lines`, through the threads of a step, that of
    the norm: neither may differ between passes. The others affect speed only.
    """

    line_threads: int  # threads that share a line
    scan_lines: int = 2  # neighbouring lines of a thread, in the scan
    step_lines: int = 4  # the same when a launch has a whole head, if they divide its lines
    max_warps: int = 4  # of a thread block of the scan
    stage_tokens: int = 8  # tokens that are loaded at once, while as many are worked on

    @property
    def warp_lines(self) -> int:
        """Lines of a warp of the scan."""
        return 32 // self.line_threads * self.scan_lines

    def scan_warps(self, lines: int) -> int:
        """Warps of a thread block of the scan, for a head with so many lines."""
        return gcd(lines // self.warp_lines, self.max_warps)

    def fit_step_lines(self, lines: int, line_length: int) -> int:
        """Lines of a thread when a thread block has a whole head, of so many lines of a length."""
        divides = lines % (32 // self.line_threads * self.step_lines) == 0
        fits = self.step_lines * line_length // self.line_threads <= MAX_STATE_REGISTERS
        return self.step_lines if divides and fits else self.scan_lines

    def check(self, lines: int, line_length: int) -> None:
        """`Unsupported` for a head's state that cannot be divided so."""
        threads, run = lines // self.warp_lines * 32, 4 * self.line_threads
        if lines % self.warp_lines or line_length % run:
            raise Unsupported(f"states of {lines} x {line_length}, only of multiples of {self.warp_lines} x {run}")
        if threads > MAX_STATE_THREADS or line_length > 256:
            most = MAX_STATE_THREADS // 32 * self.warp_lines
            raise Unsupported(f"states of {lines} x {line_length}, of at most {most} x 256")


DELTA_NET_SCAN = ScanConfig(line_threads=4)
MAMBA2_SCAN = ScanConfig(line_threads=8)


class _Conv:
    """A causal convolution's weights on the device."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
        if weight.shape[1] < 2:
            raise Unsupported(f"a convolution of {weight.shape[1]} taps, at least 2")
        self._weight = _float32(weight, device)
        self._bias = None if bias is None else _float32(bias, device)

    def defines(self) -> dict[str, int]:
        """The -D constants of recurrent.h."""
        return {"CONV_KERNEL": self._weight.shape[1], "CONV_BIAS": int(self._bias is not None), "NO_FMAD": 1}

    def params(self, state: b.RecurrentState | None) -> _CausalConv:
        """Its part of a launch's parameters."""
        if state is not None and state.conv.dtype is not torch.float16:
            raise KernelError(
                f"The CUDA kernels keep the inputs of convolutions in float16, and this cache keeps them in "
                f"{str(state.conv.dtype).removeprefix('torch.')}: make the cache in the model's own precision."
            )
        return _CausalConv(
            self._weight.data_ptr(), _pointer(self._bias), _pointer(state and state.conv), self._weight.shape[0]
        )


class CudaDeltaNet:
    """Convolution, delta rule, norm and gate of a `spec.DeltaNet`."""

    def __init__(
        self,
        modules: ModuleSource,
        mixer: spec.DeltaNet,
        params: b.DeltaNetParams,
        scan: ScanConfig = DELTA_NET_SCAN,
    ) -> None:
        scan.check(mixer.value_dim, mixer.key_dim)
        self._modules, self._mixer, self._scan = modules, mixer, scan
        self._conv = _Conv(params.conv, None, modules.device)
        self._decay_rate = -_float32(params.a_log, modules.device).exp()
        self._dt_bias, self._norm = (_float32(one, modules.device) for one in (params.dt_bias, params.norm))
        decays = mixer.key_dim if mixer.decay == "channel" else 1
        self._key_floats = 2 * mixer.key_dim + 4  # KeyRecord
        self._gate_floats = decays + (4 if mixer.decay == "channel" else 3)  # GateRecord
        self._warps = scan.scan_warps(mixer.value_dim)
        self._step_lines = scan.fit_step_lines(mixer.value_dim, mixer.key_dim)

    def defines(self, lines: int) -> dict[str, int]:
        """The -D constants of delta_net.cu for so many columns of a thread."""
        m = self._mixer
        return {
            "KEY_HEADS": m.key_heads,
            "VALUE_HEADS": m.value_heads,
            "KEY_DIM": m.key_dim,
            "VALUE_DIM": m.value_dim,
            "CHANNEL_DECAY": int(m.decay == "channel"),
            "SIGMOID_GATE": int(m.gate_act == "sigmoid"),
            "COLUMN_THREADS": self._scan.line_threads,
            "COLUMNS": lines,
            "SCAN_WARPS": self._warps if lines == self._scan.scan_lines else 1,
            "STAGE_TOKENS": self._scan.stage_tokens,
            "SIZEOF_KeyRecord": 4 * self._key_floats,
            "SIZEOF_GateRecord": 4 * self._gate_floats,
            **self._conv.defines(),
            **sizeof_defines(DeltaNetParams=_DeltaNetParams),
        }

    def __call__(
        self,
        qkv: Tensor,
        z: Tensor,
        a: Tensor,
        beta: Tensor,
        state: b.RecurrentState | None,
        metadata: b.AttnMetadata,
    ) -> Tensor:
        """(rows, tokens, …) projections → (rows, tokens, value width); `beta` is b, before its sigmoid."""
        m, (rows, tokens) = self._mixer, qkv.shape[:2]
        qkv, z, a, beta = (_unit_stride(x) for x in (qkv, z, a, beta))
        slots = _contiguous_slots(metadata.state_slots)
        out = torch.empty(rows, tokens, m.value_width, dtype=qkv.dtype, device=qkv.device)
        params = _DeltaNetParams(
            *(_token_rows(x) for x in (qkv, z, a, beta)), out.data_ptr(), self._conv.params(state),
            self._decay_rate.data_ptr(), self._dt_bias.data_ptr(), self._norm.data_ptr(), _matrix_pointer(state),
            _slot_pointers(slots), tokens=tokens, norm_eps=m.norm_eps, beta_scale=m.beta_scale,
        )  # fmt: skip
        if tokens <= MAX_STEP_TOKENS:
            module = self._modules.module(DELTA_NET_SOURCE, **self.defines(self._step_lines))
            smem = tokens * (self._token_bytes(m.value_dim) + 8 * m.value_dim)
            threads = m.value_dim * self._scan.line_threads // self._step_lines
            smem = balance_occupancy(self._modules, m.value_heads * rows, smem)
            module.launch("delta_net_step", (m.value_heads, rows, 1), threads, smem, (params,))
            return out
        floats = (m.key_heads * self._key_floats, m.value_heads * self._gate_floats, m.value_width)
        workspace = _workspace(rows * tokens, floats, out.device)
        module = self._modules.module(DELTA_NET_SOURCE, **self.defines(self._scan.scan_lines))
        params.keys, params.gates, params.values = (one.data_ptr() for one in workspace)
        grid = -(-tokens // _INPUT_TOKENS), -(-(m.key_heads + m.value_heads) // _INPUT_WARPS), rows
        module.launch("delta_net_inputs", grid, _INPUT_THREADS, 0, (params,))
        columns = self._warps * self._scan.warp_lines
        smem = 2 * self._scan.stage_tokens * self._token_bytes(columns)
        grid = m.value_heads * (m.value_dim // columns), rows, 1
        smem = balance_occupancy(self._modules, grid[0] * rows, smem)
        module.launch("delta_net_scan", grid, 32 * self._warps, smem, (params,))
        grid = tokens, -(-m.value_heads // _INPUT_WARPS), rows
        module.launch("delta_net_outputs", grid, _INPUT_THREADS, 0, (params,))
        return out

    def _token_bytes(self, columns: int) -> int:
        """Bytes of a TokenInputs."""
        return 4 * (self._key_floats + self._gate_floats + columns + 4)


class CudaMamba2:
    """Convolution, state-space recurrence, gate and norm of a `spec.Mamba2`."""

    def __init__(
        self,
        counters: SplitCounters,
        mixer: spec.Mamba2,
        params: b.Mamba2Params,
        scan: ScanConfig = MAMBA2_SCAN,
    ) -> None:
        scan.check(mixer.head_dim, mixer.state_dim)
        has_norm = mixer.norm is not None and params.norm is not None
        if has_norm and mixer.heads % mixer.norm_groups:
            raise Unsupported(f"a norm of {mixer.norm_groups} groups over {mixer.heads} heads")
        device = counters.modules.device
        self._counters, self._modules, self._mixer, self._scan = counters, counters.modules, mixer, scan
        self._norm_groups = mixer.norm_groups if has_norm else 0
        self._conv = _Conv(params.conv, params.conv_bias, device)
        self._decay_rate = -_float32(params.a_log, device).exp()
        self._dt_bias, self._d = (_float32(one, device) for one in (params.dt_bias, params.d))
        self._norm = None if params.norm is None else _float32(params.norm, device)
        self._warps = scan.scan_warps(mixer.head_dim)
        self._step_lines = scan.fit_step_lines(mixer.head_dim, mixer.state_dim)

    def defines(self, lines: int) -> dict[str, int]:
        """The -D constants of mamba2.cu for so many rows of a state in a thread."""
        m = self._mixer
        return {
            "HEADS": m.heads,
            "GROUPS": m.groups,
            "HEAD_DIM": m.head_dim,
            "STATE_DIM": m.state_dim,
            "NORM_GROUPS": self._norm_groups,
            "NORM_BEFORE_GATE": int(m.norm_before_gate),
            "ROW_THREADS": self._scan.line_threads,
            "ROWS": lines,
            "SCAN_WARPS": self._warps if lines == self._scan.scan_lines else 1,
            "STAGE_TOKENS": self._scan.stage_tokens,
            "SIZEOF_GroupRecord": 8 * m.state_dim,
            "SIZEOF_GateRecord": 16,
            **self._conv.defines(),
            **sizeof_defines(Mamba2Params=_Mamba2Params),
        }

    def __call__(self, projected: Tensor, state: b.RecurrentState | None, metadata: b.AttnMetadata) -> Tensor:
        """The projection to z, x, B, C, dt → (rows, tokens, width)."""
        m, (rows, tokens) = self._mixer, projected.shape[:2]
        projected, slots = _unit_stride(projected), _contiguous_slots(metadata.state_slots)
        out = torch.empty(rows, tokens, m.width, dtype=projected.dtype, device=projected.device)
        params = _Mamba2Params(
            _token_rows(projected), out.data_ptr(), self._conv.params(state), self._decay_rate.data_ptr(),
            self._dt_bias.data_ptr(), self._d.data_ptr(), _pointer(self._norm), _matrix_pointer(state),
            _slot_pointers(slots), arrivals=self._counters.arrivals.data_ptr(), tokens=tokens,
            norm_eps=0.0 if m.norm is None else m.norm.eps, dt_min=m.dt_limits[0], dt_max=m.dt_limits[1],
        )  # fmt: skip
        params.z_scale, params.x_scale, params.b_scale, params.c_scale, params.dt_scale = m.part_scales
        one_launch = tokens <= MAX_STEP_TOKENS and rows * self._norm_groups <= len(self._counters.arrivals)
        floats = m.groups * 2 * m.state_dim, m.heads * 4, m.width
        if one_launch:
            floats = 0, 0, m.width if self._norm_groups else 0
        step_module = self._modules.module(MAMBA2_SOURCE, **self.defines(self._step_lines))
        threads = m.head_dim * self._scan.line_threads // self._step_lines
        workspace = _workspace(rows * tokens, floats, out.device)
        params.groups, params.gates, params.values = (one.data_ptr() for one in workspace)
        if one_launch:
            smem = tokens * self._token_bytes(m.head_dim) + _SCRATCH_BYTES
            smem = balance_occupancy(self._modules, m.heads * rows, smem)
            step_module.launch("mamba2_step", (m.heads, rows, 1), threads, smem, (params,))
            return out
        grid = -(-tokens // _INPUT_TOKENS), -(-(m.groups + m.heads) // _INPUT_WARPS), rows
        module = self._modules.module(MAMBA2_SOURCE, **self.defines(self._scan.scan_lines))
        module.launch("mamba2_inputs", grid, _INPUT_THREADS, 0, (params,))
        lines = self._warps * self._scan.warp_lines
        smem = 2 * self._scan.stage_tokens * self._token_bytes(lines)
        grid = m.heads * (m.head_dim // lines), rows, 1
        smem = balance_occupancy(self._modules, grid[0] * rows, smem)
        module.launch("mamba2_scan", grid, 32 * self._warps, smem, (params,))
        grid = tokens, self._norm_groups or -(-m.width // threads), rows
        # As many threads as in mamba2_step add up a norm's squares in the same order.
        step_module.launch("mamba2_outputs", grid, threads, _SCRATCH_BYTES, (params,))
        return out

    def _token_bytes(self, lines: int) -> int:
        """Bytes of a TokenInputs."""
        return 4 * (2 * self._mixer.state_dim + 4 + lines + 4)


class CudaShortConv:
    """The gated short convolution of a `spec.ShortConv`."""

    def __init__(self, modules: ModuleSource, mixer: spec.ShortConv, weight: Tensor, bias: Tensor | None) -> None:
        self._modules, self._width = modules, mixer.width
        self._conv = _Conv(weight, bias, modules.device)

    @cached_property
    def defines(self) -> dict[str, int]:
        """The -D constants of short_conv.cu."""
        return {
            "WIDTH": self._width,
            **self._conv.defines(),
            **sizeof_defines(ShortConvParams=_ShortConvParams),
        }

    def __call__(self, projected: Tensor, state: b.RecurrentState | None, metadata: b.AttnMetadata) -> Tensor:
        """The projection to B, C, x → (rows, tokens, width)."""
        rows, tokens = projected.shape[:2]
        projected, slots = _unit_stride(projected), _contiguous_slots(metadata.state_slots)
        out = torch.empty(rows, tokens, self._width, dtype=projected.dtype, device=projected.device)
        params = _ShortConvParams(
            _token_rows(projected), out.data_ptr(), self._conv.params(state), _slot_pointers(slots), tokens
        )
        module = self._modules.module(SHORT_CONV_SOURCE, **self.defines)
        grid = tokens, -(-self._width // _SHORT_CONV_THREADS), rows
        module.launch("short_conv", grid, _SHORT_CONV_THREADS, 0, (params,))
        return out


def _float32(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, torch.float32).contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _matrix_pointer(state: b.RecurrentState | None) -> int | None:
    return None if state is None else _pointer(state.matrix)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _token_rows(x: Tensor) -> _TokenRows:
    return _TokenRows(x.data_ptr(), x.stride(0), x.stride(1))


def _contiguous_slots(slots: b.StateSlots | None) -> b.StateSlots | None:
    return slots and b.StateSlots(slots.source.contiguous(), slots.targets.contiguous())


def _slot_pointers(slots: b.StateSlots | None) -> _StateSlots:
    return _StateSlots() if slots is None else _StateSlots(slots.source.data_ptr(), slots.targets.data_ptr())


def _workspace(tokens: int, floats: tuple[int, int, int], device: torch.device) -> Sequence[Tensor]:
    """Three tensors of so many numbers for each token, in one allocation."""
    return torch.empty(tokens * sum(floats), device=device).split_with_sizes([tokens * each for each in floats])
