"""The tokenizer inside a GGUF file's metadata, as the same backends that read a model folder's files.

Byte-level vocabularies become the tokenizer.json they came from, SentencePiece ones a tokenizer.model, both
in memory; what the metadata says of special tokens and chat templates becomes a `Folder`. Encoding is the
backends' business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import TokenizerError
from .backend import Backend
from .folder import AddedToken, Folder
from .gguf_splits import SPLITS
from .json_backend import JsonBackend
from .pieces import SPACE
from .spm_backend import SpmBackend
from .spm_proto import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Piece, model_proto

ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # GGUF's own spelling
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}

NEEDED = ("bos_token_id", "eos_token_id")
"""Roles that texts depend on; of the others a token that is not there is simply not there."""

NO_TOKEN = 2**32 - 1
"""-1, as converters write it where an id has no sign: there is no such token."""

KEPT_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that leave the white space behind them alone."""


BOS_FIRST = ("llama-bpe", "llama-v3", "llama3", "tekken")
"""Byte-level vocabularies whose texts start with a BOS where the file does not say."""


class GgufTokenizer(NamedTuple):
    """A vocabulary and what is declared beside it: `Codec(*tokenizer_from_metadata(…), ids)`."""

    backend: Backend
    folder: Folder


def tokenizer_from_metadata(metadata: Mapping[str, Any], source: str) -> GgufTokenizer:
    """The tokenizer that a GGUF file describes; `source` is the file, for errors."""
    vocabulary = Vocabulary(metadata, source)
    if vocabulary.model == "gpt2":
        folder = _folder(vocabulary)
        return GgufTokenizer(JsonBackend(tokenizer_json(vocabulary), folder, source), folder)
    if vocabulary.model == "llama":
        folder = _folder(vocabulary)
        return GgufTokenizer(SpmBackend(tokenizer_model(vocabulary), folder, source), folder)
    raise vocabulary.wrong("model", "gpt2 or llama", vocabulary.model)


