"""The front door: what `import exlm` offers, and that opening it does nothing else."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

import exlm
from tests.contract.test_house import SRC

# Installed with exlm or beside it, but imported only by the function that needs it.
WAITING = {
    "fastapi",
    "gguf",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "mistral_common",
    "prometheus_client",
    "ray",
    "rich",
    "sentencepiece",
    "transformers",
    "triton",
    "typer",
    "uvicorn",
}

# torch and the other three that exlm is built on come first: what they do is not ours to answer for.
OPEN_THE_DOOR = """
import json, os, sys, threading
import numpy, safetensors, tokenizers, torch
def state():
    tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    return {"threads": threading.active_count(), "tasks": tasks, "environment": dict(os.environ),
            "torch_threads": torch.get_num_threads(), "grad": torch.is_grad_enabled(),
            "dtype": str(torch.get_default_dtype())}
before, loaded = state(), set(sys.modules)
import exlm
light = sorted(set(sys.modules) - loaded)
exlm.Model
after = state()
with open(sys.argv[1], "w") as report:
    json.dump({"before": before, "after": after, "modules": sorted(set(sys.modules) - loaded), "light": light,
               "cuda": torch.cuda.is_initialized()}, report)
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What changed in a fresh process, without a GPU, that imported exlm."""
    report = tmp_path_factory.mktemp("door") / "report.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SRC)}
    ran = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:exlm", "-c", OPEN_THE_DOOR, str(report)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return {**json.loads(report.read_text()), "output": ran.stdout + ran.stderr}


def test_importing_changes_nothing(opened: dict[str, Any]) -> None:
    assert opened["after"] == opened["before"]


def test_importing_prints_nothing(opened: dict[str, Any]) -> None:
    assert opened["output"] == ""


def test_importing_waits_for_nothing_large(opened: dict[str, Any]) -> None:
    assert [name for name in opened["light"] if name.startswith("exlm.")] == ["exlm.version"]


def test_names_are_there_when_they_are_asked_for() -> None:
    from exlm import settings

    assert exlm.settings is settings
    assert set(exlm.__all__) <= set(dir(exlm))
    assert exlm.Model is exlm.door.Model  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="module 'exlm' has no attribute 'Nobody'"):
        exlm.Nobody  # type: ignore[attr-defined]  # noqa: B018


def test_importing_touches_no_gpu(opened: dict[str, Any]) -> None:
    assert opened["cuda"] is False


def test_importing_loads_no_optional_package(opened: dict[str, Any]) -> None:
    early = sorted({name.partition(".")[0] for name in opened["modules"]} & WAITING)
    assert early == [], "import these inside the function that needs them"


def public_names() -> list[str]:
    """What exlm/door.py binds for others, from its text: at run time submodules would be among them."""
    tree = ast.parse((SRC / "exlm" / "door.py").read_text(encoding="utf-8"))
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_") or name == "__version__"]


def test_all_is_every_public_name_in_order() -> None:
    # ruff's order: CONSTANTS, then Classes, then the rest, and numbers by their size
    def order(name: str) -> tuple[int, list[str]]:
        parts = [part.rjust(9) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, parts)

    assert exlm.__all__ == sorted(public_names(), key=order)


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_is_documented(name: str) -> None:
    assert name == "__version__" or getattr(exlm, name).__doc__


def test_the_door_offers_what_scripts_start_from() -> None:
    assert {"Cache", "Config", "Model", "Tokenizer", "ExlmError", "__version__"} <= set(exlm.__all__)


def test_the_type_hints_are_shipped() -> None:
    assert (SRC / "exlm" / "py.typed").is_file()
