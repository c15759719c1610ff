"""Document 002's code, which is written for the eye: each test says what had to be changed to run it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exllamav2 import ExLlamaV2, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from tests.seeds.blocks import Code, run
from tests.seeds.conftest import Seed

Settings = ExLlamaV2Sampler.Settings


@pytest.mark.parametrize("stop", [None, "."])
def test_002_autoregressive_generation(
    code: Code,
    model: ExLlamaV2,
    generator: ExLlamaV2DynamicGenerator,
    tokenizer: ExLlamaV2Tokenizer,
    stop: str | None,
) -> None:
    """The loop is no Python: its body has lost its indentation, and its tokens x₁, x₂, … are formulas.

    Both are put right and nothing else: `x_i` becomes `x[i]`, `x_1, ..., x_{i-1}` the list of those before
    it. What it calls are the model, temperature 0, the most probable token, and this test's stop condition.
    """
    text = code(2, "Autoregressive Generation").replace("x_1, ..., x_{i-1}", "x[1:i]").replace("x_i", "x[i]")
    loop = indented(text, ("for ", "if "))
    assert [line for line in loop.splitlines() if not line.strip().startswith("#")] == [
        "for i in range(n+1, n+m+1):",
        "    logits = model(x[1:i]) # shape: (vocab_size,)",
        "    probs = sampling_strategy(logits)",
        "    x[i] = sample(probs)",
        "    if x[i] == eos_token or meets_stop_conditions(x[i]):",
        "        break",
    ]
    prompt = tokenizer.encode("Once upon a time")[0].tolist()
    n, m = len(prompt), 16
    names = {
        "n": n,
        "m": m,
        "x": [None, *prompt, *[None] * m],
        "model": lambda ids: model.forward(torch.tensor([ids]))[0, -1],
        "sampling_strategy": lambda logits: (logits / 1e-3).softmax(-1),
        "sample": lambda probs: int(probs.argmax()),
        "eos_token": tokenizer.eos_token_id,
        "meets_stop_conditions": lambda token: stop is not None and token == tokenizer.single_id(stop),
    }
    made = run(loop, names)
    asked: dict[str, Any] = {
        "gen_settings": Settings.greedy(),
        "stop_conditions": [tokenizer.eos_token_id, *([tokenizer.single_id(stop)] if stop else [])],
    }
    job = ExLlamaV2DynamicJob(torch.tensor([prompt]), m, **asked)
    generator.enqueue(job)
    while not job.is_finished:
        generator.iterate()
    assert job.sequences[0].ids == made["x"][1 : made["i"] + 1]
    assert (made["i"] < n + m) == (stop is not None)


def indented(text: str, openers: tuple[str, ...]) -> str:
    """A block whose lines stand at the margin, each line that opens a block taking in all that follow."""
    depth, lines = 0, []
    for line in text.splitlines():
        lines.append("    " * depth + line)
        depth += line.startswith(openers)
    return "\n".join(lines)


def test_002_token_healing(code: Code, generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer) -> None:
    """Runs as written, `tokenize` being our tokenizer; its last line is a comment, done below."""
    made = run(code(2, "Token Healing"), {"tokenize": lambda text: tokenizer.encode(text)[0].tolist()})
    pieces = tokenizer.get_id_to_piece_list()
    assert pieces[made["prompt_ids"][-1]] == " "
    job = ExLlamaV2DynamicJob(tokenizer.encode("Hello "), 4, token_healing=True, gen_settings=Settings.greedy())
    kept = job.sequences[0].ids.copy()
    assert kept == made["healed_ids"] == made["prompt_ids"][:-1]
    generator.enqueue(job)
    while not job.is_finished:
        generator.iterate()
    word = pieces[job.sequences[0].ids[len(kept)]]
    assert re.fullmatch(r" \w+", word)  # " world", or another whole word
    assert job.full_completion.startswith(word[1:])


@pytest.mark.parametrize("cfg_scale", [1.0, 1.8])
def test_002_guidance(
    seed: Callable[[int], Seed],
    model: ExLlamaV2,
    generator: ExLlamaV2DynamicGenerator,
    tokenizer: ExLlamaV2Tokenizer,
    answer: Callable[..., str],
    cfg_scale: float,
) -> None:
    """Comments only: the one that is a formula is executed, on log-softmaxes (item 76), for each token."""
    lines = seed(2).text.splitlines()
    formula = lines[lines.index("Classifier-Free Guidance") + 2].removeprefix("# ")
    assert formula.startswith("logits_final = ")
    prompts = ("Once upon a time", "The Canadian province")
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    start = rows[0].shape[1]
    for _ in range(8):
        wanted, unwanted = (model.forward(row)[0, -1].log_softmax(-1) for row in rows)
        names = {"logits_conditioned": wanted, "logits_unconditioned": unwanted, "cfg_scale": cfg_scale}
        token = run(formula, names)["logits_final"].argmax().view(1, 1)
        rows = [torch.cat((row, token), 1) for row in rows]
    settings = Settings.greedy(cfg_scale=cfg_scale)
    text = generator.generate(prompts, 8, gen_settings=settings, completion_only=True)
    assert text == tokenizer.decode(rows[0][0, start:])
    assert (text == answer(prompts[0], 8)) == (cfg_scale == 1.0)  # "is equivalent to normal generation"
