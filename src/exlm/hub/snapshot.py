"""Downloads models from the Hugging Face Hub with huggingface_hub, into its cache.

Only config, tokenizer and weight files are downloaded, never pickles or code.
"""

from __future__ import annotations

import errno
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import MissingExtra, ModelNotFound

HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
"""`owner/name`, or `owner/name@revision`."""

ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.gguf", "*.txt")
# Subfolders, and the files that Mistral calls consolidated, hold the same weights for other programs.
IGNORE_PATTERNS = ("*/*", "consolidated*")
GGUF = "*.gguf"

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
LIST_TIMEOUT = 10.0
"""Seconds to wait for a repository's list of files, which is only needed to skip some of them."""


def download_snapshot(name: str, progress: bool) -> Path:
    """Download a model; returns its folder, or its .gguf file if it has nothing else."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError as error:
        raise MissingExtra(
            f"{name} is a name on the Hugging Face Hub, and fetching it needs huggingface_hub: "
            "pip install huggingface_hub. (There is no folder of that name here.)"
        ) from error
    match = HUB_NAME.fullmatch(name)
    if match is None:
        raise ModelNotFound(f"{name!r} is not a name on the Hugging Face Hub: write owner/name[@revision].")
    repository, revision = match["repository"], match["revision"]
    # The bases of HfHubHTTPError include the base error of the HTTP library that this release uses.
    failures: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, OSError, EntryNotFoundError, ValueError)
    try:
        listed = _list_files(repository, revision)
    except failures:
        listed = []  # it may still be in the cache; if not, the next call raises the reason
    unwanted = _ignore_patterns(name, repository, listed)
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(ALLOW_PATTERNS),
            ignore_patterns=unwanted,
            tqdm_class=None if progress else _hidden_tqdm(),
        )
    except failures as error:
        raise ModelNotFound(_explain(repository, revision, error)) from error
    return _find_weights(name, Path(folder))


def _list_files(repository: str, revision: str | None) -> list[str]:
    """The names of a repository's files on the Hub."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, revision=revision, timeout=LIST_TIMEOUT)
    return [sibling.rfilename for sibling in info.siblings or ()]


def _ignore_patterns(name: str, repository: str, listed: list[str]) -> list[str]:
    """Patterns of files not to download. Refuses repositories with several GGUF models.

    Such a repository often has twenty quantisations of one model, hundreds of gigabytes in all.
    """
    ggufs = _first_parts([file for file in listed if "/" not in file and file.endswith(".gguf")])
    tensors = any(fnmatch(file, "*.safetensors") and not _is_ignored(file) for file in listed)
    if tensors and "config.json" in listed:
        return [*IGNORE_PATTERNS, GGUF]  # the same model in another format
    if len(ggufs) > 1:
        raise ModelNotFound(
            f"{name} holds {len(ggufs)} GGUF models: {', '.join(ggufs)}. Fetch one of them, as in "
            f"`hf download {repository} {ggufs[0]}`, and name the path that this prints."
        )
    return list(IGNORE_PATTERNS)


def _is_ignored(file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in IGNORE_PATTERNS)


def _first_parts(ggufs: list[str]) -> list[str]:
    """The files that name a model: of one in several parts, the first."""
    return sorted(file for file in ggufs if not _LATER_PART.search(file))


def _hidden_tqdm() -> Any:
    """A tqdm class that shows nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    class Invisible(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return Invisible


def _find_weights(name: str, folder: Path) -> Path:
    """The folder or .gguf file, if exlm can load it."""
    ggufs = [folder / file for file in _first_parts([path.name for path in folder.glob(GGUF)])]
    if (folder / "config.json").is_file() and (ggufs or any(folder.glob("*.safetensors"))):
        return folder
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ModelNotFound(
            f"{name} holds {len(ggufs)} GGUF files; name one of them by its path, for example {ggufs[0]}. "
            f"They are: {', '.join(path.name for path in ggufs)}."
        )
    # Files in a snapshot are links to blobs, which users may have deleted to free space.
    if dead := sorted(path.name for path in folder.iterdir() if not path.exists()):
        raise ModelNotFound(
            f"{name} is in the Hub's cache without all of its bytes: {', '.join(dead[:6])} in {folder} lead "
            "nowhere. Fetch it again with a network, or delete that folder first if it does not help."
        )
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
    raise ModelNotFound(
        f"{name} is on the Hub but not a model that exlm reads: that takes config.json with *.safetensors, "
        f"or a *.gguf file; found {found}. Weights in *.bin or *.pt files can run code and are never opened: "
        "look for a safetensors version."
    )


def _explain(repository: str, revision: str | None, error: BaseException) -> str:
    """The error message for a failed download."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    if isinstance(error, GatedRepoError):
        return (
            f"{repository} is gated: its owner asks you to accept terms first. Do so at "
            f"https://huggingface.co/{repository}, then log in with `hf auth login`. The Hub says: {reason}"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"There is no folder {repository} here, and the Hub knows no model of that name, or only a "
            "private one. Check the spelling; for a private model log in with `hf auth login`. The Hub says: "
            f"{reason}"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{repository} has no revision {revision or 'main'}. Name a branch, a tag or a commit listed at "
            f"https://huggingface.co/{repository}/commits. The Hub says: {reason}"
        )
    if isinstance(error, HFValidationError):
        return f"{repository} cannot be a name on the Hub: {reason}. A name looks like owner/name."
    if isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled):
        return (
            f"There is no folder {repository} here, it is not in the Hub's cache, and HF_HUB_OFFLINE forbids "
            "downloading it. Unset that variable, or name a folder or a .gguf file."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk filled up while {repository} was downloaded, writing {error.filename or 'its files'}: "
            f"{error.strerror}. Make room, or set HF_HOME to a folder on another disk; what is there is kept."
        )
    return (
        f"There is no folder {repository} here, and it could not be fetched from the Hub: {reason}. Check "
        "the network and try again, or name a folder or a .gguf file."
    )
