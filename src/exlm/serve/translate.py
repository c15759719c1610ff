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
from exlm.sampler_chain import SETTINGS as CHAIN_SETTINGS

from .conversation import Conversation, conversation
from .limits import Bounds
from .parse import Parser
from .problems import Problem
from .prompts import check_ids, check_room, encoded, listed, negative, prompts, text_of
from .schema import OFF, Asking, ChatRequest, CompletionRequest, JsonObjectFormat, JsonSchemaFormat
from .styles import Style, either

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        name: int(setting.neutral) if setting.type is int else float(setting.neutral)
        for name, setting in CHAIN_SETTINGS.items()
        if setting.neutral is not None and getattr(Settings, name) != setting.neutral
    }
)
"""What the OpenAI API does where a request says nothing: the settings whose defaults are not neutral."""

OTHER_NAMES = {
    setting.openai_name: name for name, setting in CHAIN_SETTINGS.items() if setting.openai_name is not None
}
NOT_IN_JSON = frozenset(one.name for one in fields(Settings)) - CHAIN_SETTINGS.keys()
"""Settings that are objects, unused, or said in another way."""

SETTINGS = tuple(one.name for one in fields(Settings) if one.name in CHAIN_SETTINGS)
TOKEN_LISTS = tuple(name for name in SETTINGS if CHAIN_SETTINGS[name].type is frozenset)

LONGEST_STRINGS = 1 << 15
"""Characters of all stop and banned strings, times the texts: every job has an automaton of so many states,
and each of these takes 300 bytes."""


@dataclass(frozen=True)
class Host:
    """What a translation must know of a loaded model."""

    name: str
    tokenizer: Tokenizer
    length: int
    """The longest sequence, prompt and answer together."""
    vocab: int
    loras: Mapping[str, Any] = field(default_factory=dict)
    drafts: bool = False
    pair: int | None = None
    """The longest sequences of a guided pair, which share the cache; None is half the length."""


@dataclass(frozen=True)
class Order:
    """Jobs, and how to answer with what they give."""

    kind: Literal["chat", "completion"]
    model: str
    tokenizer: Tokenizer
    jobs: tuple[Mapping[str, Any], ...]
    """Arguments of `Job`, one mapping for each text."""
    n: int = 1
    """How many texts each prompt has."""
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the usage."""
    top: int | None = None
    """How many of the likeliest tokens to tell with each token; None is not even the token's own."""
    prefixes: tuple[str, ...] = ()
    """What each text is preceded by in the answer."""
    talk: Conversation | None = None
    most_calls: int | None = None

    def parser(self) -> Parser:
        """How one of the answers is read."""
        talk = self.talk
        if talk is None:
            return Parser()
        return Parser(
            talk.style,
            talk.names,
            thinking=talk.thinking,
            forced=talk.schema is not None,
            most=self.most_calls,
        )


def needs_grammar(request: Asking) -> bool:
    """Whether a request brings something that must be compiled, which may take a while."""
    format = getattr(request, "response_format", None)
    choice = getattr(request, "tool_choice", None)
    return (
        request.regex is not None
        or request.grammar is not None
        or isinstance(format, JsonObjectFormat | JsonSchemaFormat)
        or choice not in (None, "none", "auto")
    )


def order_of(request: Asking, host: Host, bounds: Bounds, salt: str = "") -> Order:
    """The jobs of any request."""
    if isinstance(request, ChatRequest):
        return chat_order(request, host, bounds, salt)
    if isinstance(request, CompletionRequest):
        return completion_order(request, host, bounds, salt)
    raise TypeError(type(request).__name__)


def completion_order(request: CompletionRequest, host: Host, bounds: Bounds, salt: str = "") -> Order:
    """The jobs of a completion: `n` for each prompt."""
    if request.echo and request.logprobs is not None:
        raise Problem(400, "echo with logprobs is not supported: leave one of them out.", param="echo")
    _check_choices(request, len(listed(request)) * request.n, bounds)
    given, guide = prompts(request, host), negative(request, host)
    shared = _shared(request, host, bounds, salt, _filters(request, host.tokenizer, bounds), request.logprobs)
    jobs = [
        shared | _own(request, host, bounds, [ids, *guide], place * request.n + i)
        for place, ids in enumerate(given)
        for i in range(request.n)
    ]
    echoes = [text_of(request, place, ids, host) if request.echo else "" for place, ids in enumerate(given)]
    return Order(
        kind="completion",
        model=host.name,
        tokenizer=host.tokenizer,
        jobs=tuple(jobs),
        n=request.n,
        stream=request.stream,
        usage=_wants_usage(request),
        top=request.logprobs,
        prefixes=tuple(echo for echo in echoes for _ in range(request.n)),
    )


