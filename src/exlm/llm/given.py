"""What a call is given besides its prompts: one for all or one for each, a list or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..filters import Filter
from ..model import Model
from ..sampling import Settings
from ..text.chat_formats import ChatFormat
from ..tokenizer import Tokenizer


def each(name: str, values: Any, count: int) -> list[Any]:
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


def joined(own: Any, shared: list[Filter]) -> list[Any]:
    """The filters that were given, and those that were made."""
    if own is not None and not isinstance(own, list | tuple):
        raise InputError(f"filters must be a list, found {type(own).__name__}: write [filter].")
    return [*(own or ()), *shared]


def placed(model: Model, prompt: Any, embeddings: Any) -> list[Any] | None:
    """What a prompt may name in place of tokens, bare vectors wrapped; None if there is nothing."""
    if embeddings is None:
        return None
    text = prompt[0] if isinstance(prompt, tuple) and prompt else prompt
    return list(model.injected(text, embeddings))


def stops(given: Any) -> list[Any]:
    """What ends an answer: none, one or several."""
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    return [*given] if several else [] if given is None else [given]


def spoken(tokenizer: Tokenizer, text: str, known: ChatFormat | None, embeddings: Any) -> Tensor:
    """The ids of a conversation; a format by name also says how its text is encoded."""
    special = known is None or known.special
    ids = tokenizer.encode(text, encode_special_tokens=special, embeddings=embeddings)
    bos = tokenizer.bos_token_id
    if known is not None and known.bos and bos is not None and ids[0, :1].tolist() != [bos]:
        ids = torch.cat((torch.tensor([[bos]]), ids), dim=1)
    return ids


def said(messages: Any) -> Any:
    """A str as the user's message, and no content as an empty one: many templates would write None."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, list | tuple):
        return messages  # those who render it say what is wrong
    return [
        {**one, "content": ""} if isinstance(one, Mapping) and one.get("content", "") is None else one
        for one in messages
    ]
