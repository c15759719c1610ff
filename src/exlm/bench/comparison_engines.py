"""One run of one engine, as a program: `comparison_engines.py ENGINE MODEL THREADS VOCAB STARTED OUTPUT`.

Imports nothing of exlm at the top, so that an interpreter with only another engine installed can run it.
Writes to the file OUTPUT, as JSON, its measurements (`values`) and what it says of how it was built (`build`). All
engines get the same prompt of 512 tokens, the same number of threads, and decode greedily.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

PROMPT, NEW, ROWS = 512, 64, 8
CONTEXT = 2048  # tokens of the KV cache
Metrics = dict[str, float]
Build = dict[str, str]


class Task(NamedTuple):
    """What an engine is to run."""

    model: str
    threads: int
    vocab: int
    started: float  # when the process was started, in seconds since the epoch

    def prompt(self, row: int, count: int = PROMPT) -> list[int]:
        """A prompt of ordinary tokens, a different one for each row."""
        span = min(40000, self.vocab - 100)
        return [100 + (7919 * (i + 1) * (row + 3)) % span for i in range(count)]


def single_stream_metrics(task: Task, run: Callable[[list[int], int], tuple[float, float]]) -> Metrics:
    """Time to first token, prompt and decode speed of one sequence at a time.

    `run(prompt, new)` returns the seconds to the first new token, and from there to the last.
    """
    run(task.prompt(90, 8), 1)
    metrics = {"first": time.time() - task.started}
    run(task.prompt(91), 4)
    metrics["prompt"] = PROMPT / run(task.prompt(0), 1)[0]
    metrics["decode"] = (NEW - 1) / run(task.prompt(1, 32), NEW)[1]
    return metrics


def batch_rate(seconds: float) -> float:
    """Tokens a second of all rows of a batch, of which each has `NEW`, by the seconds after the first."""
    return ROWS * (NEW - 1) / seconds


def exlm(task: Task) -> Metrics:
    """exlm, through its generator."""
    import torch

    torch.set_num_threads(task.threads)
    from exlm import Cache, Config, Generator, Job, Model, Settings, Tokenizer

    config = Config(task.model)
    config.device = "cpu"
    loaded = Model(config)
    loaded.load()
    generator = Generator(loaded, Cache(loaded, max_seq_len=CONTEXT), Tokenizer(loaded.config))

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

    metrics = single_stream_metrics(task, lambda prompt, new: run(new, prompt))
    metrics["batch"] = batch_rate(run(NEW, *(task.prompt(row + 2, 32) for row in range(ROWS)))[1])
    return metrics


def transformers(task: Task) -> Metrics:
    """transformers, with the weights dequantised to float16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(task.threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float16)

    def prompt(row: int, count: int) -> tuple[Any, float]:
        start = time.perf_counter()
        out = loaded(torch.tensor([task.prompt(row, count)]), use_cache=True, logits_to_keep=1)
        return out, time.perf_counter() - start

    with torch.inference_mode():
        prompt(90, 8)
        metrics = {"first": time.time() - task.started}
        prompt(91, PROMPT)
        metrics["prompt"] = PROMPT / prompt(0, PROMPT)[1]
        out, _ = prompt(1, 32)
        start = time.perf_counter()
        for _ in range(NEW // 2):
            out = loaded(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        metrics["decode"] = NEW // 2 / (time.perf_counter() - start)
    return metrics


def llama_cpp(task: Task) -> Metrics:
    """llama.cpp with the same file, through whichever package is installed."""
    return llama_cpp_python(task) if find_spec("llama_cpp") is not None else xllamacpp(task)


def llama_cpp_python(task: Task) -> Metrics:
    """llama.cpp through llama-cpp-python's bindings of its C functions, which pip compiles for the machine."""
    import llama_cpp as lib  # type: ignore[import-not-found]
    import numpy as np

    lib.llama_backend_init()
    loaded = lib.llama_model_load_from_file(task.model.encode(), lib.llama_model_default_params())
    if not loaded:
        raise RuntimeError(f"llama.cpp cannot load {task.model}")
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = CONTEXT, task.threads, task.threads
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
    batch = lib.llama_batch_init(PROMPT, 0, 1)

    def next_tokens(context: Any, position: int, rows: dict[int, list[int]]) -> dict[int, int]:
        """Run each row's tokens from this position on; the greedy next token of each."""
        batch.n_tokens, last = 0, {}
        for row, tokens in rows.items():
            for offset, token in enumerate(tokens):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, position + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = offset == len(tokens) - 1
                last[row], batch.n_tokens = at, at + 1
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = {row: lib.llama_get_logits_ith(context, at) for row, at in last.items()}
        return {row: int(np.ctypeslib.as_array(found, shape=(vocab,)).argmax()) for row, found in logits.items()}

    def run(context: Any, prompts: list[list[int]], new: int) -> tuple[float, float]:
        """Seconds until every prompt, all of one length, has its first token, and from there to the end."""
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        tokens: dict[int, int] = {}
        start = time.perf_counter()
        for row, prompt in enumerate(prompts):
            tokens |= next_tokens(context, 0, {row: prompt})
        first = time.perf_counter()
        for step in range(new - 1):
            tokens = next_tokens(context, len(prompts[0]) + step, {row: [token] for row, token in tokens.items()})
        return first - start, time.perf_counter() - first

    single = lib.llama_init_from_model(loaded, params)
    metrics = single_stream_metrics(task, lambda prompt, new: run(single, [prompt], new))
    lib.llama_free(single)
    params.n_seq_max = ROWS  # each has its share of the context
    several = lib.llama_init_from_model(loaded, params)
    metrics["batch"] = batch_rate(run(several, [task.prompt(row + 2, 32) for row in range(ROWS)], NEW)[1])
    return metrics


def xllamacpp(task: Task) -> Metrics:
    """llama.cpp through the server in the xllamacpp wheel."""
    import xllamacpp as lib  # type: ignore[import-not-found]

    params = lib.CommonParams()
    params.model.path = task.model
    params.n_ctx, params.n_parallel, params.warmup = CONTEXT, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
    server = lib.Server(params)

    def run(prompt: list[int], new: int) -> tuple[float, float]:
        request = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True}
        timings = server.handle_completions({**request, "cache_prompt": False})["timings"]
        return timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3  # the first new token counts as the prompt's

    return single_stream_metrics(task, run)


def llama_cpp_build() -> Build:
    """The package, and llama.cpp's own line of the instruction sets that it was compiled for."""
    if find_spec("llama_cpp") is not None:
        import llama_cpp as lib

        return {
            "package": f"llama-cpp-python {lib.__version__}",
            "instruction_sets": lib.llama_print_system_info().decode().strip(),
        }
    import xllamacpp

    return {"package": f"xllamacpp {xllamacpp.__version__}", "instruction_sets": xllamacpp.get_system_info().strip()}


def onnxruntime(task: Task) -> Metrics:
    """onnxruntime-genai, with a 4-bit version of the weights that its own builder made."""
    import onnxruntime_genai as og  # type: ignore[import-not-found]

    config = og.Config(task.model)
    overlay = {"model": {"decoder": {"session_options": {"intra_op_num_threads": task.threads}}}}
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

    return single_stream_metrics(task, run)


RUNNERS: dict[str, Callable[[Task], Metrics]] = {
    "exlm": exlm,
    "llama.cpp": llama_cpp,
    "onnxruntime-genai": onnxruntime,
    "transformers": transformers,
}


def build_of(engine: str) -> Build:
    """What an engine says of how it was built."""
    if engine == "llama.cpp":
        return llama_cpp_build()
    return {"package": f"{engine} {version(engine)}"}


def peak_memory_mb() -> float:
    """Peak memory of this process in MB. (getrusage would include the parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def main() -> None:
    """Run an engine and write its metrics."""
    engine, model, threads, vocab, started, output = sys.argv[1:]
    values = RUNNERS[engine](Task(model, int(threads), int(vocab), float(started)))
    result = {"values": {**values, "peak": peak_memory_mb()}, "build": build_of(engine)}
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
