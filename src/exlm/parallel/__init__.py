"""One model in several processes, as far as it needs no loader: shards, collectives, messages, launch.

`shard` (pure) computes each rank's part of every matrix, `sharded_source` reads it, `modules` combine the
ranks' outputs, `comm` has collectives and messages, `launch` starts workers and `driver` is rank 0's hold on
them. `model` imports it for tensor and pipeline parallel (`model.strategies`, `parallel_driver`,
`parallel_worker`).
"""

from .comm import Channel, Group, GroupBroken, Message
from .driver import RankDriver
from .modules import BroadcastEmbedding, RankCombiner, ReceivedEmbedding, combine_ranks
from .shard import MatrixSlice, check_shardable, shard, slice_of, split_evenly
from .sharded_source import LayersSource, ShardedSource

__all__ = [
    "BroadcastEmbedding",
    "Channel",
    "Group",
    "GroupBroken",
    "LayersSource",
    "MatrixSlice",
    "Message",
    "RankCombiner",
    "RankDriver",
    "ReceivedEmbedding",
    "ShardedSource",
    "check_shardable",
    "combine_ranks",
    "shard",
    "slice_of",
    "split_evenly",
]
