"""The interface of the tokenizer backends (`hf`, `sentencepiece`) and the helpers they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ..memory import MB, require_address_space
from .vocab import TokenBytes


class TokenizerBackend(Protocol):
    """One vocabulary with its encoder and decoder.

    `base_vocab_size` is one more than the highest id in the vocabulary file; tokens that other files declare
    may have higher ids. Every method may be called from any thread.
    """

    name: str
    base_vocab_size: int

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Special tokens, from their text to their id."""

    @property
    def nonspecial_added_tokens(self) -> Mapping[str, int]:
        """Added tokens that are not special: plain text, but never split when encoding."""

    @property
    def decode_overrides(self) -> Mapping[int, str]:
        """By id, the text of added tokens that the library decodes differently from how they are written."""

    @property
    def unk_token(self) -> str | None:
        """The token that stands for text the vocabulary cannot encode."""

    @property
    def vocab(self) -> list[str]:
        """By id, the text that a token adds when it is not the first of a text."""

    def vocab_size(self) -> int:
        """One more than the highest id."""

    def is_defined(self, token_id: int) -> bool:
        """Whether any token has this id."""

    def id_to_piece(self, token_id: int) -> str:
        """The token as the vocabulary file writes it, "" for an undefined id."""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token written as in the vocabulary file."""

    def enumerate_tokens(self) -> Iterator[tuple[int, str]]:
        """Pairs of id and `vocab` text."""

    def tokenize(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        """Encode; with `parse_special` the text of a special token becomes its id, else it stays plain text.

        `continues` says that the text is a continuation: a vocabulary that puts a space before the first word
        of a text then leaves it out.
        """

    def encode(self, text: str) -> list[int]:
        """Encode; the text of special tokens stays plain text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode; special tokens decode to their text."""

    def token_bytes(self) -> TokenBytes | None:
        """The bytes of every token, or None if a text's bytes are not those of its tokens joined."""

    def declared_bos_eos(self) -> tuple[int | None, int | None]:
        """The ids of BOS and EOS that the vocabulary file declares; None for each it does not."""

    def start_ids(self) -> list[int] | None:
        """The ids that the vocabulary file's post-processor puts before a text; None if it does not say."""


def require_space_to_read(size: int, name: str) -> None:
    """Raise DoesNotFit unless a library may allocate what it needs to read `size` bytes of vocabulary.

    The `tokenizers` library ends the process when an allocation fails, and `sentencepiece` may. They allocate
    23 to 43 times the size of the file.
    """
    require_address_space(32 * size + 8 * MB, f"{name}: the tokenizer could not be read ({size:,} bytes)")


def middle_pieces(backend: TokenizerBackend) -> list[str]:
    """`TokenizerBackend.vocab`; a token that is a part of a character gives U+FFFD."""
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
    """Ids to decode in front of a token so that it is not the first; none if the first decodes alike."""
    letter_ids = backend.encode(" t")
    if len(letter_ids) == 1 and len(backend.decode(letter_ids)) == 2:
        return []
    return (backend.encode(" ") or letter_ids)[:1]


def describe_lone_surrogate(text: str) -> str | None:
    """Why a text cannot be written as UTF-8, or None if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
    return None
