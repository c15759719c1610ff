"""Renders chat templates in a worker process, with limits that a template cannot evade.

The process (`template_sandbox_worker`) is started at the first rendering and kept for later ones. It exits
with its owner, and is killed when a rendering exceeds its limits. `TemplateSandbox` is thread-safe and uses
no signals.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ChatTemplateError, MissingExtra
from ..memory import REMEDY
from .template_sandbox_worker import read_message

WORKER_FILE = Path(__file__).with_name("template_sandbox_worker.py")
START_SECONDS = 30.0  # a busy machine may start a process slowly
KILL_GRACE_SECONDS = 1.0  # for the worker to exit by itself before it is killed
INSTALL_HINT = "Chat templates need jinja2 3.1.6 or newer: pip install 'jinja2>=3.1.6'"


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering: wall-clock time, length of the output, memory of the process (on Linux)."""

    seconds: float = 2.0
    characters: int = 16_000_000
    memory: int = 512 * 2**20


class TemplateSandbox:
    """Owns the worker process and replaces it when it was killed; renders one template at a time."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        """The worker is started at the first rendering."""
        self.limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._worker: _WorkerProcess | None = None

    def render(self, source: str, variables: Mapping[str, Any], origin: str) -> str:
        """The rendered text; errors call the template `origin`."""
        request = {
            "source": source,
            "variables": variables,
            "seconds": self.limits.seconds,
            "characters": self.limits.characters,
        }
        try:
            body = json.dumps(request, default=_mapping_to_dict).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(
                f"Chat templates take only JSON values (strings, numbers, lists, objects): {error}. "
                "Replace images and other objects in the messages by text."
            ) from None
        with self._lock:
            response = self._request(body)
        if "text" in response:
            return str(response["text"])
        line = f", line {response['line']}" if response.get("line") else ""
        raise ChatTemplateError(f"{origin}{line}: {_failure_message(response, self.limits)}")

    def close(self) -> None:
        """Kill the worker; a later rendering starts another."""
        with self._lock:
            self._stop_worker()

    def _request(self, message: bytes) -> dict[str, Any]:
        is_new = self._worker is None or not self._worker.is_usable()
        if is_new:
            self._stop_worker()
        worker = self._worker = self._worker or _WorkerProcess(self.limits)
        started = time.monotonic()
        response = worker.request(message, self.limits.seconds + KILL_GRACE_SECONDS)
        if response is not None and response.get("failed") not in ("memory", "recursion"):
            return response
        self._stop_worker()
        if response is not None:
            return response
        if time.monotonic() - started >= self.limits.seconds:
            return {"failed": "time"}
        if not is_new:  # it may have died while it was idle
            return self._request(message)
        return {"failed": "died", "detail": f"exit status {worker.exit_status}"}

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _WorkerProcess:
    """A running worker, to which requests and responses go over two pipes."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._max_response_bytes = 12 * limits.characters + 65_536  # JSON has at most 12 bytes a character
        setup = {"path": _jinja_sys_path(), "memory": limits.memory}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WORKER_FILE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, MemoryError) as error:
            raise ChatTemplateError(
                f"The process that renders chat templates did not start: {error or 'too little memory'}"
            ) from None
        self._owner_pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end_process, self._process, self._owner_pid)
        try:
            ready = self.request(json.dumps(setup).encode("ascii"), START_SECONDS)
        except ChatTemplateError:
            self.stop()
            raise
        if ready is None or ready["problem"]:
            self.stop()
            if ready is None:
                raise ChatTemplateError("The process that renders chat templates did not start.")
            raise MissingExtra(f"{INSTALL_HINT} ({ready['problem']})")

    def is_usable(self) -> bool:
        """Whether the worker runs and belongs to this process; after a fork it is the parent's."""
        return self._owner_pid == os.getpid() and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """The worker's return code."""
        return self._process.returncode

    def request(self, message: bytes, seconds: float) -> dict[str, Any] | None:
        """The worker's response, or None if it exited or was killed without one."""
        watchdog = threading.Timer(seconds, self._process.kill)
        watchdog.daemon = True
        try:
            watchdog.start()
        except (RuntimeError, MemoryError) as error:
            raise ChatTemplateError(
                "No chat template can be rendered: the timer that stops an endless one did not start "
                f"({error or 'too little memory'}). {REMEDY}"
            ) from None
        try:
            if self._process.stdin is None or self._process.stdout is None:
                return None
            self._process.stdin.write(len(message).to_bytes(8, "big") + message)
            self._process.stdin.flush()
            return read_message(self._process.stdout, self._max_response_bytes)
        except (OSError, ValueError):
            return None
        finally:
            watchdog.cancel()

    def stop(self) -> None:
        """Kill the worker if it still runs."""
        self._finalizer()


def _end_process(process: subprocess.Popen[bytes], owner_pid: int) -> None:
    is_owner = owner_pid == os.getpid()
    if is_owner:
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue
    if is_owner:
        process.wait()


def _jinja_sys_path() -> list[str]:
    """The folders that jinja2 and markupsafe are imported from in this process."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    folders = [str(Path(spec.origin).parent.parent) for spec in found if spec is not None and spec.origin]
    if len(folders) < len(found):
        raise MissingExtra(INSTALL_HINT)
    return list(dict.fromkeys(folders))


def _mapping_to_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"found a {type(value).__name__}")


def _failure_message(response: Mapping[str, Any], limits: TemplateLimits) -> str:
    detail = response.get("detail", "")
    reasons = {
        "syntax": f"the chat template is not valid: {detail}",
        "raised": f"the chat template refused these messages: {detail}",
        "security": f"the chat template tried to access what the sandbox forbids: {detail}",
        "long": f"the chat template wrote more than {limits.characters} characters and was stopped.",
        "memory": f"the chat template needed more than {limits.memory // 2**20} MiB and was stopped.",
        "recursion": "the chat template nests or calls itself too deeply and was stopped.",
        "time": f"the chat template ran longer than {limits.seconds:g} s and was stopped.",
        "died": f"the process rendering the chat template ended ({detail}), most likely out of memory.",
        "error": f"the chat template failed: {detail}",
    }
    return reasons[str(response["failed"])]
