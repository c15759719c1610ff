"""Tokenizer: the public class, with ids as tensors of shape (1, n) and the method names of exllamav2.

It adds shapes, padding, caching and old names to `Codec`, which encodes and decodes lists of ids, and
`ChatTemplates`.
"""

from __future__ import annotations

import logging
import re
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
from .chat_template import PromptFormat
from .codec import AliasedEmbedding, TokenizerConfig
from .gguf import tokenizer_from_metadata
from .vocab import TokenizerBackend

log = logging.getLogger(__name__)

EMPTY_MAPPING: Mapping[Any, Any] = MappingProxyType({})

MAX_CHECKED_CHARS = 2**16
"""How many characters of a text are searched: a prompt format has a special token near its start."""


class UnparsedSpecialCheck:
    """Logs a warning, once per tokenizer, about a special token that is written in a text and encoded as plain text.

    Plain text is the right default: a user's message must not be able to inject special tokens. But many old
    scripts write a prompt format by hand and pass no flag, since exllamav2 always parsed special tokens;
    their prompts would silently be wrong.
    """

    def __init__(self, special: Iterable[str]) -> None:
        self._special = tuple(special)
        self._warned = False

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special)) or r"(?!)")

    def check(self, texts: Iterable[str]) -> None:
        """Warn about the first special token in any of these texts."""
        if self._warned:
            return
        for text in texts:
            match = self._pattern.search(text, 0, MAX_CHECKED_CHARS) if isinstance(text, str) else None
            if match is not None:
                self._warned = True
                log.warning(
                    "A text that is encoded holds %r, which is taken for plain text. If it is meant as that "
                    "token, as in a chat template, pass encode_special_tokens=True.",
                    match[0],
                )
                return


