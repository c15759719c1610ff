"""What old scripts may ask of `tokenizer.tokenizer_model`: a shape to test against. The vocabularies
themselves are opened by `Tokenizer`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Vocabulary(Protocol):
    """What `tokenizer.tokenizer_model` offers, whatever file it was read from."""

    def vocab_size(self) -> int:
        """One more than the highest id."""

    def id_to_piece(self, number: int) -> str:
        """The token as the vocabulary writes it."""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token as the vocabulary writes it."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
