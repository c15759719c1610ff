"""Loads a model layer by layer, in plain float32 torch, with matrices that have hooks and can be replaced.

Only one layer of the model is in memory at a time, whatever format the files are in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint import WeightSource
from ..config import FrozenConfig
from ..convert.plan import dequantize_in_chunks
from ..formats import DenseWeight, PackedWeight, Weight
from ..kernels.dispatch import BackendList
from ..kernels.interface import AttnMetadata
from ..kernels.reference import ReferenceBackend
from ..kvcache.dense import NoCache
from ..model.builder import Builder
from ..nn import Batch, Embedding, Head, Linear
from ..nn.block import BlockLike

TensorHook = Callable[[Tensor], object]


class StopForward(Exception):
    """The inputs of a matrix were captured, and the rest of the forward pass is not needed."""


class HookedLinear:
    """A float matrix whose inputs and outputs can be captured, and which can be replaced."""

    def __init__(self, weight: DenseWeight) -> None:
        self.weight = weight.data  # (out, in)
        self.bias = weight.bias
        self.on_input: TensorHook | None = None
        self.on_output: TensorHook | None = None
        self.stops_forward = False  # raise StopForward once the input was captured

    def __call__(self, x: Tensor) -> Tensor:
        """x @ W + bias."""
        if self.on_input is not None:
            self.on_input(x)
        if self.stops_forward:
            raise StopForward
        flat = x.reshape(-1, x.shape[-1])  # torch is slower with other strides
        y = F.linear(flat, self.weight, self.bias).view(*x.shape[:-1], -1)
        if self.on_output is not None:
            self.on_output(y)
        return y


@dataclass
class LayerLoader(Builder):
    """Builds modules whose matrices are `HookedLinear`s, which `linears` has by role until `clear`."""

    linears: dict[str, HookedLinear] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of all modules."""
        return self.module_backends[0].device

    def read_linear(self, role: str) -> Callable[[], Linear]:
        """Read a matrix now and build its module later."""
        return partial(self.bind_linear, role, self.read_weight(role))

    def bind_linear(self, role: str, weight: Weight) -> Linear:
        """A matrix as a module, dequantised if it is packed."""
        if isinstance(weight, PackedWeight):
            bias = None if weight.bias is None else weight.bias.to(self.device, torch.float32)
            weight = DenseWeight(dequantize_in_chunks(weight).to(self.device, torch.float32), bias)
        assert isinstance(weight, DenseWeight)
        self.linears[role] = linear = HookedLinear(weight)
        return Linear(linear, weight.in_features, weight.out_features)

    def clear(self) -> None:
        """Forget everything that was built."""
        self.linears.clear()
        self._embedding_weight = None

    def load_layer(self, i: int) -> BlockLike:
        """A decoder layer; `linears` then has only its matrices."""
        self.clear()
        return self.block(i, self.model.layers[i])

    def load_head(self) -> Head:
        """The head; `linears` then has only its matrix."""
        self.clear()
        return self.head()

    def load_embedding(self) -> Embedding:
        """The embedding; its table is read anew each time rather than kept in memory."""
        self._embedding_weight = None
        embedding = self.embedding()
        self._embedding_weight = None
        return embedding


def layer_loader(config: FrozenConfig, source: WeightSource, length: int, device: torch.device) -> LayerLoader:
    """A loader for forward passes of at most `length` tokens per row."""
    backends = BackendList([ReferenceBackend(device, torch.float32)])
    return LayerLoader(config.spec, source, [backends] * (len(config.spec.layers) + 2), length)


class KVBuffer:
    """The keys and values of one layer, for rows that all have the same length, up to `length` tokens."""

    kv_pages = None
    state = None

    def __init__(self, length: int) -> None:
        self.length = length
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Append new keys and values (rows, tokens, heads, dim); returns all so far."""
        if self.buffers is None:
            shape = (k.shape[0], self.length, *k.shape[2:])
            self.buffers = k.new_empty(shape), v.new_empty(shape)
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            buffer[:, metadata.max_kv_len - new.shape[1] : metadata.max_kv_len] = new
        keys, values = self.buffers
        return keys[:, : metadata.max_kv_len], values[:, : metadata.max_kv_len]


def make_batch(ids: Tensor, past: int = 0) -> Batch:
    """Rows of ids (rows, tokens) as one forward pass, each row behind `past` cached tokens."""
    rows, tokens = ids.shape
    return Batch(
        ids=ids,
        positions=torch.arange(past, past + tokens, device=ids.device).expand(rows, -1),
        past_lens=torch.full((rows,), past, device=ids.device),
        page_table=torch.arange(rows, device=ids.device)[:, None],
        max_kv_len=past + tokens,
        uniform=True,
    )


def run_block(block: BlockLike, x: Tensor, batch: Batch) -> Tensor:
    """The hidden states behind one layer."""
    total, pending = block.forward(x, None, batch, NoCache())
    return total if pending is None else total + pending
