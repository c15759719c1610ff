"""The default model on this processor, beside other engines: `python -m benchmarks.cpu`.

Each engine runs in a process of its own, and they take turns, so that what else the machine does hits all of
them. Same file, same prompt of 512 tokens, same number of threads, greedy. Peers that are not installed are
left out; one that lives in another environment is named with its interpreter, as in
`--peer llama.cpp=/venv/bin/python`. Only the ratios of one table mean something on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from exlm import convert_model, find_model
from exlm.settings import cache_folder

from . import cpu_engines

NAMES = {
    "prompt": "prompt of 512, tok/s",
    "decode": "decode, tok/s",
    "batch": "decode of 8, tok/s",
    "first": "command to first token, s",
    "peak": "peak memory, MB",
}


def measured(python: str, engine: str, model: Path, threads: int) -> dict[str, float]:
    """One run of an engine, in a process of its own."""
    code = Path(cpu_engines.__file__)
    run = [python, str(code), engine, str(model), str(threads), repr(time.time())]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{engine}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table(runs: dict[str, list[dict[str, float]]]) -> Table:
    """Medians with their range, and what they are of the first engine's."""
    first = next(iter(runs))
    out = Table(title="SmolLM2-135M, medians (lowest to highest)")
    out.add_column("engine")
    for name in NAMES.values():
        out.add_column(name, justify="right")
    for engine, found in runs.items():
        cells = []
        for key in NAMES:
            values = [one[key] for one in found if key in one]
            base = [one[key] for one in runs[first] if key in one]
            if not values:
                cells.append("")
                continue
            digits = 1 if key == "first" else 0
            ratio = "" if engine == first else f"\n{median(base) / median(values):.2f} × this is {first}"
            cells.append(
                f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f}){ratio}"
            )
        out.add_row(engine, *cells)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--peer", action="append", default=[], help="an engine and the interpreter that has it"
    )
    parser.add_argument("--json", type=Path, help="keep every run in this file")
    chosen = parser.parse_args(arguments)
    model, console = find_model(progress=True), Console()
    engines = {"exlm": sys.executable, "transformers": sys.executable, "llama.cpp": sys.executable}
    engines |= dict(peer.split("=", 1) for peer in chosen.peer)
    measured(engines["exlm"], "bandwidth", model, chosen.threads)  # builds what is not built yet
    unpacked = cache_folder() / "bench" / "smollm2-dense"
    if not unpacked.exists():
        convert_model(model, unpacked, "dense")
    runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    bandwidth = []
    for _ in range(chosen.repeats):
        bandwidth.append(measured(sys.executable, "bandwidth", model, chosen.threads)["read"])
        for engine in list(runs):
            try:
                files = unpacked if engine == "transformers" else model
                runs[engine].append(measured(engines[engine], engine, files, chosen.threads))
            except RuntimeError as error:
                console.print(f"left out: {error}")
                del runs[engine]
    console.print(table(runs))
    read, size = median(bandwidth), model.stat().st_size
    share = median(one["decode"] for one in runs["exlm"]) * size / read
    console.print(
        f"{chosen.threads} threads; memory is read at {read / 1e9:.1f} GB/s "
        f"({min(bandwidth) / 1e9:.1f}–{max(bandwidth) / 1e9:.1f}), "
        f"of which decoding uses {share:.0%}; the file has {size / 1e6:.0f} MB."
    )
    if chosen.json:
        chosen.json.write_text(json.dumps({"bandwidth": bandwidth, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
