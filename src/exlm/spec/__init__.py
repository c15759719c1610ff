"""What a model is, as frozen data: no torch, no files, nothing that computes."""

from .layers import Activation, Attention, Layer, Mlp, Moe, Norm, QkNorm
from .model import Embed, Head, Model
from .names import Names, Place, Rename
from .rope import Dynamic, Linear, Llama3, LongRope, Rope, Scaling, Yarn

__all__ = [
    "Activation",
    "Attention",
    "Dynamic",
    "Embed",
    "Head",
    "Layer",
    "Linear",
    "Llama3",
    "LongRope",
    "Mlp",
    "Model",
    "Moe",
    "Names",
    "Norm",
    "Place",
    "QkNorm",
    "Rename",
    "Rope",
    "Scaling",
    "Yarn",
]
