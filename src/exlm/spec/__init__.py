"""What a model is, as frozen data: no torch, no files, nothing that computes."""

from .layers import Activation, Attention, Layer, Mlp, Moe, Norm, QkNorm
from .model import Embed, Head, Model
from .rope import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from .tensor_names import KeyRename, TensorLocation, TensorNames

__all__ = [
    "Activation",
    "Attention",
    "DynamicNtkScaling",
    "Embed",
    "Head",
    "KeyRename",
    "Layer",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mlp",
    "Model",
    "Moe",
    "Norm",
    "QkNorm",
    "Rope",
    "RopeScaling",
    "TensorLocation",
    "TensorNames",
    "YarnScaling",
]
