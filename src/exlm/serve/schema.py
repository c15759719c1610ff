"""The JSON of the API: what requests may contain, and what responses contain.

Request bodies are parsed into the pydantic models: the OpenAI API's fields, this library's own, and nothing
else. An unknown field is refused by name. Lists and objects are bounded before they are validated, because
validation blocks every other thread of the process and each error takes a kilobyte. What fields mean
together, and what a model can serve, is decided in `generation` and in the dialect.

Responses are typed dictionaries, which are plain dictionaries at run time, because a stream writes one for
every token. mypy checks what `openai` and the routes return against them, and FastAPI derives the published
description from both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NotRequired, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    create_model,
    model_validator,
    with_config,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from exlm.sampler_chain import SETTINGS, Bounds

MAX_UNKNOWN_FIELDS = 20
"""How many unknown fields of an object are named in errors."""


@dataclass(frozen=True)
class MaxItems:
    """Bounds a list or an object: its items are counted before any of them is validated.

    The validation of a list stops at the first wrong item.
    """

    items: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        inner: Any = handler(source)
        inner["max_length"] = self.items
        if inner["type"] == "list":
            inner["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._check_count, inner)

    def _check_count(self, given: Any) -> Any:
        if isinstance(given, list | dict) and len(given) > self.items:
            raise PydanticCustomError(
                "too_long", "At most {most} items are taken, found {found}", {"most": self.items, "found": len(given)}
            )
        return given


class StrictModel(BaseModel):
    """Refuses unknown fields. A field that is null counts as left out, which is what clients mean by it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    IGNORED_NULLS: ClassVar[frozenset[str]] = frozenset()
    """Unknown fields that are ignored if they are null."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields, unknown, kept = _field_names(cls), 0, {}
        for name, value in given.items():
            if value is None and (name in fields or name in cls.IGNORED_NULLS):
                continue
            if name not in fields:
                unknown += 1
                if unknown > MAX_UNKNOWN_FIELDS:
                    continue
            kept[name] = value
        return kept


@cache
def _field_names(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


INT32_MAX = 2**31 - 1
DISABLED = -1
"""Many clients send -1 for a disabled `top_k`, an unlimited `max_tokens` or a random `seed`."""

NonNegative = Annotated[int, Field(ge=0, le=INT32_MAX)]
LoraScale = Annotated[float, Field(ge=-1e5, le=1e5)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX, strict=True)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
JsonObject = Annotated[dict[str, Any], MaxItems(4096)]
TokenIds = Annotated[list[TokenId], Field(min_length=1), MaxItems(1 << 20)]
TokenSet = Annotated[list[TokenId | ShortText], MaxItems(256)]
TopK = Annotated[int, Field(ge=DISABLED, le=INT32_MAX), AfterValidator(lambda count: max(count, 0))]
NewTokens = Literal[-1] | Annotated[int, Field(ge=1, le=INT32_MAX)]
Seed = Annotated[
    Annotated[int, Field(ge=-(2**63), lt=2**63)] | None, AfterValidator(lambda seed: None if seed == DISABLED else seed)
]


NO_OP_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "function_call": (),
        "functions": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "store": (False,),
        "suffix": ("",),
        "verbosity": (),
        "web_search_options": (),
    }
)
"""Fields of the OpenAI API that are not supported, and their values that have no effect: these, and null, are
accepted, because some clients send every field they know."""

MESSAGE_NULLS = frozenset(
    ("annotations", "audio", "function_call", "name", "reasoning_content", "refusal", "tool_call_id", "tool_calls")
)
"""Fields that some kind of message has: clients with one class for all of them send the others as null."""
PART_NULLS = frozenset(("file", "image_url", "input_audio", "prompt_cache_breakpoint", "refusal"))
"""The same for the parts of a message."""


def _number(kind: type, bounds: Bounds) -> Any:
    low, high = bounds.minimum, bounds.maximum
    return Annotated[kind, Field(gt=low, le=high) if bounds.exclusive else Field(ge=low, le=high)]


def _sampler_fields() -> dict[str, Any]:
    """Every setting of the sampler's chain within the API's bounds, and OpenAI's names for some of them."""
    fields: dict[str, Any] = {}
    openai: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        kind: Any = setting.type
        if kind is frozenset:
            kind = TokenSet
        elif setting.is_number:
            kind = TopK if name == "top_k" else _number(kind, setting.api)
        fields[name] = (kind | None, None)
        if setting.openai_name is not None:
            openai[setting.openai_name] = (_number(setting.type, setting.openai_bounds) | None, None)
    return fields | openai


