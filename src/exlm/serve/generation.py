"""From a request to jobs: pure functions, which a server and a batch file use alike.

An `Order` holds the arguments of each job and what it takes to build an answer from their results. Whatever
can be refused before a job is queued is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

import torch

from exlm import Filter, GrammarFilter, JsonSchemaFilter, RegexFilter, Settings, Tokenizer

from .chat_prompt import ChatPrompt, render_chat
from .errors import APIError
from .limits import Limits
from .output_parser import OutputParser
from .prompts import (
    check_token_ids,
    encode_negative_prompt,
    encode_prompt,
    encode_prompts,
    prompt_list,
    prompt_text,
    tokens_left,
)
from .schema import OFF, BaseRequest, ChatRequest, CompletionRequest, JsonObjectFormat, JsonSchemaFormat
from .tool_formats import ToolFormat, answer_or_call_grammar

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "token_repetition_penalty": 1.0}
)
"""What the OpenAI API does where a request says nothing."""

OTHER_NAMES = {
    "frequency_penalty": "token_frequency_penalty",
    "presence_penalty": "token_presence_penalty",
    "repetition_penalty": "token_repetition_penalty",
}
NOT_IN_JSON = frozenset(
    (
        "mirostat_mu", "token_bias", "post_sampling_hooks", "ngram_trie", "ngram_index", "ngram_history",
        "filters", "filter_prefer_eos",
    )
)  # fmt: skip
"""Settings that are objects, unused, or said in another way."""

SETTINGS = tuple(one.name for one in fields(Settings) if one.name not in NOT_IN_JSON)
TOKEN_LISTS = ("dry_sequence_breakers", "xtc_ignore_tokens")

MAX_STRING_CHARS = 1 << 15
"""Characters of all stop and banned strings, times the texts: every job has an automaton of so many states,
and each of these takes 300 bytes."""


@dataclass(frozen=True)
class ModelInfo:
    """What a translation must know of a loaded model."""

    name: str
    tokenizer: Tokenizer
    max_seq_len: int
    """The longest sequence, prompt and answer together."""
    vocab_size: int
    loras: Mapping[str, Any] = field(default_factory=dict)
    has_draft: bool = False
    max_guided_len: int | None = None
    """The longest sequences of a guided pair, which share the cache; None is half the length."""


@dataclass(frozen=True)
class GenerationRequest:
    """Jobs, and how to answer with what they give."""

    kind: Literal["chat", "completion"]
    model: str
    tokenizer: Tokenizer
    job_arguments: tuple[Mapping[str, Any], ...]
    """Arguments of `Job`, one mapping for each text."""
    n: int = 1
    """How many texts each prompt has."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the usage."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens to tell with each token; None is not even the token's own."""
    echo: tuple[str, ...] = ()
    """What each text is preceded by in the answer."""
    chat: ChatPrompt | None = None
    max_tool_calls: int | None = None

    def parser(self) -> OutputParser:
        """How one of the answers is read."""
        talk = self.chat
        if talk is None:
            return OutputParser()
        return OutputParser(
            talk.tool_format,
            talk.tool_names,
            in_reasoning=talk.opens_reasoning,
            forced_call=talk.forced_call_schema is not None,
            max_calls=self.max_tool_calls,
        )


def needs_grammar(request: BaseRequest) -> bool:
    """Whether a request brings something that must be compiled, which may take a while."""
    format = getattr(request, "response_format", None)
    choice = getattr(request, "tool_choice", None)
    return (
        request.regex is not None
        or request.grammar is not None
        or isinstance(format, JsonObjectFormat | JsonSchemaFormat)
        or choice not in (None, "none", "auto")
    )


def to_generation_request(
    request: BaseRequest, model: ModelInfo, limits: Limits, salt: str = ""
) -> GenerationRequest:
    """The jobs of any request."""
    if isinstance(request, ChatRequest):
        return chat_generation_request(request, model, limits, salt)
    if isinstance(request, CompletionRequest):
        return completion_generation_request(request, model, limits, salt)
    raise TypeError(type(request).__name__)


def completion_generation_request(
    request: CompletionRequest, model: ModelInfo, limits: Limits, salt: str = ""
) -> GenerationRequest:
    """The jobs of a completion: `n` for each prompt."""
    if request.echo and request.logprobs is not None:
        raise APIError(400, "echo with logprobs is not supported: leave one of them out.", param="echo")
    _check_choices(request, len(prompt_list(request)) * request.n, limits)
    given, guide = encode_prompts(request, model), encode_negative_prompt(request, model)
    shared = _shared_arguments(
        request, model, limits, salt, _filters(request, model.tokenizer, limits), request.logprobs
    )
    jobs = [
        shared | _sequence_arguments(request, model, limits, [ids, *guide], place * request.n + i)
        for place, ids in enumerate(given)
        for i in range(request.n)
    ]
    echoes = [
        prompt_text(request, place, ids, model) if request.echo else "" for place, ids in enumerate(given)
    ]
    return GenerationRequest(
        kind="completion",
        model=model.name,
        tokenizer=model.tokenizer,
        job_arguments=tuple(jobs),
        n=request.n,
        stream=request.stream,
        include_usage=_wants_usage(request),
        top_logprobs=request.logprobs,
        echo=tuple(echo for echo in echoes for _ in range(request.n)),
    )


