"""`LLM`: finds and loads a model, and completes prompts and conversations with it.

It combines a `Config`, `Model`, cache, `Tokenizer` and `Generator`, which are its attributes, and adds
defaults, chat templates, structured output and plain results (`Completion`, `Stream`). For anything else,
enqueue a `Job` with its `generator`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias, overload

from torch import Tensor

from .config import Config
from .constrained import Filter, GrammarFilter, JsonSchemaFilter, RegexFilter
from .errors import InputError, NotLoaded
from .generator import Generator, Job, StreamingResult
from .generator.generator import JobGroup, encode_prompt
from .generator.validation import filter_tuple, materialize, offset_seed, one_per_prompt, whole_number
from .hub import find_model
from .kvcache import CACHES, PAGE_SIZE, CacheBase
from .model import Model
from .sampling import Settings
from .tokenizer import Tokenizer

DEFAULT_MAX_SEQ_LEN = 8192
"""The default limit on prompt and completion together, for models that allow more."""

DEFAULT_MAX_NEW_TOKENS = 512
"""The default limit on a completion; what the context has left, if that is less."""

FinishReason = Literal["stop_token", "stop_string", "max_new_tokens", "end_filter"]
CacheType = Literal["fp16", "q8", "q6", "q4", "fp8"]
Prompt: TypeAlias = str | tuple[str, str]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Stops: TypeAlias = str | int | Iterable[str | int] | None

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})

RENAMED_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {"gen_settings": "settings", "stop_conditions": "stop", "input_ids": "the prompt"}
)
"""Arguments of a `Job` that have another name here."""


@dataclass(frozen=True)
class Completion:
    """The completion of a prompt, with token counts and times in seconds; `str()` gives the text.

    `token_ids` contain the tokens of a stop string, but not a stop token; `new_tokens` counts both.
    `cached_tokens` of the `prompt_tokens` were found in the cache.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    time_prefill: float
    time_generate: float
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """A completion in pieces of text as they are generated; `completion` is set after the last piece.

    To drop the request early, call `close()`, also from another thread, or delete the stream.
    """

    _enqueued = False

    def __init__(self, group: JobGroup) -> None:
        """`group` is one job, which is enqueued for the first piece."""
        self.completion: Completion | None = None
        self._group = group
        self._last: StreamingResult | None = None
        self._lock = threading.RLock()
        self._advancing = False  # the thread that holds the lock is generating a piece
        self._closed = False

    def __next__(self) -> str:
        with self._lock:
            piece = None if self._closed else self._next_piece()
        if piece is None or self._closed:  # another thread may have called close() in the meantime
            self.close()
            raise StopIteration
        return piece

    def __del__(self) -> None:
        """Drop the request at the generator's next call: garbage collection may run during a step."""
        if self._enqueued and self._group.unfinished:
            self._group.abandon()

    def close(self) -> None:
        """Drop the request if it is still running; if a thread waits for a piece, after that piece."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                if not self._advancing:
                    self._group.cancel()
            finally:
                self._lock.release()

    def _next_piece(self) -> str | None:
        """The next piece of text, None after the last one."""
        try:
            self._advancing = True
            if not self._enqueued:
                self._enqueued = True
                self._group.enqueue()
            while self._group.unfinished:
                result = self._group.next_result()
                if result is not None and result["stage"] == "streaming":
                    self._last = result
                    if text := result.get("text"):
                        return text
            if self._last is not None:
                self.completion = _completion(self._last)
            return None
        except BaseException:
            self._closed = True
            self._group.cancel()
            raise
        finally:
            self._advancing = False


class LLM:
    """A loaded model with its tokenizer, cache and generator.

    `model` is a folder, a .gguf file, `owner/name` on the Hub, None for the small default model, or a
    `Config`, whose `max_seq_len` is then used unchanged. `max_seq_len` limits a prompt and its completion
    together; the default is the model's limit, but at most 8192. `cache_tokens` is the size of the cache that
    all requests share, rounded up to pages of 256; the default is `max_seq_len`. `cache_type` is its format:
    "fp16" has 16 bits, on a CPU too, the others have fewer. `draft` is a smaller model with the same
    vocabulary for speculative decoding, or "ngram"; both change the speed and never a greedy text. `device`
    and `dtype` are as in `Config`, and so is `cpu_activation_bits`: 8 reads prompts faster on a CPU, less exactly.
    `max_batch_size` is as in `Generator`; `progress` shows progress bars.

    Several threads may call it; their requests run in one batch.
    """

    def __init__(
        self,
        model: str | Path | Config | None = None,
        *,
        max_seq_len: int | None = None,
        cache_tokens: int | None = None,
        cache_type: CacheType = "fp16",
        device: str | None = None,
        dtype: str | None = None,
        draft: str | Path | None = None,
        max_batch_size: int | None = None,
        progress: bool = False,
        cpu_activation_bits: int | None = None,
    ) -> None:
        if cache_type not in CACHES:
            raise InputError(f"cache_type must be one of {', '.join(CACHES)}, found {cache_type!r}.")
        compute = device, dtype, cpu_activation_bits
        self.config = _make_config(model, max_seq_len, *compute, progress)
        self.tokenizer = Tokenizer(self.config)
        num_tokens = self.config.max_seq_len if cache_tokens is None else whole_number("cache_tokens", cache_tokens, 1)
        tokens = -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
        draft_options: dict[str, Any] = {"use_ngram_draft": draft == "ngram"}
        if draft is not None and draft != "ngram":
            # Drafts beyond the length that the draft model was trained for only cost a little time.
            draft_config = _make_config(draft, self.config.max_seq_len, *compute, progress)
            self.tokenizer.check_draft(draft_config)
            draft_parts = _load_model(draft_config, CACHES[cache_type], tokens, progress)
            draft_options = dict(zip(("draft_model", "draft_cache"), draft_parts, strict=True))
        loaded, cache = _load_model(self.config, CACHES[cache_type], tokens, progress)
        self._generator: Generator | None = Generator(
            loaded, cache, self.tokenizer, max_batch_size=max_batch_size, **draft_options
        )

    @property
    def generator(self) -> Generator:
        """The generator that runs the requests."""
        if self._generator is None:
            raise NotLoaded("This LLM was closed: make another one.")
        return self._generator

    @property
    def model(self) -> Model:
        """The loaded model."""
        model: Model = self.generator.model
        return model

    @property
    def cache(self) -> CacheBase:
        """The KV cache that all requests share."""
        cache: CacheBase = self.generator.cache
        return cache

    def close(self) -> None:
        """Drop every request, the weights and the cache; calling it again does nothing."""
        generator = self._generator
        if generator is None:
            return
        generator.check_not_in_step("LLM")
        generator.clear_queue()
        for model in (generator.model, generator.draft_model):
            if model is not None:
                model.unload()
        self._generator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def generate(
        self,
        prompts: Prompt,
        *,
        max_new_tokens: int | None = ...,
        settings: Settings | None = ...,
        stop: Stops = ...,
        seed: int | None = ...,
        json_schema: Any = ...,
        regex: str | None = ...,
        grammar: str | None = ...,
        add_bos: bool | None = ...,
        encode_special_tokens: bool = ...,
        **job_arguments: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | None = ...,
        settings: Settings | Sequence[Settings] | None = ...,
        stop: Stops = ...,
        seed: int | None = ...,
        json_schema: Any = ...,
        regex: str | None = ...,
        grammar: str | None = ...,
        add_bos: bool | None = ...,
        encode_special_tokens: bool = ...,
        **job_arguments: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        settings: Settings | Sequence[Settings] | None = None,
        stop: Stops = (),
        seed: int | None = None,
        json_schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        add_bos: bool | None = None,
        encode_special_tokens: bool = False,
        **job_arguments: Any,
    ) -> Completion | list[Completion]:
        """Complete a prompt, or a list of prompts in one batch; a list gives a list, in the same order.

        A completion ends at an EOS token of the model, at a `stop` (a string, a token id, or several), or
        after `max_new_tokens`, by default 512 or what the context has left. `settings` is for all prompts, or
        a list with one for each; None is `Settings()`. Prompt i uses seed + i. `json_schema`, `regex` and
        `grammar` constrain every completion. `add_bos` says whether a BOS token comes first; the default is
        in the tokenizer's files. Special tokens written in a prompt are plain text unless
        `encode_special_tokens`. A pair of prompts is guided by `settings.cfg_scale`. Further arguments are
        `Job`'s; `filters` and `embeddings` are lists, or for a list of prompts lists of lists.
        """
        single = isinstance(prompts, str | tuple)
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
            raise InputError(f"Give a prompt or a list of them; found {type(prompts).__name__}.")
        texts: list[Any] = [prompts] if single else list(prompts)
        settings_list = one_per_prompt(settings, len(texts), "settings")
        per_prompt = {name: job_arguments.pop(name, None) for name in ("filters", "embeddings")}
        lists = {
            name: [per_prompt[name]] if single else one_per_prompt(per_prompt[name], len(texts), name)
            for name in per_prompt
        }
        compiled, stop = self._make_filters(json_schema, regex, grammar), materialize(stop)
        common = {name: materialize(value) for name, value in job_arguments.items()}
        jobs = []
        for i, text in enumerate(texts):
            ids, embeddings = self._encode(text, add_bos, encode_special_tokens, lists["embeddings"][i])
            filters = _combined_filters(lists["filters"][i], compiled)
            options = {**common, "embeddings": embeddings}
            jobs.append(
                self._make_job(ids, max_new_tokens, settings_list[i], stop, offset_seed(seed, i), filters, options)
            )
        completions = self._run(jobs)
        return completions[0] if single else completions

    def chat(
        self,
        messages: str | Messages,
        *,
        max_new_tokens: int | None = None,
        settings: Settings | None = None,
        stop: Stops = (),
        seed: int | None = None,
        json_schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        template: Mapping[str, Any] = NO_VARIABLES,
        **job_arguments: Any,
    ) -> Completion:
        """Complete a conversation, rendered with the model's chat template.

        `messages` is a list of {"role": …, "content": …}, or a str for a single user message. Earlier turns
        are found in the prefix cache, so that only the new turn is computed. `template` holds variables for
        the chat template, such as `tools` or `enable_thinking`; the rest is as in `generate`.
        """
        filters = _combined_filters(job_arguments.pop("filters", None), self._make_filters(json_schema, regex, grammar))
        ids, template_stops = self._encode_chat(messages, template, job_arguments)
        job = self._make_job(
            ids, max_new_tokens, settings, [*template_stops, *_stop_list(stop)], seed, filters, job_arguments
        )
        return self._run([job])[0]

    def stream(
        self,
        prompt: Prompt | Messages,
        *,
        max_new_tokens: int | None = None,
        settings: Settings | None = None,
        stop: Stops = (),
        seed: int | None = None,
        json_schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        add_bos: bool | None = None,
        encode_special_tokens: bool = False,
        template: Mapping[str, Any] = NO_VARIABLES,
        **job_arguments: Any,
    ) -> Stream:
        """A completion piece by piece: of a prompt, as in `generate`, or of a list of messages, as in `chat`.

        Nothing runs before the first piece is requested; a request that does not fit raises then.
        """
        filters = _combined_filters(job_arguments.pop("filters", None), self._make_filters(json_schema, regex, grammar))
        if isinstance(prompt, str | tuple):
            ids, job_arguments["embeddings"] = self._encode(
                prompt, add_bos, encode_special_tokens, job_arguments.get("embeddings")
            )
        else:
            ids, template_stops = self._encode_chat(prompt, template, job_arguments)
            stop = [*template_stops, *_stop_list(stop)]
        job = self._make_job(ids, max_new_tokens, settings, stop, seed, filters, job_arguments)
        return Stream(JobGroup(self.generator, [job], public_name="LLM"))

    def _run(self, jobs: Sequence[Job]) -> list[Completion]:
        """Run jobs in one batch; returns when all are finished."""
        last = JobGroup(self.generator, jobs, public_name="LLM").run()
        return [_completion(result) for result in last or ()]

    def _encode(
        self, prompt: Prompt, add_bos: bool | None, encode_special_tokens: bool, embeddings: Any
    ) -> tuple[list[Tensor], list[Any] | None]:
        """`encode_prompt`, by default with BOS if the tokenizer's files ask for it."""
        add_bos = self.tokenizer.wants_bos if add_bos is None else add_bos
        return encode_prompt(self.model, self.tokenizer, prompt, add_bos, encode_special_tokens, embeddings)

    def _encode_chat(
        self, messages: str | Messages, template: Mapping[str, Any], job_arguments: dict[str, Any]
    ) -> tuple[list[Tensor], list[int | str]]:
        """The ids of a conversation, and its stop conditions; `job_arguments` gets `MMEmbedding`s for tensors."""
        if not isinstance(template, Mapping):
            raise InputError(
                f"template holds variables for the chat template, as in {{'tools': []}}; found {template!r}. "
                "Another template is one of them: {'chat_template': 'chatml'}."
            )
        tools, name = template.get("tools"), template.get("chat_template")
        chat_template = self.tokenizer.chat_templates.choose(name, tools is not None)
        if "{" not in chat_template.source:
            names = ", ".join(self.tokenizer.chat_templates.names)
            raise InputError(f"No chat template is called {name!r}: give its source, or one of {names}.")
        if tools and "tools" not in chat_template.source:
            raise InputError(f"{chat_template.origin} has no place for tools: describe them in a system message.")
        text = self.tokenizer.apply_chat_template(_normalized_messages(messages), **template)
        embeddings = job_arguments.get("embeddings")
        if embeddings is not None:
            embeddings = job_arguments["embeddings"] = list(self.model.wrap_embeddings(text, embeddings))
        template_stops = chat_template.format.stop_conditions(self.tokenizer.single_id) if chat_template.format else []
        return [self.tokenizer.encode_rendered(text, chat_template.format, embeddings)], template_stops

    def _make_filters(self, json_schema: Any, regex: str | None, grammar: str | None) -> list[Filter]:
        """Filters for all jobs of a call; each job works on a copy.

        JSON has no optional white space, because small models would never stop writing it.
        """
        filters: list[Filter] = []
        if json_schema is not None:
            filters.append(JsonSchemaFilter(self.tokenizer, json_schema, compact=True))
        if regex is not None:
            filters.append(RegexFilter(self.tokenizer, regex))
        if grammar is not None:
            filters.append(GrammarFilter(self.tokenizer, grammar))
        return filters

    def _make_job(
        self,
        ids: list[Tensor],
        max_new_tokens: int | None,
        settings: Settings | None,
        stop: Stops,
        seed: int | None,
        filters: list[Any],
        job_arguments: Mapping[str, Any],
    ) -> Job:
        if duplicates := [name for name in RENAMED_ARGUMENTS if name in job_arguments]:
            raise InputError(f"{duplicates[0]} is given as {RENAMED_ARGUMENTS[duplicates[0]]} here.")
        if max_new_tokens is None:
            length = self.generator.max_sequence_length(len(ids))
            # At least 1: if nothing is left, the generator's error says how long the prompt is.
            max_new_tokens = max(1, min(DEFAULT_MAX_NEW_TOKENS, length - max(row.shape[1] for row in ids)))
        else:
            max_new_tokens = self.generator.cap_new_tokens(ids, max_new_tokens)
        eos_ids = [token for token in self.tokenizer.eos_token_ids if token < self.config.vocab_size]
        return Job(
            ids,
            max_new_tokens,
            gen_settings=settings,
            seed=seed,
            stop_conditions=[*eos_ids, *_stop_list(stop)],
            filters=filters,
            **job_arguments,
        )


