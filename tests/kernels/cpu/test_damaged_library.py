"""Damaged kernel libraries: whatever lies in the cache, the next start writes the right text, fast.

The compiler of these starts is a script that copies a library that was compiled before, to save seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exlm import env
from exlm.errors import Unsupported
from exlm.kernels.cpu.bindings import load
from exlm.kernels.cpu.compile import prebuilt, sets_here
from tests import tiny
from tests.kernels.cpu.conftest import skip_without_compiler
from tests.kernels.cpu.model_starts import mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")

ROOT = Path(__file__).resolve().parents[3]
AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
ANOTHER = 12345  # a user's id
COMPILER = """#!/bin/sh
seconds=$(cat {delay})
echo $$ >> {log}
while [ "$1" != -o ]; do shift; done
sleep $seconds
cp {library} "$2"
"""


class Place:
    """A cache folder, one for temporary files, a compiler, and a process that starts programs with them."""

    def __init__(self, root: Path, good: Path, zygote: subprocess.Popen[str]) -> None:
        self.root, self.good, self.zygote = root, good, zygote
        self.kernels = root / "cache" / "kernels"
        self.temporary = root / "tmp"
        self.temporary.mkdir()
        self.temporary.chmod(0o1777)
        self.compilations = root / "compilations"
        self.compilations.touch()
        self.compilations.chmod(0o666)
        (root / "delay").write_text("0")
        (root / "bin").mkdir()
        compiler = root / "bin" / "cc"
        words = {"log": self.compilations, "delay": root / "delay", "library": good}
        compiler.write_text(COMPILER.format(**words))
        compiler.chmod(0o755)

    def ask(self, **more: Any) -> dict[str, Any]:
        """What a start of a program is told."""
        path = f"{self.root / 'bin'}:{os.defpath}"
        return {"cache": str(self.root / "cache"), "path": path, "temporary": str(self.temporary), **more}

    def starts(self, *asked: dict[str, Any]) -> list[dict[str, Any]]:
        """Start programs at the same time, and wait for them."""
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        print(json.dumps(list(asked)), file=self.zygote.stdin, flush=True)
        answers: list[dict[str, Any]] = json.loads(self.zygote.stdout.readline())
        return answers

    def start(self, **more: Any) -> dict[str, Any]:
        """Start one program."""
        return self.starts(self.ask(**more))[0]

    @property
    def library(self) -> Path:
        """The one library in the cache."""
        (found,) = self.kernels.glob("cpu-*.so")
        return found

    @property
    def compiled(self) -> int:
        """How often the compiler ran."""
        return len(self.compilations.read_text().split())


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder that every user can look into; pytest's own are private."""
    made = Path(tempfile.mkdtemp(prefix="exlm-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def good(root: Path) -> Path:
    """A library that was compiled by the machine's own compiler."""
    if prebuilt(sets_here()[0]).exists():
        pytest.skip("the libraries of an installed wheel come before the cache")
    try:
        made = load(env.cache_folder() / "kernels").path
    except Unsupported as reason:
        skip_without_compiler(str(reason))
    return Path(shutil.copyfile(made, root / "library"))


@pytest.fixture(scope="module")
def zygote(root: Path) -> Iterator[subprocess.Popen[str]]:
    """See `model_starts.py`."""
    for file in tiny.make_chat_folder(root / "model", hidden_size=64, intermediate_size=96).iterdir():
        file.chmod(0o644)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(Path(__file__).with_name("model_starts.py")), str(root / "model")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as made:
        yield made
        assert made.stdin is not None
        made.stdin.close()
        made.wait(timeout=60)


@pytest.fixture
def place(root: Path, good: Path, zygote: subprocess.Popen[str]) -> Place:
    """A place where nothing was compiled yet."""
    made = Path(tempfile.mkdtemp(dir=root))
    made.chmod(0o755)
    return Place(made, good, zygote)


@pytest.fixture(scope="module")
def text(root: Path, zygote: subprocess.Popen[str], good: Path) -> str:
    """What plain torch writes."""
    made = root / "plain"
    made.mkdir()
    answer = Place(made, good, zygote).start(cpu="0")
    assert answer["who"] == ["cpu:", "reference"]
    return str(answer["text"])


def rewrite(change: Callable[[bytearray], object]) -> Callable[[Place], None]:
    """Damage that changes the content of the library in place."""

    def apply(place: Place) -> None:
        data = bytearray(place.library.read_bytes())
        change(data)
        place.library.write_bytes(data)

    return apply


def cut(length: Callable[[int], int]) -> Callable[[Place], None]:
    """Damage that leaves the first bytes."""
    return lambda place: os.truncate(place.library, length(place.library.stat().st_size))


def flip(at: Callable[[int], int]) -> Callable[[Place], None]:
    """Damage that inverts eight bytes."""

    def change(data: bytearray) -> None:
        place = at(len(data))
        data[place : place + 8] = bytes(255 - byte for byte in data[place : place + 8])

    return rewrite(change)


def instead(make: Callable[[Path, Place], object]) -> Callable[[Place], None]:
    """Damage that has something else under the library's name."""

    def apply(place: Place) -> None:
        path = place.library
        path.rename(place.root / "moved.so")
        make(path, place)

    return apply


def another_machine(data: bytearray) -> None:
    """Write 64-bit ARM, or else x86-64, into the header of an ELF file."""
    data[18:20] = b"\x3e\x00" if data[18:20] == b"\xb7\x00" else b"\xb7\x00"


def zero_pages(data: bytearray) -> None:
    """As after a power cut: the length is right, most of the content is not."""
    data[4096:] = bytes(len(data) - 4096)


def another_library(path: Path, place: Place) -> None:
    """The C library's mathematics under our name."""
    shutil.copyfile(next(found for found in mapped() if "/libm.so" in found), path)


def filled_folder(path: Path, place: Place) -> None:
    """A folder, with something in it."""
    path.mkdir()
    (path / "file").touch()


def bind(path: Path, place: Place) -> None:
    """A socket; the name of one is too short for a long path."""
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def loop(path: Path, place: Place) -> None:
    """A link to itself."""
    path.symlink_to(path.name)


def huge(place: Place) -> None:
    """A file that is longer than the memory, with nothing in it."""
    os.truncate(place.library, 1 << 42)


def unnamed(place: Place) -> None:
    """The library under a name without a checksum, as earlier versions wrote it."""
    place.library.rename(place.library.with_name(place.library.stem[:-33] + ".so"))


def misnamed(place: Place) -> None:
    """The library under a name with another checksum."""
    place.library.rename(place.library.with_name(place.library.stem[:-32] + "0" * 32 + ".so"))


DAMAGES: dict[str, Callable[[Place], object]] = {
    "empty": cut(lambda size: 0),
    "one byte": cut(lambda size: 1),
    "half of the header": cut(lambda size: 32),
    "one page": cut(lambda size: 4096),
    "half": cut(lambda size: size // 2),
    "nine tenths": cut(lambda size: size * 9 // 10),
    "all but one byte": cut(lambda size: size - 1),
    "zeros": rewrite(lambda data: data.__setitem__(slice(None), bytes(len(data)))),
    "zeros behind the first page": rewrite(zero_pages),
    "header": flip(lambda size: 0),
    "program headers": flip(lambda size: 72),
    "code": flip(lambda size: size // 2),
    "end": flip(lambda size: size - 8),
    "longer": rewrite(lambda data: data.extend(b"\0" * 100)),
    "another machine's": rewrite(another_machine),
    "another library": instead(another_library),
    "a huge file": huge,
    "no checksum": unnamed,
    "another checksum": misnamed,
    "an empty folder": instead(lambda path, place: path.mkdir()),
    "a folder": instead(filled_folder),
    "a link elsewhere": instead(lambda path, place: path.symlink_to(place.root / "moved.so")),
    "a dangling link": instead(lambda path, place: path.symlink_to("nothing")),
    "a loop": instead(loop),
    "a FIFO": instead(lambda path, place: os.mkfifo(path)),
    "a socket": instead(bind),
    "others may write": lambda place: place.library.chmod(0o666),
    "others may do all": lambda place: place.library.chmod(0o777),
    "the group may write": lambda place: place.library.chmod(0o664),
    "no longer there": lambda place: place.library.unlink(),
}


def check(answer: dict[str, Any], text: str) -> None:
    """The right text, with fast kernels."""
    assert answer.get("text") == text, answer
    assert "cpu" in answer["who"], answer
    assert not any("makes everything slower" in line for line in answer["said"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(place: Place, text: str, damage: str) -> None:
    check(place.start(), text)
    assert place.compiled == 1
    name = place.library.name
    DAMAGES[damage](place)
    answer = place.start()
    check(answer, text)
    assert place.compiled == 2
    if damage not in ("no checksum", "no longer there"):
        path = place.kernels / (name if damage != "another checksum" else f"{name[:-35]}{'0' * 32}.so")
        assert sum(f"{path} is not used, because " in line for line in answer["said"]) == 1
    again = place.start()
    check(again, text)
    assert place.compiled == 2  # kept, wherever that is
    if damage != "a folder":  # which is not ours to empty
        assert [line for line in again["said"] if "is not used" in line] == []
        assert (place.kernels / name).read_bytes() == place.good.read_bytes()
        assert (place.kernels / name).stat().st_mode & 0o7777 == 0o644
        if damage != "no checksum":
            assert [path.name for path in place.kernels.iterdir()] == [name]
    else:
        assert place.temporary in Path(again["used"][0]).parents


@pytest.mark.skipif(not AS_ROOT, reason="only root gives files away")
def test_a_library_of_another_user_is_compiled_again(place: Place, text: str) -> None:
    check(place.start(), text)
    os.chown(place.library, ANOTHER, ANOTHER)
    answer = place.start()
    check(answer, text)
    told = f"{place.library} is not used, because it belongs to another user (owner {ANOTHER}, mode 0644)"
    assert any(told in line for line in answer["said"])
    assert place.library.stat().st_uid == 0
    assert place.compiled == 2
    check(place.start(), text)
    assert place.compiled == 2


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777, "owner"])
def test_a_folder_that_others_can_change_is_not_used(place: Place, text: str, mode: int | str) -> None:
    check(place.start(), text)
    before = place.library.stat()
    if isinstance(mode, int):
        place.kernels.chmod(mode)
        reason = f"others may write to it (owner {os.geteuid()}, mode {mode:04o})"
    elif AS_ROOT:
        os.chown(place.kernels, ANOTHER, ANOTHER)
        reason = f"it belongs to another user (owner {ANOTHER}, mode 0755)"
    else:
        pytest.skip("only root gives folders away")
    for _ in range(2):
        answer = place.start()
        check(answer, text)
        (told,) = (line for line in answer["said"] if "is not used" in line)
        assert told.startswith(f"{place.kernels} is not used, because {reason}")
        assert f"`chmod go-w {place.kernels}`" in told
        assert "EXLM_CACHE" in told
        assert place.temporary in Path(answer["used"][0]).parents
    assert place.compiled == 2
    assert (place.library.stat().st_ino, place.library.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )
    (private,) = place.temporary.iterdir()
    assert private.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("taken", ["file", "folder", "link"])
def test_the_private_folder_may_be_taken_by_another_user(place: Place, text: str, taken: str) -> None:
    """It has a name that can be guessed, among files that everyone may write."""
    private = place.temporary / f"exlm-kernels-{os.geteuid()}"
    victim = place.root / "victim"
    victim.mkdir()
    place.kernels.mkdir(parents=True)
    place.kernels.chmod(0o777)
    if taken == "file":
        private.touch()
    elif taken == "link":
        private.symlink_to(victim)
    else:
        private.mkdir()
        private.chmod(0o777)
    for _ in range(2):
        answer = place.start()
        check(answer, text)
    assert place.compiled == 2  # nothing could be kept
    assert [*victim.iterdir(), *place.kernels.iterdir()] == []
    assert [path.name for path in place.temporary.iterdir()] == [private.name]
    assert taken == "file" or [*private.iterdir()] == []


@pytest.mark.parametrize("damaged", [True, False])
def test_a_folder_that_can_only_be_read(place: Place, text: str, damaged: bool) -> None:
    check(place.start(), text)
    if damaged:
        os.truncate(place.library, 5000)
    for path in (place.kernels, place.kernels.parent):
        path.chmod(0o555)
    try:
        for _ in range(2):  # root's own may be used by others
            answer = place.start(unprivileged=AS_ROOT)
            check(answer, text)
            assert (place.temporary in Path(answer["used"][0]).parents) == damaged
        assert place.compiled == 1 + damaged
    finally:
        place.kernels.chmod(0o755)
        place.kernels.parent.chmod(0o755)


@pytest.mark.parametrize("there", ["file", "loop", "dangling link"])
def test_a_folder_that_cannot_be_made(place: Place, text: str, there: str) -> None:
    place.kernels.parent.mkdir()
    if there == "file":
        place.kernels.touch()
    else:
        place.kernels.symlink_to(place.kernels.name if there == "loop" else "nothing")
    for _ in range(2):
        check(place.start(), text)
    assert place.compiled == 1


def test_a_full_disk(place: Place, text: str) -> None:
    """A file system of 64 KB, which the library does not fit on."""
    place.kernels.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "tmpfs", str(place.kernels)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        answer = place.start()
        check(answer, text)
        assert any("No space left" in line and "EXLM_CACHE" in line for line in answer["said"])
        assert [*place.kernels.iterdir()] == []
        check(place.start(), text)
        assert place.compiled == 1
    finally:
        subprocess.run(["umount", str(place.kernels)], check=True)


def test_a_folder_from_which_nothing_can_be_run(place: Place, text: str) -> None:
    place.kernels.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "noexec,mode=755", "tmpfs", str(place.kernels)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        for _ in range(2):
            answer = place.start()
            check(answer, text)
            assert any("cannot be loaded" in line for line in answer["said"])
        assert place.compiled == 1
    finally:
        subprocess.run(["umount", str(place.kernels)], check=True)


def test_programs_that_start_at_once_all_have_a_library(place: Place, text: str) -> None:
    (place.root / "delay").write_text("0.3")
    for round_ in range(3):
        for answer in place.starts(*[place.ask()] * 4):
            check(answer, text)
            assert answer["used"] == [str(place.library)]
        assert [*place.kernels.iterdir()] == [place.library]
        assert place.library.read_bytes() == place.good.read_bytes()
        assert place.compiled == 4 * (round_ + 1)
        os.truncate(place.library, 5000 * round_)


def test_what_killed_compilations_left_is_removed(place: Place, text: str) -> None:
    place.kernels.mkdir(parents=True)
    old, new = time.time() - 7200, time.time()
    for when, mark in ((old, "o"), (new, "n"), (time.time() + 7200, "f")):
        for name in (f"tmp{mark}bcdefgh.so", f"tmp{mark}bcdefgh", f".exlm-partial-{mark}"):
            (place.kernels / name).write_bytes(b"\x7fELF")
            os.utime(place.kernels / name, (when, when))
        left = place.temporary / f".exlm-partial-{mark}"
        left.mkdir()
        (left / "library.so").touch()
        os.utime(left, (when, when))
    (place.kernels / "tmpfolder").mkdir()
    (place.kernels / "notes.txt").touch()
    for name in ("tmpfolder", "notes.txt"):
        os.utime(place.kernels / name, (old, old))
    check(place.start(), text)
    kept = {path.name for path in place.kernels.iterdir()} - {place.library.name}
    assert kept == {"tmpnbcdefgh.so", "tmpnbcdefgh", ".exlm-partial-n", "tmpfolder", "notes.txt"}
    assert [path.name for path in place.temporary.iterdir()] == [".exlm-partial-n"]


def test_a_killed_compilation_leaves_nothing_for_long(place: Place, text: str) -> None:
    (place.root / "delay").write_text("30")
    environment = {**os.environ, "EXLM_CACHE": str(place.kernels.parent), "TMPDIR": str(place.temporary)}
    environment |= {"PATH": f"{place.root / 'bin'}:{os.defpath}", "PYTHONPATH": str(ROOT / "src")}
    program = "from pathlib import Path; from exlm.kernels.cpu.bindings import load; load(Path({!r}))"
    command = [sys.executable, "-c", program.format(str(place.kernels))]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + 60
        while not place.compiled and time.monotonic() < deadline:
            time.sleep(0.05)
        assert place.compiled == 1
        (left,) = place.temporary.iterdir()
        (place.root / "delay").write_text("0")
        os.utime(left, (time.time() - 60,) * 2)
        check(place.start(), text)  # which needs nothing of the other
        assert left.exists()  # the other one lives
        running.kill()
    os.kill(int(place.compilations.read_text().split()[0]), signal.SIGKILL)
    place.library.unlink()
    check(place.start(), text)
    assert [*place.temporary.iterdir()] == []
    assert [*place.kernels.iterdir()] == [place.library]
