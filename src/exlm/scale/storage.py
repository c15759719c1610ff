"""Input and output of a batch in Parquet tables and object stores.

Requests are converted to a local file of lines and read as such; responses go the other way.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exlm import InputError
from exlm.batch import Journal, Rows, read_rows, write_answers

from .cluster import import_ray

TABLE = ".parquet"


def is_remote(path: str) -> bool:
    """Whether a path is in an object store: `s3://…`, `gs://…`, `hdfs://…`."""
    return "://" in path


def read_requests(path: str) -> Rows:
    """The requests of a file of lines or of a table, local or in a store.

    A table has the columns `custom_id`, `url` and `body`, which is a struct or JSON as text; `method` may be
    left out.
    """
    if not is_remote(path) and not path.endswith(TABLE):
        return read_rows(Path(path))
    with tempfile.TemporaryDirectory(prefix="exlm-") as scratch, _readable_errors(path):
        here = Path(path)
        if is_remote(path):
            here = Path(scratch) / _basename(path)
            _copy(path, str(here))
        if not path.endswith(TABLE):
            return read_rows(here)
        lines = Path(scratch) / f"{here.stem}.jsonl"
        lines.write_bytes(b"".join(_lines(here)))
        return read_rows(lines)


def write_answers_anywhere(path: str, journal: Journal, rows: Rows) -> None:
    """Write the response of every row, in order; a table has `custom_id`, and the rest as JSON text."""
    if not is_remote(path) and not path.endswith(TABLE):
        write_answers(Path(path), journal, rows)
        return
    folder = Path(tempfile.gettempdir() if is_remote(path) else path).parent
    with tempfile.TemporaryDirectory(prefix="exlm-", dir=None if is_remote(path) else folder) as scratch:
        here = Path(scratch) / _basename(path)
        if path.endswith(TABLE):
            _write_table(here, journal, rows)
        else:
            write_answers(here, journal, rows)
        if is_remote(path):
            with _readable_errors(path):
                _copy(str(here), path)
        else:
            here.replace(path)


def exists(path: str) -> bool:
    """Whether a file or object exists."""
    if not is_remote(path):
        return Path(path).exists()
    from pyarrow import fs

    with _readable_errors(path):
        store, key = fs.FileSystem.from_uri(path)
        return bool(store.get_file_info(key).type != fs.FileType.NotFound)


def _basename(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _copy(source: str, target: str) -> None:
    from pyarrow import fs

    fs.copy_files(source, target)


@contextmanager
def _readable_errors(path: str) -> Iterator[None]:
    """Turn errors of the store or the table into InputErrors that name the path."""
    import_ray("data")
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be used: {error}.") from None


def _lines(table: Path) -> Iterator[bytes]:
    from pyarrow import parquet

    with parquet.ParquetFile(table) as file:
        if missing := [name for name in ("custom_id", "url", "body") if name not in file.schema_arrow.names]:
            raise InputError(
                f"{table.name} has no column {missing[0]!r}: a request has custom_id, url and body."
            )
        for batch in file.iter_batches(batch_size=4096):
            for row in batch.to_pylist():
                if isinstance(row["body"], str):
                    row["body"] = _decoded(row["body"])
                line = {"method": "POST", **_without_nulls(row)}
                yield json.dumps(line).encode() + b"\n"


def _decoded(text: str) -> Any:
    """A body as data; what is not JSON stays text and becomes an error of its row."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _without_nulls(value: Any) -> Any:
    """A value without the nulls that a table's struct columns have for absent fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _write_table(path: Path, journal: Journal, rows: Rows) -> None:
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([("custom_id", "string"), ("response", "string"), ("error", "string")])
    with parquet.ParquetWriter(path, schema) as file:
        for start in range(0, len(rows.rows), 4096):
            answers = [
                json.loads(journal.answer(row)) for row in range(start, min(start + 4096, len(rows.rows)))
            ]
            columns = [
                [one["custom_id"] for one in answers],
                *([one[name] and json.dumps(one[name]) for one in answers] for name in ("response", "error")),
            ]
            file.write_table(pyarrow.table(columns, schema=schema))
