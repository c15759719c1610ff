"""Real processes, over gloo: the same greedy tokens as one process, whatever the cache, and never a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import (
    Cache,
    CacheBase,
    CacheFP8,
    CacheQ4,
    CacheQ6,
    CacheQ8,
    Config,
    Generator,
    InputError,
    Job,
    Lora,
    Model,
    Settings,
    Tokenizer,
    Unsupported,
)
from exlm.errors import DoesNotFit, WorkerLost
from tests import tiny
from tests.conftest import ROOT
from tests.docs.places import adapter

PROMPTS = ["Once upon a time", "The dog", "Jack smiled and said"]
GREEDY = Settings.greedy()


def loaded(folder: Path, ranks: int = 0) -> Model:
    config = Config(folder)
    config.device = "cpu"
    model = Model(config)
    if ranks:
        model.load_tp([1] * ranks)
    else:
        model.load()
    return model


def workers(model: Model) -> list[int]:
    assert model._loaded is not None
    assert model._loaded.leader is not None
    return [process.pid for process in model._loaded.leader.processes]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def generator(model: Model, kind: type[CacheBase] = Cache, **options: Any) -> Generator:
    return Generator(model, kind(model, max_seq_len=1024), Tokenizer(model.config), **options)


def answer(model: Model, kind: type[CacheBase] = Cache, count: int = 12) -> Any:
    return generator(model, kind).generate(PROMPTS, count, gen_settings=GREEDY)


def streamed(made: Generator) -> list[str]:
    """Every piece of text until nothing is left to do."""
    text = []
    while made.num_remaining_jobs():
        text += [str(result.get("text", "")) for result in made.iterate()]
    return text


@pytest.fixture(scope="module")
def alone(fixtures_dir: Path) -> Model:
    return loaded(fixtures_dir / "tiny-lm")


@pytest.fixture(scope="module")
def pair(fixtures_dir: Path) -> Iterator[Model]:
    """A plain model in two processes."""
    model = loaded(fixtures_dir / "tiny-lm", 2)
    pids = workers(model)
    yield model
    model.unload()
    assert not any(map(alive, pids))


@pytest.mark.parametrize("kind", [Cache, CacheFP8, CacheQ8, CacheQ6, CacheQ4])
def test_batches_in_every_cache(pair: Model, alone: Model, kind: type[CacheBase]) -> None:
    assert answer(pair, kind) == answer(alone, kind)
    shared, whole = kind(pair, max_seq_len=512), kind(alone, max_seq_len=512)
    assert sum(shared.footprint()) * 2 == sum(whole.footprint())


def test_forward_rewinds_and_caches_are_copied(pair: Model, alone: Model) -> None:
    ids = torch.arange(20, 50)[None]
    results = []
    for model in (pair, alone):
        cache = Cache(model, batch_size=2, max_seq_len=256)
        found = [model.forward(ids.repeat(2, 1), cache)]
        cache.current_seq_len = 10
        found.append(model.forward(ids[:, :5].repeat(2, 1), cache))
        twin = cache.clone()
        cache.copy_states(twin, 0, 4, 2, 4, 0, 1, 1, 1)
        twin.roll_left()
        found.append(model.forward(ids[:, :3].repeat(2, 1), twin))
        found.append(
            model.forward(ids, input_mask=torch.cat([torch.full((1, 3), -1e4), torch.zeros(1, 27)], 1))
        )
        found.append(model.forward(ids, last_id_only=True))
        assert model.forward(ids, Cache(model, max_seq_len=256), preprocess_only=True) is None
        results.append(found)
    for got, want in zip(*results, strict=True):
        assert torch.allclose(got, want, atol=1e-3)


def test_cancel_and_page_copies(pair: Model, alone: Model) -> None:
    outputs = []
    for model in (pair, alone):
        made = generator(model)
        ids = (torch.arange(300) * 7 % 1900 + 10)[None]
        first, second = (Job(ids[:, :n], 8, gen_settings=GREEDY) for n in (300, 290))
        third = Job(ids[:, :40], 200, gen_settings=GREEDY)
        made.enqueue([first, third])
        while first.new_tokens < 4:
            made.iterate()
        made.cancel(third)
        text = streamed(made)
        made.enqueue(second)  # shares a page and a part of one with the first
        text += streamed(made)
        assert second.cached_tokens > 256
        outputs.append(text)
    assert outputs[0] == outputs[1]


def test_a_draft_model_and_ngrams(pair: Model, alone: Model, fixtures_dir: Path) -> None:
    draft = loaded(fixtures_dir / "tiny-lm-exl2-4.0bpw")
    texts = [generator(alone).generate(PROMPTS[0], 20, gen_settings=GREEDY)]
    for options in (
        {"draft_model": draft, "draft_cache": Cache(draft, max_seq_len=1024)},
        {"use_ngram_draft": True},
        {"draft_model": pair, "draft_cache": Cache(pair, max_seq_len=1024)},
    ):
        texts.append(generator(pair, **options).generate(PROMPTS[0], 20, gen_settings=GREEDY))
    assert len(set(texts)) == 1


def test_caches_are_given_back(pair: Model) -> None:
    made = pair.cache_mirror
    for _ in range(3):
        cache = Cache(pair, max_seq_len=512)
        pair.forward(torch.arange(4)[None], cache)
        del cache
    assert made is not None
    assert len(made._dropped) == 1  # type: ignore[attr-defined]  # the others were told with the next order
    pair.forward(torch.arange(4)[None])
    assert not made._dropped  # type: ignore[attr-defined]


def test_what_several_processes_cannot_do(pair: Model, fixtures_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="An adapter needs a model on one device"):
        Lora.from_directory(pair, adapter(fixtures_dir / "tiny-lm", tmp_path / "lora", 1))

    class Own(Cache):
        """A cache nobody else knows."""

    with pytest.raises(Unsupported, match="cannot make a Own"):
        Own(pair, max_seq_len=256)
    old = Cache(pair, max_seq_len=256)
    old._layers = [layer.clone() for layer in old.layers]  # as if made for another load
    with pytest.raises(InputError, match="make a new one"):
        pair.forward(torch.arange(4)[None], old)
    with pytest.raises(InputError, match="exceed the model's configured length"):
        pair.forward(torch.zeros(1, 4000, dtype=torch.int64))
    assert pair.forward(torch.arange(4)[None]).shape == (1, 4, 2048)  # a refusal breaks nothing


def test_two_ranks_of_a_quantised_model(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "tiny-lm-gptq-g128-act"
    model = loaded(folder, 2)
    try:
        assert answer(model, CacheQ4, 8) == answer(loaded(folder), CacheQ4, 8)
    finally:
        model.unload()


def test_four_ranks_and_one_that_is_killed(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "tiny-lm-exl2-6.0bpw"
    model = loaded(folder, 4)  # two key/value heads: each is on two ranks
    pids = workers(model)
    assert answer(model, Cache, 6) == answer(loaded(folder), Cache, 6)
    made = generator(model)
    made.enqueue(Job(torch.arange(10, 30)[None], 200, gen_settings=GREEDY))
    for _ in range(4):
        made.iterate()
    os.kill(pids[-1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match="Load the model again"):
        streamed(made)
    assert time.monotonic() - began < 10
    with pytest.raises(WorkerLost, match="are gone"):
        model.forward(torch.arange(4)[None])
    assert not any(map(alive, pids))


def test_a_pipeline_of_three(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "tiny-lm-exl2-4.0bpw"
    config, whole = Config(folder), loaded(folder)
    config.device = "cpu"
    model = Model(config)
    model.load_pipeline([1, 1, 1])
    pids = workers(model)
    assert answer(model, CacheQ6, 8) == answer(whole, CacheQ6, 8)
    ids, results = torch.arange(20, 60)[None], []
    for one in (model, whole):
        cache = Cache(one, max_seq_len=256)
        assert one.forward(ids[:, :20], cache, preprocess_only=True) is None
        results.append(one.forward(ids[:, 20:], cache, last_id_only=True, return_last_state=True))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)  # nothing is added in another order
    os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match="Load the model again"):
        model.forward(ids)
    assert time.monotonic() - began < 10
    with pytest.raises(Unsupported, match="use fewer ranks"):
        model.load_pipeline([1] * 5)
    assert not any(map(alive, pids))


def test_loading_that_fails_leaves_no_process(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path)
    model = Model(Config(folder))

    def stop(i: int, n: int) -> None:
        if i == 2:
            raise KeyboardInterrupt

    before = set(children())
    with pytest.raises(KeyboardInterrupt):
        model.load_tp([1, 1], callback=stop)
    assert set(children()) == before
    with pytest.raises(Unsupported, match="too few to share among 5 ranks"):
        model.load_tp([1] * 5)
    with pytest.raises(DoesNotFit, match=r"gpu_split gives cpu 0\.0 MB"):
        model.load_tp([1e-5, 1e-5])
    assert not model.loaded


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


SCRIPT = """
import os, signal, sys, torch
torch.set_num_threads(1)
from exllamav2 import ExLlamaV2, ExLlamaV2Cache_Q8, ExLlamaV2Cache_TP, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler
config = ExLlamaV2Config(sys.argv[1])
config.device = "cpu"
model = ExLlamaV2(config)
model.load_tp(*eval(sys.argv[2]))
cache = ExLlamaV2Cache_TP(model, base=ExLlamaV2Cache_Q8, max_seq_len=512)
generator = ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(config))
text = generator.generate("Once upon a time", 8, gen_settings=ExLlamaV2Sampler.Settings.greedy())
print(repr(text), *[p.pid for p in model._loaded.leader.processes], sep="\\n", flush=True)
if sys.argv[3:]:
    os.kill(os.getpid(), signal.SIGKILL)
"""
EXPECTED = repr("Once upon a time, there was a little girl named")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def test_an_old_script_that_dies(fixtures_dir: Path, tmp_path: Path) -> None:
    """No `if __name__ == "__main__"` in it, and no chance to say goodbye."""
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [sys.executable, str(tmp_path / "script.py"), str(fixtures_dir / "tiny-lm"), "[[1, 1]]", "die"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    text, pid = done.stdout.splitlines()
    assert text.startswith(EXPECTED[:20])
    for _ in range(100):
        if not alive(int(pid)):
            return
        time.sleep(0.1)
    pytest.fail("a worker outlived its leader")


def test_torchrun(fixtures_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line += [str(tmp_path / "script.py"), str(fixtures_dir / "tiny-lm"), "[]"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(EXPECTED[:20])
