"""The modules of a decoder, as compositions of bound kernels: mixers, MLPs, blocks, embedding and head.

A module takes activations and a `Batch` and returns activations; its weights are its only state.
`model.builder` makes modules from a description and kernels; `fused` replaces blocks and heads whose kernels
a backend can fuse. `model`, `lora`, `parallel` and `quantize` import it; it imports `kernels.interface`
only.
"""

from .attention import (
    AllHeadsNorm,
    Attention,
    ClampedQkv,
    GatedAttention,
    LatentAttention,
    LatentQkv,
    LowRankQuery,
    PerHeadNorm,
    QkvProjection,
)
from .batch import Batch, LoraRef, VectorSpan
from .block import Block, MixerBlock, MlpBlock, ParallelBlock
from .linear import Embedding, Head, Linear
from .mlp import Expert, Experts, GatedMlp, LatentMoeMlp, MoeMlp, PlainMlp, ScaledGatedMlp, SharedExpertMlp
from .recurrent import DeltaNet, InOutMixer, LowRankLinear, ParallelMixers

__all__ = [
    "AllHeadsNorm",
    "Attention",
    "Batch",
    "Block",
    "ClampedQkv",
    "DeltaNet",
    "Embedding",
    "Expert",
    "Experts",
    "GatedAttention",
    "GatedMlp",
    "Head",
    "InOutMixer",
    "LatentAttention",
    "LatentMoeMlp",
    "LatentQkv",
    "Linear",
    "LoraRef",
    "LowRankLinear",
    "LowRankQuery",
    "MixerBlock",
    "MlpBlock",
    "MoeMlp",
    "ParallelBlock",
    "ParallelMixers",
    "PerHeadNorm",
    "PlainMlp",
    "QkvProjection",
    "ScaledGatedMlp",
    "SharedExpertMlp",
    "VectorSpan",
]