def chat_generation_request(
    request: ChatRequest, model: ModelInfo, limits: Limits, salt: str = ""
) -> GenerationRequest:
    """The jobs of a chat: `n` answers to one conversation."""
    if request.top_logprobs is not None and not request.logprobs:
        raise APIError(422, "top_logprobs needs logprobs: true.", param="top_logprobs")
    _check_choices(request, request.n, limits)
    chat = render_chat(request, model.tokenizer, model.name)
    if chat.tool_format is not None and (request.regex is not None or request.grammar is not None):
        raise APIError(422, "tools cannot be combined with regex or grammar.", param="tools")
    filters = _filters(request, model.tokenizer, limits)
    if filters:
        chat = chat.without_reasoning()
    if chat.forced_call_schema is not None:
        filters = [_schema_filter(model.tokenizer, chat.forced_call_schema, limits)]
    elif chat.tool_format is not None and chat.optional_call_schema is not None and filters:
        filters = [
            _answer_or_call_filter(
                request, chat.optional_call_schema, chat.tool_format, model.tokenizer, limits
            )
        ]
    halves = [encode_prompt(chat.text, model, "conversation"), *encode_negative_prompt(request, model)]
    top = (request.top_logprobs or 0) if request.logprobs else None
    shared = _shared_arguments(request, model, limits, salt, filters, top)
    if chat.tool_format is not None and chat.tool_format.start_marker:
        shared["decode_special_tokens"] = True  # what announces a call may be a special token
    return GenerationRequest(
        kind="chat",
        model=model.name,
        tokenizer=model.tokenizer,
        job_arguments=tuple(
            shared | _sequence_arguments(request, model, limits, halves, i) for i in range(request.n)
        ),
        n=request.n,
        stream=request.stream,
        include_usage=_wants_usage(request),
        top_logprobs=top,
        chat=chat,
        max_tool_calls=None if request.parallel_tool_calls else 1,
    )


def sampling_settings(request: BaseRequest, model: ModelInfo, limits: Limits) -> Settings:
    """The sampler settings a request asks for."""
    said = request.model_dump(include={*SETTINGS, *OTHER_NAMES}, exclude_none=True)
    for other, name in OTHER_NAMES.items():
        if other in said:
            if name in said:
                raise APIError(422, f"{other} and {name} are the same: give one.", param=other)
            said[name] = said.pop(other)
    said = {**NEUTRAL, **limits.sampling, **said}
    for name in TOKEN_LISTS:
        if name in said:
            said[name] = _token_ids(name, said[name], model)
    settings = Settings(**said)
    if request.logit_bias:
        settings.token_bias = _bias_tensor(request.logit_bias, model.vocab_size)
    settings.check()
    return settings


def _shared_arguments(
    request: BaseRequest,
    model: ModelInfo,
    limits: Limits,
    salt: str,
    filters: list[Filter],
    top_logprobs: int | None,
) -> dict[str, Any]:
    """What all jobs of a request have in common."""
    if request.speculative and not model.has_draft:
        raise APIError(422, f"{model.name} was loaded without a draft model.", param="speculative")
    ends = [number for number in model.tokenizer.eos_token_ids if number < model.vocab_size]
    check_token_ids(request.stop_token_ids, model.vocab_size, "stop_token_ids")
    if request.token_healing:
        model.tokenizer.get_prefix_id_to_ids_dict()  # built here, in a thread, before the job asks for it
    return {
        "gen_settings": sampling_settings(request, model, limits),
        "stop_conditions": [*ends, *request.stop_token_ids, *_stop_strings(request)],
        "min_new_tokens": request.min_tokens,
        "banned_strings": request.banned_strings,
        "filters": filters,
        "filter_prefer_eos": request.filter_prefer_eos,
        "token_healing": request.token_healing,
        "decode_special_tokens": not request.skip_special_tokens,
        "return_logits": top_logprobs is not None,
        "loras": _loras(request, model),
        "speculative": request.speculative is not False,
        "salt": salt,
    }


