"""Requests and responses in tables and object stores; `file://` stands in for a store."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from exlm import InputError
from exlm.batch import Journal
from exlm.scale.ray_data import exists, read_requests, write_answers_anywhere

pytest.importorskip("ray", reason="needs exlm[scale]")
pyarrow = pytest.importorskip("pyarrow", reason="needs exlm[scale]")

ASKED = [
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3}},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "y"}},
]


def table(path: Path, **columns: Any) -> Path:
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def lines(path: Path) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in ASKED))
    return path


@pytest.mark.parametrize("as_text", [True, False])
def test_a_table_equals_its_lines(tmp_path: Path, as_text: bool) -> None:
    bodies = [json.dumps(one["body"]) if as_text else one["body"] for one in ASKED]
    path = table(tmp_path / "in.parquet", custom_id=["a", "b"], url=[one["url"] for one in ASKED], body=bodies)
    found = read_requests(str(path))
    assert [(row.line, row.custom_id) for row in found.rows] == [(1, "a"), (2, "b")]
    assert [row.request() for row in found.rows] == [(one["url"], one["body"]) for one in ASKED]
    assert read_requests(str(path)).sha256 == found.sha256


def test_a_store_is_read_as_a_folder(tmp_path: Path) -> None:
    path = lines(tmp_path / "in.jsonl")
    assert read_requests(path.as_uri()) == read_requests(str(path))
    assert exists(path.as_uri())
    assert not exists((tmp_path / "none.jsonl").as_uri())


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("remote", [True, False])
def test_answers_are_whole_and_in_order(tmp_path: Path, name: str, remote: bool) -> None:
    rows = read_requests(str(lines(tmp_path / "in.jsonl")))
    answers = [
        {"id": "2", "custom_id": "a", "response": {"status_code": 200}, "error": None},
        {"id": "1", "custom_id": "b", "response": None, "error": {"code": "x"}},
    ]
    path = tmp_path / name
    with closing(Journal(tmp_path / "journal", {}, 2, created=1)) as journal:
        journal.add((place, json.dumps(one).encode()) for place, one in reversed([*enumerate(answers)]))
        write_answers_anywhere(path.as_uri() if remote else str(path), journal, rows)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(["in.jsonl", "journal", name])
    if name.endswith("jsonl"):
        assert [json.loads(line) for line in path.read_text().splitlines()] == answers
        return
    from pyarrow import parquet

    found = parquet.read_table(path).to_pylist()
    assert [one["custom_id"] for one in found] == ["a", "b"]
    assert [one["response"] and json.loads(one["response"]) for one in found] == [{"status_code": 200}, None]
    assert [one["error"] and json.loads(one["error"]) for one in found] == [None, {"code": "x"}]


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no column 'url'"):
        read_requests(str(table(tmp_path / "in.parquet", custom_id=["a"], body=["{}"])))
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    for place in (str(tmp_path / "bad.parquet"), str(tmp_path / "none.parquet"), "nowhere://x/y.jsonl"):
        with pytest.raises(InputError, match=place):
            read_requests(place)


def test_an_invalid_request_is_an_error_of_its_row(tmp_path: Path) -> None:
    path = table(tmp_path / "in.parquet", custom_id=["a", None], url=["u", "v"], body=["{", "{}"])
    rows = read_requests(str(path)).rows
    assert [row.custom_id for row in rows] == ["a", None]
