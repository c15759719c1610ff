"""The five documents this library started from, and what their checklist is tested with: one small trained
model, loaded once, and a generator with an empty cache for each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from tests.seeds.blocks import BLOCKS, Code

PROMPT = "Once upon a time"
"""The model goes on: ", there was a little girl named Tim.\nJack …"."""


@dataclass(frozen=True)
class Seed:
    """One of the documents; its code blocks are what stands between two of its headings."""

    text: str

    def span(self, after: str, before: str) -> tuple[int, int]:
        """Where the lines between two lines begin and end."""
        lines = self.text.splitlines()
        start = lines.index(after) + 1
        return start, lines.index(before, start)

    def block(self, after: str, before: str) -> str:
        """The lines between two lines."""
        start, stop = self.span(after, before)
        return "\n".join(self.text.splitlines()[start:stop])


@pytest.fixture(scope="session")
def seed(fixtures_dir: Path) -> Callable[[int], Seed]:
    """A document by its number."""

    def read(number: int) -> Seed:
        found = list((fixtures_dir.parent / "seeds").glob(f"{number:03}_*.txt"))
        if not found:
            pytest.skip(f"no document {number:03} beside the fixtures")
        return Seed(found[0].read_text(encoding="utf-8"))

    return read


@pytest.fixture(scope="session")
def code(seed: Callable[[int], Seed]) -> Code:
    """The block below a heading of a document."""
    return lambda number, heading: seed(number).block(heading, BLOCKS[number][heading])


@pytest.fixture(scope="session")
def folder(fixtures_dir: Path) -> Path:
    """A Llama of 3.8 million parameters, trained for real."""
    return fixtures_dir / "tiny-lm"


@pytest.fixture(scope="session")
def draft_folder(fixtures_dir: Path) -> Path:
    """The same model in 4 bits: a good guesser."""
    return fixtures_dir / "tiny-lm-exl2-4.0bpw"


@pytest.fixture(scope="session")
def ender_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, but for two rows of its head, exchanged: it says EOS where that one begins a new line.

    The documents' examples wait for EOS, which the model itself was never taught to say.
    """
    made = tmp_path_factory.mktemp("ender") / "model"
    shutil.copytree(folder, made, copy_function=shutil.copyfile)
    made.chmod(0o700)
    tokenizer = ExLlamaV2Tokenizer(ExLlamaV2Config(str(folder)))
    rows = [tokenizer.eos_token_id, tokenizer.single_id("\n")]
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][rows] = tensors["lm_head.weight"][rows[::-1]]
    save_file(tensors, made / "model.safetensors")
    return made


def loaded(folder: Path) -> ExLlamaV2:
    """A model in memory."""
    model = ExLlamaV2(ExLlamaV2Config(str(folder)))
    model.load()
    return model


@pytest.fixture(scope="session")
def model(folder: Path) -> ExLlamaV2:
    """The model, loaded."""
    return loaded(folder)


@pytest.fixture(scope="session")
def draft_model(draft_folder: Path) -> ExLlamaV2:
    """The guesser, loaded."""
    return loaded(draft_folder)


@pytest.fixture(scope="session")
def tokenizer(model: ExLlamaV2) -> ExLlamaV2Tokenizer:
    """Its tokenizer."""
    return ExLlamaV2Tokenizer(model.config)


@pytest.fixture
def cache(model: ExLlamaV2) -> ExLlamaV2Cache:
    """An empty cache."""
    return ExLlamaV2Cache(model, max_seq_len=2048)


@pytest.fixture
def generator(model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2DynamicGenerator:
    """A dynamic generator over it."""
    return ExLlamaV2DynamicGenerator(model, cache, tokenizer)


@pytest.fixture
def greedy() -> ExLlamaV2Sampler.Settings:
    """Always the most probable token."""
    return ExLlamaV2Sampler.Settings.greedy()


@pytest.fixture(scope="session")
def vectors(folder: Path, tokenizer: ExLlamaV2Tokenizer) -> Callable[[str], torch.Tensor]:
    """What the model itself sees of a text, (tokens, hidden): embeddings to inject."""
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float()
    return lambda text: table[tokenizer.encode(text)[0]]


@pytest.fixture
def answer(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> Callable[..., str]:
    """The slow, obvious way: one whole forward pass for each greedy token, no cache, no generator."""

    def run(prompt: str, count: int, *, add_bos: bool = False) -> str:
        ids = tokenizer.encode(prompt, add_bos=add_bos)
        start = ids.shape[1]
        for _ in range(count):
            logits = model.forward(ids)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return str(tokenizer.decode(ids[0, start:]))

    return run


@pytest.fixture
def passes(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward pass of the model is given for a row."""
    seen: list[int] = []
    decoder = model._require_loaded().decoder
    forward = decoder.forward

    def counted(batch: Any, *rest: Any) -> Any:
        seen.append(batch.ids.shape[1])
        return forward(batch, *rest)

    monkeypatch.setattr(decoder, "forward", counted)
    return seen


def make_job(ids: torch.Tensor, count: int, **options: Any) -> ExLlamaV2DynamicJob:
    """A greedy job."""
    return ExLlamaV2DynamicJob(ids, count, gen_settings=ExLlamaV2Sampler.Settings.greedy(), **options)


def some_ids(count: int, start: int = 0) -> torch.Tensor:
    """A prompt that is like no other with another start."""
    return (torch.arange(start, start + count) * 7 % 1900 + 10)[None]


def drain(generator: Any) -> list[Any]:
    """Every result until nothing is left to do."""
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    return results
