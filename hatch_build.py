"""Puts the C kernels for processors into wheels, where there is a compiler to build them.

A wheel with libraries is tied to its platform and to no Python. Without a compiler, and for editable
installs, the wheel is a plain one and the kernels are built at first use, if at all.
"""

import importlib.util
import platform
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src/exlm/kernels")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatch for each target."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build every set this kind of processor may have, and add the libraries."""
        if self.target_name != "wheel" or version == "editable":
            return
        self._clear()
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
