"""Recorded passes: buckets, and on a GPU the same answers as launch by launch, in any company."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm import Cache, CacheQ4, CacheQ8, Config, Generator, Job, Model, Settings, Tokenizer
from exlm.cache import PAGE, CacheBase
from exlm.generator.results import Result
from exlm.model.graphs import FEWEST, MOST, ROWS, Bucket, Graphs
from exlm.model.runner import all_logits
from exlm.nn import Batch


@given(st.integers(1, ROWS[-1]), st.integers(1, MOST), st.integers(1, 4096))
def test_a_bucket_holds_its_batch_and_little_more(rows: int, tokens: int, pages: int) -> None:
    bucket = Bucket.of(rows, tokens, pages)
    assert bucket is not None
    assert bucket.tokens == tokens
    assert rows <= bucket.rows <= 2 * rows
    assert pages <= bucket.pages < max(2 * pages, FEWEST + 1)


def test_what_is_too_large_is_not_recorded() -> None:
    assert Bucket.of(ROWS[-1] + 1, 1, 1) is None
    assert Bucket.of(1, MOST + 1, 1) is None


def test_every_row_of_a_bucket_is_what_it_was_given() -> None:
    """From lists or from a tensor, over and over, and what is left over repeats the last row."""
    dice = Random(3)
    seen: list[Batch] = []

    def forward(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return batch.ids[..., None].float()

    graphs = Graphs(forward, torch.device("cpu"))
    for _ in range(60):
        rows, tokens = dice.randint(1, 9), dice.choice((1, 1, 3))
        past = [dice.randrange(3 * PAGE) for _ in range(rows)]
        pages = [[dice.randrange(99) for _ in range(before // PAGE + dice.randint(2, 4))] for before in past]
        fed = [[dice.randrange(50) for _ in range(tokens)] for _ in range(rows)]
        ahead = tokens == 1 and dice.random() < 0.6
        logits = graphs.decode(torch.tensor(fed).flatten() if ahead else fed, past, pages)
        batch = seen[-1]
        assert logits is not None
        assert logits[..., 0].tolist() == fed
        assert batch.ids[:rows].tolist() == fed
        assert batch.past.tolist()[:rows] == past
        for row, own in enumerate(pages):
            used = (past[row] + tokens - 1) // PAGE + 1
            assert batch.pages[row, :used].tolist() == own[:used]
        for part in (batch.ids, batch.past, batch.positions, batch.pages):
            assert part[rows:].tolist() == [part[rows - 1].tolist()] * (len(part) - rows)


def test_a_failure_is_fed_as_some_token() -> None:
    """A negative id would be outside the embedding."""
    graphs = Graphs(lambda batch: batch.ids[..., None], torch.device("cpu"))
    logits = graphs.decode(torch.tensor([7, -4, -1]), [1, 2, 3], [[0], [1], [2]])
    assert logits is not None
    assert logits.flatten().tolist() == [7, 0, 0]


MODELS = ("tiny-lm-exl2-4.0bpw", "tiny-lm-exl2-2.5bpw", "tiny-lm-gptq-g128-act", "tiny-lm")
PROMPTS = ("Once upon a time", "The", "A long way from here there was", "She said")


class House:
    """A model with its tokenizer."""

    def __init__(self, folder: Path, device: str) -> None:
        config = Config(folder)
        config.device = device
        if device == "cuda":
            config.dtype = "float16"
        self.model = Model(config)
        self.model.load()
        self.tokenizer = Tokenizer(config)

    def generator(self, cache: type[CacheBase] = Cache, tokens: int = 2048, **options: Any) -> Generator:
        return Generator(self.model, cache(self.model, max_seq_len=tokens), self.tokenizer, **options)

    def job(self, prompt: str, new: int, **options: Any) -> Job:
        options = {"gen_settings": Settings.greedy(), **options}
        return Job(self.tokenizer.encode(prompt), max_new_tokens=new, **options)


def answers(
    folder: Path, device: str, cache: type[CacheBase], together: bool, draft: bool = False
) -> list[str]:
    house = House(folder, device)
    generator = house.generator(cache, max_batch_size=8, use_ngram_draft=draft)
    jobs = [house.job(prompt, 40) for prompt in PROMPTS]
    out = ["" for _ in jobs]
    for batch in [jobs] if together else [[job] for job in jobs]:
        for job in batch:
            generator.enqueue(job)
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                if result["stage"] == "streaming" and result["eos"]:
                    out[jobs.index(result["job"])] = result["full_completion"]
    assert all(out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", [Cache, CacheQ8, CacheQ4])
def test_replayed_is_launched(
    fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, cache: type[CacheBase]
) -> None:
    alone = answers(fixtures_dir / name, "cuda", cache, together=False)
    assert answers(fixtures_dir / name, "cuda", cache, together=True) == alone
    monkeypatch.setenv("EXLLAMA_NO_GRAPHS", "1")
    assert answers(fixtures_dir / name, "cuda", cache, together=False) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", [Cache, CacheQ8, CacheQ4])
def test_guesses_change_next_to_nothing(fixtures_dir: Path, name: str, cache: type[CacheBase]) -> None:
    """Several tokens at once are summed in another order than one by one: in half precision a tie may tip."""
    alone = answers(fixtures_dir / name, "cuda", cache, together=False)
    guessed = answers(fixtures_dir / name, "cuda", cache, together=False, draft=True)
    for one, other in zip(alone, guessed, strict=True):
        same = next(
            (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one)
        )
        assert same >= 20, (one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_says_what_a_processor_says(fixtures_dir: Path, name: str) -> None:
    there = answers(fixtures_dir / name, "cuda", Cache, together=True)
    here = answers(fixtures_dir / name, "cpu", Cache, together=True)
    agreed = sum(one == other for one, other in zip(there, here, strict=True))
    assert agreed >= len(PROMPTS) - 1, list(
        zip(there, here, strict=True)
    )  # half precision may tip a near tie
    torch.cuda.synchronize()


def told(results: list[Result], into: dict[int, list[Any]]) -> None:
    for result in results:
        if result["stage"] == "streaming":
            kept = [result.get(key) for key in ("text", "eos", "eos_reason", "full_completion")]
            into.setdefault(result["serial"], []).append(kept)


def life(house: House, seed: int) -> dict[int, list[Any]]:
    """What jobs of different lengths, settings and ends say that come and go on a small machine."""
    dice = Random(seed)
    generator = house.generator(tokens=2048, max_batch_size=4, max_chunk_size=256)
    warm: dict[str, Any] = {"temperature": 1.1, "top_k": 40, "top_p": 0.9}
    kinds: list[Callable[[], Settings]] = [
        Settings.greedy,
        Settings.greedy,
        lambda: Settings(**warm, token_repetition_penalty=1.1),
        lambda: Settings(**warm, token_frequency_penalty=0.3, dry_multiplier=0.8),
        lambda: Settings(temperature=1.2, top_k=0, top_p=0.0, mirostat=True),
        lambda: Settings(temperature=3.0, top_k=0, top_p=0.99),
    ]
    jobs = [
        house.job(
            dice.choice(PROMPTS) * dice.choice((1, 1, 8, 60)),
            dice.choice((1, 2, 9, 30, 70)),
            gen_settings=dice.choice(kinds)(),
            seed=dice.randrange(1000),
            stop_conditions=dice.choice((None, None, ["the"], [" w", "."], [house.tokenizer.eos_token_id])),
            banned_strings=["he said"] if dice.random() < 0.1 else None,
            return_probs=dice.random() < 0.1,
        )
        for _ in range(16)
    ]
    out: dict[int, list[Any]] = {}
    leaving = {dice.randrange(60): one for one in jobs[::5]}
    waiting = list(jobs)
    for step in range(10_000):
        if waiting and dice.random() < 0.3:
            generator.enqueue(waiting.pop())
        if step in leaving:
            generator.cancel(leaving[step])
        told(generator.iterate(), out)
        if not waiting and not generator.num_remaining_jobs():
            return out
    raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", range(2))
def test_running_ahead_changes_nothing(
    fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """On a processor passes are never ahead; here they are made to be, bucket by bucket, without a graph."""
    house = House(fixtures_dir / MODELS[0], "cpu")
    plain = life(house, seed)
    make, launched = house.model.runner, 0

    def runner(cache: CacheBase) -> Any:
        made: Any = make(cache)
        made.graphs = Graphs(partial(all_logits, made.decoder, made.cache), made.device)
        ahead = made.decode_next

        def counted(*arguments: Any) -> Any:
            nonlocal launched
            launched += 1
            return ahead(*arguments)

        made.decode_next = counted
        return made

    monkeypatch.setattr(house.model, "runner", runner)
    assert life(house, seed) == plain
    assert launched > 50


def repeated(house: House, **options: Any) -> tuple[list[list[int]], Generator]:
    """What follows prompts that repeat themselves, one after the other and then together."""
    generator = house.generator(max_batch_size=4, **options)
    jobs = [house.job(prompt * 9, 60 + 7 * i) for i, prompt in enumerate(PROMPTS[:3] * 2)]
    for batch in [jobs[0]], [jobs[1]], [jobs[2]], jobs[3:]:
        generator.enqueue(batch)
        while generator.num_remaining_jobs():
            generator.iterate()
    assert all(job.new_tokens == job.max_new_tokens for job in jobs)
    if options:
        assert sum(job.accepted_draft_tokens for job in jobs) > 100
    return [job.sequences[0].ids for job in jobs], generator


def test_guesses_are_checked_in_passes_of_few_sizes(
    fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where there are none, passes are launched ahead; the text is the same."""
    house = House(fixtures_dir / MODELS[0], "cpu")
    plain, _ = repeated(house)
    make = house.model.runner

    def runner(cache: CacheBase) -> Any:
        made: Any = make(cache)
        made.graphs = Graphs(partial(all_logits, made.decoder, made.cache), made.device)
        return made

    monkeypatch.setattr(house.model, "runner", runner)
    guessed, generator = repeated(house, use_ngram_draft=True)
    assert guessed == plain
    made: Any = generator._engine.runner
    assert {size.tokens for size in made.graphs._made} <= {1, 2, 4, 8}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS[:2])
