"""Batches killed anywhere and run again: every row exactly once, with the same text."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from tests.conftest import ROOT

KILLS = 50
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}


def rows(tokens: int = 4) -> list[dict[str, Any]]:
    """Requests of most kinds, greedy and sampled, some of them bad."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": f"The number {i} is", "max_tokens": tokens + i % 5}) for i in range(6)
    ]
    bodies += [
        ("/v1/completions", {"prompt": ["One", "Two"], "n": 2, "max_tokens": tokens, "temperature": 1.2}),
        ("/v1/completions", {"prompt": "Same", "max_tokens": tokens, "temperature": 0}),
        ("/v1/completions", {"prompt": "Same", "max_tokens": tokens, "seed": 7}),
        ("/v1/completions", {"prompt": "Nothing", "max_tokens": 0}),
    ]
    return [
        {"custom_id": f"row-{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)
    ]


def written(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in requests) + "no row\n")
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    """The responses without the only thing that differs between runs: the time of creation."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for one in found:
        if one["response"] is not None:
            one["response"]["body"].pop("created", None)
    return found


class ForkServer:
    """Runs batches in forked processes, without loading the model again."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.input: IO[str] = process.stdin
        self.output: IO[str] = process.stdout
        assert self.output.readline() == "ready\n"

    def run(self, source: Path, target: Path, kill_after: float | None = None) -> int:
        """Run to the end, or until killed; the exit status."""
        self.input.write(json.dumps([str(source), str(target)]) + "\n")
        self.input.flush()
        child = int(self.output.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(self.output.readline())


@contextmanager
def fork_server(model: Path) -> Iterator[ForkServer]:
    command = [sys.executable, "-m", "tests.batch.fork_server", str(model)]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield ForkServer(process)
        finally:
            process.kill()


def timed(runs: ForkServer, source: Path, target: Path) -> tuple[list[dict[str, Any]], float]:
    """The responses of an uninterrupted run, and its duration."""
    started = time.perf_counter()
    assert runs.run(source, target) == 0
    seconds = time.perf_counter() - started
    found = answers(target)
    target.unlink()
    return found, seconds


def test_fifty_kills(fixtures_dir: Path, tmp_path: Path) -> None:
    requests = rows()
    source, target = written(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.journal"
    chance = random.Random(5)
    with fork_server(fixtures_dir / "tiny-lm") as runs:
        (want, seconds), (again, quicker) = (timed(runs, source, target) for _ in range(2))
        assert want == again
        seconds = min(seconds, quicker)
        assert [one["custom_id"] for one in want] == [*(one["custom_id"] for one in requests), None]
        assert sum(one["error"] is not None for one in want) == 2
        kills, halfway = 0, 0
        while kills < KILLS:
            while (status := runs.run(source, target, chance.uniform(0, seconds))) != 0:
                assert status == -signal.SIGKILL
                kills += 1
                halfway += journal.exists() and journal.read_bytes().count(b"\n") > 1
                assert not target.exists() or answers(target) == want
            assert answers(target) == want
            assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
            target.unlink()
    assert halfway > KILLS // 10, "the kills came too early or too late to prove anything"


def test_an_interrupted_command(fixtures_dir: Path, tmp_path: Path) -> None:
    requests = rows(25)
    source, target = written(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.journal"
    command = [sys.executable, "-m", "exlm.cli", "batch", str(source), str(target), "--device", "cpu"]
    command += ["--model", str(fixtures_dir / "tiny-lm"), "--max-batch-size", "1"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore SIGINT
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        deadline = time.monotonic() + 60
        while not (journal.exists() and journal.read_bytes().count(b"\n") > 2):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "the same command goes on" in told
    assert "Traceback" not in told
    assert not target.exists()
    done = subprocess.run(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rows are done already" in done.stderr
    found = answers(target)
    assert [one["custom_id"] for one in found] == [*(one["custom_id"] for one in requests), None]
    assert not journal.exists()
