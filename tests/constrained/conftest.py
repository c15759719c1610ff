"""Vocabularies for tests of filters."""

from __future__ import annotations

from pathlib import Path

import pytest

from exlm.tokenizer.codec import Codec, ConfigTokenIds
from tests import tiny
from tests.constrained import toy_vocabularies as toy


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """The vocabulary of the traces of exllamav2: lower-case letters and a few words."""
    return toy.byte_codec(tmp_path_factory.mktemp("letters"), [piece.encode() for piece in toy.LETTER_PIECES])


@pytest.fixture(scope="session")
def every_byte(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """One token for each byte."""
    return Codec.from_folder(tiny.make_chat_folder(tmp_path_factory.mktemp("bytes")), ConfigTokenIds(bos=1, eos=2))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """A SentencePiece vocabulary with byte fallback, where several tokens have the same bytes."""
    words = [*'abcdefghijklmnopqrstuvwxyz{}[]:,"0123456789', "\u2581the", "true", "null", "\u00e9", "er"]
    return toy.metaspace_codec(tmp_path_factory.mktemp("byte_fallback"), words)


@pytest.fixture(scope="session")
def trained(fixtures_dir: Path) -> Codec:
    """A trained byte-level BPE."""
    return Codec.from_folder(fixtures_dir / "tiny-lm", ConfigTokenIds())


@pytest.fixture(params=["every_byte", "byte_fallback", "trained"])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Each vocabulary that can spell every text."""
    found: Codec = request.getfixturevalue(request.param)
    return found
