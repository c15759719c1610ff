"""Quantisation quality: perplexity of a trained model at four widths, against the reference converter's.

python -m benchmarks.quantize_quality [--bits 2.5 3.0 4.0 6.0] [--device cpu] [--fixtures ../shared/fixtures]

Perplexity is measured on the fixtures' 4096 held-out tokens in rows of 512. Exits with status 1 if the
reference is better, or if more bits were used than asked for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from exlm import evaluate_model, quantize_model, validate_exl2

WIDTHS = (2.5, 3.0, 4.0, 6.0)


def main() -> None:
    """Print a line for each width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=float, nargs="+", default=WIDTHS, choices=WIDTHS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fixtures", type=Path, default=Path(__file__).parents[2] / "shared" / "fixtures")
    args = parser.parse_args()
    source, reference = args.fixtures / "tiny-lm", args.fixtures / "reference"
    reference_ppl = {one["name"]: one["ppl"] for one in json.loads((reference / "perplexity.json").read_text())}
    ids = load_file(reference / "heldout_ids.safetensors").popitem()[1].flatten()[:4096].view(8, 512).long()
    worse = False
    print("asked  bits    perplexity  reference  KL        top-1   seconds")
    for bits in args.bits:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / "model"
            quantize_model(source, target, bits, device=args.device, report=False)
            seconds = time.perf_counter() - start
            assert not validate_exl2(target)
            found = evaluate_model(target, source, ids=ids, device=args.device)
        bound = reference_ppl[f"exl2-{bits}bpw"]
        worse |= found.perplexity > bound or found.bits > bits
        print(
            f"{bits:<6} {found.bits:<7.4f} {found.perplexity:<11.4f} {bound:<10.4f} {found.kl:<9.6f} "
            f"{found.top1:<7.4f} {seconds:.0f}",
            flush=True,
        )
    raise SystemExit(int(worse))


if __name__ == "__main__":
    main()
