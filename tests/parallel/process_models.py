"""Models in several processes over gloo, and what tests compare between them and one process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm import (
    Cache,
    CacheBase,
    CacheFP8,
    CacheQ4,
    CacheQ6,
    CacheQ8,
    Config,
    Generator,
    Job,
    Lora,
    Model,
    Settings,
    Tokenizer,
)
from exlm.errors import WorkerLost

CACHE_CLASSES = (Cache, CacheFP8, CacheQ8, CacheQ6, CacheQ4)
PROMPTS = ("Once upon a time", "The dog", "Jack smiled and said")
GREEDY = Settings.greedy()
IDS = torch.arange(20, 60)[None]
LONG = (torch.arange(300) * 7 % 1900 + 10)[None]


def unloaded_model(folder: Path) -> Model:
    """A model on the CPU, not loaded yet."""
    config = Config(folder)
    config.device = "cpu"
    return Model(config)


def single_process_model(folder: Path) -> Model:
    """The model in one process."""
    model = unloaded_model(folder)
    model.load()
    return model


@contextmanager
def parallel_model(folder: Path, ranks: int, load_method: str = "load_tp") -> Iterator[Model]:
    """The model in several processes; afterwards none of them and none of their channels may be left."""
    open_before = len(os.listdir("/proc/self/fd"))
    progress: list[tuple[int, int]] = []
    model = unloaded_model(folder)
    getattr(model, load_method)([1] * ranks, callback=lambda i, n: progress.append((i, n)))
    modules = len(model.placement)  # of this rank
    assert progress == [(i, modules) for i in range(modules + 1)]
    pids = worker_pids(model)
    assert len(pids) == ranks - 1
    try:
        yield model
    finally:
        model.unload()
    assert not any(map(is_alive, pids))
    assert len(os.listdir("/proc/self/fd")) <= open_before


def worker_pids(model: Model) -> list[int]:
    """Process ids of the workers."""
    assert model._loaded is not None
    assert model._loaded.driver is not None
    return [process.pid for process in model._loaded.driver.processes]


def is_alive(pid: int) -> bool:
    """Whether the process still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def make_generator(model: Model, kind: type[CacheBase] = Cache, **options: Any) -> Generator:
    """A generator over a new cache."""
    return Generator(model, kind(model, max_seq_len=1280), Tokenizer(model.config), **options)


def run_to_end(generator: Generator) -> list[str]:
    """All text until no job is left."""
    text = []
    while generator.num_remaining_jobs():
        text += [str(result.get("text", "")) for result in generator.iterate()]
    return text


def run_session(model: Model, kind: type[CacheBase], **options: Any) -> list[Any]:
    """A batch, a job that is cancelled halfway, and a prompt with a shared prefix of more than a page."""
    generator = make_generator(model, kind, **options)
    encode = generator.tokenizer.encode
    jobs = [Job(encode(prompt), 6, gen_settings=GREEDY) for prompt in PROMPTS]
    first, second = (Job(LONG[:, :n], 3, gen_settings=GREEDY) for n in (300, 290))
    cancelled = Job(LONG[:, 100:140], 200, gen_settings=GREEDY)
    generator.enqueue([*jobs, first, cancelled])
    while first.new_tokens < 1:
        generator.iterate()
    generator.cancel(cancelled)
    run_to_end(generator)
    generator.enqueue(second)
    run_to_end(generator)
    assert second.cached_tokens > 256
    return [job.full_completion for job in (*jobs, first, second)]


FIRST_QUANTIZED = 4
"""The first output of `forward_outputs` that reads a quantised cache."""


def forward_outputs(model: Model) -> list[Tensor]:
    """Outputs of `forward` with caches that are rewound, cloned, copied and rolled."""
    cache = Cache(model, batch_size=2, max_seq_len=256)
    outputs = [model.forward(IDS.repeat(2, 1), cache)]
    cache.current_seq_len = 10
    outputs.append(model.forward(IDS[:, :5].repeat(2, 1), cache))
    clone = cache.clone()
    cache.copy_states(clone, 0, 4, 2, 4, 0, 1, 1, 1)
    clone.roll_left()
    outputs.append(model.forward(IDS[:, :3].repeat(2, 1), clone))
    hidden = torch.cat([torch.full((1, 3), -1e4), torch.zeros(1, 37)], 1)
    outputs.append(model.forward(IDS, input_mask=hidden))
    quantized = CacheQ6(model, max_seq_len=256)
    assert model.forward(IDS[:, :20], quantized, preprocess_only=True) is None
    outputs += model.forward(IDS[:, 20:], quantized, last_id_only=True, return_last_state=True)
    return outputs


def run_with_adapters(model: Model, adapters: Sequence[Path]) -> tuple[list[str], list[Tensor]]:
    """Texts of one batch with different LoRAs; logits with both, with one, and after both were removed."""
    first, second = (Lora.from_directory(model, folder) for folder in adapters)
    generator = make_generator(model)
    ids = generator.tokenizer.encode(PROMPTS[0])
    lora_sets = (None, first, (second, 0.5), [first, second])
    jobs = [Job(ids, 6, gen_settings=GREEDY, loras=loras) for loras in lora_sets]
    generator.enqueue(jobs)
    run_to_end(generator)
    logits = [model.forward(IDS, loras=[first, (second, -0.3)])]
    first.unload()
    logits.append(model.forward(IDS, loras=second))
    second.unload()
    return [job.full_completion for job in jobs], [*logits, model.forward(IDS)]


def kill_worker(model: Model, victim: int, adapter: Path) -> None:
    """Kill a worker during a step: rank 0 raises within ten seconds."""
    pids, lora = worker_pids(model), Lora.from_directory(model, adapter)
    generator = make_generator(model)
    generator.enqueue(Job(IDS, 200, gen_settings=GREEDY))
    for _ in range(3):
        generator.iterate()
    os.kill(pids[victim], signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (pids[victim], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(WorkerLost, match="Load the model again"):
        run_to_end(generator)
    assert 0.2 < time.monotonic() - start < 10
    with pytest.raises(WorkerLost, match="are gone"):
        model.forward(IDS)
    assert not any(map(is_alive, pids))
    lora.unload()  # does nothing: the workers are gone
