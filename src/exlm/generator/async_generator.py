"""`AsyncGenerator`: steps run in a worker thread, and each job is an async iterator of its results."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from ..errors import InputError
from .generator import Generator
from .job import Job
from .results import Result, ResultQueue

END_OF_RESULTS = object()


class AsyncGenerator:
    """A `Generator` for asyncio: `async for` reads a job's results. Create it inside a running event loop.

    When that loop is closed (`asyncio.run` closes its own), it moves to the event loop of the next job.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """The arguments are those of `Generator`."""
        self.generator = Generator(*arguments, **options)
        self.jobs: dict[int, AsyncJob] = {}
        self.results: ResultQueue = deque()
        """Results that were not passed to their jobs' queues yet."""
        self._closed = False
        self.iteration_task: asyncio.Task[None]
        self._bind_event_loop(asyncio.get_running_loop())

    def enqueue(self, job: AsyncJob) -> None:
        """Do nothing, for exllamav2 scripts: a job is queued when it is created."""
        if job.generator is not self:
            raise InputError("This job belongs to another generator, which has queued it: create a job for this one.")

    async def cancel(self, job: AsyncJob) -> None:
        """Drop a job and end its iteration; does nothing for a finished one."""
        job.cancelled = True
        async with self._step_lock:
            self.generator.cancel(job.job)
        self.jobs.pop(id(job.job), None)
        job.queue.put_nowait(END_OF_RESULTS)

    async def close(self) -> None:
        """Drop every job and stop; later jobs are refused."""
        if self.iteration_task.get_loop() is not asyncio.get_running_loop():
            self.ensure_running()
        self._closed = True
        self._has_jobs.set()
        if not self.iteration_task.done():
            await asyncio.wait([self.iteration_task])
        async with self._step_lock:
            self.generator.clear_queue()
        for job in self.jobs.values():
            job.queue.put_nowait(END_OF_RESULTS)
        self.jobs.clear()
        self.results.clear()

    def ensure_running(self) -> None:
        """Move to the current event loop if the previous one is closed; its jobs ended with it."""
        bound_loop, loop = self.iteration_task.get_loop(), asyncio.get_running_loop()
        if self._closed or (bound_loop is loop and not self.iteration_task.done()):
            return
        if bound_loop is loop:  # its task was cancelled, perhaps in the middle of a step
            raise InputError("The task of this generator was cancelled: make another generator.")
        if not bound_loop.is_closed():
            raise InputError("This generator is at work in another event loop: make one for this loop.")
        self.generator.clear_queue()
        self.jobs.clear()
        self.results.clear()
        self._bind_event_loop(loop)

    def _bind_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._has_jobs = asyncio.Event()
        self._step_lock = asyncio.Lock()  # held while a step runs or the queue of jobs changes
        self.iteration_task = loop.create_task(self._run())

    async def submit(self, job: AsyncJob) -> None:
        """Queue a job, unless it was cancelled since; raises for one that cannot run."""
        async with self._step_lock:
            if self._closed:
                raise InputError("This generator is closed: make another one.")
            if job.cancelled:
                return
            if job.job.filters or job.job.stop_strings or job.job.banned_strings:
                # Compiling grammars and string automata may take a third of a second.
                await asyncio.to_thread(self.generator.enqueue, job.job)
            else:
                self.generator.enqueue(job.job)
            self.jobs[id(job.job)] = job
        self._has_jobs.set()

    async def _run(self) -> None:
        while not self._closed:
            if not self.jobs:
                self._has_jobs.clear()
                await self._has_jobs.wait()
                continue
            async with self._step_lock:
                try:
                    await asyncio.to_thread(self.generator.step_unless_results, self.results)
                except Exception as error:
                    self._fail_all(error)
                    continue
            while self.results:
                self._deliver(self.results.popleft())
            await asyncio.sleep(0)

    def _deliver(self, result: Result) -> None:
        job = self.jobs.get(id(result["job"]))
        if job is None:
            return
        job.queue.put_nowait(result)
        if result["eos"]:
            del self.jobs[id(result["job"])]
            job.queue.put_nowait(END_OF_RESULTS)

    def _fail_all(self, error: Exception) -> None:
        """End every job with the error of a step that failed; later jobs are not affected."""
        self.generator.clear_queue()
        for job in self.jobs.values():
            job.queue.put_nowait(error)
        self.jobs.clear()
        self.results.clear()


class AsyncJob:
    """A job of an `AsyncGenerator`: `async for result in job`."""

    def __init__(self, generator: AsyncGenerator, *arguments: Any, **options: Any) -> None:
        """The further arguments are `Job`'s. It is queued at once; iterating raises if it was refused."""
        generator.ensure_running()
        self.generator = generator
        self.job = Job(*arguments, **options)
        self.job.result_queue = generator.results
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False
        self._submit_task = asyncio.get_running_loop().create_task(self._submit())

    async def __aiter__(self) -> AsyncIterator[Result]:
        """Started, prefill and streaming results, until the last one."""
        while (item := await self.queue.get()) is not END_OF_RESULTS:
            if isinstance(item, Exception):
                self.queue.put_nowait(END_OF_RESULTS)
                raise item
            yield item
        self.queue.put_nowait(END_OF_RESULTS)  # for another iteration of the same job

    async def cancel(self) -> None:
        """Drop the job and end its iteration."""
        await self.generator.cancel(self)

    async def _submit(self) -> None:
        try:
            await self.generator.submit(self)
        except Exception as error:
            self.queue.put_nowait(error)
