"""Settings with which the data of `on_disk` was made, and helpers to use it."""

from __future__ import annotations

import hashlib
import os
import platform
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.conftest import ROOT

DATA = Path(__file__).with_name("data") / "0.1.0"

MTIME = 1_700_000_000
"""When the files of source models and the like were changed last, in seconds."""

FOLDER = "@FOLDER@"
PROMPTS = ("> ", ". ")
PATIENCE = 120.0
SENTENCE = "Nine ships left the harbour; seven came back before the storm. "
SIZE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
FEW: dict[str, Any] = {"rows": 4, "length": 32, "report": False}
PROMPT = [*range(70, 90)]

MEASURED = ("measuring layer 0", "measuring layer 1")
LAYERS = ("quantising layer 0", "quantising layer 1")


@dataclass(frozen=True)
class Stopped:
    """A job of the quantiser that was stopped."""

    events: tuple[str, ...]
    """What happened to files before the end, in this order."""
    done: tuple[str, ...] = ()
    """Steps, as progress calls them, that need not be done again."""
    options: Mapping[str, Any] = field(default_factory=lambda: {"bits": 5.0})
    """What was asked for, as `quantize_model` calls it."""
    finished: str | None = "exl2"
    """The finished model of `models` that it becomes."""

    def asked(self, place: Path) -> dict[str, Any]:
        """Arguments of `quantize_model`."""
        known = {"measurement": place / "measurement.json"} if "measurement" in self.options else {}
        return {"calibration": place / "text.txt", **FEW, **self.options, **known}

    def arguments(self, place: Path) -> list[str]:
        """The same as options of the command."""
        found = []
        for name, value in self.asked(place).items():
            option = "--" + name.replace("_", "-")
            found += ["--no-report"] if name == "report" else [option, str(value)]
        return found


JOBS: dict[str, Stopped] = {
    "calibrated": Stopped(("behind ids.safetensors",)),
    "forward": Stopped(("behind state.1.safetensors", "synced state.2.safetensors.partial")),
    "backward": Stopped(("behind gradients.1.safetensors",)),
    "measured-one": Stopped(("behind slope.1.safetensors",), MEASURED[1:]),
    "measured": Stopped(("behind listened.json",), MEASURED),
    "solved-one": Stopped(("behind streams.1.safetensors",), (*MEASURED, LAYERS[0])),
    "solved": Stopped(("behind layer.head.safetensors",), MEASURED + LAYERS),
    "known-measurement": Stopped(
        ("behind streams.1.safetensors",),
        (*MEASURED, LAYERS[0]),
        {"bits": 5.0, "measurement": "measurement.json"},
    ),
    "second-try": Stopped(
        ("behind aim.json", "behind streams.1.safetensors"), (*MEASURED, LAYERS[0]), {"max_kld": 0.02}, None
    ),
    "gptq": Stopped(("behind streams.1.safetensors",), LAYERS[:1], {"method": "gptq", "group_size": 32}, "gptq"),
}


def digest(folder: Path) -> str:
    """A hash of weights."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def set_times(folder: Path) -> None:
    """Give everything in a folder the same time."""
    for path in sorted(folder.rglob("*")):
        os.utime(path, (MTIME, MTIME))


def environment() -> dict[str, str]:
    """For a process of its own: this tree's exlm, one thread, and nothing is compiled or downloaded."""
    own = {"OMP_NUM_THREADS": "1", "EXLM_CPU": "0", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


ON_TERMINAL = """
import os, runpy, sys
handle = os.open(sys.argv.pop(1), os.O_RDWR)  # the first terminal that a session leader opens becomes its own
for standard in range(3):
    os.dup2(handle, standard)
sys.argv[0] = "exlm"
runpy.run_module("exlm", run_name="__main__", alter_sys=True)
"""


def typed(arguments: Sequence[str], lines: Sequence[str], cache: Path) -> int:
    """Run a command of exlm on a terminal and type a line at each prompt; its exit status."""
    terminal, other = pty.openpty()
    command = [sys.executable, "-c", ON_TERMINAL, os.ttyname(other), *arguments]
    own = {"EXLM_CACHE": str(cache), "TERM": "dumb"}
    deadline = time.monotonic() + PATIENCE
    with subprocess.Popen(command, env={**environment(), **own}, start_new_session=True) as process:
        try:
            for line in lines:
                shown = ""
                while not shown.endswith(PROMPTS):
                    assert process.poll() is None, shown
                    assert time.monotonic() < deadline, shown
                    if select.select([terminal], [], [], 0.1)[0]:
                        shown += os.read(terminal, 4096).decode(errors="replace")
                os.write(terminal, line.encode() + b"\r")
            while process.poll() is None:
                assert time.monotonic() < deadline, "the command does not end"
                if select.select([terminal], [], [], 0.05)[0]:
                    os.read(terminal, 4096)
            return process.returncode
        finally:
            process.kill()
            os.close(other)
            os.close(terminal)


def machine() -> dict[str, str]:
    """The machine's properties that decide the last bits of sums."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    model, family = (
        found[1] if (found := re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)) else ""
        for name in ("model name", "model")
    )
    return {
        "processor": f"{platform.machine()} {model} {family}".strip(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
