"""Which GPU a command line will use, found before it is parsed; and that warming up works without a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from exlm.cli.startup import create_context, first_gpu


@pytest.mark.parametrize(
    ("line", "default_device", "number"),
    [
        ("generate model", None, 0),
        ("generate model --device cuda:1 --quiet", None, 1),
        ("chat --device=cuda:2,cuda:3", "cpu", 2),
        ("serve model", "cuda:4", 4),
        ("serve model", "cpu", None),
        ("generate model --device cpu", None, None),
        ("generate model --device cuda:x", None, None),
        ("generate model --device", None, None),
        ("generate --help", None, None),
        ("info model", None, None),
        ("", None, None),
    ],
)
def test_first_gpu_of_a_command_line(line: str, default_device: str | None, number: int | None) -> None:
    assert first_gpu(line.split(), default_device) == number


def test_a_missing_gpu_is_no_error() -> None:
    thread = create_context(99)
    thread.join(60)
    assert not thread.is_alive()


def test_the_context_exists_before_torch_is_imported() -> None:
    code = "import sys, exlm.cli.startup; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_command_works_as_without_warmup() -> None:
    code = "import sys; sys.argv = ['exlm', '--version']; from exlm.cli import main; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("exlm ")
