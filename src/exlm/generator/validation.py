"""Checks of arguments: unknown names, prompts, and numbers within their bounds.

The archived exllamav2 accepted and ignored any name. Here an unknown argument of a job or a generator is an
error, and an unknown argument of `generate()` and the other calls of old scripts a warning. An argument that
only another call has is an error if it would change the text. `generate()`'s own arguments, if given to a
job, and a job's, if given to the generator, never had an effect there: that is a warning.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
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
"""Arguments that other calls have, and what to do instead."""

GENERATE_ARGUMENTS = frozenset(
    ("prompt", "add_bos", "encode_special_tokens", "completion_only", "abort_event", "return_last_results")
)
"""Arguments that only `generate()` has."""

SETTINGS_FIELDS = frozenset(field.name for field in dataclasses.fields(Settings))


def argument_names(call: Callable[..., Any]) -> list[str]:
    """The names of a call's own arguments."""
    parameters = inspect.signature(call).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def reject_unknown(
    call: str, given: Mapping[str, Any], known: Collection[str], others: Collection[str], other_call: str
) -> None:
    """Raise InputError for the first unknown argument; a UserWarning for `others`, which `other_call` has."""
    for name in _unknown_names(call, given, known):
        if name not in others:
            raise InputError(f"{call} has no argument {name!r}. {_hint(name, known)}")
        message = f"{call} has no argument {name!r} and goes on without it: {other_call} takes it."
        warnings.warn(message, UserWarning, stacklevel=3)


def drop_unknown(call: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The arguments that the call has; a UserWarning at the caller's line for each unknown one."""
    for name in _unknown_names(call, given, known):
        message = f"{call} has no argument {name!r} and goes on without it. {_hint(name, known)}"
        warnings.warn(message, UserWarning, stacklevel=3)
    return {name: value for name, value in given.items() if name in known}


def _unknown_names(call: str, given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The unknown names; InputError for one of `REPLACEMENTS`, unless its value is None."""
    unknown = [name for name in given if name not in known]
    for name in unknown:
        if name in REPLACEMENTS and given[name] is not None:
            raise InputError(f"{call} takes no {name}: {REPLACEMENTS[name]}.")
    return [name for name in unknown if name not in REPLACEMENTS]


def _hint(name: str, known: Collection[str]) -> str:
    if name in SETTINGS_FIELDS:
        return f"Set it in gen_settings: Settings({name}=…)."
    similar = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {similar[0]!r}?" if similar else "Leave it out."


def prompt_list(prompt: Any) -> list[Any]:
    """The prompts as a list; each is a string or a pair of strings."""
    if isinstance(prompt, str | tuple):
        return [prompt]
    if not isinstance(prompt, Sequence):
        raise InputError(f"Unexpected type in prompt: {type(prompt).__name__}; give a string or a list.")
    return list(prompt)


def prompt_texts(prompt: Any) -> list[str]:
    """The text of a prompt, or both texts of a pair."""
    texts = list(prompt) if isinstance(prompt, tuple) else [prompt]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"Unexpected type in prompt: {prompt!r}. A prompt is a string, or a pair of strings for guidance."
        )
    return texts


def one_per_prompt(values: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt; None and Settings are for all of them."""
    if values is None or isinstance(values, Settings):
        return [values] * count
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        single = "Settings, or " if name.endswith("settings") else ""
        found = len(values) if isinstance(values, list | tuple) else type(values).__name__
        raise InputError(f"{name} must be {single}a list with one entry for each of {count} prompts, found {found}.")
    return list(values)


def check_components(model: Any, cache: Any) -> None:
    """Refuse a model or cache of a wrong type, as when they are in the wrong order."""
    for name, part, kind, attribute in (("model", model, "Model", "runner"), ("cache", cache, "Cache", "batch_size")):
        if not hasattr(part, attribute):
            raise InputError(
                f"{name} must be a {kind}, found {type(part).__name__}: a generator is made of a model, a "
                "cache and a tokenizer, in this order."
            )


def at_least(name: str, value: int, least: int) -> int:
    """A whole number that is not too small."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, found {value!r}.")
    return int(value)


def resolve_num_draft_tokens(requested: int | None, default: int, max_q_size: int) -> int:
    """How many tokens to draft; a pass processes them and the token before them."""
    count = default if requested is None else requested
    if at_least("num_draft_tokens", count, 1) >= max_q_size:
        raise InputError(
            f"num_draft_tokens must be less than max_q_size, found {count} and {max_q_size}: draft at most "
            f"{max_q_size - 1} or create the generator with max_q_size={count + 1}."
        )
    return count


def resolve_max_seq_len(requested: int | None, limit: int) -> int:
    """The longest a sequence may become."""
    length = at_least("max_seq_len", requested or limit, 1)
    if length > limit:
        raise InputError(f"Model initialized with max seq len {limit}, requested seq len is {requested}.")
    return length


def resolve_chunk_size(requested: int | None, limit: int, page_size: int, paged: bool) -> int:
    """How many prompt tokens a step prefills: full pages, unless sequences run one at a time."""
    if requested is None:
        return max(page_size, limit // page_size * page_size)
    count = at_least("max_chunk_size", requested, 1)
    if count > limit or (paged and count % page_size):
        pages = f"a multiple of {page_size} and " if paged else ""
        raise InputError(
            f"max_chunk_size must be {pages}at most the model's max_input_len of {limit}, received {count}."
        )
    return count


def cache_tokens(cache: Any) -> int:
    """How many tokens fit into a cache, in full pages."""
    if cache.batch_size != 1:
        raise InputError(f"Generator requires a cache with batch_size = 1, found {cache.batch_size}.")
    if cache.max_seq_len % cache.page_size:
        raise InputError(f"cache.max_seq_len must be a multiple of {cache.page_size}, received {cache.max_seq_len}.")
    return int(cache.max_seq_len)
