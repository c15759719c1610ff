"""Packed matrices from disk: the same bytes as freshly packed ones, and the same logits; damage is found."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from exlm import Config, Model, env
from exlm.checkpoint import GgufCheckpoint, SafetensorsCheckpoint
from exlm.checkpoint.source import MatrixRequest
from exlm.errors import Unsupported
from exlm.formats import DenseWeight
from exlm.formats.host_buffers import HugePageArena
from exlm.kernels import artifact_cache, packed_store
from exlm.kernels.cpu import packed_cache
from exlm.kernels.cpu.backend import CpuBackend
from exlm.kernels.cpu.bindings import Library
from exlm.kernels.cpu.ops import PackedEmbedding, PackedLinear, PaddedLinear
from exlm.kernels.cpu.packed_cache import CpuPackedCopy, make_region
from exlm.kernels.cpu.repack import PackedMatrix, pack_dense, repack_panels
from exlm.kernels.packed_store import SUFFIX, PackedStore
from tests import tiny
from tests.checkpoint import gguf_models
from tests.kernels.cpu.random_weights import RECIPES, Recipe, random_weight

MODEL = "/models/a.gguf"
FINGERPRINT = "the contents of a file"
MODELS = ("tiny-lm-exl2-4.0bpw", "tiny-lm-gptq-g128-act", "tiny-lm-gguf-q4_0", "tiny-lm")


class NoHugePages(HugePageArena):
    """An arena that leaves everything in the map."""

    def allocate_huge(self, size: int) -> Tensor | None:
        return None


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact_cache.warn_once.cache_clear()
    monkeypatch.setattr(packed_cache, "MIN_COPY_BYTES", 0)
    monkeypatch.setattr(packed_store, "RESERVED_BYTES", 0)


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return PackedStore(tmp_path / "packed", 1 << 30)


def image(matrix: PackedMatrix) -> bytes:
    """The region of a freshly packed matrix."""
    region = make_region(matrix)
    assert region is not None
    return b"".join(bytes(chunk.numpy()) for chunk in region.chunks(torch.empty(8192, dtype=torch.uint8)))


def stored_image(matrix: PackedMatrix, copy: CpuPackedCopy) -> bytes:
    """The region of a matrix from a file."""
    return b"".join(
        bytes(chunk.numpy()) for chunk in copy._regions[matrix].chunks(torch.empty(4096, dtype=torch.uint8))
    )


def open_copy(store: PackedStore, library: Library, arena: HugePageArena | None = None) -> CpuPackedCopy:
    return CpuPackedCopy(store, FINGERPRINT, MODEL, library, arena or NoHugePages())


def write(store: PackedStore, library: Library, **kernels: object) -> None:
    copy = open_copy(store, library)
    for role, kernel in kernels.items():
        copy.keep(role, kernel, f"{role}, described")
    thread = copy.finish()
    assert thread is not None
    thread.join()


@settings(max_examples=40)
@given(
    recipe=RECIPES, dtype=st.sampled_from([torch.float16, torch.float32]), huge=st.booleans(), seed=st.integers(0, 9999)
)
def test_any_matrix_is_restored_byte_for_byte(
    library: Library,
    recipe: Recipe,
    dtype: torch.dtype,
    huge: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    torch.manual_seed(seed)
    weight = random_weight(recipe, dtype)
    store = PackedStore(tmp_path_factory.mktemp("any") / "packed", 1 << 30)
    fresh = PackedLinear(library, repack_panels(weight, library, HugePageArena()))
    write(store, library, role=fresh)
    copy = open_copy(store, library, HugePageArena() if huge else None)
    found = copy.restore("role")
    assert found is not None
    restored, detail = found
    assert detail == "role, described"
    assert isinstance(restored, PackedLinear)
    assert stored_image(restored.matrix, copy) == image(fresh.matrix)
    x = torch.randn(3, weight.in_features)
    assert torch.equal(restored(x), fresh(x))
    assert (restored.matrix.in_features, restored.matrix.out_features) == (weight.in_features, weight.out_features)
    assert copy.finish() is None  # nothing is new


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "bf12": lambda data: data.bfloat16().float(),
    "float16": lambda data: data.half().float(),
    "bf12 with outliers": lambda data: data.bfloat16().float() * (1 + 2**-30 * (torch.rand(data.shape) < 0.001)),
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("bias", [False, True])
def test_dense_matrices_are_restored_byte_for_byte(library: Library, store: PackedStore, name: str, bias: bool) -> None:
    data = DENSE[name](torch.randn(48, 128))
    fresh = pack_dense(DenseWeight(data, torch.randn(48) if bias else None), library, HugePageArena())
    padded = PaddedLinear(PackedLinear(library, fresh), 45)
    write(store, library, padded=padded, embed=PackedEmbedding(library, fresh, torch.float16))
    copy = open_copy(store, library)
    found, embed = copy.restore("padded"), copy.restore("embed")
    assert found is not None
    assert embed is not None
    assert isinstance(found[0], PaddedLinear)
    assert isinstance(embed[0], PackedEmbedding)
    assert stored_image(found[0].inner.matrix, copy) == image(fresh)
    assert embed[0].matrix is found[0].inner.matrix  # one matrix in two roles is one in the file and in memory
    assert embed[0].dtype is torch.float16
    x = torch.randn(5, 128)
    assert torch.equal(found[0](x), padded(x))
    ids = torch.tensor([[0, 47, 3]])
    assert torch.equal(embed[0](ids), PackedEmbedding(library, fresh, torch.float16)(ids))


def test_a_file_larger_than_one_write_is_restored_byte_for_byte(store: PackedStore, library: Library) -> None:
    """Where the file system has large folios, this file is mapped in huge pages; elsewhere it is copied into some."""
    first, second = (some_linear(library, columns, 8, 32) for columns in (5000, 4000))
    write(store, library, first=first, second=second)
    (path,) = store.folder.iterdir()
    assert path.stat().st_size > 2 * packed_cache.WRITE_BYTES
    for arena in (HugePageArena(), NoHugePages()):
        copy = open_copy(store, library, arena)
        for role, linear in (("first", first), ("second", second)):
            found = copy.restore(role)
            assert found is not None
            assert isinstance(found[0], PackedLinear)
            assert stored_image(found[0].matrix, copy) == image(linear.matrix)


def some_linear(library: Library, columns: int = 200, bits: int = 4, groups: int = 4) -> PackedLinear:
    weight = random_weight(Recipe(((bits, (32,) * groups),), columns))
    return PackedLinear(library, repack_panels(weight, library, HugePageArena()))


def test_every_changed_byte_is_found(store: PackedStore, library: Library) -> None:
    write(store, library, role=some_linear(library, 60))
    (path,) = store.folder.iterdir()
    whole = path.read_bytes()
    copy = open_copy(store, library)
    assert copy._file is not None
    data_bytes = copy._file.header.data_bytes
    for at in [*range(0, data_bytes, 97), data_bytes - 1]:
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        assert open_copy(store, library).restore("role") is None, at
    swapped = bytearray(whole)
    swapped[0:8], swapped[8:16] = whole[8:16], whole[0:8]
    path.write_bytes(swapped)
    assert whole[0:8] == whole[8:16] or open_copy(store, library).restore("role") is None


def test_a_damaged_matrix_is_packed_again_and_the_file_replaced(
    store: PackedStore, library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = some_linear(library), some_linear(library, 64)
    write(store, library, first=first, second=second)
    (path,) = store.folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:])
    copy = open_copy(store, library)
    assert copy.restore("first") is None
    assert "is damaged (the checksum of a matrix is wrong)" in caplog.text
    assert copy.restore("second") is not None
    copy.keep("first", first, "first, described")
    thread = copy.finish()
    assert thread is not None
    thread.join()
    mended = open_copy(store, library)
    for role, linear in (("first", first), ("second", second)):
        found = mended.restore(role)
        assert found is not None
        assert isinstance(found[0], PackedLinear)
        assert stored_image(found[0].matrix, mended) == image(linear.matrix)
    assert mended.finish() is None


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        {"matrices": [[0]], "roles": {}},
        {"matrices": [[0, 1 << 40, 100, [], 1, 1, ""]], "roles": {}},
        {"matrices": [[1, 4096, 100, [], 1, 1, ""]], "roles": {}},
        {"matrices": [[0, 4096, 4096, [[4090, 0]], 1, 1, ""]], "roles": {}},
        {"matrices": [[0, 4096, 4096, [[0, 4096]], 1, 1, ""]], "roles": {}},
        {"matrices": [[0, 4096, 8, [], 1, 1, ""]], "roles": {}},
        {"matrices": [], "roles": {"role": [0, "linear", "", None]}},
        {"matrices": [], "roles": []},
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    store: PackedStore, library: Library, content: object, caplog: pytest.LogCaptureFixture
) -> None:
    key = packed_cache.copy_key(FINGERPRINT, library)

    def fill(file: object) -> object:
        packed_store.write_all(file, memoryview(bytes(8192)))  # type: ignore[arg-type]
        return content

    assert store.write(key, MODEL, 8192, fill)
    copy = open_copy(store, library)
    assert copy.restore("role") is None
    assert "its header is of another form" in caplog.text


def test_the_key_tells_files_instruction_sets_and_versions_apart(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = packed_cache.copy_key(FINGERPRINT, library)
    assert packed_cache.copy_key(FINGERPRINT + "'", library) != key
    monkeypatch.setattr(packed_cache, "source_digest", lambda name: f"another version for {name}")
    packed_cache._sources_digest.cache_clear()
    assert packed_cache.copy_key(FINGERPRINT, library) != key
    packed_cache._sources_digest.cache_clear()


BITS: tuple[Literal[16, 8], ...] = (16, 8)


def test_activations_of_one_byte_have_a_copy_of_their_own(store: PackedStore, library: Library) -> None:
    folder = env.cache_folder() / "kernels"
    backends = [CpuBackend(torch.device("cpu"), torch.float32, folder, activation_bits=bits) for bits in BITS]
    copies = [backend.packed_copy(store, FINGERPRINT, MODEL) for backend in backends]
    assert copies[0]._key != copies[1]._key


def test_small_models_and_what_is_no_matrix_are_not_kept(
    store: PackedStore, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = open_copy(store, library)
    copy.keep("norm", torch.nn.Identity(), "no matrix")
    assert copy.finish() is None
    monkeypatch.setattr(packed_cache, "MIN_COPY_BYTES", 1 << 30)
    copy = open_copy(store, library)
    copy.keep("role", some_linear(library), "small")
    assert copy.finish() is None
    assert not store.folder.exists()


# -- models ------------------------------------------------------------------------------------------


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, with the compiled kernels of the user's."""
    kernels = env.cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "kernels").symlink_to(kernels)
    monkeypatch.setenv("EXLM_CACHE", str(folder))
    yield folder
    wait()


