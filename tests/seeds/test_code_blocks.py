"""Every block of code in the documents, executed as written: only paths are replaced, and what a block
assumes to exist is put there. Document 002's, which are written for the eye, are in test_pseudo_code.

Some wait for EOS, so the model in the place of theirs is one that says it: see `ender_folder`.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import exllamav2
import exllamav2.generator
from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exllamav2.generator.filters import ExLlamaV2Filter
from tests.lora.peft_folders import matrix_shapes, write_adapter
from tests.seeds.blocks import BLOCKS, CODE, Code, run
from tests.seeds.conftest import Seed, loaded

Read = Callable[[int], Seed]
Settings = ExLlamaV2Sampler.Settings

SUBJECTS = ("mountains", "the ocean", "the stars")
SEED = 12


@pytest.fixture(autouse=True)
def _luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sampled without a seed is the same each time."""
    random.seed(SEED)
    monkeypatch.setattr(random.SystemRandom, "getrandbits", lambda self, bits: SEED)


def public_names() -> dict[str, Any]:
    """What a signature in a document mentions without importing it."""
    names = {"torch": torch, "threading": threading}
    for module in (exllamav2, exllamav2.generator):
        names |= {name: getattr(module, name) for name in module.__all__}
    return names | {"ExLlamaV2Filter": ExLlamaV2Filter}


def same_shape(found: Any, documented: Any) -> None:
    """Ours takes the documented parameters, in that order and with those defaults."""
    wanted = inspect.signature(documented).parameters.values()
    ours = list(inspect.signature(found).parameters.values())
    positional = [p for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in ours[: len(positional)]] == [(p.name, p.default) for p in positional]
    if any(p.kind is p.VAR_KEYWORD for p in wanted):
        assert any(p.kind is p.VAR_KEYWORD for p in ours)


@pytest.mark.parametrize("number", BLOCKS)
def test_no_code_is_left_out(seed: Read, number: int) -> None:
    document = seed(number)
    inside = {line for pair in BLOCKS[number].items() for line in range(*document.span(*pair))}
    others = [line for n, line in enumerate(document.text.splitlines()) if n not in inside]
    assert [line for line in others if CODE.match(line)] == []


@pytest.fixture(scope="module")
def ender(ender_folder: Path) -> ExLlamaV2:
    return loaded(ender_folder)


