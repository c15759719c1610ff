"""Chat templates and prompt formats: reads a model's templates, chooses one, renders messages with it.

A chat template is a Jinja program that turns messages into the prompt its model was trained on. It comes from
the model folder and is not trusted: `TemplateSandbox` renders it in a process of its own, with limits. Most
templates read a message's content as a string, those of some multimodal models as a list of content parts,
others both ways. With the wrong one, many render Python's lists into the prompt or leave the message out
without an error, so `adapt_content_format` first renders a probe and converts the messages where that fails.

A prompt format is exlm's own template for a model without one: plain data that becomes a Jinja template.
Users know prompt formats as chat formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import ChatTemplateError, TokenizerError
from .template_sandbox import TemplateSandbox
from .tokenizer_files import TokenizerFiles, read_json_object, read_text

Messages = Sequence[Mapping[str, Any]]

DEFAULT_NAME = "default"
TOOL_USE_NAME = "tool_use"
TEMPLATE_FILES = "chat_template.jinja, tokenizer_config.json and chat_template.json"
GGUF_TEMPLATE_KEY = "tokenizer.chat_template"

PROBE_TEXT = "What is this?"
PROBE_PARTS = ({"type": "text", "text": PROBE_TEXT},)
_MENTIONS_TEXT_KEY = re.compile(r"""['"]text['"]""")  # as templates that read content parts do, and few others


Affixes = tuple[str, str]
"""The strings before and after a message."""


@dataclass(frozen=True)
class PromptFormat:
    """How one kind of model writes a conversation, for models without a chat template.

    A prompt consists of `prefix`, the system message within `system`, and each of the user's messages within
    `user`, with `turn_separator` before all but the first; the assistant's messages stand between them
    unchanged. The other fields have what a Jinja template cannot express: how the prompt is encoded, and what
    stops generation besides EOS.
    """

    user: Affixes
    system: Affixes | None = ("", "\n")
    prefix: str = ""
    turn_separator: str = ""
    add_bos: bool = False
    """Whether the prompt starts with BOS."""
    encode_special_tokens: bool = True
    """Whether special tokens written in the prompt are encoded as such, not as plain text."""
    stop_tokens: tuple[str, ...] = ()
    """Special tokens that end the assistant's message."""
    stop_strings: tuple[str, ...] = ()
    default_system: str | None = None
    """The system message of a conversation that has none."""

    @property
    def source(self) -> str:
        """The Jinja template; every prompt it renders ends where the assistant's next message begins."""
        system = "raise_exception('This chat format has no place for a system message.')"
        if self.system is not None:
            system = f"{_jinja_string(self.system[0])} + messages[0].content + {_jinja_string(self.system[1])}"
        return (
            f"{{{{- {_jinja_string(self.prefix)} -}}}}"
            "{%- set turns = messages -%}"
            "{%- if messages[0].role == 'system' -%}{%- set turns = messages[1:] -%}"
            f"{{{{- {system} -}}}}"
            "{%- endif -%}"
            "{%- for message in turns -%}"
            "{%- if message.role == 'user' -%}"
            f"{{{{- '' if loop.first else {_jinja_string(self.turn_separator)} -}}}}"
            f"{{{{- {_jinja_string(self.user[0])} + message.content + {_jinja_string(self.user[1])} -}}}}"
            "{%- elif message.role == 'assistant' -%}{{- message.content -}}"
            "{%- else -%}{{- raise_exception('This chat format has no place for the role '"
            " ~ message.role ~ '.') -}}{%- endif -%}"
            "{%- endfor -%}"
        )

    def stop_conditions(self, single_id: Callable[[str], int | None]) -> list[int | str]:
        """Stop conditions of a job: ids of stop tokens (their text if they have none) and stop strings."""
        tokens = [(text, single_id(text)) for text in self.stop_tokens]
        return [*(text if token_id is None else token_id for text, token_id in tokens), *self.stop_strings]


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source, the file it is from, and the prompt format that it was made from, if any."""

    source: str
    origin: str
    format: PromptFormat | None = None


class ChatTemplates:
    """The templates of one model, by name; most models have one, called "default"."""

    def __init__(
        self,
        templates: Mapping[str, ChatTemplate],
        source_name: str = "the model folder",
        searched: str = TEMPLATE_FILES,
    ) -> None:
        """`source_name` names the model in errors, `searched` the files (or metadata) that were read."""
        self.templates = dict(templates)
        self.source_name, self.searched = source_name, searched

    @classmethod
    def from_folder(cls, files: TokenizerFiles) -> ChatTemplates:
        """Read the templates of a model folder, or of a GGUF file from its metadata alone.

        A template in chat_template.jinja overrides one of the same name in tokenizer_config.json, and that
        one in chat_template.json.
        """
        path = files.path
        if path.suffix == ".gguf" and not path.is_dir():
            return cls(
                _templates_from_config(files.config or {}, f"{path}: {GGUF_TEMPLATE_KEY}"),
                str(path),
                GGUF_TEMPLATE_KEY,
            )
        found = _templates_from_config(
            read_json_object(path / "chat_template.json") or {}, str(path / "chat_template.json")
        )
        found |= _templates_from_config(files.config or {}, str(path / "tokenizer_config.json"))
        for file in [*sorted((path / "additional_chat_templates").glob("*.jinja")), path / "chat_template.jinja"]:
            source = read_text(file)
            if source is not None:
                found[DEFAULT_NAME if file.parent == path else file.stem] = ChatTemplate(source, str(file))
        return cls(found, str(path))

    @property
    def default(self) -> ChatTemplate | None:
        """The template used when none is named."""
        if DEFAULT_NAME in self.templates:
            return self.templates[DEFAULT_NAME]
        return next(iter(self.templates.values())) if len(self.templates) == 1 else None

    @property
    def names(self) -> list[str]:
        """What `choose` accepts as a name: the model's own templates, then exlm's prompt formats."""
        return [*self.templates, *(name for name in PROMPT_FORMATS if name not in self.templates)]

    def choose(self, name_or_source: str | None = None, with_tools: bool = False) -> ChatTemplate:
        """The template of this name or with this source; None: the model's, for tools if `with_tools`."""
        if name_or_source is not None:
            if name_or_source not in self.templates and name_or_source in PROMPT_FORMATS:
                return ChatTemplate(
                    PROMPT_FORMATS[name_or_source].source,
                    f"the chat format {name_or_source}",
                    PROMPT_FORMATS[name_or_source],
                )
            return self.templates.get(name_or_source) or ChatTemplate(name_or_source, "the given chat_template")
        if with_tools and TOOL_USE_NAME in self.templates:
            return self.templates[TOOL_USE_NAME]
        if self.default is not None:
            return self.default
        if self.templates:
            raise ChatTemplateError(
                f"{self.source_name} has several chat templates and no default. "
                f"Choose one with chat_template=: {', '.join(sorted(self.templates))}."
            )
        raise ChatTemplateError(
            f"{self.source_name} has no chat template (looked in {self.searched}). Pass one as "
            f"chat_template=, by name ({', '.join(PROMPT_FORMATS)}) or as its source, or write the "
            "prompt yourself."
        )


