"""The owner of models and generators: registered names in, pieces of text out.

It runs orders and knows nothing of HTTP. A `Hosted` is one loaded model with its generator; the `Engine` has
those that are loaded and can load the others by name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch

from exlm import AsyncGenerator, AsyncJob, ExlmError, Settings

from .errors import APIError
from .generation import GenerationRequest, ModelInfo
from .models import GeneratorParts, ModelSpec, load
from .openai import OutputDelta, output_delta
from .pulse import Activity

Loader: TypeAlias = Callable[[ModelSpec], GeneratorParts]

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
DRAIN_POLL_SECONDS = 0.02
TICK_SECONDS = 0.5
PROBE_SALT = "health check"


class LoadedModel:
    """One loaded model at work; made inside a running event loop."""

    def __init__(self, listing: ModelSpec, loaded: GeneratorParts) -> None:
        self.spec, self.parts = listing, loaded
        self.generator = AsyncGenerator(loaded.model, loaded.cache, loaded.tokenizer, **loaded.options)
        inner = self.generator.generator
        self.info = ModelInfo(
            name=listing.name,
            tokenizer=loaded.tokenizer,
            max_seq_len=inner.max_sequence_length(),
            max_guided_len=inner.max_sequence_length(2),
            vocab_size=loaded.model.config.vocab_size,
            loras=loaded.loras,
            has_draft=inner.num_draft_tokens > 0,
        )
        self.activity = Activity()
        self.draining = False
        """Whether it answers what it has and takes nothing more."""
        self.in_flight = 0
        """Requests that have found it, until they are answered."""
        self.closed = False
        self._cancelling: set[asyncio.Task[None]] = set()
        self._probe: asyncio.Task[bool] | None = None

    def submit(self, order: GenerationRequest) -> RequestStream:
        """Start the jobs of an order; whoever stops listening must close what is returned."""
        if self.closed:
            raise _model_unloaded(self.info.name)
        return RequestStream(self, order)

    def enqueue(self, **arguments: Any) -> AsyncJob:
        """Queue a job, which `end` or `drop` must be told of."""
        job = AsyncJob(self.generator, **arguments)
        self.activity.job_queued(f"a job of {job.job.prompt_tokens} tokens was queued")
        return job

    def job_ended(self, job: AsyncJob) -> None:
        """A job has ended by itself."""
        self.activity.job_ended(f"{job.job!r} ended after {job.job.new_tokens} tokens")

    def cancel(self, job: AsyncJob) -> None:
        """Cancel a job in the background, within a step; until that is done it counts as waiting."""

        async def dropped() -> None:
            await job.cancel()
            self.activity.job_ended(f"{job.job!r} was dropped after {job.job.new_tokens} tokens")

        task = asyncio.get_running_loop().create_task(dropped())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def is_ready(self, seconds: float) -> bool:
        """Whether a token comes out of the scheduler in time: one asked for here, or anybody's."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._token(seconds))
        return await asyncio.shield(self._probe)

    @contextmanager
    def request_in_flight(self) -> Iterator[None]:
        """In the block somebody is being answered, and should be before the model goes."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def drain(self, seconds: float) -> None:
        """Take nothing more, and give the visitors there are so long."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.in_flight:
                    await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def close(self) -> None:
        """Drop every job and give the memory back; a generator that is stuck is left behind."""
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

    async def _token(self, seconds: float) -> bool:
        before = self.activity.tokens
        probe = self.enqueue(
            input_ids=torch.tensor([[max(self.info.tokenizer.bos_token_id or 0, 0)]]),
            max_new_tokens=1,
            gen_settings=Settings.greedy(),
            salt=PROBE_SALT,
        )
        task = asyncio.create_task(_first_token(probe))
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
    """The jobs of one order at work: pieces of their texts as they come, until it is closed."""

    def __init__(self, hosted: LoadedModel, order: GenerationRequest) -> None:
        """Queue the jobs; one that cannot be made takes the others with it."""
        self._model, self._request = hosted, order
        self._deltas: asyncio.Queue[tuple[int, OutputDelta] | Exception] = asyncio.Queue()
        self._running: dict[int, AsyncJob] = {}
        self._pumps: list[asyncio.Task[None]] = []
        try:
            for place, arguments in enumerate(order.job_arguments):
                self._running[place] = hosted.enqueue(**arguments)
        except BaseException:
            self.close()
            raise
        self._jobs = [job.job for job in self._running.values()]
        self._pumps += [asyncio.create_task(self._pump(place)) for place in self._running]

    async def next(self) -> tuple[int, OutputDelta]:
        """The next piece, and which text it belongs to; raises what ended a job."""
        item = await self._deltas.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def wait_for_first(self, seconds: float) -> None:
        """Wait a little for the first piece, which stays; an early refusal is raised."""
        try:
            async with asyncio.timeout(seconds):
                item = await self._deltas.get()
        except TimeoutError:
            return
        if isinstance(item, Exception):
            raise item
        rest = [item]
        while not self._deltas.empty():
            rest.append(self._deltas.get_nowait())  # type: ignore[arg-type]
        for one in rest:
            self._deltas.put_nowait(one)

    def token_counts(self) -> tuple[int, int, int]:
        """Tokens so far: of prompts that were begun, of those found in the cache, and generated."""
        prompts = [
            job for job in self._jobs[:: self._request.n] if job.metrics.prefill_started_at is not None
        ]
        return (
            sum(job.prompt_tokens for job in prompts),
            sum(job.cached_tokens for job in prompts),
            sum(job.new_tokens for job in self._jobs),
        )

    def close(self) -> None:
        """Drop what still runs."""
        for pump in self._pumps:
            pump.cancel()
        for job in self._running.values():
            self._model.cancel(job)
        self._running.clear()

    async def _pump(self, place: int) -> None:
        """Hand on what a job gives, at once: results with logits are large and must not pile up."""
        job, piece = self._running[place], None
        try:
            async for result in job:
                self._model.activity.on_result(result)
                if (piece := output_delta(result, self._request)) is not None:
                    self._deltas.put_nowait((place, piece))
            if piece is None or piece.finish is None:
                self._deltas.put_nowait(_model_unloaded(self._request.model))
        except Exception as error:
            self._deltas.put_nowait(error)
        if self._running.pop(place, None) is not None:
            self._model.job_ended(job)


