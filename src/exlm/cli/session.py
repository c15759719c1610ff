"""A model on the command line: found, described, loaded, asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from exlm import Cache, Config, Generator, InputError, Job, Model, Settings, Tokenizer, find_model

PAGE = 256
LONG_PROMPT = 2048
"""Prompts of more tokens than this get a progress bar."""


class Session:
    """One model and whoever talks to it."""

    def __init__(self, config: Config, quiet: bool) -> None:
        self.config = config
        self.quiet = quiet
        self.tokenizer = Tokenizer(config)
        self.generator: Generator | None = None
        self.figures = ""

    @classmethod
    def open(
        cls, name: str | None, *, max_seq_len: int | None, device: str | None, dtype: str | None, quiet: bool
    ) -> Session:
        """Find the model and read its description and tokenizer; the weights come with `load`."""
        config = Config(find_model(name, progress=not quiet))
        config.device, config.dtype = device or config.device, dtype
        config.max_seq_len = max_seq_len or config.max_seq_len
        return cls(config, quiet)

    def encode_raw(self, text: str) -> torch.Tensor:
        """A text to go on from, with a BOS if the model wants one."""
        wants_bos = (self.tokenizer.tokenizer_config_dict or {}).get("add_bos_token", True)
        return self.tokenizer.encode(text, add_bos=bool(wants_bos), encode_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """A conversation as the model's template writes it."""
        return self.tokenizer.apply_chat_template(messages, tokenize=True)

    def load(self, prompt: int, new: int) -> None:
        """Load the weights, with a cache for a prompt and an answer of these lengths, if the model has it."""
        length = self.config.max_seq_len
        if prompt >= length:
            raise InputError(
                f"The prompt has {prompt} tokens and the context {length}: shorten the prompt, or give "
                "--max-seq-len."
            )
        model = Model(self.config)
        model.load(progress=not self.quiet)
        budget = -(-min(length, prompt + new) // PAGE) * PAGE
        self.generator = Generator(model, Cache(model, max_seq_len=budget), self.tokenizer)

    def answer(
        self, ids: torch.Tensor, limit: int, *, temperature: float, top_p: float, seed: int | None
    ) -> Iterator[str]:
        """The answer's text as it comes; afterwards `figures` says how fast it was."""
        assert self.generator is not None
        settings = Settings.greedy()
        if temperature > 0:
            settings = Settings(temperature=temperature, top_k=0, top_p=top_p, token_repetition_penalty=1.0)
        room = min(
            limit, self.config.max_seq_len - ids.shape[1], self.generator.max_total_tokens - ids.shape[1]
        )
        job = Job(
            ids, room, gen_settings=settings, seed=seed, stop_conditions=list(self.tokenizer.eos_token_ids)
        )
        self.generator.enqueue(job)
        shown = ids.shape[1] > LONG_PROMPT and not self.quiet
        with Progress(console=Console(stderr=True), transient=True, disable=not shown) as progress:
            task = progress.add_task("Reading the prompt", total=ids.shape[1])
            try:
                while self.generator.num_remaining_jobs():
                    for result in self.generator.iterate():
                        if result["stage"] == "prefill":
                            progress.update(task, completed=result["curr_progress"])
                        elif result["stage"] == "streaming":
                            progress.stop()
                            if "error" in result:
                                raise result["error"]
                            yield result.get("text", "")
            finally:
                self.generator.cancel(job)
        seconds = job.times.generate or 1e-9
        self.figures = (
            f"{job.new_tokens} tokens at {job.new_tokens / seconds:.1f} tokens/s, prompt of "
            f"{job.prompt_tokens} in {job.times.prefill:.1f} s, {job.cached_tokens} of it cached"
        )
