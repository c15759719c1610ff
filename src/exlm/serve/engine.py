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

from .answer import Piece, piece_of
from .hosting import Listing, Loaded, load
from .problems import Problem
from .pulse import Pulse
from .translate import Host, Order

Loader: TypeAlias = Callable[[Listing], Loaded]

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
DRAIN_STEP = 0.02
TICK_SECONDS = 0.5
PROBE_SALT = "health check"


class Hosted:
    """One loaded model at work; made inside a running event loop."""

    def __init__(self, listing: Listing, loaded: Loaded) -> None:
        self.listing, self.loaded = listing, loaded
        self.generator = AsyncGenerator(loaded.model, loaded.cache, loaded.tokenizer, **loaded.options)
        inner = self.generator.generator
        self.host = Host(
            name=listing.name,
            tokenizer=loaded.tokenizer,
            length=inner.max_sequence_length(),
            pair=inner.max_sequence_length(2),
            vocab=loaded.model.config.vocab_size,
            loras=loaded.loras,
            drafts=inner.num_draft_tokens > 0,
        )
        self.pulse = Pulse()
        self.leaving = False
        """Whether it answers what it has and takes nothing more."""
        self.visitors = 0
        """Requests that have found it, until they are answered."""
        self.closed = False
        self._dropping: set[asyncio.Task[None]] = set()
        self._probe: asyncio.Task[bool] | None = None

    def run(self, order: Order) -> Run:
        """Start the jobs of an order; whoever stops listening must close what is returned."""
        if self.closed:
            raise _unloaded(self.host.name)
        return Run(self, order)

    def begin(self, **arguments: Any) -> AsyncJob:
        """Queue a job, which `end` or `drop` must be told of."""
        job = AsyncJob(self.generator, **arguments)
        self.pulse.begin(f"a job of {job.job.prompt_tokens} tokens was queued")
        return job

    def end(self, job: AsyncJob) -> None:
        """A job has ended by itself."""
        self.pulse.end(f"{job.job!r} ended after {job.job.new_tokens} tokens")

    def drop(self, job: AsyncJob) -> None:
        """Cancel a job in the background, within a step; until that is done it counts as waiting."""

        async def dropped() -> None:
            await job.cancel()
            self.pulse.end(f"{job.job!r} was dropped after {job.job.new_tokens} tokens")

        task = asyncio.get_running_loop().create_task(dropped())
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def ready(self, seconds: float) -> bool:
        """Whether a token comes out of the scheduler in time: one asked for here, or anybody's."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._token(seconds))
        return await asyncio.shield(self._probe)

    @contextmanager
    def visited(self) -> Iterator[None]:
        """In the block somebody is being answered, and should be before the model goes."""
        self.visitors += 1
        try:
            yield
        finally:
            self.visitors -= 1

    async def drain(self, seconds: float) -> None:
        """Take nothing more, and give the visitors there are so long."""
        self.leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.visitors:
                    await asyncio.sleep(DRAIN_STEP)

    async def close(self) -> None:
        """Drop every job and give the memory back; a generator that is stuck is left behind."""
        if self.closed:
            return
        self.closed = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.generator.close()
                await asyncio.gather(*self._dropping, return_exceptions=True)
        except TimeoutError:
            return
        await asyncio.to_thread(self.loaded.unload)

    async def _token(self, seconds: float) -> bool:
        before = self.pulse.tokens
        probe = self.begin(
            input_ids=torch.tensor([[max(self.host.tokenizer.bos_token_id or 0, 0)]]),
            max_new_tokens=1,
            gen_settings=Settings.greedy(),
            salt=PROBE_SALT,
        )
        task = asyncio.create_task(_first_token(probe))
        try:
            async with asyncio.timeout(seconds):
                while not task.done() and self.pulse.tokens == before:
                    await asyncio.wait({task}, timeout=0.02)
        except TimeoutError:
            return False
        finally:
            if task.done():
                self.end(probe)
            else:
                task.cancel()
                self.drop(probe)
        return self.pulse.tokens > before or (task.done() and task.result())


class Run:
    """The jobs of one order at work: pieces of their texts as they come, until it is closed."""

    def __init__(self, hosted: Hosted, order: Order) -> None:
        """Queue the jobs; one that cannot be made takes the others with it."""
        self._hosted, self._order = hosted, order
        self._inbox: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()
        self._alive: dict[int, AsyncJob] = {}
        self._pumps: list[asyncio.Task[None]] = []
        try:
            for place, arguments in enumerate(order.jobs):
                self._alive[place] = hosted.begin(**arguments)
        except BaseException:
            self.close()
            raise
        self._jobs = [job.job for job in self._alive.values()]
        self._pumps += [asyncio.create_task(self._pump(place)) for place in self._alive]

    async def next(self) -> tuple[int, Piece]:
        """The next piece, and which text it belongs to; raises what ended a job."""
        item = await self._inbox.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def settle(self, seconds: float) -> None:
        """Wait a little for the first piece, which stays; an early refusal is raised."""
        try:
            async with asyncio.timeout(seconds):
                item = await self._inbox.get()
        except TimeoutError:
            return
        if isinstance(item, Exception):
            raise item
        rest = [item]
        while not self._inbox.empty():
            rest.append(self._inbox.get_nowait())  # type: ignore[arg-type]
        for one in rest:
            self._inbox.put_nowait(one)

    def spent(self) -> tuple[int, int, int]:
        """Tokens so far: of prompts that were begun, of those found in the cache, and generated."""
        prompts = [job for job in self._jobs[:: self._order.n] if job.metrics.prefill_started_at is not None]
        return (
            sum(job.prompt_tokens for job in prompts),
            sum(job.cached_tokens for job in prompts),
            sum(job.new_tokens for job in self._jobs),
        )

    def close(self) -> None:
        """Drop what still runs."""
        for pump in self._pumps:
            pump.cancel()
        for job in self._alive.values():
            self._hosted.drop(job)
        self._alive.clear()

    async def _pump(self, place: int) -> None:
        """Hand on what a job gives, at once: results with logits are large and must not pile up."""
        job, piece = self._alive[place], None
        try:
            async for result in job:
                self._hosted.pulse.beat(result)
                if (piece := piece_of(result, self._order)) is not None:
                    self._inbox.put_nowait((place, piece))
            if piece is None or piece.end is None:
                self._inbox.put_nowait(_unloaded(self._order.model))
        except Exception as error:
            self._inbox.put_nowait(error)
        if self._alive.pop(place, None) is not None:
            self._hosted.end(job)


class Engine:
    """Every model that may be served, and those that are."""

    def __init__(
        self,
        listings: Sequence[Listing],
        loader: Loader = load,
        clock: Callable[[], float] = time.monotonic,
        drain_seconds: float = 30.0,
    ) -> None:
        """Nothing is loaded yet; `loader` does that. A model has `drain_seconds` to finish before it goes."""
        self.listings: Mapping[str, Listing] = {listing.name: listing for listing in listings}
        self.hosted: dict[str, Hosted] = {}
        self.clock, self.drain_seconds = clock, drain_seconds
        self.started = int(time.time())
        self.last_tick = clock()
        self.draining = False
        self._loader = loader
        self._early: dict[str, Loaded] = {}
        self._changing = asyncio.Lock()
        self._ticking: asyncio.Task[None] | None = None

    def preload(self, name: str) -> None:
        """Load a model now, before there is an event loop; `start` puts it to work."""
        self._early[name] = self._loader(self.listings[name])

    async def start(self) -> None:
        """Put what was preloaded to work."""
        for name, loaded in self._early.items():
            self.hosted[name] = Hosted(self.listings[name], loaded)
        self._early.clear()
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Drop everything."""
        self.draining = True
        if self._ticking is not None:
            self._ticking.cancel()
        while self.hosted:
            await self.hosted.popitem()[1].close()

    def find(self, name: str | None) -> Hosted:
        """A loaded model by its registered name; the first one if no name is given."""
        if self.draining:
            raise Problem(503, "The server is shutting down.")
        staying = {one: hosted for one, hosted in self.hosted.items() if not hosted.leaving}
        if name is None:
            for hosted in staying.values():
                return hosted
            raise Problem(503, "No model is loaded.", code="model_not_loaded")
        if name in staying:
            return staying[name]
        if name in self.listings:
            raise Problem(503, f"{name} is not loaded; an admin can load it.", code="model_not_loaded")
        known = ", ".join(self.listings)
        raise Problem(
            404, f"No model is called {name!r}; there are: {known}.", param="model", code="model_not_found"
        )

    async def load(self, name: str) -> None:
        """Load a registered model; nothing if it is loaded."""
        listing = self._listed(name)
        async with self._changing:
            if name in self.hosted:
                return
            try:
                loaded = await asyncio.to_thread(self._loader, listing)
                self.hosted[name] = Hosted(listing, loaded)
            except ExlmError as error:
                raise Problem(503, f"{name} cannot be loaded: {error}") from error

    async def unload(self, name: str) -> None:
        """Let a model finish what it has, for a while, and let go of it; nothing if it is not loaded."""
        self._listed(name)
        async with self._changing:
            if (hosted := self.hosted.get(name)) is not None:
                await hosted.drain(self.drain_seconds)
                await hosted.close()
                self.hosted.pop(name, None)

    def _listed(self, name: str) -> Listing:
        if name not in self.listings:
            raise Problem(404, f"No model is called {name!r}.", param="model", code="model_not_found")
        return self.listings[name]

    async def _tick(self) -> None:
        """Show that the event loop goes round."""
        while True:
            self.last_tick = self.clock()
            await asyncio.sleep(TICK_SECONDS)


def _unloaded(name: str) -> Problem:
    return Problem(503, f"{name} was unloaded before the answer was complete.", code="model_unloaded")


async def _first_token(job: AsyncJob) -> bool:
    try:
        async for result in job:
            if result["stage"] == "streaming" and result["eos"]:
                return "error" not in result
    except Exception as error:
        log.warning("A health check failed: %s", error)
    return False
