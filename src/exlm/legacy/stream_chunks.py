"""What `stream_ex` returns, made of the loop's results: other keys, and always all that were asked for."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from .. import Job

CHUNK_KEYS = {
    "token_ids": "chunk_token_ids",
    "token_probs": "probs",
    "top_k_tokens": "top_tokens",
    "top_k_probs": "top_probs",
    "logits": "logits",
}


class Chunk(TypedDict):
    """One step of a stream. Of n tokens that become visible: ids and probs (1, n), tops (1, n, k)."""

    chunk: str
    eos: bool
    chunk_token_ids: Tensor
    probs: NotRequired[Tensor]
    top_tokens: NotRequired[Tensor]
    top_probs: NotRequired[Tensor]
    logits: NotRequired[Tensor]
    suppressed: NotRequired[str]


def empty_chunk(job: Job, vocab_size: int, text: str = "", eos: bool = False) -> Chunk:
    """A chunk without tokens, with every tensor the job wants."""
    out: Chunk = {"chunk": text, "eos": eos, "chunk_token_ids": torch.empty((1, 0), dtype=torch.long)}
    if job.return_probs:
        out["probs"] = torch.empty((1, 0))
    if top := job.return_top_tokens:
        out["top_tokens"] = torch.empty((1, 0, top), dtype=torch.long)
        out["top_probs"] = torch.empty((1, 0, top))
    if job.return_logits:
        out["logits"] = torch.empty((1, 0, vocab_size))
    return out


def chunk_from_result(result: Any, vocab_size: int, skip: int = 0) -> Chunk:
    """A streaming result as a chunk; the first `skip` tokens stay unnamed.

    The tokens of a stop string are not named either: their text is not shown.
    """
    out = empty_chunk(result["job"], vocab_size, result.get("text", ""), result["eos"])
    if result.get("eos_reason") != "stop_string":
        visible = {new: result[old][:, skip:] for old, new in CHUNK_KEYS.items() if old in result}
        out.update(visible)  # type: ignore[typeddict-item]
    if "suppressed_text" in result:
        out["suppressed"] = result["suppressed_text"]
    return out


def merge_chunks(first: Chunk, second: Chunk) -> Chunk:
    """Two steps as one."""
    out: Chunk = {**second, "chunk": first["chunk"] + second["chunk"]}
    for name in CHUNK_KEYS.values():
        if name in second:
            both = torch.cat((first[name], second[name]), 1)  # type: ignore[literal-required]
            out[name] = both  # type: ignore[literal-required]
    return out