def _sequence_arguments(
    request: BaseRequest, model: ModelInfo, limits: Limits, input_ids: list[torch.Tensor], index: int
) -> dict[str, Any]:
    """What is a job's own."""
    longest = max(half.shape[1] for half in input_ids)
    room = model.max_seq_len
    if len(input_ids) == 2:
        room = model.max_seq_len // 2 if model.max_guided_len is None else model.max_guided_len
    left = tokens_left(longest, room)
    asked = getattr(request, "max_completion_tokens", None) or request.max_tokens
    if asked == OFF:
        asked = min(left, limits.tokens or left)
    if asked is not None and limits.tokens is not None and asked > limits.tokens:
        raise APIError(422, f"max_tokens is {asked}; the server allows {limits.tokens}.", param="max_tokens")
    if asked is not None and asked > left:
        raise APIError(
            400,
            f"{longest} prompt and {asked} new tokens exceed the context of {room}: {left} fit.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    new = asked or min(left, limits.answer, limits.tokens or left)
    if request.min_tokens > new:
        raise APIError(422, f"min_tokens is {request.min_tokens}, max_tokens {new}.", param="min_tokens")
    seed = None if request.seed is None else (request.seed + index) % 2**63
    return {"input_ids": input_ids, "max_new_tokens": new, "seed": seed}


def _filters(request: CompletionRequest | ChatRequest, tokenizer: Tokenizer, limits: Limits) -> list[Filter]:
    """What the answer must match; at most one thing, which is compiled here."""
    format = request.response_format
    given = [
        name for name, value in (("regex", request.regex), ("grammar", request.grammar)) if value is not None
    ]
    if isinstance(format, JsonObjectFormat | JsonSchemaFormat):
        given.append("response_format")
    if len(given) > 1:
        raise APIError(422, f"{' and '.join(given)} cannot be combined: give one.", param=given[0])
    for source in (request.regex, request.grammar):
        if source is not None:
            _check_grammar_size(source, limits)
    if request.regex is not None:
        return [RegexFilter(tokenizer, request.regex)]
    if request.grammar is not None:
        return [GrammarFilter(tokenizer, request.grammar)]
    if isinstance(format, JsonObjectFormat):
        return [JsonSchemaFilter(tokenizer, {"type": "object"})]
    if isinstance(format, JsonSchemaFormat):
        return [_schema_filter(tokenizer, format.json_schema.schema_, limits)]
    return []


def _answer_or_call_filter(
    request: ChatRequest, call: dict[str, Any], tool_format: ToolFormat, tokenizer: Tokenizer, limits: Limits
) -> Filter:
    """A call, or the answer that was asked for: agents that answer in JSON leave it to the model."""
    format = request.response_format
    answer = format.json_schema.schema_ if isinstance(format, JsonSchemaFormat) else {"type": "object"}
    special = {text: number for number, text in tokenizer.extended_id_to_piece.items()}
    grammar = answer_or_call_grammar(answer, call, tool_format, special, several=request.parallel_tool_calls)
    _check_grammar_size(grammar, limits)
    return GrammarFilter(tokenizer, grammar)


def _schema_filter(tokenizer: Tokenizer, schema: dict[str, Any], limits: Limits) -> Filter:
    _check_grammar_size(json.dumps(schema), limits)
    return JsonSchemaFilter(tokenizer, schema)


def _check_grammar_size(source: str, limits: Limits) -> None:
    if len(source) > limits.grammar:
        raise APIError(
            422, f"A schema, regex or grammar may have {limits.grammar} characters; found {len(source)}."
        )


def _check_choices(request: BaseRequest, count: int, limits: Limits) -> None:
    """Refuse too many texts, and too much to look for in each of them."""
    if count > limits.choices:
        raise APIError(
            422, f"The request asks for {count} texts; at most {limits.choices} at a time.", param="n"
        )
    found = sum(map(len, [*_stop_strings(request), *request.banned_strings]))
    if found * count > MAX_STRING_CHARS:
        raise APIError(
            422,
            f"stop and banned_strings have {found} characters in all; for {count} texts "
            f"{MAX_STRING_CHARS // count} are taken.",
            param="banned_strings" if request.banned_strings else "stop",
        )


def _stop_strings(request: BaseRequest) -> list[str]:
    return [request.stop] if isinstance(request.stop, str) else request.stop or []


def _loras(request: BaseRequest, model: ModelInfo) -> list[Any]:
    """Adapters by their registered names, perhaps each with its strength."""
    wanted = request.lora
    named: Mapping[str, float | None]
    if isinstance(wanted, dict):
        named = wanted
    else:
        named = dict.fromkeys([wanted] if isinstance(wanted, str) else wanted or [])
    if unknown := [name for name in named if name not in model.loras]:
        known = ", ".join(sorted(model.loras)) or "none"
        raise APIError(404, f"No adapter is called {unknown[0]!r}; there are: {known}.", param="lora")
    return [
        model.loras[name] if strength is None else (model.loras[name], strength)
        for name, strength in named.items()
    ]


def _token_ids(name: str, given: Sequence[int | str], model: ModelInfo) -> set[int]:
    """Token ids, some of them said as text."""
    out = set()
    for one in given:
        number = model.tokenizer.single_id(one) if isinstance(one, str) else one
        if number is None:
            raise APIError(422, f"{name}: no single token is {one!r}.", param=name)
        out.add(number)
    check_token_ids(out, model.vocab_size, name)
    return out


def _bias_tensor(asked: Mapping[str, float], vocab: int) -> torch.Tensor:
    bias = torch.zeros(vocab)
    for key, value in asked.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab):
            raise APIError(422, f"logit_bias: {key[:40]!r} is no token id below {vocab}.", param="logit_bias")
        bias[int(key)] = value
    return bias


def _wants_usage(request: BaseRequest) -> bool:
    if request.stream_options is not None and not request.stream:
        raise APIError(422, "stream_options needs stream: true.", param="stream_options")
    return request.stream_options is not None and request.stream_options.include_usage
