"""Modules whose public names are imported when they are first used (PEP 562).

Importing torch takes seconds. A program that only needs an exception class or a help text does not
wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_exports(
    package: str, namespace: dict[str, Any], exports: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that re-exports names of its submodules on first use.

    `exports` maps a submodule to the names that the package takes from it. Submodules themselves are
    attributes too. `namespace` is the package's globals(): a name is looked up once and then kept there.
    """
    source = {name: module for module, names in exports.items() for name in names}

    def getattr_(name: str) -> Any:
        if name in source:
            value = getattr(import_module(f".{source[name]}", package), name)
        elif not name.startswith("__") and find_spec(f"{package}.{name}") is not None:
            value = import_module(f".{name}", package)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = value
        return value

    def dir_() -> list[str]:
        return sorted({*namespace, *source})

    return getattr_, dir_
