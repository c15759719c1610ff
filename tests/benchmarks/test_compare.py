"""`benchmarks.compare`: processes alternate, values are paired, and what fails says where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.comparison.checkouts import Checkout, ChildFailed, CompareError, open_checkout
from benchmarks.comparison.probes import Probe, Readings, Row
from tests.conftest import ROOT

ROW = Row("speed", "tok/s", "higher", 0.05)
TIMEOUT = 60.0

LOGGING_SCRIPT = """
import json, os, pathlib, sys
log, out, name = sys.argv[1:]
with open(log, "a") as file:
    file.write(json.dumps([name, os.getcwd(), os.environ["PYTHONPATH"], os.getpid()]) + "\\n")
count = len(pathlib.Path(log).read_text().splitlines())
pathlib.Path(out).write_text(json.dumps(count))
"""
"""Appends its name, folder and process id to a log; measures how many processes there were so far."""


def tree(folder: Path, package: str = "") -> Path:
    """A source tree with a package exlm."""
    (folder / "src" / "exlm").mkdir(parents=True)
    (folder / "src" / "exlm" / "__init__.py").write_text(package)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Checkout, Checkout]:
    first, second = (Checkout(name, tree(tmp_path / name).resolve(), "") for name in ("base", "candidate"))
    return first, second


def logging_probe(log: Path, name: str) -> Probe:
    def read(file: Path) -> Readings:
        return {Row(name, "tok/s", "higher", 0.05): float(json.loads(file.read_text()))}

    return Probe("fake", name, lambda _, out: [sys.executable, "-c", LOGGING_SCRIPT, str(log), str(out), name], read)


def script_probe(source: str) -> Probe:
    """A probe whose processes run this; OUT is the file to write."""

    def command(checkout: Checkout, out: Path) -> list[str]:
        return [sys.executable, "-c", f"OUT = {str(out)!r}\n{source}"]

    return Probe("fake", "fake", command, lambda file: {ROW: float(file.read_text())})


def has_ended(process: int) -> bool:
    """Whether a process ends within some time; what is left of it is a zombie at most."""
    status = Path(f"/proc/{process}/stat")
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_fresh_processes_alternate_and_the_first_round_is_not_counted(
    pair: tuple[Checkout, Checkout], tmp_path: Path
) -> None:
    log, progress, rounds = tmp_path / "log", [], []
    base = pair[0]
    samples = compare.measure(
        pair,
        [logging_probe(log, "a"), logging_probe(log, "b")],
        3,
        TIMEOUT,
        progress.append,
        lambda samples: rounds.append({row.name: (*map(tuple, values),) for row, values in samples.items()}),
    )
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert len({process for *_, process in logged}) == len(logged) == 16
    assert [(name, cwd == str(base.folder)) for name, cwd, *_ in logged] == [
        *(("a", False), ("a", True), ("b", False), ("b", True)),  # the warm-up
        *(("a", True), ("a", False), ("b", True), ("b", False)),
        *(("a", False), ("a", True), ("b", False), ("b", True)),
        *(("a", True), ("a", False), ("b", True), ("b", False)),
    ]
    assert all(path == f"{cwd}/src" for _, cwd, path, _ in logged)
    by_name = {row.name: values for row, values in samples.items()}
    assert by_name == {"a": ([5, 10, 13], [6, 9, 14]), "b": ([7, 12, 15], [8, 11, 16])}
    assert progress[:2] == ["warm-up: candidate, a", "warm-up: base, a"]
    assert progress[-1] == "round 3 of 3: candidate, b"
    assert len(progress) == 16
    assert rounds[0] == {"a": ((5,), (6,)), "b": ((7,), (8,))}
    assert len(rounds) == 3


def test_a_process_that_fails_is_named_with_the_end_of_its_output(pair: tuple[Checkout, Checkout]) -> None:
    base, candidate = pair
    probe = script_probe("for i in range(100): print('line', i)\nraise SystemExit('out of luck')")
    with pytest.raises(ChildFailed) as failed:
        compare.measure((base, candidate), [probe], 1, TIMEOUT)
    text = str(failed.value)
    assert text.startswith(f"A process of the candidate {candidate.folder} ended with status 1.\n")
    assert f"command: {sys.executable} -c " in text
    assert text.endswith("line 99\nout of luck")
    assert "line 76\n" in text
    assert "line 75\n" not in text


def test_a_process_that_takes_too_long_is_killed_with_its_children(
    pair: tuple[Checkout, Checkout], tmp_path: Path
) -> None:
    child = tmp_path / "child"
    source = (
        "import os, pathlib, time\n"
        "if (process := os.fork()) == 0: time.sleep(600)\n"
        f"pathlib.Path({str(child)!r}).write_text(str(process))\n"
        "print('begun', flush=True)\ntime.sleep(600)"
    )
    with pytest.raises(ChildFailed, match=r"did not end within 3 seconds\.\n(.|\n)*begun"):
        compare.run_probe(script_probe(source), pair[0], 3.0)
    assert has_ended(int(child.read_text()))


def test_a_process_that_measures_nothing_is_told(pair: tuple[Checkout, Checkout]) -> None:
    from benchmarks.comparison.probes import read_host

    probe = Probe("host", "fake", lambda *_: [sys.executable, "-c", ""], read_host)
    with pytest.raises(CompareError, match="left no result"):
        compare.run_probe(probe, pair[0], TIMEOUT)


def test_checkouts_that_measure_different_things_are_told_at_once(pair: tuple[Checkout, Checkout]) -> None:
    def read(file: Path) -> Readings:
        name = Path(file.read_text()).name
        return {Row(f"speed of {name}", "tok/s", "higher", 0.05): 1.0, ROW: 1.0}

    source = "import os, pathlib; pathlib.Path(OUT).write_text(os.getcwd())"
    probe = Probe("fake", "fake", script_probe(source).command, read)
    with pytest.raises(CompareError, match=r"only one .* speed of base; speed of candidate"):
        compare.measure(pair, [probe], 1, TIMEOUT)


def test_a_tree_whose_exlm_comes_from_elsewhere_is_refused(tmp_path: Path) -> None:
    good, bad = tree(tmp_path / "good"), tmp_path / "bad"
    Checkout("base", good.resolve(), "").check(TIMEOUT)
    (bad / "src").mkdir(parents=True)
    (bad / "src" / "exlm").symlink_to(good / "src" / "exlm")
    with pytest.raises(CompareError, match=r"candidate .*bad import exlm from "):
        Checkout("candidate", bad, "").check(TIMEOUT)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits; the package says which."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "repository"
    for number, package in enumerate(("AGE = 1", "AGE = 2")):
        if number == 0:
            tree(folder, package)
            git(folder, "init", "--quiet")
        (folder / "src" / "exlm" / "__init__.py").write_text(package)
        git(folder, "add", ".")
        git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", package)
    return folder


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_revision_is_unpacked_for_as_long_as_it_is_needed(repository: Path) -> None:
    before = git(repository, "status", "--porcelain"), git(repository, "worktree", "list")
    with (
        open_checkout("base", "HEAD~1", repository) as old,
        open_checkout("candidate", "HEAD", repository) as new,
    ):
        for checkout, package in ((old, "AGE = 1"), (new, "AGE = 2")):
            assert (checkout.folder / "src" / "exlm" / "__init__.py").read_text() == package
            checkout.check(TIMEOUT)
        assert old.revision == git(repository, "rev-parse", "HEAD~1")
        assert new.name == "candidate"
        assert repository not in (old.folder, new.folder)
    assert not old.folder.exists()
    assert before == (git(repository, "status", "--porcelain"), git(repository, "worktree", "list"))


def test_a_folder_is_taken_as_it_is(repository: Path) -> None:
    with open_checkout("base", str(repository), repository) as clean:
        assert clean == Checkout("base", repository.resolve(), git(repository, "rev-parse", "HEAD"))
    (repository / "src" / "exlm" / "__init__.py").write_text("AGE = 3")
    with open_checkout("base", str(repository), repository) as changed:
        assert changed.revision == git(repository, "rev-parse", "HEAD") + "-dirty"
    plain = tree(repository / "inside")
    with open_checkout("base", str(plain), repository) as unknown:
        assert unknown.revision == ""


@pytest.mark.parametrize("given", ["no-such-revision", "/no/such/folder", "--all", ""])
def test_what_is_neither_is_refused(repository: Path, given: str) -> None:
    with (
        pytest.raises(CompareError, match="neither a folder with src/exlm in it nor a revision"),
        open_checkout("base", given, repository),
    ):
        pass


HOST = """
import json, pathlib, sys
rows = [{"batch": 1, "ratio": RATIO}]
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(rows))
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command on two trees whose host benchmark gives these ratios."""

    def run(base: float, candidate: float, *options: str) -> subprocess.CompletedProcess[str]:
        folders = []
        for name, ratio in (("base", base), ("candidate", candidate)):
            folder = tree(tmp_path / f"{name} {ratio}".replace("/", " by "))
            (folder / "benchmarks").mkdir()
            (folder / "benchmarks" / "host.py").write_text(HOST.replace("RATIO", str(ratio)))
            folders.append(str(folder))
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.compare", *folders, "--suite", "host", *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_the_command_tells_a_slower_candidate(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    done = command(0.5, 0.55, "--rounds", "5", "--json", str(out))
    assert done.returncode == 1, done.stderr
    assert "outside" in done.stdout
    assert "1.100" in done.stdout
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert row["name"] == "host, decode step, batch 1, per row"
    assert (row["base"], row["candidate"]) == ([0.5] * 5, [0.55] * 5)
    assert row["ratio"] == pytest.approx(1.1)
    assert row["interval"] == pytest.approx([1.1, 1.1])
    assert (row["bound"], row["verdict"]) == (0.05, "outside")
    assert (found["rounds"], found["rounds_asked"]) == (5, 5)
    assert "bootstrap" in found["method"]
    assert found["base"]["folder"].endswith("base 0.5")


def test_the_command_tells_one_that_is_fast_enough(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = command(0.5, 0.52, "--rounds", "5")
    assert done.returncode == 0, done.stderr
    assert "within" in done.stdout


def test_the_command_decides_nothing_after_few_rounds(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    few = command(0.5, 0.7, "--rounds", "2")
    assert few.returncode == 0, few.stderr
    assert "undecided" in few.stdout
    assert "fewer than 5 rounds decide nothing" in " ".join(few.stdout.split())


def test_the_command_says_what_failed(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = command(0.5, "1/0", "--rounds", "5")  # type: ignore[arg-type]
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert "-m benchmarks.host --batches-only --json" in done.stderr
    assert "candidate 1 by 0 ended with status 1" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.partition("its output ends with")[0]


def test_the_command_leaves_nothing_behind_when_it_is_told_to_end(tmp_path: Path) -> None:
    folder, scratch = tree(tmp_path / "tree"), tmp_path / "scratch"
    scratch.mkdir()
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "host.py").write_text(
        f'"--json"\nimport os, pathlib, time\n'
        f"pathlib.Path({str(tmp_path / 'begun')!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "benchmarks.compare", str(folder), str(folder), "--suite", "host"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(scratch)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + TIMEOUT
        while not ((begun := tmp_path / "begun").exists() and begun.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        assert process.wait(TIMEOUT) == 143
    assert has_ended(int(begun.read_text()))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--suite", "cpu,moon"], "no suite is called moon; there are host, cpu"),
        (["--rounds", "0"], "must be at least 1"),
        (["--timeout", "0"], "above 0"),
        (["--json", "/no/where/out.json"], "a folder that is not there"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.parse_arguments([".", ".", *options])
    assert complaint in capsys.readouterr().err
