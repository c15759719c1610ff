"""A vocabulary from a SentencePiece `tokenizer.model`, run by the `sentencepiece` library.

SentencePiece knows neither tokens added later nor control symbols written in text, so this module cuts the
text at them and hands over what lies between. The space that SentencePiece puts before the first word is put
before the first word of the whole text only: what follows a special token is the middle of a text, as in
Hugging Face's tokenizers with `legacy=False`. (The older rule, a space after every special token, makes a
chat prompt say " user" for "user".)
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import BadText, MissingExtra, TokenizerError, TokenizerNotFound
from .backend import describe_lone_surrogate, middle_pieces, require_space_to_read
from .tokenizer_files import MAX_ID_GAP, AddedToken, AddedTokenMatcher, TokenizerFiles, read_data
from .vocab import METASPACE, TokenBytes, metaspace_bytes

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


NORMALIZER_FIELD = 3
"""The field of a SentencePiece model that follows the pieces and every complete file has."""

LENGTH_DELIMITED = 2
"""How a protocol buffer marks a field that states its own length; a model has no others at its top level."""


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""What a piece is, in SentencePiece's numbers, which are GGUF's too."""

_BPE_MODEL_TYPE = 2


class SentencePieceBackend:
    """A SentencePiece model and the tokens that the files beside it add."""

    def __init__(self, data: bytes, files: TokenizerFiles, name: str = "tokenizer.model") -> None:
        """Read the serialised model; `name` is what errors call it."""
        self.name = name
        self._data = data
        self._processor = _load_processor(data, name)
        self._lock = threading.Lock()
        self._continuation_processor: SentencePieceProcessor | None = None
        self.base_vocab_size = self._processor.get_piece_size()
        token_ids = list(range(self.base_vocab_size))
        try:
            self._pieces: list[str | None] = list(self._processor.id_to_piece(token_ids))
        except UnicodeDecodeError as error:
            raise TokenizerError(
                f"{name} has a piece that is not text: {error}. Fetch the file again."
            ) from None
        self._id_by_piece = {
            piece: token_id for token_id, piece in enumerate(self._pieces) if piece is not None
        }
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
        """What the model calls a text it cannot write."""
        token_id = int(self._processor.unk_id())
        return self._pieces[token_id] if token_id >= 0 else None

    @cached_property
    def vocab(self) -> list[str]:
        """The text of every token in the middle of a text, by id."""
        return middle_pieces(self)

    @property
    def decode_overrides(self) -> dict[int, str]:
        """SentencePiece itself decodes no added token."""
        return {token_id: text for text, token_id in self.nonspecial_added_tokens.items()}

    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self._pieces)

    def is_defined(self, token_id: int) -> bool:
        """Whether any token has this id."""
        return 0 <= token_id < len(self._pieces) and self._pieces[token_id] is not None

    def id_to_piece(self, number: int) -> str:
        """The token as the file writes it, with a lower block for a space."""
        return (self._pieces[number] or "") if self.is_defined(number) else ""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token as the file writes it."""
        return self._id_by_piece.get(piece)

    def enumerate_tokens(self) -> Iterator[tuple[int, str]]:
        """Pairs of id and `vocab` text."""
        return enumerate(self.vocab)

    def encode(self, text: str) -> list[int]:
        """Encode with special text as ordinary text."""
        return self.tokenize(text, parse_special=False)

    def tokenize(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        """Encode; special text becomes its id only if asked."""
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
        """Decode with every token visible."""
        table, strips_leading_space, _ = self.token_bytes()
        text = b"".join(table[token_id] for token_id in ids if 0 <= token_id < len(table)).decode(
            "utf-8", "replace"
        )
        return text.removeprefix(" ") if strips_leading_space else text

    def token_bytes(self) -> TokenBytes:
        """The bytes of every token; always known here."""
        return self._token_bytes

    def declared_bos_eos(self) -> tuple[int | None, int | None]:
        """BOS and EOS as the model file has them."""
        bos, eos = int(self._processor.bos_id()), int(self._processor.eos_id())
        return (bos if bos >= 0 else None), (eos if eos >= 0 else None)

    def start_ids(self) -> list[int] | None:
        """The model file does not say."""
        return None

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        table = metaspace_bytes(self._pieces, byte_fallback=True)
        for tokens in (self.special_tokens, self.nonspecial_added_tokens):
            for text, token_id in tokens.items():
                table[token_id] = text.encode()
        word_id = next(
            (
                n
                for n, piece in enumerate(self._pieces[: self.base_vocab_size])
                if _starts_with_one_space(piece)
            ),
            None,
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
        """The pieces that are not text, with what the files add or say otherwise."""
        token_ids = list(range(self.base_vocab_size))
        control, unknown = self._processor.is_control(token_ids), self._processor.is_unknown(token_ids)
        tokens = {
            token_id: AddedToken(piece, token_id, source=self.name)
            for token_id, piece in enumerate(self._pieces)
            if piece and (control[token_id] or unknown[token_id])
        }
        highest = self.base_vocab_size + MAX_ID_GAP + len(files.added)
        for token in files.added:
            self._assign_id(token, highest)
            tokens[token.id] = token
        for text in files.special_token_texts:
            found = self._id_by_piece.get(text)
            if found is not None:
                tokens[found] = replace(tokens.get(found, AddedToken(text, found)), special=True)
        return list(tokens.values())

    def _assign_id(self, token: AddedToken, highest: int) -> None:
        """Give a declared token its id: a new one above the vocabulary, or the name of a reserved piece."""
        assigned = self._id_by_piece.setdefault(token.content, token.id)
        if assigned != token.id:
            raise TokenizerError(
                f"{token.source} gives {token.content!r} the id {token.id}, "
                f"but {self.name} gives it {assigned}. Correct {token.source}."
            )
        if token.id > highest:
            raise TokenizerError(
                f"{token.source} gives {token.content!r} the id {token.id}, but {self.name} ends at "
                f"{self.base_vocab_size - 1}. Correct {token.source}."
            )
        self._pieces += [None] * (token.id + 1 - len(self._pieces))
        self._pieces[token.id] = token.content


def _starts_with_one_space(piece: str | None) -> bool:
    """Whether a piece starts with exactly one space."""
    return piece is not None and len(piece) > 1 and piece[0] == METASPACE != piece[1]


def _load_processor(data: bytes, name: str) -> SentencePieceProcessor:
    """A processor over the model, refused when the file is damaged or ends early."""
    try:
        import sentencepiece
    except ImportError:
        raise MissingExtra(
            f"{name} is a SentencePiece model; reading it needs another package: pip install sentencepiece"
        ) from None
    if NORMALIZER_FIELD not in _complete_fields(data):
        raise TokenizerError(
            f"{name} is not a whole SentencePiece model ({len(data)} bytes). Fetch the file again."
        )
    require_space_to_read(len(data), name)
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError, TypeError) as error:
        raise TokenizerError(f"{name} is not a SentencePiece model: {error}. Fetch the file again.") from None


def _complete_fields(data: bytes) -> set[int]:
    """The numbers of the complete top-level fields of a protocol buffer.

    A file cut off between two pieces still parses, with half a vocabulary; it shows in the fields that are
    missing.
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
    """One entry of a vocabulary."""

    text: str
    score: float
    kind: int


def model_proto(
    pieces: Iterable[SentencePiece], *, add_dummy_prefix: bool, bos: str | None = None, eos: str | None = None
) -> bytes:
    """The bytes of a tokenizer.model that merges by score; `first_space` is put before the first word."""
    out = bytearray()
    byte_fallback = False
    unknown = ""
    for text, score, kind in pieces:
        byte_fallback |= kind == BYTE
        unknown = text if kind == UNKNOWN else unknown
        out += _length_delimited_field(
            1,
            _length_delimited_field(1, text.encode())
            + b"\x15"
            + struct.pack("<f", score)
            + _varint_field(3, kind),
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
