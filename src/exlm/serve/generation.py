"""What the engine runs and what it gives back: `GenerationRequest` and `OutputDelta`.

`to_generation_request` makes a `GenerationRequest` from a request in OpenAI's form, to which the other dialects
convert theirs: it encodes prompts within the model's context, compiles filters, and makes the arguments of each
`Job`: sampler settings, stop conditions, adapters, lengths, seeds. Everything that can be refused before a job is
queued is refused here, with an `APIError`. `output_delta` turns each result of a job into what it adds to its text.
Nothing here knows HTTP or the engine, so batches use it too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

import torch

from exlm import Filter, Generator, GrammarFilter, JsonSchemaFilter, RegexFilter, Settings, Tokenizer
from exlm.sampler_chain import SETTINGS as CHAIN_SETTINGS

from .chat_prompt import ChatPrompt, render_chat
from .errors import APIError
from .limits import Limits
from .output_parser import OutputParser
from .schema import (
    DISABLED,
    BaseRequest,
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    OpenAIRequest,
)
from .tool_formats import ToolFormat, answer_or_call_grammar

API_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        name: int(setting.neutral) if setting.type is int else float(setting.neutral)
        for name, setting in CHAIN_SETTINGS.items()
        if setting.neutral is not None and getattr(Settings, name) != setting.neutral
    }
)
"""Sampler settings of the OpenAI API where a request sets none: those whose defaults are not neutral."""

OPENAI_NAMES = {
    setting.openai_name: name for name, setting in CHAIN_SETTINGS.items() if setting.openai_name is not None
}
SETTINGS = tuple(field.name for field in fields(Settings) if field.name in CHAIN_SETTINGS)
TOKEN_SET_SETTINGS = frozenset(name for name in SETTINGS if CHAIN_SETTINGS[name].type is frozenset)

MAX_STRING_CHARS = 1 << 15
"""Characters of all stop and banned strings, times the number of texts: every job has an automaton with one
state of 300 bytes for each character."""

SLICE_CHARS = 1 << 14
"""Characters tokenised at a time by `exceeds_token_count`."""
EXTRA_TOKENS_PER_SLICE = 16
"""Tokens that cutting words at the ends of a slice may add to its count."""
MIN_TOKENIZE_LIMIT = 1 << 17
"""Tokens that /tokenize and /detokenize accept at least, even if the context is shorter."""


@dataclass(frozen=True)
class ModelInfo:
    """The facts about a loaded model from which requests are made and checked."""

    name: str
    tokenizer: Tokenizer
    max_seq_len: int
    """The longest sequence, prompt and answer together."""
    vocab_size: int
    loras: Mapping[str, Any] = field(default_factory=dict)
    """Adapters by name."""
    has_draft: bool = False
    max_cfg_len: int | None = None
    """The longest sequence where classifier-free guidance runs two, which share the cache; None is half of
    `max_seq_len`."""

    @classmethod
    def from_generator(cls, name: str, generator: Generator, loras: Mapping[str, Any]) -> ModelInfo:
        return cls(
            name=name,
            tokenizer=generator.tokenizer,
            max_seq_len=generator.max_sequence_length(),
            max_cfg_len=generator.max_sequence_length(2),
            vocab_size=generator.model.config.vocab_size,
            loras=loras,
            has_draft=generator.num_draft_tokens > 0,
        )


@dataclass(frozen=True)
class GenerationRequest:
    """What the engine runs, and what a dialect's writer needs to know to write the response."""

    model: str
    tokenizer: Tokenizer
    job_arguments: tuple[Mapping[str, Any], ...]
    """Arguments of `Job`, one mapping for each text."""
    n: int = 1
    """Texts for each prompt."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the usage."""
    top_logprobs: int | None = None
    """How many of the most likely tokens to report with each token; None reports no log probabilities."""
    echo: tuple[str, ...] = ()
    """What precedes each text in the response; empty, or one for each text."""
    chat: ChatPrompt | None = None
    """The conversation's prompt and tools; None for a completion."""
    max_tool_calls: int | None = None


