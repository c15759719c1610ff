"""The Ray cluster: connecting to one or starting one, and the configuration of what runs on it.

Ray is imported only when a function needs it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from exlm import InputError, MissingExtra
from exlm.serve import Limits

OBJECT_STORE_BYTES = 256 << 20
"""Size of the object store of a cluster started here; what exceeds it is spilled to disk."""

LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Address of a cluster started here; Ray replaces 127.0.0.1 by the network's address."""


def import_ray(part: str = "") -> Any:
    """The package `ray`, or a part of it: `data` or `serve`."""
    try:
        return import_module(f"ray.{part}" if part else "ray")
    except ImportError as error:
        raise MissingExtra(
            f"Working on a Ray cluster needs further packages ({error}): pip install 'exlm[scale]'"
        ) from None


@contextmanager
def cluster() -> Iterator[bool]:
    """Connect to the cluster that Ray finds (`RAY_ADDRESS`, or on this machine), or start one here.

    Yields whether it was started here; such a cluster ends with the block.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield False
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
        started = False
    except ConnectionError:
        ray.init(
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            _node_ip_address=LOOPBACK,
            _system_config={"worker_niceness": 0},  # no lower priority: this is a server
        )
        started = True
    try:
        yield started
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class ServerConfig:
    """What the replicas and the ingress must agree on."""

    keys: Sequence[str] = ()
    admin_keys: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    ready_seconds: float = 10.0
    """A replica is healthy if its engine makes a token within this time."""


@dataclass(frozen=True)
class ClusterConfig:
    """The number and size of the replicas. The field names are also keys of a configuration file."""

    least: int = 1
    most: int = 1
    """Replicas are added and removed between `least` and `most`, by the length of the queue."""
    cpus: float = 1.0
    gpus: float = 0
    """GPUs of one replica; replicas with less than 1 share a GPU."""
    tensor_parallel: int = 1
    """Tensor-parallel ranks of one replica; with GPUs, as many as `gpus`."""
    ongoing: int = 32
    """Concurrent requests of one replica; further ones wait at the ingress."""
    queue: int = 16
    """Target of concurrent requests for each replica: with more, replicas are added."""
    slack: int = 8
    """How many more requests than the least busy replica the one with the longest cached prefix may have."""
    fronts: int = 1
    """Replicas of the ingress."""
    drain: float = 60.0
    """Seconds a replica has to finish its requests before it is removed."""
    patience: float = 30.0
    """Seconds of a long queue before a replica is added; removing one takes ten times as long."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InputError(f"--replicas takes N or LEAST..MOST, from 1 up; found {self.least}..{self.most}.")
        if self.tensor_parallel > 1 and self.gpus and self.gpus != self.tensor_parallel:
            raise InputError(f"A model shared by {self.tensor_parallel} GPUs needs as many each, found {self.gpus}.")

    @classmethod
    def from_replicas(cls, replicas: str, **more: Any) -> ClusterConfig:
        """A configuration of `2` or `2..8` replicas."""
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", replicas.strip())
        if found is None:
            raise InputError(f"--replicas takes N or LEAST..MOST, such as 2..8; found {replicas!r}.")
        return cls(int(found[1]), int(found[2] or found[1]), **more)
