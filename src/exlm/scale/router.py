"""Ray Serve's question, which replica, answered by `affinity`. Ray imports this file where it routes."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .affinity import PrefixAffinity


class PrefixRouter(RequestRouter):
    """Sends prompts that begin alike to the same replica, load permitting; `blocks` comes with the call."""

    def initialize_state(self, slack: int = 8) -> None:
        """Called once by Ray; `slack` is that of `Affinity`."""
        self.affinity = PrefixAffinity(slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Every replica, best first; Ray takes the first one that has room."""
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        blocks = pending_request.kwargs.get("blocks", ()) if pending_request else ()
        ranked = self.affinity.rank(blocks, {name: self._load(one) for name, one in named.items()})
        if ranked:  # before it is routed: the next request with this prompt may be a moment away
            self.affinity.record(blocks, ranked[0])
        return [[named[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A request was accepted, if not by the first choice."""
        self.affinity.record(pending_request.kwargs.get("blocks", ()), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas came or went."""
        super().update_replicas(replicas)
        self.affinity.keep({replica.replica_id.unique_id for replica in replicas})

    def _load(self, replica: RunningReplica) -> int:
        """Requests that a replica has, everybody's, as Ray last heard; unknown is none."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
