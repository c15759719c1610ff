"""From a request's messages and tools to the text a model reads, and to how its answer is to be read.

The model's own chat template does the writing. A template that has no place for tools gets them in the system
message, in a form most models understand. Nothing is tokenized here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exlm import ChatTemplateError, Tokenizer

from .errors import APIError
from .json_size import MIN_LIMIT, JsonLimits
from .output_parser import REASONING_END, REASONING_START
from .schema import AssistantMessage, ChatRequest, Content, Message, NamedTool, ToolMessage
from .tool_formats import HERMES, ToolFormat, call_schema, detect_tool_format, supports_tools

RESERVED_VARIABLES = frozenset(
    (
        "messages",
        "add_generation_prompt",
        "tools",
        "documents",
        "tokenize",
        "add_bos",
        "chat_template",
        "self",
    )
)
"""What a template is given anyway, or what would change who renders it."""

ARGUMENTS_LIMITS = JsonLimits(MIN_LIMIT, MIN_LIMIT)
"""How much JSON the arguments of all earlier calls may hold, which templates are given parsed."""

TOOL_INSTRUCTIONS = """You may call these functions, each described as JSON:
{tools}
To call one, answer with nothing but this, filled in:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt, and what its answer can look like."""

    text: str
    tool_format: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    forced_call_schema: dict[str, Any] | None = None
    """What the answer must be, where it must be a call."""
    optional_call_schema: dict[str, Any] | None = None
    """What a call looks like, where one may be made."""

    @property
    def opens_reasoning(self) -> bool:
        """Whether the answer begins inside a thought."""
        return self.text.rstrip().endswith(REASONING_START)

    def without_reasoning(self) -> ChatPrompt:
        """The same, for an answer that is held to a form from its first letter on: no thought fits in."""
        if not self.opens_reasoning:
            return self
        return replace(self, text=f"{self.text.rstrip()}\n{REASONING_END}\n\n")


def render_chat(request: ChatRequest, tokenizer: Tokenizer, name: str = "The model") -> ChatPrompt:
    """The prompt of a chat request; in errors the model is called by its `name`, not by where it lies."""
    try:
        return _render_chat(request, tokenizer)
    except ChatTemplateError as error:
        templates = tokenizer.chat_templates
        if not templates.templates:
            raise APIError(
                422,
                f"{name} has no chat template, so it reads no conversations: ask /v1/completions.",
                param="messages",
            ) from error
        raise ChatTemplateError(str(error).replace(templates.source_name, name)) from error


def _render_chat(request: ChatRequest, tokenizer: Tokenizer) -> ChatPrompt:
    variables = request.chat_template_kwargs or {}
    if taken := sorted(RESERVED_VARIABLES & variables.keys()):
        raise APIError(
            422, f"chat_template_kwargs may not hold {', '.join(taken)}.", param="chat_template_kwargs"
        )
    ARGUMENTS_LIMITS.check(*_call_arguments(request.messages), what="What earlier calls have as arguments")
    tools = _callable_tools(request)
    source = tokenizer.chat_templates.choose(None, tools is not None).source
    native = supports_tools(source)
    messages = template_messages(request.messages, native)
    if tools is None:
        return ChatPrompt(tokenizer.apply_chat_template(messages, **variables))
    style = detect_tool_format(source) if native else HERMES
    if native:
        text = tokenizer.apply_chat_template(messages, tools=tools, **variables)
    else:
        text = _render_with_tool_instructions(tokenizer, messages, tools, variables)
    names = frozenset(tool["function"]["name"] for tool in tools)
    if request.tool_choice in (None, "auto"):
        return ChatPrompt(text, style, names, optional_call_schema=call_schema(tools, style))
    text = ChatPrompt(text).without_reasoning().text
    return ChatPrompt(text + style.forced_prefix, style, names, call_schema(tools, style))


def template_messages(messages: Sequence[Message], native: bool = True) -> list[dict[str, Any]]:
    """Messages as chat templates expect them; calls and tools' answers as text unless it knows those."""
    out: list[dict[str, Any]] = []
    before: type | None = None
    for message in messages:
        plain: dict[str, Any] = {"role": message.role, "content": _content_text(message.content)}
        if message.role == "developer":
            plain["role"] = "system"
        if message.name is not None:
            plain["name"] = message.name
        if isinstance(message, AssistantMessage):
            _add_calls(plain, message, native)
        elif isinstance(message, ToolMessage):
            if native:
                plain["tool_call_id"] = message.tool_call_id
            else:
                plain |= {"role": "user", "content": f"<tool_response>\n{plain['content']}\n</tool_response>"}
                if before is ToolMessage:  # many templates insist that user and assistant take turns
                    plain["content"] = f"{out.pop()['content']}\n{plain['content']}"
        before = type(message)
        out.append(plain)
    return out


def _add_calls(plain: dict[str, Any], message: AssistantMessage, native: bool) -> None:
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    calls = [
        {"name": call.function.name, "arguments": _parse_arguments(call.function.arguments)}
        for call in message.tool_calls or ()
    ]
    if native and calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(message.tool_calls or (), calls, strict=True)
        ]
    elif calls:
        written = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
        plain["content"] = "\n".join([*([plain["content"]] if plain["content"] else []), *written])


def _callable_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that may be called, None if none may."""
    choice = request.tool_choice
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    if not tools:
        if choice not in (None, "none", "auto"):
            raise APIError(422, "tool_choice asks for a call, but there are no tools.", param="tool_choice")
        return None
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
        if not chosen:
            raise APIError(
                422, f"tool_choice: no tool is called {choice.function.name!r}.", param="tool_choice"
            )
        return chosen
    return tools


def _render_with_tool_instructions(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """The prompt of a template that has no place for tools.

    They are told in the system message, or, where the template takes none, in the user's first message.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = TOOL_INSTRUCTIONS.format(tools=listed)
    first, rest = messages[0], messages[1:]
    whole = [{"role": "system", "content": told}, *messages]
    if first["role"] == "system":
        whole = [{**first, "content": f"{first['content']}\n\n{told}"}, *rest]
    try:
        return str(tokenizer.apply_chat_template(whole, **variables))
    except ChatTemplateError:
        if first["role"] != "user":
            raise
        whole = [{**first, "content": f"{told}\n\n{first['content']}"}, *rest]
        return str(tokenizer.apply_chat_template(whole, **variables))


def _content_text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _call_arguments(messages: Sequence[Message]) -> Iterator[bytes]:
    """The arguments of the calls there were."""
    for message in messages:
        for call in (isinstance(message, AssistantMessage) and message.tool_calls) or ():
            yield call.function.arguments.encode("utf-8", "surrogatepass")


def _parse_arguments(arguments: str) -> Any:
    """What JSON text says; the text itself if it is none."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
