"""CUDA graphs for the solver's inner loops: a function of tensors is captured once per shape, then replayed.

Rounding goes row after row, where a kernel launch costs more than its work. On a CPU the functions just run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

GraphFunction = Callable[..., None]
"""(*inputs, *outputs): fills the outputs, may overwrite the inputs, never waits for the device.

Functions that compare equal must do the same: plain functions, or frozen dataclasses of the numbers they
depend on.
"""

MAX_BUFFER_BYTES = 2**31
"""Bytes of the static inputs and outputs of all graphs; beyond it the oldest graphs are evicted."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]  # static: copied into before a replay
    outputs: Sequence[Tensor]  # static: copied from after a replay

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.inputs, *self.outputs))


class GraphCache:
    """Captured graphs by function and by shapes, dtypes and device of its tensors."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Captured] = {}
        self._pool: Any = None
        self._unavailable = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # only captured on, never run on

    def run(self, function: GraphFunction, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """`function(*inputs, *outputs)`, as a graph where that is possible."""
        if self._unavailable or not outputs[0].is_cuda:
            function(*inputs, *outputs)
            return
        key = (function, *((t.shape, t.dtype, t.device) for t in (*inputs, *outputs)))
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture(function, inputs, outputs)
            if captured is None:
                function(*inputs, *outputs)
                return
            self._graphs[key] = captured
            self._evict()
        for static, x in zip(captured.inputs, inputs, strict=True):
            static.copy_(x)
        captured.graph.replay()
        for x, static in zip(outputs, captured.outputs, strict=True):
            x.copy_(static)

    def clear(self) -> None:
        """Free all graphs and their memory."""
        self._graphs.clear()
        self._pool = None  # an empty pool cannot be used again

    def _evict(self) -> None:
        held = sum(one.nbytes for one in self._graphs.values())
        while held > MAX_BUFFER_BYTES and len(self._graphs) > 1:
            held -= self._graphs.pop(next(iter(self._graphs))).nbytes

    def _capture(
        self, function: GraphFunction, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> _Captured | None:
        """The function captured; None, with one warning, where capture fails."""
        static_inputs = [t.clone(memory_format=torch.contiguous_format) for t in inputs]
        static_outputs = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in outputs]
        function(*static_inputs, *static_outputs)  # libraries initialise on first use, which cannot be captured
        try:
            graph = self._capture_graph(function, static_inputs, static_outputs)
        except RuntimeError as error:
            self._unavailable = True
            warnings.warn(
                f"Quantising continues without CUDA graphs, which is slower: capture failed ({error}).", stacklevel=2
            )
            return None
        return _Captured(graph, static_inputs, static_outputs)

    def _capture_graph(
        self, function: GraphFunction, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        device = outputs[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one for all graphs: no two ever run at once
        with torch.cuda.stream(self._streams[device]):
            # Not torch.cuda.graph: it first frees all cached memory, which costs more than the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                function(*inputs, *outputs)
            finally:
                graph.capture_end()
        return graph


GRAPHS = GraphCache()
"""The cache of the process: shapes repeat from matrix to matrix and from layer to layer."""
