"""The toy vocabulary of the golden traces, single bytes, and helpers that push them."""

from __future__ import annotations

from exlm.generator.output import Emit, OutputAction, OutputProcessor
from exlm.tokenizer.detokenizer import ByteTokenDecoder, Detokenizer

LETTERS = [chr(ord("a") + place) for place in range(26)]
PIECES = ["</s>", "<s>", *LETTERS, " ", "!", ".", "\n", "Hello", "Hel", "He", " world"]
SPECIAL = {0: "</s>", 1: "<s>"}
ID = {piece: number for number, piece in enumerate(PIECES)}
BYTES = [bytes([value]) for value in range(256)]
EMOJI = list("\U0001f600".encode())


def toy_detokenizer(special: bool = False) -> Detokenizer:
    """A detokenizer of the toy vocabulary."""
    shown = [b"" if number in SPECIAL and not special else piece.encode() for number, piece in enumerate(PIECES)]
    return ByteTokenDecoder(shown, False).detokenizer(True)


def make_detokenizer(pieces: list[bytes]) -> Detokenizer:
    return ByteTokenDecoder(pieces, False).detokenizer(True)


def push(output: OutputProcessor, pieces: str | list[str]) -> list[OutputAction]:
    """Push toy tokens by their texts."""
    return [output.push(ID[piece]) for piece in pieces]


def emit_each(text: str) -> list[OutputAction]:
    return [Emit(letter, 1) for letter in text]