def _make_config(
    model: str | Path | Config | None,
    max_seq_len: int | None,
    device: str | None,
    dtype: str | None,
    cpu_activation_bits: int | None,
    progress: bool,
) -> Config:
    config = model if isinstance(model, Config) else Config(find_model(model, progress=progress))
    config.device, config.dtype = device or config.device, dtype or config.dtype
    if cpu_activation_bits is not None:
        config.cpu_activation_bits = cpu_activation_bits
    if max_seq_len is not None:
        config.max_seq_len = max_seq_len
    elif config is not model:
        config.max_seq_len = min(config.max_seq_len, DEFAULT_MAX_SEQ_LEN)
    config.freeze()  # raises for an invalid combination before anything is loaded
    return config


def _load_model(config: Config, cache_class: type[CacheBase], tokens: int, progress: bool) -> tuple[Model, CacheBase]:
    model = Model(config)
    cache = cache_class(model, max_seq_len=tokens, lazy=True)
    model.load_autosplit(cache, progress=progress)
    return model, cache


def _combined_filters(given: Any, compiled: list[Filter]) -> list[Any]:
    return [*filter_tuple(given), *compiled]


def _stop_list(given: Any) -> list[Any]:
    """Stop conditions as a list: none, one or several."""
    is_collection = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    return [*given] if is_collection else [] if given is None else [given]


def _normalized_messages(messages: Any) -> Any:
    """A str as a user message; content None becomes "", since many templates would write "None"."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, list | tuple):
        return messages  # rendering raises the error
    return [
        {**message, "content": ""} if isinstance(message, Mapping) and message.get("content", "") is None else message
        for message in messages
    ]


def _completion(last: StreamingResult) -> Completion:
    """A completion from a job's last result."""
    job, reason = last["job"], last["eos_reason"]
    assert reason != "error"  # `JobGroup.next_result` raised the error
    ids = job.sequences[0].ids[job.prompt_tokens - job.token_healing :]
    return Completion(
        text=last["full_completion"],
        token_ids=tuple(ids[:-1] if reason == "stop_token" else ids),
        finish_reason=reason,
        prompt_tokens=last["prompt_tokens"],
        cached_tokens=last["cached_tokens"],
        new_tokens=last["new_tokens"],
        time_prefill=last["time_prefill"],
        time_generate=last["time_generate"],
        accepted_draft_tokens=last.get("accepted_draft_tokens", 0),
        rejected_draft_tokens=last.get("rejected_draft_tokens", 0),
    )
