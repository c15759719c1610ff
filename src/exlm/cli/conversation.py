"""A conversation: what was said, and how the next answer is to be made. It knows no terminal and no model.

Turns that no longer fit are `forgotten`: they stay in the conversation, and in what is saved, but the model
is not told of them any more.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import exlm
from exlm import InputError
from exlm.atomic import atomic_file

from . import sampler_settings as knobs

FORMAT = "exlm chat 1"


@dataclass
class Turn:
    """What the user said, and the answer, if there is one yet."""

    user: str
    assistant: str | None = None


@dataclass
class Conversation:
    """One conversation."""

    settings: exlm.Settings
    max_new_tokens: int = 512
    seed: int | None = None
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    dropped: int = 0
    """How many of the first turns the model is not told of."""
    retries: int = 0
    """How often the last turn was answered before."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """What the model is told."""
        return self._messages(self.turns[self.dropped :])

    @property
    def next_seed(self) -> int | None:
        """The seed of the next answer: another one for another try."""
        return None if self.seed is None else (self.seed + self.retries) % 2**63

    def add_user_message(self, text: str) -> None:
        """Begin a turn."""
        self.turns.append(Turn(text))
        self.retries = 0

    def add_answer(self, text: str) -> None:
        """End a turn."""
        self.turns[-1].assistant = text

    def retry(self) -> str | None:
        """Take the last answer back; what it was."""
        if not self.turns:
            raise InputError("Nothing was said yet.")
        before, self.turns[-1].assistant = self.turns[-1].assistant, None
        self.retries += 1
        return before

    def undo(self) -> None:
        """Take the last turn back."""
        if not self.turns:
            raise InputError("Nothing was said yet.")
        self.turns.pop()
        self._reset_dropped()

    def clear(self) -> None:
        """Forget every turn; the system message and the settings stay."""
        self.turns.clear()
        self._reset_dropped()

    def set_system(self, system: str | None) -> None:
        """Change the system message, also for what was said before."""
        self.system = system
        self._reset_dropped()

    def set(self, name: str, text: str, tokenizer: exlm.Tokenizer) -> None:
        """Change a setting, the longest answer, or the seed."""
        if name == "max_new_tokens":
            self.max_new_tokens = _parse_int(name, text, 1)
        elif name == "seed":
            self.seed = None if text.lower() == "none" else _parse_int(name, text, 0)
        else:
            self.settings = knobs.changed(self.settings, {name: knobs.read(name, text)}, tokenizer)

    @property
    def values(self) -> dict[str, Any]:
        """What `set` can change, and what it is now."""
        return {"max_new_tokens": self.max_new_tokens, "seed": self.seed, **knobs.shown(self.settings)}

    def save(self, path: Path) -> None:
        """Write everything to a file, which appears whole or not at all; only another chat is overwritten."""
        if os.path.exists(path):  # Path.exists would raise where nothing may be looked up
            _read(path)
        said = {"format": FORMAT, "messages": self._messages(self.turns), "settings": self.values}
        try:
            with atomic_file(path) as partial:
                partial.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:  # a name with a NUL in it is a ValueError
            raise InputError(f"{path} cannot be written: {getattr(error, 'strerror', error)}.") from None

    def load(self, path: Path, tokenizer: exlm.Tokenizer) -> Conversation:
        """The conversation of a file; this one is left as it is."""
        found = _read(path)
        values = dict(found.get("settings", {}))
        new = Conversation(self.settings, self.max_new_tokens, self.seed)
        for name in ("max_new_tokens", "seed"):
            if name in values:
                new.set(name, str(values.pop(name)), tokenizer)
        new.settings = knobs.changed(self.settings, values, tokenizer)
        messages = found["messages"]
        if messages and messages[0]["role"] == "system":
            new.system = messages[0]["content"]
            messages = messages[1:]
        for place, message in enumerate(messages):
            if message["role"] != ("user", "assistant")[place % 2]:
                raise InputError(f"{path}: user and assistant should take turns.")
            if place % 2:
                new.add_answer(message["content"])
            else:
                new.add_user_message(message["content"])
        return new

    def _messages(self, turns: list[Turn]) -> list[dict[str, str]]:
        out = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in turns:
            out.append({"role": "user", "content": turn.user})
            if turn.assistant is not None:
                out.append({"role": "assistant", "content": turn.assistant})
        return out

    def _reset_dropped(self) -> None:
        """What was forgotten may fit again."""
        self.dropped = self.retries = 0


def _read(path: Path) -> dict[str, Any]:
    """A saved conversation, its shape checked."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        found = None
    if not _is_saved_chat(found):
        raise InputError(f"{path} is no saved chat.")
    return dict(found)


def _is_saved_chat(found: Any) -> bool:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return False
    messages, settings = found.get("messages"), found.get("settings", {})
    return isinstance(messages, list) and all(map(_is_message, messages)) and isinstance(settings, dict)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _parse_int(name: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**31:
        raise InputError(f"{name} takes a whole number of at least {least}, found {text!r}.")
    return value
