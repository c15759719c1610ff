"""One layer at a time: modules built when they are needed, with matrices that can be heard and changed.

Everything is plain torch in float32, whatever the files hold. What is done with what is heard is not known
here.
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
    """The matrix that was waited for has been asked; what comes behind it need not be computed."""


class HookedLinear:
    """A matrix of floats: listened to where somebody asked for it, and replaceable."""

    def __init__(self, weight: DenseWeight) -> None:
        self.data = weight.data  # (out, in)
        self.bias = weight.bias
        self.on_input: TensorHook | None = None
        self.on_output: TensorHook | None = None
        self.stops_forward = False  # whether the computation may end here

    def __call__(self, x: Tensor) -> Tensor:
        """x @ W + bias."""
        if self.on_input is not None:
            self.on_input(x)
        if self.stops_forward:
            raise StopForward
        flat = x.reshape(-1, x.shape[-1])  # rows one after the other: others take torch's slow ways
        y = F.linear(flat, self.data, self.bias).view(*x.shape[:-1], -1)
        if self.on_output is not None:
            self.on_output(y)
        return y


@dataclass
class LayerLoader(Builder):
    """Builds modules whose every matrix is a `Tap`, kept by role until `clear`."""

    linears: dict[str, HookedLinear] = field(default_factory=dict)

    def prepare(self, role: str) -> Callable[[], Linear]:
        """A matrix is read at once and becomes a tap when it is wanted."""
        return partial(self.bind_linear, role, self.read_weight(role))

    def bind_linear(self, role: str, weight: Weight) -> Linear:
        """A matrix, unpacked if it must be."""
        if isinstance(weight, PackedWeight):
            device, dtype = self.backends.device, self.backends.dtype
            bias = None if weight.bias is None else weight.bias.to(device, dtype)
            weight = DenseWeight(dequantize_in_chunks(weight).to(device, dtype), bias)
        assert isinstance(weight, DenseWeight)
        self.linears[role] = tap = HookedLinear(weight)
        return Linear(tap, weight.in_features, weight.out_features)

    def clear(self) -> None:
        """Let go of all that was built."""
        self.linears.clear()
        self._embedding_weight = None

    def load_layer(self, i: int) -> BlockLike:
        """A layer, and only its taps."""
        self.clear()
        return self.block(i, self.model.layers[i])

    def load_head(self) -> Head:
        """The head, and only its tap."""
        self.clear()
        return self.head()

    def load_embedding(self) -> Embedding:
        """The embedding; its table is read again each time, so that it need not be kept."""
        self._embedding_weight = None
        made = self.embedding()
        self._embedding_weight = None
        return made


def layer_loader(
    config: FrozenConfig, source: WeightSource, length: int, device: torch.device
) -> LayerLoader:
    """A builder for rows of at most `length` tokens."""
    return LayerLoader(config.spec, source, BackendList([ReferenceBackend(device, torch.float32)]), length)


class KVBuffer:
    """One layer's keys and values of rows that are all equally long, up to `length` tokens."""

    paged = None

    def __init__(self, length: int) -> None:
        self.length = length
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Keep the new heads and return all there are."""
        if self.buffers is None:
            shape = (k.shape[0], self.length, *k.shape[2:])
            self.buffers = k.new_empty(shape), v.new_empty(shape)
        for kept, new in zip(self.buffers, (k, v), strict=True):
            kept[:, metadata.max_kv_len - new.shape[1] : metadata.max_kv_len] = new
        keys, values = self.buffers
        return keys[:, : metadata.max_kv_len], values[:, : metadata.max_kv_len]


def make_batch(ids: Tensor, past: int = 0) -> Batch:
    """Rows of ids as one forward pass, behind `past` tokens that every row has."""
    rows, tokens = ids.shape
    return Batch(
        ids=ids,
        positions=torch.arange(past, past + tokens, device=ids.device).expand(rows, -1),
        past_lens=torch.full((rows,), past, device=ids.device),
        pages=torch.arange(rows, device=ids.device)[:, None],
        max_kv_len=past + tokens,
        uniform=True,
    )


def run_block(block: BlockLike, x: Tensor, batch: Batch) -> Tensor:
    """The residual stream through one layer."""
    total, more = block.forward(x, None, batch, NoCache())
    return total if more is None else total + more
