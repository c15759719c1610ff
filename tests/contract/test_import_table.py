"""The table of who may import whom: complete, one way, and the one that ARCHITECTURE.md prints."""

from __future__ import annotations

import re

from tests.contract.rules import BASE, IMPORT_TABLE, MAY_IMPORT
from tests.contract.test_source_rules import SRC

ARCHITECTURE = SRC.parent / "ARCHITECTURE.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \|$", re.M)


def test_every_row_is_a_package_or_module() -> None:
    modules = {path.name.removesuffix(".py") for path in (SRC / "exlm").iterdir()} | {"exlm", "exllamav2"}
    assert sorted(set(IMPORT_TABLE) - modules) == []


def test_a_row_names_only_packages_of_earlier_rows() -> None:
    earlier: set[str] = set()
    for package, granted in MAY_IMPORT.items():
        assert granted <= earlier, f"{package} may not import {sorted(granted - earlier)}: they stand below it"
        earlier.add(package)


def test_the_base_imports_only_the_base() -> None:
    assert all(MAY_IMPORT[package] <= set(BASE) for package in BASE)


def test_architecture_prints_the_table() -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").split("# Who may import whom", 1)[1].split("\n# ", 1)[0]
    printed = {package: row.replace("nothing", "").replace("`", "") for package, row in ROW.findall(section)}
    assert printed == {package: ", ".join(row.split()) for package, row in IMPORT_TABLE.items()}
    assert ", ".join(f"`{name}`" for name in BASE) in section
