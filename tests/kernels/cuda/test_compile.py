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
from exlm.kernels.cuda.gemm_m16 import SOURCE, GemmM16, KernelVariant, TileConfig
from exlm.kernels.cuda.gemm_m64 import TileConfigM64, m64_defines
from exlm.kernels.cuda.module_cache import (
    ModuleCache,
    compile_cached,
    compile_options,
    compile_source,
    read_source,
)
from exlm.kernels.cuda.weight_tile import TileLayout
from tests.kernels.cuda.random_weights import KINDS, weight
from tests.kernels.cuda.repack_oracle import repack

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
EXL2 = TileLayout(4, 8, 2, "half", False)
GPTQ = TileLayout(4, 8, 8, "table", False)
GGUF = TileLayout(5, 2, 2, "none", True)
MIXED = tuple(replace(EXL2, bits=bits) for bits in (3, 5, 6))
PREPACKED = {"IN_PREPACKED": 1, "OUT_PREPACKED": 1}
M16_DEFINES = {
    "exl2": KernelVariant((EXL2,) * 3, norm=True).m16_defines(1, TileConfig(), 2),
    "three widths": KernelVariant(MIXED, norm=True).m16_defines(16, TileConfig()),
    "gptq": KernelVariant((GPTQ,) * 2, act=1).m16_defines(16, TileConfig()),
    "gguf": KernelVariant((GGUF,)).m16_defines(16, TileConfig(1, 8, 3)),
    "one row": KernelVariant(MIXED[:2], norm=True, act=3, separate_perm=True).m16_defines(1, TileConfig(2, 16), 3),
    "prepacked in and out": KernelVariant((EXL2,) * 2, norm=True, act=1).m16_defines(16, TileConfig()) | PREPACKED,
    "prepacked in": KernelVariant(MIXED, norm=True).m16_defines(8, TileConfig()) | PREPACKED | {"OUT_PREPACKED": 0},
    "two and eight bits": KernelVariant(tuple(replace(EXL2, bits=bits, fine_ksteps=1) for bits in (2, 8))).m16_defines(
        8, TileConfig(), 2
    ),
}
M64_DEFINES = {
    "exl2": m64_defines(KernelVariant((EXL2,) * 3, norm=True), 64, TileConfigM64(min_blocks=1), 2),
    "three widths": m64_defines(KernelVariant(MIXED, norm=True), 32, TileConfigM64(min_blocks=1), 2),
    "gptq": m64_defines(KernelVariant((GPTQ,) * 2, act=1), 32, TileConfigM64(2, min_blocks=1), 2),
    "gguf": m64_defines(KernelVariant((GGUF,)), 48, TileConfigM64(1, 4, 2, 1), 2),
    "prepacked in and out": m64_defines(
        KernelVariant((EXL2,) * 2, norm=True, act=1), 64, TileConfigM64(2, min_blocks=1), 2, True, True
    ),
    "prepacked in": m64_defines(KernelVariant((GPTQ,)), 32, TileConfigM64(min_blocks=1), 2, True),
}


def options(target: str, chosen: dict[str, int]) -> list[str]:
    return [f"--gpu-architecture={target}", "--std=c++17", *compile_options(tuple(chosen.items()))]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    warn_once.cache_clear()
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", M16_DEFINES)
def test_it_compiles(target: str, name: str) -> None:
    image = compile_source(read_source(SOURCE), SOURCE.name, options(target, M16_DEFINES[name]))
    assert image.startswith(b"\x7fELF")
    assert all(kernel in image for kernel in (b"gemm_m16", b"pack_activations"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", M64_DEFINES)
def test_gemm_m64_compiles(target: str, name: str) -> None:
    image = compile_source(read_source(gemm_m64.SOURCE), gemm_m64.SOURCE.name, options(target, M64_DEFINES[name]))
    assert all(kernel in image for kernel in (b"gemm_m64", b"pack_activations"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", [EXL2, GPTQ, GGUF])
def test_dequantize_compiles(target: str, layout: TileLayout) -> None:
    chosen = dequantize.dequantize_defines(layout, 4)
    assert b"dequantize" in compile_source(
        read_source(dequantize.SOURCE), dequantize.SOURCE.name, options(target, chosen)
    )


def test_sources_that_fuse_products_by_themselves_are_compiled_so() -> None:
    assert compile_options((("NO_FMAD", 1), ("KEY_DIM", 64))) == ["-DNO_FMAD=1", "-DKEY_DIM=64", "--fmad=false"]
    assert compile_options((("KEY_DIM", 64),)) == ["-DKEY_DIM=64"]


def test_a_ctypes_mirror_of_another_size_does_not_compile() -> None:
    chosen = dequantize.dequantize_defines(EXL2, 4)
    chosen["SIZEOF_DequantTarget"] += 8
    with pytest.raises(KernelError, match="ctypes mirror differs: DequantTarget"):
        compile_source(read_source(dequantize.SOURCE), dequantize.SOURCE.name, options("sm_90", chosen))


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


DEFINES = tuple(sorted(M16_DEFINES["gptq"].items()))


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

    max_smem = 32 * 1024
    num_sms = 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [None, "silu"])
def test_plans_fit_small_shared_memories(tmp_path: Path, kind: str, act: str | None) -> None:
    tiles = repack(weight(kind))
    modules = Small(torch.device("cpu"), tmp_path)
    product = GemmM16(modules, [tiles, tiles], None, act, TileConfig(4, 16))
    config = product.config
    assert config.warps * config.warp_tiles * 16 * 16 * 4 <= modules.max_smem


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    modules = Small(torch.device("cpu"), tmp_path)
    modules.max_smem = 512
    with pytest.raises(Unsupported, match="512 bytes"):
        GemmM16(modules, [repack(weight("4 bits"))])
