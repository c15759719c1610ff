"""A batch's two ends where they are no local file of lines: Parquet tables, and objects in a store.

Whatever comes in is made into the lines that mean the same, and these are read as always; answers go the
other way. Nothing here knows what a request is.
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


def is_remote(place: str) -> bool:
    """Whether a place is in an object store: `s3://…`, `gs://…`, `hdfs://…`."""
    return "://" in place


def read_requests(place: str) -> Rows:
    """The requests of a file of lines or of a table, here or in a store.

    A table has the columns `custom_id`, `url` and `body`, which is a struct or JSON as text; `method` may be
    left out.
    """
    if not is_remote(place) and not place.endswith(TABLE):
        return read_rows(Path(place))
    with tempfile.TemporaryDirectory(prefix="exlm-") as scratch, _named(place):
        here = Path(place)
        if is_remote(place):
            here = Path(scratch) / _leaf(place)
            _copy(place, str(here))
        if not place.endswith(TABLE):
            return read_rows(here)
        lines = Path(scratch) / f"{here.stem}.jsonl"
        lines.write_bytes(b"".join(_lines(here)))
        return read_rows(lines)


def write_answers_anywhere(place: str, journal: Journal, rows: Rows) -> None:
    """What became of every row, in their order; a table has `custom_id`, and the rest as JSON text."""
    if not is_remote(place) and not place.endswith(TABLE):
        write_answers(Path(place), journal, rows)
        return
    beside = Path(tempfile.gettempdir() if is_remote(place) else place).parent
    with tempfile.TemporaryDirectory(prefix="exlm-", dir=None if is_remote(place) else beside) as scratch:
        here = Path(scratch) / _leaf(place)
        if place.endswith(TABLE):
            _write_table(here, journal, rows)
        else:
            write_answers(here, journal, rows)
        if is_remote(place):
            with _named(place):
                _copy(str(here), place)
        else:
            here.replace(place)


def exists(place: str) -> bool:
    """Whether something is there already."""
    if not is_remote(place):
        return Path(place).exists()
    from pyarrow import fs

    with _named(place):
        store, path = fs.FileSystem.from_uri(place)
        return bool(store.get_file_info(path).type != fs.FileType.NotFound)


def _leaf(place: str) -> str:
    return place.rstrip("/").rpartition("/")[2]


def _copy(source: str, target: str) -> None:
    from pyarrow import fs

    fs.copy_files(source, target)


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Errors of the store or of the table, in words."""
    import_ray("data")
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{place} cannot be used: {error}.") from None


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
                line = {"method": "POST", **_present(row)}
                yield json.dumps(line).encode() + b"\n"


def _decoded(text: str) -> Any:
    """A body from its text; what is not JSON stays text, which the row is told of."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _present(value: Any) -> Any:
    """A value without what a column has for everybody and this row does not."""
    if isinstance(value, dict):
        return {name: _present(one) for name, one in value.items() if one is not None}
    return [_present(one) for one in value] if isinstance(value, list) else value


def _write_table(path: Path, journal: Journal, rows: Rows) -> None:
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([("custom_id", "string"), ("response", "string"), ("error", "string")])
    with parquet.ParquetWriter(path, schema) as file:
        for start in range(0, len(rows.rows), 4096):
            answers = [
                json.loads(journal.answer(place)) for place in range(start, min(start + 4096, len(rows.rows)))
            ]
            columns = [
                [one["custom_id"] for one in answers],
                *([one[name] and json.dumps(one[name]) for one in answers] for name in ("response", "error")),
            ]
            file.write_table(pyarrow.table(columns, schema=schema))
