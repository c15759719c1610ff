"""Recorded passes: buckets, and on a GPU the same answers as launch by launch, in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm import Cache, CacheQ4, CacheQ8, Config, Generator, Job, Model, Settings, Tokenizer
from exlm.cache import CacheBase
from exlm.model.graphs import MOST, ROWS, Bucket


@given(st.integers(1, ROWS[-1]), st.integers(1, MOST), st.integers(1, 4096))
def test_a_bucket_holds_its_batch_and_little_more(rows: int, tokens: int, pages: int) -> None:
    bucket = Bucket.of(rows, tokens, pages)
    assert bucket is not None
    assert bucket.tokens == tokens
    assert rows <= bucket.rows <= 2 * rows
    assert pages <= bucket.pages < 2 * pages


def test_what_is_too_large_is_not_recorded() -> None:
    assert Bucket.of(ROWS[-1] + 1, 1, 1) is None
    assert Bucket.of(1, MOST + 1, 1) is None


MODELS = ("tiny-lm-exl2-4.0bpw", "tiny-lm-exl2-2.5bpw", "tiny-lm-gptq-g128-act", "tiny-lm")
PROMPTS = ("Once upon a time", "The", "A long way from here there was", "She said")


def answers(
    folder: Path, device: str, cache: type[CacheBase], together: bool, draft: bool = False
) -> list[str]:
    config = Config(folder)
    config.device = device
    if device == "cuda":
        config.dtype = "float16"
    model = Model(config)
    model.load()
    tokenizer = Tokenizer(config)
    generator = Generator(
        model, cache(model, max_seq_len=2048), tokenizer, max_batch_size=8, use_ngram_draft=draft
    )
    jobs = [
        Job(tokenizer.encode(prompt), max_new_tokens=40, gen_settings=Settings.greedy()) for prompt in PROMPTS
    ]
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
