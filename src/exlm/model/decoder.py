"""The assembled net: embedding, blocks, head; and where in it each role is, for those who wrap a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kernels.backend import KeyValues
from ..nn import Batch, Clamped, Embedding, Head
from ..nn.block import BlockLike
from ..nn.fused import FusedBlock, FusedStack
from ..nn.hop import Crossing
from ..parallel import Joint


@dataclass
class Decoder:
    """Every module of a loaded model, in order."""

    embedding: Embedding
    blocks: list[BlockLike]
    head: Head
    hops: list[Crossing]  # before each block and before the head: a border between devices, or none
    stack: FusedStack | None = None  # all blocks as one, where there are no borders

    def forward(self, batch: Batch, layers: Sequence[KeyValues]) -> tuple[Tensor | None, Tensor]:
        """Logits for the positions the batch asks for, or None; and the state before the head.

        If none are asked for, the last block does no more than its cache needs, and the state is unfinished.
        """
        x, more = self.enter(batch)
        if self.stack is not None and more is None:
            done = self.stack.forward(x, batch, layers)
            if done is not None:
                return self.leave(done, None, batch)
        *before, last = self.hops
        unheard = [] if self.heard(batch) else self.blocks[-1:]
        for hop, block, kv in zip(before, self.blocks, layers, strict=True):
            x, more, batch = hop(x, more, batch)
            if block in unheard:
                block.remember(x, more, batch, kv)
            else:
                x, more = block.forward(x, more, batch, kv)
        return self.leave(*last(x, more, batch))

    def heard(self, batch: Batch) -> bool:
        """Whether anybody asks for the last block's answer; keys and values are wanted in any case."""
        return batch.outputs != "none"

    def enter(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """What the first block gets: a sum, and what belongs to it."""
        return self.embedding.forward(batch), None

    def leave(self, x: Tensor, more: Tensor | None, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """What becomes of the last block's answer."""
        if batch.outputs == "none":
            return None, x
        if batch.outputs == "last":
            x, more = x[:, -1:], None if more is None else more[:, -1:]
        return self.head.forward(x, more, batch)

    def replace(self, role: str, change: Callable[[Any], Any]) -> None:
        """Put another module in a role's place: `change` gets the present one and returns the new one.

        Roles are those of matrices; `embed` is the embedding, `layers.3.mlp.experts` all experts of a layer.
        """
        owner, name = self._place(role)
        while isinstance(module := getattr(owner, name), Joint):
            owner, name = module, "inner"
        setattr(owner, name, change(getattr(owner, name)))

    def _place(self, role: str) -> tuple[object, str]:
        """The module that holds a role's module, and the attribute it holds it by."""
        match role.split("."):
            case ["embed"]:
                return self, "embedding"
            case ["head"]:
                return self.head, "linear"
            case ["layers", layer, "attn", "q" | "k" | "v" as part]:
                qkv = self._plain(int(layer)).attn.qkv
                while isinstance(qkv, Clamped):
                    qkv = qkv.inner
                return qkv, part
            case ["layers", layer, "attn" | "mlp" as half, part]:
                return getattr(self._plain(int(layer)), half), part
        raise KeyError(f"no module has the role {role!r}")

    def _plain(self, layer: int) -> BlockLike:
        """A block made of its modules from now on: a fused one would not see them change."""
        block = self.blocks[layer]
        if isinstance(block, FusedBlock):
            self.blocks[layer] = block = block.block
            self.stack = None
        return block
