"""Tensor parallel and pipeline parallel: how a model is divided among processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import FrozenConfig
from ..errors import Unsupported
from ..nn import Batch
from ..parallel import (
    BroadcastEmbedding,
    Group,
    LayerRangeSource,
    MatrixSlice,
    ReceivedEmbedding,
    ShardedSource,
    check_pipelined,
    check_shardable,
    combine_ranks,
    shard_spec,
    slice_of_rank,
    split_evenly,
)
from .decoder import Decoder
from .devices import DeviceInfo
from .loader import LoadedModel, LoadProgress, LoadSteps, load_modules


class RoleShard(NamedTuple):
    """A rank's shard of a role's matrix."""

    role: str  # the role's name on that rank
    part: MatrixSlice | None = None  # None: the whole matrix


class ParallelStrategy(ABC):
    """How the model that `config` describes is divided among `size` ranks."""

    def __init__(self, config: FrozenConfig, size: int) -> None:
        self.config, self.size = config, size
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Raise `Unsupported` if the model cannot be divided among so many ranks."""

    @abstractmethod
    def load(self, rank: int, device_info: DeviceInfo, progress: LoadProgress) -> LoadSteps:
        """Load a rank's shard."""

    @abstractmethod
    def connect(self, loaded: LoadedModel, group: Group) -> Decoder:
        """The decoder of a rank's shard, connected to the other ranks."""

    @abstractmethod
    def role_shard(self, role: str, rank: int) -> RoleShard | None:
        """A rank's shard of a role's matrix; None if it has none."""


class TensorParallel(ParallelStrategy):
    """Every rank has a part of each layer; rank 0 also has the embedding."""

    def check(self) -> None:
        check_shardable(self.config.spec, self.size)

    def load(self, rank: int, device_info: DeviceInfo, progress: LoadProgress) -> LoadSteps:
        """Load all layers, with fewer heads and narrower MLPs."""
        model = self.config.spec
        source = ShardedSource(self.config.open_checkpoint(), model, rank, self.size)
        sharded_config = replace(self.config, spec=shard_spec(model, rank, self.size))
        device_infos = [device_info] * (len(model.layers) + 2)
        return load_modules(sharded_config, source, device_infos, progress, has_embedding=rank == 0)

    def connect(self, loaded: LoadedModel, group: Group) -> Decoder:
        """Add all-reduces, the head's gather and the embedding's broadcast."""
        decoder, model = loaded.decoder, self.config.spec
        combine_ranks(decoder, model, group)
        if group.rank == 0:
            decoder.embedding = BroadcastEmbedding(group, decoder.embedding)
        else:
            decoder.embedding = ReceivedEmbedding(group, model.hidden, _residual_dtype(loaded))
        return decoder

    def role_shard(self, role: str, rank: int) -> RoleShard | None:
        """A slice of a cut matrix, all of a replicated one."""
        if role == "embed" and rank > 0:
            return None
        return RoleShard(role, slice_of_rank(self.config.spec, role, rank, self.size))


class PipelineParallel(ParallelStrategy):
    """Every rank has consecutive layers; the first also has the embedding, the last the head."""

    def check(self) -> None:
        count = len(self.config.spec.layers)
        if self.size > count:
            raise Unsupported(f"{self.size} ranks cannot have a layer each of a model of {count}: use fewer ranks.")
        check_pipelined(self.config.spec)

    def load(self, rank: int, device_info: DeviceInfo, progress: LoadProgress) -> LoadSteps:
        first, last = self._layers_of(rank)
        model = self.config.spec
        stage_config = replace(self.config, spec=replace(model, layers=model.layers[first:last]))
        source = LayerRangeSource(self.config.open_checkpoint(), first)
        device_infos = [device_info] * (last - first + 2)
        has_ends = {"has_embedding": rank == 0, "has_head": rank == self.size - 1}
        return load_modules(stage_config, source, device_infos, progress, **has_ends)

    def connect(self, loaded: LoadedModel, group: Group) -> Decoder:
        """Send hidden states from rank to rank, and the logits to rank 0."""
        model = self.config.spec
        return PipelineStage(loaded.decoder, group, model.hidden, model.vocab, _residual_dtype(loaded))

    def role_shard(self, role: str, rank: int) -> RoleShard | None:
        """The whole matrix, on the rank that has its layer."""
        first, last = self._layers_of(rank)
        match role.split(".", 2):
            case ["layers", layer, rest]:
                return RoleShard(f"layers.{int(layer) - first}.{rest}") if first <= int(layer) < last else None
            case ["embed"]:
                return RoleShard(role) if rank == 0 else None
        return RoleShard(role) if rank == self.size - 1 else None

    def _layers_of(self, rank: int) -> tuple[int, int]:
        return split_evenly(len(self.config.spec.layers), self.size)[rank]


class PipelineStage(Decoder):
    """The decoder of one pipeline stage."""

    def __init__(self, decoder: Decoder, group: Group, hidden: int, vocab: int, residual_dtype: torch.dtype) -> None:
        super().__init__(decoder.embedding, decoder.blocks, decoder.head, decoder.transfers)
        self.group, self.hidden, self.vocab, self.residual_dtype = group, hidden, vocab, residual_dtype

    def needs_output(self, batch: Batch) -> bool:
        """Also if another stage follows."""
        return self.group.rank < self.group.size - 1 or super().needs_output(batch)

    def input_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The embedding's output on rank 0, elsewhere the hidden state of the previous stage."""
        if self.group.rank == 0:
            return super().input_hidden(batch)
        state = self._empty(2, *batch.ids.shape, self.hidden, dtype=self.residual_dtype)
        x, pending_residual = self.group.receive(state, self.group.rank - 1)
        return x, pending_residual

    def output_logits(self, x: Tensor, pending_residual: Tensor | None, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """Send the hidden state to the next stage; the last one sends logits and state to rank 0."""
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
        return logits, self.group.receive(self._empty(rows, tokens, self.hidden, dtype=self.residual_dtype), last)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.group.device)


STRATEGIES: dict[str, type[ParallelStrategy]] = {"tensor": TensorParallel, "pipeline": PipelineParallel}


def _residual_dtype(loaded: LoadedModel) -> torch.dtype:
    """The precision of the residual stream."""
    return torch.float32 if loaded.config.spec.fp32_residual else loaded.dtype
