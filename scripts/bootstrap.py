"""Prepares .venv for make: `python3 scripts/bootstrap.py runtime|dev`. Standard library only.

A torch that the active environment already holds, new enough for pyproject.toml, is used where it is: .venv
gets a .pth file that appends that environment's packages, and the constraints leave torch and what it
requires alone. Everywhere else torch is the release that constraints.txt names. Every pip call runs under
those constraints, builds included. Work that was interrupted is thrown away and done again.

The syntax stays old (quoted annotations, no := or match), so that an old Python can say that it is too old.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "constraints.txt"
LEVELS = {"runtime": ".", "dev": ".[dev]"}  # each level includes the ones before it

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PINS = VENV / "exlm-constraints.txt"
STATE = (
    VENV / "exlm-state.json"
)  # the environment that was active when .venv was made, and the folders whose packages it uses
UNFINISHED = VENV / "exlm-unfinished"  # exists while .venv is being changed


def say(text: str) -> None:
    """Print progress."""
    print(f"exlm: {text}", flush=True)


def failure(text: str) -> SystemExit:
    """An error that ends the script with a message."""
    return SystemExit(f"exlm: {text}.")


def version(text: str) -> "tuple[int, ...]":
    """The numbers of a version: `2.13.0+cpu` is (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def stated(path: Path, pattern: str) -> str:
    """The version in a line of a project file."""
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise failure(f"{path.name} has no line like {pattern}")
    return found.group(1)


def check_python() -> None:
    """Refuse Python versions that exlm does not support."""
    oldest = stated(PROJECT, r'^requires-python = ">=([\d.]+)"')
    if sys.version_info[:2] < version(oldest):
        found = sys.version.split()[0]
        raise failure(
            f"exlm needs Python {oldest} or newer, and {sys.executable} is Python {found}. "
            f"Name a newer one, as in `make test PYTHON=python3.12`"
        )


def name_of(requirement: str) -> str:
    """The normalised package name that a requirement or a constraint starts with."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else ""


def package_folders() -> "list[str]":
    """The folders in which the active interpreter finds packages."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def torch_in(folders: "list[str]") -> "tuple[str, set[str]] | None":
    """(version of the installed torch, names of its requirements), if it is new enough."""
    import importlib.metadata

    for found in importlib.metadata.distributions(name="torch", path=folders):
        if version(found.version) >= version(stated(PROJECT, r'"torch>=([\d.]+)"')):
            return found.version, {name_of(requirement) for requirement in found.requires or []}
    return None


def importable() -> bool:
    """Whether the active interpreter can import torch; shows its error if not."""
    return subprocess.run([sys.executable, "-c", "import torch"], stdout=subprocess.DEVNULL).returncode == 0


def write_state(linked: "list[str]", python: "list[int] | None") -> None:
    """Record the active environment, and the folders whose torch .venv uses."""
    state = {"root": str(ROOT), "python": python, "active": package_folders(), "linked": linked}
    STATE.write_text(json.dumps(state))


def read_state() -> "dict[str, Any]":
    """Read what `.venv` was made for."""
    return dict(json.loads(STATE.read_text()))


def own_packages() -> Path:
    """The site-packages folder of .venv."""
    return next((VENV / "lib").glob("python3*/site-packages"))


def digest() -> str:
    """A digest of the files that an installation depends on."""
    parts = [path.read_bytes() for path in (PROJECT, CONSTRAINTS, Path(__file__))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def stamp(level: str) -> Path:
    """The file with the digest a level was installed from."""
    return VENV / f"exlm-ready-{level}"


def ready(level: str) -> bool:
    """Whether this level, or one that includes it, is installed from the current files."""
    levels = list(LEVELS)
    stamps = [stamp(name) for name in levels[levels.index(level) :]]
    return any(path.is_file() and path.read_text() == digest() for path in stamps)


def fault() -> str:
    """Why .venv must be recreated; empty if it can be kept."""
    if not VENV.exists():
        return "there is none"
    if UNFINISHED.exists() or not PYTHON.exists():
        return "it is not whole"
    if not STATE.is_file():
        return ""  # the user made this .venv: use it, never replace it
    state = read_state()
    if state["root"] != str(ROOT):
        return "it was made for another folder"
    if not all(Path(folder).is_dir() for folder in state["linked"]):
        return "the environment whose torch it used is gone"
    if any(stamp(level).exists() for level in LEVELS) and not list(VENV.glob("lib/*/*/exlm-*.dist-info")):
        return "its packages are gone"
    if Path(sys.prefix).resolve() == VENV:
        return ""
    if state["python"] not in (None, list(sys.version_info[:2])):
        return "it was made with another Python"
    if state["active"] != package_folders() and torch_in(package_folders()):
        return f"the active environment, {sys.prefix}, has a torch to use"
    return ""


def make_venv() -> None:
    """Create .venv, using the active environment's torch if that is new enough."""
    torch = torch_in(package_folders())
    if torch and not importable():
        say(f"torch {torch[0]} in {sys.prefix} does not import (see above) and is not used")
        torch = None
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    UNFINISHED.touch()
    say(f"Python {sys.version.split()[0]} from {sys.executable}")
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode != 0:
        raise failure("no virtual environment could be made; on Debian and Ubuntu try: apt install python3-venv")
    folders = package_folders() if torch else []
    if folders:  # .pth files are read last, so that packages in .venv take precedence
        (own_packages() / "zz-active-environment.pth").write_text("\n".join(folders) + "\n")
    write_state(folders, list(sys.version_info[:2]))


def adopt() -> None:
    """Use a .venv that the user made, keeping its torch if that is new enough."""
    say("using the .venv that is here")
    if subprocess.run([str(PYTHON), "-m", "ensurepip"], stdout=subprocess.DEVNULL).returncode != 0:
        raise failure("the .venv that is here has no pip; remove it (make clean) and try again")
    folders = [str(own_packages())]
    write_state(folders if torch_in(folders) else [], None)


def write_pins() -> None:
    """constraints.txt without the packages of a torch that is kept."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    linked = read_state()["linked"]
    torch = torch_in(linked) if linked else None
    if torch:
        say(f"torch {torch[0]}, as it is, from {', '.join(linked)}")
        lines = [line for line in lines if name_of(line) not in torch[1] | {"torch", "triton"}]
    else:
        say(f"torch {stated(CONSTRAINTS, '^torch==(.+)')}, from {CONSTRAINTS.name}")
    PINS.write_text("\n".join(lines) + "\n")


def install(level: str) -> None:
    """Install exlm in editable mode with the dependencies of a level."""
    for name in LEVELS:
        with contextlib.suppress(FileNotFoundError):
            stamp(name).unlink()
    UNFINISHED.touch()
    write_pins()
    # Unlike -c, PIP_CONSTRAINT also applies to isolated builds; newer pips use the second variable for those.
    environment = {**os.environ, "PIP_CONSTRAINT": str(PINS), "PIP_BUILD_CONSTRAINT": str(PINS)}
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    code = subprocess.run([*command, "--editable", LEVELS[level]], cwd=ROOT, env=environment).returncode
    if code >= 0:  # only a pip that was killed leaves half-installed packages
        UNFINISHED.unlink()
    if code != 0:
        raise failure("pip could not install what is needed; it says why above. To try again, repeat the command")
    stamp(level).write_text(digest())
    say(f".venv is ready ({level})")


def main() -> None:
    """Install a level into .venv, unless it is installed already."""
    if sys.argv[1:2] not in [[level] for level in LEVELS]:
        raise failure(f"usage: bootstrap.py {'|'.join(LEVELS)}")
    level = sys.argv[1]
    check_python()
    with open(PROJECT, encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second make waits here, then finds everything installed
        reason = fault()
        if reason:
            if Path(sys.prefix).resolve() == VENV:  # we are running in the .venv that is about to be replaced
                base = str(getattr(sys, "_base_executable", sys.executable))
                os.execv(base, [base, *sys.argv])
            say(f"making .venv ({level}), since {reason}; this takes a minute or two")
            make_venv()
        elif not STATE.is_file():
            adopt()
        if not ready(level):
            install(level)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise failure("interrupted; the next make starts over") from None
