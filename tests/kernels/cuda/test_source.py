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
from exlm.kernels.cuda import program, unpack, wide
from exlm.kernels.cuda.layout import Layout
from exlm.kernels.cuda.linear import SOURCE, Form, Plan, Product, choices, dealt
from exlm.kernels.cuda.program import Workshop, compile_source, compiled, whole
from exlm.kernels.cuda.tiles import arrange
from tests.kernels.cuda.random_weights import KINDS, weight

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
EXL2 = Layout(4, 8, 2, "half", False)
GPTQ = Layout(4, 8, 8, "table", False)
GGUF = Layout(5, 2, 2, "none", True)
MIXED = tuple(replace(EXL2, bits=bits) for bits in (3, 5, 6))
CHOICES = {
    "exl2": choices(Form((EXL2,) * 3, norm=True), 1, Plan(), 2),
    "three widths": choices(Form(MIXED, norm=True), 2, Plan()),
    "gptq": choices(Form((GPTQ,) * 2, act=1), 2, Plan()),
    "gguf": choices(Form((GGUF,)), 2, Plan(1, 8, 3)),
    "one row": choices(Form(MIXED[:2], norm=True, act=3, apart=True), 1, Plan(2, 16), 3),
    "handed on": choices(Form((EXL2,) * 2, norm=True, act=1), 2, Plan()) | {"HANDED": 1, "HEIR": 1},
    "handed over": choices(Form(MIXED, norm=True), 1, Plan()) | {"HANDED": 1, "HEIR": 0},
    "two and eight bits": choices(
        Form(tuple(replace(EXL2, bits=bits, fine=1) for bits in (2, 8))), 1, Plan(), 2
    ),
}


WIDE = {
    "exl2": dealt(Form((EXL2,) * 3, norm=True), 8, wide.Plan()),
    "three widths": dealt(Form(MIXED, norm=True), 4, wide.Plan()),
    "gptq": dealt(Form((GPTQ,) * 2, act=1), 4, wide.Plan(2)),
    "gguf": dealt(Form((GGUF,)), 6, wide.Plan(1, 4, 2)),
    "handed on": dealt(Form((EXL2,) * 2, norm=True, act=1), 8, wide.Plan(2)) | {"HANDED": 1, "HEIR": 1},
    "handed over": dealt(Form((GPTQ,)), 4, wide.Plan()) | {"HANDED": 1, "HEIR": 0},
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
    image = compile_source(whole(SOURCE), SOURCE.name, options(target, CHOICES[name]))
    assert image.startswith(b"\x7fELF")
    assert all(kernel in image for kernel in (b"multiply", b"prepare"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", WIDE)
def test_the_wide_one_compiles(target: str, name: str) -> None:
    chosen = {**WIDE[name], "RESIDENT": 1, "PIECES": 2}
    image = compile_source(whole(wide.SOURCE), wide.SOURCE.name, options(target, chosen))
    assert all(kernel in image for kernel in (b"multiply_wide", b"prepare"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", [EXL2, GPTQ, GGUF])
def test_unpacking_compiles(target: str, layout: Layout) -> None:
    chosen = {**dealt(Form((layout,)), 1, Plan()), "ABREAST": 4}
    assert b"expand" in compile_source(whole(unpack.SOURCE), unpack.SOURCE.name, options(target, chosen))


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
    monkeypatch.setattr(program, "compile_source", counted)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    counted.calls = 0
    return counted


DEFINES = tuple(sorted(CHOICES["gptq"].items()))


def test_machine_code_is_kept(tmp_path: Path, compiler: Counting) -> None:
    cache = ArtifactCache(tmp_path / "kernels")
    first = compiled(SOURCE, DEFINES, "sm_90", cache)
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.read_bytes() == first
    assert first.startswith(b"\x7fELF")
    for known in (cache, ArtifactCache(tmp_path / "kernels")):
        assert compiled(SOURCE, DEFINES, "sm_90", known) == first
    assert compiler.calls == 1
    assert compiled(SOURCE, DEFINES, "sm_80", cache) != first
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
    first = compiled(SOURCE, DEFINES, "sm_90", ArtifactCache(tmp_path / "kernels"))
    (file,) = (tmp_path / "kernels").iterdir()
    DAMAGES[damage](file)
    for _ in range(2):
        assert compiled(SOURCE, DEFINES, "sm_90", ArtifactCache(tmp_path / "kernels")) == first
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
    images = {compiled(SOURCE, DEFINES, "sm_90", ArtifactCache(tmp_path / "kernels")) for _ in range(3)}
    assert len(images) == compiler.calls == 1
    assert len(caplog.records) == 1
    assert "EXLM_CACHE" in caplog.text
    (private,) = (tmp_path / "tmp").iterdir()
    private.chmod(0o777)  # then nothing can be kept at all
    assert {compiled(SOURCE, DEFINES, "sm_90", ArtifactCache(tmp_path / "kernels"))} == images
    assert compiler.calls == 2


def test_the_compiler_says_what_is_wrong() -> None:
    with pytest.raises(KernelError, match="undefined"):
        compile_source(b"__global__ void f() { missing(); }", "wrong.cu", ["--gpu-architecture=sm_90"])


class Small(Workshop):
    """A GPU with little shared memory."""

    memory = 32 * 1024
    processors = 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [None, "silu"])
def test_plans_fit_small_shared_memories(tmp_path: Path, kind: str, act: str | None) -> None:
    tiles = arrange(weight(kind))
    workshop = Small(torch.device("cpu"), tmp_path)
    product = Product(workshop, [tiles, tiles], None, act, Plan(4, 16))
    plan = product.plan
    assert plan.warps * plan.tiles * 16 * 16 * 4 <= workshop.memory


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    workshop = Small(torch.device("cpu"), tmp_path)
    workshop.memory = 512
    with pytest.raises(Unsupported, match="512 bytes"):
        Product(workshop, [arrange(weight("4 bits"))])
