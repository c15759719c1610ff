"""The CUDA source compiles for every generation of GPUs we name, without one at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exlm.errors import KernelError, Unsupported
from exlm.kernels.cuda import unpack, wide
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


def test_machine_code_is_kept(tmp_path: Path) -> None:
    defines = tuple(sorted(CHOICES["gptq"].items()))
    first = compiled(SOURCE, defines, "sm_90", tmp_path / "kernels")
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.read_bytes() == first
    file.write_bytes(b"kept")
    assert compiled(SOURCE, defines, "sm_90", tmp_path / "kernels") == b"kept"
    assert compiled(SOURCE, defines, "sm_80", tmp_path / "kernels") != b"kept"


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    image = compiled(SOURCE, tuple(sorted(CHOICES["gptq"].items())), "sm_90", tmp_path / "file" / "kernels")
    assert image.startswith(b"\x7fELF")


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
