"""Describes a model as frozen data: layers, rotary positions, weights by role, and their names in files.

Functions in `families` make a `Model` from a config.json; the code that builds, reads or runs a model takes
it. This package imports only the standard library, and every package may import it; checkpoint uses only
`tensor_names`.
"""

from .model import (
    Activation,
    Attention,
    DeltaNet,
    Embed,
    Head,
    LatentAttention,
    Layer,
    Mamba2,
    Mixer,
    Mlp,
    Model,
    Moe,
    Norm,
    ParallelMixers,
    QkNorm,
    ShortConv,
    StateShape,
)
from .rope import DynamicNtkScaling, LinearScaling, Llama3Scaling, LongRopeScaling, Rope, RopeScaling, YarnScaling
from .tensor_names import KeyRename, TensorLocation, TensorNames

__all__ = [
    "Activation",
    "Attention",
    "DeltaNet",
    "DynamicNtkScaling",
    "Embed",
    "Head",
    "KeyRename",
    "LatentAttention",
    "Layer",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mamba2",
    "Mixer",
    "Mlp",
    "Model",
    "Moe",
    "Norm",
    "ParallelMixers",
    "QkNorm",
    "Rope",
    "RopeScaling",
    "ShortConv",
    "StateShape",
    "TensorLocation",
    "TensorNames",
    "YarnScaling",
]
