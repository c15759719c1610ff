"""Many small computations as one: on a GPU what is done to tensors of some shapes is recorded, then replayed.

Rounding is row after row, and there a launch costs more than its work. Elsewhere things are just done. What
is done is not known here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

GraphFunction = Callable[..., None]
"""(*read, *written): fills what it writes, may spoil what it reads, never waits for the device.

Two that are equal do the same: functions do, and frozen dataclasses of whatever numbers they depend on.
"""

MAX_BUFFER_BYTES = 2**31
"""Bytes of what recordings read and write, beyond which the oldest of them go."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.inputs, *self.outputs))


class GraphCache:
    """Recordings by what was done, and to which shapes."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Captured] = {}
        self._pool: Any = None
        self._unavailable = False
        self._streams: dict[
            torch.device, torch.cuda.Stream
        ] = {}  # nothing runs there: it is where one records

    def run(self, work: GraphFunction, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """`work(*read, *written)`."""
        if self._unavailable or not written[0].is_cuda:
            work(*read, *written)
            return
        key = (work, *((t.shape, t.dtype, t.device) for t in (*read, *written)))
        found = self._graphs.get(key)
        if found is None:
            found = self._capture(work, read, written)
            if found is None:
                work(*read, *written)
                return
            self._graphs[key] = found
            self._evict()
        for kept, now in zip(found.inputs, read, strict=True):
            kept.copy_(now)
        found.graph.replay()
        for now, kept in zip(written, found.outputs, strict=True):
            now.copy_(kept)

    def clear(self) -> None:
        """Let go of all recordings and their memory."""
        self._graphs.clear()
        self._pool = None  # an empty one cannot be used again

    def _evict(self) -> None:
        held = sum(one.nbytes for one in self._graphs.values())
        while held > MAX_BUFFER_BYTES and len(self._graphs) > 1:
            held -= self._graphs.pop(next(iter(self._graphs))).nbytes

    def _capture(
        self, work: GraphFunction, read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> _Captured | None:
        """The work recorded; None, with a warning, if that cannot be done here."""
        own = [t.clone(memory_format=torch.contiguous_format) for t in read]
        out = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in written]
        work(*own, *out)  # libraries set themselves up the first time, which cannot be recorded
        try:
            return _Captured(self._capture_graph(work, own, out), own, out)
        except RuntimeError as error:
            self._unavailable = True
            warnings.warn(
                f"Quantising goes on launch by launch, which is slower: nothing could be recorded ({error}).",
                stacklevel=2,
            )
            return None

    def _capture_graph(
        self, work: GraphFunction, own: Sequence[Tensor], out: Sequence[Tensor]
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        device = out[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one for all: they never run side by side
        with torch.cuda.stream(self._streams[device]):
            # Not torch.cuda.graph: that gives all free memory back first, which costs more than recording.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                work(*own, *out)
            finally:
                graph.capture_end()
        return graph


GRAPHS = GraphCache()
"""The one everybody uses: shapes repeat from matrix to matrix and from layer to layer."""
