"""The attributes of a job that scripts read: before it is enqueued, while it runs, and afterwards."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import torch

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

GREEDY = ExLlamaV2Sampler.Settings.greedy()


def test_the_ids_of_a_job_are_tensors(model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    pair = [tokenizer.encode("Once upon a time"), tokenizer.encode("The city")]
    guided = ExLlamaV2Sampler.Settings.greedy(cfg_scale=1.5)
    job = ExLlamaV2DynamicJob(pair, 6, gen_settings=guided)
    sampled: list[int] = []
    generator.enqueue(job)
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            sampled += result["token_ids"][0].tolist() if "token_ids" in result else []
    assert len(sampled) == 6
    for sequence, prompt in zip(job.sequences, pair, strict=True):
        assert torch.equal(sequence.input_ids.torch(), prompt)
        whole = sequence.sequence_ids
        assert whole.torch().tolist() == [[*prompt[0].tolist(), *sampled]]
        assert len(whole) == prompt.shape[1] + 6
        assert whole.torch_slice(-6, None).tolist() == whole.slice(-6, None).tolist() == [sampled]


def test_a_healed_token_is_not_among_the_input(tokenizer: ExLlamaV2Tokenizer) -> None:
    prompt = tokenizer.encode("Once upon a tim")
    job = ExLlamaV2DynamicJob(prompt, 6, token_healing=True)
    assert torch.equal(job.sequences[0].input_ids.torch(), prompt[:, :-1])


def test_held_text_is_what_was_not_returned(
    model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
) -> None:
    """The model continues: ", there was a little girl named Tim.\\n"."""
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    held = {}
    for stop in ("girl", "girls", "nothing"):
        prompt = tokenizer.encode("Once upon a time")
        job = ExLlamaV2DynamicJob(prompt, 6, gen_settings=GREEDY, stop_conditions=[stop])
        assert job.held_text == job.full_completion == ""
        generator.enqueue(job)
        while generator.num_remaining_jobs():
            generator.iterate()
            if not job.is_finished:
                assert ", there was a little girl".startswith(job.full_completion + job.held_text)
        held[stop] = (job.full_completion, job.held_text)
    assert held == {
        "girl": (", there was a little ", "girl"),
        "girls": (", there was a little girl", ""),
        "nothing": (", there was a little girl", ""),
    }


def test_time_attributes(model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    job = ExLlamaV2DynamicJob(tokenizer.encode("Once upon a time"), 3, gen_settings=GREEDY)

    def times() -> list[float | None]:
        return [job.time_enqueue, job.time_first_prefill, job.time_first_token, job.time_last_token]

    assert times() == [None] * 4
    before = time.time()
    generator.enqueue(job)
    assert times()[1:] == [None] * 3
    while generator.num_remaining_jobs():
        generator.iterate()
    known = [at for at in times() if at is not None]
    assert len(known) == 4
    ordered = [before - 0.01, *known, time.time() + 0.01]
    assert all(later > earlier - 1e-3 for earlier, later in pairwise(ordered))


def test_numbers_may_come_from_numpy(model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> None:
    """Scripts compute limits with numpy, and exllamav2 accepted any integer type."""
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer, max_q_size=np.int64(4))
    limits = np.array([3, 5])
    texts, last = generator.generate(
        ["Once upon", "The city"], limits.max(), limits.min(), gen_settings=GREEDY, return_last_results=True
    )
    assert [result["new_tokens"] for result in last] == [5, 5]
    assert texts == generator.generate(["Once upon", "The city"], 5, gen_settings=GREEDY)
