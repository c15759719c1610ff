"""Logits in, tokens out: settings (asked), state (remembered), and the sampler between them."""

from .hooks import PostSamplingHook, PostSamplingResult, call_hooks
from .rows import Picks, Row
from .sampler import Sampler
from .settings import Settings
from .state import SamplerState

__all__ = [
    "Picks",
    "PostSamplingHook",
    "PostSamplingResult",
    "Row",
    "Sampler",
    "SamplerState",
    "Settings",
    "call_hooks",
]
