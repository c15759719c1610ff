"""Tokenizer: the public face of `text`. Tensors of shape (1, n) outside, lists of ids inside.

It keeps the calls and attributes that scripts and integrations of exllamav2 use. What it means to encode,
decode or render a chat is decided in `text`; here are only shapes, names and padding.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import index
from types import MappingProxyType
from typing import Any, Literal, overload

import torch

from ..errors import InputError, TokenizerError
from ..memory import memory_errors
from . import ChatTemplates, Codec, ConfigTokenIds, Detokenizer, TemplateLimits, TemplateSandbox, render_chat
from . import Trie as _Trie
from .backend import TokenizerBackend
from .codec import AliasedEmbedding, TokenizerConfig
from .gguf import tokenizer_from_metadata
from .tokenizer_files import AddedToken, AddedTokenMatcher

log = logging.getLogger(__name__)

EMPTY_MAPPING: Mapping[Any, Any] = MappingProxyType({})

MAX_CHECKED_LETTERS = 2**16
"""Letters of a text: a chat format shows at its beginning."""


class UnparsedSpecialWarning:
    """Tells once, for one tokenizer."""

    def __init__(self, special: Iterable[str]) -> None:
        self._special = tuple(special)
        self._warned = False

    @cached_property
    def _matcher(self) -> AddedTokenMatcher:
        return AddedTokenMatcher(AddedToken(text, 0) for text in self._special)

    def check(self, texts: Iterable[str]) -> None:
        """Warn of the first special token in texts that are encoded as plain ones."""
        if self._warned:
            return
        for text in texts:
            match = (
                next(self._matcher.find(text[:MAX_CHECKED_LETTERS]), None) if isinstance(text, str) else None
            )
            if match is not None:
                self._warned = True
                log.warning(
                    "A text that is encoded holds %r, which is taken for plain text. If it is meant as that "
                    "token, as in a chat format, pass encode_special_tokens=True.",
                    match.token.content,
                )
                return


class Tokenizer:
    """Text to ids and back, lookup tables and chat templates of one model.

    The files are found in `config.model_dir`: tokenizer.json, or a SentencePiece tokenizer.model where there
    is none, or the metadata of a GGUF file. Lookup tables are built when first asked for and shared: do not
    change them.
    """

    Trie = _Trie

    tokenizer_model: TokenizerBackend
    unspecial_piece_to_id: Mapping[str, int] = EMPTY_MAPPING
    unspecial_id_to_piece: Mapping[int, str] = EMPTY_MAPPING
    extended_piece_to_id: Mapping[str, int] = EMPTY_MAPPING
    extended_id_to_piece: Mapping[int, str] = EMPTY_MAPPING
    id_to_piece: list[str] | None = None
    id_to_piece_with_special: list[str] | None = None
    id_to_ord: list[int] | None = None
    piece_to_id: dict[str, int] | None = None
    prefix_to_ids: dict[str, list[int]] | None = None
    prefix_id_to_ids: dict[int, list[int]] | None = None
    char_trie: _Trie | None = None
    char_trie_ci: _Trie | None = None

    CACHED_STRINGS = 100
    ALIKE = 0.9  # of the ids that two vocabularies share, so many mean the same where they are one

    def __init__(
        self,
        config: TokenizerConfig,
        lazy_init: bool = True,
        force_json: bool = False,
        force_spm: bool = False,
        *,
        vocab_file: str | None = None,
        chat_limits: TemplateLimits | None = None,
    ) -> None:
        """Read the tokenizer of a model.

        `force_json` and `force_spm` choose where a folder has both kinds; `vocab_file` names the file itself.
        `lazy_init=False` builds every lookup table now. `chat_limits` bound what a chat template may use up.
        """
        if not hasattr(config, "model_dir") or config.model_dir is None:
            found = f"a {type(config).__name__} that has no model_dir"
            raise TokenizerError(f"A tokenizer is read for a Config('/path/to/model'), found {found}.")
        if force_json and force_spm:
            raise TokenizerError("force_json and force_spm exclude each other.")
        self.config = config
        kind: Literal["auto", "json", "spm"] = "spm" if force_spm else "json" if force_json else "auto"
        self._sandbox = TemplateSandbox(chat_limits)
        self._cache: dict[str, torch.Tensor] = {}
        self._cache_lock = threading.Lock()
        metadata = None if vocab_file is not None else getattr(config, "metadata", None)
        with memory_errors(lambda: f"{config.model_dir}: the tokenizer could not be read"):
            if metadata is None:
                self._set_codec(
                    Codec.from_folder(config.model_dir, ConfigTokenIds.from_config(config), kind, vocab_file)
                )
            else:
                read = tokenizer_from_metadata(metadata, config.model_dir)
                self._set_codec(Codec(read.backend, read.files, ConfigTokenIds.from_config(config)))
            self.chat_templates = ChatTemplates.from_folder(self.codec.files)
            if not lazy_init:
                self.build_tables()

    def _set_codec(self, codec: Codec) -> None:
        self.codec, self._unparsed_special = codec, UnparsedSpecialWarning(codec.special_tokens)
        self.tokenizer_model = codec.backend
        self.tokenizer_config_dict = codec.files.config
        self.wants_bos = codec.wants_bos
        self.unk_token_id = codec.unk_id
        self.bos_token = codec.token_text(codec.bos_id)
        self.eos_token = codec.token_text(codec.eos_id)
        self.unk_token = codec.token_text(codec.unk_id)
        self.pad_token = ""
        self.newline_token, self.space_token = "\n", " "
        self.newline_token_id = _last_or_none(codec.encode("\n"))
        self.space_token_id = _last_or_none(codec.encode(" "))
        self.actual_vocab_size = codec.size
        self.extended_piece_to_id, self.extended_id_to_piece = (
            dict(codec.special_tokens),
            dict(codec.special_texts),
        )
        self.unspecial_piece_to_id = dict(codec.decode_overrides)
        self.unspecial_id_to_piece = {number: text for text, number in codec.decode_overrides.items()}

    @property
    def bos_token_id(self) -> int | None:
        """The id that `add_bos` puts before a text."""
        return self.codec.bos_id

    @bos_token_id.setter
    def bos_token_id(self, token_id: int | None) -> None:
        self._replace_ids(_checked_token_id("bos_token_id", token_id), self.codec.eos_ids, self.codec.pad_id)

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text. Assigned, it is the only one that does."""
        return self.codec.eos_id

    @eos_token_id.setter
    def eos_token_id(self, token_id: int | None) -> None:
        self.eos_token_ids = [] if token_id is None else [token_id]

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a text, the usual one first."""
        return list(self.codec.eos_ids)

    @eos_token_ids.setter
    def eos_token_ids(self, numbers: Sequence[int]) -> None:
        found = [_checked_token_id("eos_token_id", token_id) for token_id in numbers]
        eos_ids = [token_id for token_id in found if token_id is not None]
        self._replace_ids(self.codec.bos_id, eos_ids, self.codec.pad_id)

    @property
    def pad_token_id(self) -> int:
        """The id that fills up the shorter rows of a batch; -1: nothing can."""
        return self.codec.pad_id

    @pad_token_id.setter
    def pad_token_id(self, token_id: int | None) -> None:
        found = _checked_token_id("pad_token_id", token_id)
        self._replace_ids(self.codec.bos_id, self.codec.eos_ids, -1 if found is None else found)

    def _replace_ids(self, bos: int | None, eos: Sequence[int], pad: int) -> None:
        self.codec = self.codec.with_ids(bos, eos, pad)

    @property
    def tokenizer(self) -> TokenizerBackend:
        """The vocabulary, under its other name."""
        return self.tokenizer_model

    @overload
    def encode(
        self,
        text: str | Sequence[str],
        add_bos: bool = ...,
        add_eos: bool = ...,
        encode_special_tokens: bool = ...,
        return_offsets: Literal[False] = ...,
        embeddings: Sequence[AliasedEmbedding] | None = ...,
    ) -> torch.Tensor: ...

    @overload
    def encode(
        self,
        text: str | Sequence[str],
        add_bos: bool = ...,
        add_eos: bool = ...,
        encode_special_tokens: bool = ...,
        *,
        return_offsets: Literal[True],
        embeddings: Sequence[AliasedEmbedding] | None = ...,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def encode(
        self,
        text: str | Sequence[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings: Sequence[AliasedEmbedding] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Ids of a text (1, n), or of several texts (rows, longest), padded on the left; int64 on the CPU.

        Special tokens written in the text are ordinary text unless `encode_special_tokens`. The text aliases
        of `embeddings` become their ids. With `return_offsets` also minus the padding of each row, int32
        (rows,).
        """
        if not isinstance(text, (str, list, tuple)):
            raise TokenizerError(
                f"Only text, or a list of texts, can be encoded, found {type(text).__name__}."
            )
        texts = [text] if isinstance(text, str) else list(text)
        if not encode_special_tokens:
            self._unparsed_special.check(texts)
        aliases = _ids_by_alias(embeddings or ())
        rows = [
            self.codec.encode(
                row,
                add_bos=add_bos,
                add_eos=add_eos,
                parse_special=encode_special_tokens,
                aliases=aliases or None,
            )
            for row in texts
        ]
        longest = max(map(len, rows), default=0)
        padded = [[self.pad_token_id] * (longest - len(row)) + row for row in rows]
        ids = torch.tensor(padded, dtype=torch.long).reshape(len(rows), longest)
        if not return_offsets:
            return ids
        return ids, torch.tensor([len(row) - longest for row in rows], dtype=torch.int)

    def encode_special(self, text: str) -> list[int]:
        """Ids of a text in which special text counts."""
        return self.codec.encode(text, parse_special=True)

    def encode_unspecial(self, text: str) -> list[int]:
        """Ids of a text in which special text is ordinary text."""
        return self.codec.encode(text)

    def cached_encode_str(self, text: str) -> torch.Tensor:
        """`encode(text)`, remembered for the last hundred texts."""
        with self._cache_lock:
            found = self._cache.get(text)
        if found is None:
            found = self.encode(text)
            with self._cache_lock:
                while len(self._cache) >= self.CACHED_STRINGS:
                    del self._cache[next(iter(self._cache))]
                self._cache[text] = found
        return found

    def decode(self, ids: torch.Tensor | list[torch.Tensor], decode_special_tokens: bool = False) -> Any:
        """Text of a row of ids (n,), texts of a table of ids (rows, n), results for a list of tensors.

        Padding, unknown ids and, unless special tokens are decoded, special tokens and EOS are left out.
        """
        if isinstance(ids, list):
            return [self.decode(item, decode_special_tokens) for item in ids]
        if not isinstance(ids, torch.Tensor):
            raise TokenizerError(f"ids must be Tensor (or a list of them), found {type(ids).__name__}.")
        if ids.dim() == 2:
            return [self.codec.decode(row, show_special=decode_special_tokens) for row in ids.tolist()]
        if ids.dim() == 1:
            return self.codec.decode(ids.tolist(), show_special=decode_special_tokens)
        raise TokenizerError(f"ids must be Tensor of one or two dimensions, found shape {tuple(ids.shape)}.")

    def decode_unspecial(self, ids: Sequence[int]) -> str:
        """Text of ids in which special tokens show nothing."""
        return self.codec.decode(ids)

    def detokenizer(self, decode_special_tokens: bool = False, continues: bool = False) -> Detokenizer:
        """A stream that turns ids into text as they arrive; `continues` if they follow a prompt."""
        return self.codec.detokenizer(show_special=decode_special_tokens, continues=continues)

    def num_tokens(self, text: str) -> int:
        """How many ids a text has."""
        return len(self.codec.encode(text))

    def padding_mask(self, ids: torch.Tensor) -> torch.Tensor:
        """Minus infinity where ids are padding, else 0; half precision, the shape of ids."""
        mask = torch.zeros(ids.shape, dtype=torch.half, device=ids.device)
        return mask.masked_fill_(ids == self.pad_token_id, float("-inf"))

    def single_token(self, token_id: int) -> torch.Tensor:
        """One id as a tensor (1, 1)."""
        return torch.tensor([[token_id]], dtype=torch.long)

    def single_id(self, piece: str) -> int | None:
        """The id of a special text, a piece, or a token as the vocabulary writes it; None if unknown."""
        for table in (
            self.codec.special_tokens,
            self.tokenizer_model.nonspecial_added_tokens,
            self.get_piece_to_id_dict(),
        ):
            if piece in table:
                return table[piece]
        return self.tokenizer_model.piece_to_id(piece)

    def get_vocab_size(self) -> int:
        """One more than the highest known id."""
        return self.actual_vocab_size

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """By id, what a token adds in the middle of a text; special tokens are "" unless included."""
        pieces = self.codec.vocab.pieces(include_special_tokens)
        if include_special_tokens:
            self.id_to_piece_with_special = pieces
        else:
            self.id_to_piece = pieces
        return pieces

    def get_id_to_ord_list(self) -> list[int]:
        """By id, the value of a token that is one byte, else -1."""
        self.id_to_ord = self.codec.vocab.ords()
        return self.id_to_ord

    def get_piece_to_id_dict(self) -> dict[str, int]:
        """Piece to id; the highest id of those that share a piece."""
        self.piece_to_id = self.codec.vocab.piece_to_id()
        return self.piece_to_id

    def get_prefix_to_ids_dict(self) -> dict[str, list[int]]:
        """For every piece, the ids of all pieces that start with it, ascending."""
        self.prefix_to_ids = self.codec.vocab.prefix_to_ids()
        return self.prefix_to_ids

    def get_prefix_id_to_ids_dict(self) -> dict[int, list[int]]:
        """For every id, the ids of all tokens that start with its bytes, itself too: the healing table."""
        self.prefix_id_to_ids = self.codec.vocab.prefix_id_to_ids()
        return self.prefix_id_to_ids

    def get_char_trie(self) -> _Trie:
        """The pieces, letter by letter."""
        self.char_trie = self.codec.vocab.trie()
        return self.char_trie

    def get_char_trie_ci(self) -> _Trie:
        """The lower-cased pieces, letter by letter."""
        self.char_trie_ci = self.codec.vocab.trie(ignore_case=True)
        return self.char_trie_ci

    def check_draft(self, config: TokenizerConfig) -> None:
        """Refuse a draft model to which ids mean other texts: hardly a guess of it would be right.

        One may go on behind the other, to twice its size. A folder without a tokenizer is believed.
        """
        try:
            theirs = Tokenizer(config).get_id_to_piece_list()
        except TokenizerError:
            return
        ours = self.get_id_to_piece_list()
        both = list(zip(ours, theirs, strict=False))
        alike = sum(one == other for one, other in both)
        if alike < self.ALIKE * len(both) or 2 * len(both) < max(len(ours), len(theirs)):
            raise InputError(
                f"The draft model {config.model_dir} has another vocabulary, of {len(theirs):,} tokens; the "
                f"model's has {len(ours):,}, and {alike:,} are the same in both. Its guesses "
                "would be of no use: take a smaller model of the same family, or ngram."
            )

    def build_tables(self) -> None:
        """Build every lookup table now."""
        self.get_id_to_piece_list()
        self.get_id_to_piece_list(include_special_tokens=True)
        self.get_id_to_ord_list()
        self.get_piece_to_id_dict()
        self.get_prefix_to_ids_dict()
        self.get_prefix_id_to_ids_dict()
        self.get_char_trie()
        self.get_char_trie_ci()

    @property
    def chat_template(self) -> str | None:
        """The source of the template used when none is named, None if the model has none."""
        template = self.chat_templates.default
        return None if template is None else template.source

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""
        return bool(self.chat_templates.templates)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        tokenize: Literal[False] = ...,
        add_bos: bool = ...,
        *,
        chat_template: str | None = ...,
        **variables: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        *,
        tokenize: Literal[True],
        add_bos: bool = ...,
        chat_template: str | None = ...,
        **variables: Any,
    ) -> torch.Tensor: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
        add_bos: bool = False,
        *,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str | torch.Tensor:
        """The conversation as the model reads it: text or, with `tokenize`, ids (1, n) with special tokens.

        `add_bos` puts a BOS before the ids unless the template wrote one. `chat_template` is the name of one
        of the model's templates or the source of another; further keywords become variables of the template.
        """
        if add_bos and not tokenize:
            raise TokenizerError(
                "add_bos adds an id, not text: use it with tokenize=True, or pass it to encode()."
            )
        text = render_chat(
            self._sandbox,
            self.chat_templates.choose(chat_template, tools is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables={**self.codec.special_token_texts(), **variables},
        )
        if not tokenize:
            return text
        ids = self.codec.encode(text, parse_special=True)
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return torch.tensor([ids], dtype=torch.long)


def _ids_by_alias(embeddings: Sequence[AliasedEmbedding]) -> dict[str, list[int]]:
    """What each alias stands for; two embeddings may not share one."""
    aliases: dict[str, list[int]] = {}
    for embedding in embeddings:
        ids = embedding.get_ids()
        if aliases.setdefault(embedding.text_alias, ids) != ids:
            raise TokenizerError(
                f"Two embeddings have the text alias {embedding.text_alias!r}: give each its own text_alias."
            )
    return aliases


def _last_or_none(ids: list[int]) -> int | None:
    return ids[-1] if ids else None


def _checked_token_id(name: str, token_id: object) -> int | None:
    if token_id is None:
        return None
    try:
        if isinstance(token_id, bool):
            raise TypeError
        return index(token_id)  # type: ignore[arg-type]  # what is no whole number says so
    except TypeError:
        raise TokenizerError(f"{name} must be a token's id, or None; found {token_id!r:.80}.") from None
