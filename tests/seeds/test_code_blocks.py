"""Every block of code in the documents, executed as written: only paths and numbers of tokens are replaced,
and what a block assumes to exist is put there. Document 004 has none."""

from __future__ import annotations

import inspect
import io
import re
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import exllamav2
import exllamav2.generator
from exllamav2 import ExLlamaV2Cache, ExLlamaV2Tokenizer
from exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exllamav2.generator.filters import ExLlamaV2Filter
from tests.adapters.making import modules, write
from tests.seeds.conftest import Seed

Read = Callable[[int], Seed]

SUBJECTS = ("mountains", "the ocean", "the stars")
SHORTER = {
    r"max_new_tokens=\d{2,}": "max_new_tokens=12",
    r"num_tokens=\d{2,}": "num_tokens=12",
    r"max_seq_len=4096": "max_seq_len=512",
}


def run(code: str, names: dict[str, Any], **replaced: Path) -> dict[str, Any]:
    """Execute a block; what it defined is added to the names, and what it printed, as `printed`."""
    for old, new in SHORTER.items():
        code = re.sub(old, new, code)
    for name, path in replaced.items():
        code = code.replace(f'"/path/to/{name}"', repr(str(path)))
    assert "/path/to" not in code
    with redirect_stdout(io.StringIO()) as shown:
        exec(compile(code, "<seed>", "exec"), names)
    return names | {"printed": shown.getvalue()}


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


@pytest.fixture
def names(generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer) -> dict[str, Any]:
    """What the examples of document 000 assume."""
    return {"generator": generator, "tokenizer": tokenizer, "ExLlamaV2Sampler": ExLlamaV2Sampler}


def test_000_signature(seed: Read) -> None:
    made = run(seed(0).block("Signature", "Import"), public_names())
    same_shape(ExLlamaV2DynamicGenerator.generate, made["generate"])


def test_000_import(seed: Read) -> None:
    made = run(seed(0).block("Import", "I/O Contract"), {})
    assert made["ExLlamaV2DynamicGenerator"] is ExLlamaV2DynamicGenerator


def test_item_030_simple_generation(seed: Read, names: dict[str, Any]) -> None:
    made = run(seed(0).block("Simple Generation", "Generation with Sampling Settings"), names)
    assert made["output"].startswith("Once upon a time")
    assert len(made["output"]) > len("Once upon a time")
    assert made["printed"] == made["output"] + "\n"


def test_item_031_generation_with_sampling_settings(seed: Read, names: dict[str, Any]) -> None:
    made = run(seed(0).block("Generation with Sampling Settings", "Batched Generation"), names)
    assert made["output"].startswith("Explain quantum computing:")
    settings = made["settings"]
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.7, 0.9, 50)


def test_item_032_batched_generation(seed: Read, names: dict[str, Any]) -> None:
    code = seed(0).block("Batched Generation", "Generation with Stop Conditions")
    first, second = run(code, dict(names)), run(code, dict(names))
    assert first["outputs"] == second["outputs"]
    for subject, output in zip(SUBJECTS, first["outputs"], strict=True):
        assert output.startswith(f"Write a haiku about {subject}:")
        assert f"Write a haiku about {subject}:\n{output}\n" in first["printed"]


def test_item_033_generation_with_stop_conditions(seed: Read, names: dict[str, Any]) -> None:
    output = run(seed(0).block("Generation with Stop Conditions", "Related Pages"), names)["output"]
    assert "User:" not in output
    assert "\n\n" not in output


def test_001_signature(seed: Read) -> None:
    made = run(seed(1).block("Signature", "Import"), public_names())["ExLlamaV2BaseGenerator"]
    for method in ("__init__", "warmup", "full", "generate_simple"):
        same_shape(getattr(ExLlamaV2BaseGenerator, method), getattr(made, method))


def test_001_import(seed: Read) -> None:
    assert (
        run(seed(1).block("Import", "I/O Contract"), {})["ExLlamaV2BaseGenerator"] is ExLlamaV2BaseGenerator
    )


@pytest.fixture(scope="module")
def base(seed: Read, folder: Path) -> dict[str, Any]:
    """What the first example of document 001 leaves behind, for the others."""
    return run(seed(1).block("Basic Usage", "Batched Generation"), {}, model=folder)


def test_item_063_basic_usage(base: dict[str, Any]) -> None:
    assert base["model"].loaded
    assert base["generator"].cache.max_seq_len == 512
    assert base["output"]
    assert not base["output"].startswith("Explain")
    assert base["printed"] == base["output"] + "\n"


def test_item_064_batched_generation(seed: Read, base: dict[str, Any]) -> None:
    code = seed(1).block("Batched Generation", "Generation with LoRA and Abort")
    first, second = run(code, dict(base)), run(code, dict(base))
    assert first["outputs"] == second["outputs"]
    for subject, output in zip(SUBJECTS, first["outputs"], strict=True):
        assert output.startswith(f"Write a haiku about {subject}:")


