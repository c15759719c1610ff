"""The default model, SmolLM2-135M-Instruct from its GGUF file, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Cache, Config, Model, ModelNotFound, Tokenizer, find_model

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def model() -> Model:
    try:
        path = find_model()
    except ModelNotFound as reason:
        pytest.skip(f"the default model is not here and cannot be fetched: {reason}")
    model = Model(Config(path))
    model.load()
    return model


@pytest.fixture(scope="module")
def cases(fixtures_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((fixtures_dir / "reference" / "smollm2.json").read_text())["cases"]
    return found


def test_prompts_become_the_same_ids(model: Model, cases: list[dict[str, Any]]) -> None:
    tokenizer = Tokenizer(model.config)
    for case in cases:
        ids = tokenizer.encode(case["text"], encode_special_tokens=True)
        assert ids[0].tolist() == case["input_ids"]
        if case["kind"] == "chat":
            messages = [{"role": "user", "content": case["prompt"]}]
            assert tokenizer.apply_chat_template(messages) == case["text"]


def test_greedy_ids_where_the_choice_is_clear(model: Model, cases: list[dict[str, Any]]) -> None:
    """Teacher-forced: given the right tokens before it, every clear choice must be right."""
    clear = 0
    for case in cases:
        prompt, answer = case["input_ids"], case["greedy_ids_64"]
        logits = model.forward(torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
        best, second = logits.topk(2).values.unbind(1)
        for token, row, margin in zip(answer, logits, best - second, strict=True):
            if margin > 0.05 or case["min_margin"] > 0.05:
                assert int(row.argmax()) == token
                clear += 1
        for token, value in case["first_step_top5"]:
            # The reference rounded its weights to bfloat16 first.
            assert float(logits[0, token]) == pytest.approx(value, abs=0.15)
    assert clear > 370


def test_generate(model: Model) -> None:
    tokenizer = Tokenizer(model.config)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, tokenize=True)
    cache, out = Cache(model, max_seq_len=64), []
    logits = model.forward(ids, cache, last_id_only=True)
    while (token := int(logits[0, -1].argmax())) not in tokenizer.eos_token_ids and len(out) < 12:
        out.append(token)
        logits = model.forward(torch.tensor([[token]]), cache)
    assert tokenizer.decode(torch.tensor(out)) == "The capital of France is Paris."


def test_weights_stay_packed(model: Model) -> None:
    assert "gguf Q4_1" in model.explain()
    assert "head: cpu, gguf Q8_0" in model.explain() or "head: reference, gguf Q8_0" in model.explain()
