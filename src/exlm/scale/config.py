"""How a cluster is laid out, as numbers, and what Ray Serve is told of them, as dictionaries. No Ray here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from exlm import InputError

ROUTER_CLASS = "exlm.scale.router.PrefixRouter"


@dataclass(frozen=True)
class ClusterConfig:
    """How many replicas, and how large each is."""

    least: int = 1
    most: int = 1
    """Between `least` and `most` the number of replicas follows the queue."""
    cpus: float = 1.0
    gpus: float = 0
    """Of one replica; less than 1 shares a GPU."""
    tensor_parallel: int = 1
    """Devices that share every layer of one replica's model; on GPUs, as many as `gpus`."""
    ongoing: int = 32
    """Requests that one replica has at once; further ones wait at the front."""
    queue: int = 16
    """Requests under way for each replica that are wanted: with more there will be more replicas."""
    slack: int = 8
    """Requests a replica may have more than the least busy one and still get what it has read before."""
    fronts: int = 1
    drain: float = 60.0
    """Seconds that a replica has to finish what it has before it goes."""
    patience: float = 30.0
    """Seconds of a long queue before a replica is added; it is taken away after ten times as many."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not 1 <= self.least <= self.most:
            raise InputError(
                f"--replicas takes N or LEAST..MOST, from 1 up; found {self.least}..{self.most}."
            )
        if self.tensor_parallel > 1 and self.gpus and self.gpus != self.tensor_parallel:
            raise InputError(
                f"A model shared by {self.tensor_parallel} GPUs needs as many each, found {self.gpus}."
            )

    @classmethod
    def from_replicas(cls, replicas: str, **more: Any) -> ClusterConfig:
        """A shape of `2` or `2..8` replicas."""
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", replicas.strip())
        if found is None:
            raise InputError(f"--replicas takes N or LEAST..MOST, such as 2..8; found {replicas!r}.")
        return cls(int(found[1]), int(found[2] or found[1]), **more)


def replica_options(shape: ClusterConfig) -> dict[str, Any]:
    """Options of the deployment of replicas.

    All GPUs of a replica are one bundle of a placement group: on one machine, and all of them visible to the
    replica's process, which starts its ranks itself.
    """
    resources: dict[str, float] = {"num_cpus": shape.cpus, "num_gpus": shape.gpus}
    options: dict[str, Any] = {
        "ray_actor_options": resources,
        "max_ongoing_requests": shape.ongoing,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "health_check_period_s": 10,
        "health_check_timeout_s": 60,
        "graceful_shutdown_timeout_s": shape.drain,
        "graceful_shutdown_wait_loop_s": 0.5,
        "request_router_config": {
            "request_router_class": ROUTER_CLASS,
            "request_router_kwargs": {"slack": shape.slack},
        },
    }
    if shape.gpus > 1:
        options["placement_group_bundles"] = [{"CPU": shape.cpus, "GPU": shape.gpus}]
        options["placement_group_strategy"] = "STRICT_PACK"
    if shape.least == shape.most:
        return options | {"num_replicas": shape.least}
    scaling = {
        "min_replicas": shape.least,
        "max_replicas": shape.most,
        "target_ongoing_requests": shape.queue,
        "upscale_delay_s": shape.patience,
        "downscale_delay_s": 10 * shape.patience,
    }
    return options | {"autoscaling_config": scaling}


def ingress_options(shape: ClusterConfig) -> dict[str, Any]:
    """Options of the deployment before them: it takes everything and counts by itself."""
    return {
        "num_replicas": shape.fronts,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 100_000,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "graceful_shutdown_timeout_s": shape.drain,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