if TYPE_CHECKING:
    ChainSettings = StrictModel
else:
    ChainSettings = create_model("ChainSettings", __base__=StrictModel, **_sampler_fields())


class Sampling(ChainSettings):
    """Every sampler setting that can be written in JSON; None is the server's default."""


def sampler_settings_script() -> str:
    """A script module for the web page: the sampler settings of its panel, in the order of the chain."""
    panel = []
    for name, setting in SETTINGS.items():
        if setting.web is not None:
            bounds = setting.api if setting.openai_name is None else setting.openai_bounds
            panel.append(
                {
                    "name": setting.openai_name or name,
                    "label": setting.web.label,
                    "hint": setting.web.hint,
                    "more": setting.web.folded,
                    "min": (bounds.minimum or 0) + (0.01 if bounds.exclusive else 0),
                    "max": bounds.maximum,
                    "whole": setting.type is int,
                }
            )
    return f"export const SAMPLER_SETTINGS = {json.dumps(panel)};\n"


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class BaseRequest(Sampling):
    """The fields that completions and chats have in common."""

    IGNORED_NULLS = frozenset(NO_OP_VALUES)

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    max_tokens: NewTokens | None = None
    min_tokens: NonNegative = 0
    seed: Seed = None
    stop: ShortText | Annotated[list[ShortText], MaxItems(64)] | None = None
    stop_token_ids: Annotated[list[TokenId], MaxItems(64)] = Field(default=[])
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], MaxItems(4096)] | None = None
    banned_strings: Annotated[list[ShortText], MaxItems(256)] = Field(default=[])
    regex: str | None = None
    grammar: str | None = None
    filter_prefer_eos: bool = False
    negative_prompt: str | None = None
    token_healing: bool = False
    skip_special_tokens: bool = True
    speculative: bool | None = None
    lora: Name | Annotated[list[Name], MaxItems(16)] | Annotated[dict[str, LoraScale], MaxItems(16)] | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=512)] | None = None
    metadata: JsonObject | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, given: Any) -> Any:
        """Drop unsupported fields whose values have no effect."""
        if not isinstance(given, dict):
            return given
        no_ops = {**NO_OP_VALUES, "best_of": (1, given.get("n"))}  # the best n of n are all of them
        return {name: value for name, value in given.items() if value not in no_ops.get(name, ())}


class TextFormat(StrictModel):
    """Any text."""

    IGNORED_NULLS = frozenset(("json_schema",))

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    IGNORED_NULLS = frozenset(("json_schema",))

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON schema with a name."""

    name: Annotated[str, StringConstraints(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """A JSON text that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class CompletionRequest(BaseRequest):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1), MaxItems(1024)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1), MaxItems(1024)]
    )
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_bos: bool | None = None
    encode_special_tokens: bool = False
    response_format: ResponseFormat | None = None


class TextPart(StrictModel):
    """A part of a message; the models served here read text only."""

    IGNORED_NULLS = PART_NULLS

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], MaxItems(1024)]


class CalledFunction(StrictModel):
    """A function's name, and its arguments as JSON text."""

    name: Annotated[str, StringConstraints(max_length=256)]
    arguments: str = "{}"
    parsed_arguments: Any = None
    provider_specific_fields: JsonObject | None = None


class ToolCall(StrictModel):
    """A tool call of an earlier turn; one that was assembled from a stream has an `index`, too."""

    id: Annotated[str, StringConstraints(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    provider_specific_fields: JsonObject | None = None


class SystemMessage(StrictModel):
    """Instructions."""

    IGNORED_NULLS = MESSAGE_NULLS

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(StrictModel):
    """A message of the user."""

    IGNORED_NULLS = MESSAGE_NULLS

    role: Literal["user"]
    content: Content
    name: Name | None = None


class AssistantMessage(StrictModel):
    """What the model answered; clients send complete replies back, with fields that are empty here.

    `parsed` is the official client's own copy of what is in `content` and in `arguments`;
    `provider_specific_fields` are LiteLLM's notes on the provider.
    """

    IGNORED_NULLS = MESSAGE_NULLS

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    parsed: Any = None
    provider_specific_fields: JsonObject | None = None
    refusal: None = None
    annotations: Annotated[list[Any], MaxItems(0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], MaxItems(128)] | None = None
    name: Name | None = None


class ToolMessage(StrictModel):
    """A tool's result."""

    IGNORED_NULLS = MESSAGE_NULLS

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] = ""
    name: Name | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1), MaxItems(10_000)]