def wait() -> None:
    """Wait for the threads that write packed matrices."""
    for thread in threading.enumerate():
        if thread.name == "exlm-packed-copy":
            thread.join()


def load(path: Path) -> tuple[Model, Tensor]:
    config = Config(path)
    config.device = "cpu"
    config.max_seq_len = 128
    model = Model(config)
    model.load()
    wait()
    return model, model.forward(torch.arange(3, 40)[None])


def packed_files(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return sorted(path for path in (folder / "packed").iterdir() if path.suffix == SUFFIX)
    return []


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roles of the matrices that are read from now on."""
    roles: list[str] = []
    for owner in (GgufCheckpoint, SafetensorsCheckpoint):

        def read(self: Any, request: MatrixRequest, inner: Any = owner._read_matrix) -> Any:
            roles.append(request.role)
            return inner(self, request)

        monkeypatch.setattr(owner, "_read_matrix", read)
    return roles


@pytest.mark.parametrize("name", MODELS)
def test_a_later_start_reads_no_matrix_and_gives_the_same_logits(
    name: str, fixtures_dir: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next((fixtures_dir / name).glob("*.gguf"), fixtures_dir / name)
    first, logits = load(path)
    (file,) = packed_files(cache_folder)
    roles = count_reads(monkeypatch)
    second, again = load(path)
    assert set(roles) <= {"embed"}  # a table that the reference looks up
    assert torch.equal(again, logits)
    assert second.explain() == first.explain()
    assert packed_files(cache_folder) == [file]
    monkeypatch.setenv("EXLM_PACKED_CACHE", "0")
    assert torch.equal(load(path)[1], logits)


def test_a_moved_file_is_known_and_a_changed_one_is_not(cache_folder: Path, tmp_path: Path) -> None:
    path, moved = tmp_path / "a.gguf", tmp_path / "b" / "c.gguf"
    gguf_models.write_model(path, "llama", kind="Q8_0")
    _, logits = load(path)
    moved.parent.mkdir()
    path.rename(moved)
    assert torch.equal(load(moved)[1], logits)
    assert len(packed_files(cache_folder)) == 1
    os.utime(moved, ns=(0, 1))
    load(moved)
    assert len(packed_files(cache_folder)) == 2


def test_a_file_rewritten_with_other_weights_is_packed_again(cache_folder: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    folder = tiny.make(tmp_path / "model", torch.float16, **sizes)
    load(folder)
    other = tiny.tensors({**tiny.CONFIG, **sizes}, torch.float16)
    status = (folder / "model.safetensors").stat()
    save_file({name: tensor * 2 for name, tensor in other.items()}, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    _, logits = load(folder)
    shutil.rmtree(cache_folder / "packed")
    assert torch.equal(load(folder)[1], logits)


def test_the_model_loads_where_nothing_can_be_kept(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.gguf"
    gguf_models.write_model(path, "llama", kind="Q8_0")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache, "write_all", full)
    _, logits = load(path)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left on device" in caplog.text
    assert packed_files(cache_folder) == []
    assert torch.equal(load(path)[1], logits)


def test_two_processes_that_pack_at_once_leave_one_good_file(cache_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    gguf_models.write_model(path, "llama", kind="Q8_0")
    code = (
        "import sys; from exlm import Config, Model; from exlm.kernels import packed_store; "
        "from exlm.kernels.cpu import packed_cache; packed_cache.MIN_COPY_BYTES = packed_store.RESERVED_BYTES = 0; "
        "config = Config(sys.argv[1]); config.device = 'cpu'; model = Model(config); sys.stdin.readline(); model.load()"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE) for _ in range(2)]
    for process in running:
        process.communicate(b"\n")
        assert process.returncode == 0
    assert len(packed_files(cache_folder)) == len(list((cache_folder / "packed").iterdir())) == 1
    _, logits = load(path)
    shutil.rmtree(cache_folder / "packed")
    assert torch.equal(load(path)[1], logits)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_twenty_loads_leave_memory_and_maps_flat(cache_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    gguf_models.write_model(path, "llama", kind="Q8_0")

    def maps_and_files() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count(SUFFIX)
        return maps, len(os.listdir("/proc/self/fd"))

    load(path)[0].unload()
    load(path)[0].unload()
    before = maps_and_files()
    assert before[0] == 0
    for _ in range(20):
        load(path)[0].unload()
    assert maps_and_files() == before


def test_unsupported_matrices_are_still_read(cache_folder: Path, tmp_path: Path) -> None:
    """Float32 numbers that need more than 16 bits stay with the reference."""
    folder = tiny.make(tmp_path / "model")
    with suppress(Unsupported):
        _, logits = load(folder)
        assert torch.equal(load(folder)[1], logits)
    assert packed_files(cache_folder) == []
