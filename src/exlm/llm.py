"""LLM: one object that finds a model, loads it and answers.

The work is done by the parts it is made of, which stay within reach as `config`, `model`, `cache`,
`tokenizer` and `generator`. It adds defaults, chat templates and answers that are easy to hold; it is not
another generator, and what it does not offer is a `Job` away.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias, overload

import torch
from torch import Tensor

from .config import Config
from .constrained import Filter, GrammarFilter, JsonSchemaFilter, RegexFilter
from .errors import InputError, NotLoaded
from .generator import Generator, Job, StreamingResult
from .generator.generator import JobGroup
from .generator.job import materialize
from .hub import find_model
from .kvcache import CACHES, PAGE_SIZE, CacheBase
from .model import Model
from .sampling import Settings
from .tokenizer import Tokenizer
from .tokenizer.chat_template import PromptFormat

DEFAULT_MAX_SEQ_LEN = 8192
"""The longest sequence, prompt and answer together, unless the user says otherwise or the model has less."""

DEFAULT_MAX_NEW_TOKENS = 512
"""The longest answer in tokens, unless the user says otherwise or the context has less left."""

FinishReason = Literal["stop_token", "stop_string", "max_new_tokens", "end_filter"]
CacheType = Literal["fp16", "q8", "q6", "q4", "fp8"]
Prompt: TypeAlias = str | tuple[str, str]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Stops: TypeAlias = str | int | Iterable[str | int] | None

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})

RENAMED_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {"gen_settings": "settings", "stop_conditions": "stop", "input_ids": "the prompt"}
)
"""Arguments of a `Job` that go by another name here."""


@dataclass(frozen=True)
class Completion:
    """What a model said, and what it took; `str()` of it is the text.

    `token_ids` are the tokens behind the text: a stop token is not among them, those of a stop string are.
    `new_tokens` counts the stop token too. `cached_tokens` of the `prompt_tokens` were already in the cache.
    Times are in seconds.
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
    """An answer on its way: iterate for its pieces of text; `completion` is the whole of it at the end.

    To leave early, stop iterating and let go of it, or call `close()`, which another thread may do: the
    request is dropped.
    """

    _enqueued = False

    def __init__(self, group: JobGroup) -> None:
        """`group` is one job, which is enqueued when the first piece is asked for."""
        self.completion: Completion | None = None
        self._group = group
        self._token_ids: list[int] = []
        self._last: StreamingResult | None = None
        self._lock = threading.RLock()
        self._advancing = False  # the thread that holds the lock waits for a piece
        self._closed = False

    def __next__(self) -> str:
        with self._lock:
            piece = None if self._closed else self._next_piece()
        if piece is None or self._closed:  # looked at without the lock, so that a close() meanwhile is seen
            self.close()
            raise StopIteration
        return piece

    def __del__(self) -> None:
        """Drop the request at the next call: the garbage collector may come in the middle of a step."""
        if self._enqueued and self._group.unfinished:
            self._group.abandon()

    def close(self) -> None:
        """Drop the request if it is still running; while a thread waits for a piece, once it has come."""
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
                    self._token_ids += _token_ids(result)
                    if text := result.get("text"):
                        return text
            if self._last is not None:
                self.completion = _completion(self._last, self._token_ids)
            return None
        except BaseException:
            self._closed = True
            self._group.cancel()
            raise
        finally:
            self._advancing = False


