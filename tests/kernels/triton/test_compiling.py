"""Every Triton kernel compiles to machine code for each GPU generation listed here, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}
"""Bytes of shared memory a program may have, by capability."""

KERNELS = {
    "norm_kernel",
    "activation_kernel",
    "rope_kernel",
    "rope_append_kv_kernel",
    "dequantize_kv_kernel",
    "decode_simt_kernel",
    "split_kv_kernel",
    "combine_kernel",
    "flash_attn_kernel",
}


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile(capability: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.kernels.triton.compiling", str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert {report["kernel"] for report in reports} == KERNELS
    for report in reports:
        assert report["bytes"] > 0
        assert report["shared"] <= SHARED[capability], report
        if report["kernel"] in ("split_kv_kernel", "flash_attn_kernel"):
            assert report["mma"], f"{report}: no tensor cores"
