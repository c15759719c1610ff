"""A module with something done before or after it. It knows nothing of what it wraps but its `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

HiddenStatesHook = Callable[[Tensor], Tensor]


class HasForward(Protocol):
    """Anything that takes the hidden states first and returns them."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        ...


class Intervention:
    """`inner` with `pre_forward` on the states that enter it and `post_forward` on those that leave it.

    Put it in the place of a module; whatever else is asked of it, the module answers.
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
        """The module's forward pass between the two callbacks."""
        entering = self.pre_forward(hidden_states)
        return self.post_forward(self.inner.forward(entering, *arguments, **options))

    def __getattr__(self, name: str) -> Any:
        """The module's own attribute."""
        if name == "inner":  # not there yet: asking it would never end
            raise AttributeError(name)
        return getattr(self.inner, name)


def _unchanged(hidden_states: Tensor) -> Tensor:
    return hidden_states
