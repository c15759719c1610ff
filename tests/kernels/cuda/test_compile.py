"""The CUDA source compiles for every generation of GPUs we name, without one at hand."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm.errors import KernelError, Unsupported
from exlm.kernels.artifact_cache import ArtifactCache, warn_once
from exlm.kernels.cuda import dequantize, gemm_m64, module_cache
from exlm.kernels.cuda.gemm import SOURCE, GemmM16, KernelVariant, TileConfig, choices, dealt
from exlm.kernels.cuda.gemm_m64 import TileConfigM64
from exlm.kernels.cuda.layout import TileLayout
from exlm.kernels.cuda.module_cache import ModuleCache, compile_cached, compile_source, read_source
from exlm.kernels.cuda.repack import repack
from tests.kernels.cuda.random_weights import KINDS, weight

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
EXL2 = TileLayout(4, 8, 2, "half", False)
GPTQ = TileLayout(4, 8, 8, "table", False)
GGUF = TileLayout(5, 2, 2, "none", True)
MIXED = tuple(replace(EXL2, bits=bits) for bits in (3, 5, 6))
CHOICES = {
    "exl2": choices(KernelVariant((EXL2,) * 3, norm=True), 1, TileConfig(), 2),
    "three widths": choices(KernelVariant(MIXED, norm=True), 2, TileConfig()),
    "gptq": choices(KernelVariant((GPTQ,) * 2, act=1), 2, TileConfig()),
    "gguf": choices(KernelVariant((GGUF,)), 2, TileConfig(1, 8, 3)),
    "one row": choices(KernelVariant(MIXED[:2], norm=True, act=3, apart=True), 1, TileConfig(2, 16), 3),
    "handed on": choices(KernelVariant((EXL2,) * 2, norm=True, act=1), 2, TileConfig())
    | {"IN_PREPACKED": 1, "OUT_PREPACKED": 1},
    "handed over": choices(KernelVariant(MIXED, norm=True), 1, TileConfig()) | {"IN_PREPACKED": 1, "OUT_PREPACKED": 0},
    "two and eight bits": choices(
        KernelVariant(tuple(replace(EXL2, bits=bits, fine=1) for bits in (2, 8))), 1, TileConfig(), 2
    ),
}


WIDE = {
    "exl2": dealt(KernelVariant((EXL2,) * 3, norm=True), 8, TileConfigM64()),
    "three widths": dealt(KernelVariant(MIXED, norm=True), 4, TileConfigM64()),
    "gptq": dealt(KernelVariant((GPTQ,) * 2, act=1), 4, TileConfigM64(2)),
    "gguf": dealt(KernelVariant((GGUF,)), 6, TileConfigM64(1, 4, 2)),
    "handed on": dealt(KernelVariant((EXL2,) * 2, norm=True, act=1), 8, TileConfigM64(2))
    | {"IN_PREPACKED": 1, "OUT_PREPACKED": 1},
    "handed over": dealt(KernelVariant((GPTQ,)), 4, TileConfigM64()) | {"IN_PREPACKED": 1, "OUT_PREPACKED": 0},
}


def options(target: str, chosen: dict[str, int]) -> list[str]:
    return [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{k}={v}" for k, v in chosen.items())]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    warn_once.cache_clear()
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CHOICES)
def test_it_compiles(target: str, name: str) -> None:
    image = compile_source(read_source(SOURCE), SOURCE.name, options(target, CHOICES[name]))
    assert image.startswith(b"\x7fELF")
    assert all(kernel in image for kernel in (b"gemm_m16", b"pack_activations"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", WIDE)
def test_the_wide_one_compiles(target: str, name: str) -> None:
    chosen = {**WIDE[name], "MIN_BLOCKS": 1, "SPLIT_K": 2}
    image = compile_source(read_source(gemm_m64.SOURCE), gemm_m64.SOURCE.name, options(target, chosen))
    assert all(kernel in image for kernel in (b"gemm_m64", b"pack_activations"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", [EXL2, GPTQ, GGUF])
def test_unpacking_compiles(target: str, layout: TileLayout) -> None:
    chosen = {**dealt(KernelVariant((layout,)), 1, TileConfig()), "BLOCK_TILES": 4}
    assert b"dequantize" in compile_source(
        read_source(dequantize.SOURCE), dequantize.SOURCE.name, options(target, chosen)
    )


class Counting:
    """A compiler that counts what it compiles, and needs no time for what it has compiled before."""

    def __init__(self) -> None:
        self.calls = 0
        self._known: dict[Any, bytes] = {}

    def __call__(self, text: bytes, name: str, options: Sequence[str]) -> bytes:
        self.calls += 1
        key = text, name, tuple(options)
        if key not in self._known:
            self._known[key] = compile_source(text, name, options)
        return self._known[key]


@pytest.fixture(scope="module")
def counted() -> Counting:
    return Counting()


@pytest.fixture
def compiler(counted: Counting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counting:
    """Counts from 0; the folder for temporary files is the test's own."""
    monkeypatch.setattr(module_cache, "compile_source", counted)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    counted.calls = 0
    return counted


