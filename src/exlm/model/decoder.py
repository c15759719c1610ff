"""The assembled net: embedding, blocks, head; and where in it each role is, for those who wrap a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kernels.interface import LayerKVCache
from ..nn import Batch, ClampedQkv, Embedding, Head
from ..nn.block import BlockLike, TransferFn
from ..nn.fused import FusedBlock, FusedDecoder
from ..parallel import RankCombiner


@dataclass
class Decoder:
    """Every module of a loaded model, in order."""

    embedding: Embedding
    blocks: list[BlockLike]
    head: Head
    transfers: list[TransferFn]  # before each block and before the head: a border between devices, or none
    fused: FusedDecoder | None = None  # all blocks as one, if they are on one device

    def forward(self, batch: Batch, layers: Sequence[LayerKVCache]) -> tuple[Tensor | None, Tensor]:
        """Logits for the positions the batch asks for, or None; and the state before the head.

        If none are asked for, the last block does no more than its cache needs, and the state is unfinished.
        """
        x, pending_residual = self.input_hidden(batch)
        if self.fused is not None and pending_residual is None:
            output = self.fused.forward(x, batch, layers)
            if output is not None:
                return self.output_logits(output, None, batch)
        *before, last = self.transfers
        kv_only = [] if self.needs_output(batch) else self.blocks[-1:]
        for transfer, block, kv in zip(before, self.blocks, layers, strict=True):
            x, pending_residual, batch = transfer(x, pending_residual, batch)
            if block in kv_only:
                block.fill_kv(x, pending_residual, batch, kv)
            else:
                x, pending_residual = block.forward(x, pending_residual, batch, kv)
        return self.output_logits(*last(x, pending_residual, batch))

    def needs_output(self, batch: Batch) -> bool:
        """Whether anybody asks for the last block's answer; keys and values are wanted in any case."""
        return batch.outputs != "none"

    def input_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """What the first block gets: a sum, and what belongs to it."""
        return self.embedding.forward(batch), None

    def output_logits(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor | None, Tensor]:
        """What becomes of the last block's answer."""
        if batch.outputs == "none":
            return None, x
        if batch.outputs == "last":
            x, pending_residual = x[:, -1:], None if pending_residual is None else pending_residual[:, -1:]
        return self.head.forward(x, pending_residual, batch)

    def replace(self, role: str, change: Callable[[Any], Any]) -> None:
        """Put another module in a role's place: `change` gets the present one and returns the new one.

        Roles are those of matrices; `embed` is the embedding, `layers.3.mlp.experts` all experts of a layer.
        """
        owner, name = self._locate(role)
        while isinstance(module := getattr(owner, name), RankCombiner):
            owner, name = module, "inner"
        setattr(owner, name, change(getattr(owner, name)))

    def _locate(self, role: str) -> tuple[object, str]:
        """The module that holds a role's module, and the attribute it holds it by."""
        match role.split("."):
            case ["embed"]:
                return self, "embedding"
            case ["head"]:
                return self.head, "linear"
            case ["layers", layer, "attn", "q" | "k" | "v" as part]:
                qkv = self._unfused_block(int(layer)).attn.qkv
                while isinstance(qkv, ClampedQkv):
                    qkv = qkv.inner
                return qkv, part
            case ["layers", layer, "attn" | "mlp" as half, part]:
                return getattr(self._unfused_block(int(layer)), half), part
        raise KeyError(f"no module has the role {role!r}")

    def _unfused_block(self, layer: int) -> BlockLike:
        """A block made of its modules from now on: a fused one would not see them change."""
        block = self.blocks[layer]
        if isinstance(block, FusedBlock):
            self.blocks[layer] = block = block.block
            self.fused = None
        return block
