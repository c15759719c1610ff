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

MARK = "What is this?"
PARTS = ({"type": "text", "text": MARK},)
_NAMES_TEXT = re.compile(r"""['"]text['"]""")  # in a template that looks into parts, and in few others


def fitted(messages: Messages, source: str, origin: str, render: Callable[[Messages], str]) -> Messages:
    """The same messages, texts or parts as the template reads them."""
    several = sum(bool(_parts(message)) for message in messages)
    if several and not _reads(PARTS, render):
        known = _reads(MARK, render)  # else it cannot be tried, and the messages stay as they are
        return [_joined(message, at, origin) for at, message in enumerate(messages)] if known else messages
    if several == len(messages) or not _NAMES_TEXT.search(source) or _reads(MARK, render):
        return messages
    known = bool(several) or _reads(PARTS, render)
    return [_wrapped(message) for message in messages] if known else messages


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A message's parts; none if its content is something else."""
    content = message.get("content")
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        return content
    return ()


def _reads(content: Any, render: Callable[[Messages], str]) -> bool:
    """Whether a content comes out as the text it is."""
    try:
        text = render([{"role": "user", "content": content}])
    except ChatTemplateError:
        return False
    return MARK in text and f"'{MARK}'" not in text and f'"{MARK}"' not in text


def _joined(message: Mapping[str, Any], place: int, origin: str) -> Mapping[str, Any]:
    parts = _parts(message)
    if not parts:
        return message
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(
                f"messages[{place}] holds a part of type {part.get('type')!r}, and {origin} reads text only."
            )
    return {**message, "content": "".join(part["text"] for part in parts)}


def _wrapped(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
