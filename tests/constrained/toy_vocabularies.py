"""Small vocabularies, a filter as other libraries write them, and decoding with random choices."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from exlm.constrained import FilterStack, token_sets
from exlm.tokenizer.codec import Codec, ConfigTokenIds
from exlm.tokenizer.vocab import byte_to_unicode

BYTE_LETTERS = byte_to_unicode()
LETTER_PIECES = [
    "</s>",
    "<s>",
    *"abcdefghijklmnopqrstuvwxyz",
    " ",
    "!",
    ".",
    "\n",
    "Hello",
    "Hel",
    "He",
    " world",
]


def to_byte_level(raw: bytes) -> str:
    """Bytes in the alphabet of byte-level vocabularies."""
    return "".join(BYTE_LETTERS[byte] for byte in raw)


def byte_codec(
    folder: Path, pieces: list[bytes], *, eos: list[int] | None = None, special: int = 2, lower: bool = False
) -> Codec:
    """A byte-level vocabulary of these pieces, the first `special` of them special tokens."""
    vocab = {to_byte_level(raw) if n >= special else raw.decode(): n for n, raw in enumerate(pieces)}
    assert len(vocab) == len(pieces)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken(raw.decode(), special=True) for raw in pieces[:special]])
    return _saved(tokenizer, folder, [0] if eos is None else eos)


def metaspace_codec(folder: Path, words: list[str]) -> Codec:
    """A vocabulary like SentencePiece's: a token for every byte, and further tokens for `words`."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *words]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    return _saved(tokenizer, folder, [2])


def _saved(tokenizer: Tokenizer, folder: Path, eos: list[int]) -> Codec:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return Codec.from_folder(folder, ConfigTokenIds(eos=eos[0] if eos else None, all_eos=tuple(eos[1:])))


def allowed_ids(stack: FilterStack) -> set[int]:
    """The tokens allowed now."""
    mask = stack.allowed().mask
    assert mask is not None
    return set(token_sets.bitmask_ids(mask).tolist())


Choose = Callable[[list[int], int], int]


def run_stack(stack: FilterStack, choose: Choose, limit: int = 400) -> tuple[list[int], bool]:
    """Begin, and choose tokens up to an end token: their ids, and whether an end token was reached."""
    stack.begin()
    ids: list[int] = []
    while len(ids) < limit:
        allowed = stack.allowed()
        assert allowed.mask is not None
        allowed_now = token_sets.bitmask_ids(allowed.mask).tolist()
        if allowed.forced_id is not None:
            assert allowed_now == [allowed.forced_id]
        token_id = allowed.forced_id if allowed.forced_id is not None else choose(allowed_now, len(ids))
        ids.append(token_id)
        stack.feed(token_id)
        if token_id in allowed.end_ids:
            return ids, True
    return ids, False


def random_then_closing(source: random.Random, codec: Codec, after: int) -> Choose:
    """Choose any token for `after` steps, then prefer EOS, quotes and closing brackets."""
    closing = {n for n, piece in enumerate(codec.vocab.pieces()) if piece in ('"', "}", "]", "1", ",")}

    def choose(allowed: list[int], step: int) -> int:
        ends = [n for n in allowed if n in codec.eos_ids]
        if step >= after and ends:
            return ends[0]
        closing_ids = [n for n in allowed if n in closing] if step >= after else []
        return source.choice(closing_ids or allowed)

    return choose


class DuckTypedFilter:
    """A filter without a base class, like lm-format-enforcer's; `allowed` maps ids to its result."""

    def __init__(self, allowed: Callable[[list[int]], Any]) -> None:
        self.allowed = allowed
        self.token_sequence: list[int] = []

    def begin(self, prefix_str: str) -> None:
        self.token_sequence = []

    def feed(self, token: torch.Tensor) -> None:
        assert token.shape == (1, 1)
        assert token.dtype == torch.long
        self.token_sequence.append(int(token[0][0]))

    def next(self) -> Any:
        return self.allowed(self.token_sequence)
