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

_BPE_MODEL_TYPE = 2


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
