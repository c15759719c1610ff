"""Codec: text to lists of ids and back, and the ids that mean something other than text.

It joins a vocabulary (a `Backend`) with what the files beside it declare: which ids begin, end and pad a
text, which are special, what an embedding's alias stands for. It holds no tensors and builds no lookup tables
(see `vocab`), and it never adds a BOS or an EOS that it was not asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from ..errors import TokenizerError, TokenizerNotFound
from .backend import Backend, prefix_ids
from .detokenize import ByteDecoding, Decoding, Detokenizer, LibraryDecoding
from .finding import Finder
from .folder import AddedToken, Folder, read_folder
from .json_backend import JsonBackend
from .spm_backend import SpmBackend
from .vocab import Vocab

Kind = Literal["auto", "json", "spm"]

EMBEDDING_INDEX = 1_000_000_000
"""Ids from here on stand for injected vectors, not for text."""

DEFAULT_BOS, DEFAULT_EOS = (
    1,
    2,
)  # where SentencePiece puts them; used when no file says, if the tokens there are special


class TokenizerConfig(Protocol):
    """What a tokenizer needs to know of a model."""

    @property
    def model_dir(self) -> str | None:
        """The folder with the tokenizer's files."""

    @property
    def bos_token_id(self) -> int | None:
        """The id config.json begins a text with."""

    @property
    def eos_token_id(self) -> int | None:
        """The first id config.json ends a text with."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """All ids config.json ends a text with."""

    @property
    def pad_token_id(self) -> int | None:
        """The id config.json pads with."""

    @property
    def vocab_size(self) -> int:
        """How many ids the model has, which may be more than the tokenizer knows."""


class Embedding(Protocol):
    """Something with ids of its own that a prompt refers to by a text alias."""

    @property
    def text_alias(self) -> str:
        """What stands for it in a prompt."""

    def get_ids(self) -> list[int]:
        """The ids it occupies."""


@dataclass(frozen=True)
class ModelIds:
    """What config.json says about ids."""

    bos: int | None = None
    eos: int | None = None
    more_eos: Sequence[int] = ()
    pad: int | None = None
    vocab_size: int = 0

    @classmethod
    def of(cls, config: TokenizerConfig) -> ModelIds:
        """Take them from a model's config."""
        return cls(
            bos=config.bos_token_id,
            eos=config.eos_token_id,
            more_eos=tuple(config.eos_token_ids),
            pad=config.pad_token_id,
            vocab_size=config.vocab_size,
        )


BOS_FIRST = ("CodeLlamaTokenizer", "GemmaTokenizer", "LlamaTokenizer")
"""Classes of tokenizers that put a BOS before a text where their files do not say."""


