"""Filters for Lark grammars, JSON schemas and regular expressions, parsed by llguidance.

A filter compiles its grammar when it is created, and refuses what it cannot enforce. It allows the tokens
that keep the text valid. Once the text is complete, EOS is allowed as well and ends the generation; where
nothing can follow, only EOS is allowed.

Compiling an untrusted grammar can crash or never end. So the `GrammarSandbox` compiles each grammar first in
a subprocess (`grammar_sandbox_worker`) with limits of time, memory and stack. A grammar that compiles within
them is remembered by its digest and may be compiled in this process.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..errors import InputError, MissingExtra
from ..tokenizer import Codec
from ..tokenizer.vocab import TokenizerBackend
from .filter import FilterMask, HealingPrefix, MaskFilter, prefix_text
from .token_sets import TokenTrie, bitmask_contains, cached_per_codec, num_bitmask_words, token_trie_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

INSTALL_HINT = "Grammar, JSON schema and regex filters need llguidance: pip install 'exlm[grammar]'"
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,100}"
"""Whitespace between JSON tokens: what JSON allows, but bounded, because small models may never stop it."""

PARSER_LIMITS = {"max_lexer_states": 100_000, "verbose_errors": False}
"""Limits of every matcher; llguidance's defaults for the rest bound a step to some tens of milliseconds."""

SANDBOX_WORKER = Path(__file__).with_name("grammar_sandbox_worker.py")
COMPILE_SECONDS = 0.3  # a grammar is compiled twice more, for the filter and for its job: one second in all
START_SECONDS = 30.0  # for starting the subprocess on a loaded machine
MAX_GRAMMAR_SIZE = 1 << 20  # bytes
MAX_ACCEPTED = 4096  # grammars whose digests are remembered
MAX_REASON_LENGTH = 600


