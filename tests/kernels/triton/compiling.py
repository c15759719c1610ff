"""Compile every kernel of the Triton backend, as the backend launches it, for a GPU that need not be present.

Run as a program: for each compute capability named, it calls the backend on CPU tensors with launches caught
and compiled instead, and prints a JSON line for each kernel. It must not run in Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}
"""Bytes of shared memory a program may have, by capability."""


def signature(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The types, constants and divisibility hints that Triton's launcher would derive."""
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    types, constants, hints = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = bound[param.name]
        unspecialized = param.do_not_specialize
        if param.is_constexpr:
            types[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[param.name], hints[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1 and not unspecialized:
            types[param.name], constants[(i,)] = "constexpr", 1
        elif isinstance(value, int):
            types[param.name] = "i32"
            if value % 16 == 0 and not unspecialized:
                hints[(i,)] = [["tt.divisibility", 16]]
        else:
            types[param.name] = "fp32"
    return types, constants, hints


@contextmanager
def compiled(capability: int, reports: list[dict[str, Any]]) -> Iterator[None]:
    """Compile each distinct launch inside once for a capability instead of running it."""
    done: set[str] = set()
    launch = JITFunction.run

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
        types, constants, hints = signature(kernel, args, kwargs)
        key = repr((kernel.__name__, types, constants, hints, options))
        if key in done:
            return
        done.add(key)
        start = time.perf_counter()
        source = ASTSource(kernel, types, constants, hints)
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        reports.append(
            {
                "kernel": kernel.__name__,
                "capability": capability,
                "bytes": len(binary.asm["cubin"]),
                "shared": binary.metadata.shared,
                "mma": "mma" in binary.asm["ptx"],
                "seconds": round(time.perf_counter() - start, 2),
            }
        )

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def calls(capability: int) -> None:
    """Launch every kernel; all cache dtypes on one capability, one of them on the others."""
    from exlm import spec
    from exlm.kernels.triton import TritonBackend
    from exlm.kernels.triton.attention import DeviceLimits
    from tests.kernels.triton import cases

    half, device = torch.float16, torch.device("cpu")
    backend = TritonBackend(device, half)
    backend.limits = DeviceLimits(100, SHARED[capability])
    x = torch.zeros(1, 2, 4096, dtype=half)
    backend.add_norm(spec.Norm(), torch.zeros(4096), None)(x, x)
    backend.norm(spec.Norm("layer", bias=True), torch.zeros(4096), torch.zeros(4096))(x)
    backend.gated("silu")(x, x)
    rope = backend.rope(spec.Rope(1e4, 128), 16)
    steps = [("float", 4, 1), ("float", 1, 16), ("float", 1, 20), ("q4", 1, 20)]
    if capability == 90:
        steps += [("q4", 4, 1), ("q4", 1, 16), ("q8", 4, 1), ("q8", 1, 16), ("fp8", 1, 1)]
    for cache_dtype, kv_heads, tokens in steps:
        case = cases.Case(cache_dtype, half, 4, kv_heads, 128, (20,), tokens)
        step = cases.step(case, device)
        backend.attention(case.attn, rope)(*step.heads, step.layer, step.metadata)
    positions = torch.zeros(1, 2, dtype=torch.int64)
    rope(torch.zeros(1, 2, 4, 128, dtype=half), torch.zeros(1, 2, 1, 128, dtype=half), positions)


def main() -> None:
    """Take capabilities as arguments."""
    for capability in sys.argv[1:]:
        reports: list[dict[str, Any]] = []
        with compiled(int(capability), reports):
            calls(int(capability))
        for report in reports:
            print(json.dumps(report))


if __name__ == "__main__":
    main()
