"""Connect to a running Ray cluster, or start one on this machine for the length of a block."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from exlm import MissingExtra

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
