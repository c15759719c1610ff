"""The engine: loaded models, each with its generator, and the streams of their requests' output.

An `Engine` has the models that are loaded and can load others by name. A `ServedModel` takes a
`GenerationRequest` and gives a `RequestStream` of `OutputDelta`s. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch

from exlm import AsyncGenerator, AsyncJob, ExlmError, Settings

from .errors import APIError
from .generation import FinishInfo, GenerationRequest, ModelInfo, OutputDelta, output_delta
from .models import GeneratorParts, ModelSpec, load

Loader: TypeAlias = Callable[[ModelSpec], GeneratorParts]

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
DRAIN_POLL_SECONDS = 0.02
PROBE_SALT = "health check"
MAX_EVENTS = 256
HEARTBEAT_SECONDS = 0.5
"""How often the event loop records that it is running."""


class Activity:
    """When a model last gave a result, how many jobs it has, and its latest events, for the watchdog."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self.clock = clock
        self.pending_jobs = 0
        """Jobs queued that have not ended."""
        self.tokens = 0
        """Results with a token, since the start."""
        self.events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self._last = clock()

    @property
    def stalled_seconds(self) -> float:
        """For how long the model has had jobs and given no result."""
        return self.clock() - self._last if self.pending_jobs else 0.0

    def job_queued(self, event: str) -> None:
        if not self.pending_jobs:
            self._last = self.clock()
        self.pending_jobs += 1
        self.record(event)

    def job_ended(self, event: str) -> None:
        self.pending_jobs -= 1
        self._last = self.clock()
        self.record(event)

    def on_result(self, result: Mapping[str, Any]) -> None:
        self._last = self.clock()
        if result["stage"] == "streaming":
            self.tokens += 1
        elif result["stage"] == "prefill":
            self.record(f"job {result['serial']} read {result['curr_progress']} of {result['max_progress']}")
        else:
            self.record(f"job {result['serial']} started")

    def record(self, event: str) -> None:
        self.events.append((time.time(), event))


class ServedModel:
    """A loaded model with its generator; must be made inside a running event loop."""

    def __init__(self, spec: ModelSpec, parts: GeneratorParts) -> None:
        self.spec, self.parts = spec, parts
        self.generator = AsyncGenerator(parts.model, parts.cache, parts.tokenizer, **parts.options)
        self.info = ModelInfo.from_generator(spec.name, self.generator.generator, parts.loras)
        self.activity = Activity()
        self.draining = False
        """Whether it finishes its requests but takes no new ones."""
        self.in_flight = 0
        """Requests being prepared or answered."""
        self.closed = False
        self._cancelling: set[asyncio.Task[None]] = set()
        self._probe: asyncio.Task[bool] | None = None

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Start the jobs of a request; the caller must close the stream."""
        if self.closed:
            raise _unloaded_error(self.info.name)
        return RequestStream(self, request)

    def enqueue(self, **arguments: Any) -> AsyncJob:
        """Queue a job; the caller must report its end with `job_ended`, or `cancel` it."""
        job = AsyncJob(self.generator, **arguments)
        self.activity.job_queued(f"a job of {job.job.prompt_tokens} tokens was queued")
        return job

    def job_ended(self, job: AsyncJob) -> None:
        self.activity.job_ended(f"{job.job!r} ended after {job.job.new_tokens} tokens")

    def cancel(self, job: AsyncJob) -> None:
        """Cancel a job in the background, which takes at most a step; until then it counts as pending."""

        async def cancel() -> None:
            await job.cancel()
            self.activity.job_ended(f"{job.job!r} was dropped after {job.job.new_tokens} tokens")

        task = asyncio.get_running_loop().create_task(cancel())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def is_ready(self, seconds: float) -> bool:
        """Whether the scheduler gives any token in time; queues a job of one token to find out."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._probe_token(seconds))
        return await asyncio.shield(self._probe)

    @contextmanager
    def request_in_flight(self) -> Iterator[None]:
        """Count a request for the length of the block; `drain` waits for it."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and give those in flight this long to finish."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.in_flight:
                    await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def close(self) -> None:
        """Cancel all jobs and free the memory; a generator that is stuck is abandoned."""
        if self.closed:
            return
        self.closed = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.generator.close()
                await asyncio.gather(*self._cancelling, return_exceptions=True)
        except TimeoutError:
            return
        await asyncio.to_thread(self.parts.unload)

    async def _probe_token(self, seconds: float) -> bool:
        before = self.activity.tokens
        probe = self.enqueue(
            input_ids=torch.tensor([[max(self.info.tokenizer.bos_token_id or 0, 0)]]),
            max_new_tokens=1,
            gen_settings=Settings.greedy(),
            salt=PROBE_SALT,
        )
        task = asyncio.create_task(_ends_without_error(probe))
        try:
            async with asyncio.timeout(seconds):
                while not task.done() and self.activity.tokens == before:
                    await asyncio.wait({task}, timeout=0.02)
        except TimeoutError:
            return False
        finally:
            if task.done():
                self.job_ended(probe)
            else:
                task.cancel()
                self.cancel(probe)
        return self.activity.tokens > before or (task.done() and task.result())


class RequestStream:
    """The running jobs of one request; gives the deltas of their texts until it is closed."""

    def __init__(self, model: ServedModel, request: GenerationRequest) -> None:
        """Queue the jobs; if one cannot be made, the others are cancelled."""
        self.request = request
        self.finishes: list[FinishInfo] = []
        """How each text ended whose last delta `next` has given."""
        self._model = model
        self._deltas: asyncio.Queue[tuple[int, OutputDelta] | Exception] = asyncio.Queue()
        self._first: tuple[int, OutputDelta] | Exception | None = None  # what wait_for_first took from the queue
        self._running: dict[int, AsyncJob] = {}
        self._pumps: list[asyncio.Task[None]] = []
        try:
            for index, arguments in enumerate(request.job_arguments):
                self._running[index] = model.enqueue(**arguments)
        except BaseException:
            self.close()
            raise
        self._jobs = [job.job for job in self._running.values()]
        self._pumps += [asyncio.create_task(self._pump(index)) for index in self._running]

    async def next(self) -> tuple[int, OutputDelta]:
        """The next delta and the index of its text; raises the error that ended a job."""
        item, self._first = self._first or await self._deltas.get(), None
        if isinstance(item, Exception):
            raise item
        if item[1].finish is not None:
            self.finishes.append(item[1].finish)
        return item

    async def wait_for_first(self, seconds: float) -> None:
        """Wait up to `seconds` for the first delta, which `next` then gives; raises an early error."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                self._first = await self._deltas.get()
        if isinstance(self._first, Exception):
            raise self._first

    def token_counts(self) -> tuple[int, int, int]:
        """Tokens so far: of prompts whose prefill has started, of those found in the cache, and generated."""
        prompts = [job for job in self._jobs[:: self.request.n] if job.metrics.prefill_started_at is not None]
        return (
            sum(job.prompt_tokens for job in prompts),
            sum(job.cached_tokens for job in prompts),
            sum(job.new_tokens for job in self._jobs),
        )

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for job in self._running.values():
            self._model.cancel(job)
        self._running.clear()

    async def _pump(self, index: int) -> None:
        """Turn a job's results into deltas as they come: results with logits are too large to queue."""
        job, delta = self._running[index], None
        try:
            async for result in job:
                self._model.activity.on_result(result)
                if (delta := output_delta(result, self.request)) is not None:
                    self._deltas.put_nowait((index, delta))
            if delta is None or delta.finish is None:
                self._deltas.put_nowait(_unloaded_error(self.request.model))
        except Exception as error:
            self._deltas.put_nowait(error)
        if self._running.pop(index, None) is not None:
            self._model.job_ended(job)


