"""The parts of running one model in several processes that need no loader: shards, collectives, messages.

`shard` computes each rank's part of every matrix and reads it, `modules` combine the ranks' outputs, `comm`
has collectives and messages, `workers` starts, controls and stops the processes. `model` imports it for
tensor and pipeline parallel (`model.strategies`, `model.multiprocess`).
"""

from .comm import Channel, Group, GroupBroken, Message
from .modules import BroadcastEmbedding, RankCombiner, ReceivedEmbedding, combine_ranks
from .shard import (
    LayerRangeSource,
    MatrixSlice,
    ShardedSource,
    check_pipelined,
    check_shardable,
    shard_spec,
    slice_of_rank,
    split_evenly,
)
from .workers import RankDriver

__all__ = [
    "BroadcastEmbedding",
    "Channel",
    "Group",
    "GroupBroken",
    "LayerRangeSource",
    "MatrixSlice",
    "Message",
    "RankCombiner",
    "RankDriver",
    "ReceivedEmbedding",
    "ShardedSource",
    "check_pipelined",
    "check_shardable",
    "combine_ranks",
    "shard_spec",
    "slice_of_rank",
    "split_evenly",
]
