"""One run of one engine, as a program: `comparison_engines.py ENGINE MODEL THREADS STARTED OUTPUT`.

Imports nothing of exlm at the top, so that an interpreter with only another engine installed can run it.
Writes its measurements to the file OUTPUT as JSON. All engines get the same prompt of 512 tokens, the same
number of threads, and decode greedily.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, NEW, ROWS = 512, 64, 8
Metrics = dict[str, float]


def prompt_ids(row: int, count: int = PROMPT) -> list[int]:
    """A prompt of ordinary tokens, a different one for each row."""
    return [100 + (7919 * (i + 1) * (row + 3)) % 40000 for i in range(count)]


def single_stream_metrics(started: float, run: Callable[[list[int], int], tuple[float, float]]) -> Metrics:
    """Time to first token, prompt and decode speed of one sequence at a time.

    `run(prompt, new)` returns the seconds to the first new token, and from there to the last.
    """
    run(prompt_ids(90, 8), 1)
    metrics = {"first": time.time() - started}
    run(prompt_ids(91), 4)
    metrics["prompt"] = PROMPT / run(prompt_ids(0), 1)[0]
    metrics["decode"] = (NEW - 1) / run(prompt_ids(1, 32), NEW)[1]
    return metrics


def exlm(model: str, threads: int, started: float) -> Metrics:
    """exlm, through its generator."""
    import torch

    torch.set_num_threads(threads)
    from exlm import Cache, Config, Generator, Job, Model, Settings, Tokenizer

    config = Config(model)
    config.device = "cpu"
    loaded = Model(config)
    loaded.load()
    generator = Generator(loaded, Cache(loaded, max_seq_len=4096), Tokenizer(loaded.config))

    def run(new: int, *prompts: list[int]) -> tuple[float, float]:
        """Seconds until every prompt has its first token, and from there to the end."""
        start = time.perf_counter()
        jobs = [Job(torch.tensor([prompt]), new, gen_settings=Settings.greedy()) for prompt in prompts]
        generator.enqueue(jobs)
        while not all(job.new_tokens for job in jobs):
            generator.iterate()
        first = time.perf_counter()
        while generator.num_remaining_jobs():
            generator.iterate()
        return first - start, time.perf_counter() - first

    metrics = single_stream_metrics(started, lambda prompt, new: run(new, prompt))
    metrics["batch"] = ROWS * (NEW - 1) / run(NEW, *(prompt_ids(row + 2, 32) for row in range(ROWS)))[1]
    return metrics


def transformers(model: str, threads: int, started: float) -> Metrics:
    """transformers, with the weights dequantised to float16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)

    def prompt(row: int, count: int) -> tuple[Any, float]:
        start = time.perf_counter()
        out = loaded(torch.tensor([prompt_ids(row, count)]), use_cache=True, logits_to_keep=1)
        return out, time.perf_counter() - start

    with torch.inference_mode():
        prompt(90, 8)
        metrics = {"first": time.time() - started}
        prompt(91, PROMPT)
        metrics["prompt"] = PROMPT / prompt(0, PROMPT)[1]
        out, _ = prompt(1, 32)
        start = time.perf_counter()
        for _ in range(NEW // 2):
            out = loaded(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        metrics["decode"] = NEW // 2 / (time.perf_counter() - start)
    return metrics


def llama_cpp(model: str, threads: int, started: float) -> Metrics:
    """llama.cpp with the same file, through the xllamacpp wheel."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(prompt: list[int], new: int) -> dict[str, float]:
        request = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True}
        timings: dict[str, float] = server.handle_completions({**request, "cache_prompt": False})["timings"]
        return timings

    run(prompt_ids(90, 8), 1)
    metrics = {"first": time.time() - started}
    run(prompt_ids(91), 4)
    metrics["prompt"] = run(prompt_ids(0), 1)["prompt_per_second"]
    metrics["decode"] = run(prompt_ids(1, 32), NEW)["predicted_per_second"]
    return metrics


def onnxruntime(model: str, threads: int, started: float) -> Metrics:
    """onnxruntime-genai, with a 4-bit version of the weights that its own builder made."""
    import onnxruntime_genai as og  # type: ignore[import-not-found]

    config = og.Config(model)
    overlay = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
    config.overlay(json.dumps(overlay))
    loaded = og.Model(config)

    def run(prompt: list[int], new: int) -> tuple[float, float]:
        params = og.GeneratorParams(loaded)
        params.set_search_options(max_length=len(prompt) + new, min_length=len(prompt) + new, do_sample=False)
        generator = og.Generator(loaded, params)
        start = time.perf_counter()
        generator.append_tokens([prompt])
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(new - 1):
            generator.generate_next_token()
        return first - start, time.perf_counter() - first

    return single_stream_metrics(started, run)


RUNNERS: dict[str, Callable[[str, int, float], Metrics]] = {
    "exlm": exlm,
    "llama.cpp": llama_cpp,
    "onnxruntime-genai": onnxruntime,
    "transformers": transformers,
}


def peak_memory_mb() -> float:
    """Peak memory of this process in MB. (getrusage would include the parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def main() -> None:
    """Run an engine and write its metrics."""
    engine, model, threads, started, output = sys.argv[1:]
    metrics = RUNNERS[engine](model, int(threads), float(started))
    Path(output).write_text(json.dumps({**metrics, "peak": peak_memory_mb()}))


if __name__ == "__main__":
    main()