def to_generation_request(
    request: OpenAIRequest, model: ModelInfo, limits: Limits, salt: str = ""
) -> GenerationRequest:
    """The generation request of a chat or a completion; `salt` keeps callers' prefix caches apart."""
    if isinstance(request, ChatRequest):
        return _chat_generation_request(request, model, limits, salt)
    return _completion_generation_request(request, model, limits, salt)


def _chat_generation_request(request: ChatRequest, model: ModelInfo, limits: Limits, salt: str) -> GenerationRequest:
    if request.top_logprobs is not None and not request.logprobs:
        raise APIError(422, "top_logprobs needs logprobs: true.", param="top_logprobs")
    _check_text_count(request, request.n, limits)
    chat = render_chat(request, model.tokenizer, model.name)
    tool_format = chat.tool_format
    if tool_format is not None and (request.regex is not None or request.grammar is not None):
        raise APIError(422, "tools cannot be combined with regex or grammar.", param="tools")
    filters = _output_filters(request, model.tokenizer, limits)
    if filters:
        chat = chat.without_reasoning()
    if chat.forced_call_schema is not None:
        filters = [_schema_filter(model.tokenizer, chat.forced_call_schema, limits)]
    elif tool_format is not None and chat.optional_call_schema is not None and filters:
        filters = [_answer_or_call_filter(request, chat.optional_call_schema, tool_format, model.tokenizer, limits)]
    prompt = _encode_prompt(chat.text, model, "conversation")
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    jobs = _job_arguments(request, model, limits, salt, [prompt], filters, top_logprobs)
    if tool_format is not None and tool_format.start_marker:
        for job in jobs:
            job["decode_special_tokens"] = True  # the marker that starts a call may be a special token
    return GenerationRequest(
        model=model.name,
        tokenizer=model.tokenizer,
        job_arguments=tuple(jobs),
        n=request.n,
        stream=request.stream,
        include_usage=_include_usage(request),
        top_logprobs=top_logprobs,
        chat=chat,
        max_tool_calls=None if request.parallel_tool_calls else 1,
    )


def _completion_generation_request(
    request: CompletionRequest, model: ModelInfo, limits: Limits, salt: str
) -> GenerationRequest:
    if request.echo and request.logprobs is not None:
        raise APIError(400, "echo with logprobs is not supported: leave one of them out.", param="echo")
    given: Any = request.prompt
    prompts: list[str | list[int]] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    _check_text_count(request, len(prompts) * request.n, limits)
    bos = model.tokenizer.wants_bos if request.add_bos is None else request.add_bos
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encoded.append(_encode_prompt(prompt, model, "prompt", special=request.encode_special_tokens, bos=bos))
        else:
            _tokens_left(len(prompt), model.max_seq_len)
            check_token_ids(prompt, model.vocab_size, "prompt")
            encoded.append(torch.tensor([prompt], dtype=torch.long))
    filters = _output_filters(request, model.tokenizer, limits)
    echo: list[str] = []
    if request.echo:
        for prompt, ids in zip(prompts, encoded, strict=True):
            text = prompt if isinstance(prompt, str) else str(model.tokenizer.decode(ids[0]))
            echo += [text] * request.n
    return GenerationRequest(
        model=model.name,
        tokenizer=model.tokenizer,
        job_arguments=tuple(_job_arguments(request, model, limits, salt, encoded, filters, request.logprobs)),
        n=request.n,
        stream=request.stream,
        include_usage=_include_usage(request),
        top_logprobs=request.logprobs,
        echo=tuple(echo),
    )


def make_output_parser(request: GenerationRequest) -> OutputParser:
    """A parser for one answer of a chat."""
    chat = request.chat
    assert chat is not None
    return OutputParser(
        chat.tool_format,
        chat.tool_names,
        in_reasoning=chat.opens_reasoning,
        forced_call=chat.forced_call_schema is not None,
        max_calls=request.max_tool_calls,
    )


def needs_grammar(request: OpenAIRequest) -> bool:
    """Whether the request has a schema, regex or grammar to compile, which may take a while."""
    return (
        request.regex is not None
        or request.grammar is not None
        or isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat)
        or (isinstance(request, ChatRequest) and request.tool_choice not in (None, "none", "auto"))
    )


