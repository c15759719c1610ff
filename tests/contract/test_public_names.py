"""What `import exlm` offers, and that importing it does nothing else."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

import exlm
from tests.contract.test_source_rules import SRC

# Installed with exlm or beside it, but imported only by the function that needs it.
IMPORTED_LATE = {
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
IMPORT_EXLM = """
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
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What changed in a fresh process, without a GPU, that imported exlm."""
    report = tmp_path_factory.mktemp("import") / "report.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SRC)}
    ran = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:exlm", "-c", IMPORT_EXLM, str(report)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return {**json.loads(report.read_text()), "output": ran.stdout + ran.stderr}


def test_importing_changes_nothing(imported: dict[str, Any]) -> None:
    assert imported["after"] == imported["before"]


def test_importing_prints_nothing(imported: dict[str, Any]) -> None:
    assert imported["output"] == ""


def test_importing_exlm_imports_no_large_module(imported: dict[str, Any]) -> None:
    assert [name for name in imported["light"] if name.startswith("exlm.")] == ["exlm.lazy", "exlm.version"]


def test_names_are_imported_on_first_use() -> None:
    from exlm import env

    assert exlm.env is env
    assert set(exlm.__all__) <= set(dir(exlm))
    assert exlm.Model is exlm.model.Model
    with pytest.raises(AttributeError, match="module 'exlm' has no attribute 'Missing'"):
        exlm.Missing  # type: ignore[attr-defined]  # noqa: B018


def test_importing_touches_no_gpu(imported: dict[str, Any]) -> None:
    assert imported["cuda"] is False


def test_importing_loads_no_optional_package(imported: dict[str, Any]) -> None:
    early = sorted({name.partition(".")[0] for name in imported["modules"]} & IMPORTED_LATE)
    assert early == [], "import these inside the function that needs them"


def typed_names() -> dict[str, list[str]]:
    """What a type checker sees: the imports below `if TYPE_CHECKING` in exlm/__init__.py, by submodule."""
    tree = ast.parse((SRC / "exlm" / "__init__.py").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for block in tree.body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name):
            for node in block.body:
                assert isinstance(node, ast.ImportFrom)
                found[str(node.module)] = [alias.name for alias in node.names]
    return found


def public_names() -> list[str]:
    return ["__version__", *(name for names in typed_names().values() for name in names)]


def test_the_names_at_run_time_are_those_a_type_checker_sees() -> None:
    assert {module: list(names) for module, names in exlm._EXPORTS.items()} == typed_names()


def test_all_is_every_public_name_in_order() -> None:
    # ruff's order: CONSTANTS, then Classes, then the rest, and numbers by their size
    def order(name: str) -> tuple[int, list[str]]:
        parts = [part.rjust(9) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, parts)

    assert exlm.__all__ == sorted(public_names(), key=order)


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_is_documented(name: str) -> None:
    assert name == "__version__" or getattr(exlm, name).__doc__


@pytest.mark.parametrize("name", [name for name in public_names() if inspect.isclass(getattr(exlm, name))])
def test_public_methods_are_documented(name: str) -> None:
    """Only those that exlm defines; inherited ones are documented by torch or Python."""
    members = vars(getattr(exlm, name)).items()
    methods = {
        key: one
        for key, one in members
        if not key.startswith("_")
        and (inspect.isroutine(one) or isinstance(one, property | classmethod | staticmethod))
    }
    assert [key for key, one in methods.items() if not inspect.getdoc(one)] == []


def test_exlm_offers_what_scripts_start_from() -> None:
    assert {"Cache", "Config", "Model", "Tokenizer", "ExlmError", "__version__"} <= set(exlm.__all__)


def test_the_type_hints_are_shipped() -> None:
    assert (SRC / "exlm" / "py.typed").is_file()
