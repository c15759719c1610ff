"""A small trained model, loaded once, and the names that formatron imports from older pydantic."""

from __future__ import annotations

import typing
from pathlib import Path

import pydantic.typing
import pytest

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer

# formatron 0.5 reads typing's names from pydantic.typing, where pydantic 2.12 stopped showing them.
vars(pydantic.typing).update({name: getattr(typing, name) for name in typing.__all__})


@pytest.fixture(scope="session")
def folder(fixtures_dir: Path) -> Path:
    """A trained model of a few megabytes."""
    return fixtures_dir / "tiny-lm"


@pytest.fixture(scope="session")
def model(folder: Path) -> ExLlamaV2:
    """The model, loaded."""
    made = ExLlamaV2(ExLlamaV2Config(str(folder)))
    made.load()
    return made


@pytest.fixture(scope="session")
def tokenizer(model: ExLlamaV2) -> ExLlamaV2Tokenizer:
    """Its tokenizer."""
    return ExLlamaV2Tokenizer(model.config)


@pytest.fixture
def cache(model: ExLlamaV2) -> ExLlamaV2Cache:
    """An empty cache."""
    return ExLlamaV2Cache(model, max_seq_len=1024)
