"""A batch on a cluster: a Ray Data pipeline from the unanswered rows to the journal.

Only the driver writes the journal, so every row is answered exactly once, as on one machine. An actor has a
model and works on several parts of the file at a time, so that its generator's batch stays full. Ray Data
feeds actors as they finish, and repeats the parts of an actor that died.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from exlm import ExlmError, WorkerLost
from exlm.batch import Journal, Progress, Row, RowAdapter, Rows
from exlm.serve import Limits, ModelSpec, load
from exlm.serve.engine import LoadedModel

from .cluster import import_ray
from .config import ClusterConfig

T = TypeVar("T")

PARTS_PER_ACTOR = 4
"""Parts of the file that an actor works on at a time."""
ROWS_PER_PART = 32
"""Rows of a part: if an actor dies, at most a few parts are repeated."""
MAX_PARTS = 4096
"""Parts are made larger rather than more than this."""


@dataclass(frozen=True)
class BatchTask:
    """What every actor has to know of a batch."""

    spec: ModelSpec
    sha256: str
    created: int
    tensor_parallel: int = 1


class BatchActor:
    """A Ray Data actor: rows in, lines of the output out, all calls in one continuous batch."""

    def __init__(self, task: BatchTask) -> None:
        """Load the model, and run its generator in an event loop in a thread."""
        self._task = task
        self._parts = load(task.spec, tensor_parallel=task.tensor_parallel)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="exlm-batch", daemon=True).start()
        self._model, self._adapter = self._run_in_loop(self._start())

    def __call__(self, table: Any) -> Any:
        """Answer a part of the file: from an Arrow table of rows to one of lines."""
        import pyarrow

        lines = self._run_in_loop(self._answer_all(table.to_pylist()))
        types = {"index": "int64", "line": "binary", "tokens": "int64", "error": "bool", "fault": "string"}
        return pyarrow.Table.from_pylist(lines, pyarrow.schema([*types.items()]))

    def _run_in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> tuple[LoadedModel, RowAdapter]:
        model = LoadedModel(self._task.spec, self._parts)
        return model, RowAdapter(self._task.sha256, self._task.created, model.info, Limits())

    async def _answer_all(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._answer, rows))

    async def _answer(self, item: dict[str, Any]) -> dict[str, Any]:
        index, row = item["index"], Row(item["number"], item["name"], item["text"])
        tokens, is_error = 0, False
        try:
            try:
                line, tokens = await self._generate(index, row)
            except Exception as error:
                line, is_error = self._adapter.error_line(index, row, error), True
        except ExlmError as fault:  # not caused by the row: the driver ends the run
            return {"index": index, "line": b"", "tokens": 0, "error": True, "fault": str(fault)}
        return {"index": index, "line": line, "tokens": tokens, "error": is_error, "fault": None}

    async def _generate(self, index: int, row: Row) -> tuple[bytes, int]:
        writer = await asyncio.to_thread(self._adapter.prepare, index, row)
        tokens = 0
        with closing(self._model.submit(writer.request)) as stream:
            while not writer.done:
                text, delta = await stream.next()
                writer.push(text, delta)
                tokens += delta.finish.new_tokens if delta.finish is not None else 0
        return self._adapter.success_line(index, row, writer), tokens


def run_rows_on_ray(
    rows: Rows,
    journal: Journal,
    spec: ModelSpec,
    config: ClusterConfig,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """Answer every row that is not in the journal yet, on the connected cluster."""
    ray, data = import_ray(), import_ray("data")
    left = [index for index in range(len(rows.rows)) if index not in journal.done]
    progress = Progress(done=len(journal.done))
    task = BatchTask(spec, rows.sha256, journal.created, config.tensor_parallel)
    try:
        for lines in _pipeline(data, rows, left, task, config):
            _store(lines, journal, progress)
            on_progress(progress)
    except ray.exceptions.RayError as error:
        last = str(error).strip().splitlines()[-1]
        raise WorkerLost(
            f"The actors of the batch failed: {last}. What is done is safe in the journal."
        ) from None
    return progress


def _pipeline(
    data: Any, rows: Rows, left: list[int], task: BatchTask, config: ClusterConfig
) -> Iterator[list[dict[str, Any]]]:
    """Run the pipeline; yields lines as the actors finish them, in any order."""
    if not left:
        return
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    items = [
        {"index": index, "number": row.line, "name": row.custom_id, "text": row.text}
        for index, row in ((index, rows.rows[index]) for index in left)
    ]
    rows_per_part = max(ROWS_PER_PART, -(-len(left) // MAX_PARTS))
    parts = data.from_items(items, override_num_blocks=-(-len(left) // rows_per_part))
    lines = parts.map_batches(
        BatchActor,
        fn_constructor_args=(task,),
        batch_format="pyarrow",
        batch_size=None,
        compute=data.ActorPoolStrategy(
            min_size=config.least,
            max_size=config.most,
            max_tasks_in_flight_per_actor=PARTS_PER_ACTOR,
            max_concurrent_calls_per_actor=PARTS_PER_ACTOR,
            enable_true_multi_threading=True,
        ),
        num_cpus=config.cpus,
        num_gpus=config.gpus or None,
    )
    for table in lines.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield table.to_pylist()


def _store(lines: list[dict[str, Any]], journal: Journal, progress: Progress) -> None:
    """Write new lines to the journal; a part that was done twice counts once."""
    new = [one for one in lines if one["index"] not in journal.done and one["fault"] is None]
    journal.add((one["index"], one["line"]) for one in new)
    progress.done = len(journal.done)
    progress.errors += sum(one["error"] for one in new)
    progress.new_tokens += sum(one["tokens"] for one in new)
    if fault := next((one["fault"] for one in lines if one["fault"] is not None), None):
        raise ExlmError(fault)
