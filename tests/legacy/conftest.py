"""A small trained model, loaded once, and the toy vocabulary of the scripted models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from exlm import Config, Model, Tokenizer
from tests.generator.scripted import make_tokenizer as toy_tokenizer


@pytest.fixture(scope="session")
def model(fixtures_dir: Path) -> Model:
    """A trained Llama of 3.8 million parameters."""
    model = Model(Config(fixtures_dir / "tiny-lm"))
    model.load()
    return model


@pytest.fixture(scope="session")
def draft(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same model without its last layer: a draft model that is often right and often wrong."""
    folder = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(fixtures_dir / "tiny-lm", folder, copy_function=shutil.copyfile)
    folder.chmod(0o700)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    model = Model(Config(folder))
    model.load()
    return model


@pytest.fixture(scope="session")
def tokenizer(model: Model) -> Tokenizer:
    """The tokenizer of the trained model."""
    return Tokenizer(model.config)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The toy vocabulary."""
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))
