"""Filters for Lark grammars, JSON schemas and regular expressions. The parsing is llguidance's.

A filter compiles once, when it is made, and refuses then what it cannot serve. While it may still go on, the
tokens that keep the text valid pass; when the text is valid as it stands, EOS passes as well and ends the
generation; when it can only end, EOS is all that passes. Masks are applied elsewhere.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import InputError, MissingExtra
from ..tokenizer import Codec
from ..tokenizer.backend import TokenizerBackend
from .bitmask import contains, num_words
from .filter import FilterMask, HealingPrefix, MaskFilter, prefix_text
from .grammar_sandbox import (
    INSTALL_HINT,
    MAX_GRAMMAR_SIZE,
    PARSER_LIMITS,
    GrammarRequest,
    GrammarSandbox,
    one_line,
)
from .token_trie import TokenTrie, token_trie_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,100}"
"""Between the parts of a JSON text: what JSON allows, but not endlessly, which small models would take up."""


class _LlguidanceFilter(MaskFilter):
    """A filter whose answers come from an llguidance parser."""

    def __init__(self, tokenizer: Any, source: Mapping[str, Any], kind: str) -> None:
        super().__init__(None, tokenizer)
        self._source = {"name": "main", **source}
        self._kind = kind
        grammar = _grammar_json([self._source], kind)
        _SANDBOX.check(GrammarRequest(grammar, self.codec.size, dict(self.codec.special_texts)), kind)
        self._prefix = ""
        self._parser = _compile_parser(self.codec, grammar, kind)
        self.answer()
        self._parser.reset()

    def begin(self, prefix_str: HealingPrefix = "") -> None:
        """Start at the beginning of the grammar."""
        prefix = prefix_text(prefix_str)
        if prefix != self._prefix or not self._parser.reset():
            self._prefix = prefix
            self._compile()

    def renewed(self) -> Self:
        """The same filter for another job, with its own parser: copies share one lexer and its limits."""
        other = copy.copy(self)
        other._prefix = ""
        other._compile()
        return other

    def _compile(self) -> None:
        first = {"name": "prefixed", "lark_grammar": f"start: {json.dumps(self._prefix)} @main"}
        sources = [first, self._source] if self._prefix else [self._source]
        self._parser = _compile_parser(self.codec, _grammar_json(sources, self._kind), self._kind)

    def feed(self, token: Any) -> None:
        """Parse on."""
        number = int(token)
        if not self._parser.consume_token(number):
            reason = one_line(self._parser.get_error())
            raise InputError(f"{type(self).__name__} cannot go on with token {number}: {reason}")

    def use_background_worker(self) -> bool:
        """Yes: the parser works without holding up other threads."""
        return True

    def answer(self) -> FilterMask:
        """What keeps the text valid; every EOS that passes is an end."""
        words = np.zeros(num_words(self.codec.size), np.int32)
        self._parser.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._parser.is_error():
            reason = one_line(self._parser.get_error()).rstrip(".")
            raise InputError(f"{type(self).__name__} cannot go on: {reason}. Simplify the {self._kind}.")
        return FilterMask(words, frozenset(n for n in self.codec.eos_ids if contains(words, n)))

    def clone(self, c: Any = None) -> Any:
        """A filter in the same state that parses on by itself, though with the same lexer."""
        other = super().clone(c)
        other._parser = self._parser.deep_copy()
        return other


class GrammarFilter(_LlguidanceFilter):
    """Makes an answer match a context-free grammar, written in llguidance's form of Lark."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        """`grammar` starts at its rule `start`; special tokens are written `<|name|>`."""
        super().__init__(tokenizer, {"lark_grammar": _checked_source(grammar, "grammar")}, "grammar")


