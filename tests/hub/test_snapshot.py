"""Downloads from the Hub: which files huggingface_hub is asked for, and how its errors are explained."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exlm.errors import MissingExtra, ModelNotFound
from exlm.hub.snapshot import ALLOW_PATTERNS, IGNORE_PATTERNS, _list_files, download_snapshot

hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")

Answer = Callable[..., str]


@pytest.fixture(autouse=True)
def listing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The repository's files on the Hub; while the list is empty, the Hub does not answer."""
    names: list[str] = []

    def listed(repository: str, revision: str | None) -> list[str]:
        if not names:
            raise OSError("no network")
        return names

    monkeypatch.setattr("exlm.hub.snapshot._list_files", listed)
    return names


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    return lambda function: monkeypatch.setattr(hub, "snapshot_download", function)


def failing(error: BaseException, cause: BaseException | None = None) -> Answer:
    def snapshot_download(*args: Any, **kwargs: Any) -> str:
        raise error from cause

    return snapshot_download


def from_the_hub(kind: str, message: str) -> Any:
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    return getattr(errors, kind)(message, response=response)


def filled(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_arguments_of_snapshot_download(tmp_path: Path, answer: Any) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **kwargs: Any) -> str:
        asked.update(kwargs, repository=repository)
        return str(filled(tmp_path, "config.json", "model.safetensors"))

    answer(snapshot_download)
    assert download_snapshot("owner/name@v1.0", True) == tmp_path
    assert asked["repository"] == "owner/name"
    assert asked["revision"] == "v1.0"
    assert asked["tqdm_class"] is None
    assert download_snapshot("owner/name", False) == tmp_path
    assert asked["revision"] is None
    assert asked["tqdm_class"](total=3).disable


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("tokenizer.model", True),
        ("merges.txt", True),
        ("chat_template.jinja", True),
        ("x.Q4_K_M.gguf", True),
        ("pytorch_model.bin", False),
        ("modeling_x.py", False),
        ("consolidated.safetensors", False),
        ("original/params.json", False),
        ("onnx/model.safetensors", False),
    ],
)
def test_code_pickles_and_copies_are_not_downloaded(file: str, wanted: bool) -> None:
    allowed = any(fnmatch(file, pattern) for pattern in ALLOW_PATTERNS)
    assert (allowed and not any(fnmatch(file, pattern) for pattern in IGNORE_PATTERNS)) == wanted


def test_a_repository_with_one_gguf_gives_that_file(tmp_path: Path, answer: Any) -> None:
    answer(lambda *a, **k: str(filled(tmp_path, "x.gguf", "README.txt")))
    assert download_snapshot("owner/name", False) == tmp_path / "x.gguf"


def test_several_ggufs_are_refused(tmp_path: Path, answer: Any) -> None:
    answer(lambda *a, **k: str(filled(tmp_path, "a.gguf", "b.gguf")))
    with pytest.raises(ModelNotFound, match=r"holds 2 GGUF files; .*a\.gguf\. They are: a\.gguf, b\.gguf"):
        download_snapshot("owner/name", False)


def test_files_are_listed_by_model_info(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(self: Any, repository: str, *, revision: str | None, timeout: float) -> Any:
        assert (repository, revision, timeout) == ("owner/name", "v1", 10)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename="x.gguf")])

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    assert _list_files("owner/name", "v1") == ["x.gguf"]


def test_several_ggufs_are_refused_before_downloading(listing: list[str], answer: Any) -> None:
    listing += ["README.md", "x.Q8_0.gguf", "x.Q4_0.gguf", "BF16/x.gguf"]
    answer(failing(AssertionError("it was downloaded")))
    with pytest.raises(ModelNotFound, match=r"2 GGUF models: x\.Q4_0\.gguf, .*`hf download owner/name x\.Q4_0"):
        download_snapshot("owner/name", False)


@pytest.mark.parametrize("known", [True, False])
def test_a_split_gguf_is_one_model(tmp_path: Path, listing: list[str], answer: Any, known: bool) -> None:
    parts = [f"x-0000{n}-of-00002.gguf" for n in (1, 2)]
    listing += parts if known else []
    answer(lambda *a, **k: str(filled(tmp_path, *parts)))
    assert download_snapshot("owner/name", False) == tmp_path / parts[0]


