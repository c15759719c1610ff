"""The toy vocabulary of the golden traces, a tokenizer over it, and a model that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

SPECIAL = {0: "</s>", 1: "<s>"}
PIECES = ["</s>", "<s>", *"abcdefghijklmnopqrstuvwxyz", " ", "!", ".", "\n", "Hello", "Hel", "He", " world"]
VOCAB = len(PIECES)


class ToyDetokenizer:
    """A detokenizer of the toy vocabulary."""

    pending = False

    def __init__(self, special: bool) -> None:
        self.special = special

    def push(self, number: int) -> str:
        return PIECES[number] if self.special or number not in SPECIAL else ""

    def feed(self, ids: Iterable[int]) -> str:
        return "".join(map(self.push, ids))

    def flush(self) -> str:
        return ""

    def copy(self) -> ToyDetokenizer:
        return self


class ToyTokenizer:
    """Greedy longest match over the toy vocabulary."""

    bos_token_id, eos_token_id = 1, 0
    extended_id_to_piece = SPECIAL

    def encode(self, text: str, add_bos: bool = False, encode_special_tokens: bool = False, **_: Any) -> Tensor:
        ids = [1] if add_bos else []
        pieces = PIECES if encode_special_tokens else PIECES[2:]
        while text:
            piece = max((p for p in pieces if text.startswith(p)), key=len)
            ids.append(PIECES.index(piece))
            text = text[len(piece) :]
        return torch.tensor([ids], dtype=torch.int64)

    def detokenizer(self, decode_special_tokens: bool = False, continues: bool = False) -> ToyDetokenizer:
        return ToyDetokenizer(decode_special_tokens)

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        return PIECES if include_special_tokens else ["", "", *PIECES[2:]]

    def get_prefix_id_to_ids_dict(self) -> dict[int, list[int]]:
        def starting(number: int) -> list[int]:
            if number in SPECIAL:
                return [number]
            return [i for i, piece in enumerate(PIECES) if i not in SPECIAL and piece.startswith(PIECES[number])]

        return {number: starting(number) for number in range(VOCAB)}


class ToyRunner:
    """A scripted model whose cache rows store the whole prefix they were computed from."""

    def __init__(self, script: Callable[[list[int]], Sequence[int]], pages: int, size: int = 256) -> None:
        self.script, self.size = script, size
        self.rows: list[list[tuple[int, ...] | None]] = [[None] * size for _ in range(pages)]
        self.log: list[tuple[str, int, int]] = []

    def copy_pages(self, copies: Iterable[tuple[int, int, int]]) -> None:
        for source, target, count in copies:
            self.rows[target][:count] = self.rows[source][:count]

    def prefill(self, sequence: Any, start: int, stop: int) -> None:
        self.log.append(("prefill", 1, stop - start))
        self._write(sequence, sequence.ids[:start], sequence.ids[start:stop])

    def decode(self, sequences: Sequence[Any], past: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        self.log.append(("decode", len(sequences), len(tokens[0])))
        out = []
        for sequence, start, fed in zip(sequences, past, tokens, strict=True):
            prefix = sequence.ids[:start]
            self._write(sequence, prefix, fed)
            rows = [self._logits([*prefix, *fed[: i + 1]]) for i in range(len(fed))]
            out.append(torch.stack(rows))
        return out

    def decode_next(self, sequences: Sequence[Any], past: Sequence[int], tokens: Tensor) -> Tensor | None:
        return None

    def _write(self, sequence: Any, prefix: Sequence[int], fed: Sequence[int]) -> None:
        """Check that every row that is attended to was computed from exactly this prefix, and store the new ones."""
        for i in range(len(prefix)):
            row = self.rows[sequence.pages[i // self.size]][i % self.size]
            assert row == (sequence.salt, *prefix[: i + 1]), f"row {i} was computed from {row!r}"
        ids = list(prefix)
        for token in fed:
            ids.append(token)
            position = len(ids) - 1
            self.rows[sequence.pages[position // self.size]][position % self.size] = (sequence.salt, *ids)

    def _logits(self, prefix: list[int]) -> Tensor:
        row = torch.zeros(VOCAB)
        for rank, token in enumerate(self.script(prefix)):
            row[token] = 10.0 - rank
        return row


class AsyncToyRunner(ToyRunner):
    """A runner for asynchronous scheduling that overwrites its last logits with the next ones."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._last: list[Tensor] = []

    def decode(self, sequences: Sequence[Any], past: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        for logits in self._last:
            logits.fill_(torch.nan)
        self._last = super().decode(sequences, past, tokens)
        return self._last

    def decode_next(self, sequences: Sequence[Any], past: Sequence[int], tokens: Tensor) -> Tensor:
        token_lists = [[max(0, token)] for token in tokens.tolist()]
        logits = torch.stack(self.decode(sequences, past, token_lists))
        self.log[-1] = ("ahead", len(token_lists), 1)
        self._last = [logits]
        return logits
