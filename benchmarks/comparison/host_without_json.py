"""Runs `benchmarks.host` of a checkout that cannot write JSON yet, and writes what its `--json` would: FILE.

Such checkouts lie in the past, so the names used here do not change any more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import torch


def main(file: Path) -> None:
    """Measure every case."""
    sys.path.insert(0, ".")  # the checkout's own benchmarks, rather than those beside this script
    from benchmarks.host import CASES, measure

    torch.set_num_threads(1)
    found = []
    for case in CASES:
        turns = measure(case, 61)
        found.append({"batch": case.rows, "ratio": median(step / unit for step, unit in turns)})
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
