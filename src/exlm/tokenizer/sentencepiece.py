"""The backend for a SentencePiece `tokenizer.model`, run by the `sentencepiece` library.

SentencePiece recognises neither added tokens nor control symbols written in a text, so this module splits the
text at them and encodes the parts. SentencePiece's dummy prefix, a space before the first word, is added to
the first part only, as Hugging Face's tokenizers do with `legacy=False`. (The older rule, a space after every
special token, turns "user" in a chat prompt into " user".)

`model_proto` goes the other way: it serialises pieces, such as those in a GGUF file, as a tokenizer.model.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import BadText, MissingExtra, TokenizerError, TokenizerNotFound
from .detokenizer import ByteTokenDecoder
from .tokenizer_files import (
    MAX_ID_GAP,
    AddedToken,
    AddedTokenMatcher,
    TokenizerFiles,
    describe_lone_surrogate,
    read_data,
    require_memory_to_read,
)
from .vocab import METASPACE, TokenBytes, TokenizerBackend, metaspace_bytes

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


NORMALIZER_FIELD = 3
"""The field of a SentencePiece model that follows the pieces; every complete file has it."""

LENGTH_DELIMITED = 2
"""The protocol buffer wire type of a field with a length; the top level of a model has no others."""


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""SentencePiece's types of pieces; GGUF's token types have the same numbers."""

_BPE_MODEL_TYPE = 2


class SentencePieceBackend(TokenizerBackend):
    """A SentencePiece model and the tokens that the files beside it add."""

    def __init__(self, data: bytes, files: TokenizerFiles, name: str = "tokenizer.model") -> None:
        """Read the serialised model; errors call it `name`."""
        self.name = name
        self._data = data
        self._processor = _load_processor(data, name)
        self._lock = threading.Lock()
        self._continuation_processor: SentencePieceProcessor | None = None
        self.base_vocab_size = self._processor.get_piece_size()
        token_ids = list(range(self.base_vocab_size))
        try:
            self._pieces = list(self._processor.id_to_piece(token_ids))
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{name} has a piece that is not text: {error}. Fetch the file again.") from None
        self._id_by_piece = {piece: token_id for token_id, piece in enumerate(self._pieces) if piece is not None}
        tokens = self._control_and_added_tokens(files)
        self.special_tokens = {token.content: token.id for token in tokens if token.special}
        self.nonspecial_added_tokens = {token.content: token.id for token in tokens if not token.special}
        self._matchers = {
            special: AddedTokenMatcher(token for token in tokens if special or not token.special)
            for special in (False, True)
        }

    @classmethod
    def from_file(cls, path: Path, files: TokenizerFiles) -> SentencePieceBackend:
        """Read a tokenizer.model."""
        data = read_data(path)
        if data is None:
            raise TokenizerNotFound(f"No supported tokenizer found: there is no {path}.")
        return cls(data, files, str(path))

    @cached_property
    def unk_token(self) -> str | None:
        token_id = int(self._processor.unk_id())
        return self._pieces[token_id] if token_id >= 0 else None

    @property
    def decode_overrides(self) -> dict[int, str]:
        # All added tokens: SentencePiece decodes none of them.
        return {token_id: text for text, token_id in self.nonspecial_added_tokens.items()}

    def tokenize(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        problem = describe_lone_surrogate(text)
        if problem:
            raise BadText(f"{self.name} cannot encode: {problem}.")
        ids: list[int] = []
        position = 0
        for start, end, token in self._matchers[parse_special].find(text):
            ids += self._encode_part(text[position:start], continues or position > 0)
            ids.append(token.id)
            position = end
        return ids + self._encode_part(text[position:], continues or position > 0)

    def decode(self, ids: Sequence[int]) -> str:
        return ByteTokenDecoder(self.token_bytes.table, self.token_bytes.strips_leading_space).decode(ids)

    def declared_bos_eos(self) -> tuple[int | None, int | None]:
        bos, eos = int(self._processor.bos_id()), int(self._processor.eos_id())
        return (bos if bos >= 0 else None), (eos if eos >= 0 else None)

    def prepended_ids(self) -> list[int] | None:
        return None  # a model file has no post-processor

    @cached_property
    def token_bytes(self) -> TokenBytes:
        table = metaspace_bytes(self._pieces, byte_fallback=True)
        for tokens in (self.special_tokens, self.nonspecial_added_tokens):
            for text, token_id in tokens.items():
                table[token_id] = text.encode()
        word_id = next(
            (n for n, piece in enumerate(self._pieces[: self.base_vocab_size]) if _starts_with_one_space(piece)), None
        )
        strips_leading_space = word_id is not None and not self._processor.decode([word_id]).startswith(" ")
        return TokenBytes(table, strips_leading_space, self.decode_overrides)

    def _encode_part(self, text: str, continues: bool) -> list[int]:
        if not text:
            return []
        processor = self._processor_without_dummy_prefix() if continues else self._processor
        return [int(token_id) for token_id in processor.encode(text)]

    def _processor_without_dummy_prefix(self) -> SentencePieceProcessor:
        with self._lock:
            if self._continuation_processor is None:
                self._continuation_processor = _load_processor(self._data, self.name)
                self._continuation_processor.override_normalizer_spec(add_dummy_prefix=False)
            return self._continuation_processor

    def _control_and_added_tokens(self, files: TokenizerFiles) -> list[AddedToken]:
        """The model's control and unknown pieces and the tokens that the files beside it declare."""
        token_ids = list(range(self.base_vocab_size))
        control, unknown = self._processor.is_control(token_ids), self._processor.is_unknown(token_ids)
        tokens = {
            token_id: AddedToken(piece, token_id, source=self.name)
            for token_id, piece in enumerate(self._pieces)
            if piece and (control[token_id] or unknown[token_id])
        }
        max_id = self.base_vocab_size + MAX_ID_GAP + len(files.added)
        for token in files.added:
            self._assign_id(token, max_id)
            tokens[token.id] = token
        for text in files.special_token_texts:
            found = self._id_by_piece.get(text)
            if found is not None:
                tokens[found] = replace(tokens.get(found, AddedToken(text, found)), special=True)
        return list(tokens.values())

    def _assign_id(self, token: AddedToken, max_id: int) -> None:
        """Give a declared token its id: a new one above the vocabulary, or that of a piece it renames."""
        assigned = self._id_by_piece.setdefault(token.content, token.id)
        if assigned != token.id:
            raise TokenizerError(
                f"{token.source} gives {token.content!r} the id {token.id}, "
                f"but {self.name} gives it {assigned}. Correct {token.source}."
            )
        if token.id > max_id:
            raise TokenizerError(
                f"{token.source} gives {token.content!r} the id {token.id}, but {self.name} ends at "
                f"{self.base_vocab_size - 1}. Correct {token.source}."
            )
        self._pieces += [None] * (token.id + 1 - len(self._pieces))
        self._pieces[token.id] = token.content


def _starts_with_one_space(piece: str | None) -> bool:
    return piece is not None and len(piece) > 1 and piece[0] == METASPACE != piece[1]


def _load_processor(data: bytes, name: str) -> SentencePieceProcessor:
    """The library's processor of a model; TokenizerError if the file is damaged or truncated."""
    try:
        import sentencepiece
    except ImportError:
        raise MissingExtra(
            f"{name} is a SentencePiece model; reading it needs another package: pip install sentencepiece"
        ) from None
    if NORMALIZER_FIELD not in _complete_fields(data):
        raise TokenizerError(f"{name} is not a whole SentencePiece model ({len(data)} bytes). Fetch the file again.")
    require_memory_to_read(len(data), name)
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError, TypeError) as error:
        raise TokenizerError(f"{name} is not a SentencePiece model: {error}. Fetch the file again.") from None


