"""One model in several processes: what each one's share is, and how they speak to each other.

`shard` (pure) says who has what, `source` reads it, `modules` join the shares again, `group` adds and gathers
tensors, `wire` carries orders. Loading a model and following another process's orders is `model`'s business.
"""

from .group import Group, GroupBroken
from .leader import Leader
from .modules import Joint, Received, Sent, join
from .shard import Cut, check, cut_of, even, shard
from .source import LayersSource, ShardedSource
from .wire import Channel, Order

__all__ = [
    "Channel",
    "Cut",
    "Group",
    "GroupBroken",
    "Joint",
    "LayersSource",
    "Leader",
    "Order",
    "Received",
    "Sent",
    "ShardedSource",
    "check",
    "cut_of",
    "even",
    "join",
    "shard",
]
