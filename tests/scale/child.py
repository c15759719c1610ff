"""A process with a Ray of its own: on loopback, two processors, a small object store. PORT is Ray Serve's.

Prints the cluster's address. A line of standard input is a service to deploy, as in a configuration file, or
null to stop serving; the reply is `ready`, or what went wrong. Everything ends with standard input.
"""

from __future__ import annotations

import json
import os
import sys

import ray
from ray import serve

from exlm.scale import deploy, service_from_config


def main(port: str) -> None:
    """Run commands from standard input until it ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints what it likes
    started = ray.init(
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _system_config={"worker_niceness": 0},  # by default its processes have a lower priority
        _node_ip_address="127.0.0.2",  # Ray replaces 127.0.0.1 by the network's address
    )
    try:
        print(started.address_info["gcs_address"], file=replies, flush=True)
        for line in sys.stdin:
            try:
                if (settings := json.loads(line)) is None:
                    serve.shutdown()
                else:
                    deploy(service_from_config(settings), port=int(port))
                print("ready", file=replies, flush=True)
            except Exception as error:
                print(f"{error!r}", file=replies, flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