class Engine:
    """All registered models, and those of them that are loaded."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        loader: Loader = load,
        clock: Callable[[], float] = time.monotonic,
        drain_seconds: float = 30.0,
    ) -> None:
        """Loads nothing yet. Requests of a model that is unloaded get `drain_seconds` to finish."""
        self.specs: Mapping[str, ModelSpec] = {spec.name: spec for spec in specs}
        self.models: dict[str, ServedModel] = {}
        self.clock, self.drain_seconds = clock, drain_seconds
        self.started = int(time.time())
        self.last_heartbeat = clock()
        self.draining = False
        self._loader = loader
        self._preloaded: dict[str, GeneratorParts] = {}
        self._load_lock = asyncio.Lock()
        self._heartbeat_task: asyncio.Task[None] | None = None

    def preload(self, name: str) -> None:
        """Load a model before there is an event loop; `start` makes its generator."""
        self._preloaded[name] = self._loader(self.specs[name])

    async def start(self) -> None:
        """Make the generators of the preloaded models."""
        for name, parts in self._preloaded.items():
            self.models[name] = ServedModel(self.specs[name], parts)
        self._preloaded.clear()
        self._heartbeat_task = asyncio.create_task(self._heartbeat())

    async def close(self) -> None:
        """Cancel all requests and unload every model."""
        self.draining = True
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()
        while self.models:
            await self.models.popitem()[1].close()

    def find(self, name: str | None) -> ServedModel:
        """A loaded model by name; the first one if `name` is None."""
        if self.draining:
            raise APIError(503, "The server is shutting down.")
        available = {one: model for one, model in self.models.items() if not model.draining}
        if name is None:
            for model in available.values():
                return model
            raise APIError(503, "No model is loaded.", code="model_not_loaded")
        if name in available:
            return available[name]
        if name in self.specs:
            raise APIError(503, f"{name} is not loaded; an admin can load it.", code="model_not_loaded")
        known = ", ".join(self.specs)
        raise APIError(404, f"No model is called {name!r}; there are: {known}.", param="model", code="model_not_found")

    async def load(self, name: str) -> None:
        """Load a registered model; does nothing if it is loaded."""
        spec = self._spec(name)
        async with self._load_lock:
            if name in self.models:
                return
            try:
                parts = await asyncio.to_thread(self._loader, spec)
                self.models[name] = ServedModel(spec, parts)
            except ExlmError as error:
                raise APIError(503, f"{name} cannot be loaded: {error}") from error

    async def unload(self, name: str) -> None:
        """Let a model finish its requests, within the time limit, and unload it, if it is loaded."""
        self._spec(name)
        async with self._load_lock:
            if (model := self.models.get(name)) is not None:
                await model.drain(self.drain_seconds)
                await model.close()
                self.models.pop(name, None)

    def _spec(self, name: str) -> ModelSpec:
        if name not in self.specs:
            raise APIError(404, f"No model is called {name!r}.", param="model", code="model_not_found")
        return self.specs[name]

    async def _heartbeat(self) -> None:
        while True:
            self.last_heartbeat = self.clock()
            await asyncio.sleep(HEARTBEAT_SECONDS)


def _unloaded_error(name: str) -> APIError:
    return APIError(503, f"{name} was unloaded before the answer was complete.", code="model_unloaded")


async def _ends_without_error(job: AsyncJob) -> bool:
    try:
        async for result in job:
            if result["stage"] == "streaming" and result["eos"]:
                return "error" not in result
    except Exception as error:
        log.warning("A health check failed: %s", error)
    return False
