"""llama.cpp's line of instruction sets, and what the processor has beyond it."""

from __future__ import annotations

from exlm.bench.llama_builds import build_command, instruction_sets, missing_sets

WHEEL = (
    "CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | LLAMAFILE = 1 | OPENMP = 1 | "
    "REPACK = 1 | "
)
OLD_STYLE = "AVX = 1 | AVX_VNNI = 0 | AVX2 = 1 | AVX512 = 0 | AVX512_VBMI = 0 | AVX512_VNNI = 0 | FMA = 1 |"
NATIVE = "CPU : AVX2 = 1 | AVX512 = 1 | AVX512_VBMI = 1 | AVX512_VNNI = 1 | AVX512_BF16 = 1 | REPACK = 1 | "
ARM = "CPU : NEON = 1 | ARM_FMA = 1 | DOTPROD = 1 | "

ZEN4 = "processor : 0\ncpuid level : 16\nflags\t\t: fpu avx2 avx512f avx512_vnni avx_vnni\n"
HASWELL = "flags : fpu avx2 fma\n"
ALDER_LAKE = "flags : fpu avx2 avx_vnni\n"
VIRTUAL_XEON = "cpuid level : 28\nflags : avx2 avx512f avx512_vnni amx_tile amx_int8\n"
GRAVITON = "Features : fp asimd asimddp i8mm\n"


def test_a_line_is_parsed() -> None:
    assert {"AVX2", "FMA", "REPACK"} <= instruction_sets(WHEEL)
    assert instruction_sets(OLD_STYLE) == {"AVX", "AVX2", "FMA"}
    assert instruction_sets("CPU : SVE_CNT = 32 | SVE = 0 |") == {"SVE_CNT"}
    assert instruction_sets("") == frozenset()


def test_sets_that_the_processor_has_and_the_build_does_not_use() -> None:
    assert missing_sets(WHEEL, ZEN4) == missing_sets(OLD_STYLE, ZEN4) == ["AVX512", "AVX512_VNNI"]
    assert missing_sets(NATIVE, ZEN4) == []
    assert missing_sets(WHEEL, HASWELL) == []
    assert missing_sets(WHEEL, ALDER_LAKE) == ["AVX_VNNI"]
    assert missing_sets(ARM, GRAVITON) == ["MATMUL_INT8"]
    assert missing_sets(WHEEL, "") == []


def test_the_command_leaves_amx_off_where_it_cannot_be_used() -> None:
    assert build_command(ZEN4).startswith('CMAKE_ARGS="-DGGML_NATIVE=ON" pip install')
    assert build_command(ZEN4).endswith("--no-binary llama-cpp-python llama-cpp-python")
    assert "-DGGML_NATIVE=OFF -DGGML_AVX512=ON" in build_command(VIRTUAL_XEON)