def tokenize_limit(context: int) -> int:
    """How many tokens /tokenize and /detokenize accept."""
    return max(context, MIN_TOKENIZE_LIMIT)


def exceeds_token_count(text: str, tokenizer: Tokenizer, max_tokens: int, special: bool) -> bool:
    """Whether a text certainly has more than `max_tokens` tokens, found out without tokenising all of it.

    Tokenising takes about a microsecond for each character and a hundred bytes for each token. The number of
    characters alone does not decide: some vocabularies have tokens of 128 spaces, some normalisers collapse
    whitespace, and some models make one token of any run of unknown letters. So a long text is counted slice by
    slice. One for which this is False has at most a quarter more than `max_tokens`, and a few more for each slice.
    `special`: special tokens in the text count as such.
    """
    if len(text) <= SLICE_CHARS:
        return False
    encode = tokenizer.encode_special if special else tokenizer.encode_unspecial
    counted, bound = 0, max_tokens + max_tokens // 4
    for start in range(0, len(text), SLICE_CHARS):
        counted += len(encode(text[start : start + SLICE_CHARS]))
        bound += EXTRA_TOKENS_PER_SLICE
        if counted > bound:
            return True
    return False


def _encode_prompt(text: str, model: ModelInfo, what: str, *, special: bool = True, bos: bool = False) -> torch.Tensor:
    """The ids (1, n) of a prompt; `what` names it in an error."""
    if exceeds_token_count(text, model.tokenizer, model.max_seq_len, special):
        raise _context_exceeded(
            f"The {what} has more tokens than the context, which has {model.max_seq_len}: shorten it."
        )
    return model.tokenizer.encode(text, add_bos=bos, encode_special_tokens=special)


def _tokens_left(count: int, context: int) -> int:
    """How many tokens a prompt of `count` tokens leaves for the answer: at least one, else it is refused."""
    if count >= context:
        raise _context_exceeded(f"The prompt has {count} tokens and the context {context}: shorten it.")
    return context - count


def check_token_ids(ids: Collection[int], vocab: int, name: str) -> None:
    """Refuse token ids outside of the vocabulary; `name` is the request's field."""
    if ids and max(ids) >= vocab:
        raise APIError(422, f"{name}: token {max(ids)} is outside the vocabulary of {vocab}.", param=name)


def _context_exceeded(message: str) -> APIError:
    return APIError(400, message, code="context_length_exceeded")


def sampling_settings(request: BaseRequest, model: ModelInfo, limits: Limits) -> Settings:
    """The sampler settings of a request: its own, else the server's, else the OpenAI API's."""
    values = request.model_dump(include={*SETTINGS, *OPENAI_NAMES}, exclude_none=True)
    for openai_name, name in OPENAI_NAMES.items():
        if openai_name in values:
            if name in values:
                raise APIError(422, f"{openai_name} and {name} are the same: give one.", param=openai_name)
            values[name] = values.pop(openai_name)
    values = {**API_DEFAULTS, **limits.sampling, **values}
    for name in sorted(TOKEN_SET_SETTINGS & values.keys()):
        values[name] = _token_ids(name, values[name], model)
    settings = Settings(**values)
    if request.logit_bias:
        settings.token_bias = _bias_tensor(request.logit_bias, model.vocab_size)
    settings.check()
    return settings


