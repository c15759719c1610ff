"""The base and streaming generators over a model that follows a script and logs its passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from exlm import Settings, Tokenizer
from exlm.legacy import BaseGenerator, Chunk, StreamingGenerator
from tests.generator.scripted import HashingRunner, Script, ScriptedModel, alphabet


class CacheShape:
    """The sizes of a cache without its tensors."""

    def __init__(self, max_seq_len: int = 1024, batch_size: int = 1) -> None:
        self.max_seq_len, self.batch_size, self.current_seq_len = max_seq_len, batch_size, 0
        self.last_writer: object = None
        self.pages_per_row = -(-max_seq_len // 256)
        self.num_pages = self.pages_per_row * batch_size


class Scripted(ScriptedModel):
    """A scripted model whose runner has as many pages as the cache."""

    def runner(self, cache: Any) -> HashingRunner:
        self.runners.append(HashingRunner(self.script, cache.num_pages, vocab=self.vocab))
        return self.runners[-1]

    def make_extras(self, *_: Any) -> None:
        raise AssertionError("no job has adapters or embeddings")

    @property
    def passes(self) -> list[tuple[str, int, int]]:
        """The passes since the last call: kind, rows, tokens of each row."""
        log = self.runners[0].log
        found = list(log)
        log.clear()
        return found


def scripted(*tokens: int | list[int], after: int = 3) -> Script:
    """A script that continues a prompt of `after` tokens with these; a list ranks alternatives."""

    def script(prefix: list[int]) -> list[int]:
        one = tokens[min(len(prefix) - after, len(tokens) - 1)]
        return one if isinstance(one, list) else [one]

    return script


def make_base_generator(
    tokenizer: Tokenizer, script: Script = alphabet, length: int = 1024, batch: int = 1
) -> BaseGenerator:
    """A base generator for a script."""
    return BaseGenerator(Scripted(script), CacheShape(length, batch), tokenizer)  # type: ignore[arg-type]


def make_streaming_generator(
    tokenizer: Tokenizer, script: Script = alphabet, length: int = 1024, batch: int = 1, **options: Any
) -> StreamingGenerator:
    """A streaming generator for a script."""
    return StreamingGenerator(Scripted(script), CacheShape(length, batch), tokenizer, **options)  # type: ignore[arg-type]


def passes(generator: Any) -> list[tuple[str, int, int]]:
    """The model's passes since the last call."""
    found: list[tuple[str, int, int]] = generator.model.passes
    return found


def begin_stream(generator: StreamingGenerator, ids: Tensor, settings: Settings | None = None, **options: Any) -> None:
    """Begin a stream, greedy by default."""
    generator.begin_stream_ex(ids, settings or Settings.greedy(), **options)


def take_chunks(generator: StreamingGenerator, most: int = 100, **options: Any) -> list[Chunk]:
    """The chunks until the end, at most `most`."""
    chunks: list[Chunk] = []
    while len(chunks) < most and not (chunks and chunks[-1]["eos"]):
        chunks.append(generator.stream_ex(**options))
    return chunks


def chunk_text(chunks: list[Chunk]) -> str:
    """The text of chunks."""
    return "".join(chunk["chunk"] for chunk in chunks)


def recording(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The function, wrapped to append each call's arguments to `calls`."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **options)

    return wrapped
