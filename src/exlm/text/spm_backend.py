"""A vocabulary from a SentencePiece `tokenizer.model`, run by the `sentencepiece` library.

SentencePiece knows neither tokens added later nor control symbols written in text, so this module cuts the
text at them and hands over what lies between. The space that SentencePiece puts before the first word is put
before the first word of the whole text only: what follows a special token is the middle of a text, as in
Hugging Face's tokenizers with `legacy=False`. (The older rule, a space after every special token, makes a
chat prompt say " user" for "user".)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadText, MissingExtra, TokenizerError, TokenizerNotFound
from .backend import lone_surrogate, middle_pieces, require_space_to_read
from .finding import Finder
from .folder import MAX_GAP, AddedToken, Folder, read_data
from .pieces import SPACE, TokenBytes, metaspace

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

NORMALIZER = 3
"""The field of a SentencePiece model that follows the pieces and every complete file has."""

LENGTH_DELIMITED = 2
"""How a protocol buffer marks a field that states its own length; a model has no others at its top level."""


class SpmBackend:
    """A SentencePiece model and the tokens that the files beside it add."""

    def __init__(self, data: bytes, folder: Folder, name: str = "tokenizer.model") -> None:
        """Read the serialised model; `name` is what errors call it."""
        self.name = name
        self._data = data
        self._library = _load(data, name)
        self._lock = threading.Lock()
        self._middle: SentencePieceProcessor | None = None
        self.base_size = self._library.get_piece_size()
        numbers = list(range(self.base_size))
        try:
            self._pieces: list[str | None] = list(self._library.id_to_piece(numbers))
        except UnicodeDecodeError as error:
            raise TokenizerError(
                f"{name} has a piece that is not text: {error}. Fetch the file again."
            ) from None
        self._numbers = {piece: number for number, piece in enumerate(self._pieces) if piece is not None}
        tokens = self._tokens(folder)
        self.special = {token.content: token.id for token in tokens if token.special}
        self.ordinary = {token.content: token.id for token in tokens if not token.special}
        self._finders = {
            special: Finder(token for token in tokens if special or not token.special)
            for special in (False, True)
        }

    @classmethod
    def from_file(cls, path: Path, folder: Folder) -> SpmBackend:
        """Read a tokenizer.model."""
        data = read_data(path)
        if data is None:
            raise TokenizerNotFound(f"No supported tokenizer found: there is no {path}.")
        return cls(data, folder, str(path))

    @cached_property
    def unk_token(self) -> str | None:
        """What the model calls a text it cannot write."""
        number = int(self._library.unk_id())
        return self._pieces[number] if number >= 0 else None

    @cached_property
    def vocab(self) -> list[str]:
        """The text of every token in the middle of a text, by id."""
        return middle_pieces(self)

    @property
    def misread(self) -> dict[int, str]:
        """SentencePiece itself decodes no added token."""
        return {number: text for text, number in self.ordinary.items()}

    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self._pieces)

    def defined(self, number: int) -> bool:
        """Whether any token has this id."""
        return 0 <= number < len(self._pieces) and self._pieces[number] is not None

    def id_to_piece(self, number: int) -> str:
        """The token as the file writes it, with a lower block for a space."""
        return (self._pieces[number] or "") if self.defined(number) else ""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token as the file writes it."""
        return self._numbers.get(piece)

    def enumerate_tokens(self) -> Iterator[tuple[int, str]]:
        """Pairs of id and `vocab` text."""
        return enumerate(self.vocab)

    def encode(self, text: str) -> list[int]:
        """Encode with special text as ordinary text."""
        return self.ids(text, special=False)

    def ids(self, text: str, *, special: bool, continues: bool = False) -> list[int]:
        """Encode; special text becomes its id only if asked."""
        wrong = lone_surrogate(text)
        if wrong:
            raise BadText(f"{self.name} cannot encode: {wrong}.")
        ids: list[int] = []
        position = 0
        for start, end, token in self._finders[special].find(text):
            ids += self._run(text[position:start], continues or position > 0)
            ids.append(token.id)
            position = end
        return ids + self._run(text[position:], continues or position > 0)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with every token visible."""
        table, strips, _ = self.token_bytes()
        text = b"".join(table[number] for number in ids if 0 <= number < len(table)).decode(
            "utf-8", "replace"
        )
        return text.removeprefix(" ") if strips else text

    def token_bytes(self) -> TokenBytes:
        """The bytes of every token; always known here."""
        return self._token_bytes

    def own_ids(self) -> tuple[int | None, int | None]:
        """BOS and EOS as the model file has them."""
        bos, eos = int(self._library.bos_id()), int(self._library.eos_id())
        return (bos if bos >= 0 else None), (eos if eos >= 0 else None)

    def own_start(self) -> list[int] | None:
        """The model file does not say."""
        return None

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        table = metaspace(self._pieces, byte_fallback=True)
        for tokens in (self.special, self.ordinary):
            for text, number in tokens.items():
                table[number] = text.encode()
        worded = next((n for n, piece in enumerate(self._pieces[: self.base_size]) if _is_word(piece)), None)
        strips = worded is not None and not self._library.decode([worded]).startswith(" ")
        return TokenBytes(table, strips, self.misread)

    def _run(self, text: str, continues: bool) -> list[int]:
        if not text:
            return []
        library = self._without_first_space() if continues else self._library
        return [int(number) for number in library.encode(text)]

    def _without_first_space(self) -> SentencePieceProcessor:
        with self._lock:
            if self._middle is None:
                self._middle = _load(self._data, self.name)
                self._middle.override_normalizer_spec(add_dummy_prefix=False)
            return self._middle

    def _tokens(self, folder: Folder) -> list[AddedToken]:
        """The pieces that are not text, with what the files add or say otherwise."""
        numbers = list(range(self.base_size))
        control, unknown = self._library.is_control(numbers), self._library.is_unknown(numbers)
        tokens = {
            number: AddedToken(piece, number, source=self.name)
            for number, piece in enumerate(self._pieces)
            if piece and (control[number] or unknown[number])
        }
        highest = self.base_size + MAX_GAP + len(folder.added)
        for token in folder.added:
            self._place(token, highest)
            tokens[token.id] = token
        for text in folder.special_names:
            found = self._numbers.get(text)
            if found is not None:
                tokens[found] = replace(tokens.get(found, AddedToken(text, found)), special=True)
        return list(tokens.values())

    def _place(self, token: AddedToken, highest: int) -> None:
        """Give a declared token its id: a new one above the vocabulary, or the name of a reserved piece."""
        known = self._numbers.setdefault(token.content, token.id)
        if known != token.id:
            raise TokenizerError(
                f"{token.source} gives {token.content!r} the id {token.id}, "
                f"but {self.name} gives it {known}. Correct {token.source}."
            )
        if token.id > highest:
            raise TokenizerError(
                f"{token.source} gives {token.content!r} the id {token.id}, but {self.name} ends at "
                f"{self.base_size - 1}. Correct {token.source}."
            )
        self._pieces += [None] * (token.id + 1 - len(self._pieces))
        self._pieces[token.id] = token.content


def _is_word(piece: str | None) -> bool:
    """Whether a piece starts with exactly one space."""
    return piece is not None and len(piece) > 1 and piece[0] == SPACE != piece[1]


def _load(data: bytes, name: str) -> SentencePieceProcessor:
    """A processor over the model, refused when the file is damaged or ends early."""
    try:
        import sentencepiece
    except ImportError:
        raise MissingExtra(
            f"{name} is a SentencePiece model; reading it needs another package: pip install sentencepiece"
        ) from None
    if NORMALIZER not in _fields(data):
        raise TokenizerError(
            f"{name} is not a whole SentencePiece model ({len(data)} bytes). Fetch the file again."
        )
    require_space_to_read(len(data), name)
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError, TypeError) as error:
        raise TokenizerError(f"{name} is not a SentencePiece model: {error}. Fetch the file again.") from None


def _fields(data: bytes) -> set[int]:
    """The numbers of the complete top-level fields of a protocol buffer.

    A file cut off between two pieces still parses, with half a vocabulary; it shows in the fields that are
    missing.
    """
    found: set[int] = set()
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        length, position = _varint(data, position)
        position += length
        if tag & 7 != LENGTH_DELIMITED or position > len(data):
            return set()
        found.add(tag >> 3)
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[position : position + 10]:
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, position
