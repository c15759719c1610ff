"""The generator in an event loop: rounds run in a worker thread, a job is an async iterator of results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ..errors import InputError
from .generator import Generator
from .job import Job
from .results import Result

END = object()


class AsyncGenerator:
    """A `Generator` whose jobs are consumed with `async for`; made inside a running event loop.

    When that loop has ended, as each `asyncio.run` ends its own, it goes on in the one of the next job.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """The arguments are those of `Generator`."""
        self.generator = Generator(*arguments, **options)
        self.jobs: dict[int, AsyncJob] = {}
        self._closed = False
        self.iteration_task: asyncio.Task[None]
        self._settle(asyncio.get_running_loop())

    def enqueue(self, job: AsyncJob) -> None:
        """For old scripts: a job is queued when it is made, so there is nothing left to do."""
        if job.generator is not self:
            raise InputError("This job was made for another generator, which has it: make one for this.")

    async def cancel(self, job: AsyncJob) -> None:
        """Drop a job and end its iteration; harmless for a finished one."""
        job.cancelled = True
        async with self._free:
            self.generator.cancel(job.job)
        self.jobs.pop(id(job.job), None)
        job.queue.put_nowait(END)

    async def close(self) -> None:
        """Drop every job and stop; later jobs are refused."""
        if self.iteration_task.get_loop() is not asyncio.get_running_loop():
            self.attend()
        self._closed = True
        self._wake.set()
        if not self.iteration_task.done():
            await asyncio.wait([self.iteration_task])
        async with self._free:
            self.generator.clear_queue()
        for job in self.jobs.values():
            job.queue.put_nowait(END)
        self.jobs.clear()

    def attend(self) -> None:
        """Be at work in the event loop that is running; jobs of one that has ended ended with it."""
        home, loop = self.iteration_task.get_loop(), asyncio.get_running_loop()
        if self._closed or (home is loop and not self.iteration_task.done()):
            return
        if home is loop:  # as those do who cancel every task there is; a round may have been cut short
            raise InputError("The task of this generator was cancelled: make another generator.")
        if not home.is_closed():
            raise InputError("This generator is at work in another event loop: make one for this loop.")
        self.generator.clear_queue()
        self.jobs.clear()
        self._settle(loop)

    def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        self._wake = asyncio.Event()
        self._free = asyncio.Lock()  # held while a round runs: the queue is not touched meanwhile
        self.iteration_task = loop.create_task(self._run())

    async def take(self, job: AsyncJob) -> None:
        """Queue a job that was not cancelled meanwhile; one that cannot run raises here and is forgotten."""
        async with self._free:
            if self._closed:
                raise InputError("This generator is closed: make another one.")
            if job.cancelled:
                return
            if job.job.filters or job.job.stop_strings or job.job.banned_strings:
                # Grammars are compiled and automata built for each job: that may take a third of a second.
                await asyncio.to_thread(self.generator.enqueue, job.job)
            else:
                self.generator.enqueue(job.job)
            self.jobs[id(job.job)] = job
        self._wake.set()

    async def _run(self) -> None:
        while not self._closed:
            if not self.generator.num_remaining_jobs():
                self._wake.clear()
                await self._wake.wait()
                continue
            async with self._free:
                try:
                    results = await asyncio.to_thread(self.generator.iterate)
                except Exception as error:
                    self._break(error)
                    continue
            for result in results:
                self._deliver(result)
            await asyncio.sleep(0)

    def _deliver(self, result: Result) -> None:
        job = self.jobs.get(id(result["job"]))
        if job is None:
            return
        job.queue.put_nowait(result)
        if result["eos"]:
            del self.jobs[id(result["job"])]
            job.queue.put_nowait(END)

    def _break(self, error: Exception) -> None:
        """A round failed as a whole: every job hears of it, and later jobs start afresh."""
        self.generator.clear_queue()
        for job in self.jobs.values():
            job.queue.put_nowait(error)
        self.jobs.clear()


class AsyncJob:
    """A job of an `AsyncGenerator`: `async for result in job`."""

    def __init__(self, generator: AsyncGenerator, *arguments: Any, **options: Any) -> None:
        """The further arguments are those of `Job`; it is queued at once, or refused when iterated."""
        generator.attend()
        self.generator = generator
        self.job = Job(*arguments, **options)
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False
        self._entering = asyncio.get_running_loop().create_task(self._enter())

    async def __aiter__(self) -> AsyncIterator[Result]:
        """Started, prefill and streaming results, until the last one."""
        while (item := await self.queue.get()) is not END:
            if isinstance(item, Exception):
                self.queue.put_nowait(END)
                raise item
            yield item
        self.queue.put_nowait(END)  # for whoever else listens, or listens again

    async def cancel(self) -> None:
        """Stop; an iteration that is waiting ends."""
        await self.generator.cancel(self)

    async def _enter(self) -> None:
        try:
            await self.generator.take(self)
        except Exception as error:
            self.queue.put_nowait(error)