def render_chat(
    sandbox: TemplateSandbox,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that a template makes of a conversation."""
    _check_objects(messages, "messages")
    if not messages:
        raise ChatTemplateError("A chat template needs at least one message.")
    for name, values in (("tools", tools), ("documents", documents)):
        if values is not None:
            _check_objects(values, name)
    template_variables = {
        **(variables or {}),
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return sandbox.render(template.source, {**template_variables, "messages": messages}, template.origin)

    return render(adapt_content_format(messages, template.source, template.origin, render))


def _check_objects(values: object, name: str) -> None:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise ChatTemplateError(f"{name} should be a list of objects, found {type(values).__name__}.")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise ChatTemplateError(f"{name}[{index}] should be an object, found {type(value).__name__}.")


def _templates_from_config(config: Mapping[str, Any], path: str) -> dict[str, ChatTemplate]:
    """Parse `chat_template`: one template, or a list or object of named ones; errors name `path`."""
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_NAME: ChatTemplate(value, path)}
    pairs: list[tuple[Any, Any]]
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        pairs = [(item.get("name"), item.get("template")) for item in value]
    else:
        raise TokenizerError(f"{path}: chat_template should be a string or a list of named templates.")
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in pairs):
        raise TokenizerError(f"{path}: every entry of chat_template needs a `name` and a `template`, both strings.")
    return {name: ChatTemplate(source, path) for name, source in pairs}


def adapt_content_format(messages: Messages, source: str, origin: str, render: Callable[[Messages], str]) -> Messages:
    """The messages with their contents as the template reads them: as strings or as content parts.

    Where no probe renders, the template's format is unknown and the messages are returned unchanged.
    """
    num_with_parts = sum(bool(_content_parts(message)) for message in messages)
    if num_with_parts and not _renders_content(PROBE_PARTS, render):
        if not _renders_content(PROBE_TEXT, render):
            return messages
        return [_parts_to_text(message, index, origin) for index, message in enumerate(messages)]
    all_have_parts = num_with_parts == len(messages)
    if all_have_parts or not _MENTIONS_TEXT_KEY.search(source) or _renders_content(PROBE_TEXT, render):
        return messages
    if not num_with_parts and not _renders_content(PROBE_PARTS, render):
        return messages
    return [_text_to_parts(message) for message in messages]


def _content_parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A message's content parts; none if its content is something else."""
    content = message.get("content")
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        return content
    return ()


def _renders_content(content: Any, render: Callable[[Messages], str]) -> bool:
    """Whether the template renders this content to its text, not to the Python literal of a list."""
    try:
        text = render([{"role": "user", "content": content}])
    except ChatTemplateError:
        return False
    return PROBE_TEXT in text and f"'{PROBE_TEXT}'" not in text and f'"{PROBE_TEXT}"' not in text


def _parts_to_text(message: Mapping[str, Any], index: int, origin: str) -> Mapping[str, Any]:
    parts = _content_parts(message)
    if not parts:
        return message
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(
                f"messages[{index}] holds a part of type {part.get('type')!r}, and {origin} reads text only."
            )
    return {**message, "content": "".join(part["text"] for part in parts)}


def _text_to_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _jinja_string(text: str) -> str:
    return json.dumps(text)


def _llama3_header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def _cohere_turn(role: str) -> str:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>"


def _granite_role(role: str) -> str:
    return f"<|start_of_role|>{role}<|end_of_role|>"


_LLAMA = PromptFormat(
    prefix="[INST] ",
    system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
    user=("", " [/INST]"),
    turn_separator="[INST] ",
    add_bos=True,
    encode_special_tokens=False,
)
_COHERE_END = "<|END_OF_TURN_TOKEN|>"

PROMPT_FORMATS: Mapping[str, PromptFormat] = MappingProxyType(
    {
        "raw": PromptFormat(
            user=("User: ", "\nAssistant:"),
            add_bos=True,
            encode_special_tokens=False,
            stop_strings=("User:", "U:", "USER:", "user:"),
            default_system="This is a conversation between a helpful AI assistant and a user.",
        ),
        "llama": _LLAMA,
        "codellama": _LLAMA,
        "llama3": PromptFormat(
            system=(_llama3_header("system"), "<|eot_id|>"),
            user=(_llama3_header("user"), "<|eot_id|>" + _llama3_header("assistant")),
            turn_separator="<|eot_id|>",
            add_bos=True,
            stop_tokens=("<|eot_id|>", "<|start_header_id|>"),
        ),
        "qwq": PromptFormat(
            system=("<|im_start|>system\n", "<|im_end|>\n"),
            user=("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
            turn_separator="<|im_end|>\n",
            stop_tokens=("<|im_end|>",),
            stop_strings=("<|im_end|>",),
        ),
        "chatml": PromptFormat(
            system=("<|im_start|>system\n", "\n<|im_end|>\n"),
            user=("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            turn_separator="<|im_end|>\n",
            stop_tokens=("<|im_end|>",),
            stop_strings=("<|im_end|>",),
        ),
        "tinyllama": PromptFormat(
            system=("<|im_start|>system\n", "\n<|im_end|>\n"),
            user=("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            turn_separator="<|im_end|>\n",
            encode_special_tokens=False,
            stop_strings=("<|im_end|>",),
        ),
        "zephyr": PromptFormat(
            system=("<|system|>\n", "\n</s>\n"),
            user=("<|user|>\n", "</s>\n<|assistant|>\n"),
            stop_strings=("<|user|>", "</s>"),
        ),
        "deepseek": PromptFormat(user=("### Instruction:\n", "\n### Response:\n"), stop_strings=("### Instruction",)),
        "solar": PromptFormat(
            system=("### System\n", "\n\n"),
            user=("### User:\n", "\n\n### Assistant:\n"),
            stop_strings=("\n\n### User", "\n### User"),
        ),
        "openchat": PromptFormat(
            system=("", "<|end_of_turn|>"),
            user=("GPT4 Correct User:", "<|end_of_turn|>GPT4 Correct Assistant:"),
            stop_strings=("<|end_of_turn|>", "<|endoftext|>", "GPT4 Correct User:"),
        ),
        "nous": PromptFormat(system=("", "\n\n"), user=("USER:\n", "\n\nASSISTANT:\n"), stop_strings=("</s>",)),
        "gemma": PromptFormat(
            system=None,
            user=("<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
            turn_separator="<end_of_turn>\n",
            stop_tokens=("<end_of_turn>", "<start_of_turn>"),
        ),
        "cohere": PromptFormat(
            prefix="<BOS_TOKEN>",
            system=(_cohere_turn("SYSTEM"), _COHERE_END),
            user=(_cohere_turn("USER"), _COHERE_END + _cohere_turn("CHATBOT")),
            turn_separator=_COHERE_END,
            add_bos=True,
            stop_strings=(_COHERE_END,),
        ),
        "phi3": PromptFormat(
            prefix="<s>",
            system=("<|system|>\n", "<|end|>\n"),
            user=("<|user|>\n", "<|end|>\n<|assistant|>\n"),
            turn_separator="<|end|>\n",
            stop_tokens=("<|end|>", "<|assistant|>", "<|endoftext|>"),
        ),
        "granite": PromptFormat(
            system=("System:\n", "\n\n"),
            user=("Question:\n", "\n\nAnswer:\n"),
            turn_separator="\n\n",
            stop_strings=("\n\nQuestion:",),
        ),
        "granite3": PromptFormat(
            system=(_granite_role("system"), "<|end_of_text|>"),
            user=(_granite_role("user"), "<|end_of_text|>" + _granite_role("assistant")),
            add_bos=True,
        ),
        "glm": PromptFormat(
            prefix="[gMASK]<sop>",
            system=("<|system|>\n", ""),
            user=("<|user|>\n", "<|assistant|>\n"),
            add_bos=True,
            stop_tokens=("<|user|>",),
            stop_strings=("<|user|>",),
        ),
    }
)
"""The prompt formats of exllamav2's chat example, under the names they have there."""
