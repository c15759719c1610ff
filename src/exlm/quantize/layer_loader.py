"""Loads a model layer by layer, in plain float32 torch, with matrices that have hooks and can be replaced.

Only one layer of the model is in memory at a time, whatever format the files are in. A backward pass through a
recurrence would keep the state behind every token; `SegmentedRecurrence` keeps those between segments and computes
the others again (gradient checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import spec
from ..checkpoint import WeightSource
from ..config import FrozenConfig
from ..convert.plan import dequantize_in_chunks
from ..formats import DenseWeight, PackedWeight, Weight
from ..kernels.dispatch import BackendList
from ..kernels.interface import (
    AttnMetadata,
    DeltaNetFn,
    DeltaNetParams,
    Mamba2Fn,
    Mamba2Params,
    RecurrentState,
    StateSlots,
)
from ..kernels.reference import ReferenceBackend
from ..kvcache.dense import NoCache
from ..model.builder import Builder
from ..nn import Batch, Embedding, Head, Linear
from ..nn.block import BlockLike

TensorHook = Callable[[Tensor], object]

SEGMENT_TOKENS = 32
"""Tokens of a segment: a backward pass keeps one state for each segment, and those of one segment's tokens."""


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


class SegmentedRecurrence:
    """A recurrent kernel whose backward pass recomputes it, segment by segment."""

    def __init__(self, kernel: Callable[..., Tensor], shape: spec.StateShape) -> None:
        self.kernel, self.shape = kernel, shape

    def __call__(self, *arguments: Any) -> Tensor:
        """The kernel's output for (its inputs, (rows, tokens, …) each, states, metadata)."""
        *inputs, state, metadata = arguments
        if state is not None or not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            return self.kernel(*arguments)
        rows, tokens = inputs[0].shape[:2]
        states = [inputs[0].new_zeros(rows, *shape) for shape in (self.shape.conv, self.shape.matrix) if shape]
        outputs = []
        for start in range(0, tokens, SEGMENT_TOKENS):
            part = [x[:, start : start + SEGMENT_TOKENS] for x in inputs]
            # Reentrant: the other kind of checkpoint leaves objects between the freed states, which fragment the heap.
            output, *states = checkpoint(
                self._segment, metadata, len(states), *states, *part, use_reentrant=True, preserve_rng_state=False
            )
            outputs.append(output)
        return torch.cat(outputs, 1)

    def _segment(self, metadata: AttnMetadata, num_states: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The output of a segment, and the states behind it, from the states before it and its inputs."""
        states, inputs = tensors[:num_states], tensors[num_states:]
        rows, tokens = inputs[0].shape[:2]
        conv, *matrix = (torch.cat((state, torch.zeros_like(state))) for state in states)
        slots = replace(metadata, state_slots=alternate_slots(rows, tokens, 1, conv.device))
        output = self.kernel(*inputs, RecurrentState(conv, matrix[0] if matrix else None), slots)
        return output, *(state[rows:].clone() for state in (conv, *matrix))


class CalibrationBackend(ReferenceBackend):
    """The reference backend, with recurrences that a backward pass can afford."""

    def delta_net(self, mixer: spec.DeltaNet, params: DeltaNetParams) -> DeltaNetFn:
        """Token after token."""
        return SegmentedRecurrence(super().delta_net(mixer, params), mixer.state)

    def mamba2(self, mixer: spec.Mamba2, params: Mamba2Params) -> Mamba2Fn:
        """Token after token."""
        return SegmentedRecurrence(super().mamba2(mixer, params), mixer.state)


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
    backends = BackendList([CalibrationBackend(device, torch.float32)])
    return LayerLoader(config.spec, source, [backends] * (len(config.spec.layers) + 2), length)


class KVBuffer:
    """The keys and values of one layer, for rows that all have the same length, up to `length` tokens; its states."""

    kv_pages = None

    def __init__(self, length: int, state: RecurrentState | None = None) -> None:
        """`state` has two slots for each row (`alternate_slots`)."""
        self.length = length
        self.state = state
        self.buffers: tuple[Tensor, Tensor] | None = None

    @classmethod
    def for_layers(cls, model: spec.Model, rows: int, length: int, device: torch.device) -> list[KVBuffer]:
        """The buffers of all layers of a model, for so many rows."""

        def state(shape: spec.StateShape | None) -> RecurrentState | None:
            if shape is None:
                return None
            matrix = None if shape.matrix is None else torch.zeros(2 * rows, *shape.matrix, device=device)
            return RecurrentState(torch.zeros(2 * rows, *shape.conv, device=device), matrix)

        return [cls(length, state(layer.state)) for layer in model.layers]

    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Append new keys and values (rows, tokens, heads, dim); returns all so far."""
        if self.buffers is None:
            shape = (k.shape[0], self.length, *k.shape[2:])
            self.buffers = k.new_empty(shape), v.new_empty(shape)
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            buffer[:, metadata.max_kv_len - new.shape[1] : metadata.max_kv_len] = new
        keys, values = self.buffers
        return keys[:, : metadata.max_kv_len], values[:, : metadata.max_kv_len]


def alternate_slots(rows: int, tokens: int, turn: int, device: torch.device) -> StateSlots:
    """Slots of the pass number `turn` over the same rows: row i alternates between slots i and rows + i.

    A pass never writes to a slot that it reads; the first one, number 0, starts from zeros.
    """
    row = torch.arange(rows, device=device)
    targets = torch.full((rows, tokens), -1, device=device)
    targets[:, -1] = row + turn % 2 * rows
    return StateSlots(row + (turn + 1) % 2 * rows if turn else torch.full_like(row, -1), targets)


def make_batch(ids: Tensor, past: int = 0, turn: int | None = None) -> Batch:
    """Rows of ids (rows, tokens) as one forward pass, each row behind `past` cached tokens.

    `turn` is the number of this pass over the same rows, of which each goes on from the states of the one before;
    without it every row's states begin with zeros and are not stored.
    """
    rows, tokens = ids.shape
    return Batch(
        ids=ids,
        positions=torch.arange(past, past + tokens, device=ids.device).expand(rows, -1),
        past_lens=torch.full((rows,), past, device=ids.device),
        page_table=torch.arange(rows, device=ids.device)[:, None],
        max_kv_len=past + tokens,
        uniform=True,
        state_slots=None if turn is None else alternate_slots(rows, tokens, turn, ids.device),
    )


def run_block(block: BlockLike, x: Tensor, batch: Batch) -> Tensor:
    """The hidden states behind one layer."""
    total, pending = block.forward(x, None, batch, NoCache())
    return total if pending is None else total + pending
