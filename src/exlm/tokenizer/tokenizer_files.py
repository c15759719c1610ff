"""The JSON files beside a vocabulary, and the added tokens that they declare.

`tokenizer_config.json`, `added_tokens.json`, `special_tokens_map.json` and `generation_config.json` overlap:
`read_tokenizer_files` checks them and merges what they declare. `AddedTokenMatcher` finds added tokens in a
text where no library does so: for SentencePiece and for the text aliases of embeddings.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import TokenizerError, shown
from ..memory import MB, require_address_space

TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""The special token roles that a tokenizer_config.json may declare."""

MAX_ID_GAP = 65_536
"""The most ids that may stay undefined, in total, between a vocabulary and the tokens declared above it."""

MAX_ID = 2**22
"""Ids must be below this; a file with higher ones is damaged or hostile."""

MAX_FILE_BYTES = 2**28
"""Largest size of a tokenizer's file; published ones have at most a tenth of it."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class AddedToken:
    """A token that is declared beside the vocabulary, with its flags for finding it in a text."""

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    source: str = ""


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files of one model folder declare.

    `token_by_role` maps a special token role to a token's text, or to None if a file declares it as null.
    """

    path: Path
    config: dict[str, Any] | None = None
    added: tuple[AddedToken, ...] = ()
    token_by_role: Mapping[str, str | None] = field(default_factory=dict)
    additional_special_tokens: tuple[str, ...] = ()
    generation_eos_ids: tuple[int, ...] = ()

    @property
    def special_token_texts(self) -> tuple[str, ...]:
        """The texts of the tokens that are special because a role names them."""
        return tuple(text for text in self.token_by_role.values() if text) + self.additional_special_tokens


def read_text(path: Path) -> str | None:
    """The file's text, or None when there is no such file."""
    data = read_data(path)
    try:
        return None if data is None else data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text: {error}. Fetch the file again.") from None


def read_data(path: Path) -> bytes | None:
    """The file's bytes, or None if there is no such file; refuses pipes and devices."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise TokenizerError(f"{path} should be a file, found a folder, pipe or device. Remove it.")
        if status.st_size > MAX_FILE_BYTES:
            raise TokenizerError(
                f"{path} has {status.st_size:,} bytes; a tokenizer's file has at most {MAX_FILE_BYTES:,}. "
                "Fetch the file again."
            )
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def require_memory_to_read(size: int, name: str) -> None:
    """Raise DoesNotFit unless a library may allocate what it needs to read `size` bytes of vocabulary.

    The `tokenizers` library ends the process when an allocation fails, and `sentencepiece` may. They allocate
    23 to 43 times the size of the file.
    """
    require_address_space(32 * size + 8 * MB, f"{name}: the tokenizer could not be read ({size:,} bytes)")


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or None when there is no such file."""
    text = read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}. Fetch the file again.") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} should hold a JSON object, found {_json_type_name(value)}.")
    # A text that was read as UTF-8 gets a lone surrogate only from an escape such as "\ud800".
    if "\\ud" in text.lower() and (entry := _find_lone_surrogate(value)):
        raise TokenizerError(
            f"{path}: {entry} has half a character (a lone surrogate), which is no text. "
            "Correct the entry, or fetch the file again."
        )
    return value


def _find_lone_surrogate(value: object) -> str | None:
    """Where a JSON value has a lone surrogate, as `added_tokens_decoder.7.content`, or None."""
    stack: list[tuple[str, object]] = [("", value)]
    while stack:
        at, found = stack.pop()
        if isinstance(found, str) and _LONE_SURROGATE.search(found):
            return f"{at or 'its text'} ({found!a:.80})"
        pairs: Iterable[tuple[object, object]] = ()
        if isinstance(found, dict):
            for key in found:
                if _LONE_SURROGATE.search(key):
                    return f"the key {key!a:.80}" + (f" of {at}" if at else "")
            pairs = found.items()
        elif isinstance(found, list):
            pairs = enumerate(found)
        stack += [(f"{at}.{key}" if at else str(key), inner) for key, inner in pairs]
    return None


def describe_lone_surrogate(text: str) -> str | None:
    """Why a text cannot be written as UTF-8, or None if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
    return None


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Read and merge the JSON files of a folder; any of them may be absent."""
    path = Path(path)
    config = read_json_object(path / "tokenizer_config.json")
    token_by_role, additional = _read_roles(config or {}, path / "tokenizer_config.json")
    map_roles, map_additional = _read_roles(
        read_json_object(path / "special_tokens_map.json") or {}, path / "special_tokens_map.json"
    )
    return TokenizerFiles(
        path=path,
        config=config,
        added=_read_added_tokens(path, config or {}),
        token_by_role={**map_roles, **token_by_role},
        additional_special_tokens=tuple(dict.fromkeys(additional + map_additional)),
        generation_eos_ids=_read_generation_eos(path / "generation_config.json"),
    )


