"""A model whose passes are timed: what a step spends in it, and how long the device has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..kvcache import CacheBase
from ..model import Model
from ..model.model_runner import PagedModelRunner

PASSES = ("prefill", "decode", "decode_next")
"""The runner's methods in which the model computes."""


class PassTimer:
    """The seconds between the beginning and the end of each pass, as the device saw them."""

    def __init__(self) -> None:
        self._host = 0.0
        self._events: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        """Forget what was."""
        self._host = 0.0
        self._events.clear()

    def wrap(self, work: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """The same call, timed; nothing waits for the device."""
        return self._with_events(work) if device.type == "cuda" else self._on_host(work)

    def seconds(self) -> float:
        """In passes since the last reset; waits for a GPU to finish."""
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
    """A runner that does what another does, under a watch."""

    def __init__(self, inner: PagedModelRunner, timer: PassTimer) -> None:
        self._inner = inner
        for method_name in PASSES:
            setattr(self, method_name, timer.wrap(getattr(inner, method_name), inner.device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TimedModel(Model):
    """A model that knows how long its passes took."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pass_timer = PassTimer()

    def runner(self, cache: CacheBase) -> Any:
        """The generator's door, watched."""
        return TimedRunner(super().runner(cache), self.pass_timer)
