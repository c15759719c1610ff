"""Which backend runs each part of a model, decided while it loads and recorded for `explain()`.

There is no silent fallback: a backend that declines gives a reason; if all decline, the model does not load.
The log names a backend that cannot be used at all, unless the user disabled it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

import torch

from .. import env
from ..errors import Unsupported
from .interface import (
    ActivationBits,
    Backend,
    EmbeddingFn,
    LinearFn,
    PackedCopy,
    SupportsFusion,
    SupportsPackedCopies,
)
from .packed_store import PACKED_FOLDER, PackedStore
from .reference import ReferenceBackend

T = TypeVar("T")

log = logging.getLogger(__name__)


class BackendDisabled(Unsupported):
    """The user disabled a backend in the environment."""


@dataclass(frozen=True)
class DispatchRecord:
    """The backend of one part of the model, and why faster ones declined."""

    role: str
    backend: str
    detail: str
    declined: tuple[str, ...] = ()


@dataclass
class BackendList:
    """The backends of one device in order of preference, and a record for each part they were asked for."""

    backends: Sequence[Backend]
    records: list[DispatchRecord] = field(default_factory=list)
    unavailable: Sequence[str] = ()  # backends that cannot be used, each with its reason
    packed: PackedCopy | None = None  # while a model loads whose packed matrices are kept on disk

    @property
    def device(self) -> torch.device:
        """The device of all of them."""
        return self.backends[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of all of them."""
        return self.backends[0].dtype

    @property
    def can_bind_concurrently(self) -> bool:
        """Whether binding needs little memory besides the weight: then several threads may bind at once."""
        return self.device.type == "cpu" or self.backends[0].name == "cuda"

    def bind(self, role: str, detail: str, make: Callable[[Backend], T]) -> T:
        """`make` by the first backend that does not decline, recorded under the role."""
        bound, record = self.dispatch(role, detail, make)
        self.records.append(record)
        return bound

    def dispatch(self, role: str, detail: str, make: Callable[[Backend], T]) -> tuple[T, DispatchRecord]:
        """The same with its record, which the caller adds, in order even if threads bind out of order."""
        declined: list[str] = []
        for backend in self.backends:
            try:
                bound = make(backend)
            except Unsupported as reason:
                declined.append(f"{backend.name}: {reason}")
                continue
            if self.packed is not None:
                self.packed.keep(role, bound, detail)
            return bound, DispatchRecord(role, backend.name, detail, tuple(declined))
        raise Unsupported(f"{role} ({detail}) cannot run on {self.device}: {'; '.join(declined)}.")

    def open_packed(self, fingerprint: Callable[[], str], model: str) -> None:
        """Use the packed matrices that the first backend keeps of a model, if it does; `close_packed` writes new ones.

        `fingerprint` identifies the matrices, `model` is a name for people.
        """
        backend = self.backends[0]
        if isinstance(backend, SupportsPackedCopies) and (max_bytes := env.packed_cache_bytes()):
            store = PackedStore(env.cache_folder() / PACKED_FOLDER, max_bytes)
            self.packed = backend.packed_copy(store, fingerprint(), model)

    def restore(self, role: str) -> tuple[LinearFn | EmbeddingFn, DispatchRecord] | None:
        """A matrix that was packed at an earlier start, and its record; None if it is to be read and bound."""
        found = None if self.packed is None else self.packed.restore(role)
        return found and (found[0], DispatchRecord(role, self.backends[0].name, found[1]))

    def close_packed(self) -> None:
        """The model is loaded."""
        if self.packed is not None:
            self.packed.finish()
            self.packed = None

    def fuse(self, role: str, detail: str, make: Callable[[SupportsFusion], T]) -> T | None:
        """Fuse parts that a backend bound before; None, with the reason recorded, if that is not possible."""
        backend = next((one for one in self.backends if isinstance(one, SupportsFusion)), None)
        if backend is None:
            return None
        try:
            fused = make(backend)
        except Unsupported as reason:
            self.records.append(DispatchRecord(role, "in parts", detail, (f"fused: {reason}",)))
            return None
        self.records.append(DispatchRecord(role, "fused", detail))
        return fused

    def explain(self) -> str:
        """Backends that cannot be used; then a line for each part: its backend, and why others declined."""
        lines = [f"absent: {reason}" for reason in self.unavailable]
        for record in self.records:
            why = f"  (declined: {'; '.join(record.declined)})" if record.declined else ""
            lines.append(f"{record.role}: {record.backend}, {record.detail}{why}")
        return "\n".join(lines)


def backends_for(device: torch.device, dtype: torch.dtype, cpu_activation_bits: ActivationBits = 16) -> BackendList:
    """The backends for a device, the fastest first; plain torch is always among them."""
    backends: list[Backend] = []
    unavailable: list[str] = []
    cpu = partial(_cpu, activation_bits=cpu_activation_bits)
    factories = (("cuda", _cuda), ("triton", _triton)) if device.type == "cuda" else (("cpu", cpu),)
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
    """Log once in a process why a fast backend cannot be used."""
    log.warning("the %s kernels cannot be used, which makes everything slower: %s", name, reason)


def _cpu(device: torch.device, dtype: torch.dtype, activation_bits: ActivationBits) -> Backend:
    """The CPU backend; `Unsupported` says why not."""
    if not env.cpu_enabled():
        raise BackendDisabled("switched off by EXLM_CPU=0")
    from .cpu import CpuBackend

    return CpuBackend(device, dtype, env.cache_folder() / "kernels", activation_bits=activation_bits)


def _cuda(device: torch.device, dtype: torch.dtype) -> Backend:
    """The CUDA backend; `Unsupported` says why not."""
    if not env.cuda_enabled():
        raise BackendDisabled("switched off by EXLM_CUDA=0")
    _check_capability(device)
    from .cuda import CudaBackend

    try:
        fallback: Backend | None = _triton(device, dtype)
    except Unsupported:  # `backends_for` records it
        fallback = None
    folder = env.cache_folder() / "kernels"
    return CudaBackend(device, dtype, folder, fallback, env.gemm_m64_enabled())


def _triton(device: torch.device, dtype: torch.dtype) -> Backend:
    """The Triton backend; `Unsupported` says why not."""
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
        raise Unsupported(f"needs compute capability 8.0, {torch.cuda.get_device_name(device)} has {major}.{minor}")
