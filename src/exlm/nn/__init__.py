"""Modules: weights are their only state, everything else arrives as an argument."""

from .attention import AllHeadsNorm, Attention, ClampedQkv, PerHeadNorm, QkvProjection
from .batch import Batch, LoraRef, VectorSpan
from .block import Block, ParallelBlock
from .embedding import Embedding
from .head import Head
from .linear import Linear
from .mlp import GatedMlp, PlainMlp
from .moe import Expert, Experts, MoeMlp

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
