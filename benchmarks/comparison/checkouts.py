"""The two source trees that are compared, and the child processes that run in them.

A child process runs in the folder of its checkout with that checkout's `src` as PYTHONPATH, so it imports
that copy of exlm and of `benchmarks`. Both checkouts use the interpreter that runs the comparison.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 25
"""How many lines of a failed process's output the error message shows."""

FIND_EXLM = "import exlm; print(exlm.__file__)"


class CompareError(Exception):
    """The comparison cannot be made; the message says why."""


class ChildFailed(CompareError):
    """A child process failed: the message names the checkout, the command and the end of its output."""

    def __init__(self, checkout: Checkout, command: Sequence[str], reason: str, output: str) -> None:
        tail = "\n".join(output.splitlines()[-TAIL_LINES:]) or "(no output)"
        super().__init__(
            f"A process of the {checkout.name} {checkout.folder} {reason}.\n"
            f"command: {shlex.join(command)}\n"
            f"its output ends with:\n{tail}"
        )


@dataclass(frozen=True)
class Checkout:
    """One source tree."""

    name: str
    """`base` or `candidate`."""
    folder: Path
    revision: str
    """The commit, followed by `-dirty` if files differ from it; empty where git does not know the folder."""

    def run(self, command: Sequence[str], timeout: float) -> str:
        """Run a command in this checkout and return what it printed; `ChildFailed` if it does not succeed.

        The process leads a process group of its own. Whatever is left of the group when it ends, fails or
        takes longer than `timeout` seconds is killed.
        """
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        if status is None:
            raise ChildFailed(self, command, f"did not end within {timeout:g} seconds", text)
        if status != 0:
            raise ChildFailed(self, command, f"ended with status {status}", text)
        return text

    def check(self, timeout: float) -> None:
        """Refuse a tree whose processes would import exlm from somewhere else."""
        command = [sys.executable, "-c", FIND_EXLM]
        lines = self.run(command, timeout).strip().splitlines()
        found = Path(lines[-1]) if lines else Path()
        if not found.resolve().is_relative_to((self.folder / "src").resolve()):
            raise CompareError(f"Processes of the {self.name} {self.folder} import exlm from {found}.")

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONSAFEPATH"):
            environment.pop(name, None)
        return environment | {"PYTHONPATH": str(self.folder / "src")}


@contextmanager
def open_checkout(name: str, folder_or_revision: str, repository: Path) -> Iterator[Checkout]:
    """The checkout that an argument names: a folder, or a revision of the repository.

    A revision is unpacked into a temporary folder, which is removed at the end.
    """
    folder = Path(folder_or_revision).expanduser()
    if folder_or_revision and (folder / "src" / "exlm").is_dir():
        yield Checkout(name, folder.resolve(), _revision(folder))
        return
    commit = _commit(folder_or_revision, repository)
    if commit is None:
        raise CompareError(
            f"{folder_or_revision!r} is neither a folder with src/exlm in it nor a revision of {repository}."
        )
    with tempfile.TemporaryDirectory(prefix=f"exlm-{name}-") as temporary:
        archive_bytes = _git(repository, "archive", "--format=tar", commit)
        if archive_bytes is None:
            raise CompareError(f"git could not unpack {folder_or_revision} ({commit}) of {repository}.")
        with tarfile.open(fileobj=io.BytesIO(archive_bytes)) as archive:
            archive.extractall(temporary, filter="data")
        if not (Path(temporary) / "src" / "exlm").is_dir():
            raise CompareError(f"{folder_or_revision} ({commit}) has no src/exlm.")
        yield Checkout(name, Path(temporary).resolve(), commit)


def _commit(revision: str, repository: Path) -> str | None:
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}")
    return None if found is None else found.decode().strip()


def _revision(folder: Path) -> str:
    """The commit of a folder that is the top of a git work tree."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top.decode().strip()).resolve() != folder.resolve():
        return ""
    found = _git(folder, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    return "" if found is None else found.decode().strip()


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What a git command prints; None if it fails or there is no git."""
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    except OSError:
        return None
    return result.stdout if result.returncode == 0 else None
