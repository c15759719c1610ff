"""The two ways to divide a model among processes: a share of every layer each, or a run of layers each."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .. import parallel
from ..config import FrozenConfig
from ..errors import Unsupported
from ..nn import Batch
from ..parallel import (
    BroadcastEmbedding,
    Group,
    LayersSource,
    MatrixSlice,
    ReceivedEmbedding,
    ShardedSource,
    combine_ranks,
    shard,
    slice_of,
    split_evenly,
)
from .decoder import Decoder
from .devices import DeviceInfo
from .instance import LoadProgress, LoadSteps, ModelInstance, load_modules, open_checkpoint


class RoleShard(NamedTuple):
    """What a rank has of a role's matrix: its name there, and which part; None is all of it."""

    role: str
    cut: MatrixSlice | None = None


class ParallelStrategy(Protocol):
    """How a model is divided among ranks."""

    def check(self, config: FrozenConfig, size: int) -> None:
        """Refuse what cannot be divided among so many."""
        ...

    def load(
        self,
        config: FrozenConfig,
        rank: int,
        size: int,
        device_info: DeviceInfo,
        progress: LoadProgress,
    ) -> LoadSteps:
        """Read and bind what is a rank's."""
        ...

    def connect(self, loaded: ModelInstance, config: FrozenConfig, group: Group) -> Decoder:
        """The rank's part of the whole model, which `config` describes."""
        ...

    def role_shard(self, config: FrozenConfig, role: str, rank: int, size: int) -> RoleShard | None:
        """What a rank has of a role's matrix; None if nothing."""
        ...


class TensorParallel:
    """Every rank has a share of each layer, and rank 0 the embedding."""

    def check(self, config: FrozenConfig, size: int) -> None:
        """By heads, widths and norms."""
        parallel.check_shardable(config.spec, size)

    def load(
        self,
        config: FrozenConfig,
        rank: int,
        size: int,
        device_info: DeviceInfo,
        progress: LoadProgress,
    ) -> LoadSteps:
        """Narrow layers."""
        source = ShardedSource(open_checkpoint(config), config.spec, rank, size)
        narrow = replace(config, spec=shard(config.spec, rank, size))
        device_infos = [device_info] * (len(config.spec.layers) + 2)
        return load_modules(narrow, source, device_infos, progress, has_embedding=rank == 0)

    def connect(self, loaded: ModelInstance, config: FrozenConfig, group: Group) -> Decoder:
        """Sums and gathers where shares meet."""
        decoder = loaded.decoder
        combine_ranks(decoder, config.spec, group)
        if group.rank == 0:
            decoder.embedding = BroadcastEmbedding(group, decoder.embedding)
        else:
            decoder.embedding = ReceivedEmbedding(group, config.spec.hidden, _residual_dtype(loaded))
        return decoder

    def role_shard(self, config: FrozenConfig, role: str, rank: int, size: int) -> RoleShard | None:
        """A part of it, or all of what everybody has."""
        if role == "embed" and rank > 0:
            return None
        return RoleShard(role, slice_of(config.spec, role, rank, size))


class PipelineParallel:
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
        device_info: DeviceInfo,
        progress: LoadProgress,
    ) -> LoadSteps:
        """Fewer layers."""
        first, last = split_evenly(len(config.spec.layers), size)[rank]
        stage = replace(config, spec=replace(config.spec, layers=config.spec.layers[first:last]))
        source = LayersSource(open_checkpoint(config), first)
        device_infos = [device_info] * (last - first + 2)
        endpoints = {"has_embedding": rank == 0, "has_head": rank == size - 1}
        return load_modules(stage, source, device_infos, progress, **endpoints)

    def connect(self, loaded: ModelInstance, config: FrozenConfig, group: Group) -> Decoder:
        """States handed on from rank to rank, and the answer back to the first."""
        return PipelineStage(
            loaded.decoder, group, config.spec.hidden, config.spec.vocab, _residual_dtype(loaded)
        )

    def role_shard(self, config: FrozenConfig, role: str, rank: int, size: int) -> RoleShard | None:
        """All of it, on the one rank that has it."""
        first, last = split_evenly(len(config.spec.layers), size)[rank]
        match role.split(".", 2):
            case ["layers", layer, rest]:
                return (
                    RoleShard(f"layers.{int(layer) - first}.{rest}") if first <= int(layer) < last else None
                )
            case ["embed"]:
                return RoleShard(role) if rank == 0 else None
        return RoleShard(role) if rank == size - 1 else None


class PipelineStage(Decoder):
    """A run of layers between two other ranks."""

    def __init__(
        self, decoder: Decoder, group: Group, hidden: int, vocab: int, residual_dtype: torch.dtype
    ) -> None:
        super().__init__(decoder.embedding, decoder.blocks, decoder.head, decoder.transfers)
        self.group, self.hidden, self.vocab, self.residual_dtype = group, hidden, vocab, residual_dtype

    def needs_output(self, batch: Batch) -> bool:
        """The next rank always asks."""
        return self.group.rank < self.group.size - 1 or super().needs_output(batch)

    def input_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The embedding's answer, or the state that the rank before hands on."""
        if self.group.rank == 0:
            return super().input_hidden(batch)
        state = self._empty(2, *batch.ids.shape, self.hidden, dtype=self.residual_dtype)
        x, pending_residual = self.group.receive(state, self.group.rank - 1)
        return x, pending_residual

    def output_logits(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor | None, Tensor]:
        """Hand the state on; the last rank's answer goes to the first."""
        rank, last = self.group.rank, self.group.size - 1
        if rank == last:
            logits, state = super().output_logits(x, pending_residual, batch)
            if logits is not None:
                self.group.send(logits, 0)
                self.group.send(state, 0)
            return logits, state
        pending_residual = torch.zeros_like(x) if pending_residual is None else pending_residual.to(x.dtype)
        self.group.send(torch.stack((x, pending_residual)), rank + 1)
        if rank > 0 or batch.outputs == "none":
            return None, x
        rows, tokens = batch.ids.shape
        tokens = 1 if batch.outputs == "last" else tokens
        logits = self.group.receive(self._empty(rows, tokens, self.vocab, dtype=torch.float32), last)
        return logits, self.group.receive(
            self._empty(rows, tokens, self.hidden, dtype=self.residual_dtype), last
        )

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.group.device)


STRATEGIES: dict[str, ParallelStrategy] = {"tensors": TensorParallel(), "pipeline": PipelineParallel()}


def _residual_dtype(loaded: ModelInstance) -> torch.dtype:
    """The precision of what flows from block to block."""
    return torch.float32 if loaded.config.spec.fp32_residual else loaded.module_backends[0].dtype
