"""One model in several processes: what each one's share is, and how they speak to each other.

`shard` (pure) says who has what, `source` reads it, `modules` join the shares again, `group` adds and gathers
tensors, `wire` carries orders. Loading a model and following another process's orders is `model`'s business.
"""

from .group import Group, GroupBroken
from .leader import Leader
from .modules import Received, Sent, join
from .shard import check, cut_of, even, shard
from .source import ShardedSource, StagedSource
from .wire import Channel, Order

__all__ = [
    "Channel",
    "Group",
    "GroupBroken",
    "Leader",
    "Order",
    "Received",
    "Sent",
    "ShardedSource",
    "StagedSource",
    "check",
    "cut_of",
    "even",
    "join",
    "shard",
]
