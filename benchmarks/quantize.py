"""Quantisation time: quantises a model, checks the files, and prints the time of each phase, memory and
quality.

python -m benchmarks.quantize [--shape smollm2-135m | --model NAME] [--bits 4.0] [--rows 128] [--device cuda]
    [--twice]

Without --model a model of random weights is used: its times are realistic, its perplexity is meaningless.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.synthetic import write_dense
from exlm import Quality, find_model, quantize_model, validate_exl2
from exlm.bench.shapes import SHAPES

NAMED_AT_START = ("calibrating", "writing", "evaluating the result")
"""Phases that are reported when they begin; all others are reported when they end."""


class PhaseTimer:
    """Seconds of each phase; layers are one phase."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last, self._open = time.perf_counter(), ""

    def __call__(self, done: int, total: int, what: str) -> None:
        """The progress callback of `quantize_model`."""
        now = time.perf_counter()
        name = " ".join(word for word in what.split(";")[0].split() if not word.isdigit())
        phase = self._open or name
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last, self._open = now, name if name in NAMED_AT_START else ""


def main() -> None:
    """Quantise into a temporary folder and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder, a .gguf file or a name, instead of random weights")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=128, help="rows of calibration text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--twice", action="store_true", help="quantise twice and require identical weights")
    args = parser.parse_args()
    timer = PhaseTimer()
    with tempfile.TemporaryDirectory() as scratch:
        source = find_model(args.model) if args.model else write_dense(Path(scratch) / "source", SHAPES[args.shape])
        target = Path(scratch) / "model"
        timer(0, 0, "making the source")
        start = time.perf_counter()
        quality = quantize_model(source, target, args.bits, rows=args.rows, device=args.device, progress=timer)
        seconds = time.perf_counter() - start
        timer(0, 0, "checking the files")
        wrong = validate_exl2(target)
        if args.twice:
            again = target.with_name("again")
            quantize_model(source, again, args.bits, rows=args.rows, device=args.device, report=False)
            assert _weights(target) == _weights(again), "two runs made different weights"
    assert not wrong, wrong
    assert quality is not None
    for name, spent in timer.phases.items():
        print(f"{name:<22} {spent:8.1f} s")
    _show(quality, seconds, args.device)


def _weights(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


def _show(quality: Quality, seconds: float, device: str) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    card = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0.0
    print("device  bits   seconds  CPU s    host GiB  card GiB  perplexity  source  KL       top-1")
    print(
        f"{device:<7} {quality.bits:<6.3f} {seconds:<8.1f} {used.ru_utime + used.ru_stime:<8.0f} "
        f"{used.ru_maxrss / 2**20:<9.2f} {card:<9.2f} {quality.perplexity:<11.3f} "
        f"{quality.against_perplexity:<7.3f} {quality.kl:<8.5f} {quality.top1:.4f}"
    )


if __name__ == "__main__":
    main()
