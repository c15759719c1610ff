"""BaseGenerator with adapters, embeddings and filters, over a trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exlm import (
    Cache,
    Config,
    InputError,
    JsonSchemaFilter,
    Lora,
    MMEmbedding,
    Model,
    PrefixFilter,
    SelectFilter,
    Settings,
    Tokenizer,
)
from exlm.legacy import BaseGenerator
from tests.lora import peft_folders as making

GREEDY = Settings.greedy()
PROMPTS = ["The history of the city", "In 1995, the", "import os\n\ndef main(", "The first season of the ser"]


@pytest.fixture
def generator(model: Model, tokenizer: Tokenizer) -> BaseGenerator:
    return BaseGenerator(model, Cache(model, max_seq_len=700), tokenizer)


def test_adapters(model: Model, tokenizer: Tokenizer, tmp_path: Path, fixtures_dir: Path) -> None:
    shapes = making.matrix_shapes(fixtures_dir / "tiny-lm")
    made = making.write_adapter(tmp_path / "lora", shapes, size=2.0)
    generator = BaseGenerator(model, Cache(model, max_seq_len=300), tokenizer)
    plain = generator.generate_simple(PROMPTS[:2], GREEDY, 12)
    lora = Lora.from_directory(model, made.folder)
    try:
        adapted = generator.generate_simple(PROMPTS[:2], GREEDY, 12, loras=lora)
        assert adapted != plain
        assert generator.generate_simple(PROMPTS[:2], GREEDY, 12, loras=[lora]) == adapted
        ids = tokenizer.encode(PROMPTS[0])
        for _ in range(12):
            logits = model.forward(ids, last_id_only=True, loras=lora)
            ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), 1)
        assert tokenizer.decode(ids[0]) == adapted[0]
        assert generator.generate_simple(PROMPTS[:2], GREEDY, 12) == plain
    finally:
        lora.unload()
    with pytest.raises(InputError, match="loras"):
        generator.generate_simple("a", GREEDY, 1, loras="a folder")


def test_embeddings_replace_the_marker(model: Model, tokenizer: Tokenizer, generator: BaseGenerator) -> None:
    torch.manual_seed(3)
    rows = torch.randn(2, 5, model.config.hidden_size)
    prompts = ["The city {{EMBED_HERE}} is old", "{{EMBED_HERE}} In"]
    said = generator.generate_simple(prompts, GREEDY, 8, input_embeddings=rows, completion_only=True)
    for i, (before, after) in enumerate([("The city", "is old"), ("", "In")]):
        one = MMEmbedding(model, rows[i])
        ids = tokenizer.encode(before + one.text_alias + after, embeddings=[one])
        assert ids.shape[1] > 5
        new: list[int] = []
        for _ in range(8):
            logits = model.forward(ids, last_id_only=True, indexed_embeddings=[one])
            ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), 1)
            new.append(int(ids[0, -1]))
        assert said[i] == tokenizer.codec.decode(new, continues=True)
    assert said[0] != generator.generate_simple("The cityis old", GREEDY, 8, completion_only=True)
    for wrong in ("no marker", "{{EMBED_HERE}}{{EMBED_HERE}}"):
        with pytest.raises(InputError, match=r"EMBED_HERE.* exactly once"):
            generator.generate_simple(wrong, GREEDY, 8, input_embeddings=rows[:1])
    with pytest.raises(InputError, match="input_embeddings must be"):
        generator.generate_simple(prompts, GREEDY, 8, input_embeddings=rows[:1])


def test_mm_embeddings_are_referred_to_by_their_alias(model: Model, generator: BaseGenerator) -> None:
    torch.manual_seed(3)
    vectors = torch.randn(1, 5, model.config.hidden_size)
    one = MMEmbedding(model, vectors)
    said = generator.generate_simple(f"A{one.text_alias}B", GREEDY, 8, input_embeddings=[one])
    assert said == generator.generate_simple("A{{EMBED_HERE}}B", GREEDY, 8, input_embeddings=vectors)


def test_filters(model: Model, tokenizer: Tokenizer, generator: BaseGenerator) -> None:
    options = ["yes", "no", "maybe so"]
    chosen = generator.generate_simple(
        ["Is it? ", "Or not? "], GREEDY, 20, filters=[SelectFilter(model, tokenizer, options)],
        completion_only=True,
    )  # fmt: skip
    assert all(one in options for one in chosen)
    prefix = PrefixFilter(model, tokenizer, "Hello there")
    said = generator.generate_simple("Hi! ", GREEDY, 20, filters=[prefix], completion_only=True)
    assert said.startswith("Hello there")  # type: ignore[union-attr]
    number = JsonSchemaFilter(tokenizer, {"type": "integer", "minimum": 1000, "maximum": 99999})
    short = generator.generate_simple(
        "n = ", GREEDY, 20, filters=[number], filter_prefer_eos=True, completion_only=True
    )
    assert len(short) == 4  # type: ignore[arg-type]


def test_filters_of_the_settings_apply(model: Model, tokenizer: Tokenizer, generator: BaseGenerator) -> None:
    settings = Settings.greedy()
    settings.filters = [SelectFilter(model, tokenizer, ["seven"])]
    assert generator.generate_simple("How many? ", settings, 20, completion_only=True) == "seven"


def test_filters_apply_to_the_text_that_a_healed_token_adds(
    model: Model, tokenizer: Tokenizer, generator: BaseGenerator
) -> None:
    options = ["yes", "no"]
    said = generator.generate_simple(
        "Answer: ", GREEDY, 20, token_healing=True, filters=[SelectFilter(model, tokenizer, options)],
        completion_only=True,
    )  # fmt: skip
    assert said in options


def test_warmup_with_a_small_max_output_len(tokenizer: Tokenizer, fixtures_dir: Path) -> None:
    """Scripts that complete batches set `max_output_len` to 1."""
    config = Config(fixtures_dir / "tiny-lm")
    config.max_output_len = 1
    model = Model(config)
    model.load()
    generator = BaseGenerator(model, Cache(model, max_seq_len=100), tokenizer)
    generator.warmup()
    assert generator.generate_simple(PROMPTS[:2], GREEDY, 3, completion_only=True) != ["", ""]