class Engine:
    """Every model that may be served, and those that are."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        loader: Loader = load,
        clock: Callable[[], float] = time.monotonic,
        drain_seconds: float = 30.0,
    ) -> None:
        """Nothing is loaded yet; `loader` does that. A model has `drain_seconds` to finish before it goes."""
        self.specs: Mapping[str, ModelSpec] = {listing.name: listing for listing in specs}
        self.models: dict[str, LoadedModel] = {}
        self.clock, self.drain_seconds = clock, drain_seconds
        self.started = int(time.time())
        self.last_tick = clock()
        self.draining = False
        self._loader = loader
        self._preloaded: dict[str, GeneratorParts] = {}
        self._load_lock = asyncio.Lock()
        self._tick_task: asyncio.Task[None] | None = None

    def preload(self, name: str) -> None:
        """Load a model now, before there is an event loop; `start` puts it to work."""
        self._preloaded[name] = self._loader(self.specs[name])

    async def start(self) -> None:
        """Put what was preloaded to work."""
        for name, loaded in self._preloaded.items():
            self.models[name] = LoadedModel(self.specs[name], loaded)
        self._preloaded.clear()
        self._tick_task = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Drop everything."""
        self.draining = True
        if self._tick_task is not None:
            self._tick_task.cancel()
        while self.models:
            await self.models.popitem()[1].close()

    def find(self, name: str | None) -> LoadedModel:
        """A loaded model by its registered name; the first one if no name is given."""
        if self.draining:
            raise APIError(503, "The server is shutting down.")
        staying = {one: hosted for one, hosted in self.models.items() if not hosted.draining}
        if name is None:
            for hosted in staying.values():
                return hosted
            raise APIError(503, "No model is loaded.", code="model_not_loaded")
        if name in staying:
            return staying[name]
        if name in self.specs:
            raise APIError(503, f"{name} is not loaded; an admin can load it.", code="model_not_loaded")
        known = ", ".join(self.specs)
        raise APIError(
            404, f"No model is called {name!r}; there are: {known}.", param="model", code="model_not_found"
        )

    async def load(self, name: str) -> None:
        """Load a registered model; nothing if it is loaded."""
        listing = self._spec(name)
        async with self._load_lock:
            if name in self.models:
                return
            try:
                loaded = await asyncio.to_thread(self._loader, listing)
                self.models[name] = LoadedModel(listing, loaded)
            except ExlmError as error:
                raise APIError(503, f"{name} cannot be loaded: {error}") from error

    async def unload(self, name: str) -> None:
        """Let a model finish what it has, for a while, and let go of it; nothing if it is not loaded."""
        self._spec(name)
        async with self._load_lock:
            if (hosted := self.models.get(name)) is not None:
                await hosted.drain(self.drain_seconds)
                await hosted.close()
                self.models.pop(name, None)

    def _spec(self, name: str) -> ModelSpec:
        if name not in self.specs:
            raise APIError(404, f"No model is called {name!r}.", param="model", code="model_not_found")
        return self.specs[name]

    async def _tick(self) -> None:
        """Show that the event loop goes round."""
        while True:
            self.last_tick = self.clock()
            await asyncio.sleep(TICK_SECONDS)


def _model_unloaded(name: str) -> APIError:
    return APIError(503, f"{name} was unloaded before the answer was complete.", code="model_unloaded")


async def _first_token(job: AsyncJob) -> bool:
    try:
        async for result in job:
            if result["stage"] == "streaming" and result["eos"]:
                return "error" not in result
    except Exception as error:
        log.warning("A health check failed: %s", error)
    return False
