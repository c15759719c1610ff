"""The CUDA source compiles for every generation of GPUs we name, without one at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from exlm.errors import KernelError
from exlm.kernels.cuda.linear import SOURCE, Plan, choices, fitting
from exlm.kernels.cuda.program import compile_source, compiled
from exlm.kernels.cuda.tiles import Layout

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
CHOICES = {
    "exl2": choices(Layout(2, "half", False), [8, 6, 5, 4, 3, 2], 1, Plan(), 3, "norm"),
    "gptq": choices(Layout(8, "table", False), [4], 2, Plan(), 2, "gated"),
    "gguf": choices(Layout(2, "none", True), [5], 2, Plan(4, 8, 2), 1, "plain"),
}


def options(target: str, chosen: dict[str, int]) -> list[str]:
    return [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{k}={v}" for k, v in chosen.items())]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CHOICES)
def test_it_compiles(target: str, name: str) -> None:
    image = compile_source(SOURCE.read_bytes(), SOURCE.name, options(target, CHOICES[name]))
    assert image.startswith(b"\x7fELF")
    assert all(kernel in image for kernel in (b"multiply", b"prepare", b"expand"))


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


def test_plans_fit_small_shared_memories() -> None:
    brick = Layout(2, "half", False).brick(8)
    roomy, tight = fitting(Plan(2, 8, 4), brick, 227 * 1024), fitting(Plan(2, 8, 4), brick, 99 * 1024)
    assert roomy == Plan(2, 8, 4)
    assert tight.stages >= 2
    assert tight.warps * tight.stages * tight.tiles * brick <= 99 * 1024
