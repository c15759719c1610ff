"""The interface of `tokenizer.tokenizer_model`, and token ids read from a dataset for evaluation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import InputError
from ..quantize.calibration import read_documents
from ..tokenizer import Tokenizer


@runtime_checkable
class Vocabulary(Protocol):
    """The methods of `tokenizer.tokenizer_model`, whichever tokenizer file it was read from."""

    def vocab_size(self) -> int:
        """One more than the highest id."""

    def id_to_piece(self, number: int) -> str:
        """The token as the vocabulary writes it."""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token as the vocabulary writes it."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""


def get_tokens(num_rows: int, length: int, filename: str | os.PathLike[str], tokenizer: Tokenizer) -> Tensor:
    """The first (num_rows, length) token ids of a .parquet, .txt or .jsonl file, its documents joined."""
    wanted, ids, have = num_rows * length, [], 0
    if num_rows < 1 or length < 1:
        raise InputError(f"get_tokens reads at least 1 row of 1 token, found {num_rows} and {length}.")
    for text in read_documents(Path(filename)):
        ids.append(tokenizer.encode(text)[0])
        have += len(ids[-1])
        if have >= wanted:
            return torch.cat(ids)[:wanted].view(num_rows, length)
    raise InputError(
        f"{filename} has {have:,} tokens, and {num_rows} rows of {length} take {wanted:,}: ask for fewer "
        "rows or give more text."
    )