DEFINES = tuple(sorted(CHOICES["gptq"].items()))


def test_machine_code_is_kept(tmp_path: Path, compiler: Counting) -> None:
    cache = ArtifactCache(tmp_path / "kernels")
    first = compile_cached(SOURCE, DEFINES, "sm_90", cache)
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.read_bytes() == first
    assert first.startswith(b"\x7fELF")
    for known in (cache, ArtifactCache(tmp_path / "kernels")):
        assert compile_cached(SOURCE, DEFINES, "sm_90", known) == first
    assert compiler.calls == 1
    assert compile_cached(SOURCE, DEFINES, "sm_80", cache) != first
    assert compiler.calls == 2
    assert len([*(tmp_path / "kernels").iterdir()]) == 2


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "one byte": lambda path: os.truncate(path, 1),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "all but one byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "something else": lambda path: path.write_bytes(b"something else"),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "header": lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]),
    "code": lambda path: path.write_bytes(path.read_bytes()[:2000] + b"\xff\0" + path.read_bytes()[2002:]),
    "others may write": lambda path: path.chmod(0o666),
    "the group may write": lambda path: path.chmod(0o664),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a loop": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_machine_code_is_compiled_again(
    tmp_path: Path, compiler: Counting, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    first = compile_cached(SOURCE, DEFINES, "sm_90", ArtifactCache(tmp_path / "kernels"))
    (file,) = (tmp_path / "kernels").iterdir()
    DAMAGES[damage](file)
    for _ in range(2):
        assert compile_cached(SOURCE, DEFINES, "sm_90", ArtifactCache(tmp_path / "kernels")) == first
    assert compiler.calls == 2
    assert caplog.text.count(f"{file} is not used, because") == 1
    assert [*(tmp_path / "kernels").iterdir()] == [file]
    assert file.read_bytes() == first


@pytest.mark.parametrize("folder", ["written by others", "no folder"])
def test_a_folder_that_cannot_be_used_is_no_obstacle(
    tmp_path: Path, compiler: Counting, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    if folder == "no folder":
        (tmp_path / "kernels").touch()
    else:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels").chmod(0o777)
    images = {compile_cached(SOURCE, DEFINES, "sm_90", ArtifactCache(tmp_path / "kernels")) for _ in range(3)}
    assert len(images) == compiler.calls == 1
    assert len(caplog.records) == 1
    assert "EXLM_CACHE" in caplog.text
    (private,) = (tmp_path / "tmp").iterdir()
    private.chmod(0o777)  # then nothing can be kept at all
    assert {compile_cached(SOURCE, DEFINES, "sm_90", ArtifactCache(tmp_path / "kernels"))} == images
    assert compiler.calls == 2


def test_the_compiler_says_what_is_wrong() -> None:
    with pytest.raises(KernelError, match="undefined"):
        compile_source(b"__global__ void f() { missing(); }", "wrong.cu", ["--gpu-architecture=sm_90"])


class Small(ModuleCache):
    """A GPU with little shared memory."""

    memory = 32 * 1024
    num_sms = 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [None, "silu"])
def test_plans_fit_small_shared_memories(tmp_path: Path, kind: str, act: str | None) -> None:
    tiles = repack(weight(kind))
    modules = Small(torch.device("cpu"), tmp_path)
    product = GemmM16(modules, [tiles, tiles], None, act, TileConfig(4, 16))
    plan = product.plan
    assert plan.warps * plan.tiles * 16 * 16 * 4 <= modules.memory


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    modules = Small(torch.device("cpu"), tmp_path)
    modules.memory = 512
    with pytest.raises(Unsupported, match="512 bytes"):
        GemmM16(modules, [repack(weight("4 bits"))])
