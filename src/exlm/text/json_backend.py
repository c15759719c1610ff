"""A vocabulary from Hugging Face's `tokenizer.json`, run by the `tokenizers` library.

The library is asked for ids and never for BOS or EOS: post-processors, truncation and padding that the file
brings are not used. Special text is recognised only when asked for. The library can be told to leave it
alone, but a model that reaches a special token through its own merges or vocabulary would still emit it, so
ids are checked, and such a text is encoded again by a copy of the tokenizer in which the special tokens have
other, unguessable names.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import BadText, ExlmError, TokenizerError, TokenizerNotFound
from .backend import lone_surrogate, middle_pieces, require_space_to_read
from .folder import MAX_GAP, AddedToken, Folder, read_text
from .pieces import BYTE_TOKEN, TokenBytes, from_decoder

LONG = 4096
"""Letters of a text beyond which it is encoded as a batch of one: then other threads run meanwhile, and no
offsets are made."""

PANIC = "PanicException"
"""What a panic of the library's Rust code becomes: a BaseException, whose class no module exports."""


class JsonBackend:
    """A `tokenizer.json` and the tokens that the files beside it add."""

    def __init__(self, text: str, folder: Folder, name: str = "tokenizer.json") -> None:
        """Read the JSON text; `name` is what errors call it."""
        self.name = name
        require_space_to_read(len(text), name)
        with _library_errors(f"{name} is not a tokenizer the tokenizers library can read"):
            self._library = tokenizers.Tokenizer.from_str(text)
            _make_repeatable(self._library)
            vocab = self._library.get_vocab()
        self._lock = threading.Lock()
        if not vocab:
            raise TokenizerError(f"{name} has an empty vocabulary.")
        self.base_size = 1 + max(vocab.values())
        if self.base_size - len(vocab) > MAX_GAP:
            raise TokenizerError(f"{name} has {len(vocab)} tokens, but ids up to {self.base_size - 1}.")
        with _library_errors(f"{name} does not take the tokens that the files beside it declare"):
            fillers = self._declare(folder)
        added = {
            n: token for n, token in self._library.get_added_tokens_decoder().items() if n not in fillers
        }
        self.special = {token.content: number for number, token in added.items() if token.special}
        self.ordinary = {token.content: number for number, token in added.items() if not token.special}
        self._special_ids = frozenset(self.special.values())
        self._numbers = vocab | self.special | self.ordinary
        self._pieces: list[str | None] = [None] * (1 + max(self._numbers.values()))
        for piece, number in self._numbers.items():
            self._pieces[number] = piece
        self._variants: dict[tuple[bool, bool], tokenizers.Tokenizer] = {(False, False): self._library}

    @classmethod
    def from_file(cls, path: Path, folder: Folder) -> JsonBackend:
        """Read a tokenizer.json."""
        text = read_text(path)
        if text is None:
            raise TokenizerNotFound(f"No supported tokenizer found: there is no {path}.")
        return cls(text, folder, str(path))

    @cached_property
    def unk_token(self) -> str | None:
        """What the model calls a text it cannot write."""
        model = self._library.model
        if isinstance(model, tokenizers.models.Unigram):
            number = json.loads(model.__getstate__()).get("unk_id")
            return None if number is None else self._pieces[number]
        unk: str | None = getattr(model, "unk_token", None)
        return unk

    @cached_property
    def vocab(self) -> list[str]:
        """The text of every token in the middle of a text, by id."""
        return middle_pieces(self)

    @cached_property
    def misread(self) -> dict[int, str]:
        """Added tokens that the file's decoder would garble."""
        if self._token_bytes is not None:
            return self._token_bytes.misread
        added = [*self.special.items(), *self.ordinary.items()]
        return {number: text for text, number in added if self._decode_run([number]) != text}

    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self._pieces)

    def defined(self, number: int) -> bool:
        """Whether any token has this id."""
        return 0 <= number < len(self._pieces) and self._pieces[number] is not None

    def id_to_piece(self, number: int) -> str:
        """The token as the file writes it, byte letters and all."""
        return (self._pieces[number] or "") if self.defined(number) else ""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token as the file writes it."""
        return self._numbers.get(piece)

    def enumerate_tokens(self) -> Iterator[tuple[int, str]]:
        """Pairs of id and `vocab` text."""
        return enumerate(self.vocab)

    def encode(self, text: str) -> list[int]:
        """Encode with special text as ordinary text."""
        return self.ids(text, special=False)

    def ids(self, text: str, *, special: bool, continues: bool = False) -> list[int]:
        """Encode; special text becomes its id only if asked."""
        ids = self._run(self._variant(continues, plain=False), text, special)
        if not special and not self._special_ids.isdisjoint(ids):
            ids = self._run(self._variant(continues, plain=True), text, special)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with every token visible; added tokens read as their text."""
        texts: list[str] = []
        run: list[int] = []
        for number in ids:
            if number in self.misread:
                texts += [self._decode_run(run), self.misread[number]]
                run = []
            elif self.defined(number):
                run.append(number)
        return "".join([*texts, self._decode_run(run)])

    def token_bytes(self) -> TokenBytes | None:
        """The bytes of every token, where the file's decoder only adds bytes up."""
        return self._token_bytes

    def own_ids(self) -> tuple[int | None, int | None]:
        """The file does not say which tokens begin and end a text."""
        return None, None

    def own_start(self) -> list[int] | None:
        """What the file's post-processor puts before a letter."""
        if self._library.post_processor is None:
            return None
        with self._lock, _library_errors(f"{self.name} cannot add to a text what its post_processor says"):
            found = self._library.encode("a")
        pairs = zip(found.ids, found.special_tokens_mask, strict=True)
        return [number for number, _ in takewhile(lambda pair: pair[1], pairs)]

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        decoder = self._library.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        return from_decoder(state, self._pieces, self.special, self.ordinary)

    def _decode_run(self, ids: list[int]) -> str:
        with self._lock:
            try:
                return self._library.decode(ids, skip_special_tokens=False) if ids else ""
            except BaseException as error:
                raise _typed(error, f"{self.name} cannot decode {len(ids)} ids") from None

    def _run(self, library: tokenizers.Tokenizer, text: str, special: bool) -> list[int]:
        with self._lock:
            if library.encode_special_tokens == special:
                library.encode_special_tokens = not special
            try:
                if len(text) > LONG:
                    (found,) = library.encode_batch_fast([text], add_special_tokens=False)
                    return list(found.ids)
                return list(library.encode(text, add_special_tokens=False).ids)
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(error, MemoryError):
                    why = lone_surrogate(text) or error
                    raise BadText(f"{self.name} cannot encode: {why}.") from None
                raise _typed(error, f"{self.name} cannot encode a text") from None

    def _variant(self, continues: bool, plain: bool) -> tokenizers.Tokenizer:
        """The tokenizer without a first-word space (continues), without reachable special tokens (plain)."""
        with self._lock:
            key = (continues, plain)
            if key not in self._variants:
                text = self._library.to_str()
                require_space_to_read(len(text), self.name)
                state = json.loads(text)
                changed = continues and _drop_first_space(state.get("pre_tokenizer"))
                changed |= plain and _hide(state, self.special)
                base = self._variants[(False, False)]
                with _library_errors(f"{self.name} cannot be read with its special tokens as plain text"):
                    made = tokenizers.Tokenizer.from_str(json.dumps(state)) if changed else base
                self._variants[key] = made
            return self._variants[key]

    def _declare(self, folder: Folder) -> frozenset[int]:
        """Teach the library the tokens other files declare; returns the ids used up to reach theirs."""
        library = self._library
        told = library.get_added_tokens_decoder()
        # tokenizer.json says more about a token than the bare id of added_tokens.json
        tokens = [
            token for token in folder.added if token.source != "added_tokens.json" or token.id not in told
        ]
        fillers: list[int] = []
        new: list[tokenizers.AddedToken] = []
        following = self.base_size
        for token in tokens:
            known = library.token_to_id(token.content)
            if known is not None and known != token.id:
                raise TokenizerError(self._disagreement(token, f"gives it {known}"))
            if known is None:
                if len(fillers) + token.id - following > MAX_GAP:
                    raise TokenizerError(self._disagreement(token, f"ends at {self.base_size - 1}"))
                fillers += range(following, token.id)
                new += [_filler() for _ in range(following, token.id)]
                following = token.id + 1
            new.append(_added(token))
        same = {token.content: token for token in told.values()}
        library.add_tokens([token for token in new if same.get(token.content) != token])
        for token in tokens:
            if library.token_to_id(token.content) != token.id:
                raise TokenizerError(self._disagreement(token, "uses that id for another"))
        library.add_special_tokens(_roles(library, folder.special_names))
        return frozenset(fillers)

    def _disagreement(self, token: AddedToken, found: str) -> str:
        return (
            f"{token.source} gives {token.content!r} the id {token.id}, but {self.name} {found}. "
            f"Correct {token.source}."
        )


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Within it, what the library raises becomes a TokenizerError that begins with `what`."""
    try:
        yield
    except BaseException as error:
        raise _typed(error, what) from None


def _typed(error: BaseException, what: str) -> BaseException:
    """A TokenizerError for one of the library's, which are bare Exceptions or panics; others as they are."""
    theirs = isinstance(error, Exception) or type(error).__name__ == PANIC
    if not theirs or isinstance(error, ExlmError | MemoryError):
        return error
    return TokenizerError(f"{what}: {error}. Fetch the file again.")


