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

from .errors import APIError
from .schema import BaseRequest, CompletionRequest

if TYPE_CHECKING:
    from .generation import ModelInfo

SLICE_CHARS = 1 << 14
"""Characters that are tokenised at a time."""
TOKENS_PER_CUT = 16
"""Tokens that a cut in the middle of a word may add to the count."""
MIN_TOKENIZE_LIMIT = 1 << 17
"""Tokens that /tokenize and /detokenize take, where the context has fewer."""


def tokenize_limit(context: int) -> int:
    """How many tokens /tokenize and /detokenize take."""
    return max(context, MIN_TOKENIZE_LIMIT)


def check_token_count(
    text: str, tokenizer: Tokenizer, max_tokens: int, special: bool, refusal: APIError
) -> None:
    """Raise the refusal if a text surely has more than `room` tokens; `special` is as in encoding it.

    What is let through has a quarter too many at most, and a few more for each slice.
    """
    if len(text) <= SLICE_CHARS:
        return
    encode = tokenizer.encode_special if special else tokenizer.encode_unspecial
    counted, surely = 0, max_tokens + max_tokens // 4
    for start in range(0, len(text), SLICE_CHARS):
        counted += len(encode(text[start : start + SLICE_CHARS]))
        surely += TOKENS_PER_CUT
        if counted > surely:
            raise refusal


def encode_prompt(
    text: str, model: ModelInfo, what: str, *, special: bool = True, bos: bool = False
) -> torch.Tensor:
    """The ids (1, n) of a prompt; `what` is its name in a refusal."""
    refusal = _context_exceeded(
        f"The {what} has more tokens than the context, which has {model.max_seq_len}: shorten it."
    )
    check_token_count(text, model.tokenizer, model.max_seq_len, special, refusal)
    return model.tokenizer.encode(text, add_bos=bos, encode_special_tokens=special)


def prompt_list(request: CompletionRequest) -> list[Any]:
    """Each prompt of a completion, a text or a list of ids."""
    prompt: Any = request.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def encode_prompts(request: CompletionRequest, model: ModelInfo) -> list[torch.Tensor]:
    """The ids (1, n) of each prompt of a completion."""
    bos = model.tokenizer.wants_bos if request.add_bos is None else request.add_bos
    out = []
    for one in prompt_list(request):
        if isinstance(one, str):
            out.append(encode_prompt(one, model, "prompt", special=request.encode_special_tokens, bos=bos))
        else:
            tokens_left(len(one), model.max_seq_len)
            check_token_ids(one, model.vocab_size, "prompt")
            out.append(torch.tensor([one], dtype=torch.long))
    return out


def encode_negative_prompt(request: BaseRequest, model: ModelInfo) -> list[torch.Tensor]:
    """The ids (1, n) of the negative prompt, if there is one."""
    text = request.negative_prompt
    return [] if text is None else [encode_prompt(text, model, "negative prompt")]


def prompt_text(request: CompletionRequest, index: int, ids: torch.Tensor, model: ModelInfo) -> str:
    """A prompt as it was given, or as its ids read."""
    prompt = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    given = prompt[index] if index < len(prompt) else None
    return given if isinstance(given, str) else str(model.tokenizer.decode(ids[0]))


def tokens_left(count: int, room: int) -> int:
    """How many tokens are left for the answer: one at least."""
    if count >= room:
        raise _context_exceeded(f"The prompt has {count} tokens and the context {room}: shorten it.")
    return room - count


def check_token_ids(ids: Collection[int], vocab: int, name: str) -> None:
    """Refuse ids that the model cannot have."""
    if ids and max(ids) >= vocab:
        raise APIError(422, f"{name}: token {max(ids)} is outside the vocabulary of {vocab}.", param=name)


def _context_exceeded(message: str) -> APIError:
    return APIError(400, message, code="context_length_exceeded")
