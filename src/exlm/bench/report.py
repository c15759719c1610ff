"""What was measured, as plain data: a row for each kind of work, and what they are to be held against."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

BOUND_SHARE = 0.4
"""The share of a limit from which on that limit is what bounds the work."""


@dataclass(frozen=True)
class Row:
    """One kind of work; shares are between 0 and 1."""

    work: str  # "prompt", "decode", or "ngram": decode with guesses
    cache: str
    context: int  # tokens in the cache half way through the steps; of a prompt, its length
    batch: int
    rate: float | None = None  # tokens a second, of all rows together; None: it does not fit
    step: float = 0.0  # seconds
    read: int = 0  # bytes of weights and cache that a step must read
    bandwidth: float = 0.0  # of what the device can move
    products: float = 0.0  # of what it can multiply
    idle: float = 0.0  # of a step in which the model does not compute
    bound: str = "does not fit"
    each: float = 1.0  # tokens of a row that a step made, or read


@dataclass(frozen=True)
class Peer:
    """What one engine did: numbers by name, one for each turn."""

    engine: str
    values: dict[str, list[float]]


@dataclass(frozen=True)
class Report:
    """Everything about one run."""

    model: str
    form: str
    parameters: int
    weights: int  # bytes a decode step reads of them
    bits: float  # for each weight of the layers' matrices
    device: str
    backends: tuple[str, ...]  # who runs the matrices, the commonest first
    threads: int
    load: float  # seconds; weights that are in no files are made meanwhile
    first: float | None  # seconds from the start of the process to the first token
    memory: int  # bytes at most
    bandwidth: float  # bytes a second the device can move
    products: float  # operations a second it can multiply
    rows: tuple[Row, ...]
    system: dict[str, str] = field(default_factory=dict)
    peers: tuple[Peer, ...] = ()

    def json(self) -> dict[str, Any]:
        """Plain lists and dicts."""
        return asdict(self)


def bound(bandwidth: float, products: float, idle: float, on_gpu: bool) -> str:
    """What the work waits for, by its shares of the limits and the time its device is idle."""
    if idle >= BOUND_SHARE:
        return "host"
    if max(bandwidth, products) >= BOUND_SHARE:
        return "memory" if bandwidth >= products else "compute"
    return "launch" if on_gpu else "compute"
