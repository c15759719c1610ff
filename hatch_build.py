"""Adds what wheels have and the sources do not: compiled C kernels, and a file for each module of exllamav2.

A wheel with libraries is tied to its platform and to no Python. Without a compiler, and for editable
installs, the wheel is a plain one and the kernels are built at first use, if at all.
"""

import importlib.util
import platform
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src/exlm/kernels")
ALIAS_MODULES = Path("src/exlm/legacy/alias_modules.py")
ALIASES = Path("src/exllamav2/_aliases.py")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatch for each target."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build every set this kind of processor may have, and add the libraries."""
        if self.target_name != "wheel" or version == "editable":
            return
        self._clear()
        self._alias_folder = tempfile.TemporaryDirectory(prefix="exllamav2-")
        build_data["force_include"] |= self._write_alias_files(Path(self._alias_folder.name))
        compile_ = _module(Path(self.root) / KERNELS / "cpu" / "compile.py")
        file_name = _module(Path(self.root) / KERNELS / "artifact_cache.py").file_name
        try:
            for name in compile_.sets_for_machine(platform.machine()):
                built = compile_.SOURCES / f"exlm-cpu-{name}.so"
                compile_.compile_library(name, built)
                made = built.replace(built.with_name(file_name(built.name, built.read_bytes())))
                inside = made.relative_to(Path(self.root) / "src").as_posix()
                build_data["force_include"][str(made)] = inside
        except compile_.BuildError as reason:
            self.app.display_warning(f"exlm: no kernels for processors in this wheel: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave the sources as they were."""
        self._clear()
        if hasattr(self, "_alias_folder"):
            self._alias_folder.cleanup()

    def _write_alias_files(self, folder: Path) -> dict[str, str]:
        """Write the modules of exllamav2 as files; returns where each belongs in the wheel."""
        tables = _module(Path(self.root) / ALIASES)
        make_table = _module(Path(self.root) / ALIAS_MODULES).AliasTable
        table = make_table("exllamav2", tables.OBJECTS, tables.MODULES, tables.REFUSED)
        places = {}
        for path in table.paths():
            file = folder / table.file(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(table.source(path), encoding="utf-8")
            places[str(file)] = f"exllamav2/{table.file(path)}"
        return places

    def _clear(self) -> None:
        for made in (Path(self.root) / KERNELS / "cpu" / "csrc").glob("*.so"):
            made.unlink()


def _module(file: Path) -> Any:
    """A module of the package by itself: the package needs torch."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