def chat_order(request: ChatRequest, host: Host, bounds: Bounds, salt: str = "") -> Order:
    """The jobs of a chat: `n` answers to one conversation."""
    if request.top_logprobs is not None and not request.logprobs:
        raise Problem(422, "top_logprobs needs logprobs: true.", param="top_logprobs")
    _check_choices(request, request.n, bounds)
    talk = conversation(request, host.tokenizer, host.name)
    if talk.style is not None and (request.regex is not None or request.grammar is not None):
        raise Problem(422, "tools cannot be combined with regex or grammar.", param="tools")
    filters = _filters(request, host.tokenizer, bounds)
    if filters:
        talk = talk.unthinking()
    if talk.schema is not None:
        filters = [_schema_filter(host.tokenizer, talk.schema, bounds)]
    elif talk.style is not None and talk.call is not None and filters:
        filters = [_either_filter(request, talk.call, talk.style, host.tokenizer, bounds)]
    halves = [encoded(talk.text, host, "conversation"), *negative(request, host)]
    top = (request.top_logprobs or 0) if request.logprobs else None
    shared = _shared(request, host, bounds, salt, filters, top)
    if talk.style is not None and talk.style.opens:
        shared["decode_special_tokens"] = True  # what announces a call may be a special token
    return Order(
        kind="chat",
        model=host.name,
        tokenizer=host.tokenizer,
        jobs=tuple(shared | _own(request, host, bounds, halves, i) for i in range(request.n)),
        n=request.n,
        stream=request.stream,
        usage=_wants_usage(request),
        top=top,
        talk=talk,
        most_calls=None if request.parallel_tool_calls else 1,
    )


def settings_of(request: Asking, host: Host, bounds: Bounds) -> Settings:
    """The sampler settings a request asks for."""
    said = request.model_dump(include={*SETTINGS, *OTHER_NAMES}, exclude_none=True)
    for other, name in OTHER_NAMES.items():
        if other in said:
            if name in said:
                raise Problem(422, f"{other} and {name} are the same: give one.", param=other)
            said[name] = said.pop(other)
    said = {**NEUTRAL, **bounds.sampling, **said}
    for name in TOKEN_LISTS:
        if name in said:
            said[name] = _tokens(name, said[name], host)
    settings = Settings(**said)
    if request.logit_bias:
        settings.token_bias = _bias(request.logit_bias, host.vocab)
    settings.check()
    return settings


def _shared(
    request: Asking, host: Host, bounds: Bounds, salt: str, filters: list[Filter], top: int | None
) -> dict[str, Any]:
    """What all jobs of a request have in common."""
    if request.speculative and not host.drafts:
        raise Problem(422, f"{host.name} was loaded without a draft model.", param="speculative")
    ends = [number for number in host.tokenizer.eos_token_ids if number < host.vocab]
    check_ids(request.stop_token_ids, host.vocab, "stop_token_ids")
    if request.token_healing:
        host.tokenizer.get_prefix_id_to_ids_dict()  # built here, in a thread, before the job asks for it
    return {
        "gen_settings": settings_of(request, host, bounds),
        "stop_conditions": [*ends, *request.stop_token_ids, *_stop_strings(request)],
        "min_new_tokens": request.min_tokens,
        "banned_strings": request.banned_strings,
        "filters": filters,
        "filter_prefer_eos": request.filter_prefer_eos,
        "token_healing": request.token_healing,
        "decode_special_tokens": not request.skip_special_tokens,
        "return_logits": top is not None,
        "loras": _loras(request, host),
        "speculative": request.speculative is not False,
        "salt": salt,
    }