class _LlguidanceFilter(MaskFilter):
    """A filter whose masks come from an llguidance matcher."""

    def __init__(self, tokenizer: Any, source: Mapping[str, Any], kind: str) -> None:
        super().__init__(None, tokenizer)
        self._source = {"name": "main", **source}
        self._kind = kind
        grammar = _grammar_json([self._source], kind)
        _SANDBOX.check(grammar, self.codec, kind)
        self._prefix = ""
        self._matcher = _compile_matcher(self.codec, grammar, kind)
        self.next_mask()
        self._matcher.reset()

    def begin(self, prefix_str: HealingPrefix = "") -> None:
        """Start at the beginning of the grammar, after the prefix."""
        prefix = prefix_text(prefix_str)
        if prefix != self._prefix or not self._matcher.reset():
            self._prefix = prefix
            self._compile()

    def fresh_copy(self) -> Self:
        """A copy for another job, its matcher compiled anew: deep copies share a lexer and its limits."""
        other = copy.copy(self)
        other._prefix = ""
        other._compile()
        return other

    def _compile(self) -> None:
        prefixed = {"name": "prefixed", "lark_grammar": f"start: {json.dumps(self._prefix)} @main"}
        sources = [prefixed, self._source] if self._prefix else [self._source]
        self._matcher = _compile_matcher(self.codec, _grammar_json(sources, self._kind), self._kind)

    def feed(self, token: Any) -> None:
        """Advance the matcher by the sampled token."""
        token_id = int(token)
        if not self._matcher.consume_token(token_id):
            reason = one_line(self._matcher.get_error())
            raise InputError(f"{type(self).__name__} cannot go on with token {token_id}: {reason}")

    def use_background_worker(self) -> bool:
        """Yes: llguidance releases the GIL."""
        return True

    def next_mask(self) -> FilterMask:
        """The tokens that keep the text valid; every allowed EOS ends the generation."""
        words = np.zeros(num_bitmask_words(self.codec.size), np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            reason = one_line(self._matcher.get_error()).rstrip(".")
            raise InputError(f"{type(self).__name__} cannot go on: {reason}. Simplify the {self._kind}.")
        return FilterMask(words, frozenset(n for n in self.codec.eos_ids if bitmask_contains(words, n)))

    def clone(self, c: Any = None) -> Any:
        """A copy in the same state with a matcher of its own, which shares the lexer."""
        other = super().clone(c)
        other._matcher = self._matcher.deep_copy()
        return other


class GrammarFilter(_LlguidanceFilter):
    """Makes the completion match a context-free grammar in llguidance's dialect of Lark."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        """`grammar` starts at its rule `start`; special tokens are written `<|name|>`."""
        super().__init__(tokenizer, {"lark_grammar": _checked_source(grammar, "grammar")}, "grammar")


class RegexFilter(_LlguidanceFilter):
    """Makes the whole completion match a regular expression."""

    def __init__(self, tokenizer: Any, pattern: str) -> None:
        """`pattern` is a regular expression without backreferences and lookaround."""
        text = _checked_source(pattern, "regular expression")
        grammar = json.loads(_llguidance().LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        super().__init__(tokenizer, {"lark_grammar": grammar}, "regular expression")


class JsonSchemaFilter(_LlguidanceFilter):
    """Makes the completion a JSON text that is valid for a JSON schema."""

    def __init__(self, tokenizer: Any, schema: Any, *, compact: bool = False) -> None:
        """`schema` is a dictionary, JSON text, or a pydantic model; `compact` forbids optional whitespace.

        A keyword that cannot be enforced is refused. Properties are written in the order of the schema.
        """
        described = _checked_schema(schema)
        whitespace: dict[str, Any] = (
            {"whitespace_flexible": False} if compact else {"whitespace_pattern": JSON_WHITESPACE}
        )
        options = described.get("x-guidance", {})  # llguidance's own options, in the schema
        if isinstance(options, Mapping) and not options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
            described = {**described, "x-guidance": {**whitespace, **options}}
        super().__init__(tokenizer, {"json_schema": described}, "JSON schema")


class _LlguidanceVocabulary:
    """A vocabulary in the form that llguidance's TokenizerWrapper reads: token bytes, special ids,
    tokenization.

    It refers to the codec's backend and not to the codec: llguidance's tokenizer is cached by a weak
    reference to the codec, and freed with it.
    """

    MAX_TEXT_BYTES = 256  # only the first token of a forced text is used

    def __init__(self, codec: Codec, trie: TokenTrie) -> None:
        special = {**dict.fromkeys(codec.eos_ids), **dict.fromkeys(codec.special_texts)}
        self.special_token_ids = [token_id for token_id in special if 0 <= token_id < codec.size]
        self.tokens = list(trie.token_bytes)
        for token_id in self.special_token_ids:
            self.tokens[token_id] = codec.token_text(token_id).encode() or b"<special>"
        self.eos_token_id = codec.eos_ids[0]
        self.bos_token_id = codec.bos_id
        self._backend: TokenizerBackend = codec.backend
        self._trie = trie

    def __call__(self, raw: bytes) -> list[int]:
        """The tokenizer's own tokens of a text, if they spell exactly its start."""
        start = raw[: self.MAX_TEXT_BYTES]
        text = start.decode("utf-8", "ignore")
        ids = self._backend.tokenize(text, parse_special=False, continues=True) if text else []
        table, size = self._trie.token_bytes, self._trie.size
        spelled = b"".join(table[token_id] for token_id in ids if 0 <= token_id < size)
        return ids if ids and start.startswith(spelled) and spelled else self._longest_match(start)

    def _longest_match(self, raw: bytes) -> list[int]:
        """Greedy longest-match tokens, for a text that the tokenizer would normalize."""
        trie = self._trie
        ids: list[int] = []
        while raw:
            low, high, longest = 0, len(trie.keys), -1
            for end in range(1, len(raw) + 1):
                low, high = trie.prefix_range(raw[:end], low, high)
                if low == high:
                    break
                if len(trie.keys[low]) == end:
                    longest = low
            if longest < 0:
                break
            ids.append(int(trie.ids_in_range(longest, longest + 1)[0]))
            raw = raw[len(trie.keys[longest]) :]
        return ids


@cached_per_codec
def _llguidance_tokenizer(codec: Codec) -> LLTokenizer:
    """The vocabulary as llguidance reads it."""
    if not codec.eos_ids:
        raise InputError("The tokenizer has no EOS token, so nothing could end an answer that is complete.")
    library = _llguidance()
    vocabulary = library.TokenizerWrapper(_LlguidanceVocabulary(codec, token_trie_of(codec)))
    tokenizer: LLTokenizer = library.LLTokenizer(vocabulary, eos_token=list(codec.eos_ids))
    return tokenizer


class GrammarSandbox:
    """Compiles grammars in a subprocess, and remembers those that passed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    def check(self, grammar: str, codec: Codec, kind: str) -> None:
        """Raise InputError for a grammar that is too large, invalid or too slow; errors call it `kind`."""
        if (size := len(grammar.encode())) > MAX_GRAMMAR_SIZE:
            raise InputError(f"The {kind} is too large: {size:,} bytes, at most {MAX_GRAMMAR_SIZE:,} are taken.")
        found = importlib.util.find_spec("llguidance")
        if found is None or found.origin is None:
            raise MissingExtra(INSTALL_HINT)
        request = {
            "grammar": grammar,
            "size": codec.size,
            "special": dict(codec.special_texts),
            "path": str(Path(found.origin).parent.parent),
            "limits": PARSER_LIMITS,
            "seconds": COMPILE_SECONDS,
            "max_reason_length": MAX_REASON_LENGTH,
        }
        message = json.dumps(request).encode("ascii")
        digest = hashlib.blake2b(message, digest_size=16).digest()
        with self._lock:
            if digest in self._accepted:
                self._accepted.move_to_end(digest)
                return
        _compile_in_worker(message, kind)
        with self._lock:
            self._accepted[digest] = None
            while len(self._accepted) > MAX_ACCEPTED:
                self._accepted.popitem(last=False)


_SANDBOX = GrammarSandbox()


def _compile_in_worker(request: bytes, kind: str) -> None:
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", str(SANDBOX_WORKER)],
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=START_SECONDS + COMPILE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"The process that compiles a {kind} did not start: {error}") from None
    started, _, reply = ran.stdout.decode("utf-8", "replace").partition(" ")
    if not started:
        raise InputError(f"The process that compiles a {kind} did not start: exit status {ran.returncode}.")
    if reply.startswith("bad "):
        raise InputError(f"The {kind} is invalid: {one_line(reply.removeprefix('bad '))}")
    if reply != "good":
        reason = (
            f"takes longer than {COMPILE_SECONDS} s"
            if ran.returncode == 1
            else "needs too much memory or nests too deep"
        )
        raise InputError(f"The {kind} is too complex: compiling it {reason}. Make it smaller or less nested.")


def one_line(message: str) -> str:
    """A message of llguidance on one line, truncated to MAX_REASON_LENGTH."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    if text.startswith("NoExtension"):
        return "it matches no text at all."
    return text if len(text) <= MAX_REASON_LENGTH else text[:MAX_REASON_LENGTH] + " …"


def _compile_matcher(codec: Codec, grammar: str, kind: str) -> LLMatcher:
    """A matcher at the start of its grammar."""
    library = _llguidance()
    limits = library.LLParserLimits(**PARSER_LIMITS)
    matcher: LLMatcher = library.LLMatcher(_llguidance_tokenizer(codec), grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise InputError(f"The {kind} is invalid: {one_line(matcher.get_error())}")
    return matcher


def _grammar_json(sources: Sequence[Mapping[str, Any]], kind: str) -> str:
    try:
        text = json.dumps({"grammars": sources}, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except UnicodeEncodeError as error:
        surrogate = f"U+{ord(error.object[error.start]):04X}"
        raise InputError(f"The {kind} cannot be UTF-8: it has a lone surrogate ({surrogate}).") from None
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
