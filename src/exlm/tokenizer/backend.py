"""What a vocabulary must be able to do, whatever file it came from. A protocol, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ..memory import MB, require_address_space
from .vocab import TokenBytes


class TokenizerBackend(Protocol):
    """One vocabulary with its encoder.

    `base_size` is one more than the highest id of the vocabulary's own file; tokens that other files declare
    may lie above it. Every method may be called from any thread.
    """

    name: str
    base_vocab_size: int

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that are not text, text to id."""

    @property
    def nonspecial_added_tokens(self) -> Mapping[str, int]:
        """Added tokens that are text like any other, but always found whole."""

    @property
    def decode_overrides(self) -> Mapping[int, str]:
        """Added tokens that the vocabulary's own decoder would not give back as written."""

    @property
    def unk_token(self) -> str | None:
        """What the vocabulary calls a text it cannot write."""

    @property
    def vocab(self) -> list[str]:
        """The text of every token in the middle of a text, by id."""

    def vocab_size(self) -> int:
        """One more than the highest id."""

    def is_defined(self, token_id: int) -> bool:
        """Whether any token has this id."""

    def id_to_piece(self, number: int) -> str:
        """The token as the vocabulary writes it, "" for an id without one."""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token as the vocabulary writes it."""

    def enumerate_tokens(self) -> Iterator[tuple[int, str]]:
        """Pairs of id and `vocab` text."""

    def tokenize(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        """Encode; `special` says whether special text becomes its id or stays ordinary text.

        `continues` says that the text goes on after something else, so that a vocabulary that puts a space
        before the first word does not.
        """

    def encode(self, text: str) -> list[int]:
        """Encode with special text as ordinary text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with every token visible."""

    def token_bytes(self) -> TokenBytes | None:
        """The bytes of every token, or None when decoding is more than adding them up."""

    def declared_bos_eos(self) -> tuple[int | None, int | None]:
        """The ids of BOS and EOS, where the vocabulary file itself names them."""

    def start_ids(self) -> list[int] | None:
        """The ids the vocabulary file itself puts before a text; None where it does not say."""


def require_space_to_read(size: int, name: str) -> None:
    """DoesNotFit unless a library may take the memory that it needs to read `size` bytes of vocabulary.

    The `tokenizers` library ends the process where it gets none, and `sentencepiece` may. What it takes is 23
    to 43 times the file.
    """
    require_address_space(32 * size + 8 * MB, f"{name}: the tokenizer could not be read ({size:,} bytes)")


def middle_pieces(backend: TokenizerBackend) -> list[str]:
    """The text of each token in the middle of a text; a token that is part of a character gives U+FFFD."""
    token_bytes = backend.token_bytes()
    if token_bytes is not None:
        return [raw.decode("utf-8", "replace") for raw in token_bytes.table]
    context = decode_context_ids(backend)
    context_length = len(backend.decode(context))
    return [
        backend.decode([*context, token_id])[context_length:] if backend.is_defined(token_id) else ""
        for token_id in range(backend.vocab_size())
    ]


def decode_context_ids(backend: TokenizerBackend) -> list[int]:
    """What to decode before a token so that it does not count as first; empty where that is all the same."""
    letter_ids = backend.encode(" t")
    if len(letter_ids) == 1 and len(backend.decode(letter_ids)) == 2:
        return []
    return (backend.encode(" ") or letter_ids)[:1]


def describe_lone_surrogate(text: str) -> str | None:
    """Says where text cannot be written as UTF-8, or None when it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
    return None
