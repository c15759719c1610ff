"""Injected vectors: the model's own embeddings must act as the tokens do, anywhere in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm import (
    Cache,
    Config,
    Generator,
    InputError,
    Job,
    MMEmbedding,
    Model,
    Settings,
    Tokenizer,
    TokenizerError,
)
from tests.models import zoo

TEXT = "The cat sat on the mat and looked at the moon. " * 20
END = " In the first season of the"


def load(folder: Path, **options: Any) -> Model:
    config = Config(folder)
    for name, value in options.items():
        setattr(config, name, value)
    model = Model(config)
    model.load()
    return model


def token_embeddings(model: Model, ids: Tensor, **options: Any) -> MMEmbedding:
    """The model's own embeddings of some tokens (1, n), as its first layer gets them."""
    embedding = model._require_loaded().decoder.embedding
    return MMEmbedding(model, embedding.lookup(ids)[0].float() * embedding.scale, **options)


FAMILIES = ["LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "GraniteForCausalLM"]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("chunk", [2048, 7])
def test_token_embeddings_equal_tokens(architecture: str, chunk: int, tmp_path: Path) -> None:
    model = load(zoo.build(architecture, tmp_path / "model").folder, max_input_len=chunk)
    tokens = torch.randint(0, 100, (2, 40))
    ids, one, two = (
        tokens.clone(),
        token_embeddings(model, tokens[:1, 3:20]),
        token_embeddings(model, tokens[1:, 30:]),
    )
    ids[0, 3:20], ids[1, 30:] = one.get_ids_tensor()[0], two.get_ids_tensor()[0]

    def run(ids: Tensor, **options: Any) -> Tensor:
        return model.forward(ids, Cache(model, batch_size=2, max_seq_len=64), **options)

    torch.testing.assert_close(run(ids, indexed_embeddings=[one, two]), run(tokens), rtol=1e-5, atol=1e-5)
    other = MMEmbedding(model, torch.randn(17, model.config.hidden_size))
    ids[0, 3:20] = other.get_ids_tensor()[0]
    assert float((run(ids, indexed_embeddings=[other, two])[0] - run(tokens)[0]).abs().max()) > 1e-2


def test_ids_without_an_embedding_are_refused(tmp_path: Path) -> None:
    model = load(zoo.build("LlamaForCausalLM", tmp_path / "model").folder)
    one = MMEmbedding(model, torch.zeros(2, model.config.hidden_size))
    for options in (
        {},
        {"indexed_embeddings": []},
        {"indexed_embeddings": [token_embeddings(model, torch.tensor([[3]]))]},
    ):
        with pytest.raises(InputError, match=rf"Id {one.first_index} stands for an injected"):
            model.forward(one.get_ids_tensor(), **options)
    with pytest.raises(InputError, match="outside the vocabulary"):
        model.forward(torch.tensor([[10**9 - 1]]), indexed_embeddings=[one])
    with pytest.raises(InputError, match="found Tensor: wrap"):
        model.forward(one.get_ids_tensor(), indexed_embeddings=one.embeddings)
    wide = load(zoo.build("LlamaForCausalLM", tmp_path / "wide", hidden_size=128).folder)
    with pytest.raises(InputError, match="made for another model"):
        wide.forward(one.get_ids_tensor(), indexed_embeddings=[one])


@pytest.fixture(scope="module")
def model_and_tokenizer(fixtures_dir: Path) -> tuple[Model, Tokenizer]:
    model = load(fixtures_dir / "tiny-lm")
    return model, Tokenizer(model.config)


def make_generator(model_and_tokenizer: tuple[Model, Tokenizer], **options: Any) -> Generator:
    model, tokenizer = model_and_tokenizer
    return Generator(model, Cache(model, max_seq_len=2048), tokenizer, **options)


def greedy(generator: Generator, prompt: Any, new: int = 20, **options: Any) -> Any:
    return generator.generate(prompt, new, gen_settings=Settings.greedy(), completion_only=True, **options)


def prompt_with_embedding(
    model_and_tokenizer: tuple[Model, Tokenizer], alias: str | None = None
) -> tuple[str, Any, MMEmbedding]:
    """A prompt with a long embedding in its middle, the same as ids of tokens, and the embedding."""
    model, tokenizer = model_and_tokenizer
    middle = tokenizer.encode(TEXT)
    one = token_embeddings(model, middle, text_alias=alias)
    prompt = f"Once upon a time there was{one.text_alias}{END}"
    ids = tokenizer.encode(prompt, embeddings=[one])[0].tolist()
    at = ids.index(one.first_index)
    assert ids[at : at + one.length] == one.get_ids()
    plain = [*ids[:at], *middle[0].tolist(), *ids[at + one.length :]]
    return prompt, torch.tensor([plain]), one


def result_of(generator: Generator, job: Job) -> Any:
    generator.enqueue(job)
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            if result["stage"] == "streaming" and result["eos"]:
                last = result
    return last


def test_text_is_the_same_as_with_tokens_and_is_cached(model_and_tokenizer: Any) -> None:
    model, tokenizer = model_and_tokenizer
    prompt, plain, one = prompt_with_embedding(model_and_tokenizer)
    want = result_of(make_generator(model_and_tokenizer), Job(plain, 20, gen_settings=Settings.greedy()))[
        "full_completion"
    ]
    assert want
    for chunk in (256, 1024):
        generator = make_generator(model_and_tokenizer, max_chunk_size=chunk)
        text, last = greedy(generator, prompt, embeddings=[one], return_last_results=True)
        assert text == want
        assert last["cached_tokens"] == 0
        ids = tokenizer.encode(prompt, embeddings=[one])
        again = result_of(generator, Job(ids, 20, gen_settings=Settings.greedy(), embeddings=[one]))
        assert again["full_completion"] == want
        assert again["cached_tokens"] > 256
        # Equal vectors in another object are another prompt; so is the same text in tokens.
        copy = MMEmbedding(model, one.embeddings, one.text_alias)
        text, last = greedy(generator, prompt, embeddings=[copy], return_last_results=True)
        assert text == want
        assert last["cached_tokens"] < 10
        last = result_of(generator, Job(plain, 20, gen_settings=Settings.greedy()))
        assert last["full_completion"] == want
        assert last["cached_tokens"] < 10


def test_in_a_batch_with_others(model_and_tokenizer: Any) -> None:
    model, _ = model_and_tokenizer
    prompt, _, one = prompt_with_embedding(model_and_tokenizer)
    noise = MMEmbedding(model, torch.randn(40, model.config.hidden_size), "<noise>")
    alone = [
        greedy(make_generator(model_and_tokenizer), prompt, embeddings=[one]),
        greedy(make_generator(model_and_tokenizer), "The cat sat"),
        greedy(make_generator(model_and_tokenizer), "Look: <noise>!", embeddings=[noise]),
    ]
    together = greedy(
        make_generator(model_and_tokenizer),
        [prompt, "The cat sat", "Look: <noise>!"],
        embeddings=[[one], None, [noise]],
    )
    assert together == alone


def test_bare_vectors_replace_the_marker(model_and_tokenizer: Any) -> None:
    _, plain, one = prompt_with_embedding(model_and_tokenizer, "{{EMBED_HERE}}")
    want = result_of(make_generator(model_and_tokenizer), Job(plain, 20, gen_settings=Settings.greedy()))[
        "full_completion"
    ]
    prompt = "Once upon a time there was{{EMBED_HERE}}" + END
    assert greedy(make_generator(model_and_tokenizer), prompt, embeddings=one.embeddings) == want
    assert greedy(make_generator(model_and_tokenizer), [prompt], embeddings=[[one.embeddings]]) == [want]
    for bad in ("no place", "{{EMBED_HERE}} {{EMBED_HERE}}"):
        with pytest.raises(InputError, match="exactly once"):
            greedy(make_generator(model_and_tokenizer), bad, embeddings=[one.embeddings])
    with pytest.raises(InputError, match="exactly once"):
        greedy(make_generator(model_and_tokenizer), prompt, embeddings=[one.embeddings] * 2)


def test_healing_guidance_penalties_and_drafts(model_and_tokenizer: Any) -> None:
    """Other features that read ids work with those of embeddings."""
    model, _ = model_and_tokenizer
    prompt, _, one = prompt_with_embedding(model_and_tokenizer)
    want = greedy(make_generator(model_and_tokenizer), prompt, embeddings=[one])
    for options in (
        {"use_ngram_draft": True},
        {"draft_model": model, "draft_cache": Cache(model, max_seq_len=2048)},
    ):
        generator = make_generator(model_and_tokenizer, **options)
        text, last = greedy(generator, prompt, embeddings=[one], return_last_results=True)
        assert text == want
        assert last.get("accepted_draft_tokens", 0) == 0
        assert greedy(generator, "The cat sat on") == greedy(make_generator(model_and_tokenizer), "The cat sat on")
    ends = "Look at" + one.text_alias
    assert greedy(make_generator(model_and_tokenizer), ends, embeddings=[one], token_healing=True) == greedy(
        make_generator(model_and_tokenizer), ends, embeddings=[one]
    )
    settings = Settings(token_repetition_penalty=1.2, token_frequency_penalty=0.3, dry_multiplier=0.8)
    assert make_generator(model_and_tokenizer).generate(prompt, 10, gen_settings=settings, embeddings=[one], seed=1)
    guided = Settings.greedy(cfg_scale=1.5)
    assert make_generator(model_and_tokenizer).generate((prompt, "No"), 10, gen_settings=guided, embeddings=[one])


def test_jobs_refuse_ids_without_an_embedding(model_and_tokenizer: Any) -> None:
    model, tokenizer = model_and_tokenizer
    _, _, one = prompt_with_embedding(model_and_tokenizer)
    generator = make_generator(model_and_tokenizer)
    with pytest.raises(InputError, match=rf"Id {one.first_index} stands for an injected"):
        generator.enqueue(Job(one.get_ids_tensor(), 5))
    with pytest.raises(InputError, match="found Tensor: wrap"):
        generator.enqueue(Job(one.get_ids_tensor(), 5, embeddings=[one.embeddings]))
    with pytest.raises(InputError, match="outside the vocabulary"):
        generator.enqueue(Job(torch.tensor([[10**8]]), 5))
    with pytest.raises(TokenizerError, match="Two embeddings have"):
        tokenizer.encode("<a>", embeddings=[MMEmbedding(model, one.embeddings, "<a>") for _ in range(2)])
    assert generator.num_remaining_jobs() == 0


def test_detokenizing_skips_embedding_ids(model_and_tokenizer: Any) -> None:
    _, tokenizer = model_and_tokenizer
    prompt, _, one = prompt_with_embedding(model_and_tokenizer)
    ids = tokenizer.encode(prompt, embeddings=[one])
    assert tokenizer.decode(ids)[0] == prompt.replace(one.text_alias, "")
