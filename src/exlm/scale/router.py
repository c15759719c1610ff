"""Ray Serve's request router, with the policy of `affinity`. Ray imports this module by its name."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .affinity import PrefixAffinity


class PrefixRouter(RequestRouter):
    """Routes by prompt prefix and load; a call carries the prompt's `blocks`."""

    def initialize_state(self, slack: int = 8) -> None:
        """Called once by Ray; `slack` is that of `PrefixAffinity`."""
        self.affinity = PrefixAffinity(slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas; Ray takes the first one that accepts the request."""
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        blocks = pending_request.kwargs.get("blocks", ()) if pending_request else ()
        ranked = self.affinity.rank(blocks, {name: self._load(one) for name, one in named.items()})
        if ranked:  # not later: the next request with this prompt may already wait
            self.affinity.record(blocks, ranked[0])
        return [[named[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record the replica that accepted a request, which may not be the first choice."""
        self.affinity.record(pending_request.kwargs.get("blocks", ()), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.affinity.retain({replica.replica_id.unique_id for replica in replicas})

    def _load(self, replica: RunningReplica) -> int:
        """Queue length of a replica over all routers, as Ray last knew it; 0 if unknown."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
