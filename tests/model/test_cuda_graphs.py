"""CUDA graphs: buckets, and on a GPU the same outputs as without graphs, in any batch."""

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
from exlm.generator.results import Result
from exlm.kvcache import PAGE_SIZE, CacheBase
from exlm.model.cuda_graphs import MAX_TOKENS_PER_ROW, MIN_PAGES, ROW_BUCKETS, Bucket, CudaGraphRunner
from exlm.model.model_runner import all_logits
from exlm.nn import Batch


@given(st.integers(1, ROW_BUCKETS[-1]), st.integers(1, MAX_TOKENS_PER_ROW), st.integers(1, 4096))
def test_a_bucket_holds_its_batch_and_little_more(rows: int, tokens: int, pages: int) -> None:
    bucket = Bucket.of(rows, tokens, pages)
    assert bucket is not None
    assert bucket.tokens == tokens
    assert rows <= bucket.rows <= 2 * rows
    assert pages <= bucket.pages < max(2 * pages, MIN_PAGES + 1)


def test_large_batches_have_no_bucket() -> None:
    assert Bucket.of(ROW_BUCKETS[-1] + 1, 1, 1) is None
    assert Bucket.of(1, MAX_TOKENS_PER_ROW + 1, 1) is None


def test_bucket_rows_equal_the_inputs() -> None:
    """Inputs from lists or a tensor, again and again; padding repeats the last row."""
    rng = Random(3)
    batches: list[Batch] = []

    def forward(batch: Batch) -> torch.Tensor:
        batches.append(batch)
        return batch.ids[..., None].float()

    graphs = CudaGraphRunner(forward, torch.device("cpu"))
    for _ in range(60):
        rows, tokens = rng.randint(1, 9), rng.choice((1, 1, 3))
        past = [rng.randrange(3 * PAGE_SIZE) for _ in range(rows)]
        pages = [[rng.randrange(99) for _ in range(past_len // PAGE_SIZE + rng.randint(2, 4))] for past_len in past]
        new_ids = [[rng.randrange(50) for _ in range(tokens)] for _ in range(rows)]
        on_device = tokens == 1 and rng.random() < 0.6
        logits = graphs.decode(torch.tensor(new_ids).flatten() if on_device else new_ids, past, pages)
        batch = batches[-1]
        assert logits is not None
        assert logits[..., 0].tolist() == new_ids
        assert batch.ids[:rows].tolist() == new_ids
        assert batch.past_lens.tolist()[:rows] == past
        for row, row_pages in enumerate(pages):
            used = (past[row] + tokens - 1) // PAGE_SIZE + 1
            assert batch.page_table[row, :used].tolist() == row_pages[:used]
        for part in (batch.ids, batch.past_lens, batch.positions, batch.page_table):
            assert part[rows:].tolist() == [part[rows - 1].tolist()] * (len(part) - rows)


def test_negative_ids_are_clamped() -> None:
    """A negative id would be outside the embedding."""
    graphs = CudaGraphRunner(lambda batch: batch.ids[..., None], torch.device("cpu"))
    logits = graphs.decode(torch.tensor([7, -4, -1]), [1, 2, 3], [[0], [1], [2]])
    assert logits is not None
    assert logits.flatten().tolist() == [7, 0, 0]


MODELS = ("tiny-lm-exl2-4.0bpw", "tiny-lm-exl2-2.5bpw", "tiny-lm-gptq-g128-act", "tiny-lm")
PROMPTS = ("Once upon a time", "The", "A long way from here there was", "She said")


class ModelWithTokenizer:
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


def complete_prompts(
    folder: Path, device: str, cache: type[CacheBase], batched: bool, draft: bool = False
) -> list[str]:
    loaded = ModelWithTokenizer(folder, device)
    generator = loaded.generator(cache, max_batch_size=8, use_ngram_draft=draft)
    jobs = [loaded.job(prompt, 40) for prompt in PROMPTS]
    out = ["" for _ in jobs]
    for batch in [jobs] if batched else [[job] for job in jobs]:
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
def test_replay_equals_launch(
    fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, cache: type[CacheBase]
) -> None:
    alone = complete_prompts(fixtures_dir / name, "cuda", cache, batched=False)
    assert complete_prompts(fixtures_dir / name, "cuda", cache, batched=True) == alone
    monkeypatch.setenv("EXLLAMA_NO_GRAPHS", "1")
    assert complete_prompts(fixtures_dir / name, "cuda", cache, batched=False) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", [Cache, CacheQ8, CacheQ4])
def test_drafts_change_almost_nothing(fixtures_dir: Path, name: str, cache: type[CacheBase]) -> None:
    """Several tokens at once add in another order than one by one: float16 may break a near tie otherwise."""
    alone = complete_prompts(fixtures_dir / name, "cuda", cache, batched=False)
    drafted = complete_prompts(fixtures_dir / name, "cuda", cache, batched=False, draft=True)
    for one, other in zip(alone, drafted, strict=True):
        same = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
        assert same >= 20, (one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_gpu_and_cpu_agree(fixtures_dir: Path, name: str) -> None:
    on_gpu = complete_prompts(fixtures_dir / name, "cuda", Cache, batched=True)
    on_cpu = complete_prompts(fixtures_dir / name, "cpu", Cache, batched=True)
    num_equal = sum(one == other for one, other in zip(on_gpu, on_cpu, strict=True))
    assert num_equal >= len(PROMPTS) - 1, list(
        zip(on_gpu, on_cpu, strict=True)
    )  # float16 may break a near tie otherwise
    torch.cuda.synchronize()


def collect_streams(results: list[Result], streams: dict[int, list[Any]]) -> None:
    for result in results:
        if result["stage"] == "streaming":
            fields = [result.get(key) for key in ("text", "eos", "eos_reason", "full_completion")]
            streams.setdefault(result["serial"], []).append(fields)


def run_random_jobs(loaded: ModelWithTokenizer, seed: int) -> dict[int, list[Any]]:
    """Texts of jobs with different lengths, settings and stop conditions in a small cache."""
    rng = Random(seed)
    generator = loaded.generator(tokens=2048, max_batch_size=4, max_chunk_size=256)
    sampled: dict[str, Any] = {"temperature": 1.1, "top_k": 40, "top_p": 0.9}
    settings_factories: list[Callable[[], Settings]] = [
        Settings.greedy,
        Settings.greedy,
        lambda: Settings(**sampled, token_repetition_penalty=1.1),
        lambda: Settings(**sampled, token_frequency_penalty=0.3, dry_multiplier=0.8),
        lambda: Settings(temperature=1.2, top_k=0, top_p=0.0, mirostat=True),
        lambda: Settings(temperature=3.0, top_k=0, top_p=0.99),
    ]
    jobs = [
        loaded.job(
            rng.choice(PROMPTS) * rng.choice((1, 1, 8, 60)),
            rng.choice((1, 2, 9, 30, 70)),
            gen_settings=rng.choice(settings_factories)(),
            seed=rng.randrange(1000),
            stop_conditions=rng.choice((None, None, ["the"], [" w", "."], [loaded.tokenizer.eos_token_id])),
            banned_strings=["he said"] if rng.random() < 0.1 else None,
            return_probs=rng.random() < 0.1,
        )
        for _ in range(16)
    ]
    out: dict[int, list[Any]] = {}
    cancelled_at = {rng.randrange(60): one for one in jobs[::5]}
    waiting = list(jobs)
    for step in range(10_000):
        if waiting and rng.random() < 0.3:
            generator.enqueue(waiting.pop())
        if step in cancelled_at:
            generator.cancel(cancelled_at[step])
        collect_streams(generator.iterate(), out)
        if not waiting and not generator.num_remaining_jobs():
            return out
    raise AssertionError("the jobs do not end")


@pytest.mark.parametrize("seed", range(2))
def test_async_scheduling_changes_nothing(fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A CPU has no async scheduling; here it is forced, bucket by bucket, without a graph."""
    loaded = ModelWithTokenizer(fixtures_dir / MODELS[0], "cpu")
    plain = run_random_jobs(loaded, seed)
    make_runner, launched = loaded.model.runner, 0

    def runner(cache: CacheBase) -> Any:
        new_runner: Any = make_runner(cache)
        new_runner.graphs = CudaGraphRunner(
            partial(all_logits, new_runner.decoder, new_runner.cache), new_runner.device
        )
        decode_next = new_runner.decode_next

        def counted(*arguments: Any) -> Any:
            nonlocal launched
            launched += 1
            return decode_next(*arguments)

        new_runner.decode_next = counted
        return new_runner

    monkeypatch.setattr(loaded.model, "runner", runner)
    assert run_random_jobs(loaded, seed) == plain
    assert launched > 50


def run_repetitive_jobs(loaded: ModelWithTokenizer, **options: Any) -> tuple[list[list[int]], Generator]:
    """Completions of repetitive prompts, one after the other and then together."""
    generator = loaded.generator(max_batch_size=4, **options)
    jobs = [loaded.job(prompt * 9, 60 + 7 * i) for i, prompt in enumerate(PROMPTS[:3] * 2)]
    for batch in [jobs[0]], [jobs[1]], [jobs[2]], jobs[3:]:
        generator.enqueue(batch)
        while generator.num_remaining_jobs():
            generator.iterate()
    assert all(job.new_tokens == job.max_new_tokens for job in jobs)
    if options:
        assert sum(job.accepted_draft_tokens for job in jobs) > 100
    return [job.sequences[0].ids for job in jobs], generator


def test_drafts_are_verified_in_few_batch_sizes(fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts, steps are launched ahead; the text is the same."""
    loaded = ModelWithTokenizer(fixtures_dir / MODELS[0], "cpu")
    plain, _ = run_repetitive_jobs(loaded)
    make_runner = loaded.model.runner

    def runner(cache: CacheBase) -> Any:
        new_runner: Any = make_runner(cache)
        new_runner.graphs = CudaGraphRunner(
            partial(all_logits, new_runner.decoder, new_runner.cache), new_runner.device
        )
        return new_runner

    monkeypatch.setattr(loaded.model, "runner", runner)
    drafted, generator = run_repetitive_jobs(loaded, use_ngram_draft=True)
    assert drafted == plain
    engine_runner: Any = generator._engine.runner
    assert {bucket.tokens for bucket in engine_runner.graphs._graphs} <= {1, 2, 4, 8}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS[:2])
def test_drafts_are_verified_by_replay(fixtures_dir: Path, name: str) -> None:
    _, generator = run_repetitive_jobs(ModelWithTokenizer(fixtures_dir / name, "cuda"), use_ngram_draft=True)
    runner: Any = generator._engine.runner
    assert {bucket.tokens for bucket in runner.graphs._graphs} <= {1, 2, 4, 8}
    captured = runner.graphs._graphs.items()
    assert any(one.graph is not None for bucket, one in captured if bucket.tokens == 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_async_scheduling_changes_nothing_on_a_gpu(
    fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    """Dense weights use other kernels in other batches: float16 may break a near tie otherwise."""
    scheduled_ahead = run_random_jobs(ModelWithTokenizer(fixtures_dir / name, "cuda"), seed)
    monkeypatch.setenv("EXLLAMA_NO_GRAPHS", "1")
    plain = run_random_jobs(ModelWithTokenizer(fixtures_dir / name, "cuda"), seed)
    assert scheduled_ahead.keys() == plain.keys()
    wrong = [
        (scheduled_ahead[serial][-1], text[-1]) for serial, text in plain.items() if scheduled_ahead[serial] != text
    ]
    assert len(wrong) <= (name == "tiny-lm"), wrong


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_results_are_there_while_the_device_is_busy(fixtures_dir: Path, rows: int) -> None:
    """Each step ahead is made longer than the host's work; if the host waited, the step would be finished."""
    loaded = ModelWithTokenizer(fixtures_dir / MODELS[0], "cuda")
    generator = loaded.generator(max_batch_size=8)
    cuda: Any = torch.cuda
    runner: Any = generator._engine.runner
    decode_next, decode, passes = runner.decode_next, runner.decode, []

    def slow(*arguments: Any) -> Any:
        passes.append("ahead")
        logits = decode_next(*arguments)
        cuda._sleep(20_000_000)
        return logits

    def counted(*arguments: Any) -> Any:
        passes.append("decode")
        return decode(*arguments)

    runner.decode_next, runner.decode = slow, counted
    generator.enqueue([loaded.job(PROMPTS[i % len(PROMPTS)], 40) for i in range(rows)])
    out: dict[int, list[Any]] = {}
    for step in range(40):
        collect_streams(generator.iterate(), out)
        assert step == 39 or not cuda.current_stream().query(), step
    assert passes == ["decode"] + ["ahead"] * 39
    assert [len(text) for text in out.values()] == [40] * rows
