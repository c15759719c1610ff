"""One run of one engine, as a program: `cpu_engines.py ENGINE MODEL THREADS STARTED`, an answer in JSON.

It stands alone, so that an interpreter that has only a peer installed can run it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, NEW, ROWS = 512, 64, 8
Answer = dict[str, float]


def ids(row: int, count: int = PROMPT) -> list[int]:
    """A prompt of plain tokens, another for each row."""
    return [100 + (7919 * (i + 1) * (row + 3)) % 40000 for i in range(count)]


def exlm(model: str, threads: int, started: float) -> Answer:
    """This library, end to end through its generator."""
    import torch

    torch.set_num_threads(threads)
    from exlm import Cache, Config, Generator, Job, Model, Settings, Tokenizer

    loaded = Model(Config(model))
    loaded.load()
    generator = Generator(loaded, Cache(loaded, max_seq_len=4096), Tokenizer(loaded.config))

    def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
        """Seconds until every prompt has its first token, and from there to the end."""
        settings = Settings.greedy()
        start = time.perf_counter()
        for prompt in prompts:
            generator.enqueue(Job(torch.tensor([prompt]), new, gen_settings=settings))
        first, waiting = 0.0, len(prompts)
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                if waiting and result["stage"] == "streaming" and result.get("token_ids") is not None:
                    waiting -= 1
                    first = time.perf_counter()
        return first - start, time.perf_counter() - first

    run([ids(90, 8)], 1)
    answer = {"first": time.time() - started}
    run([ids(91)], 4)
    answer["prompt"] = PROMPT / run([ids(0)], 1)[0]
    answer["decode"] = (NEW - 1) / run([ids(1, 32)], NEW)[1]
    answer["batch"] = ROWS * (NEW - 1) / run([ids(row + 2, 32) for row in range(ROWS)], NEW)[1]
    return answer


def transformers(model: str, threads: int, started: float) -> Answer:
    """The same numbers, unpacked to float16."""
    import os

    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)

    def prompt(row: int, count: int) -> Any:
        start = time.perf_counter()
        out = loaded(torch.tensor([ids(row, count)]), use_cache=True, logits_to_keep=1)
        return out, time.perf_counter() - start

    with torch.inference_mode():
        prompt(90, 8)
        answer = {"first": time.time() - started}
        prompt(91, PROMPT)
        answer["prompt"] = PROMPT / prompt(0, PROMPT)[1]
        out, _ = prompt(1, 32)
        start = time.perf_counter()
        for _ in range(NEW // 2):
            out = loaded(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        answer["decode"] = NEW // 2 / (time.perf_counter() - start)
    return answer


def llama_cpp(model: str, threads: int, started: float) -> Answer:
    """The same file as it is, through the xllamacpp wheel."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(prompt: list[int], new: int) -> dict[str, float]:
        asked = {
            "prompt": prompt,
            "n_predict": new,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer: dict[str, float] = server.handle_completions(asked)["timings"]
        return answer

    run(ids(90, 8), 1)
    answer = {"first": time.time() - started}
    run(ids(91), 4)
    answer["prompt"] = run(ids(0), 1)["prompt_per_second"]
    answer["decode"] = run(ids(1, 32), NEW)["predicted_per_second"]
    return answer


def bandwidth(model: str, threads: int, started: float) -> Answer:
    """How fast memory is read, by the same threads."""
    import torch

    from exlm.kernels.select import choose

    choose(torch.device("cpu"), torch.float32)
    torch.set_num_threads(threads)
    numbers, best = torch.ones(64 * 2**20), 0.0
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - start))
    return {"read": best}


ENGINES: dict[str, Callable[[str, int, float], Answer]] = {
    "exlm": exlm,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "bandwidth": bandwidth,
}


def peak() -> float:
    """Megabytes this process had at most. What getrusage says would include its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


def main() -> None:
    """Run and answer."""
    engine, model, threads, started = sys.argv[1:]
    answer = ENGINES[engine](model, int(threads), float(started))
    answer["peak"] = peak()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
