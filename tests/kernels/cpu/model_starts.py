"""A process that forks one that loads a model and writes a text, as often as it is told: MODEL.

A line of standard input is a list of starts, each a JSON object; they run at the same time. The reply is what
became of each: its text, who computes, what it logged, or the signal that ended it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from exlm import LLM, Settings
from exlm.kernels.cpu import CpuBackend

NOBODY = 65534
SECONDS = 60  # after which a start counts as hanging


def start(model: str, asked: dict[str, Any]) -> dict[str, Any]:
    """One start of a program, in a process of its own."""
    os.environ |= {"EXLM_CACHE": asked["cache"], "PATH": asked["path"], "EXLM_CPU": asked.get("cpu", "1")}
    tempfile.tempdir = asked["temporary"]
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("exlm").addHandler(handler)
    if asked.get("unprivileged"):
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    began = time.perf_counter()
    text, who = write(model)
    used = [path for path in mapped() if "/cpu-" in path]
    return {"text": text, "who": who, "said": said, "used": used, "seconds": time.perf_counter() - began}


def write(model: str) -> tuple[str, list[str]]:
    """A text, and who computed it."""
    with LLM(model, device="cpu", max_seq_len=64) as llm:
        text = llm.generate("Once upon a time", max_new_tokens=12, settings=Settings.greedy()).text
        return text, sorted({line.split()[1].rstrip(",") for line in llm.model.explain().splitlines()})


def mapped() -> set[str]:
    """The files in this process's memory, those that have been replaced as well."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {parts[5].removesuffix(" (deleted)") for line in lines if len(parts := line.split(maxsplit=5)) == 6}


def main(model: str) -> None:
    """Serve starts until standard input ends."""
    torch.set_num_threads(1)
    os.environ["EXLM_CPU"] = "0"
    write(model)  # so that everything is imported, but no library loaded
    assert CpuBackend is not None
    for line in sys.stdin:
        running = []
        for asked in json.loads(line):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                signal.alarm(SECONDS)
                try:
                    answer = start(model, asked)
                except BaseException as error:
                    answer = {"error": repr(error)}
                os.write(writer, json.dumps(answer).encode())
                os._exit(0)
            os.close(writer)
            running.append((child, reader))
        answers = []
        for child, reader in running:
            with open(reader, "rb") as file:
                told = file.read()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            answers.append(json.loads(told) if told else {"error": f"ended with {code}"})
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
