"""Two checkouts of exlm, measured in alternation: `python -m benchmarks.compare BASE CANDIDATE`.

BASE and CANDIDATE are folders, or revisions of this repository, which are unpacked into temporary folders.
Each measurement is a fresh process that runs one checkout's own code. A round measures everything once with
both checkouts, one right after the other, and the next round in the opposite order; a first round is not
counted (kernels are compiled in it). For each row the table has both medians, their ratio with its 95 %
interval, how much worse the candidate may be, and the verdict: `within` or `outside` that bound, or
`undecided` where the interval holds both; more rounds make it narrower. The exit status is 1 if a row is
outside, 2 if something failed, and 0 otherwise.

    python -m benchmarks.compare HEAD~20 .                                 # the host's work and the CPU
    python -m benchmarks.compare ../base . --suite gpu,load --rounds 7     # on a GPU
    python -m benchmarks.compare v0.1.0 . --suite serve --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .comparison.checkouts import Checkout, CompareError, open_checkout
from .comparison.intervals import METHOD, MIN_ROUNDS, Ratio, Verdict, ratio, verdict
from .comparison.probes import SUITES, Probe, Readings, Row, Setup, probes

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, TIMEOUT = 7, 900.0
HAS_GPU = "import torch; print(torch.cuda.is_available())"
STYLES = {"within": "green", "outside": "bold red", "undecided": "yellow"}

Samples = dict[Row, tuple[list[float], list[float]]]
"""For each row the values of the base and of the candidate, by round."""

ProgressCallback = Callable[[str], object]


def measure(
    checkouts: tuple[Checkout, Checkout],
    wanted: Sequence[Probe],
    rounds: int,
    timeout: float,
    on_progress: ProgressCallback = lambda what: None,
    on_round: Callable[[Samples], object] = lambda samples: None,
) -> Samples:
    """Measure everything in alternation; a first warm-up round is not counted.

    `on_progress` is called before each process, `on_round` after each round that counts.
    """
    samples: Samples = {}
    for number in range(rounds + 1):
        # The base is first in the odd rounds and the candidate in the even ones.
        order = checkouts if number % 2 else checkouts[::-1]
        for probe in wanted:
            readings: dict[str, Readings] = {}
            for checkout in order:
                which = f"round {number} of {rounds}" if number else "warm-up"
                on_progress(f"{which}: {checkout.name}, {probe.name}")
                readings[checkout.name] = run_probe(probe, checkout, timeout)
            base, candidate = (readings[checkout.name] for checkout in checkouts)
            check_rows(probe, base, candidate)
            if number:
                for row, value in base.items():
                    values = samples.setdefault(row, ([], []))
                    values[0].append(value)
                    values[1].append(candidate[row])
        if number:
            on_round(samples)
    return samples


def run_probe(probe: Probe, checkout: Checkout, timeout: float) -> Readings:
    """Run a probe in a fresh process and read its results."""
    with tempfile.TemporaryDirectory(prefix="exlm-compare-") as folder:
        file = Path(folder) / "result.json"
        checkout.run(probe.command(checkout, file), timeout)
        return probe.read(file)


def check_rows(probe: Probe, base: Readings, candidate: Readings) -> None:
    """Refuse results of the two checkouts that have different rows."""
    if base.keys() == candidate.keys() and base:
        return
    unmatched = sorted(row.name for row in base.keys() ^ candidate.keys())
    raise CompareError(f"{probe.name}: only one of the two checkouts measures: {'; '.join(unmatched) or 'anything'}.")


class Result:
    """One row of the comparison."""

    def __init__(self, row: Row, base: Sequence[float], candidate: Sequence[float]) -> None:
        self.row = row
        self.base, self.candidate = list(base), list(candidate)
        self.ratio: Ratio = ratio(base, candidate)
        self.verdict: Verdict = verdict(self.ratio, row.better, row.bound)

    def json(self) -> dict[str, Any]:
        """The row as JSON data."""
        return {
            "name": self.row.name,
            "unit": self.row.unit,
            "better": self.row.better,
            "base": self.base,
            "candidate": self.candidate,
            "base_median": median(self.base),
            "candidate_median": median(self.candidate),
            "ratio": self.ratio.value,
            "interval": [self.ratio.low, self.ratio.high],
            "bound": self.row.bound,
            "verdict": self.verdict,
        }

    def cells(self) -> list[str]:
        """The row's cells in the table."""
        found = self.ratio
        worse = f"{'+' if self.row.better == 'lower' else '-'}{self.row.bound:.0%}"
        return [
            f"{self.row.name}, {self.row.unit}",
            *(f"{median(values):.4g}" for values in (self.base, self.candidate)),
            f"{found.value:.3f}",
            f"{found.low:.3f} - {found.high:.3f}",
            worse,
            f"[{STYLES[self.verdict]}]{self.verdict}[/]",
        ]


def results(samples: Samples) -> list[Result]:
    """A result for each row."""
    return [Result(row, *values) for row, values in samples.items()]