class Codec:
    """One model's text: encode, decode, special ids.

    `eos_id` is the id that ends a text; `eos_ids` are all ids that any of the files says may. `pad_id` is -1
    when nothing can serve as padding.
    """

    def __init__(self, backend: Backend, folder: Folder, model: ModelIds | None = None) -> None:
        """Join a vocabulary with what its folder and the model's config declare."""
        model = model or ModelIds()
        self.backend = backend
        self.folder = folder
        self.special: dict[str, int] = dict(backend.special)
        self.special_texts: dict[int, str] = {number: text for text, number in self.special.items()}
        own_bos, own_eos = backend.own_ids()
        self.bos_id = self._role("bos_token", model.bos, own_bos, DEFAULT_BOS)
        self.eos_id = self._role("eos_token", model.eos, own_eos, DEFAULT_EOS)
        named_eos = self._named_id("eos_token")
        every = [self.eos_id, *model.more_eos, *folder.generation_eos, named_eos]
        self.eos_ids = tuple(dict.fromkeys(number for number in every if number is not None))
        self.pad_id = self._padding(model.pad)
        unk = backend.unk_token or folder.named.get("unk_token")
        self.unk_id = None if unk is None else backend.piece_to_id(unk)
        self._model_size = model.vocab_size

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        model: ModelIds | None = None,
        kind: Kind = "auto",
        vocab_file: str | Path | None = None,
    ) -> Codec:
        """Read a model folder: tokenizer.json if there is one, else tokenizer.model, unless told which.

        `vocab_file` names a vocabulary explicitly (`tokenizer.model.v3`, say); JSON if it ends in `.json`.
        """
        folder = read_folder(path)
        file = _choose(folder.path, kind, vocab_file)
        as_json = file.suffix == ".json"
        backend: Backend = (
            JsonBackend.from_file(file, folder) if as_json else SpmBackend.from_file(file, folder)
        )
        return cls(backend, folder, model)

    @cached_property
    def wants_bos(self) -> bool:
        """Whether a text starts with a BOS, by what the files say: in so many words, or by what they add."""
        config = self.folder.config or {}
        said = config.get("add_bos_token")
        if isinstance(said, bool):
            return said
        own = self.backend.own_start()
        if own is not None:
            return self.bos_id in own
        kind = config.get("tokenizer_class")
        if not isinstance(kind, str) or not isinstance(self.backend, JsonBackend):
            return True  # nobody says, and a model that has a BOS has mostly seen it first
        return kind.removesuffix("Fast") in BOS_FIRST

    @property
    def size(self) -> int:
        """One more than the highest known id."""
        return self.backend.vocab_size()

    def with_ids(self, bos: int | None, eos: Sequence[int], pad: int) -> Codec:
        """The same text with other ids for BOS, EOS and padding than the files say.

        Another object, since what is derived from one (a grammar's vocabulary, say) is kept by it.
        """
        twin = copy.copy(self)
        twin.__dict__.pop("_decodings", None)  # other ids show nothing
        twin.bos_id, twin.eos_ids, twin.pad_id = bos, tuple(dict.fromkeys(eos)), pad
        twin.eos_id = next(iter(twin.eos_ids), None)
        return twin

    def text_of(self, number: int | None) -> str:
        """What a token stands for, special or not; "" for no token."""
        if number is None or not self.backend.defined(number):
            return ""
        return self.special_texts.get(number) or self.backend.vocab[number]

    def role_texts(self) -> dict[str, str]:
        """The texts of BOS, EOS and the like, as chat templates name them.

        A role that the files leave out is filled from the ids; one that they say is empty stays out.
        """
        own = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unk_id}
        texts = {role: self.text_of(number) for role, number in own.items()} | dict(self.folder.named)
        return {role: text for role, text in texts.items() if text}

    def encode(
        self,
        text: str,
        *,
        add_bos: bool = False,
        add_eos: bool = False,
        special: bool = False,
        aliases: Mapping[str, Sequence[int]] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Ids of a text.

        `special` makes special text its id, otherwise it is ordinary text. `aliases` are texts that stand for
        ids of their own. `continues` says that the text goes on after something already encoded.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"Only text can be encoded, found {type(text).__name__}.")
        ids = [self.bos_id] if add_bos and self.bos_id is not None else []
        position = 0
        for start, end, token in _alias_finder(aliases).find(text) if aliases else ():
            ids += self._run(text[position:start], special, continues or position > 0)
            ids += aliases[token.content] if aliases else ()
            position = end
        ids += self._run(text[position:], special, continues or position > 0)
        return [*ids, self.eos_id] if add_eos and self.eos_id is not None else ids

    def decode(self, ids: Iterable[int], *, special: bool = False, continues: bool = False) -> str:
        """The text of ids; padding, unknown ids and, unless `special`, special tokens and EOS vanish.

        An ordinary token that config.json pads with (0 is "!" in many vocabularies) is text all the same.
        """
        return self._decodings[special].decode(ids, continues)

    def detokenizer(self, *, special: bool = False, continues: bool = False) -> Detokenizer:
        """The text of ids that are still arriving."""
        return self._decodings[special].stream(continues)

    @cached_property
    def misread(self) -> dict[str, int]:
        """Ordinary added tokens that the vocabulary's own decoder does not give back as written."""
        return {
            text: number for text, number in self.backend.ordinary.items() if number in self.backend.misread
        }

    @cached_property
    def vocab(self) -> Vocab:
        """The lookup tables."""
        backend = self.backend
        return Vocab(
            pieces=lambda: backend.vocab,
            token_bytes=lambda: None if (known := backend.token_bytes()) is None else known.table,
            special=self.special_texts,
            undefined=[n for n in range(backend.base_size, self.size) if not backend.defined(n)],
            model_size=self._model_size,
        )

    @cached_property
    def _decodings(self) -> dict[bool, Decoding]:
        return {special: self._decoding(special) for special in (False, True)}

    def _decoding(self, special: bool) -> Decoding:
        marks: set[int | None] = {self.eos_id, *self.special_texts}
        padding = (marks | {self.unk_id}) & {self.pad_id}
        hidden = padding if special else padding | marks
        known = self.backend.token_bytes()
        if known is None:
            shown = self.backend.defined
            before = prefix_ids(self.backend)
            return LibraryDecoding(self.backend.decode, lambda n: shown(n) and n not in hidden, before)
        table = [b"" if number in hidden else raw for number, raw in enumerate(known.table)]
        return ByteDecoding(table, known.strips_space)

    def _run(self, text: str, special: bool, continues: bool) -> list[int]:
        return self.backend.ids(text, special=special, continues=continues) if text else []

    def _named_id(self, role: str) -> int | None:
        text = self.folder.named.get(role)
        return None if text is None else self.backend.piece_to_id(text)

    def _role(self, role: str, given: int | None, own: int | None, default: int) -> int | None:
        """config.json, then the tokenizer's files, then the usual place if a special token is there."""
        if given is not None:
            return given
        if role in self.folder.named:
            return self._named_id(role)
        if own is not None:
            return own
        return default if default in self.special_texts else None

    def _padding(self, given: int | None) -> int:
        if given is not None:
            return given
        named = self._named_id("pad_token")
        if named is not None:
            return named
        pad = self.backend.piece_to_id("<pad>")
        if pad:
            return pad
        return self.eos_id if self.eos_id is not None and self.eos_id != self.bos_id else -1


def _choose(folder: Path, kind: Kind, vocab_file: str | Path | None) -> Path:
    if vocab_file is not None:
        return folder / vocab_file
    names = {
        "auto": ["tokenizer.json", "tokenizer.model"],
        "json": ["tokenizer.json"],
        "spm": ["tokenizer.model"],
    }[kind]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise TokenizerNotFound(
        f"No supported tokenizer found: {folder} has no {' and no '.join(names)}. "
        "Copy the tokenizer's files from the original model."
    )


def _alias_finder(aliases: Mapping[str, Sequence[int]]) -> Finder:
    if "" in aliases:
        raise TokenizerError("An embedding's text alias must not be empty.")
    return Finder(AddedToken(alias, 0) for alias in aliases)
