"""A batch on a cluster: input and output in Parquet tables and object stores, and a Ray Data pipeline.

Requests are converted to a local file of lines and read as such; answers go the other way. Only the driver
writes the journal, so every row is answered exactly once, as on one machine. An actor has a model and works
on several blocks of rows at a time, so that its generator's batch stays full. Ray Data feeds actors as they
finish, and repeats the blocks of an actor that died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from exlm import ExlmError, InputError, WorkerLost
from exlm.batch import Journal, Progress, Row, RowHandler, Rows, read_rows, write_answers
from exlm.serve import Limits, ModelSpec, load
from exlm.serve.engine import ServedModel

from .cluster import ClusterConfig, import_ray

T = TypeVar("T")

PARQUET = ".parquet"
TABLE_ROWS = 4096
"""Rows of a table in memory at a time."""
BLOCKS_PER_ACTOR = 4
"""Ray Data blocks that an actor works on at a time."""
ROWS_PER_BLOCK = 32
"""If an actor dies, at most a few blocks of this size are repeated."""
MAX_BLOCKS = 4096
"""With more rows than fit into these, blocks are larger."""


def is_remote(path: str) -> bool:
    """Whether a path is in an object store: `s3://…`, `gs://…`, `hdfs://…`."""
    return "://" in path


def exists(path: str) -> bool:
    if not is_remote(path):
        return Path(path).exists()
    from pyarrow import fs

    with _readable_errors(path):
        store, key = fs.FileSystem.from_uri(path)
        return bool(store.get_file_info(key).type != fs.FileType.NotFound)


def read_requests(path: str) -> Rows:
    """The requests of a file of lines or of a table, local or in a store.

    A table has the columns `custom_id`, `url` and `body`, which is a struct or JSON as text; `method` may be
    left out.
    """
    if not is_remote(path) and not path.endswith(PARQUET):
        return read_rows(Path(path))
    with tempfile.TemporaryDirectory(prefix="exlm-") as scratch, _readable_errors(path):
        local = Path(path)
        if is_remote(path):
            local = Path(scratch) / _basename(path)
            _copy(path, str(local))
        if not path.endswith(PARQUET):
            return read_rows(local)
        jsonl = Path(scratch) / f"{local.stem}.jsonl"
        jsonl.write_bytes(b"".join(_table_lines(local)))
        return read_rows(jsonl)


def write_answers_anywhere(path: str, journal: Journal, rows: Rows) -> None:
    """Write the answer of every row, in order; a table has `custom_id`, and the rest as JSON text."""
    if not is_remote(path) and not path.endswith(PARQUET):
        write_answers(Path(path), journal, rows)
        return
    folder = None if is_remote(path) else Path(path).parent
    with tempfile.TemporaryDirectory(prefix="exlm-", dir=folder) as scratch:
        local = Path(scratch) / _basename(path)
        if path.endswith(PARQUET):
            _write_table(local, journal, rows)
        else:
            write_answers(local, journal, rows)
        if is_remote(path):
            with _readable_errors(path):
                _copy(str(local), path)
        else:
            local.replace(path)


def _basename(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _copy(source: str, target: str) -> None:
    from pyarrow import fs

    fs.copy_files(source, target)


@contextmanager
def _readable_errors(path: str) -> Iterator[None]:
    """Turn errors of the store or the table into InputErrors that name the path."""
    import_ray("data")  # MissingExtra without Ray Data, which pyarrow comes with
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be used: {error}.") from None


def _table_lines(path: Path) -> Iterator[bytes]:
    """The rows of a table, each as a line of JSON."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        if missing := [name for name in ("custom_id", "url", "body") if name not in file.schema_arrow.names]:
            raise InputError(f"{path.name} has no column {missing[0]!r}: a request has custom_id, url and body.")
        for batch in file.iter_batches(batch_size=TABLE_ROWS):
            for row in batch.to_pylist():
                if isinstance(row["body"], str):
                    row["body"] = _parse_body(row["body"])
                yield json.dumps({"method": "POST", **_without_nulls(row)}).encode() + b"\n"


def _parse_body(text: str) -> Any:
    """A body as data; what is not JSON stays text and becomes an error of its row."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _without_nulls(value: Any) -> Any:
    """A value without the nulls that a table's struct columns have for absent fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _write_table(path: Path, journal: Journal, rows: Rows) -> None:
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([("custom_id", "string"), ("response", "string"), ("error", "string")])
    count = len(rows.rows)
    with parquet.ParquetWriter(path, schema) as file:
        for start in range(0, count, TABLE_ROWS):
            answers = [json.loads(journal.answer(i)) for i in range(start, min(start + TABLE_ROWS, count))]
            columns = [
                [answer["custom_id"] for answer in answers],
                *([answer[name] and json.dumps(answer[name]) for answer in answers] for name in schema.names[1:]),
            ]
            file.write_table(pyarrow.table(columns, schema=schema))


