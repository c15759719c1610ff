"""Codec: encodes text to lists of ids and decodes them, without tensors.

It combines a vocabulary (a `TokenizerBackend`) with what the files beside it and config.json declare: the ids
of BOS, EOS and padding, the special tokens, and the ids that an embedding's text alias stands for. It adds
BOS or EOS only when asked. Lookup tables over the whole vocabulary are in `vocab`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from ..errors import TokenizerError, TokenizerNotFound
from .detokenizer import ByteTokenDecoder, Detokenizer, LibraryTokenDecoder, TokenDecoder
from .hf import HFBackend
from .sentencepiece import SentencePieceBackend
from .tokenizer_files import AddedToken, AddedTokenMatcher, TokenizerFiles, read_tokenizer_files
from .vocab import TokenizerBackend, Vocab

TokenizerKind = Literal["auto", "json", "spm"]

EMBEDDING_INDEX = 1_000_000_000
"""Ids from here on stand for injected embeddings, not for text."""

DEFAULT_BOS_ID, DEFAULT_EOS_ID = 1, 2
"""SentencePiece's usual ids; used where no file declares them and these tokens are special."""


class TokenizerConfig(Protocol):
    """What a tokenizer reads of a model's config; `exlm.Config` has all of it."""

    @property
    def model_dir(self) -> str | None:
        """The folder with the tokenizer's files, or the GGUF file."""

    @property
    def bos_token_id(self) -> int | None:
        """The BOS id of config.json."""

    @property
    def eos_token_id(self) -> int | None:
        """The first EOS id of config.json."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """All EOS ids of config.json."""

    @property
    def pad_token_id(self) -> int | None:
        """The padding id of config.json."""

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding; there may be more than the tokenizer has ids."""


class AliasedEmbedding(Protocol):
    """An embedding with ids of its own that a prompt refers to by a text alias; `MMEmbedding` is one."""

    @property
    def text_alias(self) -> str:
        """The text that stands for the embedding in a prompt."""

    def get_ids(self) -> list[int]:
        """The ids that replace the alias."""


@dataclass(frozen=True)
class ConfigTokenIds:
    """The special token ids and the vocabulary size that config.json declares."""

    bos: int | None = None
    eos: int | None = None
    all_eos: Sequence[int] = ()
    pad: int | None = None
    vocab_size: int = 0

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> ConfigTokenIds:
        """Read them from a model's config."""
        return cls(
            bos=config.bos_token_id,
            eos=config.eos_token_id,
            all_eos=tuple(config.eos_token_ids),
            pad=config.pad_token_id,
            vocab_size=config.vocab_size,
        )


CLASSES_WITH_BOS = ("CodeLlamaTokenizer", "GemmaTokenizer", "LlamaTokenizer")
"""The `tokenizer_class`es of transformers that put BOS before a text unless the files say otherwise."""


