"""A process with a model in memory that forks processes which run `exlm batch`. Its argument is MODEL.

A line of standard input is the two files of a run as JSON. The first line of the reply is the run's process
id, with which a test can kill it; the second is how it ended.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from exlm import serve
from exlm.cli.batch import batch


def main(model: str) -> None:
    """Fork runs until standard input ends."""
    torch.set_num_threads(1)
    loaded = serve.load(serve.ModelSpec("tiny-lm", model, device="cpu", max_batch_size=4))

    def once(*_: Any, **__: Any) -> Any:
        return loaded

    serve.load = once
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                source, target = map(Path, json.loads(line))
                batch(source=source, target=target, model=model, quiet=True)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
