"""Trained hybrids (Qwen 3.5 with gated delta nets, Nemotron-H with Mamba 2) give the same text however they are run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from exlm import Cache, CacheQ8, Config, Generator, InputError, Job, Model, Settings, Tokenizer, Unsupported
from exlm.generator.page_table import PageTable
from exlm.generator.state_table import StateTable
from exlm.generator.token_sequence import TokenSequence

NEW = 24
STATE_BYTES = {
    "qwen3_5": 3 * (4 * 64 * 64 * 4 + 3 * 512 * 4),  # three delta nets: matrices, and inputs of the convolutions
    "nemotron_h": 2 * (8 * 64 * 32 * 4 + 3 * 640 * 4),  # two Mamba 2 mixers
}


@pytest.fixture(scope="module", params=STATE_BYTES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def state_bytes(name: str) -> int:
    return STATE_BYTES[name]


@pytest.fixture(scope="module")
def model(fixtures_dir: Path, name: str) -> Model:
    config = Config(str(fixtures_dir / f"tiny-{name}"))
    config.device, config.dtype, config.max_seq_len = "cpu", "float32", 8192  # RoPE reaches beyond its training
    model = Model(config)
    model.load()
    return model


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Tokenizer:
    return Tokenizer(model.config)


@pytest.fixture(scope="module")
def reference(fixtures_dir: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(fixtures_dir / "reference" / f"{name}.safetensors")


@pytest.fixture(scope="module")
def text(fixtures_dir: Path) -> list[int]:
    (held_out,) = load_file(fixtures_dir / "reference" / "heldout_ids.safetensors").values()
    return held_out.flatten().tolist()


def make_generator(model: Model, tokenizer: Tokenizer, **options: Any) -> Generator:
    """A generator with a cache of its own; `state_slots` is how many states there is room for."""
    if slots := options.pop("state_slots", None):
        options["state_cache_bytes"] = slots * Cache(model, max_seq_len=256).state_bytes
    cache = options.pop("cache", Cache)(model, max_seq_len=options.pop("tokens", 8192))
    return Generator(model, cache, tokenizer, **options)


def complete(generator: Generator, prompts: Sequence[Sequence[int]], new: int = NEW, **options: Any) -> list[Any]:
    """(ids, last result) of the greedy completion of each prompt."""
    for i, prompt in enumerate(prompts):
        settings = Settings.greedy()
        generator.enqueue(Job(torch.tensor([prompt]), new, gen_settings=settings, identifier=i, **options))
    ids: list[list[int]] = [[] for _ in prompts]
    last: list[Any] = [None] * len(prompts)
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            if "token_ids" in result:
                ids[result["identifier"]] += result["token_ids"].flatten().tolist()
            if result["eos"]:
                assert "error" not in result, result
                last[result["identifier"]] = result
    assert generator.pages.violations() == []
    return list(zip(ids, last, strict=True))


@pytest.fixture(scope="module")
def prompts(text: list[int]) -> list[list[int]]:
    lengths = (5, 40, 300, 700, 33, 520, 1)
    return [text[100 * i : 100 * i + length] for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def alone(model: Model, tokenizer: Tokenizer, prompts: list[list[int]]) -> list[list[int]]:
    return [complete(make_generator(model, tokenizer), [prompt])[0][0] for prompt in prompts]


def test_reference_completion(model: Model, tokenizer: Tokenizer, reference: dict[str, torch.Tensor]) -> None:
    prompt = reference["input_ids"][0, :32].tolist()
    ((ids, _),) = complete(make_generator(model, tokenizer), [prompt], new=48)
    assert ids == reference["greedy_48"].flatten().tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 2},
        {"max_batch_size": 7},
        {"max_batch_size": 7, "max_chunk_size": 256},
        {"max_batch_size": 7, "use_ngram_draft": True},
        {"max_batch_size": 3, "state_slots": 9},
        {"max_batch_size": 3, "state_slots": 9, "use_ngram_draft": True},
        {"max_batch_size": 4, "state_checkpoint_interval": 0},
        {"max_batch_size": 4, "state_checkpoint_interval": 256, "tokens": 2048},
    ],
)
def test_batches_and_warm_caches(
    model: Model, tokenizer: Tokenizer, prompts: list[list[int]], alone: list[list[int]], options: dict[str, Any]
) -> None:
    generator = make_generator(model, tokenizer, **options)
    for _ in ("cold", "warm"):
        assert [ids for ids, _ in complete(generator, prompts)] == alone


@pytest.mark.parametrize("interval", [256, 1024])
def test_a_shared_prefix_is_reused_up_to_the_last_checkpoint(
    model: Model, tokenizer: Tokenizer, text: list[int], interval: int
) -> None:
    generator = make_generator(model, tokenizer, state_checkpoint_interval=interval, max_batch_size=2)
    prompt = text[:4000] + text[5000:5020]
    other = text[:4000] + text[6000:6050]
    complete(generator, [prompt], new=4)
    ((ids, last),) = complete(generator, [other])
    assert 0 <= 4000 - last["cached_tokens"] <= 256 + interval
    ((expected, cold),) = complete(make_generator(model, tokenizer), [other])
    assert (ids, cold["cached_tokens"]) == (expected, 0)


def test_a_prefix_that_is_shared_in_part(model: Model, tokenizer: Tokenizer, text: list[int]) -> None:
    generator = make_generator(model, tokenizer, state_checkpoint_interval=256)
    complete(generator, [text[:560]])
    prompt = text[:520] + text[900:940]
    ((ids, last),) = complete(generator, [prompt])
    assert last["cached_tokens"] == 512
    assert ids == complete(make_generator(model, tokenizer), [prompt])[0][0]


def test_the_next_turn_of_a_chat_continues_behind_the_answer(
    model: Model, tokenizer: Tokenizer, text: list[int]
) -> None:
    generator = make_generator(model, tokenizer)
    first = text[:300]
    ((answer, _),) = complete(generator, [first], new=250)
    second = first + answer + text[2000:2010]
    ((ids, last),) = complete(generator, [second])
    assert last["cached_tokens"] == 512
    assert ids == complete(make_generator(model, tokenizer), [second])[0][0]


@pytest.mark.parametrize("slots", [3, 100])
def test_banned_strings_rewind_the_state(
    model: Model, tokenizer: Tokenizer, text: list[int], alone: list[list[int]], slots: int
) -> None:
    """With few slots the text behind the last final token is computed again; with many the state was kept."""
    prompt = text[:40]
    options = {"max_batch_size": 1, "state_slots": slots}
    ((ids, _),) = complete(make_generator(model, tokenizer, **options), [prompt])
    banned = [tokenizer.decode(torch.tensor(ids[i : i + 3])) for i in (4, 9, 15)]
    ((rewound, last),) = complete(make_generator(model, tokenizer, **options), [prompt], banned_strings=banned)
    assert rewound != ids
    assert not any(one.casefold() in last["full_completion"].casefold() for one in banned)
    # The text after the rewinds is what follows the text itself.
    cut = len(rewound) - 4
    ((rest, _),) = complete(make_generator(model, tokenizer), [prompt + rewound[:cut]], new=4)
    assert rest == rewound[cut:] or banned


def test_quantised_pages_beside_states(model: Model, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    alone = [complete(make_generator(model, tokenizer, cache=CacheQ8), [prompt])[0][0] for prompt in prompts]
    generator = make_generator(model, tokenizer, cache=CacheQ8, max_batch_size=7)
    assert [ids for ids, _ in complete(generator, prompts)] == alone


def test_guidance_and_token_healing(model: Model, tokenizer: Tokenizer, text: list[int]) -> None:
    settings = Settings.greedy()
    settings.cfg_scale = 1.5
    pair = [torch.tensor([text[:40]]), torch.tensor([text[200:230]])]

    def run(**options: Any) -> list[int]:
        generator = make_generator(model, tokenizer, **options)
        generator.enqueue(Job(pair, NEW, gen_settings=settings))
        healed = Job(torch.tensor([text[:50]]), NEW, gen_settings=Settings.greedy(), token_healing=True)
        generator.enqueue(healed)
        ids: list[int] = []
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                assert "error" not in result
                if "token_ids" in result and result["job"] is not healed:
                    ids += result["token_ids"].flatten().tolist()
        return ids + list(map(ord, healed.full_completion))

    assert run(max_batch_size=3) == run(max_batch_size=2)


def states_after(model: Model, ids: list[int], passes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Each layer's state after `ids`; `passes` are (tokens fed, tokens kept) of each pass, in order."""
    cache = Cache(model, max_seq_len=1024)
    cache.allocate_states(100)
    runner = model.runner(cache)
    table = PageTable(4, 256, StateTable(100, 256, 256))
    sequence = TokenSequence(list(ids), max_length=1024)
    table.allocate([sequence])
    for fed, kept in passes:
        past = sequence.num_computed_tokens
        table.plan_decode_states(sequence, past, fed)
        rejected = [7] * (fed - kept)
        runner.decode([sequence], [past], [[*ids[past : past + kept], *rejected]])
        table.mark_computed(sequence, past + kept)
    assert sequence.num_computed_tokens == len(ids)
    slot = sequence.states[len(ids)]
    return [tensor[slot].clone() for layer in cache.layers for tensor in layer.state_tensors]


