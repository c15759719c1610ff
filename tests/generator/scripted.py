"""Generators without a model: a real tokenizer over a toy vocabulary, a script, and a cache in name only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from exlm import Generator, InputError, Job, Settings, Tokenizer
from tests.constrained import toy_vocabularies as vocabularies
from tests.generator.toy_model import ToyRunner

PIECES = vocabularies.LETTER_PIECES
ID = {piece: number for number, piece in enumerate(PIECES)}
Script = Callable[[list[int]], Sequence[int]]
"""From the ids so far to those that may come next, best first."""


def alphabet(prefix: list[int]) -> list[int]:
    """Every letter is followed by the next one, z by a."""
    return [(prefix[-1] - 2 + 1) % 26 + 2]


def ids(text: str) -> Tensor:
    """Letters, spaces and full stops as (1, n) ids."""
    return torch.tensor([[ID[letter] for letter in text]])


def make_tokenizer(folder: Path, pieces: Sequence[bytes] | None = None) -> Tokenizer:
    """A real tokenizer that knows just these pieces, of which the first two are EOS and BOS."""
    given = [piece.encode() for piece in PIECES] if pieces is None else list(pieces)
    vocabularies.byte_codec(folder, given)
    facts = {"bos_token_id": 1, "eos_token_id": 0, "eos_token_ids": [0], "pad_token_id": None}
    return Tokenizer(SimpleNamespace(model_dir=str(folder), vocab_size=len(given), **facts))


class HashingRunner(ToyRunner):
    """A scripted model whose rows are fingerprints of all ids up to theirs: as strict, in constant memory."""

    def __init__(self, script: Script, pages: int, size: int = 256, vocab: int = len(PIECES)) -> None:
        super().__init__(script, 0, size)
        self.row_hashes: list[list[int | None]] = [[None] * size for _ in range(pages)]
        self.rows = self.row_hashes  # type: ignore[assignment]
        self.log = deque(maxlen=100)  # type: ignore[assignment]
        self.vocab = vocab

    def _write(self, sequence: Any, prefix: Sequence[int], fed: Sequence[int]) -> None:
        seen, size, pages = hash(sequence.salt), self.size, sequence.pages
        for at, token in enumerate(prefix):
            seen = hash((seen, token))
            found = self.row_hashes[pages[at // size]][at % size]
            assert found == seen, f"row {at} of page {pages[at // size]} was computed from something else"
        for at, token in enumerate(fed, len(prefix)):
            seen = hash((seen, token))
            self.row_hashes[pages[at // size]][at % size] = seen

    def _logits(self, prefix: list[int]) -> Tensor:
        row = torch.zeros(self.vocab)
        for rank, token in enumerate(self.script(prefix)):
            row[token] = 10.0 - rank
        return row


@dataclass
class ScriptedCache:
    """A cache's size, and who wrote to it last."""

    max_seq_len: int = 4096
    batch_size: int = 1
    page_size: int = 256
    last_writer: object = None


class ScriptedModel:
    """What a generator asks of a model; `runners` are those it was given, in order."""

    def __init__(self, script: Script = alphabet, vocab: int = len(PIECES), max_seq_len: int = 4096) -> None:
        self.script, self.vocab = script, vocab
        self.config = SimpleNamespace(max_input_len=2048, max_seq_len=max_seq_len, vocab_size=vocab)
        self.runners: list[HashingRunner] = []

    @property
    def max_seq_len(self) -> int:
        return int(self.config.max_seq_len)

    def runner(self, cache: ScriptedCache) -> HashingRunner:
        self.runners.append(HashingRunner(self.script, cache.max_seq_len // 256, vocab=self.vocab))
        return self.runners[-1]

    def make_extras(self, ids: Sequence[int], loras: Any = None, embeddings: Any = None) -> None:
        raise InputError(f"Of {list(ids)[:9]} not all are tokens of {self.vocab}.")


def make_generator(tokenizer: Tokenizer, script: Script = alphabet, tokens: int = 4096, **options: Any) -> Generator:
    """A generator for a script."""
    vocab = tokenizer.config.vocab_size
    return Generator(ScriptedModel(script, vocab), ScriptedCache(tokens), tokenizer, **options)


def job(prompt: str | list[int], new: int = 6, **options: Any) -> Job:
    """A greedy job, unless it has its own settings."""
    given = ids(prompt) if isinstance(prompt, str) else torch.tensor([prompt])
    return Job(given, new, gen_settings=options.pop("settings", None) or Settings.greedy(), **options)


def run(machine: Generator, *jobs: Job) -> list[list[dict[str, Any]]]:
    """The results of every round until all jobs are done."""
    if jobs:
        machine.enqueue(list(jobs))
    rounds = []
    while machine.num_remaining_jobs():
        rounds.append([dict(result) for result in machine.iterate()])
    return rounds


def streaming_results(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results for sampled tokens."""
    return [result for results in rounds for result in results if result["stage"] == "streaming"]


def forward_passes(machine: Generator) -> list[tuple[str, int, int]]:
    """The model's passes: kind, rows, tokens of each."""
    return list(machine.model.runners[0].log)
