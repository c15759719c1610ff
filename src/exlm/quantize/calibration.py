"""What a model reads while it is measured and quantised: rows of token ids.

The built-in text was written for this project: several kinds of text in many languages, of which every eighth
paragraph is kept back for judging the result. Where the whole model fits in memory it also writes some rows
itself, which is the text its weights are made for.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..errors import InputError, MissingExtra
from ..tokenizer import Tokenizer
from .layer_loader import KVBuffer, LayerLoader, make_batch

DEFAULT_LENGTH = 512
"""Tokens of a row."""

MIN_TOKENS = 2048
"""Fewer tokens than this say too little about a model."""

HELD_OUT_EVERY = 6
"""One paragraph in so many is never calibrated with."""

SAMPLE_LENGTH = 128
"""Tokens the model writes in one go: its weights are read once for each, whatever the number of pieces."""

SAMPLE_BATCH = 64
"""Pieces it writes at once."""

PROMPT_TOKENS = 8
"""Tokens a model without a BOS is given to begin with."""

TEXT_KEYS = ("text", "content", "prompt", "completion", "output", "messages")

CHARS_PER_TOKEN = 16
"""Of a long text, so many are read for each token that is wanted, and more if that was not enough."""

MARGIN_TOKENS = 1024
"""Tokens between those that are wanted and where a long text is cut."""

JSON_ENCODING = "utf-8-sig"
"""UTF-8, perhaps behind the mark that some editors begin a file with."""


def builtin_texts(held_out: bool = False) -> list[str]:
    """The paragraphs of the built-in text; with `held_out`, those that are kept back instead."""
    folder = files(__package__) / "texts"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    texts = []
    for name in names:
        parts = (folder / name).read_text(encoding="utf-8").split("\n\n")
        chosen = [p for i, p in enumerate(parts) if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]
        if chosen:
            texts.append("\n\n".join(chosen))
    return texts


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a .txt, .jsonl or .parquet file."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file of text.")
    readers = {
        ".txt": _read_text,
        ".md": _read_text,
        ".jsonl": _read_json_lines,
        ".json": _read_json,
        ".parquet": _read_parquet,
    }
    if path.suffix.lower() not in readers:
        raise InputError(f"{path}: text comes in files that end in {', '.join(readers)}.")
    try:
        yield from readers[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error}).") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from error


def pack_rows(
    texts: Iterator[str] | list[str], tokenizer: Tokenizer, rows: int, length: int, name: str = "this"
) -> Tensor:
    """(at most rows, length) ids: documents one after the other, each behind a BOS if the model has one.

    `InputError` if there is too little text, which it calls `name`.
    """
    ids: list[Tensor] = []
    have, least = 0, max(MIN_TOKENS, length)
    for text in texts:
        ids.append(_encode_prefix(text, tokenizer, max(rows * length, least) - have))
        have += len(ids[-1])
        if have >= max(rows * length, least):
            break
    if have < least:
        raise InputError(
            f"Text of at least {least:,} tokens is needed, and {name} has {have:,}: give more of it, or "
            "use the built-in text."
        )
    count = min(rows, have // length)
    return torch.cat(ids)[: count * length].view(count, length)


def _encode_prefix(text: str, tokenizer: Tokenizer, wanted: int) -> Tensor:
    """The ids of a text; of a long one only the first, but more than are wanted.

    Tokenizers take a hundred times a text's room.
    """
    bos, size = tokenizer.bos_token_id is not None, CHARS_PER_TOKEN * (wanted + MARGIN_TOKENS)
    while size < len(text):
        ids = tokenizer.encode(text[:size], add_bos=bos)[0]
        if len(ids) >= wanted + MARGIN_TOKENS:  # where the text was cut matters only to the last of them
            return ids
        size *= 4
    return tokenizer.encode(text, add_bos=bos)[0]


def builtin_rows(tokenizer: Tokenizer, rows: int, length: int) -> Tensor:
    """(at most rows, length) ids of the built-in text, as many of one kind as of another.

    Not by how long they are: a language that the tokenizer writes letter by letter would take most of them.
    """
    bos = tokenizer.bos_token_id is not None
    ids = [tokenizer.encode(text, add_bos=bos)[0] for text in builtin_texts()]
    kinds = [one[: len(one) // length * length].view(-1, length) for one in ids]
    if not all(map(len, kinds)):  # a row is longer than some kinds are
        kinds = [pack_rows(builtin_texts(), tokenizer, sum(map(len, ids)) // length, length)]
    counts = [0] * len(kinds)
    for turn in range(max(map(len, kinds))):
        for n, kind in enumerate(kinds):
            counts[n] += turn < len(kind) and sum(counts) < rows
    pairs = zip(kinds, counts, strict=True)
    return torch.cat([kind[torch.linspace(0, len(kind) - 1, count).long()] for kind, count in pairs])


def check_vocab(ids: Tensor, config: Config) -> Tensor:
    """The same ids, all of them tokens that the model has; `InputError` otherwise."""
    if int(ids.max()) >= config.vocab_size:
        raise InputError(
            f"{config.model_dir}: the tokenizer gives id {int(ids.max())}, and the model knows "
            f"{config.vocab_size} tokens: they do not belong together. Copy the tokenizer's files from the "
            "original model."
        )
    return ids


def prepend_bos(rows: Tensor, config: Config, tokenizer: Tokenizer) -> Tensor:
    """The same rows, each behind a BOS if the model is lost without one; the last token goes for it."""
    bos = tokenizer.bos_token_id
    if not config.spec.requires_bos or bos is None:
        return rows
    moved = torch.cat((torch.full_like(rows[:, :1], bos), rows[:, :-1]), 1)
    return torch.where(rows[:, :1] == bos, rows, moved)


@torch.no_grad()
def sample_rows(loader: LayerLoader, starts: Tensor, length: int, banned: Sequence[int], seed: int) -> Tensor:
    """Pieces that go on from `starts` (pieces, tokens) as the model itself would, by chance but repeatably.

    The whole model is in memory meanwhile, as floats. `banned` ids are never written.
    """
    decoder, device = deque(loader.build(), maxlen=1).pop(), loader.backends.device
    generator = torch.Generator(device).manual_seed(seed)
    never = torch.tensor(banned, dtype=torch.long, device=device)
    out = []
    for first in range(0, len(starts), SAMPLE_BATCH):
        ids = fresh = starts[first : first + SAMPLE_BATCH].to(device)
        layers = [KVBuffer(length) for _ in decoder.blocks]
        while ids.shape[1] < length:
            batch = replace(make_batch(fresh, ids.shape[1] - fresh.shape[1]), outputs="last")
            logits, _ = decoder.forward(batch, layers)
            assert logits is not None
            last = logits[:, -1].index_fill_(1, never, -torch.inf)  # one text each: none may end early
            chances = last.softmax(-1)
            if not bool(chances.isfinite().all()):
                raise InputError(
                    "The source model's answers hold NaN or infinity as it writes text to calibrate with: a "
                    "weight of it is damaged, or too large. Download it again, or check it with `exlm eval`."
                )
            fresh = torch.multinomial(chances, 1, generator=generator)
            ids = torch.cat((ids, fresh), 1)
        out.append(ids.cpu())
    loader.clear()
    return torch.cat(out)


def sample_prompts(text: Tensor, pieces: int, bos: int | None) -> Tensor:
    """Where the model begins to write: a BOS and nothing else, or, if there is none, a few words of text."""
    if bos is not None:
        return torch.full((pieces, 1), bos)
    rows, length = text.shape
    shown, at = min(PROMPT_TOKENS, length), torch.arange(pieces)
    first = at // rows * shown % (length - shown + 1)
    return text[(at % rows)[:, None], first[:, None] + torch.arange(shown)]


def _read_text(path: Path) -> Iterator[str]:
    yield path.read_text(encoding="utf-8")


def _read_json(path: Path) -> Iterator[str]:
    """One value over as many lines as it likes, or, as some call those files too, one on each line."""
    text = path.read_text(encoding=JSON_ENCODING)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        yield from _read_json_lines(path)
    else:
        yield _record_text(value)


def _read_json_lines(path: Path) -> Iterator[str]:
    with path.open(encoding=JSON_ENCODING) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield _record_text(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{path}, line {number}: not JSON ({error}).") from error


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtra("Parquet files need pyarrow: pip install pyarrow") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from map(_record_text, batch.to_pylist())
    except (ValueError, OSError) as error:  # what pyarrow raises are both
        raise InputError(f"{path}: not a Parquet file that can be read ({error}).") from error


def _record_text(record: Any) -> str:
    """The text of one record: of its well-known fields if it has any, else of all of them."""
    if isinstance(record, str):  # JSON can say half a character, as of an emoji that was cut in two
        return record.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(record, list):
        return "\n".join(_record_text(one) for one in record)
    if isinstance(record, dict):
        known = [record[key] for key in TEXT_KEYS if record.get(key)]
        return "\n".join(_record_text(one) for one in known or record.values())
    return str(record)
