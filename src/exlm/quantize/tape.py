"""Many small computations as one: on a GPU what is done to tensors of some shapes is recorded, then replayed.

Rounding is row after row, and there a launch costs more than its work. Elsewhere things are just done. What
is done is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Work = Callable[..., None]
"""(*read, *written): fills what it writes, may spoil what it reads, never waits for the device."""

KEPT = 64
"""Recordings that are held; the oldest goes first."""


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    read: Sequence[Tensor]
    written: Sequence[Tensor]


class Tape:
    """Recordings by what was done, and to which shapes."""

    def __init__(self) -> None:
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    def play(self, work: Work, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """`work(*read, *written)`."""
        if not written[0].is_cuda:
            work(*read, *written)
            return
        shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in (*read, *written))
        found = self._recordings.get((work, shapes))
        if found is None:
            if len(self._recordings) == KEPT:
                del self._recordings[next(iter(self._recordings))]
            found = self._recordings[work, shapes] = self._record(work, read, written)
        for kept, now in zip(found.read, read, strict=True):
            kept.copy_(now)
        found.graph.replay()
        for now, kept in zip(written, found.written, strict=True):
            now.copy_(kept)

    def _record(self, work: Work, read: Sequence[Tensor], written: Sequence[Tensor]) -> _Recording:
        own = [t.clone(memory_format=torch.contiguous_format) for t in read]
        out = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in written]
        work(*own, *out)  # libraries set themselves up the first time, which cannot be recorded
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one for all: they never run side by side
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
            work(*own, *out)
        return _Recording(graph, own, out)


TAPE = Tape()
"""The one everybody uses: shapes repeat from matrix to matrix and from layer to layer."""
