"""Base classes for hooks of scripts: around a layer's forward pass, and after a token is sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ..sampling import PostSamplingResult

HiddenStatesHook = Callable[[Tensor], Tensor]


class HasForward(Protocol):
    """Any layer whose `forward` takes the hidden states first and returns them."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        ...


class Intervention:
    """The layer `inner`, with `pre_forward` applied to its input and `post_forward` to its output.

    It takes the place of the layer; all other attributes are the layer's own.
    """

    def __init__(
        self,
        inner: HasForward,
        pre_forward: HiddenStatesHook | None = None,
        post_forward: HiddenStatesHook | None = None,
    ) -> None:
        self.inner = inner
        self.pre_forward, self.post_forward = pre_forward or _unchanged, post_forward or _unchanged

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """The layer's forward pass between the two hooks."""
        entering = self.pre_forward(hidden_states)
        return self.post_forward(self.inner.forward(entering, *arguments, **options))

    def __getattr__(self, name: str) -> Any:
        """The layer's own attribute."""
        if name == "inner":  # not assigned yet, as in a copy being made: the next line would recurse
            raise AttributeError(name)
        return getattr(self.inner, name)


class PostSamplingHook(ABC):
    """The base class of post-sampling hooks, which go into `settings.post_sampling_hooks`.

    Any callable works as well.
    """

    @abstractmethod
    def __call__(self, p: PostSamplingResult) -> None:
        """Called with each sampled token; may replace it by assigning `p.sampled_token`."""


def _unchanged(hidden_states: Tensor) -> Tensor:
    return hidden_states
