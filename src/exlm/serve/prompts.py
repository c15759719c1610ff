"""From the prompts of a request to token ids; what is too long is refused before all of it is tokenised.

Tokenising takes about a microsecond for each character and a hundred bytes for each token. The number of
characters alone decides nothing: some vocabularies have tokens of 128 spaces, some normalisers collapse
whitespace, and some models make one token of any run of unknown letters. So a long text is counted slice by
slice, until it is certain that the whole has too many tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from exlm import Tokenizer

from .problems import Problem
from .schema import Asking, CompletionRequest

if TYPE_CHECKING:
    from .translate import Host

SLICE = 1 << 14
"""Characters that are tokenised at a time."""
PER_CUT = 16
"""Tokens that a cut in the middle of a word may add to the count."""
COUNTABLE = 1 << 17
"""Tokens that /tokenize and /detokenize take, where the context has fewer."""


def countable(context: int) -> int:
    """How many tokens /tokenize and /detokenize take."""
    return max(context, COUNTABLE)


def check_text(text: str, tokenizer: Tokenizer, room: int, special: bool, refusal: Problem) -> None:
    """Raise the refusal if a text surely has more than `room` tokens; `special` is as in encoding it.

    What is let through has a quarter too many at most, and a few more for each slice.
    """
    if len(text) <= SLICE:
        return
    encode = tokenizer.encode_special if special else tokenizer.encode_unspecial
    counted, surely = 0, room + room // 4
    for start in range(0, len(text), SLICE):
        counted += len(encode(text[start : start + SLICE]))
        surely += PER_CUT
        if counted > surely:
            raise refusal


def encoded(text: str, host: Host, what: str, *, special: bool = True, bos: bool = False) -> torch.Tensor:
    """The ids (1, n) of a prompt; `what` is its name in a refusal."""
    refusal = _exceeded(f"The {what} has more tokens than the context, which has {host.length}: shorten it.")
    check_text(text, host.tokenizer, host.length, special, refusal)
    return host.tokenizer.encode(text, add_bos=bos, encode_special_tokens=special)


def listed(request: CompletionRequest) -> list[Any]:
    """Each prompt of a completion, a text or a list of ids."""
    prompt: Any = request.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def prompts(request: CompletionRequest, host: Host) -> list[torch.Tensor]:
    """The ids (1, n) of each prompt of a completion."""
    bos = host.tokenizer.wants_bos if request.add_bos is None else request.add_bos
    out = []
    for one in listed(request):
        if isinstance(one, str):
            out.append(encoded(one, host, "prompt", special=request.encode_special_tokens, bos=bos))
        else:
            check_room(len(one), host.length)
            check_ids(one, host.vocab, "prompt")
            out.append(torch.tensor([one], dtype=torch.long))
    return out


def negative(request: Asking, host: Host) -> list[torch.Tensor]:
    """The ids (1, n) of the negative prompt, if there is one."""
    text = request.negative_prompt
    return [] if text is None else [encoded(text, host, "negative prompt")]


def text_of(request: CompletionRequest, place: int, ids: torch.Tensor, host: Host) -> str:
    """A prompt as it was given, or as its ids read."""
    prompt = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    given = prompt[place] if place < len(prompt) else None
    return given if isinstance(given, str) else str(host.tokenizer.decode(ids[0]))


def check_room(count: int, room: int) -> int:
    """How many tokens are left for the answer: one at least."""
    if count >= room:
        raise _exceeded(f"The prompt has {count} tokens and the context {room}: shorten it.")
    return room - count


def check_ids(ids: Collection[int], vocab: int, name: str) -> None:
    """Refuse ids that the model cannot have."""
    if ids and max(ids) >= vocab:
        raise Problem(422, f"{name}: token {max(ids)} is outside the vocabulary of {vocab}.", param=name)


def _exceeded(message: str) -> Problem:
    return Problem(400, message, code="context_length_exceeded")