@dataclass(frozen=True)
class BatchTask:
    """What every actor needs to know about a batch."""

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
        self._model, self._handler = self._run_in_loop(self._start())

    def __call__(self, block: Any) -> Any:
        """Answer a block: from an Arrow table of rows to one of lines."""
        import pyarrow

        lines = self._run_in_loop(self._answer_block(block.to_pylist()))
        types = {"index": "int64", "line": "binary", "tokens": "int64", "error": "bool", "fatal": "string"}
        return pyarrow.Table.from_pylist(lines, pyarrow.schema([*types.items()]))

    def _run_in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> tuple[ServedModel, RowHandler]:
        model = ServedModel(self._task.spec, self._parts)
        return model, RowHandler(self._task.sha256, self._task.created, model.info, Limits())

    async def _answer_block(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._answer_row, items))

    async def _answer_row(self, item: dict[str, Any]) -> dict[str, Any]:
        index, row = item["index"], Row(item["line"], item["custom_id"], item["text"])
        tokens, is_error = 0, False
        try:
            try:
                line, tokens = await self._generate(index, row)
            except Exception as error:
                line, is_error = self._handler.error_line(index, row, error), True
        except ExlmError as error:  # not caused by the row: the driver ends the run
            return {"index": index, "line": b"", "tokens": 0, "error": True, "fatal": str(error)}
        return {"index": index, "line": line, "tokens": tokens, "error": is_error, "fatal": None}

    async def _generate(self, index: int, row: Row) -> tuple[bytes, int]:
        """The row's line of the output, and how many tokens were generated for it."""
        writer = await asyncio.to_thread(self._handler.response_writer, index, row)
        tokens = 0
        with closing(self._model.submit(writer.request)) as stream:
            while not writer.done:
                text_index, delta = await stream.next()
                writer.push(text_index, delta)
                tokens += delta.finish.new_tokens if delta.finish is not None else 0
        return self._handler.success_line(index, row, writer), tokens


def run_rows_on_ray(
    rows: Rows,
    journal: Journal,
    spec: ModelSpec,
    config: ClusterConfig,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """Answer every row that is not in the journal yet, on the connected cluster."""
    ray, data = import_ray(), import_ray("data")
    unanswered = [index for index in range(len(rows.rows)) if index not in journal.done]
    progress = Progress(done=len(journal.done))
    task = BatchTask(spec, rows.sha256, journal.created, config.tensor_parallel)
    try:
        for lines in _run_pipeline(data, rows, unanswered, task, config):
            _store(lines, journal, progress)
            on_progress(progress)
    except ray.exceptions.RayError as error:
        last = str(error).strip().splitlines()[-1]
        raise WorkerLost(f"The actors of the batch failed: {last}. What is done is safe in the journal.") from None
    return progress


def _run_pipeline(
    data: Any, rows: Rows, unanswered: list[int], task: BatchTask, config: ClusterConfig
) -> Iterator[list[dict[str, Any]]]:
    """Yields the lines of each block as the actors finish it, in any order."""
    if not unanswered:
        return
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    data.DataContext.get_current().enable_progress_bars = False
    items = [{"index": index, **vars(rows.rows[index])} for index in unanswered]
    rows_per_block = max(ROWS_PER_BLOCK, -(-len(items) // MAX_BLOCKS))
    blocks = data.from_items(items, override_num_blocks=-(-len(items) // rows_per_block))
    answered = blocks.map_batches(
        BatchActor,
        fn_constructor_args=(task,),
        batch_format="pyarrow",
        batch_size=None,
        compute=data.ActorPoolStrategy(
            min_size=config.least,
            max_size=config.most,
            max_tasks_in_flight_per_actor=BLOCKS_PER_ACTOR,
            max_concurrent_calls_per_actor=BLOCKS_PER_ACTOR,
            enable_true_multi_threading=True,
        ),
        num_cpus=config.cpus,
        num_gpus=config.gpus or None,
    )
    for block in answered.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield block.to_pylist()


def _store(lines: list[dict[str, Any]], journal: Journal, progress: Progress) -> None:
    """Write new lines to the journal; a block that was done twice counts once."""
    new = [line for line in lines if line["index"] not in journal.done and line["fatal"] is None]
    journal.add((line["index"], line["line"]) for line in new)
    progress.done = len(journal.done)
    progress.errors += sum(line["error"] for line in new)
    progress.new_tokens += sum(line["tokens"] for line in new)
    if fatal := next((line["fatal"] for line in lines if line["fatal"] is not None), None):
        raise ExlmError(fatal)
