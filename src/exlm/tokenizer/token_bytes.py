"""The bytes every token of a vocabulary stands for.

Byte-level vocabularies write bytes as printable letters; SentencePiece-like ones write spaces as a lower
block and rare bytes as `<0xNN>`. Here both become plain bytes, in bulk. Whether that is the whole truth about
a tokenizer is asked of its decoder: a decoder that is not one of the two known kinds gets no table, and is
left to its own library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

METASPACE = "\u2581"
"""How SentencePiece writes a space."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
"""How SentencePiece writes a byte that no piece covers."""


class TokenBytes(NamedTuple):
    """The bytes by id (none where nothing is defined); whether a decoded text loses one leading space.

    `misread` are the tokens that stand for other bytes than their vocabulary's decoder would say.
    """

    table: list[bytes]
    strips_leading_space: bool
    decode_overrides: dict[int, str]


def byte_to_unicode() -> dict[int, str]:
    """The letter that byte-level vocabularies write each byte with."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + n) for n, byte in enumerate(rest)}


def _unicode_to_latin1() -> dict[int, str]:
    """For str.translate: a letter to its byte, every other code point below 256 to one latin-1 lacks."""
    table = dict.fromkeys(range(256), "\uffff")
    return table | {ord(letter): chr(byte) for byte, letter in byte_to_unicode().items()}


def from_decoder(
    decoder: Mapping[str, Any] | None,
    pieces: Sequence[str | None],
    special_tokens: Mapping[str, int],
    nonspecial_added_tokens: Mapping[str, int],
) -> TokenBytes | None:
    """The table of a `tokenizers` vocabulary, or None when its decoder is not a plain sum of bytes.

    Added tokens stand for their own text, whatever the decoder would make of their letters; but where a lower
    block means a space it does so in ordinary added tokens too.
    """
    decoder_steps = _decoder_steps(decoder)
    if [step.get("type") for step in decoder_steps] == ["ByteLevel"]:
        table, strips_leading_space, literal = (
            byte_level_bytes(pieces),
            False,
            {**special_tokens, **nonspecial_added_tokens},
        )
    elif _is_metaspace(decoder_steps):
        byte_fallback = any(step["type"] == "ByteFallback" for step in decoder_steps)
        strips_leading_space = any(step["type"] == "Strip" for step in decoder_steps)
        table, literal = metaspace_bytes(pieces, byte_fallback), dict(special_tokens)
    else:
        return None
    decode_overrides = {
        token_id: text for text, token_id in literal.items() if table[token_id] != text.encode()
    }
    for token_id, text in decode_overrides.items():
        table[token_id] = text.encode()
    return TokenBytes(table, strips_leading_space, decode_overrides)


def byte_level_bytes(pieces: Sequence[str | None]) -> list[bytes]:
    """Bytes of pieces written in byte letters; a piece with any other letter stands for its own text."""
    letters = _unicode_to_latin1()
    table = []
    for piece in pieces:
        try:
            table.append((piece or "").translate(letters).encode("latin-1"))
        except UnicodeEncodeError:
            table.append((piece or "").encode())
    return table


def metaspace_bytes(pieces: Sequence[str | None], byte_fallback: bool) -> list[bytes]:
    """Bytes of pieces that write spaces as a lower block and, with byte fallback, bytes as `<0xNN>`."""
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
    """Replace, perhaps ByteFallback, Fuse, perhaps Strip: in this order the result is a sum of bytes."""
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
