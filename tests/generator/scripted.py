"""Generators over a scripted model: a real tokenizer with a toy vocabulary, and a cache without tensors."""

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
"""Maps the ids so far to the candidates for the next one, best first."""


def alphabet(prefix: list[int]) -> list[int]:
    """Continue with the next letter of the alphabet; a follows z."""
    return [(prefix[-1] - 2 + 1) % 26 + 2]


def ids(text: str) -> Tensor:
    """The ids of letters, spaces and full stops, of shape (1, n)."""
    return torch.tensor([[ID[letter] for letter in text]])


def make_tokenizer(folder: Path, pieces: Sequence[bytes] | None = None) -> Tokenizer:
    """A real tokenizer whose vocabulary is `pieces`; the first two are EOS and BOS."""
    piece_bytes = [piece.encode() for piece in PIECES] if pieces is None else list(pieces)
    vocabularies.byte_codec(folder, piece_bytes)
    special_ids = {"bos_token_id": 1, "eos_token_id": 0, "eos_token_ids": [0], "pad_token_id": None}
    return Tokenizer(SimpleNamespace(model_dir=str(folder), vocab_size=len(piece_bytes), **special_ids))


class HashingRunner(ToyRunner):
    """A scripted model that stores in each row a hash of all ids up to it, in constant memory.

    With `state_slots` it has a recurrent state too: a slot holds the hash of the ids behind the state.
    """

    def __init__(
        self, script: Script, pages: int, size: int = 256, vocab: int = len(PIECES), state_slots: int = 0
    ) -> None:
        super().__init__(script, 0, size)
        self.row_hashes: list[list[int | None]] = [[None] * size for _ in range(pages)]
        self.rows = self.row_hashes  # type: ignore[assignment]
        self.log = deque(maxlen=100)  # type: ignore[assignment]
        self.vocab = vocab
        self.state_hashes: list[int | None] = [None] * state_slots

    def _write(self, sequence: Any, prefix: Sequence[int], new_tokens: Sequence[int]) -> None:
        prefix_hash, size, pages = hash(sequence.salt), self.size, sequence.pages
        for position, token in enumerate(prefix):
            prefix_hash = hash((prefix_hash, token))
            row_hash = self.row_hashes[pages[position // size]][position % size]
            assert row_hash == prefix_hash, (
                f"row {position} of page {pages[position // size]} was computed from something else"
            )
        if self.state_hashes:
            slots = [slot for _, slot in sequence.state_targets]
            assert len({*slots, sequence.state_source}) == len(slots) + 1, (
                "a slot is read and written, or written twice"
            )
            found = self.state_hashes[sequence.state_source] if prefix else prefix_hash
            assert found == prefix_hash, f"the state behind {len(prefix)} tokens was computed from something else"
            assert (sequence.state_source == -1) == (not prefix)
        targets = dict(sequence.state_targets) if self.state_hashes else {}
        assert all(0 <= token < len(new_tokens) for token in targets)
        for position, token in enumerate(new_tokens, len(prefix)):
            prefix_hash = hash((prefix_hash, token))
            if (slot := targets.get(position - len(prefix))) is not None:
                self.state_hashes[slot] = prefix_hash
            self.row_hashes[pages[position // size]][position % size] = prefix_hash

    def _logits(self, prefix: list[int]) -> Tensor:
        row = torch.zeros(self.vocab)
        for rank, token in enumerate(self.script(prefix)):
            row[token] = 10.0 - rank
        return row


@dataclass
class ScriptedCache:
    """The attributes of a cache that a generator reads: its size and its last writer."""

    max_seq_len: int = 4096
    batch_size: int = 1
    page_size: int = 256
    last_writer: object = None


class ScriptedModel:
    """The attributes of a model that a generator uses; `runners` lists the runners it created, in order."""

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
    vocab = tokenizer.config.vocab_size
    return Generator(ScriptedModel(script, vocab), ScriptedCache(tokens), tokenizer, **options)


def make_job(prompt: str | list[int], new: int = 6, **options: Any) -> Job:
    """A job that samples greedily unless `settings` are given."""
    prompt_ids = ids(prompt) if isinstance(prompt, str) else torch.tensor([prompt])
    return Job(prompt_ids, new, gen_settings=options.pop("settings", None) or Settings.greedy(), **options)


def run(generator: Generator, *jobs: Job) -> list[list[dict[str, Any]]]:
    """Iterate until all jobs are done; return the results of each iteration."""
    if jobs:
        generator.enqueue(list(jobs))
    rounds = []
    while generator.num_remaining_jobs():
        rounds.append([dict(result) for result in generator.iterate()])
    return rounds


def streaming_results(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of the stage "streaming"."""
    return [result for results in rounds for result in results if result["stage"] == "streaming"]


def forward_passes(generator: Generator) -> list[tuple[str, int, int]]:
    """The forward passes of the model: kind, rows and tokens of each."""
    return list(generator.model.runners[0].log)
