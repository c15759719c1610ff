"""Beyond one machine: the server and batches on a Ray cluster. Ray itself (`exlm[scale]`) is loaded late."""

from .affinity import Affinity, blocks_of
from .bulk import answer_rows
from .cluster import cluster, need_ray
from .deploy import Service, application, bound, deploy, service_of
from .replica import Terms
from .shape import Shape
from .tables import exists, is_remote, read_requests, write_answers_to

__all__ = [
    "Affinity",
    "Service",
    "Shape",
    "Terms",
    "answer_rows",
    "application",
    "blocks_of",
    "bound",
    "cluster",
    "deploy",
    "exists",
    "is_remote",
    "need_ray",
    "read_requests",
    "service_of",
    "write_answers_to",
]
