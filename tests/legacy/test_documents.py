"""The code blocks of the two documents about these generators, run as they are written."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from exllamav2.generator import ExLlamaV2Sampler
from exlm.legacy import BaseGenerator
from tests.adapters import making

Run = Callable[[int, str, str, dict[str, Any]], str]


@pytest.fixture
def run(fixtures_dir: Path, tmp_path: Path) -> Run:
    """Run what stands between two lines of a document, with real folders; what it printed.

    The model of document 003 has room for few tokens: one so small may never say EOS.
    """
    model, short = fixtures_dir / "tiny-lm", tmp_path / "short"
    making.write(tmp_path / "lora", making.modules(model), size=1.0)
    shutil.copytree(model, short, copy_function=shutil.copyfile)
    short.chmod(0o700)
    raw = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 100}))

    def execute(number: int, after: str, before: str, names: dict[str, Any]) -> str:
        found = list((fixtures_dir.parent / "seeds").glob(f"{number:03}_*.txt"))
        if not found:
            pytest.skip(f"no document {number:03} beside the fixtures")
        lines = found[0].read_text(encoding="utf-8").splitlines()
        start = lines.index(after) + 1
        code = "\n".join(lines[start : lines.index(before, start)])
        main = model if number == 1 else short
        folders = {"model": main, "draft_model": main, "lora": tmp_path / "lora"}
        for written, folder in folders.items():
            code = code.replace(f'"/path/to/{written}"', repr(str(folder)))
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(code, found[0].name, "exec"), names)
        return printed.getvalue()

    return execute


def test_63_64_66_the_base_generator(run: Run) -> None:
    names: dict[str, Any] = {}
    said = run(1, "Basic Usage", "Batched Generation", names)
    assert said.strip()
    assert names["output"] + "\n" == said
    assert "quantum computing in simple terms" not in said
    assert isinstance(names["generator"], BaseGenerator)

    first = run(1, "Batched Generation", "Generation with LoRA and Abort", names)
    assert all(prompt in first for prompt in names["prompts"])
    assert len(names["outputs"]) == 3
    assert run(1, "Batched Generation", "Generation with LoRA and Abort", names) == first

    timer = threading.Timer(0.3, lambda: names["abort"].set())
    timer.start()
    run(1, "Generation with LoRA and Abort", "Key Methods", names)
    timer.join()
    assert names["lora"].lora_r == 4
    assert 1 < names["generator"].sequence_ids.shape[1] < 500


def test_90_91_93_the_streaming_generator(run: Run) -> None:
    names: dict[str, Any] = {}
    run(3, "Basic Initialization", "With Speculative Decoding", names)
    said = run(3, "Complete Streaming Chat Loop", "Related Pages", names)
    assert said.strip()
    assert names["result"]["eos"]
    assert "Assistant:" not in said[:10]


def test_88_92_the_streaming_generator_with_a_draft(run: Run) -> None:
    names: dict[str, Any] = {}
    run(3, "With Speculative Decoding", "Complete Streaming Chat Loop", names)
    generator = names["generator"]
    generator.begin_stream_ex(names["tokenizer"].encode("In 1995,"), ExLlamaV2Sampler.Settings.greedy())
    for _ in range(12):
        generator.stream_ex()
    assert generator.accepted_draft_tokens > 0
