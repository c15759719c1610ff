"""A server in a process of its own, for tests that end it: FOLDER, slow, watched or stuck, REPORTS."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import torch

from exlm.serve import Engine, ModelSpec, Options, listen, serve
from tests.serve.running_server import load_tiny

PAUSE = 0.03


def main(folder: str, mode: str, reports: str) -> None:
    """Print the port, then serve a model that is slow, or that hangs at its third token."""
    torch.set_num_threads(1)
    engine = Engine([ModelSpec("tiny", folder)], load_tiny)
    engine.preload("tiny")
    opened = listen("127.0.0.1", 0)

    def started() -> None:
        assert gc.get_freeze_count() > 10_000  # garbage collection over these would block the event loop
        runner = engine.models["tiny"].generator.generator._engine.runner
        decode, passes = runner.decode, iter(range(10**9))

        def slow(*arguments: object) -> object:
            time.sleep(1000 if mode == "stuck" and next(passes) == 2 else PAUSE)
            return decode(*arguments)  # type: ignore[arg-type]

        runner.decode = slow  # type: ignore[method-assign]
        print(opened.getsockname()[1], flush=True)

    serve(
        engine,
        Options(),
        opened,
        drain_seconds=4,
        stall_seconds=60.0 if mode == "slow" else 1.0,
        reports=Path(reports),
        started=started,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
