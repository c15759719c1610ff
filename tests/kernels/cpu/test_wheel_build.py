"""What the build of a wheel puts into it: libraries whose names end with the checksum of their content.

The compiler is a script, and hatchling's base class is replaced: neither has a part in it.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from exlm.kernels.artifact_cache import damage, file_name
from exlm.kernels.cpu.compile import sets_for_machine

ROOT = Path(__file__).resolve().parents[3]
COMPILER = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho code > "$2"\n'
BASE = "hatchling.builders.hooks.plugin.interface"


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook, in a copy of what it works with."""
    root = tmp_path / "root"
    kernels = Path("src") / "exlm" / "kernels"
    shutil.copytree(ROOT / kernels / "cpu", root / kernels / "cpu")
    aliases = Path("src/exllamav2/_aliases.py"), Path("src/exlm/legacy/alias_modules.py")
    for file in (kernels / "artifact_cache.py", *aliases, Path("hatch_build.py")):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, root / file)
    (tmp_path / "cc").write_text(COMPILER)
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    base = ModuleType(BASE)
    base.BuildHookInterface = type("BuildHookInterface", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, BASE, base)
    spec = importlib.util.spec_from_file_location("hatch_build", root / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.CustomBuildHook()
    made.root, made.target_name = str(root), "wheel"
    made.app = SimpleNamespace(display_warning=pytest.fail)
    return made


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler is a shell script")
def test_libraries_carry_their_checksums(hook: Any) -> None:
    native = Path(hook.root) / "src" / "exlm" / "kernels" / "cpu" / "csrc"
    (native / "exlm-cpu-plain-of-a-build-that-was-killed.so").touch()
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    names = {file_name(f"exlm-cpu-{name}.so", b"code\n") for name in sets_for_machine(platform.machine())}
    libraries = {made: inside for made, inside in data["force_include"].items() if made.endswith(".so")}
    assert {Path(inside).name for inside in libraries.values()} == names
    assert {path.name for path in native.glob("*.so")} == names
    assert "exllamav2/generator/dynamic.py" in data["force_include"].values()
    for made, inside in libraries.items():
        assert damage(Path(made)) is None
        assert inside == f"exlm/kernels/cpu/csrc/{Path(made).name}"
    assert not data["pure_python"]
    hook.finalize("standard", data, "")
    assert [*native.glob("*.so")] == []
