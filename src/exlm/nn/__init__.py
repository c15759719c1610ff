"""The modules of a decoder: attention, MLPs, blocks, embedding and head, as compositions of bound kernels.

A module takes activations and a `Batch` and returns activations; its weights are its only state.
`model.builder` makes modules from a description and kernels; `fused` replaces blocks and heads whose kernels
a backend can fuse. `model`, `lora`, `parallel` and `quantize` import it; it imports `kernels.interface`
only.
"""

from .attention import AllHeadsNorm, Attention, ClampedQkv, PerHeadNorm, QkvProjection
from .batch import Batch, LoraRef, VectorSpan
from .block import Block, ParallelBlock
from .linear import Embedding, Head, Linear
from .mlp import Expert, Experts, GatedMlp, MoeMlp, PlainMlp

__all__ = [
    "AllHeadsNorm",
    "Attention",
    "Batch",
    "Block",
    "ClampedQkv",
    "Embedding",
    "Expert",
    "Experts",
    "GatedMlp",
    "Head",
    "Linear",
    "LoraRef",
    "MoeMlp",
    "ParallelBlock",
    "PerHeadNorm",
    "PlainMlp",
    "QkvProjection",
    "VectorSpan",
]