def _token_text(value: object, path: Path, key: str) -> str | None:
    """The text of a token that a file writes as a string, an object with `content`, or null."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return str(value["content"])
    raise TokenizerError(
        f"{path}: {key} should be a string or an object with a `content` string, found {_json_type_name(value)}."
    )


def _read_roles(config: Mapping[str, Any], path: Path) -> tuple[dict[str, str | None], list[str]]:
    token_by_role = {role: _token_text(config[role], path, role) for role in TOKEN_ROLES if role in config}
    additional: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        if isinstance(value, dict) and "content" not in value:
            value = list(value.values())
        if value is None:
            continue
        if not isinstance(value, list):
            raise TokenizerError(f"{path}: {key} should be a list of tokens, found {_json_type_name(value)}.")
        additional += [text for item in value if (text := _token_text(item, path, key))]
    return token_by_role, additional


def _read_added_tokens(path: Path, config: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """The tokens of added_tokens_decoder and those that only added_tokens.json has, ordered by id."""
    source = path / "tokenizer_config.json"
    decoder = config.get("added_tokens_decoder")
    if decoder is not None and not isinstance(decoder, dict):
        raise TokenizerError(f"{source}: added_tokens_decoder should be an object, found {_json_type_name(decoder)}.")
    by_text = {
        token.content: token
        for key, value in (decoder or {}).items()
        for token in [_parse_added_token(key, value, source)]
    }
    source = path / "added_tokens.json"
    for content, token_id in (read_json_object(source) or {}).items():
        if not _is_token_id(token_id):
            raise TokenizerError(
                f"{source}: the id of {content!r} should be a number from 0 to {MAX_ID - 1:,}, found {shown(token_id)}."
            )
        known = by_text.setdefault(content, AddedToken(content, token_id, source=source.name))
        if known.id != token_id:
            raise TokenizerError(
                f"{source} gives {content!r} the id {token_id}, but {known.source} gives it {known.id}. "
                "Remove the wrong entry."
            )
    by_id: dict[int, AddedToken] = {}
    for token in by_text.values():
        other = by_id.setdefault(token.id, token)
        if other is not token:
            raise TokenizerError(
                f"{path}: {other.content!r} ({other.source}) and {token.content!r} ({token.source}) "
                f"both claim the id {token.id}. Remove the wrong entry."
            )
    return tuple(by_id[token_id] for token_id in sorted(by_id))


def _parse_added_token(key: str, value: object, source: Path) -> AddedToken:
    content = _token_text(value, source, f"added_tokens_decoder[{key!r}]")
    if not key.isdecimal() or len(key) > len(str(MAX_ID)) or not _is_token_id(int(key)) or not content:
        raise TokenizerError(
            f"{source}: added_tokens_decoder[{key!r:.80}] should map an id below {MAX_ID:,} to a non-empty token."
        )
    flags = value if isinstance(value, dict) else {}
    special = bool(flags.get("special", False))
    return AddedToken(
        content=content,
        id=int(key),
        special=special,
        lstrip=bool(flags.get("lstrip", False)),
        rstrip=bool(flags.get("rstrip", False)),
        single_word=bool(flags.get("single_word", False)),
        normalized=bool(flags.get("normalized", not special)),
        source=source.name,
    )


def _read_generation_eos(path: Path) -> tuple[int, ...]:
    value = (read_json_object(path) or {}).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id < MAX_ID for token_id in ids):
        raise TokenizerError(
            f"{path}: eos_token_id should be an id below {MAX_ID:,} or a list of ids, found {shown(value)}."
        )
    return tuple(token_id for token_id in ids if token_id >= 0)  # some files write -1 for no EOS


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_ID


def _json_type_name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class TokenMatch(NamedTuple):
    """A token in a text, from `start` to `end`, including the white space that its flags strip."""

    start: int
    end: int
    token: AddedToken


class AddedTokenMatcher:
    """Finds the leftmost longest of many tokens in a text, in time that does not depend on their number."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        """Index the tokens by first character and length; a token without text never matches."""
        self._tokens = {token.content: token for token in tokens if token.content}
        lengths: dict[str, set[int]] = {}
        for content in self._tokens:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {char: sorted(sizes, reverse=True) for char, sizes in lengths.items()}
        self._first_chars = re.compile("|".join(map(re.escape, sorted(lengths))) or r"(?!)")

    def find(self, text: str) -> Iterator[TokenMatch]:
        """Yield the matches from left to right; they do not overlap."""
        position = 0
        while (candidate := self._first_chars.search(text, position)) is not None:
            start = candidate.start()
            while (token := self._match_at(text, start)) is None:
                candidate = self._first_chars.search(text, start + 1)
                if candidate is None:
                    return
                start = candidate.start()
            end = start + len(token.content)
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip())
            if token.lstrip:
                start = position + len(text[position:start].rstrip())
            yield TokenMatch(start, end, token)
            position = end

    def _match_at(self, text: str, start: int) -> AddedToken | None:
        for length in self._lengths[text[start]]:
            token = self._tokens.get(text[start : start + length])
            if token is not None and not (token.single_word and _is_inside_word(text, start, start + length)):
                return token
        return None


def _is_inside_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start] if start else "", text[end : end + 1]
    return any(char.isalnum() or char == "_" for char in before + after)
