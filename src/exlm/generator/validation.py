"""Checks and conversions of arguments: unknown names, prompts, stop conditions, numbers within their bounds.

The archived exllamav2 accepted and ignored any name. Here an unknown argument of a job or a generator is an
error, and an unknown argument of `generate()` and the other calls of old scripts a warning. An argument of
another call is an error if it would change the text (`REPLACEMENTS`). It is a warning where exllamav2 never used
it: an argument of `generate()` given to a job, or one of a job given to the generator.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from ..errors import InputError
from ..sampling import Settings
from .state_table import SLOTS_PER_SEQUENCE

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

MAX_CHECKPOINTS = 1024
"""Most recurrent states beyond those of running sequences that a generator makes room for."""

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


def offset_seed(seed: Any, index: int) -> Any:
    """The seed of prompt `index`; a seed that is not an integer is unchanged, and the job refuses it."""
    return seed + index if isinstance(seed, Integral) else seed


def check_components(model: Any, cache: Any) -> None:
    """Refuse a model or cache of a wrong type, as when they are in the wrong order."""
    for name, part, kind, attribute in (("model", model, "Model", "runner"), ("cache", cache, "Cache", "batch_size")):
        if not hasattr(part, attribute):
            raise InputError(
                f"{name} must be a {kind}, found {type(part).__name__}: a generator is made of a model, a "
                "cache and a tokenizer, in this order."
            )


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number within its bounds; raises InputError for anything else."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} must be a whole number {bounds}, found {value!r}.")
    return number


def materialize(values: Any) -> Any:
    """Iterators, which can be read only once, and arrays as lists; other values unchanged."""
    if hasattr(values, "dtype"):
        return values.tolist()
    return [*values] if isinstance(values, Iterator) else values


def split_stop_conditions(conditions: Iterable[int | str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Stop tokens and stop strings."""
    if isinstance(conditions, str | bytes) or not isinstance(conditions, Iterable):
        raise InputError(f"stop_conditions must be a list of ids and strings, found {conditions!r}.")
    tokens: set[int] = set()
    strings: list[str] = []
    for condition in conditions:
        if isinstance(condition, str):
            strings.append(condition)
        elif isinstance(condition, Integral) and not isinstance(condition, bool):
            tokens.add(int(condition))
        else:
            raise InputError(f"Unsupported type in stop_conditions: {condition!r}; use token ids and strings.")
    return frozenset(tokens), tuple(string for string in strings if string)


def salt_bytes(given: str | bytes | None) -> bytes:
    """A salt as bytes. A number is refused, because 0 would count as no salt."""
    if given is not None and not isinstance(given, str | bytes):
        raise InputError(f"salt must be a text or bytes, found {given!r}: write {str(given)!r}.")
    return given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given or b""


def prompt_ids(prompt: Any) -> tuple[int, ...]:
    """The ids of a (1, n) tensor in system memory."""
    shape = getattr(prompt, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != 1:
        raise InputError("input_ids must be a [1, seq_len] tensor, or a list of such tensors.")
    if getattr(prompt.device, "type", "cpu") != "cpu":
        raise InputError("input_ids must reside in system memory: call .cpu() on it.")
    if shape[1] == 0:
        raise InputError("Input IDs cannot be empty: a prompt needs a token (add_bos=True gives one).")
    if "int" not in str(prompt.dtype):
        raise InputError(f"input_ids must be whole numbers, found {prompt.dtype}: call .long() on it.")
    return tuple(prompt[0].tolist())


def filter_tuple(filters: Any) -> tuple[Any, ...]:
    """A list of filters, or None, as a tuple."""
    if filters is not None and not isinstance(filters, list | tuple):
        raise InputError(f"filters must be a list, found {type(filters).__name__}: write [filter].")
    return tuple(filters or ())


def banned_string_tuple(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"banned_strings must be a list of strings, found {values!r}.")
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise InputError(f"banned_strings must be a list of strings, found {wrong[0]!r} among them.")
    return tuple(value for value in values if value)


def resolve_num_draft_tokens(requested: int | None, default: int, max_q_size: int) -> int:
    """How many tokens to draft; a pass processes them and the token before them."""
    count = default if requested is None else requested
    if whole_number("num_draft_tokens", count, 1) >= max_q_size:
        raise InputError(
            f"num_draft_tokens must be less than max_q_size, found {count} and {max_q_size}: draft at most "
            f"{max_q_size - 1} or create the generator with max_q_size={count + 1}."
        )
    return count


def resolve_max_seq_len(requested: int | None, limit: int) -> int:
    """The longest a sequence may become."""
    length = whole_number("max_seq_len", requested or limit, 1)
    if length > limit:
        raise InputError(f"Model initialized with max seq len {limit}, requested seq len is {requested}.")
    return length


def resolve_chunk_size(requested: int | None, limit: int, page_size: int, paged: bool) -> int:
    """How many prompt tokens a step prefills: full pages, unless sequences run one at a time."""
    if requested is None:
        return max(page_size, limit // page_size * page_size)
    count = whole_number("max_chunk_size", requested, 1)
    if count > limit or (paged and count % page_size):
        pages = f"a multiple of {page_size} and " if paged else ""
        raise InputError(
            f"max_chunk_size must be {pages}at most the model's max_input_len of {limit}, received {count}."
        )
    return count


def resolve_state_slots(cache: Any, rows: int, rows_are_default: bool, state_cache_bytes: int | None) -> int:
    """How many recurrent states to make room for: those of `rows` running sequences, and checkpoints; 0 without any.

    Default rows may become fewer; rows that were asked for are all needed.
    """
    state_bytes = getattr(cache, "state_bytes", 0)
    if not state_bytes:
        return 0
    needed = SLOTS_PER_SEQUENCE * (1 if rows_are_default else rows)
    if state_cache_bytes is None:
        fitting = cache.default_state_cache_bytes // state_bytes
    else:
        fitting = whole_number("state_cache_bytes", state_cache_bytes, 1) // state_bytes
        if fitting < needed:
            raise InputError(
                f"state_cache_bytes is {state_cache_bytes:,}, room for {fitting} recurrent states of {state_bytes:,} "
                f"bytes; {needed} are needed, {SLOTS_PER_SEQUENCE} for each of {needed // SLOTS_PER_SEQUENCE} rows. "
                f"Give {needed * state_bytes:,} bytes or more, or lower max_batch_size."
            )
    return int(min(max(fitting, needed), SLOTS_PER_SEQUENCE * rows + MAX_CHECKPOINTS))


def cache_capacity(cache: Any) -> int:
    """How many tokens fit into a cache; refuses one that is not a single row of full pages."""
    if cache.batch_size != 1:
        raise InputError(f"Generator requires a cache with batch_size = 1, found {cache.batch_size}.")
    if cache.max_seq_len % cache.page_size:
        raise InputError(f"cache.max_seq_len must be a multiple of {cache.page_size}, received {cache.max_seq_len}.")
    return int(cache.max_seq_len)