def _added(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _filler() -> tokenizers.AddedToken:
    """A token nobody can write: the library numbers new tokens in a row, so undefined ids must be used up."""
    return tokenizers.AddedToken("\x00" + secrets.token_hex(16), normalized=False)


def _roles(library: tokenizers.Tokenizer, names: Sequence[str]) -> list[tokenizers.AddedToken]:
    """Tokens that are special for their role alone: the file has them, but as ordinary text."""
    special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    found = [name for name in names if name not in special and library.token_to_id(name) is not None]
    return [tokenizers.AddedToken(name, special=True, normalized=False) for name in found]


def _make_repeatable(library: tokenizers.Tokenizer) -> None:
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, "dropout", None) is not None:
        library.model.dropout = None


def _drop_first_space(step: dict[str, Any] | None) -> bool:
    """Edit a pre-tokenizer so that the start of a text is like its middle; False when it already is."""
    if step is None:
        return False
    if step.get("type") == "Sequence":
        return any([_drop_first_space(inner) for inner in step["pretokenizers"]])
    if step.get("type") != "Metaspace" or step.get("prepend_scheme") != "first":
        return False
    step["prepend_scheme"] = "never"
    return True


def _hide(state: dict[str, Any], special: dict[str, int]) -> bool:
    """Rename the special tokens in a tokenizer's state so that its model cannot spell them; ids stay.

    One-letter tokens keep their names (a model has no other way to write the letter), as do single bytes.
    """
    model = state["model"]
    vocab = model["vocab"]
    pieces = {entry[0] for entry in vocab} if isinstance(vocab, list) else vocab
    nonce = secrets.token_hex(16)
    names = {
        text: f"\x00{nonce}{number}"
        for text, number in special.items()
        if text in pieces and len(text) > 1 and not BYTE_TOKEN.match(text)
    }
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, names)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    state["post_processor"] = None
    return bool(names)


def _touches(pair: str | list[str], names: dict[str, str]) -> bool:
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return left in names or right in names or left + right in names
