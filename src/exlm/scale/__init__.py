"""The server and batches on a Ray cluster, with several replicas of a model.

`deploy` serves a `Service` with Ray Serve, behind an ingress that routes by prompt prefix; `run_rows_on_ray`
runs a batch with Ray Data. Only `cli` may import this package; it imports `exlm`, `serve` and `batch`, and
Ray itself (`exlm[scale]`) only when a function needs it.
"""

from .affinity import PrefixAffinity, prompt_blocks
from .cluster import ClusterConfig, ServerConfig, cluster, import_ray
from .deploy import Service, application, bind_application, deploy, service_from_config
from .ray_data import exists, is_remote, read_requests, run_rows_on_ray, write_answers_anywhere

__all__ = [
    "ClusterConfig",
    "PrefixAffinity",
    "ServerConfig",
    "Service",
    "application",
    "bind_application",
    "cluster",
    "deploy",
    "exists",
    "import_ray",
    "is_remote",
    "prompt_blocks",
    "read_requests",
    "run_rows_on_ray",
    "service_from_config",
    "write_answers_anywhere",
]

NAMES_OF_0_1 = {
    "Affinity": "PrefixAffinity",
    "Shape": "ClusterConfig",
    "Terms": "ServerConfig",
    "answer_rows": "run_rows_on_ray",
    "bound": "bind_application",
    "need_ray": "import_ray",
    "service_of": "service_from_config",
    "write_answers_to": "write_answers_anywhere",
}
"""Public names of version 0.1 that still work, and what they are called now."""

globals().update({old: globals()[new] for old, new in NAMES_OF_0_1.items()})
