"""Arguments by names that a call does not have: refused, or ignored with a warning.

The archived library took any name and ignored it, so that a misspelt one did nothing and said nothing. Here
jobs and generators are not made with one, while the blocking calls of old scripts warn of it and go on. What
another call would have understood is an error in both, unless it asks for nothing: without it the text would
be a different one. But what `generate()` takes is often given to a job too, and what jobs take to the
generator, where it never did anything: that is a warning. Values of known arguments are checked where they
are used, not here.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import InputError
from ..sampling import Settings

REPLACEMENTS = {
    "loras": "use set_loras(), or the loras of a job",
    "input_ids": "use a Job, which takes ids",
    "input_embeddings": "use embeddings",
    "input_mask": "prompts of one call need no padding, leave it out",
    "position_offsets": "prompts of one call need no padding, leave it out",
    "stop_token": "use stop_conditions",
    "num_tokens": "use max_new_tokens",
}
"""Arguments of the generator's other calls, and what to do instead."""

GENERATE_ARGUMENTS = frozenset(
    ("prompt", "add_bos", "encode_special_tokens", "completion_only", "abort_event", "return_last_results")
)
"""Arguments that only `generate()` has."""

SETTINGS_FIELDS = frozenset(field.name for field in dataclasses.fields(Settings))


def argument_names(call: Callable[..., Any]) -> list[str]:
    """The names of a call's own arguments."""
    every = inspect.signature(call).parameters.values()
    return [one.name for one in every if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]


def reject_unknown(
    call: str, given: Mapping[str, Any], known: Collection[str], others: Collection[str], owner: str
) -> None:
    """Raise InputError for the first unknown argument; a UserWarning for one that `owner` takes."""
    for name in _unknown_names(call, given, known):
        if name not in others:
            raise InputError(f"{call} has no argument {name!r}. {_hint(name, known)}")
        message = f"{call} has no argument {name!r} and goes on without it: {owner} takes it."
        warnings.warn(message, UserWarning, stacklevel=3)


def drop_unknown(call: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The arguments that the call has; a UserWarning at the caller's line for each unknown one."""
    for name in _unknown_names(call, given, known):
        message = f"{call} has no argument {name!r} and goes on without it. {_hint(name, known)}"
        warnings.warn(message, UserWarning, stacklevel=3)
    return {name: value for name, value in given.items() if name in known}


def _unknown_names(call: str, given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The unknown names; InputError for one that another call has, unless its value is neutral."""
    others = [name for name in given if name not in known]
    for name in others:
        if name in REPLACEMENTS and given[name] is not None:
            raise InputError(f"{call} takes no {name}: {REPLACEMENTS[name]}.")
    return [name for name in others if name not in REPLACEMENTS]


def _hint(name: str, known: Collection[str]) -> str:
    if name in SETTINGS_FIELDS:
        return f"Set it in gen_settings: Settings({name}=…)."
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]!r}?" if near else "Leave it out."
