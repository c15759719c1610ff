"""Chat templates: where a model folder keeps them, which one to use, and what they are given.

A template is a Jinja program that writes a conversation the way its model was trained to read it. It is found
here and rendered by `renderer`, in a process with limits; it is never trusted, and never run in this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ChatTemplateError, TokenizerError
from .chat_formats import FORMATS, ChatFormat
from .folder import Folder, read_object, read_text
from .parts import fitted
from .renderer import Limits, Renderer

DEFAULT = "default"
TOOL_USE = "tool_use"
FILES = "chat_template.jinja, tokenizer_config.json and chat_template.json"
GGUF_KEY = "tokenizer.chat_template"


@dataclass(frozen=True)
class Template:
    """A template's source and the file it is from; the format it is made of, if it is one of ours."""

    source: str
    origin: str
    format: ChatFormat | None = None


class ChatTemplates:
    """The templates of one model, by name; most models have one, called "default"."""

    def __init__(
        self, templates: Mapping[str, Template], where: str = "the model folder", places: str = FILES
    ) -> None:
        """`where` is what errors say was searched, `places` what was looked at there."""
        self.templates = dict(templates)
        self.where, self.places = where, places

    @classmethod
    def from_folder(cls, folder: Folder) -> ChatTemplates:
        """Of several files chat_template.jinja wins, then tokenizer_config.json, then chat_template.json.

        A GGUF file has all there is in its own metadata.
        """
        path = folder.path
        if path.suffix == ".gguf" and not path.is_dir():
            return cls(_from_config(folder.config or {}, f"{path}: {GGUF_KEY}"), str(path), GGUF_KEY)
        found = _from_config(read_object(path / "chat_template.json") or {}, str(path / "chat_template.json"))
        found |= _from_config(folder.config or {}, str(path / "tokenizer_config.json"))
        for file in [
            *sorted((path / "additional_chat_templates").glob("*.jinja")),
            path / "chat_template.jinja",
        ]:
            source = read_text(file)
            if source is not None:
                found[DEFAULT if file.parent == path else file.stem] = Template(source, str(file))
        return cls(found, str(path))

    @property
    def default(self) -> Template | None:
        """The template used when none is named."""
        if DEFAULT in self.templates:
            return self.templates[DEFAULT]
        return next(iter(self.templates.values())) if len(self.templates) == 1 else None

    @property
    def names(self) -> list[str]:
        """What can be chosen by name: the model's own templates, then the formats known here."""
        return [*self.templates, *(name for name in FORMATS if name not in self.templates)]

    def choose(self, asked: str | None = None, tools: bool = False) -> Template:
        """A template by name, a template given as its own source, or the one these messages call for."""
        if asked is not None:
            if asked not in self.templates and asked in FORMATS:
                return Template(FORMATS[asked].source, f"the chat format {asked}", FORMATS[asked])
            return self.templates.get(asked) or Template(asked, "the given chat_template")
        if tools and TOOL_USE in self.templates:
            return self.templates[TOOL_USE]
        if self.default is not None:
            return self.default
        if self.templates:
            raise ChatTemplateError(
                f"{self.where} has several chat templates and no default. "
                f"Choose one with chat_template=: {', '.join(sorted(self.templates))}."
            )
        raise ChatTemplateError(
            f"{self.where} has no chat template (looked in {self.places}). Pass one as chat_template=, by "
            f"name ({', '.join(FORMATS)}) or as its source, or write the prompt yourself."
        )


def render_chat(
    renderer: Renderer,
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as the model reads it."""
    _check(messages, "messages")
    if not messages:
        raise ChatTemplateError("A chat template needs at least one message.")
    for name, values in (("tools", tools), ("documents", documents)):
        if values is not None:
            _check(values, name)
    given = {
        **(variables or {}),
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return renderer.render(template.source, {**given, "messages": messages}, template.origin)

    return render(fitted(messages, template.source, template.origin, render))


def _check(values: object, name: str) -> None:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise ChatTemplateError(f"{name} should be a list of objects, found {type(values).__name__}.")
    for place, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise ChatTemplateError(f"{name}[{place}] should be an object, found {type(value).__name__}.")


def _from_config(config: Mapping[str, Any], path: str) -> dict[str, Template]:
    """`chat_template`: one template, or a list or object of named ones; `path` is what errors call it."""
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: Template(value, path)}
    pairs: list[tuple[Any, Any]]
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        pairs = [(item.get("name"), item.get("template")) for item in value]
    else:
        raise TokenizerError(f"{path}: chat_template should be a string or a list of named templates.")
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in pairs):
        raise TokenizerError(
            f"{path}: every entry of chat_template needs a `name` and a `template`, both strings."
        )
    return {name: Template(source, path) for name, source in pairs}


__all__ = ["ChatTemplates", "Limits", "Renderer", "Template", "render_chat"]
