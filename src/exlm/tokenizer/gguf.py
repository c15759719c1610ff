"""Reads the tokenizer in a GGUF file's metadata.

A byte-level vocabulary becomes the tokenizer.json that it was converted from, a SentencePiece vocabulary a
tokenizer.model, both in memory and for the same backends that read a model folder. Special tokens and chat
templates become `TokenizerFiles`.

Of a tokenizer.json's pre-tokenizer GGUF has only the name. `PRE_TOKENIZERS` has the models' own
pre-tokenizers by these names; an unknown name is an error, since a wrong guess would silently change ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import TokenizerError, shown
from ..families.gguf import NO_TOKEN_ID
from .hf import HFBackend
from .sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePiece,
    SentencePieceBackend,
    model_proto,
)
from .tokenizer_files import AddedToken, TokenizerFiles
from .vocab import METASPACE, TokenizerBackend

ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # GGUF's own spelling
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}

REQUIRED_ROLE_KEYS = ("bos_token_id", "eos_token_id")
"""Roles whose id must be valid; for any other role an invalid id means that there is no such token."""

PHI3_WITHOUT_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that do not strip the white space behind them."""

PRE_TOKENIZERS_WITH_BOS = ("llama-bpe", "llama-v3", "llama3", "tekken")
"""Byte-level vocabularies whose texts start with BOS unless `add_bos_token` says otherwise."""


class GgufTokenizer(NamedTuple):
    """The first two arguments of `Codec`."""

    backend: TokenizerBackend
    files: TokenizerFiles


def tokenizer_from_metadata(metadata: Mapping[str, Any], source: str) -> GgufTokenizer:
    """Read the tokenizer of a GGUF file; errors call the file `source`."""
    vocabulary = GgufVocabulary(metadata, source)
    if vocabulary.model == "gpt2":
        files = _tokenizer_files(vocabulary)
        return GgufTokenizer(HFBackend(tokenizer_json(vocabulary), files, source), files)
    if vocabulary.model == "llama":
        files = _tokenizer_files(vocabulary)
        return GgufTokenizer(SentencePieceBackend(tokenizer_model(vocabulary), files, source), files)
    raise vocabulary.invalid_value("model", "gpt2 or llama", vocabulary.model)


class GgufVocabulary:
    """The validated `tokenizer.ggml.*` keys of the metadata."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source
        self.model = self.get("model")
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise self.invalid_value("tokens", "a list of texts", self.get("tokens"))
        self.token_types: list[int] = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        self.scores: list[float] = self._list("scores", float)
        self.merges: list[str] = self._list("merges", str)
        for name, values in (("token_type", self.token_types), ("scores", self.scores)):
            if values and len(values) != len(self.tokens):
                raise self.invalid_value(name, f"a list of {len(self.tokens)}, one for each token", len(values))
        if not all(math.isfinite(score) for score in self.scores):
            raise self.invalid_value("scores", "a list of finite numbers", "infinity or NaN")

    def get(self, key: str) -> Any:
        """The value of a key as stored, or None."""
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def boolean(self, key: str, default: bool) -> bool:
        """The value of a boolean key."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.invalid_value(key, "true or false", value)
        return default if value is None else value

    def token_at(self, key: str) -> str | None:
        """The text of the token whose id a key holds; None if there is no such token."""
        token_id = self.get(key)
        if token_id is None or token_id in (-1, NO_TOKEN_ID):
            return None
        if type(token_id) is int and 0 <= token_id < len(self.tokens):
            return self.tokens[token_id]
        if type(token_id) is int and key not in REQUIRED_ROLE_KEYS:
            return None
        raise self.invalid_value(key, f"an id below {len(self.tokens)}", token_id)

    def invalid_value(self, key: str, expected: str, found: object) -> TokenizerError:
        """The error for an invalid or missing value."""
        return TokenizerError(
            f"{self.source}: tokenizer.ggml.{key} should be {expected}, found {shown(found)}. Convert the model again."
        )

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.invalid_value(key, f"a list of {kind.__name__}", value)
        return value


