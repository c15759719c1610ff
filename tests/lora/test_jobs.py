"""Adapters of jobs: different ones in one batch, and no cached pages shared between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exlm import (
    AsyncGenerator,
    AsyncJob,
    Cache,
    Config,
    Generator,
    InputError,
    Job,
    Lora,
    Model,
    NotLoaded,
    Settings,
    Tokenizer,
)
from tests.lora import peft_folders as peft

LONG = "The cat sat on the mat and looked at the moon. " * 20
PROMPTS = ["Once upon a time", "In the first season of the", LONG, "He said that"]


def load(folder: Path) -> Model:
    model = Model(Config(folder))
    model.load()
    return model


@pytest.fixture(scope="module")
def parts(fixtures_dir: Path) -> tuple[Model, Tokenizer]:
    model = load(fixtures_dir / "tiny-lm")
    return model, Tokenizer(model.config)


@pytest.fixture(scope="module")
def adapters(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[peft.Adapter]:
    shapes = peft.matrix_shapes(fixtures_dir / "tiny-lm")
    folder = tmp_path_factory.mktemp("adapters")
    return [peft.write_adapter(folder / str(n), shapes, seed=n, size=0.5, r=2 + n) for n in range(2)]


@pytest.fixture(scope="module")
def merged(fixtures_dir: Path, adapters: Any, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The greedy text of each prompt from the base model, from each merged model, and with both merged."""
    folder = tmp_path_factory.mktemp("merged")
    sets = [[], [(adapters[0], 1.0)], [(adapters[1], 1.0)], [(adapters[0], 1.0), (adapters[1], 0.5)]]
    texts = []
    for n, chosen in enumerate(sets):
        model = load(peft.merge_into_model(fixtures_dir / "tiny-lm", folder / str(n), *chosen))
        texts.append([greedy(make_generator((model, Tokenizer(model.config))), one) for one in PROMPTS])
    assert len({tuple(row) for row in texts}) == 4
    return texts


def make_generator(parts: Any, tokens: int = 4096, **options: Any) -> Generator:
    model, tokenizer = parts
    return Generator(model, Cache(model, max_seq_len=tokens), tokenizer, **options)


def greedy(generator: Generator, prompt: Any, **options: Any) -> Any:
    return generator.generate(prompt, 12, gen_settings=Settings.greedy(), completion_only=True, **options)


def run(generator: Generator, jobs: list[Job]) -> list[Any]:
    generator.enqueue(jobs)
    last: dict[int, Any] = {}
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            if result["stage"] == "streaming" and result["eos"]:
                last[id(result["job"])] = result
    return [last[id(job)] for job in jobs]


def make_job(parts: Any, prompt: str, **options: Any) -> Job:
    return Job(parts[1].encode(prompt), 12, gen_settings=Settings.greedy(), **options)


def test_jobs_with_different_adapters_in_one_batch(parts: Any, adapters: Any, merged: Any) -> None:
    one, two = (Lora.from_directory(parts[0], adapter.folder) for adapter in adapters)
    sets: list[Any] = [None, one, [two], [one, (two, 0.5)]]
    generator = make_generator(parts, tokens=8192)
    order = [(n, p) for p in range(len(PROMPTS)) for n in range(4)]
    for _ in range(2):  # cold, then with every prompt in the cache
        results = run(generator, [make_job(parts, PROMPTS[p], loras=sets[n]) for n, p in order])
        assert [result["full_completion"] for result in results] == [merged[n][p] for n, p in order]
    cached = [result["cached_tokens"] for (_, p), result in zip(order, results, strict=True) if p == 2]
    assert min(cached) > 256
    one.unload()
    two.unload()
    assert [greedy(generator, prompt) for prompt in PROMPTS] == merged[0]


