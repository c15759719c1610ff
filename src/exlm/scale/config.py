"""The configuration of a cluster, and the options of its Ray Serve deployments. Ray is not imported here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exlm import InputError
from exlm.serve import Limits

ROUTER_CLASS = "exlm.scale.router.PrefixRouter"


@dataclass(frozen=True)
class ServerConfig:
    """What replicas and the ingress have to agree on."""

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
        """Refuse contradictory numbers."""
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
        """A configuration of `2` or `2..8` replicas."""
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", replicas.strip())
        if found is None:
            raise InputError(f"--replicas takes N or LEAST..MOST, such as 2..8; found {replicas!r}.")
        return cls(int(found[1]), int(found[2] or found[1]), **more)


def replica_options(config: ClusterConfig) -> dict[str, Any]:
    """Options of the deployment of replicas.

    All GPUs of a replica are one bundle of a placement group, so that they are on one machine and visible to
    the replica's process, which starts its tensor-parallel ranks itself.
    """
    resources: dict[str, float] = {"num_cpus": config.cpus, "num_gpus": config.gpus}
    options: dict[str, Any] = {
        "ray_actor_options": resources,
        "max_ongoing_requests": config.ongoing,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "health_check_period_s": 10,
        "health_check_timeout_s": 60,
        "graceful_shutdown_timeout_s": config.drain,
        "graceful_shutdown_wait_loop_s": 0.5,
        "request_router_config": {
            "request_router_class": ROUTER_CLASS,
            "request_router_kwargs": {"slack": config.slack},
        },
    }
    if config.gpus > 1:
        options["placement_group_bundles"] = [{"CPU": config.cpus, "GPU": config.gpus}]
        options["placement_group_strategy"] = "STRICT_PACK"
    if config.least == config.most:
        return options | {"num_replicas": config.least}
    scaling = {
        "min_replicas": config.least,
        "max_replicas": config.most,
        "target_ongoing_requests": config.queue,
        "upscale_delay_s": config.patience,
        "downscale_delay_s": 10 * config.patience,
    }
    return options | {"autoscaling_config": scaling}


def ingress_options(config: ClusterConfig) -> dict[str, Any]:
    """Options of the deployment of the ingress, which takes every request and does its own limiting."""
    return {
        "num_replicas": config.fronts,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 100_000,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "graceful_shutdown_timeout_s": config.drain,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