def table(rows: Sequence[Result], rounds: int) -> Table:
    """The table, one line for each row."""
    out = Table(title=f"candidate / base, {rounds} rounds", box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("row")
    for name in ("base", "candidate", "ratio", "95 % interval", "bound"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("verdict", no_wrap=True)
    for row in rows:
        out.add_row(*row.cells())
    out.caption = METHOD + (f"; fewer than {MIN_ROUNDS} rounds decide nothing" if rounds < MIN_ROUNDS else "")
    return out


def report(checkouts: tuple[Checkout, Checkout], rounds: int, samples: Samples) -> dict[str, Any]:
    """Everything as JSON data, from the rounds that are complete so far."""
    done = min((len(base) for base, _ in samples.values()), default=0)
    return {
        **{one.name: {"folder": str(one.folder), "revision": one.revision} for one in checkouts},
        "rounds": done,
        "rounds_asked": rounds,
        "method": METHOD,
        "machine": {
            "system": platform.platform(),
            "python": sys.version.split()[0],
            "cores": os.cpu_count(),
            "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        },
        "rows": [one.json() for one in results(samples)],
    }


def write(file: Path, content: dict[str, Any]) -> None:
    """Write a file atomically."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", help="a folder or a revision")
    parser.add_argument("candidate", help="a folder or a revision")
    parser.add_argument(
        "--suite",
        help=f"of {','.join(SUITES)}, with commas between; host,gpu,load with a GPU, else host,cpu",
    )
    parser.add_argument("--only", metavar="TEXT", help="leave out measurements without this in their name")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--json", type=Path, help="write every value to a file, after each round")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of load, serve and sampler; a GPU if any")
    parser.add_argument("--threads", type=int, help="threads of the cpu suite; else torch's own choice")
    parser.add_argument("--models", type=Path, help="a folder where model files are kept; else they are temporary")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, help=f"seconds for each process; default: {TIMEOUT:g}"
    )
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.timeout <= 0 or (args.threads or 1) < 1:
        parser.error("--rounds and --threads must be at least 1, --timeout above 0")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json} would lie in a folder that is not there")
    if unknown := sorted({*(args.suite or "host").split(",")} - {*SUITES}):
        parser.error(f"no suite is called {', '.join(unknown)}; there are {', '.join(SUITES)}")
    return args


def select_probes(found: Sequence[Probe], only: str | None) -> list[Probe]:
    """The probes whose name contains a text."""
    selected = [probe for probe in found if only is None or only.lower() in probe.name.lower()]
    if not selected:
        names = "; ".join(probe.name for probe in found)
        raise CompareError(f"--only {only!r} leaves nothing to measure. There are: {names}.")
    return selected


def compare(args: argparse.Namespace, console: Console) -> bool:
    """Measure and print; whether every row is within its bound or undecided."""
    with ExitStack() as stack:
        base = stack.enter_context(open_checkout("base", args.base, ROOT))
        candidate = stack.enter_context(open_checkout("candidate", args.candidate, ROOT))
        checkouts = base, candidate
        for one in checkouts:
            one.check(args.timeout)
        gpu = base.run([sys.executable, "-c", HAS_GPU], args.timeout).split()[-1] == "True"
        device = args.device or ("cuda" if gpu else "cpu")
        suites = list(dict.fromkeys((args.suite or ("host,gpu,load" if gpu else "host,cpu")).split(",")))
        if not gpu and ("gpu" in suites or device == "cuda"):
            raise CompareError("torch finds no GPU here: leave the gpu suite and --device cuda out.")
        models = args.models
        if models is None:
            models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="exlm-models-")))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Drawn only when something changes: a bar that redraws itself takes time from what is measured.
        bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False))
        task = bar.add_task("writing model files", total=None)
        bar.refresh()
        setup = Setup(base, models.expanduser().absolute(), device, args.threads, args.timeout)
        wanted = select_probes(probes(suites, setup), args.only)
        for probe in wanted:
            probe.prepare()
        bar.update(task, total=2 * (args.rounds + 1) * len(wanted), completed=-1)

        def on_progress(what: str) -> None:
            bar.update(task, description=what, advance=1, refresh=True)

        def on_round(samples: Samples) -> None:
            if args.json is not None:
                write(args.json, report(checkouts, args.rounds, samples))

        samples = measure(checkouts, wanted, args.rounds, args.timeout, on_progress, on_round)
        bar.stop()
        for one in checkouts:
            console.print(f"{one.name}: {one.folder} {one.revision}", highlight=False, soft_wrap=True)
        found = results(samples)
        console.print(table(found, args.rounds))
        return all(one.verdict != "outside" for one in found)


def main() -> None:
    """Run the comparison and exit with its status."""
    args = parse_arguments()
    # Like Ctrl-C: the process that is being measured is ended, and temporary folders are removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    console = Console() if Console().is_terminal else Console(width=140)
    try:
        within_bounds = compare(args, console)
    except (CompareError, OSError, subprocess.SubprocessError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), markup=False, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; --json has the rounds that were done")
        sys.exit(130)
    sys.exit(0 if within_bounds else 1)


if __name__ == "__main__":
    main()
