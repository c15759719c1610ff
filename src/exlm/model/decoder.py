"""The decoder: embedding, blocks, head, the forward pass through them, and the module of each role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kernels.interface import LayerKVCache
from ..nn import Batch, ClampedQkv, Embedding, Head, InOutMixer, ParallelMixers, SharedExpertMlp
from ..nn.block import BlockLike, TransferFn
from ..nn.fused import FusedBlock, FusedBlockStack
from ..parallel import RankCombiner


@dataclass
class Decoder:
    """All modules of a loaded model, in order."""

    embedding: Embedding
    blocks: list[BlockLike]
    head: Head
    transfers: list[TransferFn]  # before each block and before the head
    fused: FusedBlockStack | None = None  # all blocks as one, if they are on one device

    def forward(self, batch: Batch, layers: Sequence[LayerKVCache]) -> tuple[Tensor | None, Tensor]:
        """Logits of the positions that the batch asks for, or None; and the state before the final norm.

        If it asks for none, the last block only fills its cache, and the state is unfinished.
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
                block.fill_cache(x, pending_residual, batch, kv)
            else:
                x, pending_residual = block.forward(x, pending_residual, batch, kv)
        return self.output_logits(*last(x, pending_residual, batch))

    def needs_output(self, batch: Batch) -> bool:
        """Whether the last block must compute its output; its keys and values are stored in any case."""
        return batch.outputs != "none"

    def input_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The first block's input: residual stream and pending residual."""
        return self.embedding.forward(batch), None

    def output_logits(self, x: Tensor, pending_residual: Tensor | None, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """Logits and state from the last block's output."""
        if batch.outputs == "none":
            return None, x
        if batch.outputs == "last":
            x, pending_residual = x[:, -1:], None if pending_residual is None else pending_residual[:, -1:]
        return self.head.forward(x, pending_residual, batch)

    def replace(self, role: str, change: Callable[[Any], Any]) -> None:
        """Replace a role's module by `change(module)`.

        Roles are those of matrices; `embed` is the embedding, `layers.3.mlp.experts` all experts of a layer.
        """
        owner, name = self._locate(role)
        while isinstance(module := getattr(owner, name), RankCombiner):
            owner, name = module, "inner"
        setattr(owner, name, change(getattr(owner, name)))

    def _locate(self, role: str) -> tuple[object, str]:
        """The owner of a role's module, and the attribute's name."""
        match role.split("."):
            case ["embed"]:
                return self, "embedding"
            case ["head"]:
                return self.head, "linear"
            case ["layers", layer, "attn", "q" | "k" | "v" as part]:
                qkv = self._attention(int(layer)).qkv
                while isinstance(qkv, ClampedQkv):
                    qkv = qkv.inner
                return qkv, part
            case ["layers", layer, "attn", "kv_down" | "k_up" | "v_up" as part]:
                return self._attention(int(layer)).qkv, part
            case ["layers", layer, "attn", "q_down" | "q_up" as part]:
                return self._attention(int(layer)).qkv.q, part.removeprefix("q_")
            case ["layers", layer, "attn", part]:
                return self._attention(int(layer)), part
            case ["layers", layer, "mlp", "shared", part]:
                return self._unfused_block(int(layer)).mlp.shared, part
            case ["layers", layer, "mlp", "shared_gate"]:
                return self._unfused_block(int(layer)).mlp, "gate"
            case ["layers", layer, "mlp", part]:
                mlp = self._unfused_block(int(layer)).mlp
                return mlp.routed if isinstance(mlp, SharedExpertMlp) else mlp, part
            case ["layers", layer, "delta" | "mamba" | "conv", part]:
                return self._recurrent(int(layer), part)
        raise KeyError(f"no module has the role {role!r}")

    def _attention(self, layer: int) -> Any:
        """A layer's attention, also beside a recurrent mixer."""
        mixer = self._unfused_block(layer).mixer
        return mixer.attention if isinstance(mixer, ParallelMixers) else mixer

    def _recurrent(self, layer: int, part: str) -> tuple[object, str]:
        """The owner of a recurrent mixer's matrix, and the attribute's name."""
        mixer: Any = self._unfused_block(layer).mixer
        mixer = mixer.recurrent if isinstance(mixer, ParallelMixers) else mixer
        if isinstance(mixer, InOutMixer):
            return mixer, f"{part}_proj"
        name, _, half = part.partition("_")
        return (getattr(mixer, name), half) if half else (mixer, name)

    def _unfused_block(self, layer: int) -> Any:
        """Unfuse a block: a fused one would not see its modules change."""
        block = self.blocks[layer]
        if isinstance(block, FusedBlock):
            self.blocks[layer] = block = block.block
            self.fused = None
        return block
