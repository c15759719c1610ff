"""Modules: weights are their only state, everything else arrives as an argument."""

from .attention import Attention, Clamped, HeadNorm, Projection, WideNorm
from .batch import Active, Batch, Span
from .block import Block, ParallelBlock
from .embedding import Embedding
from .head import Head
from .linear import Linear
from .mlp import GatedMlp, PlainMlp
from .moe import Expert, Experts, SparseMlp

__all__ = [
    "Active",
    "Attention",
    "Batch",
    "Block",
    "Clamped",
    "Embedding",
    "Expert",
    "Experts",
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