@pytest.mark.parametrize(
    "passes",
    [
        [(7, 7)] * 6 + [(6, 6)],
        [(8, 1), (8, 5), (4, 4), (8, 8), (1, 1), (8, 3), (8, 8), (8, 8), (8, 8), (8, 2)],
        [(48, 48)],
        [(30, 30), (16, 1), (16, 5), (4, 4), (9, 8)],
        [(40, 12), (36, 30), (3, 1), (3, 1), (4, 4)],
    ],
)
def test_a_state_depends_on_its_tokens_alone(model: Model, text: list[int], passes: list[tuple[int, int]]) -> None:
    """Bit for bit, whatever passes computed it and whatever drafts were rejected in between.

    Attention over many new tokens is another kernel than over few, and may differ in its last bits.
    """
    assert sum(kept for _, kept in passes) == 48
    one_by_one, found = (states_after(model, text[:48], some) for some in ([(1, 1)] * 48, passes))
    assert len(found) == 2 * sum(layer.state is not None for layer in model.config.spec.layers)
    exact = 2 * sum(layer.state is not None for layer in model.config.spec.layers[: first_attention(model)])
    if max(fed for fed, _ in passes) <= 8:
        exact = len(found)
    if "delta: cpu" not in model.explain() and "mamba: cpu" not in model.explain():
        exact = 0  # plain torch sums in another order for other shapes
    for i, (expected, state) in enumerate(zip(one_by_one, found, strict=True)):
        assert torch.equal(expected, state) if i < exact else torch.allclose(expected, state, atol=1e-4)


