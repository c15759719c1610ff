"""`exlm serve --ray` and `exlm batch --ray`: the same commands on a Ray cluster."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from exlm import InputError

if TYPE_CHECKING:
    from exlm.batch import Progress, Rows
    from exlm.scale import ClusterConfig
    from exlm.serve import Limits, ModelSpec

Ray = Annotated[
    bool, typer.Option("--ray", help="Use the running Ray cluster, or start one on this machine.")
]
Replicas = Annotated[
    str,
    typer.Option(
        metavar="N or LEAST..MOST", help="With --ray: copies of the model; 2..8 scales with the queue."
    ),
]
Gpus = Annotated[
    float | None,
    typer.Option(help="With --ray: GPUs per replica (tensor parallel); default 1 if the cluster has any."),
]


def refuse_without_ray(
    ray: bool, replicas: str, gpus: float | None, tenant_requests: int | None = None
) -> None:
    """Refuse options that need a cluster when --ray was not given."""
    given = {
        "--replicas": replicas != "1",
        "--gpus": gpus is not None,
        "--tenant-requests": tenant_requests is not None,
    }
    if not ray and any(given.values()):
        named = ", ".join(option for option, found in given.items() if found)
        raise InputError(f"{named}: only with --ray; without it one copy of the model runs, here.")


def cluster_shape(replicas: str, gpus: float | None, device: str | None, **more: Any) -> ClusterConfig:
    """The replicas and GPUs to use; without --gpus the cluster is asked whether it has any."""
    from exlm.scale import ClusterConfig, import_ray

    if gpus is None:
        gpus = float(device != "cpu" and import_ray().cluster_resources().get("GPU", 0) > 0)
    return ClusterConfig.from_replicas(replicas, gpus=gpus, tensor_parallel=max(1, int(gpus)), **more)


def serve_on_ray(
    listing: ModelSpec,
    keys: tuple[list[str], list[str]],
    bounds: Limits,
    shape: Callable[[str | None], ClusterConfig],
    limits: tuple[int | None, frozenset[str] | None],
    where: tuple[str, int],
    announce: Callable[[tuple[str, int]], None],
) -> None:
    """Deploy a service.

    A cluster that was running already keeps the service: the command returns, and running it again updates
    the deployment. A cluster that this command started serves until SIGINT or SIGTERM.
    """
    from exlm.scale import ServerConfig, Service, cluster, deploy, import_ray
    from exlm.serve import listen

    import_ray("serve")
    with cluster() as ours:
        if ours:
            with listen(*where) as free:  # fail now if the port is taken
                where = (where[0], free.getsockname()[1])
        deploy(Service(listing, ServerConfig(*keys, bounds), shape(listing.device), *limits), *where)
        announce(where)
        if not ours:
            return
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)
            signal.pause()
        except KeyboardInterrupt:
            import_ray("serve").shutdown()


def batch_on_ray(
    source: str,
    target: str,
    listing: ModelSpec,
    shape: Callable[[], ClusterConfig],
    run_identity: Callable[[ModelSpec, Rows], dict[str, Any]],
    with_progress_bar: Callable[..., None],
    console: Console,
) -> None:
    """Answer the requests in a file, a table or an object store, and write the answers to another."""
    from exlm.batch import Journal, is_answered
    from exlm.scale import (
        cluster,
        exists,
        import_ray,
        is_remote,
        read_requests,
        run_rows_on_ray,
        write_answers_anywhere,
    )

    import_ray("data")
    rows = read_requests(source)
    journal_path = Path(f"{Path(target).name if is_remote(target) else target}.journal")
    if exists(target) and not journal_path.exists():
        if is_remote(target) or not is_answered(Path(target), rows, listing.name):
            raise InputError(f"{target} is there already: move it away.")
        console.print(f"{target} has every answer already. To run the batch again, delete it.")
        return
    with closing(
        Journal(journal_path, run_identity(listing, rows), len(rows.rows), created=int(time.time()))
    ) as journal:
        if len(journal.done) < len(rows.rows):

            def work(tell: Callable[[Progress], object]) -> None:
                with cluster():
                    run_rows_on_ray(rows, journal, listing, shape(), tell)

            with_progress_bar(rows, journal, console, work)
        write_answers_anywhere(target, journal, rows)
        journal.remove()
