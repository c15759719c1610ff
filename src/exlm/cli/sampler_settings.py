"""Sampler settings as text: what `/set` takes and shows. The settings' own rules are `Settings.check`'s."""

from __future__ import annotations

import dataclasses
import difflib
import json
from functools import cache
from typing import Any

import exlm
from exlm import InputError
from exlm.sampler_chain import SETTINGS

NOT_HERE = "cfg_scale"
"""A setting that a conversation has no use for: there is no second prompt."""

KINDS: dict[Any, str] = {float: "a number", int: "a whole number", bool: "true or false"}
TOKENS = frozenset


@cache
def fields() -> dict[str, Any]:
    """The settings of the sampler's chain and the type of each, in the order of `Settings`."""
    return {
        one.name: SETTINGS[one.name].type for one in dataclasses.fields(exlm.Settings) if one.name in SETTINGS
    }


@cache
def names() -> tuple[str, ...]:
    """The fields that a conversation can set."""
    return tuple(name for name in fields() if name != NOT_HERE)


SWITCH = {
    "true": True,
    "on": True,
    "yes": True,
    "1": True,
    "false": False,
    "off": False,
    "no": False,
    "0": False,
}


def shown(settings: exlm.Settings) -> dict[str, Any]:
    """Every setting that text can say, as JSON has it."""
    values = {name: getattr(settings, name) for name in names()}
    return {name: sorted(one) if fields()[name] == TOKENS and one else one for name, one in values.items()}


def changed(settings: exlm.Settings, values: dict[str, Any], tokenizer: exlm.Tokenizer) -> exlm.Settings:
    """The settings with these values (as JSON has them) in them; what cannot be meant is an InputError."""
    new = settings.clone()
    for name, value in values.items():
        check_name(name)
        setattr(new, name, _tokens(name, value, tokenizer) if fields()[name] == TOKENS else value)
    new.check()
    return new


def read(name: str, text: str) -> Any:
    """The value that a text means for a setting."""
    check_name(name)
    kind = fields()[name]
    try:
        if kind is bool:
            return SWITCH[text.lower()]
        if kind in (int, float):
            return kind(text)
        return None if text.lower() == "none" else json.loads(text)
    except (KeyError, ValueError):
        wanted = KINDS.get(kind, 'a list such as ["\\n", 29], or none')
        raise InputError(f"{name} takes {wanted}, found {text!r}.") from None


def check_name(name: str) -> None:
    """Refuse what is no setting, or none that a conversation can have."""
    if name in names():
        return
    if name in exlm.Settings.__dataclass_fields__:
        raise InputError(f"{name} is for programs: a conversation cannot set it.")
    near = difflib.get_close_matches(name, names(), 1)
    raise InputError(f"There is no setting {name!r}." + (f" Did you mean {near[0]}?" if near else ""))


def _tokens(name: str, value: Any, tokenizer: exlm.Tokenizer) -> frozenset[int] | None:
    """Token ids, some of them said as text."""
    if value is None:
        return None
    ids = set()
    for one in value if isinstance(value, list) else [value]:
        number = tokenizer.single_id(one) if isinstance(one, str) else one
        if isinstance(number, bool) or not isinstance(number, int):
            raise InputError(f"{name}: {one!r} is not one token.")
        if not 0 <= number < tokenizer.get_vocab_size():
            raise InputError(f"{name}: there is no token {number}.")
        ids.add(number)
    return frozenset(ids)
