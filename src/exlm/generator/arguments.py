"""Arguments by names that a call does not have: refused, with a suggestion.

The archived library took any name and ignored it, so that a misspelt one did nothing and said nothing. What
its other calls could be given, and scripts pass on to all of them alike, is accepted as long as it asks for
nothing. Values of known arguments are checked where they are used, not here.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import InputError

ELSEWHERE = {
    "loras": "use set_loras(), or the loras of a job",
    "input_embeddings": "use embeddings",
    "input_mask": "prompts of one call need no padding, leave it out",
    "position_offsets": "prompts of one call need no padding, leave it out",
    "stop_token": "use stop_conditions",
    "num_tokens": "use max_new_tokens",
}
"""What exllamav2's other generators take, and what to do instead."""


def names(call: Callable[..., Any]) -> list[str]:
    """The names of a call's own arguments."""
    every = inspect.signature(call).parameters.values()
    return [one.name for one in every if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]


def refuse(call: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise InputError for each argument that the call does not know and that asks for something."""
    for name, value in given.items():
        if name not in ELSEWHERE:
            near = difflib.get_close_matches(name, list(known), 1)
            hint = f"Did you mean {near[0]!r}?" if near else "Leave it out."
            raise InputError(f"{call} has no argument {name!r}. {hint}")
        if value is not None:
            raise InputError(f"{call} takes no {name}: {ELSEWHERE[name]}.")
