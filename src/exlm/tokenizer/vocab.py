"""Vocabularies: `TokenizerBackend`, the base of those in files, and lookup tables over all tokens.

A token's piece is the text that it adds when it is not the first of a text. Most tables are keyed by pieces.
The table for token healing compares bytes where they are known: a part of a character has no text of its own,
and all parts would look alike. `Vocab` builds each table once, when it is first asked for.

The bytes of tokens come from the vocabulary's alphabet: byte-level vocabularies write each byte as a
printable letter; SentencePiece vocabularies write U+2581 for a space and `<0xNN>` for a byte that no piece
covers.
"""

from __future__ import annotations

import gc
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
K = TypeVar("K", str, bytes)

REPLACEMENT = "\ufffd"
"""What bytes that are not UTF-8, such as a part of a character, decode to."""

UNDEFINED = "\ufffd\ufffd_undefined_token_\ufffd\ufffd"
"""The piece of an id above the vocabulary that no file defines."""

METASPACE = "\u2581"
"""SentencePiece's letter for a space."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
"""SentencePiece's token for a byte (byte fallback)."""


class TokenBytes(NamedTuple):
    """The bytes by id (none for undefined ids), and whether decoding strips a text's first space.

    `decode_overrides` has the text of the tokens that the vocabulary's own decoder decodes to other bytes.
    """

    table: list[bytes]
    strips_leading_space: bool
    decode_overrides: dict[int, str]


