"""scripts/bootstrap.py with made-up environments; nothing is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script in an empty project, run by an interpreter without packages."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in ("ROOT", "PROJECT", "CONSTRAINTS", "VENV", "PYTHON", "PINS", "STATE", "UNFINISHED"):
        inside = getattr(script, name).relative_to(SCRIPT.parents[1])
        monkeypatch.setattr(script, name, tmp_path / "project" / inside)
    script.ROOT.mkdir()
    script.PROJECT.write_text('requires-python = ">=3.11"\ndependencies = ["torch>=2.6"]\n')
    script.CONSTRAINTS.write_text("# pins\ntorch==2.13.0\ntriton==3.7.1\nNumPy==2.3.5\nSymPy==1.14.0\n")
    monkeypatch.setattr(script, "package_folders", list)
    return script


def make_packages(folder: Path, torch: str) -> str:
    """A site-packages folder with a torch in it."""
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\nRequires-Dist: sympy>=1.13.3\n"
    (folder / f"torch-{torch}.dist-info").mkdir(parents=True)
    (folder / f"torch-{torch}.dist-info" / "METADATA").write_text(metadata)
    return str(folder)


def make_venv(bootstrap: ModuleType, linked: list[str], level: str = "runtime") -> None:
    """Make a .venv as a successful run leaves it."""
    (bootstrap.VENV / "lib" / "python3.11" / "site-packages" / "exlm-0.1.0.dist-info").mkdir(parents=True)
    bootstrap.PYTHON.parent.mkdir()
    bootstrap.PYTHON.touch()
    bootstrap.write_state(linked, list(sys.version_info[:2]))
    bootstrap.stamp(level).write_text(bootstrap.digest())


def test_an_old_python_is_refused_with_the_required_version(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = SimpleNamespace(version_info=(3, 10, 13), version="3.10.13 (main)", executable="/usr/bin/python3")
    monkeypatch.setattr(bootstrap, "sys", old)
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer, and /usr/bin/python3 is Python 3\.10\.13"):
        bootstrap.check_python()


@pytest.mark.parametrize(
    ("found", "used"),
    [("2.5.1", False), ("2.6.0", True), ("2.6.0+cpu", True), ("2.11.0+cu130", True), ("3.0.0a1", True)],
)
def test_only_a_new_enough_torch_is_used(bootstrap: ModuleType, tmp_path: Path, found: str, used: bool) -> None:
    torch = bootstrap.torch_in([make_packages(tmp_path / "site-packages", found)])
    assert torch == ((found, {"sympy"}) if used else None)


def test_constraints_leave_out_a_kept_torch(bootstrap: ModuleType, tmp_path: Path) -> None:
    make_venv(bootstrap, linked=[make_packages(tmp_path / "site-packages", "2.11.0")])
    bootstrap.write_pins()
    assert bootstrap.PINS.read_text() == "# pins\nNumPy==2.3.5\n"


def test_all_constraints_apply_without_a_torch(bootstrap: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    make_venv(bootstrap, linked=[])
    bootstrap.write_pins()
    assert bootstrap.PINS.read_text() == bootstrap.CONSTRAINTS.read_text()
    assert "torch 2.13.0, from constraints.txt" in capsys.readouterr().out


def test_a_complete_venv_is_kept(bootstrap: ModuleType) -> None:
    make_venv(bootstrap, linked=[])
    assert bootstrap.fault() == ""
    assert bootstrap.ready("runtime")
    assert not bootstrap.ready("dev")


def test_dev_includes_runtime(bootstrap: ModuleType) -> None:
    make_venv(bootstrap, linked=[], level="dev")
    assert bootstrap.ready("runtime")
    assert bootstrap.ready("dev")


@pytest.mark.parametrize("name", ["PROJECT", "CONSTRAINTS"])
def test_a_changed_file_requires_a_new_installation(bootstrap: ModuleType, name: str) -> None:
    make_venv(bootstrap, linked=[])
    with getattr(bootstrap, name).open("a") as file:
        file.write("# changed\n")
    assert bootstrap.fault() == ""
    assert not bootstrap.ready("runtime")


def test_reasons_to_recreate_the_venv(bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bootstrap.fault() == "there is none"
    make_venv(bootstrap, linked=[str(tmp_path)])
    bootstrap.UNFINISHED.touch()
    assert bootstrap.fault() == "it is not whole"
    bootstrap.UNFINISHED.unlink()
    assert bootstrap.fault() == ""
    bootstrap.write_state([], [3, 8])
    assert bootstrap.fault() == "it was made with another Python"
    bootstrap.write_state([str(tmp_path / "gone")], None)
    assert bootstrap.fault() == "the environment whose torch it used is gone"
    bootstrap.write_state([], None)
    (bootstrap.VENV / "lib/python3.11/site-packages/exlm-0.1.0.dist-info").rmdir()
    assert bootstrap.fault() == "its packages are gone"
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path / "elsewhere")
    assert bootstrap.fault() == "it was made for another folder"


def test_a_new_environment_with_a_torch_is_used(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_venv(bootstrap, linked=[])
    active = [make_packages(tmp_path / "site-packages", "2.12.0")]
    monkeypatch.setattr(bootstrap, "package_folders", lambda: active)
    assert bootstrap.fault().endswith("has a torch to use")
    bootstrap.write_state(active, None)
    assert bootstrap.fault() == ""
