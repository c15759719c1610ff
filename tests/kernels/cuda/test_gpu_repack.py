"""The tiles that repack.cu fills are those of the torch oracle, bit for bit: emulated, and on a GPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from exlm.errors import Unsupported
from exlm.formats.packed import Exl2Scales, KQuantScales, PackedWeight, PlainScales, Scales, Segment
from exlm.kernels.cuda.module_cache import ModuleCache, compile_source, read_source
from exlm.kernels.cuda.repack import DEFINES, SOURCE, GpuRepacker, repack
from exlm.kernels.cuda.weight_tile import BIT_PLANES
from tests.kernels.cuda import repack_oracle as oracle
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.random_weights import KINDS, matrix, segment, weight
from tests.kernels.cuda.test_compile import TARGETS

HERE = pytest.param("cpu", id="emulated")
GPU = pytest.param(
    "cuda",
    id="gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
TABLES = ("half", "float", "bfloat", "squared", "signed", "unsigned")


@pytest.fixture(scope="module", params=[HERE, GPU])
def modules(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("repack")
    if request.param == "cuda":
        return ModuleCache(torch.device("cuda", 0), folder)
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedModuleCache(folder)


def check(modules: Any, packed: PackedWeight) -> None:
    """The same bits, and everything else the same too."""
    weight = packed.to(modules.device)
    want, got = oracle.repack(weight), repack(weight, GpuRepacker(modules))
    assert (got.layout, got.factor, got.spans) == (want.layout, want.factor, want.spans)
    for one, other in ((got.fine, want.fine), (got.main, want.main)):
        assert one.tiles.equal(other.tiles)
    assert (got.perm is None) == (want.perm is None)
    assert got.perm is None or want.perm is None or got.perm.equal(want.perm)


def table(kind: str, groups: int, outputs: int) -> Scales:
    """Random scales, stored in one of the ways there are."""
    factors = torch.rand(groups, outputs) * 0.01
    match kind:
        case "squared":
            return Exl2Scales(torch.randint(0, 16, (groups, outputs)).to(torch.uint8), factors[:, 0].half())
        case "signed" | "unsigned":
            low, dtype = (-32, torch.int8) if kind == "signed" else (0, torch.uint8)
            codes = torch.randint(low, 32, (groups, outputs)).to(dtype)
            parents = torch.arange(groups, dtype=torch.int32) // 2
            return KQuantScales(codes, factors[: (groups + 1) // 2].half(), parents)
    return PlainScales(factors.to({"half": torch.half, "float": torch.float, "bfloat": torch.bfloat16}[kind]))


def short(sizes: list[int], cut: int) -> list[int]:
    """The last group a little shorter."""
    return [*sizes[:-1], sizes[-1] - cut]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [True, False])
def test_every_kind(modules: Any, kind: str, order: bool) -> None:
    check(modules, weight(kind, order=order, bias=True))


@st.composite
def segments(draw: st.DrawFn) -> tuple[tuple[Segment, ...], int, torch.dtype]:
    """Any widths in any order, groups of one size or several, scales of any sort; the last may end early."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    outputs, zeros, minima = draw(st.integers(1, 50)), draw(st.booleans()), draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float16, torch.float32]))
    parts = draw(st.lists(st.sampled_from(sorted(BIT_PLANES)), min_size=1, max_size=4))
    made = []
    for number, bits in enumerate(parts):
        sizes = draw(st.lists(st.sampled_from([16, 32, 48, 128]), min_size=1, max_size=4))
        if number + 1 == len(parts):
            sizes = short(sizes, draw(st.integers(0, 15)))
        one = segment(bits, sizes, outputs, zeros, minima and draw(st.booleans()))
        scales = table(draw(st.sampled_from(TABLES)), len(sizes), outputs)
        floor = one.minimum and table(draw(st.sampled_from(TABLES)), len(sizes), outputs)
        made.append(replace(one, scales=scales, minimum=floor))
    return tuple(made), outputs, dtype


@settings(max_examples=60, deadline=None)
@given(segments())
def test_any_mixture(modules: Any, drawn: tuple[tuple[Segment, ...], int, torch.dtype]) -> None:
    made, outputs, dtype = drawn
    packed = replace(matrix(made, outputs), dtype=dtype)
    try:
        oracle.repack(packed)
    except Unsupported:  # a short group in the middle, once segments of one width are put together
        reject()
    check(modules, packed)


def test_zero_points_beyond_their_codes(modules: Any) -> None:
    """As GPTQ has them: one more than what is stored, and some segments with one for all."""
    torch.manual_seed(0)
    wide, narrow = segment(4, [32] * 4, 20, True, False), segment(3, [32] * 3, 20, False, False)
    check(modules, matrix((replace(wide, zero=wide.zero + 1), replace(narrow, zero=8)), 20))


def test_rows_that_are_not_side_by_side(modules: Any) -> None:
    """Tensors as they are after a cut, with gaps between their rows."""
    torch.manual_seed(0)
    full = segment(4, [32] * 4, 40, True, False)
    cut = replace(
        full,
        codes=full.codes[:, 3:24],
        scales=PlainScales(full.scales.expand()[:, 3:24]),
        zero=full.zero[:, 3:24],  # type: ignore[index]
    )
    check(modules, matrix((cut,), 21))


@pytest.mark.parametrize("scale", [8000.0, 4000.0])
def test_scales_beyond_half_precision(modules: Any, scale: float) -> None:
    """Cut into digits of 4 bits, six have a second one with 16 times the scale."""
    torch.manual_seed(0)
    six, four = segment(6, [32] * 2, 24, False, False), segment(4, [32] * 6, 24, False, False)
    values = six.scales.expand().clone()
    values[1, 23] = scale
    packed = matrix((replace(six, scales=PlainScales(values)), four), 24)
    if scale * 16 <= 65504:
        check(modules, packed)
        return
    with pytest.raises(Unsupported, match="scales above 4094"):
        repack(packed.to(modules.device), GpuRepacker(modules))


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles(target: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    image = compile_source(
        read_source(SOURCE),
        SOURCE.name,
        [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{k}={v}" for k, v in DEFINES.items())],
    )
    assert image.startswith(b"\x7fELF")
    assert b"repack" in image
