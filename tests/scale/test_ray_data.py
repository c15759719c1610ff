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
from exlm.scale.ray_data import BatchActor
from exlm.serve import ModelInfo, ModelSpec, load
from tests.scale.conftest import PATIENCE, Cluster, kill, wait_until

pytestmark = pytest.mark.xdist_group("ray")

ACTOR = f"MapWorker(MapBatches({BatchActor.__name__}))"
ROWS = int(os.environ.get("EXLM_BULK_ROWS", "500"))
LIMIT = PATIENCE + ROWS
ACTOR_KILLS = (2, 2, 1)
"""For each driver, how many of its actors are killed; then the driver is, except for the last."""


def write_requests(path: Path) -> Path:
    """Requests of many lengths, all of them sampled, and one line that is not a request.

    No two prompts have a common prefix: a prefix from the cache is not computed together with the rest, which
    changes the last bits, and once in 50,000 tokens the sampled token. The other rows of the batch do not
    change them where `rows_are_independent`.
    """
    rng = random.Random(3)
    with path.open("w") as file:
        for number in range(ROWS):
            start = [10 + number % 1900, 10 + number // 1900]
            body = {
                "prompt": start + [rng.randrange(10, 1900) for _ in range(rng.randint(1, 80))],
                "max_tokens": rng.randint(1, 40),
                "temperature": 1,
            }
            row = {"custom_id": f"row {number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")
        file.write("not a request\n")
    return path


def batch_command(source: Path, target: Path, model: Path, *more: str) -> list[str]:
    options = ["--model", str(model), "--device", "cpu", "--cache-tokens", "8192", "--max-batch-size", "16"]
    return [
        sys.executable,
        "-m",
        "tests.scale.paused_batch",
        "batch",
        str(source),
        str(target),
        *options,
        *more,
    ]


def parse_answers(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines]
    for answer in found:  # two batches, created at different times
        if answer["error"] is None:
            del answer["response"]["body"]["created"]
    return found


def answers_of_one_process(source: Path, model: Path) -> list[dict[str, Any]]:
    """The answers of a single process."""
    loaded = load(ModelSpec(model.name, str(model), device="cpu", cache_tokens=8192, max_batch_size=16))
    generator = Generator(loaded.model, loaded.cache, loaded.tokenizer, **loaded.options)
    length = min(generator.max_seq_len, generator.max_total_tokens)
    info = ModelInfo(model.name, loaded.tokenizer, length, loaded.model.config.vocab_size)
    rows = read_rows(source)
    with closing(Journal(source.with_suffix(".journal"), {}, len(rows.rows), created=0)) as journal:
        run_rows(rows, journal, generator, info)
        return parse_answers(journal.answer(index) for index in range(len(rows.rows)))


def rows_are_independent() -> bool:
    """Whether rows are bit-identical in any batch: with the C kernels they are.

    Without them plain torch computes, whose sums depend on the number of rows, and rounding to a cache of 16
    bits enlarges the differences: once in some thousand tokens another one is sampled.
    """
    return any(map(shutil.which, COMPILERS)) or any(prebuilt(name).exists() for name in INSTRUCTION_SETS)


def rows_done(journal: Path) -> int:
    """Rows in the journal."""
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def kill_actors(cluster: Cluster, driver: subprocess.Popen[str], journal: Path, kills: int) -> None:
    """Kill a random actor, several times, each time after another block was written to the journal.

    The driver is paused meanwhile, so the batch cannot be over before the kills, however slow the machine is.
    """
    assert driver.stdin is not None
    for _ in range(kills):
        before = rows_done(journal)
        wait_until(lambda before=before: rows_done(journal) > before or driver.poll() is not None)  # type: ignore[misc]
        assert driver.poll() is None, "the batch was over before enough was killed: give it more rows"
        wait_until(lambda: len(cluster.workers(ACTOR)) > 0)
        kill(random.choice(cluster.workers(ACTOR)))
        driver.stdin.write("\n")
        driver.stdin.flush()


def test_every_row_is_done_once_when_actors_and_drivers_die(
    cluster: Cluster, fixtures_dir: Path, tmp_path: Path
) -> None:
    model = fixtures_dir / "tiny-lm-exl2-4.0bpw"
    source, target = write_requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.journal"
    command = batch_command(source, target, model, "--ray", "--replicas", "2")
    progress = [0]
    for kills in ACTOR_KILLS:
        with subprocess.Popen(
            command,
            env=cluster.environment,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as driver:
            kill_actors(cluster, driver, journal, kills)
            if len(progress) < len(ACTOR_KILLS):
                driver.send_signal(signal.SIGKILL)
            stderr = driver.communicate(timeout=LIMIT)[1]  # closes its standard input: no more pauses
        assert driver.returncode == (0 if len(progress) == len(ACTOR_KILLS) else -signal.SIGKILL), stderr
        progress.append(rows_done(journal))
    found = parse_answers(target.read_bytes().splitlines())
    assert [answer["custom_id"] for answer in found] == [*(f"row {i}" for i in range(ROWS)), None]
    expected = answers_of_one_process(source, model)
    different = [index for index, answer in enumerate(found) if answer != expected[index]]
    assert len(different) <= (0 if rows_are_independent() else ROWS // 50), [
        (found[index], expected[index]) for index in different
    ]
    assert progress[0] < progress[1] < progress[2] <= ROWS
    assert not journal.exists()
