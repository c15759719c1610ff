"""What keeps the ranks of one model in step.

On rank 0 a `Led` decoder tells the followers of each pass before it takes it and hands them their parts of
adapters; a `Mirrored` tells them what is done to caches. Everything above, `forward`, a runner, a generator,
works as with a model in one process.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import Cache, CacheBase, CacheFP8, CacheFP16, CacheQ4, CacheQ6, CacheQ8, Layer
from ..errors import InputError, Unsupported
from ..kernels.backend import KeyValues
from ..lora import InstallLora, RemoveLora
from ..nn import Active, Batch
from ..parallel import Leader, Order
from . import adapting
from .adapting import Held, part
from .decoder import Decoder

Holding = Callable[[str, int], Held | None]
"""Role and rank → what the rank has of it."""

KINDS: dict[str, type[CacheBase]] = {
    kind.__name__: kind for kind in (Cache, CacheFP16, CacheQ8, CacheQ6, CacheQ4, CacheFP8)
}


class Mirrored:
    """The numbers by which followers know caches and their layers."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self._numbers: weakref.WeakKeyDictionary[CacheBase | Layer, int] = weakref.WeakKeyDictionary()
        self._next = 0
        self._dropped: deque[int] = deque()  # by the garbage collector, at a moment when nobody may be told

    def number(self, layers: Sequence[KeyValues]) -> int | None:
        """Which cache has these layers; None: there is no cache."""
        first = layers[0]
        return self._known(first) if isinstance(first, Layer) else None

    def made(self, cache: CacheBase) -> None:
        """Give it a number; the followers make their own parts."""
        if type(cache) not in KINDS.values():
            known = ", ".join(KINDS)
            raise Unsupported(f"Other processes cannot make a {type(cache).__name__}: use one of {known}.")
        values = {
            "kind": type(cache).__name__,
            "batch_size": cache.batch_size,
            "max_seq_len": cache.max_seq_len,
            "dtype": str(cache.dtype).removeprefix("torch."),
        }
        self._tell("cache", self._register(cache), values)

    def cloned(self, cache: CacheBase, twin: CacheBase) -> None:
        """The followers clone theirs."""
        self._tell("clone", self._register(twin), {"of": self._known(cache)})

    def done(self, cache: CacheBase, what: str, *values: object, target: CacheBase | None = None) -> None:
        """The followers do the same."""
        other = None if target is None else self._known(target)
        self._tell("did", self._known(cache), {"what": what, "values": values, "target": other})

    def _known(self, one: CacheBase | Layer) -> int:
        if one not in self._numbers:
            raise InputError("This cache was made before the model was loaded as it is now: make a new one.")
        return self._numbers[one]

    def _register(self, cache: CacheBase) -> int:
        self._next += 1
        self._numbers[cache] = self._next
        for layer in cache.layers:
            self._numbers[layer] = self._next
        weakref.finalize(cache, self._dropped.append, self._next)
        return self._next

    def _tell(self, do: str, number: int, values: dict[str, object]) -> None:
        self.leader.tell(Order(do, {"number": number, "dropped": self.drops(), **values}))

    def drops(self) -> list[int]:
        """Caches that are no longer needed, to be told once."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


class Led(Decoder):
    """Rank 0's decoder: the others take every pass with it."""

    def __init__(self, decoder: Decoder, mirror: Mirrored, held: Holding, device: torch.device) -> None:
        super().__init__(decoder.embedding, decoder.blocks, decoder.head, decoder.hops)
        self.inner, self.mirror, self.held, self.device = decoder, mirror, held, device

    def forward(self, batch: Batch, layers: Sequence[KeyValues]) -> tuple[Tensor | None, Tensor]:
        """The pass, on every rank; the answer is complete on this one."""
        order = pack(batch, self.mirror.number(layers), self.mirror.drops())
        return self.mirror.leader.together(order, lambda: self.inner.forward(batch, layers))

    def replace(self, role: str, change: Callable[[Any], Any]) -> None:
        """An adapter goes in or out, on every rank that has a part of the module."""
        if not isinstance(change, InstallLora | RemoveLora):
            raise TypeError(f"other processes cannot be handed {change!r}")
        leader = self.mirror.leader
        if isinstance(change, RemoveLora) and leader.lost is not None:
            return  # and everything with it
        for rank in range(len(leader.channels) + 1):
            held = self.held(change.role, rank)
            if held is None:
                continue
            own = part(change, held)
            if rank > 0:
                leader.tell_one(rank, adapting.pack(own))
            else:
                self.inner.replace(own.module_role, own.to(self.device))


def pack(batch: Batch, cache: int | None, dropped: list[int]) -> Order:
    """A batch as an order: all of it but what only the embedding reads."""
    tensors = {name: getattr(batch, name) for name in ("ids", "positions", "past", "pages", "mask")}
    return Order(
        "forward",
        {
            "number": cache,
            "dropped": dropped,
            "longest": batch.longest,
            "even": batch.even,
            "outputs": batch.outputs,
            "adapters": batch.adapters,
        },
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
    )


def unpack(order: Order, device: torch.device) -> Batch:
    """The batch of an order, on a device."""
    given: dict[str, Any] = {name: tensor.to(device) for name, tensor in order.tensors.items()}
    given |= {name: order.values[name] for name in ("longest", "even", "outputs")}
    adapters = tuple(tuple(Active(*one) for one in row) for row in order.values["adapters"])
    return Batch(**given, adapters=adapters)