class LLM:
    """A loaded model and everything it takes to ask it.

    `model` is a folder, a .gguf file, `owner/name` on the Hub, None for the small default model, or a Config
    of your own, whose length is then taken as it is. `max_seq_len` bounds a prompt and its answer together;
    without it, what the model was made for but at most 8192. `cache_tokens` is the room that all requests
    share, in whole pages of 256; without it, one sequence of that length. `cache_type` says how it is stored:
    "fp16" is sixteen bits, on a CPU too, the others are smaller. `draft` is a smaller model with the same
    vocabulary that guesses ahead, or "ngram"; both change the speed and never a greedy text.
    `device` and `dtype` are as in `Config`, `max_batch_size` as in `Generator`; `progress` shows bars.

    Calls from several threads take turns.
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
    ) -> None:
        if cache_type not in CACHES:
            raise InputError(f"cache_type must be one of {', '.join(CACHES)}, found {cache_type!r}.")
        self.config = _make_config(model, max_seq_len, device, dtype, progress)
        self.tokenizer = Tokenizer(self.config)
        num_tokens = self.config.max_seq_len if cache_tokens is None else cache_tokens
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 1:
            raise InputError(f"cache_tokens must be a whole number of at least 1, found {num_tokens!r}.")
        tokens = -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
        draft_options: dict[str, Any] = {"use_ngram_draft": draft == "ngram"}
        if draft is not None and draft != "ngram":
            # A guess beyond the length a small model was made for costs a little time and nothing else.
            draft_config = _make_config(draft, self.config.max_seq_len, device, dtype, progress)
            self.tokenizer.check_draft(draft_config)
            draft_parts = _load_model(draft_config, CACHES[cache_type], tokens, progress)
            draft_options = dict(zip(("draft_model", "draft_cache"), draft_parts, strict=True))
        loaded, cache = _load_model(self.config, CACHES[cache_type], tokens, progress)
        self._generator: Generator | None = Generator(
            loaded, cache, self.tokenizer, max_batch_size=max_batch_size, **draft_options
        )

    @property
    def generator(self) -> Generator:
        """What runs the requests."""
        if self._generator is None:
            raise NotLoaded("This LLM was closed: make another one.")
        return self._generator

    @property
    def model(self) -> Model:
        """The weights."""
        model: Model = self.generator.model
        return model

    @property
    def cache(self) -> CacheBase:
        """Where keys and values are kept, for every request."""
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

    # Asking

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
        """Continue a text, or a list of texts in one batch; a list gives a list, in the same order.

        An answer ends at one of the model's EOS tokens, at a `stop` (a string, a token id, or several), or
        after `max_new_tokens`: without a number 512, or what the context has left. `settings` is for all
        prompts, or a list with one for each; None is `Settings()`. Prompt i uses seed + i. `json_schema`,
        `regex` and `grammar` make every answer match. A BOS comes first if the tokenizer's files want one, or
        as `add_bos` says. Special tokens written in a prompt are plain text unless `encode_special_tokens`.
        A pair of prompts is guided by `settings.cfg_scale`. Further arguments are `Job`'s; `filters` and
        `embeddings` are lists, or for a list of prompts lists of lists.
        """
        single = isinstance(prompts, str | tuple)
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
            raise InputError(f"Give a prompt or a list of them; found {type(prompts).__name__}.")
        texts: list[Any] = [prompts] if single else list(prompts)
        settings_list = _values_per_prompt("settings", settings, len(texts))
        per_prompt = {name: job_arguments.pop(name, None) for name in ("filters", "embeddings")}
        lists = {
            name: [per_prompt[name]] if single else _values_per_prompt(name, per_prompt[name], len(texts))
            for name in per_prompt
        }
        embeddings = [
            _wrapped_embeddings(self.model, *pair) for pair in zip(texts, lists["embeddings"], strict=True)
        ]
        compiled, stop = self._make_filters(json_schema, regex, grammar), materialize(stop)
        common = {name: materialize(value) for name, value in job_arguments.items()}
        jobs = [
            self._make_job(
                self._encode(text, add_bos, encode_special_tokens, embeddings[i]),
                max_new_tokens,
                settings_list[i],
                stop,
                seed + i if isinstance(seed, Integral) else seed,
                _combined_filters(lists["filters"][i], compiled),
                {**common, "embeddings": embeddings[i]},
            )
            for i, text in enumerate(texts)
        ]
        completions = self._run_to_end(jobs)
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
        """Answer a conversation, written as the model's chat template writes it.

        `messages` is a list of {"role": …, "content": …}, or a str for a single message of the user. What was
        said before is found in the cache, so a turn costs only itself. `template` holds variables for the
        chat template, such as `tools` or `enable_thinking`; the rest is as in `generate`.
        """
        filters = _combined_filters(
            job_arguments.pop("filters", None), self._make_filters(json_schema, regex, grammar)
        )
        ids, template_stops = self._encode_chat(messages, template, job_arguments)
        job = self._make_job(
            ids, max_new_tokens, settings, [*template_stops, *_stop_list(stop)], seed, filters, job_arguments
        )
        return self._run_to_end([job])[0]

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
        """The answer piece by piece, as it is made: a str is continued, a list of messages is answered.

        Nothing runs before the first piece is asked for; what does not fit the model is refused then.
        """
        filters = _combined_filters(
            job_arguments.pop("filters", None), self._make_filters(json_schema, regex, grammar)
        )
        if isinstance(prompt, str | tuple):
            embeddings = _wrapped_embeddings(self.model, prompt, job_arguments.get("embeddings"))
            job_arguments["embeddings"] = embeddings
            ids = self._encode(prompt, add_bos, encode_special_tokens, embeddings)
        else:
            ids, template_stops = self._encode_chat(prompt, template, job_arguments)
            stop = [*template_stops, *_stop_list(stop)]
        job = self._make_job(ids, max_new_tokens, settings, stop, seed, filters, job_arguments)
        return Stream(self._group([job]))

    # From a wish to a job

    def _group(self, jobs: Sequence[Job]) -> JobGroup:
        return JobGroup(self.generator, jobs, owner="LLM")

    def _run_to_end(self, jobs: Sequence[Job]) -> list[Completion]:
        """Run these jobs in one batch; returns when all are finished."""
        group = self._group(jobs)
        token_ids: dict[Job, list[int]] = {job: [] for job in jobs}
        last: dict[Job, StreamingResult] = {}
        try:
            group.enqueue()
            while group.unfinished:
                result = group.next_result()
                if result is not None and result["stage"] == "streaming":
                    last[result["job"]] = result
                    token_ids[result["job"]] += _token_ids(result)
        finally:
            group.cancel()
        return [_completion(last[job], token_ids[job]) for job in jobs]

    def _encode(
        self, prompt: Prompt, add_bos: bool | None, special: bool, embeddings: Sequence[Any] | None
    ) -> list[Tensor]:
        """The ids of a prompt, or of both halves of a pair."""
        halves = prompt if isinstance(prompt, tuple) else (prompt,)
        if not all(isinstance(half, str) for half in halves):
            raise InputError(f"A prompt is a string, or a pair of strings for guidance; found {prompt!r}.")
        if add_bos is None:
            add_bos = self.tokenizer.wants_bos
        return [
            self.tokenizer.encode(half, add_bos=add_bos, encode_special_tokens=special, embeddings=embeddings)
            for half in halves
        ]

    def _encode_chat(
        self, messages: str | Messages, template: Mapping[str, Any], job_arguments: dict[str, Any]
    ) -> tuple[list[Tensor], list[int | str]]:
        """The ids of a conversation, vectors among the job's arguments in their place, and what ends it."""
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
            raise InputError(
                f"{chat_template.origin} has no place for tools: tell of them in a system message."
            )
        text = self.tokenizer.apply_chat_template(_normalized_messages(messages), **template)
        embeddings = job_arguments["embeddings"] = _wrapped_embeddings(
            self.model, text, job_arguments.get("embeddings")
        )
        template_stops = (
            chat_template.format.stop_conditions(self.tokenizer.single_id) if chat_template.format else []
        )
        return [_encode_chat(self.tokenizer, text, chat_template.format, embeddings)], template_stops

    def _make_filters(self, json_schema: Any, regex: str | None, grammar: str | None) -> list[Filter]:
        """Compiled once for a call: every job works on a copy of its own.

        JSON comes without optional white space, which small models would never stop writing.
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
            # Where nothing is left the generator refuses the job, and says how long the prompt is.
            max_new_tokens = max(1, min(DEFAULT_MAX_NEW_TOKENS, length - max(half.shape[1] for half in ids)))
        else:
            max_new_tokens = self.generator.cap_new_tokens(ids, max_new_tokens)
        eos_ids = [number for number in self.tokenizer.eos_token_ids if number < self.config.vocab_size]
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
    progress: bool,
) -> Config:
    config = model if isinstance(model, Config) else Config(find_model(model, progress=progress))
    config.device, config.dtype = device or config.device, dtype or config.dtype
    if max_seq_len is not None:
        config.max_seq_len = max_seq_len
    elif config is not model:
        config.max_seq_len = min(config.max_seq_len, DEFAULT_MAX_SEQ_LEN)
    config.freeze()  # refuses what cannot be, before anything is made of it
    return config


def _load_model(
    config: Config, cache_class: type[CacheBase], tokens: int, progress: bool
) -> tuple[Model, CacheBase]:
    model = Model(config)
    cache = cache_class(model, max_seq_len=tokens, lazy=True)
    model.load_autosplit(cache, progress=progress)
    return model, cache


def _values_per_prompt(name: str, values: Any, count: int) -> list[Any]:
    """One value for each prompt; settings, and nothing at all, are for all of them."""
    if values is None or isinstance(values, Settings):
        return [values] * count
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        one = "Settings, or " if name == "settings" else ""
        found = len(values) if isinstance(values, list | tuple) else type(values).__name__
        raise InputError(
            f"{name} must be {one}a list with one entry for each of {count} prompts, found {found}."
        )
    return list(values)


def _combined_filters(given: Any, compiled: list[Filter]) -> list[Any]:
    """The filters that were given, and those that were made."""
    if given is not None and not isinstance(given, list | tuple):
        raise InputError(f"filters must be a list, found {type(given).__name__}: write [filter].")
    return [*(given or ()), *compiled]


def _wrapped_embeddings(model: Model, prompt: Any, embeddings: Any) -> list[Any] | None:
    """What a prompt may name in place of tokens, bare vectors wrapped; None if there is nothing."""
    if embeddings is None:
        return None
    text = prompt[0] if isinstance(prompt, tuple) and prompt else prompt
    return list(model.wrap_embeddings(text, embeddings))


def _stop_list(given: Any) -> list[Any]:
    """What ends an answer: none, one or several."""
    is_collection = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    return [*given] if is_collection else [] if given is None else [given]


def _encode_chat(
    tokenizer: Tokenizer, text: str, chat_format: PromptFormat | None, embeddings: Any
) -> Tensor:
    """The ids of a conversation; a format by name also says how its text is encoded."""
    special = chat_format is None or chat_format.encode_special_tokens
    ids = tokenizer.encode(text, encode_special_tokens=special, embeddings=embeddings)
    bos = tokenizer.bos_token_id
    if chat_format is not None and chat_format.add_bos and bos is not None and ids[0, :1].tolist() != [bos]:
        ids = torch.cat((torch.tensor([[bos]]), ids), dim=1)
    return ids


def _normalized_messages(messages: Any) -> Any:
    """A str as the user's message, and no content as an empty one: many templates would write None."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, list | tuple):
        return messages  # those who render it say what is wrong
    return [
        {**one, "content": ""} if isinstance(one, Mapping) and one.get("content", "") is None else one
        for one in messages
    ]


def _token_ids(result: StreamingResult) -> list[int]:
    """The tokens behind the text of one result; often none."""
    found: list[int] = result["token_ids"][0].tolist() if "token_ids" in result else []
    return found


def _completion(last: StreamingResult, tokens: Iterable[int]) -> Completion:
    """A job's last result, in short."""
    reason = last["eos_reason"]
    assert reason != "error"  # raised where it was read
    return Completion(
        text=last["full_completion"],
        token_ids=tuple(tokens),
        finish_reason=reason,
        prompt_tokens=last["prompt_tokens"],
        cached_tokens=last["cached_tokens"],
        new_tokens=last["new_tokens"],
        time_prefill=last["time_prefill"],
        time_generate=last["time_generate"],
        accepted_draft_tokens=last.get("accepted_draft_tokens", 0),
        rejected_draft_tokens=last.get("rejected_draft_tokens", 0),
    )
