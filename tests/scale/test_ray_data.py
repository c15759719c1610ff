"""A batch on a local Ray, with actors and drivers killed: every row once, with the text of a single process.

`EXLM_BULK_ROWS` sets the number of rows, for longer runs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from exlm import Generator
from exlm.batch import Journal, read_rows, run_rows
from exlm.kernels.cpu.compile import COMPILERS, INSTRUCTION_SETS, prebuilt
from exlm.serve import ModelInfo, ModelSpec, load
from tests.scale.conftest import PATIENCE, Cluster, kill, waited

pytestmark = pytest.mark.xdist_group("ray")

ACTOR = "MapWorker(MapBatches(Answerer))"
ROWS = int(os.environ.get("EXLM_BULK_ROWS", "500"))
LIMIT = PATIENCE + ROWS
ACTOR_KILLS = (2, 2, 1)
"""For each driver, how many of its actors are killed; then the driver is, except for the last."""


def written(path: Path) -> Path:
    """Requests of many lengths, all of them sampled, and one line that is none.

    No two prompts begin alike: what a cache has of a prompt is not computed with the rest, which changes the
    last bits, and once in 50,000 tokens a random choice. Beside others, rows of packed matrices keep theirs
    (but see `steady`).
    """
    draw = random.Random(3)
    with path.open("w") as file:
        for number in range(ROWS):
            start = [10 + number % 1900, 10 + number // 1900]
            body = {
                "prompt": start + [draw.randrange(10, 1900) for _ in range(draw.randint(1, 80))],
                "max_tokens": draw.randint(1, 40),
                "temperature": 1,
            }
            row = {"custom_id": f"row {number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")
        file.write("no row\n")
    return path


def command(source: Path, target: Path, model: Path, *more: str) -> list[str]:
    options = ["--model", str(model), "--device", "cpu", "--cache-tokens", "8192", "--max-batch-size", "16"]
    return [sys.executable, "-m", "exlm.cli", "batch", str(source), str(target), *options, *more]


def answers(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines]
    for one in found:  # two batches, created at different times
        if one["error"] is None:
            del one["response"]["body"]["created"]
    return found


def alone(source: Path, model: Path) -> list[dict[str, Any]]:
    """The answers of a single process."""
    loaded = load(ModelSpec(model.name, str(model), device="cpu", cache_tokens=8192, max_batch_size=16))
    generator = Generator(loaded.model, loaded.cache, loaded.tokenizer, **loaded.options)
    length = min(generator.max_seq_len, generator.max_total_tokens)
    host = ModelInfo(model.name, loaded.tokenizer, length, loaded.model.config.vocab_size)
    rows = read_rows(source)
    with closing(Journal(source.with_suffix(".journal"), {}, len(rows.rows), created=0)) as journal:
        run_rows(rows, journal, generator, host)
        return answers(journal.answer(place) for place in range(len(rows.rows)))


def steady() -> bool:
    """Whether rows are bit-identical in any batch: with the C kernels they are.

    Where nothing can be compiled plain torch computes, whose sums depend on how many rows there are, and a
    sixteen-bit cache makes more of that: once in some thousand tokens another one is drawn.
    """
    return any(map(shutil.which, COMPILERS)) or any(prebuilt(name).exists() for name in INSTRUCTION_SETS)


def done(journal: Path) -> int:
    """Rows in the journal."""
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def disturbed(cluster: Cluster, driver: subprocess.Popen[str], journal: Path, kills: int) -> None:
    """Kill an actor now and then, when there is something new in the journal."""
    for _ in range(kills):
        start = done(journal)
        waited(lambda start=start: done(journal) > start or driver.poll() is not None)  # type: ignore[misc]
        assert driver.poll() is None, "the batch was over before enough was killed: give it more rows"
        waited(lambda: len(cluster.workers(ACTOR)) > 0)
        kill(random.choice(cluster.workers(ACTOR)))


def test_every_row_is_done_once_when_actors_and_drivers_die(
    cluster: Cluster, fixtures_dir: Path, tmp_path: Path
) -> None:
    model = fixtures_dir / "tiny-lm-exl2-4.0bpw"
    source, target = written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.journal"
    on_ray = command(source, target, model, "--ray", "--replicas", "2")
    progress = [0]
    for kills in ACTOR_KILLS:
        with subprocess.Popen(on_ray, env=cluster.environment, stderr=subprocess.PIPE, text=True) as driver:
            disturbed(cluster, driver, journal, kills)
            if len(progress) < len(ACTOR_KILLS):
                driver.send_signal(signal.SIGKILL)
            told = driver.communicate(timeout=LIMIT)[1]
        assert driver.returncode == (0 if len(progress) == len(ACTOR_KILLS) else -signal.SIGKILL), told
        progress.append(done(journal))
    found = answers(target.read_bytes().splitlines())
    assert [one["custom_id"] for one in found] == [*(f"row {one}" for one in range(ROWS)), None]
    wanted = alone(source, model)
    others = [place for place, one in enumerate(found) if one != wanted[place]]
    assert len(others) <= (0 if steady() else ROWS // 50), [(found[place], wanted[place]) for place in others]
    assert progress[0] < progress[1] < progress[2] <= ROWS
    assert not journal.exists()