def _own(
    request: Asking, host: Host, bounds: Bounds, halves: list[torch.Tensor], place: int
) -> dict[str, Any]:
    """What is a job's own."""
    longest = max(half.shape[1] for half in halves)
    room = host.length
    if len(halves) == 2:
        room = host.length // 2 if host.pair is None else host.pair
    left = check_room(longest, room)
    asked = getattr(request, "max_completion_tokens", None) or request.max_tokens
    if asked == OFF:
        asked = min(left, bounds.tokens or left)
    if asked is not None and bounds.tokens is not None and asked > bounds.tokens:
        raise Problem(422, f"max_tokens is {asked}; the server allows {bounds.tokens}.", param="max_tokens")
    if asked is not None and asked > left:
        raise Problem(
            400,
            f"{longest} prompt and {asked} new tokens exceed the context of {room}: {left} fit.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    new = asked or min(left, bounds.answer, bounds.tokens or left)
    if request.min_tokens > new:
        raise Problem(422, f"min_tokens is {request.min_tokens}, max_tokens {new}.", param="min_tokens")
    seed = None if request.seed is None else (request.seed + place) % 2**63
    return {"input_ids": halves, "max_new_tokens": new, "seed": seed}


def _filters(request: CompletionRequest | ChatRequest, tokenizer: Tokenizer, bounds: Bounds) -> list[Filter]:
    """What the answer must match; at most one thing, which is compiled here."""
    format = request.response_format
    given = [
        name for name, value in (("regex", request.regex), ("grammar", request.grammar)) if value is not None
    ]
    if isinstance(format, JsonObjectFormat | JsonSchemaFormat):
        given.append("response_format")
    if len(given) > 1:
        raise Problem(422, f"{' and '.join(given)} cannot be combined: give one.", param=given[0])
    for source in (request.regex, request.grammar):
        if source is not None:
            _check_size(source, bounds)
    if request.regex is not None:
        return [RegexFilter(tokenizer, request.regex)]
    if request.grammar is not None:
        return [GrammarFilter(tokenizer, request.grammar)]
    if isinstance(format, JsonObjectFormat):
        return [JsonSchemaFilter(tokenizer, {"type": "object"})]
    if isinstance(format, JsonSchemaFormat):
        return [_schema_filter(tokenizer, format.json_schema.schema_, bounds)]
    return []


def _either_filter(
    request: ChatRequest, call: dict[str, Any], style: Style, tokenizer: Tokenizer, bounds: Bounds
) -> Filter:
    """A call, or the answer that was asked for: agents that answer in JSON leave it to the model."""
    format = request.response_format
    answer = format.json_schema.schema_ if isinstance(format, JsonSchemaFormat) else {"type": "object"}
    special = {text: number for number, text in tokenizer.extended_id_to_piece.items()}
    grammar = either(answer, call, style, special, several=request.parallel_tool_calls)
    _check_size(grammar, bounds)
    return GrammarFilter(tokenizer, grammar)


def _schema_filter(tokenizer: Tokenizer, schema: dict[str, Any], bounds: Bounds) -> Filter:
    _check_size(json.dumps(schema), bounds)
    return JsonSchemaFilter(tokenizer, schema)


def _check_size(source: str, bounds: Bounds) -> None:
    if len(source) > bounds.grammar:
        raise Problem(
            422, f"A schema, regex or grammar may have {bounds.grammar} characters; found {len(source)}."
        )


def _check_choices(request: Asking, count: int, bounds: Bounds) -> None:
    """Refuse too many texts, and too much to look for in each of them."""
    if count > bounds.choices:
        raise Problem(
            422, f"The request asks for {count} texts; at most {bounds.choices} at a time.", param="n"
        )
    found = sum(map(len, [*_stop_strings(request), *request.banned_strings]))
    if found * count > LONGEST_STRINGS:
        raise Problem(
            422,
            f"stop and banned_strings have {found} characters in all; for {count} texts "
            f"{LONGEST_STRINGS // count} are taken.",
            param="banned_strings" if request.banned_strings else "stop",
        )


def _stop_strings(request: Asking) -> list[str]:
    return [request.stop] if isinstance(request.stop, str) else request.stop or []


def _loras(request: Asking, host: Host) -> list[Any]:
    """Adapters by their registered names, perhaps each with its strength."""
    wanted = request.lora
    named: Mapping[str, float | None]
    if isinstance(wanted, dict):
        named = wanted
    else:
        named = dict.fromkeys([wanted] if isinstance(wanted, str) else wanted or [])
    if unknown := [name for name in named if name not in host.loras]:
        known = ", ".join(sorted(host.loras)) or "none"
        raise Problem(404, f"No adapter is called {unknown[0]!r}; there are: {known}.", param="lora")
    return [
        host.loras[name] if strength is None else (host.loras[name], strength)
        for name, strength in named.items()
    ]


def _tokens(name: str, given: Sequence[int | str], host: Host) -> set[int]:
    """Token ids, some of them said as text."""
    out = set()
    for one in given:
        number = host.tokenizer.single_id(one) if isinstance(one, str) else one
        if number is None:
            raise Problem(422, f"{name}: no single token is {one!r}.", param=name)
        out.add(number)
    check_ids(out, host.vocab, name)
    return out


def _bias(asked: Mapping[str, float], vocab: int) -> torch.Tensor:
    bias = torch.zeros(vocab)
    for key, value in asked.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab):
            raise Problem(422, f"logit_bias: {key[:40]!r} is no token id below {vocab}.", param="logit_bias")
        bias[int(key)] = value
    return bias


def _wants_usage(request: Asking) -> bool:
    if request.stream_options is not None and not request.stream:
        raise Problem(422, "stream_options needs stream: true.", param="stream_options")
    return request.stream_options is not None and request.stream_options.include_usage
