"""Sampling: chooses a token for every row of a batch of logits.

`Settings` say how, `SamplerState` is what a job's sampler remembers, `Sampler` takes logits and
`SamplingRequest`s and gives a `SamplerOutput`, on the device of the logits. It needs nothing of the generator
or of models; generator, model, llm, legacy and bench import it.
"""

from .hooks import PostSamplingHook, PostSamplingResult, call_hooks
from .request import SamplerOutput, SamplerState, SamplingRequest
from .sampler import PendingOutput, Sampler
from .settings import Settings

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
