"""The state of a chat: its messages, sampler settings and seed, saved to and loaded from files.

It needs no terminal and no model. Turns that no longer fit into the context are `dropped`: they stay in the
conversation, and in the file it is saved to, but are left out of the prompt. `/set` takes sampler settings as
text; their ranges are checked by `Settings.check`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import exlm
from exlm import InputError
from exlm.atomic import atomic_file
from exlm.sampler_chain import SETTINGS

FILE_FORMAT = "exlm chat 1"
"""The value of `format` in a saved chat."""

VALUE_WORDS: dict[Any, str] = {float: "a number", int: "a whole number", bool: "true or false"}
"""What an error message calls a value of each type; token sets take a list."""

BOOLEANS = {**dict.fromkeys(("true", "on", "yes", "1"), True), **dict.fromkeys(("false", "off", "no", "0"), False)}


@cache
def setting_types() -> dict[str, Any]:
    """The sampler settings that a chat can change, with their types, in the order of `Settings`.

    `cfg_scale` is not one: guidance needs a second prompt, which a chat does not have.
    """
    names = [one.name for one in dataclasses.fields(exlm.Settings)]
    return {name: SETTINGS[name].type for name in names if name in SETTINGS and name != "cfg_scale"}


@dataclass
class Turn:
    """A user message and its answer, if there is one yet."""

    user: str
    assistant: str | None = None


@dataclass
class Conversation:
    """The turns of a chat and the settings of its next answer."""

    settings: exlm.Settings
    max_new_tokens: int = 512
    seed: int | None = None
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    dropped: int = 0
    """How many of the oldest turns are left out of the prompt."""
    retries: int = 0
    """How many answers to the last message were discarded."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of the prompt."""
        return self._messages(self.turns[self.dropped :])

    @property
    def next_seed(self) -> int | None:
        """The seed of the next answer; every retry gets another one."""
        return None if self.seed is None else (self.seed + self.retries) % 2**63

    def add_user_message(self, text: str) -> None:
        """Start a turn with a user message."""
        self.turns.append(Turn(text))
        self.retries = 0

    def add_answer(self, text: str) -> None:
        """Complete the last turn."""
        self.turns[-1].assistant = text

    def retry(self) -> str | None:
        """Discard the last answer and return it."""
        if not self.turns:
            raise InputError("Nothing was said yet.")
        before, self.turns[-1].assistant = self.turns[-1].assistant, None
        self.retries += 1
        return before

    def undo(self) -> None:
        """Remove the last turn."""
        if not self.turns:
            raise InputError("Nothing was said yet.")
        self.turns.pop()
        self._reset_dropped()

    def clear(self) -> None:
        """Remove every turn; the system message and the settings stay."""
        self.turns.clear()
        self._reset_dropped()

    def set_system(self, system: str | None) -> None:
        """Set or remove the system message, also for earlier turns."""
        self.system = system
        self._reset_dropped()

    def set(self, name: str, text: str, tokenizer: exlm.Tokenizer) -> None:
        """Change a sampler setting, `max_new_tokens` or `seed`, given as text."""
        if name == "max_new_tokens":
            self.max_new_tokens = _parse_int(name, text, 1)
        elif name == "seed":
            self.seed = None if text.lower() == "none" else _parse_int(name, text, 0)
        else:
            self.settings = update_settings(self.settings, {name: parse_setting(name, text)}, tokenizer)

    @property
    def values(self) -> dict[str, Any]:
        """Everything that `set` can change, with its current value."""
        return {"max_new_tokens": self.max_new_tokens, "seed": self.seed, **_settings_as_json(self.settings)}

    def save(self, path: Path) -> None:
        """Save to a file, atomically; refuses to overwrite a file that is not a saved chat."""
        if os.path.exists(path):  # Path.exists would raise in folders without permission
            _read_chat(path)
        saved = {"format": FILE_FORMAT, "messages": self._messages(self.turns), "settings": self.values}
        try:
            with atomic_file(path) as partial:
                partial.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:  # a name with a NUL in it is a ValueError
            raise InputError(f"{path} cannot be written: {getattr(error, 'strerror', error)}.") from None

    def load(self, path: Path, tokenizer: exlm.Tokenizer) -> Conversation:
        """The conversation saved in a file; this one is not changed."""
        found = _read_chat(path)
        values = dict(found.get("settings", {}))
        new = Conversation(self.settings, self.max_new_tokens, self.seed)
        for name in ("max_new_tokens", "seed"):
            if name in values:
                new.set(name, str(values.pop(name)), tokenizer)
        new.settings = update_settings(self.settings, values, tokenizer)
        messages = found["messages"]
        if messages and messages[0]["role"] == "system":
            new.system = messages[0]["content"]
            messages = messages[1:]
        for i, message in enumerate(messages):
            if message["role"] != ("user", "assistant")[i % 2]:
                raise InputError(f"{path}: user and assistant should take turns.")
            if i % 2:
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
        """Include dropped turns again: after the change they may fit."""
        self.dropped = self.retries = 0


