"""A program that loads a model in forks with less and less address space and prints each outcome.

`python -m tests.model.low_memory KIND PATH MB...` forks itself for each number of MB, which the child may
map in addition to what it has. It prints a line for each: ok, the typed error, or what went wrong.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from exlm import Config, ExlmError, Model, Tokenizer

TIMEOUT = 60


def model(path: str) -> None:
    """Load a model and compute logits."""
    loaded = Model(Config(path))
    loaded.load()
    loaded.forward(torch.tensor([[3, 4, 5]]))


def tokenizer(path: str) -> None:
    """Load a tokenizer and all tables of its vocabulary."""
    read = Tokenizer(Config(path), lazy_init=False)
    assert read.decode(read.encode("Hello, world!")[0]) == "Hello, world!"


LOADERS = {"model": model, "tokenizer": tokenizer}


def run_limited(kind: str, path: str, extra: int) -> None:
    """Run it with that many more bytes of address space, and write the outcome."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + extra, resource.RLIM_INFINITY))
    try:
        LOADERS[kind](path)
        outcome = "ok"
    except ExlmError as error:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        outcome = f"{type(error).__name__}: {error}"
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        outcome = f"UNTYPED {type(error).__name__}: {error}".replace("\n", " ")
    os.write(1, f"{extra >> 20} {outcome}\n".encode())


def run_in_fork(kind: str, path: str, extra: int) -> None:
    """Run it in a fork, with a time limit."""
    pid = os.fork()
    if not pid:
        run_limited(kind, path, extra)
        os._exit(0)
    end = time.monotonic() + TIMEOUT
    while not (status := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.write(1, f"{extra >> 20} HUNG\n".encode())
            return
        time.sleep(0.005)
    if status[1]:
        os.write(1, f"{extra >> 20} DIED with status {status[1]}\n".encode())


if __name__ == "__main__":
    Config(sys.argv[2])  # so that what a first config imports and allocates is not part of the limit
    for megabytes in sys.argv[3:]:
        run_in_fork(sys.argv[1], sys.argv[2], int(megabytes) << 20)
