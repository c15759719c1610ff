"""Batches that 0.1.0 left unfinished go on: what is done stays, the rest is answered, nothing is left over.

The rows that are done were answered by another model of the same name, so one that is run again is seen.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.on_disk.states import DATA, PATIENCE, environment

INPUT, OUTPUT = "in.jsonl", "out.jsonl"
JOURNAL = f"{OUTPUT}.journal"
OPTIONS = ("--model", "model", "--device", "cpu", "--max-batch-size", "2")


def begun(state: str | None, unpacked: Path, place: Path) -> Path:
    """A folder with a model and a batch in this state."""
    shutil.copytree(unpacked / "source", place / "model")
    shutil.copy(DATA / "batch" / INPUT, place)
    if state is not None:
        shutil.copytree(DATA / "batch" / state, place, dirs_exist_ok=True)
    return place


def run(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "exlm", "batch", INPUT, OUTPUT, *OPTIONS, *options]
    return subprocess.run(
        command, cwd=place, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def done_in(state: str) -> dict[int, str]:
    """By row, the answers in a journal: behind a checksum, the row and a space."""
    lines = (DATA / "batch" / state / JOURNAL).read_text().splitlines(keepends=True)[1:]
    parts = [line.rstrip("\n").split(" ", 2) for line in lines if line.endswith("\n")]
    return {int(row): answer for _, row, answer in parts}


def created(answer: dict[str, Any]) -> int | None:
    body = (answer["response"] or {}).get("body") or {}
    return body.get("created")


@pytest.fixture(scope="module")
def fresh(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The answers of a run that nothing stops, by the version and the model under test."""
    place = begun(None, unpacked, tmp_path_factory.mktemp("fresh"))
    ended = run(place)
    assert ended.returncode == 0, ended.stderr
    return answers((place / OUTPUT).read_text())


def test_a_batch_goes_on_where_it_stopped(fresh: list[dict[str, Any]], unpacked: Path, tmp_path: Path) -> None:
    place, done = begun("half", unpacked, tmp_path), done_in("half")
    assert 0 < len(done) < len(fresh) - 3
    assert not (place / JOURNAL).read_bytes().endswith(b"\n")  # the last record was being written
    ended = run(place)
    assert ended.returncode == 0, ended.stderr
    assert f"{len(done)} of {len(fresh)} rows are done already" in " ".join(ended.stderr.split())
    assert sorted(path.name for path in place.iterdir()) == [INPUT, "model", OUTPUT]
    lines = (place / OUTPUT).read_text().splitlines()
    found = answers("\n".join(lines))
    assert [one["id"] for one in found] == [one["id"] for one in fresh]
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in fresh]
    assert {row: lines[row] for row in done} == done
    begun_at = {created(json.loads(answer)) for answer in done.values()} - {None}
    assert {created(one) for one in found} - {None} == begun_at, "all rows are of the batch's beginning"
    for row, (one, expected) in enumerate(zip(found, fresh, strict=True)):
        if row not in done:
            for answer in (one, expected):
                (answer["response"] or {"body": {}})["body"].pop("created", None)
            assert one == expected
    different = [row for row in done if "choices" in done[row] and found[row] != fresh[row]]
    assert different, "the other model says the same, so this proves nothing"


@pytest.mark.parametrize("state", ["complete", "written"])
def test_a_batch_whose_rows_are_all_done_needs_no_model(state: str, unpacked: Path, tmp_path: Path) -> None:
    """It was stopped before its output had its name, or before its journal was removed."""
    place, done = begun(state, unpacked, tmp_path), done_in(state)
    shutil.rmtree(place / "model")
    ended = run(place)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in place.iterdir()) == [INPUT, OUTPUT]
    assert (place / OUTPUT).read_text().splitlines() == [done[row] for row in range(len(done))]


def test_a_complete_output_is_known(unpacked: Path, tmp_path: Path) -> None:
    place = begun("written", unpacked, tmp_path)
    (place / JOURNAL).unlink()
    before = (place / OUTPUT).read_bytes()
    ended = run(place)
    assert ended.returncode == 0, ended.stderr
    assert "has every answer already" in " ".join(ended.stderr.split())
    assert (place / OUTPUT).read_bytes() == before


@pytest.mark.parametrize(
    ("options", "told"),
    [(("--cache-type", "q4"), "cache_type was 'fp16', is 'q4'"), (("--name", "other"), "name was 'model'")],
)
def test_a_batch_does_not_go_on_with_other_options(
    options: tuple[str, ...], told: str, unpacked: Path, tmp_path: Path
) -> None:
    place = begun("half", unpacked, tmp_path)
    before = (place / JOURNAL).read_bytes()
    ended = run(place, *options)
    assert ended.returncode == 1
    assert told in " ".join(ended.stderr.split())
    assert (place / JOURNAL).read_bytes() == before


def test_a_batch_does_not_go_on_with_other_requests(unpacked: Path, tmp_path: Path) -> None:
    place = begun("half", unpacked, tmp_path)
    with (place / INPUT).open("a") as file:
        file.write('{"custom_id": "more"}\n')
    ended = run(place)
    assert ended.returncode == 1
    assert "was begun with something else: input was" in " ".join(ended.stderr.split())