def _read_chat(path: Path) -> dict[str, Any]:
    """Read a saved conversation and check its structure."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        found = None
    if not _is_saved_chat(found):
        raise InputError(f"{path} is not a saved chat.")
    return dict(found)


def _is_saved_chat(found: Any) -> bool:
    if not isinstance(found, dict) or found.get("format") != FILE_FORMAT:
        return False
    messages, settings = found.get("messages"), found.get("settings", {})
    return isinstance(messages, list) and all(map(_is_message, messages)) and isinstance(settings, dict)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _parse_int(name: str, text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if not minimum <= value < 2**31:
        raise InputError(f"{name} takes a whole number of at least {minimum}, found {text!r}.")
    return value


def parse_setting(name: str, text: str) -> Any:
    """The value of a sampler setting that was given as text."""
    check_setting_name(name)
    kind = setting_types()[name]
    try:
        if kind is bool:
            return BOOLEANS[text.lower()]
        if kind in (int, float):
            return kind(text)
        return None if text.lower() == "none" else json.loads(text)
    except (KeyError, ValueError):
        wanted = VALUE_WORDS.get(kind, 'a list such as ["\\n", 29], or none')
        raise InputError(f"{name} takes {wanted}, found {text!r}.") from None


def update_settings(settings: exlm.Settings, values: dict[str, Any], tokenizer: exlm.Tokenizer) -> exlm.Settings:
    """The settings with other values, which are JSON values; InputError for an impossible one."""
    new = settings.clone()
    for name, value in values.items():
        check_setting_name(name)
        is_token_set = setting_types()[name] is frozenset
        setattr(new, name, _to_token_ids(name, value, tokenizer) if is_token_set else value)
    new.check()
    return new


def check_setting_name(name: str) -> None:
    """InputError unless a chat can change this setting."""
    if name in setting_types():
        return
    if name in exlm.Settings.__dataclass_fields__:
        raise InputError(f"{name} is for programs: a conversation cannot set it.")
    near = difflib.get_close_matches(name, setting_types(), 1)
    raise InputError(f"There is no setting {name!r}." + (f" Did you mean {near[0]}?" if near else ""))


def _settings_as_json(settings: exlm.Settings) -> dict[str, Any]:
    """The settings that a chat can change; token sets become sorted lists."""
    values = {name: getattr(settings, name) for name in setting_types()}
    return {name: sorted(one) if isinstance(one, frozenset) and one else one for name, one in values.items()}


def _to_token_ids(name: str, value: Any, tokenizer: exlm.Tokenizer) -> frozenset[int] | None:
    """A set of token ids from a list of ids and of texts that are single tokens."""
    if value is None:
        return None
    ids = set()
    for one in value if isinstance(value, list) else [value]:
        token_id = tokenizer.single_id(one) if isinstance(one, str) else one
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InputError(f"{name}: {one!r} is not one token.")
        if not 0 <= token_id < tokenizer.get_vocab_size():
            raise InputError(f"{name}: there is no token {token_id}.")
        ids.add(token_id)
    return frozenset(ids)
