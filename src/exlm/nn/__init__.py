"""Modules: weights are their only state, everything else arrives as an argument."""

from .attention import Attention, Clamped, HeadNorm, Projection, WideNorm
from .batch import Batch, Span
from .block import Block, ParallelBlock
from .embedding import Embedding
from .head import Head
from .linear import Linear
from .mlp import GatedMlp, PlainMlp
from .moe import SparseMlp

__all__ = [
    "Attention",
    "Batch",
    "Block",
    "Clamped",
    "Embedding",
    "GatedMlp",
    "Head",
    "HeadNorm",
    "Linear",
    "ParallelBlock",
    "PlainMlp",
    "Projection",
    "Span",
    "SparseMlp",
    "WideNorm",
]