def test_item_066_lora_and_abort(seed: Read, base: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "lora", modules(folder))
    code = seed(1).block("Generation with LoRA and Abort", "Key Methods")
    names, tokens = dict(base), []

    def third(result: Any) -> None:
        tokens.append(result)
        if len(tokens) == 3:  # "In another thread: abort.set() to cancel generation"
            thread = threading.Thread(target=names["abort"].set)
            thread.start()
            thread.join()

    names["settings"] = ExLlamaV2Sampler.Settings(post_sampling_hooks=[third])
    output = run(code, names, lora=tmp_path / "lora")["output"]
    assert output
    assert 3 <= len(tokens) < 12


def test_002_autoregressive_generation(
    generator: ExLlamaV2DynamicGenerator, answer: Callable[..., str]
) -> None:
    """The document's loop is written for the eye; `answer` is that loop with this model."""
    text = generator.generate("It", 8, gen_settings=ExLlamaV2Sampler.Settings.greedy(), completion_only=True)
    assert text == answer("It", 8)


def test_002_token_healing(seed: Read, tokenizer: ExLlamaV2Tokenizer) -> None:
    code = seed(2).block("Token Healing", "Classifier-Free Guidance")
    made = run(code, {"tokenize": lambda text: tokenizer.encode(text)[0].tolist()})
    job = ExLlamaV2DynamicJob(tokenizer.encode("Hello "), 4, token_healing=True)
    assert job.sequences[0].ids == made["healed_ids"] == made["prompt_ids"][:-1]


def test_002_guidance(seed: Read) -> None:
    """Only comments: the formula, which item 76 computes by hand."""
    lines = seed(2).text.splitlines()
    formula = lines[lines.index("Classifier-Free Guidance") + 2]
    assert formula.endswith("logits_unconditioned + cfg_scale * (logits_conditioned - logits_unconditioned)")


def test_003_signature(seed: Read) -> None:
    made = run(seed(3).block("Signature", "Import"), public_names())["ExLlamaV2StreamingGenerator"]
    same_shape(ExLlamaV2StreamingGenerator.__init__, made.__init__)
    made = run(seed(3).block("set_stop_conditions", "begin_stream_ex / stream_ex"), {})
    same_shape(ExLlamaV2StreamingGenerator.set_stop_conditions, made["set_stop_conditions"])


def test_003_import(seed: Read) -> None:
    made = run(seed(3).block("Import", "I/O Contract"), {})
    assert made["ExLlamaV2StreamingGenerator"] is ExLlamaV2StreamingGenerator


@pytest.fixture(scope="module")
def streaming(seed: Read, folder: Path) -> dict[str, Any]:
    """What the first example of document 003 leaves behind, for the chat loop."""
    return run(seed(3).block("Basic Initialization", "With Speculative Decoding"), {}, model=folder)


def test_item_090_a_second_prepare_is_harmless(streaming: dict[str, Any], folder: Path) -> None:
    assert streaming["config"].freeze() == exllamav2.ExLlamaV2Config(str(folder)).freeze()


def test_item_091_a_lazy_cache_and_auto_split(streaming: dict[str, Any]) -> None:
    assert streaming["model"].loaded
    assert streaming["cache"].allocated


def test_item_092_a_draft_model_is_loaded_like_the_main_one(
    seed: Read, folder: Path, draft_folder: Path, answer: Callable[..., str]
) -> None:
    code = seed(3).block("With Speculative Decoding", "Complete Streaming Chat Loop")
    names = run(code, {}, model=folder, draft_model=draft_folder)
    main = (names["model"], ExLlamaV2Cache(names["model"], max_seq_len=512), names["tokenizer"])
    without_cache = ExLlamaV2StreamingGenerator(*main, draft_model=names["draft_model"])
    assert without_cache.draft_cache.max_seq_len == 512
    for generator in (names["generator"], without_cache):
        assert generator.num_speculative_tokens == 5
        ids = names["tokenizer"].encode("Once upon a time")
        generator.begin_stream_ex(ids, ExLlamaV2Sampler.Settings.greedy())
        assert "".join(generator.stream_ex()["chunk"] for _ in range(8)) == answer("Once upon a time", 8)


def test_item_093_the_chat_loop(seed: Read, streaming: dict[str, Any]) -> None:
    streaming["tokenizer"].eos_token_id = streaming["tokenizer"].single_id("\n")  # which this model does say
    made = run(seed(3).block("Complete Streaming Chat Loop", "Related Pages"), dict(streaming))
    assert made["result"]["eos"]
    assert made["printed"].endswith("\n")
    assert made["printed"].count("\n") == 1


def test_004_has_no_code(seed: Read) -> None:
    assert not re.search(r"^(from|import|def|class) ", seed(4).text, re.MULTILINE)