class TokenizerBackend(ABC):
    """One vocabulary with its encoder and decoder. Every method may be called from any thread.

    `base_vocab_size` is one more than the highest id in the vocabulary file; tokens that other files declare
    may have higher ids. Added tokens are never split when encoding; those that are not special are plain text.
    """

    name: str
    base_vocab_size: int
    special_tokens: dict[str, int]
    nonspecial_added_tokens: dict[str, int]
    _pieces: list[str | None]  # by id, as the file writes them; None for undefined ids
    _id_by_piece: dict[str, int]

    @property
    @abstractmethod
    def decode_overrides(self) -> Mapping[int, str]:
        """By id, the text of added tokens that the library decodes differently from how they are written."""

    @property
    @abstractmethod
    def unk_token(self) -> str | None:
        """The token that stands for text the vocabulary cannot encode."""

    @abstractmethod
    def tokenize(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        """Encode; with `parse_special` the text of a special token becomes its id, else it stays plain text.

        `continues` says that the text is a continuation: a vocabulary that puts a space before the first word
        of a text then leaves it out.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode; special tokens decode to their text."""

    @property
    @abstractmethod
    def token_bytes(self) -> TokenBytes | None:
        """The bytes of every token, or None if a text's bytes are not those of its tokens joined."""

    @abstractmethod
    def declared_bos_eos(self) -> tuple[int | None, int | None]:
        """The ids of BOS and EOS that the vocabulary file declares; None for each it does not."""

    @abstractmethod
    def prepended_ids(self) -> list[int] | None:
        """The ids that the vocabulary file's post-processor puts before a text; None if it has none."""

    @cached_property
    def vocab(self) -> list[str]:
        """By id, the text that a token adds when it is not the first of a text.

        A token that is a part of a character gives U+FFFD.
        """
        if self.token_bytes is not None:
            return [raw.decode("utf-8", "replace") for raw in self.token_bytes.table]
        context = self.decode_context_ids()
        context_length = len(self.decode(context))
        return [
            self.decode([*context, token_id])[context_length:] if self.is_defined(token_id) else ""
            for token_id in range(self.vocab_size())
        ]

    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self._pieces)

    def is_defined(self, token_id: int) -> bool:
        """Whether any token has this id."""
        return 0 <= token_id < len(self._pieces) and self._pieces[token_id] is not None

    def id_to_piece(self, token_id: int) -> str:
        """The token as the vocabulary file writes it, "" for an undefined id."""
        return (self._pieces[token_id] or "") if self.is_defined(token_id) else ""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token written as in the vocabulary file."""
        return self._id_by_piece.get(piece)

    def enumerate_tokens(self) -> Iterator[tuple[int, str]]:
        """Pairs of id and `vocab` text."""
        return enumerate(self.vocab)

    def encode(self, text: str) -> list[int]:
        """Encode; the text of special tokens stays plain text."""
        return self.tokenize(text, parse_special=False)

    def decode_context_ids(self) -> list[int]:
        """Ids to decode in front of a token so that it is not the first; [] if a first token decodes like any other."""
        letter_ids = self.encode(" t")
        if len(letter_ids) == 1 and len(self.decode(letter_ids)) == 2:
            return []
        return (self.encode(" ") or letter_ids)[:1]


def byte_to_unicode() -> dict[int, str]:
    """The letter that byte-level vocabularies (GPT-2's alphabet) write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + n) for n, byte in enumerate(rest)}


def _unicode_to_latin1() -> dict[int, str]:
    """A table for `str.translate` to latin-1 text, whose characters are bytes: each letter becomes its byte.

    Other code points below 256 are no letters: they become one outside of latin-1, which then fails to encode.
    """
    table = dict.fromkeys(range(256), "\uffff")
    return table | {ord(letter): chr(byte) for byte, letter in byte_to_unicode().items()}


def token_bytes_from_decoder(
    decoder: Mapping[str, Any] | None,
    pieces: Sequence[str | None],
    special_tokens: Mapping[str, int],
    nonspecial_added_tokens: Mapping[str, int],
) -> TokenBytes | None:
    """The bytes of a `tokenizers` vocabulary, or None if its decoder does more than join the bytes of tokens.

    Added tokens have the bytes of their own text, whatever the decoder would make of their letters; only in
    vocabularies that write U+2581 for a space do added tokens that are not special follow the decoder.
    """
    decoder_steps = _decoder_steps(decoder)
    if [step.get("type") for step in decoder_steps] == ["ByteLevel"]:
        table, strips_leading_space = byte_level_bytes(pieces), False
        literal = {**special_tokens, **nonspecial_added_tokens}
    elif _is_metaspace(decoder_steps):
        byte_fallback = any(step["type"] == "ByteFallback" for step in decoder_steps)
        strips_leading_space = any(step["type"] == "Strip" for step in decoder_steps)
        table, literal = metaspace_bytes(pieces, byte_fallback), dict(special_tokens)
    else:
        return None
    decode_overrides = {token_id: text for text, token_id in literal.items() if table[token_id] != text.encode()}
    for token_id, text in decode_overrides.items():
        table[token_id] = text.encode()
    return TokenBytes(table, strips_leading_space, decode_overrides)


def byte_level_bytes(pieces: Sequence[str | None]) -> list[bytes]:
    """Bytes of pieces in the byte-level alphabet; a piece with any other letter has the bytes of its text."""
    letters = _unicode_to_latin1()
    table = []
    for piece in pieces:
        try:
            table.append((piece or "").translate(letters).encode("latin-1"))
        except UnicodeEncodeError:
            table.append((piece or "").encode())
    return table


def metaspace_bytes(pieces: Sequence[str | None], byte_fallback: bool) -> list[bytes]:
    """Bytes of pieces that write U+2581 for a space and, with byte fallback, `<0xNN>` for a byte."""
    table = []
    for piece in pieces:
        text = piece or ""
        byte = BYTE_TOKEN.match(text) if byte_fallback else None
        table.append(bytes([int(byte[1], 16)]) if byte else text.replace(METASPACE, " ").encode())
    return table


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _is_metaspace(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Replace, perhaps ByteFallback, Fuse, perhaps Strip: decoders that just join the bytes of tokens."""
    kinds = [step.get("type") for step in steps]
    if kinds not in (
        ["Replace", "Fuse"],
        ["Replace", "ByteFallback", "Fuse"],
        ["Replace", "Fuse", "Strip"],
        ["Replace", "ByteFallback", "Fuse", "Strip"],
    ):
        return False
    replace, strip = steps[0], steps[-1]
    replaces = replace.get("pattern") == {"String": METASPACE} and replace.get("content") == " "
    strips = (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0)
    return replaces and (kinds[-1] != "Strip" or strips)


class Trie:
    """A node of a tree of characters; `leaf` has the ids of the tokens whose text ends here."""

    __slots__ = ("children", "leaf")

    def __init__(self, children: dict[str, Trie] | None = None, leaf: list[int] | None = None) -> None:
        """A node with these children and ids, without any by default."""
        self.children: dict[str, Trie] = {} if children is None else children
        self.leaf: list[int] = [] if leaf is None else leaf

    def add(self, text: str, token_id: int) -> None:
        """Add a token's text and id."""
        node = self
        for char in text:
            child = node.children.get(char)
            if child is None:
                child = node.children[char] = Trie()
            node = child
        node.leaf.append(token_id)


class Vocab:
    """The lookup tables of one vocabulary; thread-safe.

    The piece of an id in `special` is empty unless special tokens are asked for; ids in `undefined` have no
    token. Callers share the lists and dictionaries and must not change them.
    """

    def __init__(
        self,
        pieces: Callable[[], Sequence[str]],
        token_bytes: Callable[[], Sequence[bytes] | None],
        special: Iterable[int],
        undefined: Iterable[int],
        model_size: int,
    ) -> None:
        """`pieces` and `token_bytes` are called at most once; `model_size` is the model's number of ids."""
        self._read_pieces = pieces
        self._read_bytes = token_bytes
        self._special = frozenset(special)
        self._undefined = frozenset(undefined)
        self._model_size = model_size
        self._lock = threading.RLock()
        self._cache: dict[str, Any] = {}

    def pieces(self, special: bool = False) -> list[str]:
        """Pieces by id; those of special tokens are empty, or with `special` their text."""
        return self._cached(f"pieces {special}", lambda: self._pieces(special))

    def ords(self) -> list[int]:
        """By id, the value of a token that is one byte, else -1."""
        return self._cached("ords", self._ords)

    def piece_to_id(self) -> dict[str, int]:
        """The id of each piece; the highest of tokens with the same piece."""
        return self._cached(
            "piece_to_id", lambda: {piece: token_id for token_id, piece in enumerate(self._defined_pieces()) if piece}
        )

    def prefix_to_ids(self) -> dict[str, list[int]]:
        """For every piece, the ids of all pieces that start with it, ascending."""
        return self._cached("prefix_to_ids", self._prefix_to_ids)

    def prefix_id_to_ids(self) -> dict[int, list[int]]:
        """For every id, the ids of all tokens whose bytes start with those of its token: for token healing.

        An id without text has only itself.
        """
        return self._cached("prefix_id_to_ids", self._prefix_id_to_ids)

    def trie(self, ignore_case: bool = False) -> Trie:
        """The pieces character by character, lower-cased if case is ignored."""
        return self._cached(f"trie {ignore_case}", lambda: self._trie(ignore_case))

    def _cached(self, name: str, build: Callable[[], T]) -> T:
        with self._lock:
            if name not in self._cache:
                with _gc_paused():
                    self._cache[name] = build()
            found: T = self._cache[name]
            return found

    def _pieces(self, special: bool) -> list[str]:
        pieces = list(self._cached("raw", self._read_pieces))
        if not special:
            for token_id in self._special:
                pieces[token_id] = ""
        for token_id in self._undefined:
            pieces[token_id] = UNDEFINED
        return pieces

    def _defined_pieces(self) -> list[str]:
        """The pieces, empty for special tokens and undefined ids."""
        pieces = list(self.pieces())
        for token_id in self._undefined:
            pieces[token_id] = ""
        return pieces

    def _bytes(self) -> list[bytes] | None:
        table = self._cached("bytes", self._read_bytes)
        if table is None:
            return None
        hidden = self._special | self._undefined
        return [b"" if token_id in hidden else raw for token_id, raw in enumerate(table)]

    def _ords(self) -> list[int]:
        table = self._bytes()
        if table is None:
            return [ord(piece) if len(piece) == 1 and piece.isascii() else -1 for piece in self._defined_pieces()]
        return [raw[0] if len(raw) == 1 else -1 for raw in table]

    def _ids_by_prefix(self) -> dict[bytes, list[int]]:
        """For the bytes of a token (of its piece if unknown), the ids of all tokens that start with them."""
        return self._cached("groups", lambda: indices_by_prefix(self._byte_keys()))

    def _byte_keys(self) -> list[bytes]:
        return self._bytes() or [piece.encode() for piece in self._defined_pieces()]

    def _prefix_to_ids(self) -> dict[str, list[int]]:
        groups = self._ids_by_prefix()
        pieces = self._defined_pieces()
        # A piece of whole characters is a prefix of a text exactly if its bytes are; the pieces of parts of
        # characters are all U+FFFD.
        partial_characters = indices_by_prefix([piece if REPLACEMENT in piece else "" for piece in pieces])
        return {
            piece: partial_characters[piece] if piece in partial_characters else groups[key]
            for piece, key in zip(pieces, self._byte_keys(), strict=True)
            if piece
        }

    def _prefix_id_to_ids(self) -> dict[int, list[int]]:
        groups = self._ids_by_prefix()
        keys = self._byte_keys()
        size = max(self._model_size, len(keys))
        return {n: groups[keys[n]] if n < len(keys) and keys[n] else [n] for n in range(size)}

    def _trie(self, ignore_case: bool) -> Trie:
        pieces = self._defined_pieces()
        root = Trie()
        for token_id, piece in enumerate(pieces):
            if piece:
                root.add(piece.lower() if ignore_case else piece, token_id)
        return root


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause garbage collection, which would take most of the time: the tables are many small containers."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def indices_by_prefix(keys: Sequence[K]) -> dict[K, list[int]]:
    """For every key that is not empty, the indices of all keys that start with it, ascending.

    Sorted, a key stands right before the keys it is a prefix of, so one pass with a stack finds them all.
    """
    indices_by_key: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        if key:
            indices_by_key.setdefault(key, []).append(index)
    found: dict[K, list[int]] = {}
    prefix_stack: list[tuple[K, list[int]]] = []
    for key in sorted(indices_by_key):
        while prefix_stack and not key.startswith(prefix_stack[-1][0]):
            prefix_stack.pop()
        group = found[key] = []
        prefix_stack.append((key, group))
        for _, group in prefix_stack:
            group += indices_by_key[key]
    for group in found.values():
        group.sort()
    return found
