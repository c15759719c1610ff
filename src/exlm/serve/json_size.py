"""How much JSON a text holds, counted before it is parsed.

A body of 4 MiB can say `[],` 1.4 million times. As Python objects that is a hundred megabytes, and parsing
holds up every other thread for a quarter of a second; counting structural characters takes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .errors import APIError

Text: TypeAlias = bytes | bytearray

MIN_LIMIT = 1 << 16
"""Limits do not go below this, however small a body must be."""
WINDOW_BYTES = 1 << 18
"""Bytes that are looked at in one go: other threads wait meanwhile."""
LONG_NUMBER = b"0" * 400
"""So many digits no number may have: the time to read an integer grows with their square."""
DIGITS = bytes.maketrans(b"123456789", b"000000000")


@dataclass(frozen=True)
class JsonLimits:
    """How many values a JSON text may have, and how many lists, objects and fields are among them."""

    values: int
    nodes: int

    @classmethod
    def for_body(cls, size: int) -> JsonLimits:
        """The limits of a body of so many bytes: a token id takes seven or eight, a message fifty or more."""
        return cls(max(size // 16, MIN_LIMIT), max(size // 64, MIN_LIMIT))

    def check(self, *texts: Text, what: str = "The body") -> None:
        """Refuse texts that hold more in all; `what` is their name in the refusal."""
        if (
            sum(text.count(b",") for text in texts) < self.values
            and sum(map(_nodes, texts)) <= self.nodes
            and not any(map(_has_long_number, texts))
        ):
            return  # what is inside of strings was counted too, so outside there is no more
        values, nodes = 1, 0
        for text in texts:
            for outside in _outside_strings(text):
                values += outside.count(b",")
                nodes += _nodes(outside)
                if nodes > self.nodes:
                    raise _too_much(f"{what} has more than {self.nodes:,} lists, objects and fields.")
                if values > self.values:
                    raise _too_much(f"{what} has more than {self.values:,} values.")
                if _has_long_number(outside):
                    digits = len(LONG_NUMBER)
                    raise APIError(
                        400, f"{what} has a number of {digits} digits or more.", code="invalid_json"
                    )


def _too_much(message: str) -> APIError:
    return APIError(413, message, code="body_too_large")


def _nodes(text: Text) -> int:
    return sum(map(text.count, (b"[", b"{", b":")))


def _has_long_number(text: Text) -> bool:
    return LONG_NUMBER in text.translate(DIGITS)


def _outside_strings(text: Text) -> Iterator[Text]:
    """What of a text is outside of strings, window by window."""
    if b"\\" in text:  # without escapes, every quote that is left begins or ends a string
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    inside = 0
    for start in range(0, len(text), WINDOW_BYTES):
        parts = text[start : start + WINDOW_BYTES].split(b'"')
        yield b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2
