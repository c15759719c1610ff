"""What a call is given besides its prompts: one for all or one for each, a list or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..constrained import Filter
from ..errors import InputError
from ..model import Model
from ..sampling import Settings
from ..tokenizer import Tokenizer
from ..tokenizer.prompt_formats import PromptFormat


def values_per_prompt(name: str, values: Any, count: int) -> list[Any]:
    """One value for each prompt; settings, and nothing at all, are for all of them."""
    if values is None or isinstance(values, Settings):
        return [values] * count
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        one = "Settings, or " if name == "settings" else ""
        found = len(values) if isinstance(values, list | tuple) else type(values).__name__
        raise InputError(
            f"{name} must be {one}a list with one entry for each of {count} prompts, found {found}."
        )
    return list(values)


def combined_filters(given: Any, compiled: list[Filter]) -> list[Any]:
    """The filters that were given, and those that were made."""
    if given is not None and not isinstance(given, list | tuple):
        raise InputError(f"filters must be a list, found {type(given).__name__}: write [filter].")
    return [*(given or ()), *compiled]


def wrapped_embeddings(model: Model, prompt: Any, embeddings: Any) -> list[Any] | None:
    """What a prompt may name in place of tokens, bare vectors wrapped; None if there is nothing."""
    if embeddings is None:
        return None
    text = prompt[0] if isinstance(prompt, tuple) and prompt else prompt
    return list(model.wrap_embeddings(text, embeddings))


def stop_list(given: Any) -> list[Any]:
    """What ends an answer: none, one or several."""
    is_collection = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    return [*given] if is_collection else [] if given is None else [given]


def encode_chat(tokenizer: Tokenizer, text: str, chat_format: PromptFormat | None, embeddings: Any) -> Tensor:
    """The ids of a conversation; a format by name also says how its text is encoded."""
    special = chat_format is None or chat_format.encode_special_tokens
    ids = tokenizer.encode(text, encode_special_tokens=special, embeddings=embeddings)
    bos = tokenizer.bos_token_id
    if chat_format is not None and chat_format.add_bos and bos is not None and ids[0, :1].tolist() != [bos]:
        ids = torch.cat((torch.tensor([[bos]]), ids), dim=1)
    return ids


def normalized_messages(messages: Any) -> Any:
    """A str as the user's message, and no content as an empty one: many templates would write None."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, list | tuple):
        return messages  # those who render it say what is wrong
    return [
        {**one, "content": ""} if isinstance(one, Mapping) and one.get("content", "") is None else one
        for one in messages
    ]
