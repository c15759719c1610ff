"""Tells paths, Hub names and the default model apart.

A name that exists on disk always means that file or folder, also if it could be a name on the Hub.
"""

from __future__ import annotations

import os
from pathlib import Path

from .. import env
from ..errors import ModelNotFound
from .default_model import SMOLLM2, fetch, find_complete
from .progress import progress_bars
from .snapshot import HUB_NAME, download_snapshot


def find_model(name: str | Path | None = None, *, progress: bool = False) -> Path:
    """The folder or .gguf file of a model, downloaded first if necessary.

    None means the small default model, kept in exlm's cache folder; `owner/name` or `owner/name@revision` a
    model on the Hugging Face Hub, kept in huggingface_hub's own cache; anything else is a path. `progress`
    shows progress bars on standard error. Raises ModelNotFound, BadFile (a download has the wrong content) or
    MissingExtra.
    """
    if name is None:
        return _default_model(progress)
    if not isinstance(name, str | os.PathLike):
        raise ModelNotFound(
            f"A model is named by a path or a name on the Hugging Face Hub, found {type(name).__name__}."
        )
    path = _as_path(name)
    if path is not None and _exists(path):
        return _check_model_path(path)
    text = str(name)
    if isinstance(name, str) and HUB_NAME.fullmatch(text) and not _looks_like_path(text):
        return download_snapshot(text, progress)
    if isinstance(name, Path) or _looks_like_path(text):
        raise ModelNotFound(
            f"There is no {path or text}: no such folder or .gguf file"
            f"{_existing_part(path)}. Correct the path; a relative one starts at the current folder."
        )
    raise ModelNotFound(
        f"{text!r} names no model. A model is a folder with config.json and weights (./models/llama), "
        "a GGUF file (./llama.Q4_K_M.gguf), or a name on the Hugging Face Hub "
        "(HuggingFaceTB/SmolLM2-135M-Instruct, with @revision after it if you like)."
    )


def _default_model(progress: bool) -> Path:
    models = env.cache_folder() / "models"
    if (found := find_complete(SMOLLM2, models)) is not None:
        return found
    with progress_bars(progress) as start_step:
        return fetch(SMOLLM2, models, start_step=start_step)


def _as_path(name: str | Path) -> Path | None:
    """The name as a path; None if it cannot be one."""
    if not str(name) or "\0" in str(name):
        return None
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~user, and there is no such user
        return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be accessed ({error.strerror}).") from error


def _check_model_path(path: Path) -> Path:
    if path.is_dir() or path.suffix.lower() == ".gguf":
        return path
    raise ModelNotFound(
        f"{path} is a file, and the only files that are models end in .gguf. "
        f"If it belongs to a model folder, name the folder: {path.parent}."
    )


def _looks_like_path(text: str) -> bool:
    """Whether a name can only be a path."""
    repository = text.partition("@")[0]
    return (
        text.startswith((".", "/", "~")) or "\\" in text or text.lower().endswith(".gguf") or repository.count("/") > 1
    )


def _existing_part(path: Path | None) -> str:
    """Which part of a mistyped path exists, as words for the error message."""
    if path is None:
        return ""
    parent = next((parent for parent in path.parents if parent.is_dir()), None)
    if parent is None or parent in (Path("."), Path(path.anchor)):
        return ""
    return f" ({parent} exists, {path.relative_to(parent).parts[0]} in it does not)"
