"""The rules of rules.py, applied to every file under src/."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract import rules
from tests.contract.rules import Source

SRC = Path(__file__).resolve().parents[2] / "src"


def read(package: str) -> list[Source]:
    """Every Python file of a package."""
    return [Source.read(file, SRC) for file in sorted((SRC / package).rglob("*.py"))]


EXLM = read("exlm")
COMPATIBILITY = read("exllamav2")


def violations(rule: Callable[[Source], list[str]], sources: list[Source]) -> str:
    return "\n".join(line for source in sources for line in rule(source))


def test_there_are_files_to_check() -> None:
    assert len(EXLM) > 10
    assert [source.module for source in COMPATIBILITY] == ["exllamav2", "exllamav2._aliases"]


@pytest.mark.parametrize("rule", rules.PER_FILE, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Callable[[Source], list[str]]) -> None:
    found = violations(rule, EXLM)
    assert not found, f"{rule.__doc__}\n{found}"


def test_there_are_no_import_cycles() -> None:
    assert rules.import_cycles([*EXLM, *COMPATIBILITY]) == []


@pytest.mark.parametrize(
    "rule",
    [rules.only_reexports, rules.imports_point_down, rules.has_a_module_docstring],
    ids=lambda rule: rule.__name__,
)
def test_the_compatibility_package_keeps_the_rule(rule: Callable[[Source], list[str]]) -> None:
    found = violations(rule, COMPATIBILITY)
    assert not found, f"{rule.__doc__}\n{found}"


def test_a_source_distribution_holds_what_the_tests_read() -> None:
    settings = tomllib.loads((SRC.parent / "pyproject.toml").read_text(encoding="utf-8"))
    included = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    needed = ("src", "tests", "benchmarks", "deploy", "docs", "examples", "scripts")
    assert [name for name in needed if f"/{name}" not in included or not (SRC.parent / name).is_dir()] == []