def _job_arguments(
    request: OpenAIRequest,
    model: ModelInfo,
    limits: Limits,
    salt: str,
    prompts: Sequence[torch.Tensor],
    filters: list[Filter],
    top_logprobs: int | None,
) -> list[dict[str, Any]]:
    """The arguments of the jobs: `n` for each prompt."""
    if request.speculative and not model.has_draft:
        raise APIError(422, f"{model.name} was loaded without a draft model.", param="speculative")
    negative = []
    if request.negative_prompt is not None:
        negative.append(_encode_prompt(request.negative_prompt, model, "negative prompt"))
    eos = [token_id for token_id in model.tokenizer.eos_token_ids if token_id < model.vocab_size]
    check_token_ids(request.stop_token_ids, model.vocab_size, "stop_token_ids")
    if request.token_healing:
        model.tokenizer.get_prefix_id_to_ids_dict()  # built in this thread, not when the job needs it
    shared = {
        "gen_settings": sampling_settings(request, model, limits),
        "stop_conditions": [*eos, *request.stop_token_ids, *_stop_strings(request)],
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
    jobs: list[dict[str, Any]] = []
    for prompt in prompts:
        input_ids = [prompt, *negative]
        max_new_tokens = _max_new_tokens(request, model, limits, input_ids)
        for _ in range(request.n):
            seed = None if request.seed is None else (request.seed + len(jobs)) % 2**63
            jobs.append({**shared, "input_ids": input_ids, "max_new_tokens": max_new_tokens, "seed": seed})
    return jobs


def _max_new_tokens(request: OpenAIRequest, model: ModelInfo, limits: Limits, input_ids: list[torch.Tensor]) -> int:
    """The length of an answer to a prompt: what the request asks for, if the context and the server allow it."""
    longest = max(ids.shape[1] for ids in input_ids)
    context = model.max_seq_len
    if len(input_ids) == 2:
        context = model.max_seq_len // 2 if model.max_cfg_len is None else model.max_cfg_len
    left = _tokens_left(longest, context)
    max_tokens = (isinstance(request, ChatRequest) and request.max_completion_tokens) or request.max_tokens
    if max_tokens == DISABLED:
        max_tokens = min(left, limits.tokens or left)
    if max_tokens is not None and limits.tokens is not None and max_tokens > limits.tokens:
        raise APIError(422, f"max_tokens is {max_tokens}; the server allows {limits.tokens}.", param="max_tokens")
    if max_tokens is not None and max_tokens > left:
        raise APIError(
            400,
            f"{longest} prompt and {max_tokens} new tokens exceed the context of {context}: {left} fit.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    new = max_tokens or min(left, limits.answer, limits.tokens or left)
    if request.min_tokens > new:
        raise APIError(422, f"min_tokens is {request.min_tokens}, max_tokens {new}.", param="min_tokens")
    return new


def _output_filters(request: OpenAIRequest, tokenizer: Tokenizer, limits: Limits) -> list[Filter]:
    """The filter for a regex, grammar or response format; a request may have one of them. Compiles it."""
    format = request.response_format
    given = [name for name, value in (("regex", request.regex), ("grammar", request.grammar)) if value is not None]
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
    """Either a tool call or an answer in the response format: the model decides which."""
    format = request.response_format
    answer = format.json_schema.schema_ if isinstance(format, JsonSchemaFormat) else {"type": "object"}
    special = {text: token_id for token_id, text in tokenizer.extended_id_to_piece.items()}
    grammar = answer_or_call_grammar(answer, call, tool_format, special, several=request.parallel_tool_calls)
    _check_grammar_size(grammar, limits)
    return GrammarFilter(tokenizer, grammar)


def _schema_filter(tokenizer: Tokenizer, schema: dict[str, Any], limits: Limits) -> Filter:
    _check_grammar_size(json.dumps(schema), limits)
    return JsonSchemaFilter(tokenizer, schema)


def _check_grammar_size(source: str, limits: Limits) -> None:
    if len(source) > limits.grammar:
        raise APIError(422, f"A schema, regex or grammar may have {limits.grammar} characters; found {len(source)}.")


def _check_text_count(request: OpenAIRequest, count: int, limits: Limits) -> None:
    """Refuse too many texts, and too many stop and banned strings for that many texts."""
    if count > limits.choices:
        raise APIError(422, f"The request asks for {count} texts; at most {limits.choices} at a time.", param="n")
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
    """The adapters a request names, with their strengths where it sets them."""
    lora = [request.lora] if isinstance(request.lora, str) else request.lora or []
    named: Mapping[str, float | None] = lora if isinstance(lora, dict) else dict.fromkeys(lora)
    if unknown := [name for name in named if name not in model.loras]:
        known = ", ".join(sorted(model.loras)) or "none"
        raise APIError(404, f"No adapter is called {unknown[0]!r}; there are: {known}.", param="lora")
    return [
        model.loras[name] if strength is None else (model.loras[name], strength) for name, strength in named.items()
    ]


def _token_ids(name: str, given: Sequence[int | str], model: ModelInfo) -> set[int]:
    """Token ids, of which some may be given as the text of one token."""
    out = set()
    for one in given:
        token_id = model.tokenizer.single_id(one) if isinstance(one, str) else one
        if token_id is None:
            raise APIError(422, f"{name}: no single token is {one!r}.", param=name)
        out.add(token_id)
    check_token_ids(out, model.vocab_size, name)
    return out


def _bias_tensor(logit_bias: Mapping[str, float], vocab_size: int) -> torch.Tensor:
    bias = torch.zeros(vocab_size)
    for key, value in logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise APIError(422, f"logit_bias: {key[:40]!r} is no token id below {vocab_size}.", param="logit_bias")
        bias[int(key)] = value
    return bias


def _include_usage(request: OpenAIRequest) -> bool:
    """Whether a stream is to end with the usage."""
    if request.stream_options is not None and not request.stream:
        raise APIError(422, "stream_options needs stream: true.", param="stream_options")
    return request.stream_options is not None and request.stream_options.include_usage


FINISH_REASONS: Mapping[str, Literal["stop", "length"]] = {
    "stop_token": "stop",
    "stop_string": "stop",
    "end_filter": "stop",
    "max_new_tokens": "length",
}
"""`eos_reason` of a job's last result, and the OpenAI API's word for it."""
MIN_LOGPROB = -9999.0
"""Written instead of minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class TokenLogprobs:
    """A token, its log probability, and the most likely tokens with theirs."""

    text: str
    logprob: float
    top_logprobs: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class FinishInfo:
    """Why a text ended, and its token counts and times."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    seconds: tuple[float, float, float]
    """In the queue, in prefill, in generation."""
    stop_string: str | None = None
    """The stop string that ended the text, which some dialects report."""


@dataclass(frozen=True)
class OutputDelta:
    """What one result of a job adds to its text; only the last one has `finish`."""

    text: str = ""
    tokens: tuple[TokenLogprobs, ...] = ()
    finish: FinishInfo | None = None


def output_delta(result: Mapping[str, Any], request: GenerationRequest) -> OutputDelta | None:
    """What a job's result adds to its text; None if nothing. Raises the error of a failed job."""
    if result["stage"] != "streaming":
        return None
    if "error" in result:
        raise result["error"]
    tokens: tuple[TokenLogprobs, ...] = ()
    if request.top_logprobs is not None and "logits" in result:
        tokens = _sampled_tokens(result, request)
    finish = None
    if result["eos"]:
        finish = FinishInfo(
            reason=FINISH_REASONS[result["eos_reason"]],
            prompt_tokens=result["prompt_tokens"],
            cached_tokens=result["cached_tokens"],
            new_tokens=result["new_tokens"],
            accepted_draft_tokens=result.get("accepted_draft_tokens", 0),
            rejected_draft_tokens=result.get("rejected_draft_tokens", 0),
            seconds=(result["time_enqueued"], result["time_prefill"], result["time_generate"]),
            stop_string=result.get("eos_triggering_string"),
        )
    text = result.get("text", "")
    return OutputDelta(text, tokens, finish) if text or tokens or finish else None


def _sampled_tokens(result: Mapping[str, Any], request: GenerationRequest) -> tuple[TokenLogprobs, ...]:
    """The model's own log probabilities, before any sampler setting."""
    pieces = request.tokenizer.get_id_to_piece_list(include_special_tokens=True)
    logprobs = torch.log_softmax(result["logits"][0].float(), dim=-1)
    best = torch.topk(logprobs, min(request.top_logprobs or 0, logprobs.shape[-1]), dim=-1)

    def text(token_id: int) -> str:
        return pieces[token_id] if token_id < len(pieces) else ""

    out = []
    for row, token_id in enumerate(result["token_ids"][0].tolist()):
        best_row = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        top = tuple((text(one), max(logprob, MIN_LOGPROB)) for one, logprob in best_row)
        out.append(TokenLogprobs(text(token_id), max(float(logprobs[row, token_id]), MIN_LOGPROB), top))
    return tuple(out)
