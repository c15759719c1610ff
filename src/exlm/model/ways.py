"""The two ways to divide a model among processes: a share of every layer each, or a run of layers each."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import parallel
from ..config import FrozenConfig
from ..errors import Unsupported
from ..nn import Batch
from ..parallel import Group, LayersSource, Received, Sent, ShardedSource, cut_of, even, join, shard
from .adapting import Held
from .decoder import Decoder
from .devices import Slot
from .loading import Loaded, Yielding, load_steps, opened
from .progress import Callback
from .staging import staged

Loading = Generator[Any, None, Loaded]


class Way(Protocol):
    """How a model is divided among ranks."""

    def check(self, config: FrozenConfig, size: int) -> None:
        """Refuse what cannot be divided among so many."""
        ...

    def load(
        self,
        config: FrozenConfig,
        rank: int,
        size: int,
        slot: Slot,
        callback: Callback,
        also: Yielding | None,
    ) -> Loading:
        """Read and bind what is a rank's."""
        ...

    def connect(self, loaded: Loaded, config: FrozenConfig, group: Group) -> Decoder:
        """The rank's part of the whole model, which `config` describes."""
        ...

    def held(self, config: FrozenConfig, role: str, rank: int, size: int) -> Held | None:
        """What a rank has of a role's matrix; None if nothing."""
        ...


class Tensors:
    """Every rank has a share of each layer, and rank 0 the embedding."""

    def check(self, config: FrozenConfig, size: int) -> None:
        """By heads, widths and norms."""
        parallel.check(config.spec, size)

    def load(
        self,
        config: FrozenConfig,
        rank: int,
        size: int,
        slot: Slot,
        callback: Callback,
        also: Yielding | None,
    ) -> Loading:
        """Narrow layers."""
        source = ShardedSource(staged(opened(config), [slot]), config.spec, rank, size)
        narrow = replace(config, spec=shard(config.spec, rank, size))
        slots = [slot] * (len(config.spec.layers) + 2)
        return load_steps(narrow, source, slots, callback, also, embeds=rank == 0)

    def connect(self, loaded: Loaded, config: FrozenConfig, group: Group) -> Decoder:
        """Sums and gathers where shares meet."""
        decoder = loaded.decoder
        join(decoder, config.spec, group)
        if group.rank == 0:
            decoder.embedding = Sent(group, decoder.embedding)
        else:
            decoder.embedding = Received(group, config.spec.hidden, _stream(loaded))
        return decoder

    def held(self, config: FrozenConfig, role: str, rank: int, size: int) -> Held | None:
        """A part of it, or all of what everybody has."""
        if role == "embed" and rank > 0:
            return None
        return Held(role, cut_of(config.spec, role, rank, size))


class Pipeline:
    """Every rank has a run of layers; the first has the embedding too, the last the head."""

    def check(self, config: FrozenConfig, size: int) -> None:
        """By layers."""
        depth = len(config.spec.layers)
        if size > depth:
            raise Unsupported(
                f"{size} ranks cannot have a layer each of a model of {depth}: use fewer ranks."
            )

    def load(
        self,
        config: FrozenConfig,
        rank: int,
        size: int,
        slot: Slot,
        callback: Callback,
        also: Yielding | None,
    ) -> Loading:
        """Fewer layers."""
        first, last = even(len(config.spec.layers), size)[rank]
        stage = replace(config, spec=replace(config.spec, layers=config.spec.layers[first:last]))
        source, slots = LayersSource(staged(opened(config), [slot]), first), [slot] * (last - first + 2)
        ends = {"embeds": rank == 0, "heads": rank == size - 1}
        return load_steps(stage, source, slots, callback, also, **ends)

    def connect(self, loaded: Loaded, config: FrozenConfig, group: Group) -> Decoder:
        """States handed on from rank to rank, and the answer back to the first."""
        return Stage(loaded.decoder, group, config.spec.hidden, config.spec.vocab, _stream(loaded))

    def held(self, config: FrozenConfig, role: str, rank: int, size: int) -> Held | None:
        """All of it, on the one rank that has it."""
        first, last = even(len(config.spec.layers), size)[rank]
        match role.split(".", 2):
            case ["layers", layer, rest]:
                return Held(f"layers.{int(layer) - first}.{rest}") if first <= int(layer) < last else None
            case ["embed"]:
                return Held(role) if rank == 0 else None
        return Held(role) if rank == size - 1 else None


class Stage(Decoder):
    """A run of layers between two other ranks."""

    def __init__(self, decoder: Decoder, group: Group, hidden: int, vocab: int, stream: torch.dtype) -> None:
        super().__init__(decoder.embedding, decoder.blocks, decoder.head, decoder.hops)
        self.group, self.hidden, self.vocab, self.stream = group, hidden, vocab, stream

    def heard(self, batch: Batch) -> bool:
        """The next rank always asks."""
        return self.group.rank < self.group.size - 1 or super().heard(batch)

    def enter(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The embedding's answer, or the state that the rank before hands on."""
        if self.group.rank == 0:
            return super().enter(batch)
        state = self._room(2, *batch.ids.shape, self.hidden, dtype=self.stream)
        x, more = self.group.receive(state, self.group.rank - 1)
        return x, more

    def leave(self, x: Tensor, more: Tensor | None, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """Hand the state on; the last rank's answer goes to the first."""
        rank, last = self.group.rank, self.group.size - 1
        if rank == last:
            logits, state = super().leave(x, more, batch)
            if logits is not None:
                self.group.send(logits, 0)
                self.group.send(state, 0)
            return logits, state
        more = torch.zeros_like(x) if more is None else more.to(x.dtype)
        self.group.send(torch.stack((x, more)), rank + 1)
        if rank > 0 or batch.outputs == "none":
            return None, x
        rows, tokens = batch.ids.shape
        tokens = 1 if batch.outputs == "last" else tokens
        logits = self.group.receive(self._room(rows, tokens, self.vocab, dtype=torch.float32), last)
        return logits, self.group.receive(self._room(rows, tokens, self.hidden, dtype=self.stream), last)

    def _room(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.group.device)


WAYS: dict[str, Way] = {"tensors": Tensors(), "pipeline": Pipeline()}


def _stream(loaded: Loaded) -> torch.dtype:
    """The precision of what flows from block to block."""
    return torch.float32 if loaded.config.spec.wide_residual else loaded.chains[0].dtype