def tokenizer_json(v: GgufVocabulary) -> str:
    """The tokenizer.json of a byte-level vocabulary."""
    pre = v.get("pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{v.source}: tokenizer.ggml.pre is {pre!r}, a pre-tokenizer that is not known. "
            f"Known: {', '.join(PRE_TOKENIZERS)}. Convert the model again, or use its original folder."
        )
    pre_tokenizer = PRE_TOKENIZERS[pre]
    vocab: dict[str, int] = {}
    added = []
    for token_id, (text, token_type) in enumerate(zip(v.tokens, v.token_types, strict=True)):
        if not text or token_type == UNUSED:
            continue
        if text in vocab:
            raise v.invalid_value("tokens", "texts that differ", f"{text!r} as {vocab[text]} and as {token_id}")
        vocab[text] = token_id
        if token_type in (CONTROL, UNKNOWN, USER_DEFINED):
            added.append(_added_token_entry(text, token_id, special=token_type != USER_DEFINED))
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre_tokenizer.ignore_merges,
        "vocab": vocab,
        "merges": _merges(v),
    }
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": pre_tokenizer.normalizer(),
        "pre_tokenizer": pre_tokenizer.pre_tokenizer(),
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(state, ensure_ascii=False)


def tokenizer_model(v: GgufVocabulary) -> bytes:
    """The tokenizer.model of a SentencePiece vocabulary."""
    if not v.scores:
        raise v.invalid_value("scores", "there, because they decide which pieces are merged", None)
    unknown = v.get("unknown_token_id") if UNKNOWN not in v.token_types else None
    pieces: dict[str, SentencePiece] = {}
    for token_id, (text, score, token_type) in enumerate(zip(v.tokens, v.scores, v.token_types, strict=True)):
        if token_id == unknown:
            token_type = UNKNOWN
        if token_type == USER_DEFINED:
            text = text.replace(" ", METASPACE)  # as in the vocabulary: converters write these with spaces
        if not text:
            text, token_type = f"\x00{token_id}", UNUSED
        if text in pieces:
            raise v.invalid_value("tokens", "texts that differ", f"{text!r} again as {token_id}")
        if not NORMAL <= token_type <= BYTE:
            raise v.invalid_value("token_type", f"numbers from {NORMAL} to {BYTE}", token_type)
        pieces[text] = SentencePiece(text, score, token_type)
    if sum(piece.kind == UNKNOWN for piece in pieces.values()) != 1:
        raise v.invalid_value("token_type", f"{UNKNOWN} (unknown) for exactly one token", "another number of them")
    return model_proto(
        pieces.values(),
        add_dummy_prefix=v.boolean("add_space_prefix", True),
        bos=v.token_at("bos_token_id"),
        eos=v.token_at("eos_token_id"),
    )


def _tokenizer_files(v: GgufVocabulary) -> TokenizerFiles:
    """What a tokenizer_config.json with the same content would declare."""
    token_by_role = {role: v.token_at(key) for role, key in ROLE_KEYS.items() if v.get(key) is not None}
    config: dict[str, Any] = {**token_by_role, "chat_template": _chat_templates(v)}
    for flag in ("add_bos_token", "add_eos_token"):
        if v.get(flag) is not None:
            config[flag] = v.boolean(flag, False)
    if v.model == "gpt2":
        config.setdefault("add_bos_token", v.get("pre") in PRE_TOKENIZERS_WITH_BOS)
    return TokenizerFiles(
        path=Path(v.source),
        config={key: value for key, value in config.items() if value is not None},
        added=_phi3_added_tokens(v),
        token_by_role=token_by_role,
    )


