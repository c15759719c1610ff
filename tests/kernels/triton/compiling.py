"""Compiles every kernel of the Triton backend, as the backend launches it, for a GPU that need not be there.

Run as a program: for each compute capability named, it calls the backend on CPU tensors with launches caught
and compiled instead, and prints a JSON line for each. It must not run in Triton's interpreter.
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
    """What the compiler is told: types, constants, and what is known of the numbers."""
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    types, constants, known = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = bound[param.name]
        plain = param.do_not_specialize
        if param.is_constexpr:
            types[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[param.name], known[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1 and not plain:
            types[param.name], constants[(i,)] = "constexpr", 1
        elif isinstance(value, int):
            types[param.name] = "i32"
            if value % 16 == 0 and not plain:
                known[(i,)] = [["tt.divisibility", 16]]
        else:
            types[param.name] = "fp32"
    return types, constants, known


@contextmanager
def compiled(capability: int, reports: list[dict[str, Any]]) -> Iterator[None]:
    """Launches inside are compiled for a capability, each distinct one once, and not run."""
    done: set[str] = set()
    launch = JITFunction.run

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {
            name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs
        }
        types, constants, known = signature(kernel, args, kwargs)
        key = repr((kernel.__name__, types, constants, known, options))
        if key in done:
            return
        done.add(key)
        start = time.perf_counter()
        source = ASTSource(kernel, types, constants, known)
        found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        reports.append(
            {
                "kernel": kernel.__name__,
                "capability": capability,
                "bytes": len(found.asm["cubin"]),
                "shared": found.metadata.shared,
                "mma": "mma" in found.asm["ptx"],
                "seconds": round(time.perf_counter() - start, 2),
                "coding": kwargs.get("KEYS"),
            }
        )

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def calls(capability: int) -> None:
    """Launches of every kernel; codes by all of them on one capability, once on the others."""
    from exlm import spec
    from exlm.kernels.triton import TritonBackend
    from exlm.kernels.triton.attention import Machine
    from tests.kernels.triton import cases

    half, device = torch.float16, torch.device("cpu")
    backend = TritonBackend(device, half)
    backend.machine = Machine(100, SHARED[capability])
    x = torch.zeros(1, 2, 4096, dtype=half)
    backend.add_norm(spec.Norm(), torch.zeros(4096), None)(x, x)
    backend.norm(spec.Norm("layer", bias=True), torch.zeros(4096), torch.zeros(4096))(x)
    backend.gated("silu")(x, x)
    rotate = backend.rope(spec.Rope(1e4, 128), 16)
    steps = [("float", 4, 1), ("float", 1, 16), ("float", 1, 20), ("q4", 1, 20)]
    if capability == 90:
        steps += [("q4", 4, 1), ("q4", 1, 16), ("q8", 4, 1), ("q8", 1, 16), ("fp8", 1, 1)]
    for caching, kv, tokens in steps:
        case = cases.Case(caching, half, 4, kv, 128, (20,), tokens)
        step = cases.step(case, device)
        backend.attention(case.attn, rotate)(*step.heads, step.layer, step.metadata)
    none = torch.zeros(1, 2, dtype=torch.int64)
    rotate(torch.zeros(1, 2, 4, 128, dtype=half), torch.zeros(1, 2, 1, 128, dtype=half), none)


def main() -> None:
    """Capabilities as arguments."""
    for word in sys.argv[1:]:
        reports: list[dict[str, Any]] = []
        with compiled(int(word), reports):
            calls(int(word))
        for report in reports:
            print(json.dumps(report))


if __name__ == "__main__":
    main()
