"""The contents of messages in the form a chat template reads: a text, or a list of parts.

Most templates read texts, those of some models that see only parts, others both. Given the other form, a
template says nothing of it: it writes Python's lists into the prompt, or leaves the message out. So it is
tried first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ChatTemplateError

Messages = Sequence[Mapping[str, Any]]

PROBE_TEXT = "What is this?"
PROBE_PARTS = ({"type": "text", "text": PROBE_TEXT},)
_MENTIONS_TEXT_KEY = re.compile(r"""['"]text['"]""")  # in a template that looks into parts, and in few others


def adapt_content_format(
    messages: Messages, source: str, origin: str, render: Callable[[Messages], str]
) -> Messages:
    """The same messages, texts or parts as the template reads them."""
    num_with_parts = sum(bool(_content_parts(message)) for message in messages)
    if num_with_parts and not _renders_content(PROBE_PARTS, render):
        reads_other_format = _renders_content(
            PROBE_TEXT, render
        )  # else it cannot be tried, and the messages stay as they are
        return (
            [_parts_to_text(message, index, origin) for index, message in enumerate(messages)]
            if reads_other_format
            else messages
        )
    if (
        num_with_parts == len(messages)
        or not _MENTIONS_TEXT_KEY.search(source)
        or _renders_content(PROBE_TEXT, render)
    ):
        return messages
    reads_other_format = bool(num_with_parts) or _renders_content(PROBE_PARTS, render)
    return [_text_to_parts(message) for message in messages] if reads_other_format else messages


def _content_parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A message's parts; none if its content is something else."""
    content = message.get("content")
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        return content
    return ()


def _renders_content(content: Any, render: Callable[[Messages], str]) -> bool:
    """Whether a content comes out as the text it is."""
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
