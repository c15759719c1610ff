"""Checks of the arguments of a generator and its calls: prompts, and numbers within their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from ..errors import InputError
from .results import StreamingResult


def prompt_list(prompt: Any) -> list[Any]:
    """The prompts as a list; each is a string or a pair of them."""
    if isinstance(prompt, str | tuple):
        return [prompt]
    if not isinstance(prompt, Sequence):
        raise InputError(f"Unexpected type in prompt: {type(prompt).__name__}; give a string or a list.")
    return list(prompt)


def prompt_texts(prompt: Any) -> list[str]:
    """A prompt, or both of a pair."""
    found = list(prompt) if isinstance(prompt, tuple) else [prompt]
    if not found or not all(isinstance(half, str) for half in found):
        raise InputError(f"Unexpected type in prompt: {prompt!r}; a prompt is a string or a pair of them.")
    return found


def completion_text(prompt: Any, result: StreamingResult, completion_only: bool) -> str:
    """The text of a finished job, after its prompt unless only the completion is wanted."""
    prompt_text: str = prompt[0] if isinstance(prompt, tuple) else prompt
    return result["full_completion"] if completion_only else prompt_text + result["full_completion"]


def one_per_prompt(values: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt; None for all if there are none."""
    if values is None:
        return [None] * count
    if not isinstance(values, list | tuple) or len(values) != count:
        found = len(values) if isinstance(values, list | tuple) else type(values).__name__
        raise InputError(f"{name} must be a list with one entry for each of {count} prompts, found {found}.")
    return list(values)


def check_components(model: Any, cache: Any) -> None:
    """Refuse a model or cache of a wrong type, such as two in the wrong order."""
    for name, part, kind, attribute in (
        ("model", model, "Model", "runner"),
        ("cache", cache, "Cache", "batch_size"),
    ):
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
    """How many tokens to draft; they and the one before them are a sequence's rows in a pass."""
    count = default if requested is None else requested
    if at_least("num_draft_tokens", count, 1) >= max_q_size:
        raise InputError(
            f"num_draft_tokens must be less than max_q_size, found {count} and {max_q_size}: draft at most "
            f"{max_q_size - 1} or create the generator with max_q_size={count + 1}."
        )
    return count


def resolve_max_seq_len(requested: int | None, limit: int) -> int:
    """How long a sequence may become."""
    length = at_least("max_seq_len", requested or limit, 1)
    if length > limit:
        raise InputError(f"Model initialized with max seq len {limit}, requested seq len is {requested}.")
    return length


def resolve_chunk_size(requested: int | None, limit: int, page_size: int, paged: bool) -> int:
    """How much of a prompt a step prefills: whole pages, unless sequences run one at a time."""
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
    """How many tokens fit into a cache, in whole pages."""
    if cache.batch_size != 1:
        raise InputError(f"Generator requires a cache with batch_size = 1, found {cache.batch_size}.")
    if cache.max_seq_len % cache.page_size:
        raise InputError(
            f"cache.max_seq_len must be a multiple of {cache.page_size}, received {cache.max_seq_len}."
        )
    return int(cache.max_seq_len)
