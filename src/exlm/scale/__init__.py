"""Beyond one machine: the server and batches on a Ray cluster. Ray itself (`exlm[scale]`) is loaded late."""

from .affinity import PrefixAffinity, prompt_blocks
from .cluster import cluster, import_ray
from .config import ClusterConfig
from .deploy import Service, application, bind_application, deploy, service_from_config
from .ray_data import run_rows_on_ray
from .replica import ServerConfig
from .storage import exists, is_remote, read_requests, write_answers_anywhere

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