@pytest.fixture
def names(ender: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> dict[str, Any]:
    """What the examples of document 000 assume."""
    generator = ExLlamaV2DynamicGenerator(ender, ExLlamaV2Cache(ender, max_seq_len=2048), tokenizer)
    return {"generator": generator, "tokenizer": tokenizer, "ExLlamaV2Sampler": ExLlamaV2Sampler}


def test_000_signature(code: Code) -> None:
    made = run(code(0, "Signature"), public_names())
    same_shape(ExLlamaV2DynamicGenerator.generate, made["generate"])


def test_000_import(code: Code) -> None:
    made = run(code(0, "Import"), {})
    assert made["ExLlamaV2DynamicGenerator"] is ExLlamaV2DynamicGenerator


def test_item_030_simple_generation(code: Code, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    generator, jobs = names["generator"], []
    take = generator._enqueue
    monkeypatch.setattr(generator, "_enqueue", lambda job: (jobs.append(job), take(job))[1])
    made = run(code(0, "Simple Generation"), names)
    assert [job.new_tokens for job in jobs] == [200]
    assert made["output"] == "Once upon a time" + jobs[0].full_completion
    assert made["printed"] == made["output"] + "\n"


def test_item_031_generation_with_sampling_settings(code: Code, names: dict[str, Any]) -> None:
    made = run(code(0, "Generation with Sampling Settings"), names)
    settings = made["settings"]
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.7, 0.9, 50)
    assert settings.token_repetition_penalty == 1.05
    endless = names["generator"].generate(
        "Explain quantum computing:", 100, add_bos=True, gen_settings=settings, decode_special_tokens=True
    )
    said, eos, _ = endless.partition(names["tokenizer"].eos_token)
    assert eos  # and there the example ends
    assert made["output"] == said
    assert len(said) > len("Explain quantum computing:")
    assert made["printed"] == said + "\n"


def test_item_032_batched_generation(code: Code, names: dict[str, Any]) -> None:
    made = run(code(0, "Batched Generation"), names)
    asked = {"gen_settings": Settings.greedy(), "add_bos": True}
    for subject, output in zip(SUBJECTS, made["outputs"], strict=True):
        prompt = f"Write a haiku about {subject}:"
        assert output == names["generator"].generate(prompt, 50, seed=1, **asked)
        assert output.startswith(prompt)
    lines = zip(made["prompts"], made["outputs"], strict=True)
    assert made["printed"] == "".join(f"{prompt}\n{output}\n\n" for prompt, output in lines)


def test_item_033_generation_with_stop_conditions(
    code: Code, names: dict[str, Any], generator: ExLlamaV2DynamicGenerator
) -> None:
    example = code(0, "Generation with Stop Conditions")
    asked: dict[str, Any] = {"token_healing": True, "add_bos": True, "completion_only": True}
    prompt = "User: What is Python?\nAssistant:"
    # Of the three conditions one model says the first, the other the third.
    for made, stop in ((names["generator"], names["tokenizer"].eos_token), (generator, "\n\n")):
        output = run(example, names | {"generator": made})["output"]
        endless = made.generate(prompt, 100, decode_special_tokens=True, **asked)
        assert stop in endless
        assert output == min((endless.partition(one)[0] for one in (stop, "User:")), key=len)
        assert output


def test_001_signature(code: Code, base: dict[str, Any]) -> None:
    made = run(code(1, "Signature"), public_names())["ExLlamaV2BaseGenerator"]
    for method in ("__init__", "warmup", "full", "generate_simple"):
        same_shape(getattr(ExLlamaV2BaseGenerator, method), getattr(made, method))
    assert all(hasattr(base["generator"], name) for name in made.__annotations__)


def test_001_import(code: Code) -> None:
    assert run(code(1, "Import"), {})["ExLlamaV2BaseGenerator"] is ExLlamaV2BaseGenerator


@pytest.fixture(scope="module")
def base(code: Code, folder: Path) -> dict[str, Any]:
    """What the first example of document 001 leaves behind, for the others."""
    random.seed(SEED)
    return run(code(1, "Basic Usage"), {}, model=folder)


def test_item_063_basic_usage(base: dict[str, Any]) -> None:
    assert base["model"].loaded
    assert base["generator"].cache.max_seq_len == 4096
    assert base["output"]
    assert base["printed"] == base["output"] + "\n"
    prompt, tokens = "Explain quantum computing in simple terms:", base["generator"].sequence_ids
    assert base["tokenizer"].decode(tokens) == [prompt + base["output"]]
    assert tokens.shape[1] == base["tokenizer"].num_tokens(prompt) - 1 + 200  # one is healed


def test_item_064_batched_generation(code: Code, base: dict[str, Any]) -> None:
    first, second = (run(code(1, "Batched Generation"), dict(base)) for _ in range(2))
    assert first["printed"] == second["printed"]
    for subject, output in zip(SUBJECTS, first["outputs"], strict=True):
        assert output.startswith(f"Write a haiku about {subject}:")
        assert len(output) > len(f"Write a haiku about {subject}:")
        assert f"Write a haiku about {subject}:\n{output}\n\n" in first["printed"]


def test_item_066_lora_and_abort(code: Code, base: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", matrix_shapes(folder))
    names, tokens = dict(base), []

    def third(result: Any) -> None:
        tokens.append(result)
        if len(tokens) == 3:  # "In another thread: abort.set() to cancel generation"
            thread = threading.Thread(target=names["abort"].set)
            thread.start()
            thread.join()

    # The settings of the example before, with a way to tell when it is time to abort.
    names["settings"] = Settings(post_sampling_hooks=[third])
    made = run(code(1, "Generation with LoRA and Abort"), names, lora=tmp_path / "lora")
    assert made["lora"].loaded
    assert made["output"]
    assert 3 <= len(tokens) < 6


def test_003_signature(code: Code) -> None:
    made = run(code(3, "Signature"), public_names())["ExLlamaV2StreamingGenerator"]
    same_shape(ExLlamaV2StreamingGenerator.__init__, made.__init__)
    made = run(code(3, "set_stop_conditions"), {})
    same_shape(ExLlamaV2StreamingGenerator.set_stop_conditions, made["set_stop_conditions"])


def test_003_import(code: Code) -> None:
    made = run(code(3, "Import"), {})
    assert made["ExLlamaV2StreamingGenerator"] is ExLlamaV2StreamingGenerator


@pytest.fixture(scope="module")
def streaming(code: Code, ender_folder: Path) -> dict[str, Any]:
    """What the first example of document 003 leaves behind, for the chat loop."""
    return run(code(3, "Basic Initialization"), {}, model=ender_folder)


def test_item_090_a_second_prepare_is_harmless(streaming: dict[str, Any], ender_folder: Path) -> None:
    assert streaming["config"].freeze() == exllamav2.ExLlamaV2Config(str(ender_folder)).freeze()


def test_item_091_a_lazy_cache_and_auto_split(streaming: dict[str, Any], ender_folder: Path) -> None:
    assert streaming["model"].loaded
    assert streaming["cache"].allocated
    lazy = ExLlamaV2Cache(ExLlamaV2(exllamav2.ExLlamaV2Config(str(ender_folder))), lazy=True)
    assert not lazy.allocated


def test_item_092_a_draft_model_is_loaded_like_the_main_one(
    code: Code, folder: Path, draft_folder: Path, answer: Callable[..., str]
) -> None:
    names = run(code(3, "With Speculative Decoding"), {}, model=folder, draft_model=draft_folder)
    main = (names["model"], ExLlamaV2Cache(names["model"], max_seq_len=512), names["tokenizer"])
    without_cache = ExLlamaV2StreamingGenerator(*main, draft_model=names["draft_model"])
    assert without_cache.draft_cache.max_seq_len == 512
    for generator in (names["generator"], without_cache):
        assert generator.num_speculative_tokens == 5
        generator.begin_stream_ex(names["tokenizer"].encode("Once upon a time"), Settings.greedy())
        assert "".join(generator.stream_ex()["chunk"] for _ in range(8)) == answer("Once upon a time", 8)
        assert generator.accepted_draft_tokens > 0


def test_item_093_the_chat_loop(code: Code, streaming: dict[str, Any]) -> None:
    made = run(code(3, "Complete Streaming Chat Loop"), dict(streaming))
    generator, eos = made["generator"], made["tokenizer"].eos_token_id
    assert made["result"]["eos"]
    *said, last = generator.sequence_ids[0, made["input_ids"].shape[1] :].tolist()
    assert last == eos
    assert eos not in said
    assert said
    assert made["printed"] == made["tokenizer"].decode(torch.tensor(said)) + "\n"
