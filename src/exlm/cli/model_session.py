"""The model behind `exlm generate` and `exlm chat`: resolve it, encode prompts, load it, stream answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

import exlm
from exlm import InputError

if TYPE_CHECKING:
    import torch

PROGRESS_BAR_TOKENS = 2048
"""Prompts of more tokens than this get a progress bar."""


Temperature = Annotated[
    float, typer.Option("-t", "--temperature", help="Sampling temperature; 0 always takes the likeliest token.")
]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens whose probabilities sum to this.")]


class ModelSession:
    """One model: its config and tokenizer from the start, its weights after `load`."""

    def __init__(self, config: exlm.Config, quiet: bool) -> None:
        self.config = config
        self.quiet = quiet
        self.tokenizer = exlm.Tokenizer(config)
        self.generator: exlm.Generator | None = None
        self.template: str | None = None
        """The name of a chat template or prompt format to use instead of the model's default."""
        self.max_tokens = config.max_seq_len
        """Most tokens of a prompt and its answer together; `load` lowers it to the size of the cache."""
        self.stats = ""

    @classmethod
    def open(
        cls,
        name: str | None,
        *,
        max_seq_len: int | None,
        device: str | None,
        dtype: str | None,
        quiet: bool,
        cpu_activation_bits: int = 16,
    ) -> ModelSession:
        """Find a model and read its config and tokenizer."""
        config = exlm.Config(exlm.find_model(name, progress=not quiet))
        config.device, config.dtype = device or config.device, dtype
        config.cpu_activation_bits = cpu_activation_bits
        config.max_seq_len = max_seq_len or config.max_seq_len
        return cls(config, quiet)

    def encode_raw(self, text: str) -> torch.Tensor:
        """Tokens of a text to continue, with BOS if the model wants one."""
        return self.tokenizer.encode(text, add_bos=self.tokenizer.wants_bos, encode_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Tokens of a conversation, formatted by the chat template."""
        text = self.tokenizer.apply_chat_template(messages, chat_template=self.template)
        return self.tokenizer.encode_rendered(text, self.chat_format)

    @property
    def chat_format(self) -> Any:
        """The PromptFormat (which cli may not import) that --template names; None for any other template."""
        return None if self.template is None else self.tokenizer.chat_templates.choose(self.template).format

    @property
    def stop_conditions(self) -> list[int | str]:
        """The model's EOS tokens and the stop tokens and strings of the prompt format."""
        conditions: list[int | str] = list(self.tokenizer.eos_token_ids)
        if self.chat_format is not None:
            conditions += self.chat_format.stop_conditions(self.tokenizer.single_id)
        return conditions

    def load(self, prompt_tokens: int, new_tokens: int) -> None:
        """Load the weights, and allocate a cache for a prompt and an answer of these lengths."""
        length = self.config.max_seq_len
        if prompt_tokens >= length:
            raise InputError(
                f"The prompt has {prompt_tokens} tokens and the context {length}: shorten the prompt, or "
                "give a larger --max-seq-len."
            )
        model = exlm.Model(self.config)
        model.load(progress=not self.quiet)
        self.max_tokens = min(length, prompt_tokens + new_tokens)
        page_size = exlm.CacheBase.page_size
        pages = -(-self.max_tokens // page_size)
        cache = exlm.CACHES["fp16"](model, max_seq_len=pages * page_size)
        self.generator = exlm.Generator(model, cache, self.tokenizer, use_ngram_draft="auto")

    def stream_sampled(
        self, ids: torch.Tensor, limit: int, *, temperature: float, top_p: float, seed: int | None
    ) -> Iterator[str]:
        """Stream an answer with temperature and top-p only; see `stream`."""
        settings = exlm.Settings.greedy()
        if temperature > 0:
            settings = exlm.Settings(temperature=temperature, top_k=0, top_p=top_p, token_repetition_penalty=1.0)
        return self.stream(ids, limit, settings, seed)

    def stream(
        self,
        ids: torch.Tensor,
        limit: int,
        settings: exlm.Settings,
        seed: int | None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[str]:
        """Yield the answer's text as it is generated, until `should_stop()`; sets `stats` at the end."""
        assert self.generator is not None
        job = exlm.Job(
            ids,
            min(limit, self.max_tokens - ids.shape[1]),
            gen_settings=settings,
            seed=seed,
            stop_conditions=self.stop_conditions,
        )
        self.generator.enqueue(job)
        show_progress = ids.shape[1] > PROGRESS_BAR_TOKENS and not self.quiet
        with Progress(console=Console(stderr=True), transient=True, disable=not show_progress) as progress:
            task = progress.add_task("Reading the prompt", total=ids.shape[1])
            try:
                while self.generator.num_remaining_jobs() and not should_stop():
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
        seconds = job.metrics.generate_seconds or 1e-9
        self.stats = (
            f"{job.new_tokens} tokens at {job.new_tokens / seconds:.1f} tokens/s, prompt of "
            f"{job.prompt_tokens} in {job.metrics.prefill_seconds:.1f} s, {job.cached_tokens} of it cached"
        )