class Vocabulary:
    """The `tokenizer.ggml` part of the metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source
        self.model = self.get("model")
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise self.wrong("tokens", "a list of texts", self.get("tokens"))
        self.kinds: list[int] = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        self.scores: list[float] = self._list("scores", float)
        self.merges: list[str] = self._list("merges", str)
        for name, values in (("token_type", self.kinds), ("scores", self.scores)):
            if values and len(values) != len(self.tokens):
                raise self.wrong(name, f"a list of {len(self.tokens)}, one for each token", len(values))
        if not all(math.isfinite(score) for score in self.scores):
            raise self.wrong("scores", "a list of finite numbers", "infinity or NaN")

    def get(self, key: str) -> Any:
        """As the file has it, or None."""
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return default if value is None else value

    def named(self, key: str) -> str | None:
        """The text of the token whose id a key holds; None if there is no such token."""
        number = self.get(key)
        if number is None or number in (-1, NO_TOKEN):
            return None
        if type(number) is int and 0 <= number < len(self.tokens):
            return self.tokens[number]
        if type(number) is int and key not in NEEDED:
            return None
        raise self.wrong(key, f"an id below {len(self.tokens)}", number)

    def wrong(self, key: str, expected: str, found: object) -> TokenizerError:
        """The error for a value that cannot be, or is not there."""
        shown = repr(found) if len(repr(found)) <= 80 else repr(found)[:77] + "..."
        return TokenizerError(
            f"{self.source}: tokenizer.ggml.{key} should be {expected}, found {shown}. "
            "Convert the model again."
        )

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.wrong(key, f"a list of {kind.__name__}", value)
        return value


def tokenizer_json(v: Vocabulary) -> str:
    """The tokenizer.json of a byte-level vocabulary."""
    pre = v.get("pre")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise TokenizerError(
            f"{v.source}: tokenizer.ggml.pre is {pre!r}; how such a tokenizer cuts text is not known here. "
            f"Known: {', '.join(SPLITS)}. Convert the model again, or use its original folder."
        )
    splits = SPLITS[pre]
    vocab: dict[str, int] = {}
    added = []
    for number, (text, kind) in enumerate(zip(v.tokens, v.kinds, strict=True)):
        if not text or kind == UNUSED:
            continue
        if text in vocab:
            raise v.wrong("tokens", "texts that differ", f"{text!r} as {vocab[text]} and as {number}")
        vocab[text] = number
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            added.append(_added(text, number, special=kind != USER_DEFINED))
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": splits.whole_words,
        "vocab": vocab,
        "merges": _merges(v),
    }
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": splits.normalizer(),
        "pre_tokenizer": splits.pre_tokenizer(),
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(state, ensure_ascii=False)


def tokenizer_model(v: Vocabulary) -> bytes:
    """The tokenizer.model of a SentencePiece vocabulary."""
    if not v.scores:
        raise v.wrong("scores", "there: they decide which pieces are put together", None)
    unknown = v.get("unknown_token_id") if UNKNOWN not in v.kinds else None
    pieces: dict[str, Piece] = {}
    for number, (text, score, kind) in enumerate(zip(v.tokens, v.scores, v.kinds, strict=True)):
        if number == unknown:
            kind = UNKNOWN
        if kind == USER_DEFINED:
            text = text.replace(" ", SPACE)  # as the vocabulary had it: the converter wrote these out
        if not text:
            text, kind = f"\x00{number}", UNUSED
        if text in pieces:
            raise v.wrong("tokens", "texts that differ", f"{text!r} again as {number}")
        if not NORMAL <= kind <= BYTE:
            raise v.wrong("token_type", f"numbers from {NORMAL} to {BYTE}", kind)
        pieces[text] = Piece(text, score, kind)
    if sum(piece.kind == UNKNOWN for piece in pieces.values()) != 1:
        raise v.wrong("token_type", f"{UNKNOWN} (unknown) for exactly one token", "another number of them")
    return model_proto(
        pieces.values(),
        first_space=v.flag("add_space_prefix", True),
        bos=v.named("bos_token_id"),
        eos=v.named("eos_token_id"),
    )


def _folder(v: Vocabulary) -> Folder:
    """What tokenizer_config.json would declare."""
    named = {role: v.named(key) for role, key in ROLES.items() if v.get(key) is not None}
    config: dict[str, Any] = {**named, "chat_template": _templates(v)}
    for flag in ("add_bos_token", "add_eos_token"):
        if v.get(flag) is not None:
            config[flag] = v.flag(flag, False)
    if v.model == "gpt2":
        config.setdefault("add_bos_token", v.get("pre") in BOS_FIRST)
    return Folder(
        path=Path(v.source),
        config={key: value for key, value in config.items() if value is not None},
        added=_trimming(v),
        named=named,
    )


def _trimming(v: Vocabulary) -> tuple[AddedToken, ...]:
    """Phi-3's special tokens swallow white space behind them, which GGUF has no way to say."""
    if v.model != "llama" or v.metadata.get("general.architecture") != "phi3":
        return ()
    return tuple(
        AddedToken(text, number, rstrip=text not in KEPT_SPACES, source=v.source)
        for number, (text, kind) in enumerate(zip(v.tokens, v.kinds, strict=True))
        if kind == CONTROL and text
    )


def _templates(v: Vocabulary) -> str | list[dict[str, str]] | None:
    """`tokenizer.chat_template`, and those with a name behind it."""
    prefix = "tokenizer.chat_template"
    found = {}
    for key, value in v.metadata.items():
        if key == prefix or key.startswith(prefix + "."):
            if not isinstance(value, str):
                raise TokenizerError(f"{v.source}: {key} should be a string, found {type(value).__name__}.")
            found[key[len(prefix) + 1 :] or "default"] = value
    if list(found) == ["default"]:
        return found["default"]
    return [{"name": name, "template": source} for name, source in found.items()] or None


def _added(text: str, number: int, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}


def _merges(v: Vocabulary) -> list[Any]:
    """As they are, which is read twice as fast, if it is plain where each is to be cut; else in halves."""
    if all([merge.count(" ") == 1 and merge[0] != " " and merge[-1] != " " for merge in v.merges]):
        return v.merges
    return [_pair(v, merge) for merge in v.merges]


def _pair(v: Vocabulary, merge: str) -> list[str]:
    """The two halves of a merge; a space that belongs to a half is its first letter."""
    at = merge.find(" ", 1)
    if at < 0 or at == len(merge) - 1:
        raise v.wrong("merges", "two pieces with a space between them", merge)
    return [merge[:at], merge[at + 1 :]]