class Tokenizer:
    """Encodes and decodes the text of one model; has its lookup tables and chat templates.

    It reads tokenizer.json from `config.model_dir`, or a SentencePiece tokenizer.model if there is none, or a
    GGUF file's metadata. Lookup tables are built when first asked for; callers share them and must not change
    them.
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

    MAX_CACHED_STRINGS = 100
    MIN_DRAFT_AGREEMENT = 0.9  # share of the ids that must have the same text in a draft model's vocabulary

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

        `force_json` and `force_spm` choose one kind if the folder has both; `vocab_file` names the file.
        `lazy_init=False` builds every lookup table now. `chat_limits` bounds what a chat template may use.
        """
        if not hasattr(config, "model_dir") or config.model_dir is None:
            found = f"a {type(config).__name__} that has no model_dir"
            raise TokenizerError(f"A tokenizer is read for a Config('/path/to/model'), found {found}.")
        if force_json and force_spm:
            raise TokenizerError("force_json and force_spm exclude each other.")
        self.config = config
        kind: Literal["auto", "json", "spm"] = "spm" if force_spm else "json" if force_json else "auto"
        self._chat_limits = chat_limits
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

    @cached_property
    def _sandbox(self) -> TemplateSandbox:
        return TemplateSandbox(self._chat_limits)

    def _set_codec(self, codec: Codec) -> None:
        self.codec, self._unparsed_special = codec, UnparsedSpecialCheck(codec.special_tokens)
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
        self.extended_piece_to_id, self.extended_id_to_piece = dict(codec.special_tokens), dict(codec.special_texts)
        overrides, added = codec.backend.decode_overrides, codec.backend.nonspecial_added_tokens
        self.unspecial_piece_to_id = {text: token_id for text, token_id in added.items() if token_id in overrides}
        self.unspecial_id_to_piece = {token_id: text for text, token_id in self.unspecial_piece_to_id.items()}

    @property
    def bos_token_id(self) -> int | None:
        """The id that `add_bos` puts before a text."""
        return self.codec.bos_id

    @bos_token_id.setter
    def bos_token_id(self, token_id: int | None) -> None:
        self._replace_ids(_checked_token_id("bos_token_id", token_id), self.codec.eos_ids, self.codec.pad_id)

    @property
    def eos_token_id(self) -> int | None:
        """The id that `add_eos` puts behind a text. Assigning it replaces all of `eos_token_ids`."""
        return self.codec.eos_id

    @eos_token_id.setter
    def eos_token_id(self, token_id: int | None) -> None:
        self.eos_token_ids = [] if token_id is None else [token_id]

    @property
    def eos_token_ids(self) -> list[int]:
        """Every EOS id, the one that `add_eos` uses first."""
        return list(self.codec.eos_ids)

    @eos_token_ids.setter
    def eos_token_ids(self, numbers: Sequence[int]) -> None:
        found = [_checked_token_id("eos_token_id", token_id) for token_id in numbers]
        eos_ids = [token_id for token_id in found if token_id is not None]
        self._replace_ids(self.codec.bos_id, eos_ids, self.codec.pad_id)

    @property
    def pad_token_id(self) -> int:
        """The id that pads the shorter rows of a batch; -1 if no token can."""
        return self.codec.pad_id

    @pad_token_id.setter
    def pad_token_id(self, token_id: int | None) -> None:
        found = _checked_token_id("pad_token_id", token_id)
        self._replace_ids(self.codec.bos_id, self.codec.eos_ids, -1 if found is None else found)

    def _replace_ids(self, bos: int | None, eos: Sequence[int], pad: int) -> None:
        self.codec = self.codec.with_ids(bos, eos, pad)

    @property
    def tokenizer(self) -> TokenizerBackend:
        """`tokenizer_model`, under the other name it has in exllamav2."""
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

        Special tokens written in the text are plain text unless `encode_special_tokens`. The text aliases of
        `embeddings` become their ids. With `return_offsets` it also returns the offset of each row, minus the
        length of its padding, int32 (rows,).
        """
        if not isinstance(text, (str, list, tuple)):
            raise TokenizerError(f"Only text, or a list of texts, can be encoded, found {type(text).__name__}.")
        texts = [text] if isinstance(text, str) else list(text)
        if not encode_special_tokens:
            self._unparsed_special.check(texts)
        aliases = _ids_by_alias(embeddings or ())
        rows = [
            self.codec.encode(
                row, add_bos=add_bos, add_eos=add_eos, parse_special=encode_special_tokens, aliases=aliases or None
            )
            for row in texts
        ]
        ids = pad_left(rows, self.pad_token_id)
        if not return_offsets:
            return ids
        return ids, torch.tensor([len(row) - ids.shape[1] for row in rows], dtype=torch.int)

    def encode_special(self, text: str) -> list[int]:
        """Ids of a text whose special tokens become their ids."""
        return self.codec.encode(text, parse_special=True)

    def encode_unspecial(self, text: str) -> list[int]:
        """Ids of a text whose special tokens stay plain text."""
        return self.codec.encode(text)

    def cached_encode_str(self, text: str) -> torch.Tensor:
        """`encode(text)`, cached for the last hundred texts."""
        with self._cache_lock:
            found = self._cache.get(text)
        if found is None:
            found = self.encode(text)
            with self._cache_lock:
                while len(self._cache) >= self.MAX_CACHED_STRINGS:
                    del self._cache[next(iter(self._cache))]
                self._cache[text] = found
        return found

    def decode(self, ids: torch.Tensor | list[torch.Tensor], decode_special_tokens: bool = False) -> Any:
        """The text of ids (n,), the texts of ids (rows, n), or a list of results for a list of tensors.

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
        """The text of ids, without special tokens."""
        return self.codec.decode(ids)

    def detokenizer(self, decode_special_tokens: bool = False, continues: bool = False) -> Detokenizer:
        """A detokenizer, which decodes ids one by one; `continues` if they follow a prompt."""
        return self.codec.detokenizer(show_special=decode_special_tokens, continues=continues)

    def num_tokens(self, text: str) -> int:
        """The number of ids of a text."""
        return len(self.codec.encode(text))

    def padding_mask(self, ids: torch.Tensor) -> torch.Tensor:
        """Minus infinity where an id is padding, else 0; float16, in the shape of ids."""
        mask = torch.zeros(ids.shape, dtype=torch.half, device=ids.device)
        return mask.masked_fill_(ids == self.pad_token_id, float("-inf"))

    def single_token(self, token_id: int) -> torch.Tensor:
        """One id as a tensor (1, 1)."""
        return torch.tensor([[token_id]], dtype=torch.long)

    def single_id(self, piece: str) -> int | None:
        """The id of an added token, of a piece, or of a token as the vocabulary file writes it; else None."""
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
        """The piece of every id: the text it adds when not first; "" for special tokens unless included."""
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
        """The id of each piece; the highest of tokens with the same piece."""
        self.piece_to_id = self.codec.vocab.piece_to_id()
        return self.piece_to_id

    def get_prefix_to_ids_dict(self) -> dict[str, list[int]]:
        """For every piece, the ids of all pieces that start with it, ascending."""
        self.prefix_to_ids = self.codec.vocab.prefix_to_ids()
        return self.prefix_to_ids

    def get_prefix_id_to_ids_dict(self) -> dict[int, list[int]]:
        """For every id, the ids of all tokens that start with its bytes: for token healing."""
        self.prefix_id_to_ids = self.codec.vocab.prefix_id_to_ids()
        return self.prefix_id_to_ids

    def get_char_trie(self) -> _Trie:
        """A trie of the pieces' characters."""
        self.char_trie = self.codec.vocab.trie()
        return self.char_trie

    def get_char_trie_ci(self) -> _Trie:
        """A trie of the lower-cased pieces' characters."""
        self.char_trie_ci = self.codec.vocab.trie(ignore_case=True)
        return self.char_trie_ci

    def check_draft(self, config: TokenizerConfig) -> None:
        """InputError if a draft model's ids have other texts: hardly any of its drafts would be accepted.

        One vocabulary may extend the other, up to twice its size. A draft model without a tokenizer passes.
        """
        try:
            draft_pieces = Tokenizer(config).get_id_to_piece_list()
        except TokenizerError:
            return
        pieces = self.get_id_to_piece_list()
        num_common = min(len(pieces), len(draft_pieces))
        num_equal = sum(one == other for one, other in zip(pieces, draft_pieces, strict=False))
        larger = max(len(pieces), len(draft_pieces))
        if num_equal < self.MIN_DRAFT_AGREEMENT * num_common or larger > 2 * num_common:
            raise InputError(
                f"The draft model {config.model_dir} has another vocabulary, of {len(draft_pieces):,} "
                f"tokens; the model's has {len(pieces):,}, and {num_equal:,} are the same in both. Hardly "
                "any draft would be accepted: use a smaller model of the same family, or ngram."
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
        """The source of the default chat template, None if the model has none."""
        template = self.chat_templates.default
        return None if template is None else template.source

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
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
        """The prompt of a conversation: text or, with `tokenize`, ids (1, n) with special tokens.

        `add_bos` puts BOS before the ids unless the template wrote one. `chat_template` is the name of one of
        the model's templates, the name of a prompt format, or a template's source; further keywords become
        variables of the template.
        """
        if add_bos and not tokenize:
            raise TokenizerError("add_bos adds an id, not text: use it with tokenize=True, or pass it to encode().")
        text = render_chat(
            self._sandbox,
            self.chat_templates.choose(chat_template, tools is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables={**self.codec.texts_by_role(), **variables},
        )
        if not tokenize:
            return text
        ids = self.codec.encode(text, parse_special=True)
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return torch.tensor([ids], dtype=torch.long)

    def encode_rendered(
        self,
        text: str,
        prompt_format: PromptFormat | None = None,
        embeddings: Sequence[AliasedEmbedding] | None = None,
    ) -> torch.Tensor:
        """Ids (1, n) of a rendered conversation; a prompt format says whether it has special tokens and BOS."""
        special = prompt_format is None or prompt_format.encode_special_tokens
        ids = self.encode(text, encode_special_tokens=special, embeddings=embeddings)
        bos = self.bos_token_id
        if prompt_format is not None and prompt_format.add_bos and bos is not None and ids[0, :1].tolist() != [bos]:
            ids = torch.cat((torch.tensor([[bos]]), ids), dim=1)
        return ids


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
    """Rows of ids as one tensor (rows, longest), padded on the left."""
    longest = max(map(len, rows), default=0)
    table = [[pad] * (longest - len(row)) + list(row) for row in rows]
    return torch.tensor(table, dtype=torch.long).reshape(len(rows), longest)


def _ids_by_alias(embeddings: Sequence[AliasedEmbedding]) -> dict[str, list[int]]:
    """The ids of each text alias; two embeddings with other ids may not share one."""
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
        return index(token_id)  # type: ignore[arg-type]  # it raises TypeError for what is not an integer
    except TypeError:
        raise TokenizerError(f"{name} must be a token's id, or None; found {token_id!r:.80}.") from None
