"""Random settings, logits and texts for property tests, and a tokenizer small enough to read."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from exlm.sampling import Settings

NEUTRAL_SETTINGS: dict[str, Any] = {
    "token_repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 0.0,
}
WIDTHS = (1, 2, 3, 5, 63, 64, 65, 200, 513, 2049)


def neutral(**changes: Any) -> Settings:
    """Settings that change nothing, but for what is given."""
    return Settings(**(NEUTRAL_SETTINGS | changes))


# Values to choose from; a first one given as (off, ...) is likelier than the others.
STEP_VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0.0, 0.1, 0.8, 1.5, 3.0, -1.0),
    "top_k": (0, 1, 2, 5, 50, 200, 10**6, -1),
    "top_p": (0.0, 0.01, 0.5, 0.8, 0.95, 0.999, 1.0),
    "top_n_sigma": (0.0, 0.3, 1.0, 2.5, -1.0),
    "top_a": (0.0, 0.01, 0.2, 0.5, 3.0),
    "min_p": (0.0, 0.001, 0.05, 0.3, 0.9, 1.0),
    "tfs": (0.0, 0.3, 0.7, 0.95, 1.0),
    "typical": (0.0, 0.2, 0.6, 0.95, 1.0),
    "temperature_last": (False, True),
    "mirostat": (False, True),
    "mirostat_tau": (2.0, 0.5, 5.0),
    "min_temp": (0, 0.2, 0.5),
    "max_temp": (0.0, 0.6, 1.5, 4.0),
    "temp_exponent": (1.0, 0.5, 2.0),
    "smoothing_factor": (0.0, 0.05, 0.3, 2.0),
    "xtc_probability": (0.0, 0.3, 1.0),
    "xtc_threshold": (0.1, 0.02, 0.3),
    "xtc_ignore_tokens": (None, frozenset(), frozenset({0, 1, 7})),
    "adaptive_target": (-1.0, 0.0, 0.3, 0.7, 1.0),
    "adaptive_decay": (0.9, 0.0, 0.99),
    "skew": (0.0, -0.5, 1.0),
}
EDIT_VALUES: dict[str, tuple[Any, ...]] = {
    "token_repetition_penalty": (1.0, 1.025, 1.5, 0.8),
    "token_repetition_range": (-1, 0, 3, 10, 100),
    "token_repetition_decay": (0, 1, 4, 20),
    "token_frequency_penalty": (0.0, 0.25, -0.1),
    "token_presence_penalty": (0.0, 0.5),
    "dry_multiplier": (0.0, 0.8, 2.0),
    "dry_base": (1.75, 1.1, 3.0),
    "dry_allowed_length": (2, 0, 1, 3),
    "dry_range": (0, 1, 5, 30),
    "dry_max_ngram": (20, 1, 3),
    "dry_sequence_breakers": (None, frozenset(), frozenset({1, 2})),
}


def random_settings(rng: Random, *tables: dict[str, tuple[Any, ...]]) -> Settings:
    """Settings with any mixture of what the tables offer, most of it off."""
    return neutral(
        **{
            name: values[0] if rng.random() < 0.6 else rng.choice(values)
            for table in tables
            for name, values in table.items()
        }
    )


def random_logits(rng: Random, rows: int, width: int) -> Tensor:
    """Logits from nearly flat to peaked, some rounded so that they tie."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    x = torch.randn(rows, width, generator=generator) * rng.choice((0.0, 0.1, 1.0, 3.0, 8.0))
    step = rng.choice((None, 0.25, 1.0))
    return x if step is None else (x / step).round() * step


def settings_for_edits() -> st.SearchStrategy[Settings]:
    """Settings with any mixture of penalties and DRY."""
    return st.builds(neutral, **{name: st.sampled_from(values) for name, values in EDIT_VALUES.items()})


def logits(rows: int, width: int | None = None) -> st.SearchStrategy[Tensor]:
    """`random_logits` of any width."""
    widths = st.sampled_from(WIDTHS) if width is None else st.just(width)
    return st.builds(random_logits, st.randoms(use_true_random=True), st.just(rows), widths)


class ToyTokenizer:
    """A tokenizer of a few pieces: 0 and 1 are special, then letters, then punctuation."""

    eos_token_id = 0

    def __init__(self, pieces: str = "abcdefghij.!\n") -> None:
        self.pieces = ["", "", *pieces]
        self.extended_id_to_piece = {0: "</s>", 1: "<s>"}

    def get_vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self.pieces)

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """By id, what a token adds to a text."""
        return self.pieces

    def single_id(self, piece: str) -> int | None:
        """The id of a piece."""
        return self.pieces.index(piece) if piece in self.pieces else None

    def get_prefix_id_to_ids_dict(self) -> dict[int, list[int]]:
        """Tokens that begin like each token; here each with the next one."""
        return {token: [token, token + 1] for token in range(len(self.pieces) - 1)}