def test_guesses_are_checked_by_replaying(fixtures_dir: Path, name: str) -> None:
    _, generator = repeated(House(fixtures_dir / name, "cuda"), use_ngram_draft=True)
    made: Any = generator._engine.runner
    assert {size.tokens for size in made.graphs._made} <= {1, 2, 4, 8}
    assert any(one.graph is not None for size, one in made.graphs._made.items() if size.tokens == 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_running_ahead_changes_nothing_on_a_gpu(
    fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    """Unpacked weights go through other kernels in other company: in half precision a near tie may tip."""
    ahead = life(House(fixtures_dir / name, "cuda"), seed)
    monkeypatch.setenv("EXLLAMA_NO_GRAPHS", "1")
    plain = life(House(fixtures_dir / name, "cuda"), seed)
    assert ahead.keys() == plain.keys()
    wrong = [(ahead[serial][-1], said[-1]) for serial, said in plain.items() if ahead[serial] != said]
    assert len(wrong) <= (name == "tiny-lm"), wrong


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_results_are_there_while_the_device_is_busy(fixtures_dir: Path, rows: int) -> None:
    """Every pass ahead is made longer than all that the host does; who waited for it would find it done."""
    house = House(fixtures_dir / MODELS[0], "cuda")
    generator = house.generator(max_batch_size=8)
    cuda: Any = torch.cuda
    runner: Any = generator._engine.runner
    ahead, decode, passes = runner.decode_next, runner.decode, []

    def slow(*arguments: Any) -> Any:
        passes.append("ahead")
        answer = ahead(*arguments)
        cuda._sleep(20_000_000)
        return answer

    def counted(*arguments: Any) -> Any:
        passes.append("decode")
        return decode(*arguments)

    runner.decode_next, runner.decode = slow, counted
    generator.enqueue([house.job(PROMPTS[i % len(PROMPTS)], 40) for i in range(rows)])
    out: dict[int, list[Any]] = {}
    for step in range(40):
        told(generator.iterate(), out)
        assert step == 39 or not cuda.current_stream().query(), step
    assert passes == ["decode"] + ["ahead"] * 39
    assert [len(said) for said in out.values()] == [40] * rows
