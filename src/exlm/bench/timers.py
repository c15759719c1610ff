"""A model that measures the time spent in its forward passes; the rest of a step the device is idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..kvcache import CacheBase
from ..model import Model
from ..model.model_runner import PagedModelRunner

PASSES = ("prefill", "decode", "decode_next")
"""The runner's methods that run a forward pass."""


class PassTimer:
    """Sums up the duration of forward passes, measured on the device."""

    def __init__(self) -> None:
        self._host = 0.0
        self._events: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        """Set the sum to zero."""
        self._host = 0.0
        self._events.clear()

    def wrap(self, work: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Make a function add its duration to the sum, without synchronising with the device."""
        return self._with_events(work) if device.type == "cuda" else self._on_host(work)

    def seconds(self) -> float:
        """Seconds in passes since the last reset; synchronises with a GPU."""
        if self._events:
            torch.cuda.synchronize()
        return float(self._host + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3)

    def _on_host(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            answer = work(*arguments)
            self._host += time.perf_counter() - start
            return answer

        return timed

    def _with_events(self, work: Callable[..., Any]) -> Callable[..., Any]:
        cuda: Any = torch.cuda  # its events have no types

        def timed(*arguments: Any) -> Any:
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            answer = work(*arguments)
            end.record()
            self._events.append((begin, end))
            return answer

        return timed


class TimedRunner:
    """Wraps a runner and times its forward passes."""

    def __init__(self, inner: PagedModelRunner, timer: PassTimer) -> None:
        self._inner = inner
        for method_name in PASSES:
            setattr(self, method_name, timer.wrap(getattr(inner, method_name), inner.device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TimedModel(Model):
    """A model whose runners time their forward passes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pass_timer = PassTimer()

    def runner(self, cache: CacheBase) -> Any:
        """The model's runner, with timing."""
        return TimedRunner(super().runner(cache), self.pass_timer)