class RegexFilter(_LlguidanceFilter):
    """Makes an answer match a regular expression from its first character to its last."""

    def __init__(self, tokenizer: Any, pattern: str) -> None:
        """`pattern` is a regular expression without back references and looking around."""
        text = _checked_source(pattern, "regular expression")
        grammar = json.loads(_llguidance().LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        super().__init__(tokenizer, {"lark_grammar": grammar}, "regular expression")


class JsonSchemaFilter(_LlguidanceFilter):
    """Makes an answer a JSON text that a JSON schema describes."""

    def __init__(self, tokenizer: Any, schema: Any, *, compact: bool = False) -> None:
        """`schema` is a dictionary, JSON text, or a pydantic model; `compact` allows no optional whitespace.

        A keyword that cannot be enforced is refused. Properties come in the order of the schema.
        """
        described = _checked_schema(schema)
        spacing: dict[str, Any] = (
            {"whitespace_flexible": False} if compact else {"whitespace_pattern": JSON_WHITESPACE}
        )
        own = described.get("x-guidance", {})
        if isinstance(own, Mapping) and not own.keys() & {"whitespace_flexible", "whitespace_pattern"}:
            described = {**described, "x-guidance": {**spacing, **own}}
        super().__init__(tokenizer, {"json_schema": described}, "JSON schema")


class _LlguidanceVocabulary:
    """A vocabulary as llguidance asks for it: bytes, special ids, and how text is usually cut into tokens.

    It knows the codec's backend but not the codec, whose parser is forgotten with it.
    """

    MAX_TEXT_BYTES = 256  # of a forced text only the first token matters

    def __init__(self, codec: Codec, trie: TokenTrie) -> None:
        hidden = {**dict.fromkeys(codec.eos_ids), **dict.fromkeys(codec.special_texts)}
        self.special_token_ids = [number for number in hidden if 0 <= number < codec.size]
        self.tokens = list(trie.token_bytes)
        for number in self.special_token_ids:
            self.tokens[number] = codec.token_text(number).encode() or b"<special>"
        self.eos_token_id = codec.eos_ids[0]
        self.bos_token_id = codec.bos_id
        self._backend: TokenizerBackend = codec.backend
        self._trie = trie

    def __call__(self, raw: bytes) -> list[int]:
        """The model's own tokens for a text, as long as they spell just this text."""
        start = raw[: self.MAX_TEXT_BYTES]
        text = start.decode("utf-8", "ignore")
        ids = self._backend.tokenize(text, parse_special=False, continues=True) if text else []
        table, size = self._trie.token_bytes, self._trie.size
        spelled = b"".join(table[number] for number in ids if 0 <= number < size)
        return ids if ids and start.startswith(spelled) and spelled else self._longest_match(start)

    def _longest_match(self, raw: bytes) -> list[int]:
        """Always the longest token that fits: for texts the tokenizer would change."""
        trie = self._trie
        ids: list[int] = []
        while raw:
            low, high, place = 0, len(trie.keys), -1
            for end in range(1, len(raw) + 1):
                low, high = trie.prefix_range(raw[:end], low, high)
                if low == high:
                    break
                if len(trie.keys[low]) == end:
                    place = low
            if place < 0:
                break
            ids.append(int(trie.ids_in_range(place, place + 1)[0]))
            raw = raw[len(trie.keys[place]) :]
        return ids


class _LlguidanceTokenizers:
    """One llguidance tokenizer for each vocabulary in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._built: WeakKeyDictionary[Codec, LLTokenizer] = WeakKeyDictionary()

    def get(self, codec: Codec) -> LLTokenizer:
        if not codec.eos_ids:
            raise InputError(
                "The tokenizer has no EOS token, so nothing could end an answer that is complete."
            )
        with self._lock:
            found = self._built.get(codec)
            if found is None:
                library = _llguidance()
                vocabulary = library.TokenizerWrapper(_LlguidanceVocabulary(codec, token_trie_of(codec)))
                found = library.LLTokenizer(vocabulary, eos_token=list(codec.eos_ids))
                self._built[codec] = found
            return found


_SANDBOX = GrammarSandbox()
_TOKENIZERS = _LlguidanceTokenizers()


def _compile_parser(codec: Codec, grammar: str, kind: str) -> LLMatcher:
    """A parser at its start."""
    library = _llguidance()
    limits = library.LLParserLimits(**PARSER_LIMITS)
    parser: LLMatcher = library.LLMatcher(_TOKENIZERS.get(codec), grammar, log_level=0, limits=limits)
    if parser.is_error():
        raise InputError(f"The {kind} is invalid: {one_line(parser.get_error())}")
    return parser


def _grammar_json(sources: Sequence[Mapping[str, Any]], kind: str) -> str:
    try:
        written = json.dumps({"grammars": sources}, ensure_ascii=False, allow_nan=False)
        written.encode()
        return written
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise InputError(f"The {kind} cannot be UTF-8: it has a lone surrogate ({half}).") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"The {kind} cannot be written as JSON: {error}.") from None


def _checked_source(source: Any, kind: str) -> str:
    if not isinstance(source, str):
        raise InputError(f"A {kind} is text, found {type(source).__name__}.")
    if len(source) > MAX_GRAMMAR_SIZE:
        raise InputError(
            f"The {kind} is too large: {len(source):,} characters, at most {MAX_GRAMMAR_SIZE:,} are taken."
        )
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"The {kind} cannot be UTF-8: {error.reason} at character {error.start}.") from None
    return source


def _checked_schema(source: Any) -> Mapping[str, Any]:
    """The schema as a dictionary."""
    if hasattr(source, "model_json_schema"):
        source = source.model_json_schema()
    if isinstance(source, str):
        text = _checked_source(source, "JSON schema")
        try:
            source = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"The JSON schema is not JSON: {error}.") from None
    if source is True:
        return {}
    if not isinstance(source, Mapping):
        raise InputError(
            "A JSON schema is a dictionary, its JSON text, or a pydantic model, "
            f"found {'false, which describes nothing' if source is False else type(source).__name__}."
        )
    return source


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtra(f"{INSTALL_HINT} ({error})") from None
    return llguidance
