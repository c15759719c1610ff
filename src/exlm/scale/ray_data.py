"""A batch on a cluster: a Ray Data pipeline from the rows that are left to the journal.

The driver alone writes the journal: every row is done exactly once, by the same rule as on one machine. An
actor has a model, and several parts of the file at once: as one ends the next is there, and the batch of its
generator never runs dry. Ray Data feeds actors as they finish and starts again what died with one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from exlm import ExlmError, WorkerLost
from exlm.batch import Journal, Progress, Row, RowAdapter, Rows
from exlm.serve import Limits, ModelSpec
from exlm.serve.engine import LoadedModel

from .cluster import import_ray
from .config import ClusterConfig
from .loading import loader

PARTS_PER_ACTOR = 4
"""Parts of the file that an actor works on at once."""
ROWS_PER_PART = 32
"""Rows of a part: what is done again if an actor dies is at most a few parts."""
MAX_PARTS = 4096
"""With more parts than these, parts are larger."""


@dataclass(frozen=True)
class BatchTask:
    """What every actor has to know of a batch."""

    spec: ModelSpec
    sha256: str
    created: int
    tensor_parallel: int = 1


class BatchActor:
    """An actor of the pipeline: rows in, lines out, all of its calls in one continuous batch."""

    def __init__(self, task: BatchTask) -> None:
        """Load the model, and run its generator in an event loop of its own."""
        self._task = task
        self._loaded = loader(task.tensor_parallel)(task.spec)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="exlm-batch", daemon=True).start()
        self._hosted, self._wording = self._do(self._begin())

    def __call__(self, table: Any) -> Any:
        """Answer a part: an Arrow table of rows, to one of lines."""
        import pyarrow

        lines = self._do(self._answer_all(table.to_pylist()))
        kinds = {"place": "int64", "line": "binary", "tokens": "int64", "error": "bool", "fault": "string"}
        return pyarrow.Table.from_pylist(lines, pyarrow.schema([*kinds.items()]))

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self) -> tuple[LoadedModel, RowAdapter]:
        hosted = LoadedModel(self._task.spec, self._loaded)
        return hosted, RowAdapter(self._task.sha256, self._task.created, hosted.info, Limits())

    async def _answer_all(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._answer, rows))

    async def _answer(self, told: dict[str, Any]) -> dict[str, Any]:
        place, row = told["place"], Row(told["number"], told["name"], told["text"])
        tokens, error = 0, False
        try:
            try:
                line, tokens = await self._run(place, row)
            except Exception as wrong:
                line, error = self._wording.error_line(place, row, wrong), True
        except ExlmError as fault:  # not the row's: the driver ends the run
            return {"place": place, "line": b"", "tokens": 0, "error": True, "fault": str(fault)}
        return {"place": place, "line": line, "tokens": tokens, "error": error, "fault": None}

    async def _run(self, place: int, row: Row) -> tuple[bytes, int]:
        answer = await asyncio.to_thread(self._wording.prepare, place, row)
        run, tokens = self._hosted.submit(answer.order), 0
        try:
            while not answer.done:
                text, piece = await run.next()
                answer.push(text, piece)
                tokens += piece.finish.new_tokens if piece.finish is not None else 0
        finally:
            run.close()
        return self._wording.success_line(place, row, answer), tokens


def run_rows_on_ray(
    rows: Rows,
    journal: Journal,
    spec: ModelSpec,
    config: ClusterConfig,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """Answer every row that the journal does not have yet, on the cluster that is connected."""
    ray, data = import_ray(), import_ray("data")
    left = [place for place in range(len(rows.rows)) if place not in journal.done]
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
    data: Any, rows: Rows, left: list[int], task: BatchTask, shape: ClusterConfig
) -> Iterator[list[dict[str, Any]]]:
    """Lines as they come from the actors, in no order."""
    if not left:
        return
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    items = [
        {"place": place, "number": row.line, "name": row.custom_id, "text": row.text}
        for place, row in ((place, rows.rows[place]) for place in left)
    ]
    part = max(ROWS_PER_PART, -(-len(left) // MAX_PARTS))
    parts = data.from_items(items, override_num_blocks=-(-len(left) // part))
    lines = parts.map_batches(
        BatchActor,
        fn_constructor_args=(task,),
        batch_format="pyarrow",
        batch_size=None,
        compute=data.ActorPoolStrategy(
            min_size=shape.least,
            max_size=shape.most,
            max_tasks_in_flight_per_actor=PARTS_PER_ACTOR,
            max_concurrent_calls_per_actor=PARTS_PER_ACTOR,
            enable_true_multi_threading=True,
        ),
        num_cpus=shape.cpus,
        num_gpus=shape.gpus or None,
    )
    for table in lines.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield table.to_pylist()


def _store(lines: list[dict[str, Any]], journal: Journal, progress: Progress) -> None:
    """Write what is new; a part that was done twice counts once."""
    new = [one for one in lines if one["place"] not in journal.done and one["fault"] is None]
    journal.add((one["place"], one["line"]) for one in new)
    progress.done = len(journal.done)
    progress.errors += sum(one["error"] for one in new)
    progress.new_tokens += sum(one["tokens"] for one in new)
    if fault := next((one["fault"] for one in lines if one["fault"] is not None), None):
        raise ExlmError(fault)
