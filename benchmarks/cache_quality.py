"""What each cache type costs in quality: `python -m benchmarks.cache_quality [MODEL]`.

The model reads a text token by token, as in decoding, with each type of cache; the float32 cache is the reference.
For each range of depths the table has the mean KL divergence of the next-token distribution from the reference's in
nats, the share of positions with the same most likely token, and the perplexity of the text.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from exlm import CACHES, Cache, CacheBase, Config, Model, Tokenizer, find_model

TEXTS = Path(__file__).resolve().parents[1] / "src" / "exlm" / "quantize" / "texts"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a Hub name; default: the default model")
    parser.add_argument("--text", type=Path, help="a text file; default: exlm's own English and technical texts")
    parser.add_argument("--depths", default="0,512,2048", help="borders of the ranges of positions, in tokens")
    parser.add_argument("--caches", default="fp16,q8,q6,q4,fp8", help=f"some of {', '.join(CACHES)}")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    args = parser.parse_args()
    depths = [int(depth) for depth in args.depths.split(",")]
    folder = find_model(args.model, progress=True)
    model = Model(Config(folder))
    model.load(progress=True)
    files = [args.text] if args.text else [TEXTS / "english.txt", TEXTS / "technical.txt"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    ids = Tokenizer(model.config).encode(text)[:, : depths[-1]]
    if ids.shape[1] < depths[-1]:
        parser.error(f"the text has {ids.shape[1]} tokens and --depths ends at {depths[-1]}")
    float_cache = Cache(model, max_seq_len=depths[-1], dtype="float32")
    reference = torch.stack([*log_probs(model, float_cache, ids, "float32")])
    rows = {"float32": compare(reference, reference, ids, depths)}
    for name in args.caches.split(","):
        found = log_probs(model, CACHES[name](model, max_seq_len=depths[-1]), ids, name)
        rows[name] = compare(reference, found, ids, depths)
    Console(width=110).print(table(rows, depths, folder.name))
    if args.json:
        args.json.write_text(json.dumps({"model": folder.name, "depths": depths, "caches": rows}, indent=1))


def log_probs(model: Model, cache: CacheBase, ids: torch.Tensor, name: str) -> Iterator[torch.Tensor]:
    """The log-probabilities of the token after each token, fed one at a time."""
    for i in track(range(ids.shape[1]), description=f"{name:8}"):
        yield model.forward(ids[:, i : i + 1], cache)[0, -1].float().log_softmax(-1).cpu()


def compare(
    reference: torch.Tensor, found: Iterable[torch.Tensor], ids: torch.Tensor, depths: list[int]
) -> list[dict[str, float]]:
    """For each range of depths: KL divergence, agreement on the most likely token, perplexity."""
    targets = [*ids[0, 1:].tolist(), None]
    kl, same, nll = [], [], []
    for p, q, target in zip(reference, found, targets, strict=True):
        kl.append(float((p.exp() * (p - q)).sum()))
        same.append(bool(p.argmax() == q.argmax()))
        nll += [] if target is None else [-float(q[target])]
    return [
        {
            "kl": fmean(kl[first:end]),
            "same_top_1": fmean(same[first:end]),
            "perplexity": math.exp(fmean(nll[first:end])),
        }
        for first, end in pairwise(depths)
    ]


def table(rows: dict[str, list[dict[str, float]]], depths: list[int], model: str) -> Table:
    """One line for each cache, three columns for each range."""
    found = Table("cache", title=f"{model}, token by token, against a float32 cache")
    for first, end in pairwise(depths):
        for name in (f"KL, {first:,}–{end:,}", "same top 1", "perplexity"):
            found.add_column(name, justify="right")
    for name, ranges in rows.items():
        cells = [(f"{r['kl']:.5f}", f"{r['same_top_1']:.1%}", f"{r['perplexity']:.3f}") for r in ranges]
        found.add_row(name, *(cell for range_cells in cells for cell in range_cells))
    return found


if __name__ == "__main__":
    main()
