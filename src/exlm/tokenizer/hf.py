"""The backend for Hugging Face's `tokenizer.json`, run by the `tokenizers` library.

The file's post-processor, truncation and padding are not used: `Codec` adds BOS and EOS. Special tokens
written in a text are recognised only when the caller asks for it. The library has a flag for that, but merges
or the vocabulary can still produce a special token from plain text. So the resulting ids are checked, and a
text that has some is encoded again by a copy of the tokenizer in which special tokens have random names.
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
from .tokenizer_files import (
    MAX_ID_GAP,
    AddedToken,
    TokenizerFiles,
    describe_lone_surrogate,
    read_text,
    require_memory_to_read,
)
from .vocab import BYTE_TOKEN, TokenBytes, TokenizerBackend, token_bytes_from_decoder

LONG_TEXT_CHARS = 4096
"""Characters; a longer text is encoded as a batch of one, which releases the GIL and makes no offsets."""

RUST_PANIC = "PanicException"
"""The class of a panic in the library's Rust code: a BaseException that no module exports."""


class HFBackend(TokenizerBackend):
    """A `tokenizer.json` and the tokens that the files beside it add."""

    def __init__(self, text: str, files: TokenizerFiles, name: str = "tokenizer.json") -> None:
        """Read the JSON text; errors call it `name`."""
        self.name = name
        require_memory_to_read(len(text), name)
        with _library_errors(f"{name} is not a tokenizer the tokenizers library can read"):
            self._hf_tokenizer = tokenizers.Tokenizer.from_str(text)
            _disable_truncation_padding_dropout(self._hf_tokenizer)
            vocab = self._hf_tokenizer.get_vocab()
        self._lock = threading.Lock()
        if not vocab:
            raise TokenizerError(f"{name} has an empty vocabulary.")
        self.base_vocab_size = 1 + max(vocab.values())
        if self.base_vocab_size - len(vocab) > MAX_ID_GAP:
            raise TokenizerError(f"{name} has {len(vocab)} tokens, but ids up to {self.base_vocab_size - 1}.")
        with _library_errors(f"{name} does not take the tokens that the files beside it declare"):
            placeholder_ids = self._add_declared_tokens(files)
        added = {
            n: token for n, token in self._hf_tokenizer.get_added_tokens_decoder().items() if n not in placeholder_ids
        }
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.nonspecial_added_tokens = {
            token.content: token_id for token_id, token in added.items() if not token.special
        }
        self._special_ids = frozenset(self.special_tokens.values())
        self._id_by_piece = vocab | self.special_tokens | self.nonspecial_added_tokens
        self._pieces = [None] * (1 + max(self._id_by_piece.values()))
        for piece, token_id in self._id_by_piece.items():
            self._pieces[token_id] = piece
        self._hf_variants: dict[tuple[bool, bool], tokenizers.Tokenizer] = {(False, False): self._hf_tokenizer}

    @classmethod
    def from_file(cls, path: Path, files: TokenizerFiles) -> HFBackend:
        """Read a tokenizer.json."""
        text = read_text(path)
        if text is None:
            raise TokenizerNotFound(f"No supported tokenizer found: there is no {path}.")
        return cls(text, files, str(path))

    @cached_property
    def unk_token(self) -> str | None:
        model = self._hf_tokenizer.model
        if isinstance(model, tokenizers.models.Unigram):
            token_id = json.loads(model.__getstate__()).get("unk_id")
            return None if token_id is None else self._pieces[token_id]
        unk: str | None = getattr(model, "unk_token", None)
        return unk

    @cached_property
    def decode_overrides(self) -> dict[int, str]:
        if self.token_bytes is not None:
            return self.token_bytes.decode_overrides
        added = [*self.special_tokens.items(), *self.nonspecial_added_tokens.items()]
        return {token_id: text for text, token_id in added if self._decode_with_library([token_id]) != text}

    def tokenize(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        ids = self._encode_with(self._hf_variant(continues, hide_special=False), text, parse_special)
        if not parse_special and not self._special_ids.isdisjoint(ids):
            ids = self._encode_with(self._hf_variant(continues, hide_special=True), text, parse_special)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        texts: list[str] = []
        run: list[int] = []
        for token_id in ids:
            if token_id in self.decode_overrides:
                texts += [self._decode_with_library(run), self.decode_overrides[token_id]]
                run = []
            elif self.is_defined(token_id):
                run.append(token_id)
        return "".join([*texts, self._decode_with_library(run)])

    def declared_bos_eos(self) -> tuple[int | None, int | None]:
        return None, None  # a tokenizer.json has none

    def prepended_ids(self) -> list[int] | None:
        if self._hf_tokenizer.post_processor is None:
            return None
        with self._lock, _library_errors(f"{self.name} cannot add to a text what its post_processor says"):
            found = self._hf_tokenizer.encode("a")
        pairs = zip(found.ids, found.special_tokens_mask, strict=True)
        return [token_id for token_id, _ in takewhile(lambda pair: pair[1], pairs)]

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        decoder = self._hf_tokenizer.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        return token_bytes_from_decoder(state, self._pieces, self.special_tokens, self.nonspecial_added_tokens)

    def _decode_with_library(self, ids: list[int]) -> str:
        with self._lock:
            try:
                return self._hf_tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
            except BaseException as error:
                raise _to_tokenizer_error(error, f"{self.name} cannot decode {len(ids)} ids") from None

    def _encode_with(self, hf_tokenizer: tokenizers.Tokenizer, text: str, parse_special: bool) -> list[int]:
        with self._lock:
            if hf_tokenizer.encode_special_tokens == parse_special:
                hf_tokenizer.encode_special_tokens = not parse_special
            try:
                if len(text) > LONG_TEXT_CHARS:
                    (found,) = hf_tokenizer.encode_batch_fast([text], add_special_tokens=False)
                    return list(found.ids)
                return list(hf_tokenizer.encode(text, add_special_tokens=False).ids)
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(error, MemoryError):
                    why = describe_lone_surrogate(text) or error
                    raise BadText(f"{self.name} cannot encode: {why}.") from None
                raise _to_tokenizer_error(error, f"{self.name} cannot encode a text") from None

    def _hf_variant(self, continues: bool, hide_special: bool) -> tokenizers.Tokenizer:
        """A copy that adds no space before the first word (`continues`) or renames special tokens, cached."""
        with self._lock:
            key = (continues, hide_special)
            if key not in self._hf_variants:
                text = self._hf_tokenizer.to_str()
                require_memory_to_read(len(text), self.name)
                state = json.loads(text)
                changed = continues and _disable_prefix_space(state.get("pre_tokenizer"))
                changed |= hide_special and _rename_special_tokens(state, self.special_tokens)
                original = self._hf_variants[(False, False)]
                with _library_errors(f"{self.name} cannot be read with its special tokens as plain text"):
                    variant = tokenizers.Tokenizer.from_str(json.dumps(state)) if changed else original
                self._hf_variants[key] = variant
            return self._hf_variants[key]

    def _add_declared_tokens(self, files: TokenizerFiles) -> frozenset[int]:
        """Add the tokens that other files declare; returns the ids of the placeholders before them."""
        hf_tokenizer = self._hf_tokenizer
        existing = hf_tokenizer.get_added_tokens_decoder()
        # For a token in both, tokenizer.json has flags, added_tokens.json only the id.
        tokens = [token for token in files.added if token.source != "added_tokens.json" or token.id not in existing]
        placeholder_ids: list[int] = []
        new: list[tokenizers.AddedToken] = []
        next_id = self.base_vocab_size
        for token in tokens:
            known = hf_tokenizer.token_to_id(token.content)
            if known is not None and known != token.id:
                raise TokenizerError(self._id_conflict_message(token, f"gives it {known}"))
            if known is None:
                if len(placeholder_ids) + token.id - next_id > MAX_ID_GAP:
                    raise TokenizerError(self._id_conflict_message(token, f"ends at {self.base_vocab_size - 1}"))
                placeholder_ids += range(next_id, token.id)
                new += [_placeholder_token() for _ in range(next_id, token.id)]
                next_id = token.id + 1
            new.append(_to_hf_added_token(token))
        existing_by_text = {token.content: token for token in existing.values()}
        hf_tokenizer.add_tokens([token for token in new if existing_by_text.get(token.content) != token])
        for token in tokens:
            if hf_tokenizer.token_to_id(token.content) != token.id:
                raise TokenizerError(self._id_conflict_message(token, "uses that id for another"))
        hf_tokenizer.add_special_tokens(_special_by_role(hf_tokenizer, files.special_token_texts))
        return frozenset(placeholder_ids)

    def _id_conflict_message(self, token: AddedToken, found: str) -> str:
        return (
            f"{token.source} gives {token.content!r} the id {token.id}, but {self.name} {found}. "
            f"Correct {token.source}."
        )


@contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Turn the library's errors into a TokenizerError whose message begins with `problem`."""
    try:
        yield
    except BaseException as error:
        raise _to_tokenizer_error(error, problem) from None


def _to_tokenizer_error(error: BaseException, problem: str) -> BaseException:
    """A TokenizerError for an error of the library (an Exception or a panic); any other error unchanged."""
    from_library = isinstance(error, Exception) or type(error).__name__ == RUST_PANIC
    if not from_library or isinstance(error, ExlmError | MemoryError):
        return error
    return TokenizerError(f"{problem}: {error}. Fetch the file again.")


def _to_hf_added_token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _placeholder_token() -> tokenizers.AddedToken:
    """A token with a random name for an undefined id: the library numbers new tokens consecutively."""
    return tokenizers.AddedToken("\x00" + secrets.token_hex(16), normalized=False)


def _special_by_role(hf_tokenizer: tokenizers.Tokenizer, names: Sequence[str]) -> list[tokenizers.AddedToken]:
    """Tokens that are special only because of their role; the file does not mark them as special."""
    special = {token.content for token in hf_tokenizer.get_added_tokens_decoder().values() if token.special}
    found = [name for name in names if name not in special and hf_tokenizer.token_to_id(name) is not None]
    return [tokenizers.AddedToken(name, special=True, normalized=False) for name in found]


def _disable_truncation_padding_dropout(hf_tokenizer: tokenizers.Tokenizer) -> None:
    hf_tokenizer.no_truncation()
    hf_tokenizer.no_padding()
    if getattr(hf_tokenizer.model, "dropout", None) is not None:
        hf_tokenizer.model.dropout = None


def _disable_prefix_space(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Edit a pre-tokenizer so that it adds no space before the first word; False if it adds none."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer.get("type") == "Sequence":
        return any([_disable_prefix_space(inner) for inner in pre_tokenizer["pretokenizers"]])
    if pre_tokenizer.get("type") != "Metaspace" or pre_tokenizer.get("prepend_scheme") != "first":
        return False
    pre_tokenizer["prepend_scheme"] = "never"
    return True


def _rename_special_tokens(state: dict[str, Any], special: dict[str, int]) -> bool:
    """Rename the special tokens in a tokenizer's state so that its model cannot spell them; ids stay.

    One-letter tokens keep their names (a model has no other way to write the letter), as do single bytes.
    """
    model = state["model"]
    vocab = model["vocab"]
    pieces = {entry[0] for entry in vocab} if isinstance(vocab, list) else vocab
    nonce = secrets.token_hex(16)
    new_names = {
        text: f"\x00{nonce}{token_id}"
        for text, token_id in special.items()
        if text in pieces and len(text) > 1 and not BYTE_TOKEN.match(text)
    }
    if isinstance(vocab, list):
        model["vocab"] = [[new_names.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {new_names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _merge_involves(pair, new_names)]
    if model.get("unk_token") in new_names:
        model["unk_token"] = new_names[model["unk_token"]]
    for token in state["added_tokens"]:
        token["content"] = new_names.get(token["content"], token["content"])
    state["post_processor"] = None
    return bool(new_names)


def _merge_involves(pair: str | list[str], names: dict[str, str]) -> bool:
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return left in names or right in names or left + right in names