def _complete_fields(data: bytes) -> set[int]:
    """The numbers of the complete top-level fields of a protocol buffer.

    A file that was truncated between two pieces parses with half a vocabulary, but lacks the fields behind
    them.
    """
    found: set[int] = set()
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        length, position = _read_varint(data, position)
        position += length
        if tag & 7 != LENGTH_DELIMITED or position > len(data):
            return set()
        found.add(tag >> 3)
    return found


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[position : position + 10]:
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, position


class SentencePiece(NamedTuple):
    """One entry of a SentencePiece vocabulary; `kind` is NORMAL, UNKNOWN, …, BYTE."""

    text: str
    score: float
    kind: int


def model_proto(
    pieces: Iterable[SentencePiece], *, add_dummy_prefix: bool, bos: str | None = None, eos: str | None = None
) -> bytes:
    """A serialised BPE tokenizer.model with only the fields that encoding and decoding need."""
    out = bytearray()
    byte_fallback = False
    unknown = ""
    for text, score, kind in pieces:
        byte_fallback |= kind == BYTE
        unknown = text if kind == UNKNOWN else unknown
        out += _length_delimited_field(
            1, _length_delimited_field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _varint_field(3, kind)
        )
    trainer = (
        _varint_field(3, _BPE_MODEL_TYPE)
        + _varint_field(35, int(byte_fallback))
        + _length_delimited_field(45, unknown.encode())
    )
    for number, name in ((46, bos), (47, eos)):
        trainer += _length_delimited_field(number, name.encode()) if name else b""
    normalizer = (
        _length_delimited_field(1, b"identity")
        + _varint_field(3, int(add_dummy_prefix))
        + _varint_field(4, 0)
        + _varint_field(5, 1)
    )
    return bytes(out + _length_delimited_field(2, trainer) + _length_delimited_field(3, normalizer))


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _length_delimited_field(number: int, content: bytes) -> bytes:
    return _encode_varint(number << 3 | 2) + _encode_varint(len(content)) + content


def _varint_field(number: int, value: int) -> bytes:
    return _encode_varint(number << 3) + _encode_varint(value)