def first_attention(model: Model) -> int:
    return next(i for i, layer in enumerate(model.config.spec.layers) if layer.attention is not None)


def test_forward_goes_back_by_one_call_only(model: Model, text: list[int]) -> None:
    cache = Cache(model, max_seq_len=512)
    ids = torch.tensor([text[:60]])
    model.forward(ids[:, :50], cache)
    first = model.forward(ids[:, 50:], cache)
    cache.current_seq_len = 50
    assert torch.equal(model.forward(ids[:, 50:], cache), first)
    cache.current_seq_len = 20
    with pytest.raises(InputError, match="cannot go back to 20 tokens"):
        model.forward(ids[:, 20:30], cache)
    cache.reset()
    assert torch.allclose(model.forward(ids, cache)[:, 50:], first, atol=1e-5)
    clone = cache.clone()
    following = model.forward(ids[:, :5], cache)
    assert torch.equal(model.forward(ids[:, :5], clone), following)
    for refused in (cache.roll_left, lambda: cache.copy_states(cache, 0, 1, 0, 1, 0, 1, 0, 1)):
        with pytest.raises(Unsupported, match="recurrent state"):
            refused()


def test_too_little_memory_for_states_is_refused(model: Model, tokenizer: Tokenizer, state_bytes: int) -> None:
    assert Cache(model, max_seq_len=256).state_bytes == state_bytes
    with pytest.raises(InputError, match=f"{12 * state_bytes:,} bytes or more, or lower max_batch_size"):
        make_generator(model, tokenizer, max_batch_size=4, state_cache_bytes=11 * state_bytes)
    with pytest.raises(InputError, match="multiple of the 256 tokens"):
        make_generator(model, tokenizer, state_checkpoint_interval=100)


def test_a_recurrent_draft_model_is_refused(model: Model, tokenizer: Tokenizer) -> None:
    with pytest.raises(Unsupported, match="draft model has recurrent layers"):
        make_generator(model, tokenizer, draft_model=model, draft_cache=Cache(model, max_seq_len=8192))
