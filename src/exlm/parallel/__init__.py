"""One model in several processes: what each one's share is, and how they speak to each other.

`shard` (pure) says who has what, `source` reads it, `modules` join the shares again, `group` adds and gathers
tensors, `wire` carries orders. Loading a model and following another process's orders is `model`'s business.
"""

from .group import Group, GroupBroken
from .leader import RankDriver
from .modules import BroadcastEmbedding, RankCombiner, ReceivedEmbedding, combine_ranks
from .shard import MatrixSlice, check_shardable, shard, slice_of, split_evenly
from .source import LayersSource, ShardedSource
from .wire import Channel, Message

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
