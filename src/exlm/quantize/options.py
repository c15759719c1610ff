"""`QuantizeOptions`: what a quantisation is asked to do, checked before anything is read."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError
from .allocation import HEAD_RECIPES

Method = Literal["exl2", "gptq"]

MIN_BITS, MAX_BITS = 2.0, 8.5
SOLVER_ONLY_OPTIONS = ("bits", "size", "max_kld", "head_bits")
"""Options that only the solver depends on: until it starts, an unfinished job may continue with other values."""

GPTQ_GROUP_SIZES = (32, 64, 128)
SIZE_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class SolverOptions:
    """How the solver of one matrix works."""

    damping: float = 0.01  # added to the diagonal of the input Hessian H, relative to its mean
    output_damping: float = 0.05  # the same for the output Hessian G
    sweeps: int = 2  # of one-sided coordinate descent after GPTQ; 0 is GPTQ alone
    scale_steps: int = 24  # values tried for each column's scale


@dataclass(frozen=True)
class QuantizeOptions:
    """Target, method and calibration.

    One of `bits` (per weight of the layers, scales and permutations included), `size` (bytes of the weight
    files) and `max_kld` (KL divergence from the source, nats per token) is the target of EXL2; GPTQ has none.
    """

    bits: float | None = None
    size: int | None = None
    max_kld: float | None = None
    head_bits: int = 6
    method: Method = "exl2"
    group_size: int = 128  # GPTQ only
    calibration: str = "builtin"  # or a file
    rows: int = 128
    length: int = 512
    seed: int = 1
    solver: SolverOptions = field(default_factory=SolverOptions)

    def __post_init__(self) -> None:
        """Refuse values that are out of range or contradict each other."""
        if self.method not in ("exl2", "gptq"):
            raise InputError(f"method must be exl2 or gptq, found {self.method!r}.")
        for name in ("rows", "length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, found {getattr(self, name)}.")
        if self.method == "gptq":
            if self.bits not in (None, 4) or self.size is not None or self.max_kld is not None:
                raise InputError("GPTQ has 4 bits for every weight: leave out bits, size and max_kld.")
            if self.group_size not in GPTQ_GROUP_SIZES:
                raise InputError(f"group_size must be one of {GPTQ_GROUP_SIZES}, found {self.group_size}.")
            return
        targets = [t for t in (self.bits, self.size, self.max_kld) if t is not None]
        if len(targets) != 1:
            raise InputError(f"Give one of bits, size and max_kld, found {len(targets)} of them.")
        if self.bits is not None and not MIN_BITS <= self.bits <= MAX_BITS:
            raise InputError(f"bits must be between {MIN_BITS:g} and {MAX_BITS:g}, found {self.bits:g}.")
        if self.size is not None and self.size < 1:
            raise InputError(f"size must be positive, found {self.size}.")
        if self.max_kld is not None and not self.max_kld > 0:
            raise InputError(f"max_kld must be above 0, found {self.max_kld:g}.")
        if self.head_bits not in HEAD_RECIPES:
            raise InputError(f"head_bits must be one of {', '.join(map(str, HEAD_RECIPES))}, found {self.head_bits}.")

    def fingerprint(self) -> dict[str, Any]:
        """What job.json records, and a resumed job must have again; its keys are part of the file format."""
        table = asdict(self)
        solver = table.pop("solver")
        table["effort"] = {
            "damping": solver["damping"],
            "ridge": solver["output_damping"],
            "sweeps": solver["sweeps"],
            "fine": solver["scale_steps"],
        }
        return table


def parse_size(text: str) -> int:
    """Bytes from "5.2GB", "800 MiB" or a plain number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?[iI]?)[bB]?\s*", text)
    if found is None or found[2].upper() not in SIZE_UNITS:
        raise InputError(f"{text!r} is not a size: write it like 5.2GB or 800MiB.")
    return int(float(found[1]) * SIZE_UNITS[found[2].upper()])


def calibration_name(options: QuantizeOptions) -> str:
    """The calibration text as reports call it: "builtin", or the file's name."""
    return options.calibration if options.calibration == "builtin" else Path(options.calibration).name
