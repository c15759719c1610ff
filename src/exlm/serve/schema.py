"""What a request may say: the OpenAI API's fields, this library's own, and nothing else.

A field that is not here is refused by name. What fields mean together, and what a model can serve, is decided
in `translate`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, create_model, model_validator

from exlm.sampler_chain import SETTINGS, Bounds

from .strict import AtMost, Strict

LARGE = 2**31 - 1
OFF = -1
"""What many clients send for a `top_k` that cuts nothing off, for answers of any length and for any seed."""

Count = Annotated[int, Field(ge=0, le=LARGE)]
Real = Annotated[float, Field(ge=-1e5, le=1e5)]
Id = Annotated[int, Field(ge=0, le=LARGE, strict=True)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Phrase = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Json = Annotated[dict[str, Any], AtMost(4096)]
TokenIds = Annotated[list[Id], Field(min_length=1), AtMost(1 << 20)]
TokenSet = Annotated[list[Id | Phrase], AtMost(256)]
Likeliest = Annotated[int, Field(ge=OFF, le=LARGE), AfterValidator(lambda count: max(count, 0))]
NewTokens = Literal[-1] | Annotated[int, Field(ge=1, le=LARGE)]
Seed = Annotated[
    Annotated[int, Field(ge=-(2**63), lt=2**63)] | None,
    AfterValidator(lambda seed: None if seed == OFF else seed),
]


NOT_SERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
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
"""What else the OpenAI API has, and the values that ask for nothing; clients that write every field they know
send those, or null."""


MESSAGE = frozenset(
    (
        "annotations",
        "audio",
        "function_call",
        "name",
        "reasoning_content",
        "refusal",
        "tool_call_id",
        "tool_calls",
    )
)
PART = frozenset(("file", "image_url", "input_audio", "prompt_cache_breakpoint", "refusal"))


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
            kind = Likeliest if name == "top_k" else _number(kind, setting.api)
        fields[name] = (kind | None, None)
        if setting.openai_name is not None:
            openai[setting.openai_name] = (_number(setting.type, setting.openai_bounds) | None, None)
    return fields | openai


if TYPE_CHECKING:
    ChainSettings = Strict
else:
    ChainSettings = create_model("ChainSettings", __base__=Strict, **_sampler_fields())


class Sampling(ChainSettings):
    """Every sampler setting that JSON can say; None is the server's default."""


def web_panel_script() -> str:
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
                    "more": setting.web.more,
                    "min": (bounds.minimum or 0) + (0.01 if bounds.exclusive else 0),
                    "max": bounds.maximum,
                    "whole": setting.type is int,
                }
            )
    return f"export const SAMPLER_SETTINGS = {json.dumps(panel)};\n"


class StreamOptions(Strict):
    """What a stream brings besides text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Asking(Sampling):
    """What completions and chats have in common."""

    BESIDE = frozenset(NOT_SERVED)

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    max_tokens: NewTokens | None = None
    min_tokens: Count = 0
    seed: Seed = None
    stop: Phrase | Annotated[list[Phrase], AtMost(64)] | None = None
    stop_token_ids: Annotated[list[Id], AtMost(64)] = Field(default=[])
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AtMost(4096)] | None = None
    banned_strings: Annotated[list[Phrase], AtMost(256)] = Field(default=[])
    regex: str | None = None
    grammar: str | None = None
    filter_prefer_eos: bool = False
    negative_prompt: str | None = None
    token_healing: bool = False
    skip_special_tokens: bool = True
    speculative: bool | None = None
    lora: Name | Annotated[list[Name], AtMost(16)] | Annotated[dict[str, Real], AtMost(16)] | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=512)] | None = None
    metadata: Json | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothings(cls, given: Any) -> Any:
        """Fields that are not served may say that nothing is asked of them."""
        if not isinstance(given, dict):
            return given
        nothing = {**NOT_SERVED, "best_of": (1, given.get("n"))}  # the best n of n are all of them
        return {name: value for name, value in given.items() if value not in nothing.get(name, ())}


class CompletionRequest(Asking):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1), AtMost(1024)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1), AtMost(1024)]
    )
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_bos: bool | None = None
    encode_special_tokens: bool = False
    response_format: ResponseFormat | None = None


class TextFormat(Strict):
    """Any text."""

    BESIDE = frozenset(("json_schema",))

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Some JSON object."""

    BESIDE = frozenset(("json_schema",))

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema with a name."""

    name: Annotated[str, StringConstraints(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[Json, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """A JSON text that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class TextPart(Strict):
    """A piece of a message; the models served here read text only."""

    BESIDE = PART

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], AtMost(1024)]


class CalledFunction(Strict):
    """Which function, and its arguments as JSON text."""

    name: Annotated[str, StringConstraints(max_length=256)]
    arguments: str = "{}"
    parsed_arguments: Any = None
    provider_specific_fields: Json | None = None


class ToolCall(Strict):
    """A call the assistant made in an earlier turn; what was put together of a stream has its `index` too."""

    id: Annotated[str, StringConstraints(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    provider_specific_fields: Json | None = None


class SystemMessage(Strict):
    """Instructions."""

    BESIDE = MESSAGE

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Strict):
    """What the user said."""

    BESIDE = MESSAGE

    role: Literal["user"]
    content: Content
    name: Name | None = None


class AssistantMessage(Strict):
    """What the model said; clients give back whole replies, with fields that are empty here.

    What the official client has `parsed` is its own copy of what is in `content` and in `arguments`;
    `provider_specific_fields` are LiteLLM's notes on whom it asked.
    """

    BESIDE = MESSAGE

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    parsed: Any = None
    provider_specific_fields: Json | None = None
    refusal: None = None
    annotations: Annotated[list[Any], AtMost(0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], AtMost(128)] | None = None
    name: Name | None = None


class ToolMessage(Strict):
    """What a tool answered."""

    BESIDE = MESSAGE

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] = ""
    name: Name | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1), AtMost(10_000)]


class FunctionDefinition(Strict):
    """A function the model may call."""

    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Strict):
    """A function by name."""

    name: ToolName


class NamedTool(Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Asking):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: NewTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], AtMost(128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Json | None = None


class TokenizeRequest(Strict):
    """`POST /tokenize`: a text, or a conversation as the chat template writes it."""

    model: Name | None = None
    text: str | None = None
    messages: Messages | None = None
    add_bos: bool = False
    encode_special_tokens: bool = True


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[Id], AtMost(1 << 20)]
    decode_special_tokens: bool = True


class ModelRequest(Strict):
    """Which registered model to load or unload."""

    model: Name


class EmbeddingsRequest(BaseModel):
    """`POST /v1/embeddings`: whatever it says, it is refused."""


CompletionRequest.model_rebuild()
