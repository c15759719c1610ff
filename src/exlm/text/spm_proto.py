"""A SentencePiece model file made from its pieces, for vocabularies that were taken out of theirs.

Only the few fields that encoding and decoding need are written; the file's schema is SentencePiece's own.
Reading such files is that library's business.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""What a piece is, in SentencePiece's numbers, which are GGUF's too."""

_BPE = 2


class Piece(NamedTuple):
    """One entry of a vocabulary."""

    text: str
    score: float
    kind: int


def model_proto(
    pieces: Iterable[Piece], *, first_space: bool, bos: str | None = None, eos: str | None = None
) -> bytes:
    """The bytes of a tokenizer.model that merges by score; `first_space` is put before the first word."""
    out = bytearray()
    fallback = False
    unknown = ""
    for text, score, kind in pieces:
        fallback |= kind == BYTE
        unknown = text if kind == UNKNOWN else unknown
        out += _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
    trainer = _number(3, _BPE) + _number(35, int(fallback)) + _field(45, unknown.encode())
    for number, name in ((46, bos), (47, eos)):
        trainer += _field(number, name.encode()) if name else b""
    normalizer = _field(1, b"identity") + _number(3, int(first_space)) + _number(4, 0) + _number(5, 1)
    return bytes(out + _field(2, trainer) + _field(3, normalizer))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)