def test_a_gguf_beside_safetensors_is_not_downloaded(tmp_path: Path, listing: list[str], answer: Any) -> None:
    refused: list[str] = []

    def snapshot_download(repository: str, **kwargs: Any) -> str:
        refused.extend(kwargs["ignore_patterns"])
        return str(filled(tmp_path, "config.json", "model.safetensors"))

    answer(snapshot_download)
    listing += ["config.json", "model.safetensors", "x.gguf"]
    assert download_snapshot("owner/name", False) == tmp_path
    assert any(fnmatch("x.gguf", pattern) for pattern in refused)


def test_deleted_blobs_are_reported(tmp_path: Path, answer: Any) -> None:
    """Offline, huggingface_hub returns a snapshot folder even if its blobs were deleted."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tmp_path / "blobs" / name)
    answer(lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"bytes: config\.json, model\.safetensors in .* lead nowhere"):
        download_snapshot("owner/name", False)


def test_a_repository_without_readable_weights_is_reported(tmp_path: Path, answer: Any) -> None:
    answer(lambda *a, **k: str(filled(tmp_path, "config.json", "merges.txt")))
    with pytest.raises(ModelNotFound, match=r"found config\.json, merges\.txt.*safetensors version"):
        download_snapshot("owner/name", False)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("GatedRepoError", r"owner/name is gated: .*https://huggingface\.co/owner/name, .*hf auth login"),
        ("RepositoryNotFoundError", r"no folder owner/name here, and the Hub knows no .*spelling"),
        ("RevisionNotFoundError", r"owner/name has no revision v9\. Name a branch"),
        ("HfHubHTTPError", r"could not be fetched from the Hub: .*Check the network"),
    ],
)
def test_errors_of_the_hub_are_explained(answer: Any, kind: str, expected: str) -> None:
    answer(failing(from_the_hub(kind, "404 Client Error.\n\nThe reason of the Hub.")))
    with pytest.raises(ModelNotFound, match=expected) as caught:
        download_snapshot("owner/name@v9", False)
    assert "404 Client Error. The reason of the Hub." in str(caught.value)
    assert type(caught.value.__cause__).__name__ == kind


def test_no_network_is_reported(answer: Any) -> None:
    cause = ConnectionError("[Errno -2] Name or service not known")
    answer(failing(errors.LocalEntryNotFoundError("Got: a long story"), cause))
    with pytest.raises(ModelNotFound, match=r"Name or service not known\. Check the network"):
        download_snapshot("owner/name", False)


def test_an_error_of_the_http_library_is_reported(answer: Any) -> None:
    transport = errors.HfHubHTTPError.__bases__[0]
    answer(failing(transport("the proxy hung up")))
    with pytest.raises(ModelNotFound, match="the proxy hung up"):
        download_snapshot("owner/name", False)


def test_a_full_disk_is_reported(answer: Any) -> None:
    answer(failing(OSError(errno.ENOSPC, "No space left on device", "/cache/blob")))
    with pytest.raises(ModelNotFound, match=r"/cache/blob: No space left on device.*HF_HOME"):
        download_snapshot("owner/name", False)


def test_programming_errors_are_not_wrapped(answer: Any) -> None:
    answer(failing(TypeError("an unexpected argument")))
    with pytest.raises(TypeError, match="unexpected"):
        download_snapshot("owner/name", False)


@pytest.mark.parametrize("name", ["owner/-name", "owner/na--me"])
def test_a_name_the_library_refuses_is_reported(name: str) -> None:
    with pytest.raises(ModelNotFound, match="cannot be a name on the Hub"):
        download_snapshot(name, False)


def test_offline_mode_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the library reads it when imported, which has happened
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE forbids"):
        download_snapshot("owner/name", False)
    assert time.monotonic() - started < 5


def test_missing_huggingface_hub_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match="pip install huggingface_hub"):
        download_snapshot("owner/name", False)
