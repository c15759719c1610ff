"""Logits in, tokens out: settings (asked), state (remembered), and the sampler between them."""

from .hooks import PostSamplingHook, PostSamplingResult, call_hooks
from .request import SamplerOutput, SamplingRequest
from .sampler import PendingOutput, Sampler
from .settings import Settings
from .state import SamplerState

__all__ = [
    "PendingOutput",
    "PostSamplingHook",
    "PostSamplingResult",
    "Sampler",
    "SamplerOutput",
    "SamplerState",
    "SamplingRequest",
    "Settings",
    "call_hooks",
]
