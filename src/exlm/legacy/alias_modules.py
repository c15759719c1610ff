"""An import hook for alias modules, which hold objects of other modules under other names, as a table lists them.

`install` makes the modules importable; each runs the source text that `AliasTable.source` writes.
hatch_build.py writes the same texts as files into wheels, because type checkers, bundlers and editors look
for files; it loads this module by itself, so that it imports only the standard library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import InspectLoader, PathEntryFinder
from importlib.machinery import ModuleSpec
from pathlib import PurePosixPath
from types import ModuleType
from typing import NamedTuple


class AliasTable(NamedTuple):
    """The alias modules of one package; module paths are relative to it."""

    package: str
    objects: dict[str, str]
    """module of another package → its objects, separated by commas: `name` or `name as alias`"""
    modules: dict[str, str]
    """module path → the aliases in it, separated by spaces; one that is not an object is a submodule"""
    refused: dict[str, str]
    """module path → the message of the ImportError that importing it raises"""

    def paths(self) -> list[str]:
        """Every module path."""
        return [*self.modules, *self.refused]

    def is_package(self, path: str) -> bool:
        """Whether a module has submodules."""
        return any(other.startswith(f"{path}.") for other in self.paths())

    def file(self, path: str) -> PurePosixPath:
        """Where a module's file is in the package's folder, if it has one."""
        parts = [*path.split("."), "__init__"] if self.is_package(path) else path.split(".")
        return PurePosixPath(*parts).with_suffix(".py")

    def source(self, path: str) -> str:
        """The source text of a module."""
        if path in self.refused:
            return f'"""Importing this module used to run it."""\n\nraise ImportError({self.refused[path]!r})\n'
        imports = {}
        for home, objects in self.objects.items():
            for item in objects.split(","):
                imports[item.split()[-1]] = f"from {home} import {item.strip()}"
        names = sorted(self.modules[path].split())
        lines = [imports.get(name, f"from . import {name}") for name in names]
        docstring = f'"""For `from {self.package}.{path} import …`."""'
        return "\n".join([docstring, "", *lines, "", f"__all__: list[str] = {names!r}", ""])


class _Finder(PathEntryFinder, InspectLoader):
    """Finds and loads the modules of one (sub)package, whose `__path__` has an entry for it."""

    def __init__(self, table: AliasTable, prefix: str) -> None:
        self._table, self._prefix = table, prefix  # "" or "generator."

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        path = self._path(fullname)
        if path not in self._table.paths():
            return None
        package = self._table.is_package(path)
        spec = ModuleSpec(fullname, self, origin=f"table of {self._table.package}", is_package=package)
        if package:
            spec.submodule_search_locations = [_entry(self._table, f"{path}.")]
        return spec

    def get_source(self, fullname: str) -> str:
        return self._table.source(self._path(fullname))

    def is_package(self, fullname: str) -> bool:
        return self._table.is_package(self._path(fullname))

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """For `pkgutil`: the modules of this package, their names after `prefix`."""
        for path in sorted(self._table.paths()):
            name = path.removeprefix(self._prefix)
            if path.startswith(self._prefix) and "." not in name:
                yield prefix + name, self._table.is_package(path)

    def _path(self, fullname: str) -> str:
        return fullname.removeprefix(f"{self._table.package}.")


def install(table: AliasTable, search_path: list[str]) -> Callable[[str], ModuleType]:
    """Make a table's modules importable; `search_path` is the `__path__` of the package they belong to.

    Returns the package's `__getattr__`, which imports a module when it is first asked for.
    """

    def hook(entry: str) -> _Finder:
        for prefix in ("", *(f"{path}." for path in table.paths())):
            if entry == _entry(table, prefix):
                return _Finder(table, prefix)
        raise ImportError(f"{entry} is no package of {table.package}.")

    sys.path_hooks.append(hook)
    search_path.append(_entry(table, ""))

    def submodule(name: str) -> ModuleType:
        if name not in table.modules:
            raise AttributeError(f"module {table.package!r} has no attribute {name!r}")
        return importlib.import_module(f"{table.package}.{name}")

    return submodule


def _entry(table: AliasTable, prefix: str) -> str:
    """The entry of `__path__` for the modules whose paths start with `prefix`."""
    return f"<aliases of {table.package}.{prefix}>"