class FunctionDefinition(StrictModel):
    """A function the model may call."""

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(StrictModel):
    """A function by name."""

    name: ToolName


class NamedTool(StrictModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(BaseRequest):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: NewTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], MaxItems(128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: JsonObject | None = None


OpenAIRequest = ChatRequest | CompletionRequest
"""The two forms of a request to which the dialects convert theirs."""


class TokenizeRequest(StrictModel):
    """`POST /tokenize`: a text, or a conversation as the chat template renders it."""

    model: Name | None = None
    text: str | None = None
    messages: Messages | None = None
    add_bos: bool = False
    encode_special_tokens: bool = True


class DetokenizeRequest(StrictModel):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], MaxItems(1 << 20)]
    decode_special_tokens: bool = True


class ModelRequest(StrictModel):
    """A registered model to load or unload."""

    model: Name


class EmbeddingsRequest(BaseModel):
    """`POST /v1/embeddings`, which is always refused."""


T = TypeVar("T")
Omittable = Annotated[T | None, Field(json_schema_extra={"default": None})]
"""A field of a stream's events that is left out where an event does not change it."""


@with_config(ConfigDict(extra="forbid"))
class ResponseObject(TypedDict):
    """An object in a response, which has no other fields than those it declares."""


class ErrorDetail(ResponseObject):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(ResponseObject):
    """The body of every refused or failed request."""

    error: ErrorDetail


class CachedTokens(ResponseObject):
    """How many tokens of the prompt the prefix cache had."""

    cached_tokens: int


class CompletionDetails(ResponseObject):
    """How many draft tokens of speculative decoding were accepted and rejected."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(ResponseObject):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class Timings(ResponseObject):
    """Seconds; of the slowest text where a request has several."""

    queue_seconds: float
    prompt_seconds: float
    generation_seconds: float
    tokens_per_second: float


class TopLogprob(ResponseObject):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The sampled token, and the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseObject):
    """Log probabilities of every token of the answer."""

    content: list[TokenLogprob]


class FunctionCall(ResponseObject):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReply(ResponseObject):
    """A tool call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(ResponseObject):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallReply] | None]


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(ResponseObject):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatReply(ResponseObject):
    """The response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class FunctionDelta(ResponseObject):
    """More of a function call."""

    name: NotRequired[Omittable[str]]
    arguments: str


class ToolCallDelta(ResponseObject):
    """More of a tool call."""

    index: int
    id: NotRequired[Omittable[str]]
    type: NotRequired[Omittable[Literal["function"]]]
    function: FunctionDelta


class ChatDelta(ResponseObject):
    """More of a message."""

    role: NotRequired[Omittable[Literal["assistant"]]]
    content: NotRequired[Omittable[str]]
    reasoning_content: NotRequired[Omittable[str]]
    tool_calls: NotRequired[Omittable[list[ToolCallDelta]]]


class ChatChunkChoice(ResponseObject):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: NotRequired[Omittable[ChatLogprobs]]
    finish_reason: FinishReason | None


class ChatChunk(ResponseObject):
    """An event of a stream of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Omittable[Usage]]
    timings: NotRequired[Omittable[Timings]]


class CompletionLogprobs(ResponseObject):
    """Log probabilities of every token of the text, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ResponseObject):
    """One continuation, or more of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionReply(ResponseObject):
    """The response of `/v1/completions`, or an event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings | None]


class ModelCard(ResponseObject):
    """A registered model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    loaded: bool
    max_model_len: int | None
    loras: list[str]


class ModelList(ResponseObject):
    """The response of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(ResponseObject):
    """The response of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(ResponseObject):
    """The response of `/detokenize`."""

    text: str


class HealthReply(ResponseObject):
    """The process is alive, or the engine ready."""

    status: Literal["alive", "ready"]


class StateReply(ResponseObject):
    """The response of `/v1/internal/state`."""

    models: list[dict[str, Any]]
    requests: dict[str, int]
