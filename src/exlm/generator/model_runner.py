"""`ModelRunner`: what the engine and the drafters need of a model and its cache.

`model.PagedModelRunner` is the implementation; `legacy` wraps it, and tests write their own. Draft models
have the same interface.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .page_table import PageCopy
from .token_sequence import TokenSequence


class ModelRunner(Protocol):
    """Runs a model on sequences and the pages that hold their keys and values."""

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Duplicate the leading tokens of pages."""
        ...

    def prefill(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Compute keys and values of the ids from `start` to `stop`."""
        ...

    def decode(self, sequences: Sequence[TokenSequence], past: Sequence[int], tokens: Sequence[Sequence[int]]) -> Any:
        """Feed each sequence its tokens behind `past`; logits (tokens, vocabulary) for each sequence.

        A list, or one tensor if all feed equally many.
        """
        ...

    def decode_next(self, sequences: Sequence[TokenSequence], past: Sequence[int], tokens: Any) -> Any:
        """Launch `decode` of one token each, (sequences,) on the device and not yet read by the host.

        None if the runner cannot. A negative token stands for a failed row: its logits are not used. The
        logits of the call before may be overwritten.
        """
        ...
