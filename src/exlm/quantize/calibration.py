"""Calibration text: rows of token ids that the model reads while it is measured and solved.

The built-in text was written for this project: several kinds of text in many languages, of which every sixth
paragraph is held out for the evaluation. A model small enough to be loaded whole also samples rows itself:
text of the distribution that its weights were trained for.
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

from .. import spec
from ..config import Config
from ..errors import InputError, MissingExtra
from ..spec.model import matrices
from ..tokenizer import Tokenizer
from .layer_loader import KVBuffer, LayerLoader, make_batch
from .options import QuantizeOptions

DEFAULT_LENGTH = 512
"""Tokens of a row."""

DEFAULT_ROWS, MIN_CPU_ROWS, CPU_WEIGHT_ROWS = 128, 48, 86 * 10**8
"""Rows; on a CPU, rows times weights are at most CPU_WEIGHT_ROWS, but rows at least MIN_CPU_ROWS."""

MIN_TOKENS = 2048
"""Text of fewer tokens is refused: it says too little about a model."""

HELD_OUT_EVERY = 6
"""Of the built-in text, every sixth paragraph is held out for the evaluation."""

MAX_SAMPLING_BYTES = 2 * 10**9
"""Float bytes up to which a model is loaded whole, to sample calibration text from it."""

SAMPLING_WEIGHT_ROWS = 22 * 10**8
"""Rows that it then samples, times its weights: each sampled token reads all weights."""

SAMPLE_LENGTH = 128
"""Tokens sampled in one go."""

SAMPLE_BATCH = 64
"""Samples generated together."""

PROMPT_TOKENS = 8
"""Tokens of text that a sample begins with where the model has no BOS."""

TEXT_KEYS = ("text", "content", "prompt", "completion", "output", "messages")

CHARS_PER_TOKEN = 16
"""Characters of a long text that are tokenised per token needed; more if they give too few."""

MARGIN_TOKENS = 1024
"""Tokens that must lie between those that are used and the cut of a long text."""

JSON_ENCODING = "utf-8-sig"
"""UTF-8, with or without a byte order mark."""


# -- the ids of a job ------------------------------------------------------------------------------


def make_calibration_ids(model_config: Config, options: QuantizeOptions, loader: LayerLoader) -> Tensor:
    """(rows, length) token ids: a file's, or the built-in text with rows that the model samples itself."""
    tokenizer = Tokenizer(model_config)
    length = min(options.length, model_config.max_seq_len)
    if options.calibration != "builtin":
        texts = read_documents(Path(options.calibration).expanduser())
        rows = rows_from_texts(texts, tokenizer, options.rows, length, options.calibration)
        rows = check_vocab(rows, model_config)
        return prepend_bos(rows, model_config, tokenizer)
    sampled = min(num_sampled_rows(model_config.spec, options), options.rows * 3 // 4)
    rows = check_vocab(builtin_rows(tokenizer, options.rows - sampled, length), model_config)
    rows = prepend_bos(rows, model_config, tokenizer)
    if not sampled:
        return rows
    piece = min(SAMPLE_LENGTH, length)
    prompts = sample_prompts(rows, -(-sampled * length // piece), tokenizer.bos_token_id)
    banned = [i for i in tokenizer.eos_token_ids if 0 <= i < model_config.vocab_size]
    ids = sample_rows(loader, prompts, piece, banned, options.seed).flatten()
    return torch.cat((rows, ids[: sampled * length].view(sampled, length)))


def default_rows(model: spec.Model, device: torch.device) -> int:
    """Rows where the user gives no number: fewer for large models on a CPU, where forward passes are slow."""
    if device.type != "cpu":
        return DEFAULT_ROWS
    weights = sum(m.in_features * m.out_features for m in matrices(model))
    return max(MIN_CPU_ROWS, min(DEFAULT_ROWS, CPU_WEIGHT_ROWS // weights))


def num_sampled_rows(model: spec.Model, options: QuantizeOptions) -> int:
    """Rows that the model may sample itself, in place of as many of the built-in text."""
    weights = sum(m.in_features * m.out_features for m in matrices(model))
    if options.calibration != "builtin" or 4 * weights > MAX_SAMPLING_BYTES:
        return 0
    return SAMPLING_WEIGHT_ROWS // weights


# -- rows of text ----------------------------------------------------------------------------------


def builtin_texts(held_out: bool = False) -> list[str]:
    """The built-in text, by kind; with `held_out`, the paragraphs that are held out instead."""
    folder = files(__package__) / "texts"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    texts = []
    for name in names:
        paragraphs = (folder / name).read_text(encoding="utf-8").split("\n\n")
        chosen = [p for i, p in enumerate(paragraphs) if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]
        if chosen:
            texts.append("\n\n".join(chosen))
    return texts


def builtin_rows(tokenizer: Tokenizer, rows: int, length: int) -> Tensor:
    """(at most rows, length) ids of the built-in text, the same number of each kind.

    By number, not by tokens: a language that the tokenizer splits into letters would take most of them.
    """
    bos = tokenizer.bos_token_id is not None
    ids = [tokenizer.encode(text, add_bos=bos)[0] for text in builtin_texts()]
    kinds = [one[: len(one) // length * length].view(-1, length) for one in ids]
    if not all(map(len, kinds)):  # a row is longer than some kinds of text
        kinds = [rows_from_texts(builtin_texts(), tokenizer, sum(map(len, ids)) // length, length)]
    counts = [0] * len(kinds)
    for turn in range(max(map(len, kinds))):
        for n, kind in enumerate(kinds):
            counts[n] += turn < len(kind) and sum(counts) < rows
    pairs = zip(kinds, counts, strict=True)
    return torch.cat([kind[torch.linspace(0, len(kind) - 1, count).long()] for kind, count in pairs])


def rows_from_texts(
    texts: Iterator[str] | list[str], tokenizer: Tokenizer, rows: int, length: int, name: str = "this"
) -> Tensor:
    """(at most rows, length) ids: documents one after the other, each behind a BOS if the model has one.

    `InputError` if there is too little text; it calls the text `name`.
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
    """The ids of a text; of a long text only a prefix with at least `wanted` of them.

    Tokenizers need about a hundred times a text's size in memory.
    """
    bos, size = tokenizer.bos_token_id is not None, CHARS_PER_TOKEN * (wanted + MARGIN_TOKENS)
    while size < len(text):
        ids = tokenizer.encode(text[:size], add_bos=bos)[0]
        if len(ids) >= wanted + MARGIN_TOKENS:  # the cut changes only the last tokens before it
            return ids
        size *= 4
    return tokenizer.encode(text, add_bos=bos)[0]


def check_vocab(ids: Tensor, config: Config) -> Tensor:
    """The same ids; `InputError` if the model does not have all of these tokens."""
    if int(ids.max()) >= config.vocab_size:
        raise InputError(
            f"{config.model_dir}: the tokenizer gives id {int(ids.max())}, and the model knows "
            f"{config.vocab_size} tokens: they do not belong together. Copy the tokenizer's files from the "
            "original model."
        )
    return ids


def prepend_bos(rows: Tensor, config: Config, tokenizer: Tokenizer) -> Tensor:
    """The same rows, each behind a BOS if the model needs one; its last token is dropped for it."""
    bos = tokenizer.bos_token_id
    if not config.spec.requires_bos or bos is None:
        return rows
    moved = torch.cat((torch.full_like(rows[:, :1], bos), rows[:, :-1]), 1)
    return torch.where(rows[:, :1] == bos, rows, moved)


# -- text that the model samples -------------------------------------------------------------------


@torch.no_grad()
def sample_rows(loader: LayerLoader, prompts: Tensor, length: int, banned: Sequence[int], seed: int) -> Tensor:
    """(pieces, length) tokens sampled from the model behind `prompts` (pieces, tokens); repeatable by seed.

    The whole model is in memory meanwhile, in floats. Tokens in `banned` are never sampled.
    """
    decoder, device = deque(loader.build(), maxlen=1).pop(), loader.device
    generator = torch.Generator(device).manual_seed(seed)
    never = torch.tensor(banned, dtype=torch.long, device=device)
    out = []
    for first in range(0, len(prompts), SAMPLE_BATCH):
        ids = new = prompts[first : first + SAMPLE_BATCH].to(device)
        caches = KVBuffer.for_layers(loader.model, len(ids), length, device)
        for turn in range(length - ids.shape[1]):
            batch = replace(make_batch(new, ids.shape[1] - new.shape[1], turn), outputs="last")
            logits, _ = decoder.forward(batch, caches)
            assert logits is not None
            last = logits[:, -1].index_fill_(1, never, -torch.inf)  # EOS: every piece has the full length
            probs = last.softmax(-1)
            if not bool(probs.isfinite().all()):
                raise InputError(
                    "The source model's outputs hold NaN or infinity as it samples text to calibrate with: a "
                    "weight is damaged or too large. Download the model again, or check it with `exlm eval`."
                )
            new = torch.multinomial(probs, 1, generator=generator)
            ids = torch.cat((ids, new), 1)
        out.append(ids.cpu())
    loader.clear()
    return torch.cat(out)


def sample_prompts(rows: Tensor, pieces: int, bos: int | None) -> Tensor:
    """(pieces, tokens) what samples begin with: a BOS, or a few tokens of text where the model has none."""
    if bos is not None:
        return torch.full((pieces, 1), bos)
    count, length = rows.shape
    prompt, at = min(PROMPT_TOKENS, length), torch.arange(pieces)
    first = at // count * prompt % (length - prompt + 1)
    return rows[(at % count)[:, None], first[:, None] + torch.arange(prompt)]


# -- files -----------------------------------------------------------------------------------------


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a .txt, .md, .json, .jsonl or .parquet file."""
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


def _read_text(path: Path) -> Iterator[str]:
    yield path.read_text(encoding="utf-8")


def _read_json(path: Path) -> Iterator[str]:
    """One JSON value; or JSON lines, which some programs give this suffix, too."""
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
    except (ValueError, OSError) as error:  # pyarrow's exceptions are subclasses of both
        raise InputError(f"{path}: not a Parquet file that can be read ({error}).") from error


def _record_text(record: Any) -> str:
    """The text of one record: of its well-known fields if it has any, else of all of them."""
    if isinstance(record, str):  # JSON may contain lone surrogates, halves of an emoji that was cut
        return record.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(record, list):
        return "\n".join(_record_text(one) for one in record)
    if isinstance(record, dict):
        known = [record[key] for key in TEXT_KEYS if record.get(key)]
        return "\n".join(_record_text(one) for one in known or record.values())
    return str(record)
