"""The C sources under the address and undefined-behaviour sanitizers, on random matrices, pages and states."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exlm.kernels.cpu.compile import BuildError, compile_library, sets_here
from tests.kernels.cpu.conftest import skip_without_compiler

ROOT = Path(__file__).resolve().parents[3]

WALK = """
import sys, torch
from pathlib import Path
from types import SimpleNamespace
from hypothesis import given, settings, strategies as st
from exlm.kernels.cpu.repack import repack_panels
from exlm.kernels.cpu.bindings import Library
from exlm.kernels.cpu.ops import FusedLinear, PackedEmbedding, PackedLinear, RmsNorm, silu_mul
from exlm import spec
from exlm.kvcache.quantized import HadamardQuantizer, QuantizedLayer, FP8Quantizer
from exlm.kvcache.dense import DenseLayer
from exlm.kvcache import LayerShape
from exlm.kernels.cpu.ops import BatchArgsCache, PagedAttention, CpuRotaryEmbedding
from exlm.kernels.cpu.recurrent import CpuDeltaNet, CpuMamba2, CpuShortConv
from exlm.kernels.cpu.repack import cast_to_16bit, pack_bf12, pack_16bit
from exlm.formats.host_buffers import HugePageArena
from exlm.kernels.interface import StateSlots
from exlm.nn import Batch
from tests.kernels.cpu.random_weights import RECIPES, random_weight
from tests.kernels.cpu.test_recurrent import CASES, batch, random_inputs, states

library, CPU = Library(sys.argv[1], Path(sys.argv[2])), torch.device("cpu")

@settings(max_examples=60, database=None, derandomize=True, deadline=None)
@given(RECIPES, st.integers(1, 40), st.integers(1, 3))
def walk(recipe, rows, threads):
    torch.set_num_threads(threads)
    weight = random_weight(recipe)
    blocks = repack_panels(weight, library, HugePageArena(), 8 if rows % 2 else 16)
    assert PackedLinear(library, blocks)(torch.randn(rows, weight.in_features)).isfinite().all()
    PackedEmbedding(library, blocks, torch.float32)(torch.arange(recipe.columns)[None])
    x = torch.randn(rows, recipe.columns)
    RmsNorm(library, torch.ones(recipe.columns), 1e-5, None).add_norm(x, x)
    silu_mul(library, x, x)
    data = torch.randn(8 * threads, 16 * rows).to(torch.float16 if rows % 2 else torch.bfloat16).float()
    floats = pack_16bit(cast_to_16bit(data, library, HugePageArena()), None)
    assert PackedLinear(library, floats)(torch.randn(rows, 16 * rows)).isfinite().all()
    data = torch.randn(64 * threads, 64 * rows).bfloat16().float()
    data[0, 0], data[1, :2] = 2.0**-30, 0
    lean = pack_bf12(data, None, library, HugePageArena())
    assert PackedLinear(library, lean)(torch.randn(rows, 64 * rows)).isfinite().all()
    PackedEmbedding(library, floats, torch.float32)(torch.arange(8 * threads)[None])
    PackedEmbedding(library, lean, torch.float32)(torch.arange(64 * threads)[None])
    linear = PackedLinear(library, blocks)
    norm = RmsNorm(library, torch.ones(weight.in_features), 1e-5, None)
    for gated, count in ((False, 3), (True, 2)):
        together = FusedLinear(library, [linear] * count, norm, gated=gated)
        together(torch.randn(min(rows, 16), 1, weight.in_features), None)

@settings(max_examples=40, database=None, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.sampled_from([1, 2, 3, 4, 9, 33, 90]),
       st.sampled_from([(2, 64), (3, 32)]),
       st.sampled_from([torch.float32, torch.float16, (8, 8), (8, 4), (4, 4), None]), st.integers(1, 3))
def look(past, tokens, heads, bits, threads):
    torch.set_num_threads(threads)
    kv, dim = heads
    rope = spec.Rope(dim=dim, theta=100.0)
    attn = spec.Attention(2 * kv, kv, dim, scale=0.1, rope=rope, window=20 if threads == 2 else None)
    width = -(-(max(past) + tokens) // 16)
    pages = torch.randperm(len(past) * width).view(len(past), width)
    start = torch.tensor(past)
    places = start[:, None] + torch.arange(tokens)
    def batch():
        return Batch(ids=places, positions=places, past_lens=start, page_table=pages,
                     max_kv_len=max(past) + tokens, uniform=False)

    where = batch()
    if bits is None:
        tokens = tokens + 8
        width = -(-(max(past) + tokens) // 16)
        pages = torch.randperm(len(past) * width).view(len(past), width)
        places = start[:, None] + torch.arange(tokens)
        where = batch()
        layer = QuantizedLayer(pages.numel(), 16, LayerShape(kv, dim), FP8Quantizer(), FP8Quantizer(), CPU)
    elif isinstance(bits, torch.dtype):
        layer = DenseLayer(pages.numel(), 16, kv, dim, bits, CPU)
    else:
        keys, values = HadamardQuantizer(bits[0]), HadamardQuantizer(bits[1])
        layer = QuantizedLayer(pages.numel(), 16, LayerShape(kv, dim), keys, values, CPU)
    turn = CpuRotaryEmbedding(rope, 160, CPU, library)
    attend = PagedAttention(library, attn, turn, BatchArgsCache(), None)
    q, k, v = (torch.randn(len(past), tokens, n, dim) for n in (2 * kv, kv, kv))
    assert attend(q, k, v, layer, where).isfinite().all()
    assert all(x.isfinite().all() for x in turn(q, k, places))

recurrent = SimpleNamespace(
    delta_net=lambda mixer, params: CpuDeltaNet(library, mixer, params, None),
    mamba2=lambda mixer, params: CpuMamba2(library, mixer, params, None),
    short_conv=lambda mixer, conv, bias: CpuShortConv(library, mixer, conv, bias, None),
)

@settings(max_examples=40, database=None, derandomize=True, deadline=None)
@given(CASES, st.integers(1, 3), st.sampled_from([1, 2, 5, 33, 70]), st.integers(1, 3), st.booleans(), st.booleans())
def remember(case, rows, tokens, threads, is_first, is_last):
    torch.set_num_threads(threads)
    state = states(case, 3 * rows, 0.5)
    slots = torch.randperm(3 * rows).view(3, rows)
    targets = torch.full((rows, tokens), -1)
    targets[:, tokens // 2] = slots[1]
    if is_last:
        targets[:, -1] = slots[2]
    where = batch(rows, tokens, StateSlots(-torch.ones_like(slots[0]) if is_first else slots[0], targets))
    assert case.bind(recurrent)(*random_inputs(case, rows, tokens), state, where).isfinite().all()

walk()
look()
remember()
"""


@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
def test_nothing_is_read_or_written_outside(tmp_path: Path, instructions: str) -> None:
    if instructions not in sets_here():
        pytest.skip(f"this processor has no {instructions}")
    target = tmp_path / "sanitized.so"
    try:
        compile_library(instructions, target, ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover"))
    except BuildError as reason:
        skip_without_compiler(str(reason))
    preload = _runtime("libasan.so")
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": f"{ROOT}/src",
    }
    done = subprocess.run(
        [sys.executable, "-c", WALK, instructions, str(target)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def _runtime(name: str) -> str:
    """The sanitizer's own library, which must be there before Python's first allocation."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("only gcc says where its sanitizer is")
    asked = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = asked.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip("gcc has no sanitizer here")
    return path
