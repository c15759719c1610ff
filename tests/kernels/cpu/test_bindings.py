"""How the library comes to be: chosen by the processor, built once, whole or not at all, and never missed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from exlm.errors import Unsupported
from exlm.kernels import dispatch
from exlm.kernels.artifact_cache import ArtifactFolder, file_name
from exlm.kernels.cpu import bindings
from exlm.kernels.cpu import compile as compile_
from exlm.kernels.cpu.bindings import Library
from exlm.kernels.dispatch import backends_for

ROOT = Path(__file__).resolve().parents[3]


def test_the_processor_decides() -> None:
    flags = "flags\t\t: fpu sse avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni amx_tile\n"
    assert compile_.usable_sets(flags, "x86_64") == ["avx512", "avx2", "plain"]
    assert compile_.usable_sets(flags.replace("avx512_vnni", ""), "x86_64") == ["avx2", "plain"]
    assert compile_.usable_sets(flags.replace(" fma", ""), "x86_64") == ["plain"]
    assert compile_.usable_sets("", "x86_64") == ["plain"]
    features = "processor\t: 0\nFeatures\t: fp asimd evtstrm atomics fphp asimdhp asimddp\n"
    assert compile_.usable_sets(features, "aarch64") == ["dotprod", "plain"]
    assert compile_.usable_sets(features.replace(" asimddp", ""), "aarch64") == ["plain"]
    assert compile_.usable_sets("", "arm64") == ["plain"]  # compilers there know dotprod without being told
    assert compile_.usable_sets("", "riscv64") == ["plain"]


def test_without_a_compiler_the_reference_does_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("EXLM_CPU", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("EXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(bindings, "prebuilt", lambda name: tmp_path / name)
    dispatch._warn_once.cache_clear()
    for _ in range(2):
        chain = backends_for(torch.device("cpu"), torch.float32)
    assert [backend.name for backend in chain.backends] == ["reference"]
    told = "the cpu kernels cannot be used, which makes everything slower: there is no C compiler"
    assert caplog.text.count(told) == 1
    assert "absent: cpu: there is no C compiler" in chain.explain()
    assert "compiling" not in caplog.text


def test_a_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("EXLM_CPU", raising=False)
    on = backends_for(torch.device("cpu"), torch.float32)
    assert on.backends[0].name == "cpu" or "absent: cpu: there is no C compiler" in on.explain()
    monkeypatch.setenv("EXLM_CPU", "0")
    dispatch._warn_once.cache_clear()
    caplog.clear()
    off = backends_for(torch.device("cpu"), torch.float32)
    assert "absent: cpu: switched off by EXLM_CPU=0" in off.explain()
    assert not caplog.text


def brought(folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of an installed wheel."""
    monkeypatch.setattr(compile_, "SOURCES", folder)
    path = folder / file_name("exlm-cpu-plain.so", data)
    path.write_bytes(data)
    assert compile_.prebuilt("plain") == path
    return path


def test_a_library_of_the_wheel_comes_first(
    library: bindings.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = brought(tmp_path, library.path.read_bytes(), monkeypatch)
    assert bindings.load(tmp_path / "none", "plain").path == path
    path.chmod(0o666)  # how it was installed is not looked at, as with the Python code beside it
    assert bindings.load(tmp_path / "none", "plain").path == path
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)  # as some installers do
    assert bindings.load(tmp_path / "none", "plain").path == path
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("length", [0, 100, 5000, -1])
def test_a_damaged_library_of_the_wheel_is_not_loaded(
    library: bindings.Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    length: int,
) -> None:
    data = library.path.read_bytes()
    path = brought(tmp_path, data, monkeypatch)
    path.write_bytes(data[:length])
    kept = ArtifactFolder(tmp_path / "kernels").put(bindings._artifact_name("plain"), data)
    assert bindings.load(tmp_path / "kernels", "plain").path == kept
    assert f"{path} is not used, because it is damaged" in caplog.text
    assert "install exlm again" in caplog.text


def test_a_library_of_the_wheel_that_was_changed_on_purpose_has_no_checksum_in_its_name(
    library: bindings.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_, "SOURCES", tmp_path)
    path = tmp_path / "exlm-cpu-plain.so"
    path.write_bytes(library.path.read_bytes() + b"\0")
    assert bindings.load(tmp_path / "none", "plain").path == path


def test_what_cannot_be_loaded_is_no_obstacle(
    library: bindings.Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as a library that was compiled on a machine with a newer C library; it stays for that machine."""
    monkeypatch.setattr(bindings, "prebuilt", lambda name: tmp_path / name)
    (tmp_path / "plain").write_bytes(b"not a library")
    folder = ArtifactFolder(tmp_path / "kernels")
    good = folder.put(bindings._artifact_name("plain"), library.path.read_bytes())
    other = folder.put(bindings._artifact_name("plain"), b"no library either")
    os.utime(good, (0, 0))
    assert bindings.load(tmp_path / "kernels", "plain").path == good
    for path in (tmp_path / "plain", other):
        assert f"{path} is not used, because its library cannot be loaded" in caplog.text
        assert path.exists()


def test_a_failed_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho sorry >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(compile_.BuildError, match="sorry"):
        compile_.compile_library("plain", tmp_path / "made" / "x.so")
    assert list((tmp_path / "made").iterdir()) == []
    assert "compiling the kernels for processors with plain" in caplog.text  # the log explains a slow start


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's nor that for temporary files; `test_damaged_library.py` has the first alone."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(bindings, "prebuilt", lambda name: tmp_path / name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(Unsupported, match=r"cannot be compiled.*Not a directory"):
        bindings.load(tmp_path / "file" / "kernels", "plain")


def test_a_library_with_other_structs_is_refused(library: bindings.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    class Matrix(ctypes.Structure):
        _fields_ = (("segments", ctypes.c_void_p),)

    monkeypatch.setattr(bindings, "STRUCTS", (*bindings.STRUCTS, Matrix))
    with pytest.raises(Unsupported, match="its library has 64 bytes for Matrix, this version 8"):
        bindings.Library(library.instructions, library.path)
    Matrix.__name__ = "Unknown"
    with pytest.raises(Unsupported, match="its library has -1 bytes for Unknown, this version 8"):
        bindings.Library(library.instructions, library.path)


FORKED = """
import os, sys, torch
from pathlib import Path
from exlm.formats.host_buffers import HugePageArena
from exlm.kernels.cpu.bindings import load
from exlm.kernels.cpu.ops import PackedLinear
from exlm.kernels.cpu.repack import repack_panels
from tests.kernels.cpu.random_weights import Recipe, random_weight
torch.set_num_threads(3)
library = load(Path(sys.argv[1]), sys.argv[2])
weight = random_weight(Recipe(((4, (32,) * 8),), 400))
multiply, x = PackedLinear(library, repack_panels(weight, library, HugePageArena())), torch.randn(4, 256)
want = multiply(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(multiply(x), want) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own(library: bindings.Library) -> None:
    run = [sys.executable, "-c", FORKED, str(library.path.parent), library.instructions]
    subprocess.run(run, check=True, timeout=120, cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}/src"})


@pytest.mark.parametrize("threads", [1, 3])
def test_the_peak_of_byte_products_counts_what_it_ran(library: Library, threads: int) -> None:
    products = {"avx512": 64, "dotprod": 16}.get(library.instructions)
    if products is not None:
        assert library.int8_peak(2, threads) == 2 * products * 16 * 8 * threads
    elif library.instructions == "avx2":
        assert library.int8_peak(2, threads) == 0
