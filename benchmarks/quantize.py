"""How long quantising takes: checks the result, then prints time, memory and quality as one line.

python -m benchmarks.quantize [--model NAME] [--bits 4.0] [--device cuda]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch

from exlm import find_model, quantize_model, validate_exl2


def main() -> None:
    """Quantise into a folder that is thrown away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder, a .gguf file or a name; the default model if left out")
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    source = find_model(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "model"
        begun = time.perf_counter()
        quality = quantize_model(source, target, args.bits, device=args.device)
        seconds = time.perf_counter() - begun
        wrong = validate_exl2(target)
    assert not wrong, wrong
    assert quality is not None
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    card = torch.cuda.max_memory_allocated() / 2**30 if args.device != "cpu" else 0.0
    print("device  bits   seconds  host GiB  card GiB  perplexity  source  KL       top-1")
    print(
        f"{args.device:<7} {quality.bits:<6.3f} {seconds:<8.1f} {memory:<9.2f} {card:<9.2f} "
        f"{quality.perplexity:<11.3f} {quality.against_perplexity:<7.3f} {quality.kl:<8.5f} "
        f"{quality.top1:.4f}"
    )


if __name__ == "__main__":
    main()
