"""Without Ray everything else works, and the error says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["ray"] = None  # as if it were not installed
import exlm, exlm.serve, exlm.batch, exlm.scale
from exlm.cli.__main__ import main
assert not [name for name in sys.modules if name.partition(".")[0] in ("pyarrow", "pandas")]
sys.argv = ["exlm", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    "command", [["serve", "--ray"], ["batch", "in.jsonl", "out.jsonl", "--ray"]], ids=lambda one: one[0]
)
def test_the_error_names_the_extra(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install 'exlm[scale]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