class Codec:
    """Encodes and decodes the text of one model and holds its special token ids.

    `eos_id` is the id that `add_eos` appends; `eos_ids` are all ids that any of the files declares as EOS.
    `pad_id` is -1 if no token can serve as padding.
    """

    def __init__(
        self, backend: TokenizerBackend, files: TokenizerFiles, config_ids: ConfigTokenIds | None = None
    ) -> None:
        """Combine a vocabulary with what the tokenizer files and config.json declare."""
        config_ids = config_ids or ConfigTokenIds()
        self.backend = backend
        self.files = files
        self.special_tokens: dict[str, int] = dict(backend.special_tokens)
        self.special_texts: dict[int, str] = {token_id: text for text, token_id in self.special_tokens.items()}
        declared_bos, declared_eos = backend.declared_bos_eos()
        self.bos_id = self._resolve_special_id("bos_token", config_ids.bos, declared_bos, DEFAULT_BOS_ID)
        self.eos_id = self._resolve_special_id("eos_token", config_ids.eos, declared_eos, DEFAULT_EOS_ID)
        named_eos = self._named_id("eos_token")
        candidates = [self.eos_id, *config_ids.all_eos, *files.generation_eos_ids, named_eos]
        self.eos_ids = tuple(dict.fromkeys(token_id for token_id in candidates if token_id is not None))
        self.pad_id = self._resolve_pad_id(config_ids.pad)
        unk = backend.unk_token or files.token_by_role.get("unk_token")
        self.unk_id = None if unk is None else backend.piece_to_id(unk)
        self._model_size = config_ids.vocab_size

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        config_ids: ConfigTokenIds | None = None,
        kind: TokenizerKind = "auto",
        vocab_file: str | Path | None = None,
    ) -> Codec:
        """Read a model folder: tokenizer.json if it has one, else tokenizer.model, unless `kind` chooses.

        `vocab_file` names a vocabulary file, such as tokenizer.model.v3; it is read as JSON if it ends in
        `.json`.
        """
        files = read_tokenizer_files(path)
        vocab_path = _find_vocab_file(files.path, kind, vocab_file)
        is_json = vocab_path.suffix == ".json"
        backend: TokenizerBackend = (
            HFBackend.from_file(vocab_path, files) if is_json else SentencePieceBackend.from_file(vocab_path, files)
        )
        return cls(backend, files, config_ids)

    @cached_property
    def wants_bos(self) -> bool:
        """Whether a prompt should start with BOS.

        `add_bos_token` decides if it is there, then the post-processor of tokenizer.json, then the
        tokenizer's class.
        """
        config = self.files.config or {}
        flag = config.get("add_bos_token")
        if isinstance(flag, bool):
            return flag
        prepended_ids = self.backend.prepended_ids()
        if prepended_ids is not None:
            return self.bos_id in prepended_ids
        tokenizer_class = config.get("tokenizer_class")
        if not isinstance(tokenizer_class, str) or not isinstance(self.backend, HFBackend):
            return True  # nothing is declared, and most models that have a BOS were trained with it first
        return tokenizer_class.removesuffix("Fast") in CLASSES_WITH_BOS

    @property
    def size(self) -> int:
        """One more than the highest id that a file defines."""
        return self.backend.vocab_size()

    def with_ids(self, bos: int | None, eos: Sequence[int], pad: int) -> Codec:
        """A codec of the same vocabulary with other ids for BOS, EOS and padding.

        It is a new object because tables that are derived from a codec, such as a grammar's, are cached by
        it.
        """
        copied = copy.copy(self)
        copied.__dict__.pop("_decoders", None)  # they leave out EOS and padding
        copied.bos_id, copied.eos_ids, copied.pad_id = bos, tuple(dict.fromkeys(eos)), pad
        copied.eos_id = next(iter(copied.eos_ids), None)
        return copied

    def token_text(self, token_id: int | None) -> str:
        """The text of a token, special or not; "" for None or an undefined id."""
        if token_id is None or not self.backend.is_defined(token_id):
            return ""
        return self.special_texts.get(token_id) or self.backend.vocab[token_id]

    def texts_by_role(self) -> dict[str, str]:
        """The texts of BOS, EOS and other special token roles, under the names that chat templates use.

        A role that the files do not mention gets the text of its id; one that they declare as null is left
        out.
        """
        ids_by_role = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unk_id}
        texts = {role: self.token_text(token_id) for role, token_id in ids_by_role.items()} | dict(
            self.files.token_by_role
        )
        return {role: text for role, text in texts.items() if text}

    def encode(
        self,
        text: str,
        *,
        add_bos: bool = False,
        add_eos: bool = False,
        parse_special: bool = False,
        aliases: Mapping[str, Sequence[int]] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """The ids of a text.

        With `parse_special` the text of a special token becomes its id; otherwise it is plain text. `aliases`
        maps texts to the ids that replace them. `continues` says that the text is a continuation of text that
        is already encoded.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"Only text can be encoded, found {type(text).__name__}.")
        ids = [self.bos_id] if add_bos and self.bos_id is not None else []
        position = 0
        for start, end, token in _alias_matcher(aliases).find(text) if aliases else ():
            ids += self._tokenize_part(text[position:start], parse_special, continues or position > 0)
            ids += aliases[token.content] if aliases else ()
            position = end
        ids += self._tokenize_part(text[position:], parse_special, continues or position > 0)
        return [*ids, self.eos_id] if add_eos and self.eos_id is not None else ids

    def decode(self, ids: Iterable[int], *, show_special: bool = False, continues: bool = False) -> str:
        """The text of ids, without padding, undefined ids and, unless `show_special`, special tokens and EOS.

        If config.json pads with a token that is not special (0 is "!" in many vocabularies), its text is
        kept.
        """
        return self._decoders[show_special].decode(ids, continues)

    def detokenizer(self, *, show_special: bool = False, continues: bool = False) -> Detokenizer:
        """A detokenizer, which decodes ids one by one as they are sampled."""
        return self._decoders[show_special].detokenizer(continues)

    @cached_property
    def vocab(self) -> Vocab:
        """The lookup tables."""
        backend = self.backend
        return Vocab(
            pieces=lambda: backend.vocab,
            token_bytes=lambda: None if backend.token_bytes is None else backend.token_bytes.table,
            special=self.special_texts,
            undefined=[n for n in range(backend.base_vocab_size, self.size) if not backend.is_defined(n)],
            model_size=self._model_size,
        )

    @cached_property
    def _decoders(self) -> dict[bool, TokenDecoder]:
        return {show_special: self._make_decoder(show_special) for show_special in (False, True)}

    def _make_decoder(self, show_special: bool) -> TokenDecoder:
        special_ids: set[int | None] = {self.eos_id, *self.special_texts}
        # A padding id is hidden unless its token is ordinary text.
        hidden = {*special_ids, self.unk_id} & {self.pad_id}
        if not show_special:
            hidden |= special_ids
        token_bytes = self.backend.token_bytes
        if token_bytes is None:
            is_defined = self.backend.is_defined
            context = self.backend.decode_context_ids()
            return LibraryTokenDecoder(self.backend.decode, lambda n: is_defined(n) and n not in hidden, context)
        table = [b"" if token_id in hidden else raw for token_id, raw in enumerate(token_bytes.table)]
        return ByteTokenDecoder(table, token_bytes.strips_leading_space)

    def _tokenize_part(self, text: str, parse_special: bool, continues: bool) -> list[int]:
        return self.backend.tokenize(text, parse_special=parse_special, continues=continues) if text else []

    def _named_id(self, role: str) -> int | None:
        text = self.files.token_by_role.get(role)
        return None if text is None else self.backend.piece_to_id(text)

    def _resolve_special_id(
        self, role: str, from_config: int | None, from_vocab: int | None, default: int
    ) -> int | None:
        """config.json's id, else the tokenizer files', else the default id if that token is special."""
        if from_config is not None:
            return from_config
        if role in self.files.token_by_role:
            return self._named_id(role)
        if from_vocab is not None:
            return from_vocab
        return default if default in self.special_texts else None

    def _resolve_pad_id(self, from_config: int | None) -> int:
        if from_config is not None:
            return from_config
        named = self._named_id("pad_token")
        if named is not None:
            return named
        pad = self.backend.piece_to_id("<pad>")
        if pad:
            return pad
        return self.eos_id if self.eos_id is not None and self.eos_id != self.bos_id else -1


def _find_vocab_file(folder: Path, kind: TokenizerKind, vocab_file: str | Path | None) -> Path:
    if vocab_file is not None:
        return folder / vocab_file
    names = {"auto": ["tokenizer.json", "tokenizer.model"], "json": ["tokenizer.json"], "spm": ["tokenizer.model"]}[
        kind
    ]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise TokenizerNotFound(
        f"No supported tokenizer found: {folder} has no {' and no '.join(names)}. "
        "Copy the tokenizer's files from the original model."
    )


def _alias_matcher(aliases: Mapping[str, Sequence[int]]) -> AddedTokenMatcher:
    if "" in aliases:
        raise TokenizerError("An embedding's text alias must not be empty.")
    return AddedTokenMatcher(AddedToken(alias, 0) for alias in aliases)
