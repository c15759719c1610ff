"""Runs `benchmarks.host` of an old checkout without `--json`, and writes that option's output to FILE.

Old checkouts do not change, so the internal names used here stay valid.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import torch


def main(file: Path) -> None:
    """Measure every case and write the file."""
    sys.path.insert(0, ".")  # the checkout's own benchmarks, rather than those beside this script
    from benchmarks.host import CASES, measure

    torch.set_num_threads(1)
    found = []
    for case in CASES:
        repeats = measure(case, 61)
        found.append({"batch": case.rows, "ratio": median(step / unit for step, unit in repeats)})
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
