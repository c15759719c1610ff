"""The base class that old scripts derive their post-sampling hooks from. Any callable will do as well."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .. import PostSamplingResult


class PostSamplingHook(ABC):
    """Sees every sampled token and may put another in its place; goes into `settings.post_sampling_hooks`."""

    @abstractmethod
    def __call__(self, p: PostSamplingResult) -> None:
        """Look at the token, or assign `p.sampled_token`."""