def test_prompts_are_not_shared_between_adapters(parts: Any, adapters: Any, merged: Any) -> None:
    one = Lora.from_directory(parts[0], adapters[0].folder)
    generator = make_generator(parts)

    def cached(**options: Any) -> tuple[str, int]:
        (result,) = run(generator, [make_job(parts, LONG, **options)])
        return result["full_completion"], result["cached_tokens"]

    assert cached() == (merged[0][2], 0)
    assert cached(loras=one) == (merged[1][2], 0)
    assert cached(loras=(one, 0.5))[1] == 0
    assert cached(loras=one)[1] > 256
    assert cached(loras=[])[1] > 256
    again = Lora.from_directory(parts[0], adapters[0].folder)
    assert cached(loras=again) == (merged[1][2], 0)
    one.unload()
    again.unload()


def test_default_adapters_of_a_generator(parts: Any, adapters: Any, merged: Any) -> None:
    one, two = (Lora.from_directory(parts[0], adapter.folder) for adapter in adapters)
    generator = make_generator(parts)
    assert generator.current_loras is None
    for loras, row in ((one, 1), ([two], 2), ([one, (two, 0.5)], 3), ([], 0), (one, 1), (None, 0)):
        generator.set_loras(loras)
        assert greedy(generator, PROMPTS[:2]) == merged[row][:2]
    assert generator.current_loras is None
    generator.set_loras(one)
    assert generator.current_loras == [one]
    waiting = make_job(parts, PROMPTS[0])
    generator.enqueue(waiting)
    generator.set_loras(two)
    assert greedy(generator, PROMPTS[0], loras=[]) == merged[0][0]
    assert waiting.full_completion == merged[1][0]
    one.unload()
    with pytest.raises(NotLoaded):
        generator.set_loras(one)
    with pytest.raises(InputError, match="must be adapters"):
        generator.set_loras("one")
    assert generator.current_loras == [two]
    two.unload()


def test_speculation_with_adapters(parts: Any, adapters: Any, merged: Any) -> None:
    one = Lora.from_directory(parts[0], adapters[0].folder)
    model = parts[0]
    for options in (
        {"use_ngram_draft": True},
        {"draft_model": model, "draft_cache": Cache(model, max_seq_len=4096)},
    ):
        assert greedy(make_generator(parts, **options), PROMPTS, loras=one) == merged[1]
    one.unload()


def test_a_job_whose_adapter_is_unloaded_fails_alone(parts: Any, adapters: Any, merged: Any) -> None:
    one, two = (Lora.from_directory(parts[0], adapter.folder) for adapter in adapters)
    generator = make_generator(parts, max_batch_size=3)
    jobs = [make_job(parts, PROMPTS[0], loras=loras) for loras in (one, two, None, one)]
    generator.enqueue(jobs)
    for _ in range(3):
        generator.iterate()
    one.unload()
    last: dict[int, Any] = {}
    while generator.num_remaining_jobs():
        last |= {jobs.index(r["job"]): r for r in generator.iterate() if r["eos"]}
    assert [last[n]["eos_reason"] for n in range(4)] == ["error", "max_new_tokens", "max_new_tokens", "error"]
    assert all(isinstance(last[n]["error"], NotLoaded) for n in (0, 3))
    assert [last[n]["full_completion"] for n in (1, 2)] == [merged[2][0], merged[0][0]]
    with pytest.raises(NotLoaded, match="not installed"):
        generator.enqueue(make_job(parts, PROMPTS[0], loras=one))
    assert generator.num_remaining_jobs() == 0
    two.unload()


def test_async_jobs(parts: Any, adapters: Any, merged: Any) -> None:
    import asyncio

    one = Lora.from_directory(parts[0], adapters[0].folder)

    async def main() -> list[str]:
        model, tokenizer = parts
        generator = AsyncGenerator(model, Cache(model, max_seq_len=4096), tokenizer)

        async def text(loras: Any) -> str:
            ids = tokenizer.encode(PROMPTS[0])
            stream = AsyncJob(generator, ids, 12, gen_settings=Settings.greedy(), loras=loras)
            return "".join([result.get("text", "") async for result in stream])

        texts = await asyncio.gather(text(None), text(one), text([]))
        await generator.close()
        return texts

    assert asyncio.run(main()) == [merged[0][0], merged[1][0], merged[0][0]]
    one.unload()
