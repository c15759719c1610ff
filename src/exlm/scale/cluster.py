"""The Ray cluster to work on: the one that is there, or one on this machine for as long as it is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from exlm import MissingExtra

OBJECT_STORE_BYTES = 256 << 20
"""Bytes of shared memory of a cluster that is started here; what is more is kept on the disk."""

LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Where a cluster of one machine is found; the first address of loopback Ray takes for the network's."""


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
    """Join the cluster that Ray finds (`RAY_ADDRESS`, or one that runs on this machine), or start one here.

    Whether it was started here; then it ends with the block.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield False
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
        ours = False
    except ConnectionError:
        ray.init(
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            _node_ip_address=LOOPBACK,
            _system_config={"worker_niceness": 0},  # a server is no background work
        )
        ours = True
    try:
        yield ours
    finally:
        ray.shutdown()
