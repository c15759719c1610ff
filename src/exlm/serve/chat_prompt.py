"""From a chat request's messages and tools to the prompt's text, and how to parse the answer.

The model's own chat template renders the prompt. If the template ignores tools, they are described in the
system message, in a form that most models understand. Nothing is tokenised here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exlm import ChatTemplateError, Tokenizer

from .errors import APIError
from .limits import MIN_JSON_LIMIT, JsonLimits
from .output_parser import REASONING_END, REASONING_START
from .schema import AssistantMessage, ChatRequest, Content, Message, NamedTool, ToolMessage
from .tool_formats import HERMES, ToolFormat, call_schema, detect_tool_format, supports_tools

RESERVED_VARIABLES = frozenset(
    ("messages", "add_generation_prompt", "tools", "documents", "tokenize", "add_bos", "chat_template", "self")
)
"""Variables that every template is given, and parameters of the function that renders it."""

ARGUMENTS_LIMITS = JsonLimits(MIN_JSON_LIMIT, MIN_JSON_LIMIT)
"""Limits of the JSON in the arguments of all earlier calls, which is parsed for templates."""

TOOL_INSTRUCTIONS = """You may call these functions, each described as JSON:
{tools}
To call one, answer with nothing but this, filled in:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ChatPrompt:
    """The text of a prompt, and which tool calls the answer may contain."""

    text: str
    tool_format: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    forced_call_schema: dict[str, Any] | None = None
    """The JSON schema of the call, if the answer must be one."""
    optional_call_schema: dict[str, Any] | None = None
    """The JSON schema of a call, if the answer may be one."""

    @property
    def opens_reasoning(self) -> bool:
        """Whether the prompt ends inside a reasoning block, so that the answer begins with reasoning."""
        return self.text.rstrip().endswith(REASONING_START)

    def without_reasoning(self) -> ChatPrompt:
        """The prompt with its reasoning block closed, for answers that a filter constrains from the start."""
        if not self.opens_reasoning:
            return self
        return replace(self, text=f"{self.text.rstrip()}\n{REASONING_END}\n\n")


def render_chat(request: ChatRequest, tokenizer: Tokenizer, name: str = "The model") -> ChatPrompt:
    """Render a chat request's prompt; errors call the model by its `name`, not by its path."""
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
        raise APIError(422, f"chat_template_kwargs may not hold {', '.join(taken)}.", param="chat_template_kwargs")
    ARGUMENTS_LIMITS.check(*_call_arguments(request.messages), what="What earlier calls have as arguments")
    tools = _callable_tools(request)
    source = tokenizer.chat_templates.choose(None, tools is not None).source
    renders_tools = supports_tools(source)
    messages = template_messages(request.messages, renders_tools)
    if tools is None:
        return ChatPrompt(tokenizer.apply_chat_template(messages, **variables))
    tool_format = detect_tool_format(source) if renders_tools else HERMES
    if renders_tools:
        text = tokenizer.apply_chat_template(messages, tools=tools, **variables)
    else:
        text = _render_with_tool_instructions(tokenizer, messages, tools, variables)
    names = frozenset(tool["function"]["name"] for tool in tools)
    if request.tool_choice in (None, "auto"):
        return ChatPrompt(text, tool_format, names, optional_call_schema=call_schema(tools, tool_format))
    text = ChatPrompt(text).without_reasoning().text
    return ChatPrompt(text + tool_format.forced_prefix, tool_format, names, call_schema(tools, tool_format))


def template_messages(messages: Sequence[Message], renders_tools: bool = True) -> list[dict[str, Any]]:
    """Messages as chat templates expect them; tool calls and results become text for one that renders no tools."""
    out: list[dict[str, Any]] = []
    previous: type | None = None
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": _content_text(message.content)}
        if message.role == "developer":
            entry["role"] = "system"
        if message.name is not None:
            entry["name"] = message.name
        if isinstance(message, AssistantMessage):
            _add_calls(entry, message, renders_tools)
        elif isinstance(message, ToolMessage):
            if renders_tools:
                entry["tool_call_id"] = message.tool_call_id
            else:
                entry |= {"role": "user", "content": f"<tool_response>\n{entry['content']}\n</tool_response>"}
                if previous is ToolMessage:  # many templates insist on alternating user and assistant
                    entry["content"] = f"{out.pop()['content']}\n{entry['content']}"
        previous = type(message)
        out.append(entry)
    return out


def _add_calls(entry: dict[str, Any], message: AssistantMessage, renders_tools: bool) -> None:
    if message.reasoning_content is not None:
        entry["reasoning_content"] = message.reasoning_content
    calls = [
        {"name": call.function.name, "arguments": _parse_arguments(call.function.arguments)}
        for call in message.tool_calls or ()
    ]
    if renders_tools and calls:
        entry["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(message.tool_calls or (), calls, strict=True)
        ]
    elif calls:
        written = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
        entry["content"] = "\n".join([*([entry["content"]] if entry["content"] else []), *written])


def _callable_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that may be called; None if none may."""
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
            raise APIError(422, f"tool_choice: no tool is called {choice.function.name!r}.", param="tool_choice")
        return chosen
    return tools


def _render_with_tool_instructions(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render with a template that ignores tools.

    They are described in the system message, or in the user's first message if the template refuses system
    messages.
    """
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = TOOL_INSTRUCTIONS.format(tools=functions)
    first, rest = messages[0], messages[1:]
    instructed = [{"role": "system", "content": instructions}, *messages]
    if first["role"] == "system":
        instructed = [{**first, "content": f"{first['content']}\n\n{instructions}"}, *rest]
    try:
        return str(tokenizer.apply_chat_template(instructed, **variables))
    except ChatTemplateError:
        if first["role"] != "user":
            raise
        instructed = [{**first, "content": f"{instructions}\n\n{first['content']}"}, *rest]
        return str(tokenizer.apply_chat_template(instructed, **variables))


def _content_text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _call_arguments(messages: Sequence[Message]) -> Iterator[bytes]:
    """The arguments of all earlier calls."""
    for message in messages:
        for call in (isinstance(message, AssistantMessage) and message.tool_calls) or ():
            yield call.function.arguments.encode("utf-8", "surrogatepass")


def _parse_arguments(arguments: str) -> Any:
    """The arguments as data; the text itself if it is not JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
