"""Which backend runs what. Chosen while loading; every refusal is kept so that `explain()` can say why.

Nothing falls back silently: a backend that declines gives a reason; if all decline, the model does not load.
A backend that is missing altogether is told of in the log, unless its owner switched it off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import torch

from .. import env
from ..errors import Unsupported
from .interface import Backend, SupportsFusion
from .reference import ReferenceBackend

T = TypeVar("T")

log = logging.getLogger(__name__)


class BackendDisabled(Unsupported):
    """A backend that somebody does without on purpose."""


@dataclass(frozen=True)
class DispatchRecord:
    """What one part of the model got, and why not something faster."""

    role: str
    backend: str
    detail: str
    declined: tuple[str, ...] = ()


@dataclass
class BackendList:
    """The backends of one device in order of preference, and a record of who took what."""

    backends: Sequence[Backend]
    records: list[DispatchRecord] = field(default_factory=list)
    unavailable: Sequence[str] = ()  # backends that are not among them, each with its reason

    @property
    def device(self) -> torch.device:
        """Where all of them compute."""
        return self.backends[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The precision all of them compute in."""
        return self.backends[0].dtype

    @property
    def can_bind_concurrently(self) -> bool:
        """Whether binding takes little room besides the weight, so that several threads may bind at once."""
        return self.device.type == "cpu" or self.backends[0].name == "cuda"

    def bind(self, role: str, detail: str, make: Callable[[Backend], T]) -> T:
        """The first backend's answer to `ask`, remembered under the role."""
        bound, record = self.dispatch(role, detail, make)
        self.records.append(record)
        return bound

    def dispatch(self, role: str, detail: str, make: Callable[[Backend], T]) -> tuple[T, DispatchRecord]:
        """The same, to be remembered by the caller: who asks in other threads keeps the record in order."""
        declined: list[str] = []
        for backend in self.backends:
            try:
                return make(backend), DispatchRecord(role, backend.name, detail, tuple(declined))
            except Unsupported as reason:
                declined.append(f"{backend.name}: {reason}")
        raise Unsupported(f"{role} ({detail}) cannot run on {self.device}: {'; '.join(declined)}.")

    def fuse(self, role: str, detail: str, make: Callable[[SupportsFusion], T]) -> T | None:
        """What a backend that fuses makes of parts it bound before; None where none does, with its reason."""
        fuser = next((backend for backend in self.backends if isinstance(backend, SupportsFusion)), None)
        if fuser is None:
            return None
        try:
            fused = make(fuser)
        except Unsupported as reason:
            self.records.append(DispatchRecord(role, "in parts", detail, (f"fused: {reason}",)))
            return None
        self.records.append(DispatchRecord(role, "fused", detail))
        return fused

    def explain(self) -> str:
        """Who is absent and why; then one line for each part: who runs it, who declined with which reason."""
        lines = [f"absent: {reason}" for reason in self.unavailable]
        for record in self.records:
            why = f"  (declined: {'; '.join(record.declined)})" if record.declined else ""
            lines.append(f"{record.role}: {record.backend}, {record.detail}{why}")
        return "\n".join(lines)


def backends_for(device: torch.device, dtype: torch.dtype) -> BackendList:
    """The backends for a device, the fastest first; plain torch is always among them."""
    backends: list[Backend] = []
    unavailable: list[str] = []
    factories = (("cuda", _cuda), ("triton", _triton)) if device.type == "cuda" else (("cpu", _cpu),)
    for name, make in factories:
        try:
            backends.append(make(device, dtype))
        except Unsupported as reason:
            unavailable.append(f"{name}: {reason}")
            if not isinstance(reason, BackendDisabled):
                _warn_once(name, str(reason))
    return BackendList([*backends, ReferenceBackend(device, dtype)], unavailable=unavailable)


@cache
def _warn_once(name: str, reason: str) -> None:
    """Once a process and reason: whoever finds a model slow should not have to guess."""
    log.warning("the %s kernels cannot be used, which makes everything slower: %s", name, reason)


def _cpu(device: torch.device, dtype: torch.dtype) -> Backend:
    """The CPU backend, or why not."""
    if not env.cpu_enabled():
        raise BackendDisabled("switched off by EXLM_CPU=0")
    from .cpu import CpuBackend

    return CpuBackend(device, dtype, env.cache_folder() / "kernels")


def _cuda(device: torch.device, dtype: torch.dtype) -> Backend:
    """The CUDA backend, or why not."""
    if not env.cuda_enabled():
        raise BackendDisabled("switched off by EXLM_CUDA=0")
    _check_capability(device)
    from .cuda import CudaBackend

    try:
        others: Backend | None = _triton(device, dtype)
    except Unsupported:  # which `choose` will tell
        others = None
    folder = env.cache_folder() / "kernels"
    return CudaBackend(device, dtype, folder, others, env.gemm_m64_enabled())


def _triton(device: torch.device, dtype: torch.dtype) -> Backend:
    """The Triton backend, or why not."""
    if not env.triton_enabled():
        raise BackendDisabled("switched off by EXLM_TRITON=0")
    _check_capability(device)
    try:
        from .triton import TritonBackend
    except ImportError as error:
        raise Unsupported(f"cannot be imported ({error}); a CUDA build of torch brings it") from error
    return TritonBackend(device, dtype)


def _check_capability(device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise Unsupported(
            f"needs compute capability 8.0, {torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