def _phi3_added_tokens(v: GgufVocabulary) -> tuple[AddedToken, ...]:
    """Phi-3's special tokens, most of which strip the white space behind them; GGUF has no key for that."""
    if v.model != "llama" or v.metadata.get("general.architecture") != "phi3":
        return ()
    return tuple(
        AddedToken(text, token_id, rstrip=text not in PHI3_WITHOUT_RSTRIP, source=v.source)
        for token_id, (text, token_type) in enumerate(zip(v.tokens, v.token_types, strict=True))
        if token_type == CONTROL and text
    )


def _chat_templates(v: GgufVocabulary) -> str | list[dict[str, str]] | None:
    """The chat template, or all of them by name if the file has named ones."""
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


def _added_token_entry(text: str, token_id: int, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": special}


def _merges(v: GgufVocabulary) -> list[Any]:
    """The merges, unchanged if each has one space, which the library reads twice as fast; else as pairs."""
    if all([merge.count(" ") == 1 and merge[0] != " " and merge[-1] != " " for merge in v.merges]):
        return v.merges
    return [_split_merge(v, merge) for merge in v.merges]


def _split_merge(v: GgufVocabulary, merge: str) -> list[str]:
    """The two pieces of a merge; a space within a piece is its first letter."""
    space = merge.find(" ", 1)
    if space < 0 or space == len(merge) - 1:
        raise v.invalid_value("merges", "two pieces with a space between them", merge)
    return [merge[:space], merge[space + 1 :]]


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEADING_SYMBOL = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"

GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SYMBOLS}|\s+(?!\S)|\s+"
CL100K = rf"{_CONTRACTIONS}|{_LEADING_SYMBOL}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_WHITESPACE}"
QWEN2 = rf"{_CONTRACTIONS}|{_LEADING_SYMBOL}\p{{L}}+|\p{{N}}|{_SYMBOLS}[\r\n]*|{_WHITESPACE}"
TEKKEN = (  # it splits camelCase
    rf"{_LEADING_SYMBOL}{_UPPER}*{_LOWER}+|{_LEADING_SYMBOL}{_UPPER}+{_LOWER}*|"
    rf"\p{{N}}|{_SYMBOLS}[\r\n/]*|{_WHITESPACE}"
)
O200K = (
    rf"{_LEADING_SYMBOL}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEADING_SYMBOL}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_WHITESPACE}"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_WHITESPACE}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level tokenizer.json splits a text into words before it merges pieces."""

    patterns: tuple[str, ...]  # each splits what the previous one left
    individual_digits: bool = False  # split every digit from its neighbours, before the patterns
    nfc: bool = False  # normalise to Unicode NFC first
    ignore_merges: bool = False  # a word that is in the vocabulary is one token, whatever the merges

    def normalizer(self) -> dict[str, Any] | None:
        """The `normalizer` of the tokenizer.json."""
        return {"type": "NFC"} if self.nfc else None

    def pre_tokenizer(self) -> dict[str, Any]:
        """The `pre_tokenizer` of the tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.individual_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        for pattern in self.patterns:
            steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
        return {"type": "Sequence", "pretokenizers": steps}


_LLAMA3 = PreTokenizer((CL100K,), ignore_merges=True)
_CODE = PreTokenizer((GPT2,), individual_digits=True)
_QWEN = PreTokenizer((QWEN2,), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "command-r": PreTokenizer((GPT2,), individual_digits=True, nfc=True),
    "dbrx": PreTokenizer((CL100K,)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-r1-qwen": _QWEN,
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK3)),
    # llama.cpp's own, for files that name none.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2,)),
    "gpt-4o": PreTokenizer((O200K,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "phi-2": PreTokenizer((GPT2,)),
    "qwen2": _QWEN,
    "refact": _CODE,
    "smaug-bpe": PreTokenizer((CL100K,)),
    "smollm": _CODE,
    "starcoder": _CODE,
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True),
}
"""By the value of `tokenizer.ggml.pre`."""
