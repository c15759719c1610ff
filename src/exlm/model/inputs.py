"""Check the inputs of `Model.forward` and of jobs, and cut a call of `forward` into batches."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import spec
from ..config import FrozenConfig
from ..errors import CacheTooSmall, InputError, NotLoaded
from ..kernels.interface import StateSlots
from ..kvcache import CacheBase
from ..lora import Lora
from ..multimodal import EMBEDDING_INDEX, MMEmbedding, embedding_spans, mrope_positions
from ..nn import Batch, LoraRef, VectorSpan
from ..nn.batch import Outputs

EMBED_HERE = "{{EMBED_HERE}}"
"""Marks the place in a prompt of vectors that were given as a bare tensor, which has no alias."""


@dataclass(frozen=True, eq=False)
class SequenceExtras:
    """What a sequence has besides its ids: LoRAs, embeddings, M-RoPE positions."""

    adapters: tuple[LoraRef, ...] = ()
    embeddings: tuple[MMEmbedding, ...] = ()
    loras: tuple[Lora, ...] = ()  # those that `adapters` refer to
    mrope_positions: Tensor | None = None  # (3, prompt) M-RoPE positions; None: plain positions

    @property
    def salt(self) -> bytes:
        """Part of the hash of cached pages: with other LoRAs, equal ids have other keys and values."""
        return b"".join(struct.pack("<qd", *one) for one in self.adapters)

    def unloaded_error(self) -> NotLoaded | None:
        """The error of a sequence whose LoRA was unloaded."""
        for lora in self.loras:
            if not lora.loaded:
                return NotLoaded(f"{lora!r} was unloaded while a job used it.")
        return None

    def vector_spans(self, row: int, ids: Sequence[int]) -> Iterator[VectorSpan]:
        """The vectors that replace embeddings of these ids in a batch's row."""
        if self.embeddings and max(ids) >= EMBEDDING_INDEX:
            for span in embedding_spans(ids, self.embeddings):
                yield VectorSpan(row, span.start, span.vectors)

    def mrope_slice(self, start: int, stop: int) -> Tensor:
        """(3, stop - start) M-RoPE positions; sampled tokens continue the prompt on all axes."""
        if self.mrope_positions is None:
            return torch.arange(start, stop).repeat(3, 1)
        prompt_length = self.mrope_positions.shape[1]
        offset = int(self.mrope_positions.max()) + 1 - prompt_length
        sampled = torch.arange(max(start, prompt_length), max(stop, prompt_length)).repeat(3, 1) + offset
        return torch.cat((self.mrope_positions[:, start:stop], sampled), 1)


def check_embeddings(embeddings: Any, hidden_size: int) -> tuple[MMEmbedding, ...]:
    """Check injected embeddings: None, one, or a list."""
    if embeddings is None:
        return ()
    embedding_list = list(embeddings) if isinstance(embeddings, list | tuple) else [embeddings]
    for one in embedding_list:
        if not isinstance(one, MMEmbedding):
            raise InputError(
                f"embeddings must be MMEmbedding objects, found {type(one).__name__}: wrap vectors as "
                "MMEmbedding(model, vectors) and put its text_alias, or its ids, into the prompt."
            )
        if one.embeddings.shape[1] != hidden_size:
            raise InputError(
                f"Embedding {one.text_alias!r} has vectors of {one.embeddings.shape[1]} numbers, but the "
                f"model's hidden size is {hidden_size}: it was made for another model."
            )
    return tuple(embedding_list)


def check_ids(ids: Sequence[int], embeddings: Sequence[MMEmbedding], vocab_size: int) -> None:
    """Raise for ids that are neither tokens nor of an embedding."""
    if not ids or max(ids) < vocab_size:
        return
    invalid = next((number for number in ids if vocab_size <= number < EMBEDDING_INDEX), None)
    if invalid is not None:
        raise InputError(
            f"Token id {invalid} is outside the vocabulary of {vocab_size}. Was the text encoded with "
            "another model's tokenizer?"
        )
    for _ in embedding_spans(ids, embeddings):
        pass  # raises for an id that no embedding has


def uses_mrope(model: spec.Model) -> bool:
    return any(attn.rope is not None and attn.rope.mrope_sections for attn in model.attentions)


def prompt_mrope_positions(
    model: spec.Model, ids: Sequence[int], embeddings: Sequence[MMEmbedding], start: int = 0
) -> Tensor | None:
    """(3, ids) M-RoPE positions if images make them differ from plain ones, else None."""
    has_images = any(one.thw_grid is not None for one in embeddings)
    return mrope_positions(ids, embeddings, start) if has_images and uses_mrope(model) else None


@dataclass(frozen=True)
class ForwardRequest:
    """The checked arguments of one call of `forward`."""

    ids: Tensor  # (rows, tokens)
    positions: Tensor  # (rows, tokens) or (3, rows, tokens)
    past: int
    mask: Tensor | None  # (rows, past + tokens)
    adapters: tuple[tuple[LoraRef, ...], ...] = ()  # of each row
    vector_spans: tuple[VectorSpan, ...] = ()

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[1])

    def chunk_batch(
        self, start: int, stop: int, page_table: Tensor, state_slots: StateSlots | None, outputs: Outputs
    ) -> Batch:
        """Tokens `start` to `stop` as one batch."""
        max_kv_len = self.past + stop
        return Batch(
            ids=self.ids[:, start:stop],
            positions=self.positions[..., start:stop].contiguous(),  # channels to other ranks need it
            past_lens=torch.full((self.rows,), self.past + start, device=self.ids.device),
            page_table=page_table,
            max_kv_len=max_kv_len,
            uniform=self.mask is None,
            mask=None if self.mask is None else self.mask[:, :max_kv_len],
            state_slots=state_slots,
            vector_spans=tuple(_slice_spans(self.vector_spans, start, stop)),
            adapters=self.adapters,
            outputs=outputs,
        )


def check_forward_inputs(
    config: FrozenConfig,
    input_ids: Tensor,
    cache: CacheBase | None,
    input_mask: Tensor | None,
    position_offsets: Tensor | None,
    positions: Tensor | None,
    device: torch.device,
    adapters: tuple[LoraRef, ...] = (),
    indexed_embeddings: Any = None,
) -> ForwardRequest:
    """Check the arguments of `forward`; returns them as a `ForwardRequest` on the model's device."""
    embeddings = check_embeddings(indexed_embeddings, config.spec.hidden)
    ids = _check_input_ids(config, input_ids, embeddings)
    rows, tokens = ids.shape
    past = 0 if cache is None else check_cache_room(cache, rows, tokens)
    if past + tokens > config.max_seq_len:
        raise InputError(
            f"{past} past and {tokens} new tokens exceed the model's configured length of "
            f"{config.max_seq_len}. Raise config.max_seq_len before loading, or shorten the input."
        )
    spans = _vector_spans(ids, embeddings, device)
    default_positions = _default_positions(config, ids, past, embeddings).to(device)
    ids = ids.to(device)
    mask = None if input_mask is None else _visibility_mask(input_mask, rows, past + tokens, cache).to(device)
    return ForwardRequest(
        ids=ids,
        positions=_resolve_positions(ids, default_positions, position_offsets, positions, config.max_seq_len),
        past=past,
        mask=mask,
        adapters=(adapters,) * rows if adapters else (),
        vector_spans=spans,
    )


def requested_outputs(
    config: FrozenConfig, request: ForwardRequest, preprocess_only: bool, last_id_only: bool
) -> Outputs:
    """Which logits the call asks for; raises if they are more than `max_output_len` allows."""
    requested: Outputs = "none" if preprocess_only else "last" if last_id_only else "all"
    if requested == "all" and config.max_output_len is not None and request.tokens > config.max_output_len:
        raise InputError(
            f"seq_len {request.tokens} exceeds max_output_len {config.max_output_len}: ask for the last "
            "token only (last_id_only=True), or raise config.max_output_len."
        )
    return requested


def chunk_ranges(config: FrozenConfig, request: ForwardRequest, has_cache: bool) -> Iterator[tuple[int, int]]:
    """Token ranges of at most `max_input_len`; without a cache there is only one."""
    limit = max(1, config.max_input_len * config.max_batch_size // request.rows)
    if not has_cache and request.tokens > limit:
        raise InputError(
            f"Maximum input length exceeded: {request.tokens} tokens in {request.rows} rows without a cache, "
            f"at most {limit} are computed at once. Pass a cache, or raise config.max_input_len."
        )
    start = 0
    while start < request.tokens:
        size = min(limit, request.tokens - start)
        while size > 1 and has_cache and (request.past + start + size) * size > config.max_attention_size:
            size = max(1, min(size - 1, config.max_attention_size // (request.past + start + size)))
        yield start, start + size
        start += size


def _check_input_ids(config: FrozenConfig, ids: Tensor, embeddings: tuple[MMEmbedding, ...]) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        found = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"input_ids must be an integer tensor of (rows, tokens), found {found}.")
    if ids.numel() == 0:
        raise InputError(f"input_ids is empty, shape {tuple(ids.shape)}: a forward pass needs at least one token.")
    if embeddings or (ids.device.type == "cpu" and int(ids.max()) >= config.spec.vocab):
        for row in ids.tolist():
            check_ids(row, embeddings, config.spec.vocab)
    return ids.long()


def _vector_spans(ids: Tensor, embeddings: tuple[MMEmbedding, ...], device: torch.device) -> tuple[VectorSpan, ...]:
    """All rows' injected vectors, on the model's device."""
    if not embeddings:
        return ()
    return tuple(
        VectorSpan(row, span.start, span.vectors.to(device))
        for row, row_ids in enumerate(ids.tolist())
        for span in embedding_spans(row_ids, embeddings)
    )


def _slice_spans(spans: tuple[VectorSpan, ...], start: int, stop: int) -> Iterator[VectorSpan]:
    """The parts of these spans between two tokens, relative to the first."""
    for span in spans:
        first, last = max(span.start, start), min(span.start + len(span.vectors), stop)
        if first < last:
            vectors = span.vectors[first - span.start : last - span.start]
            yield replace(span, start=first - start, vectors=vectors)


def check_cache_room(cache: CacheBase, rows: int, tokens: int) -> int:
    """Tokens already in the cache; raises if the new ones do not fit."""
    past = cache.current_seq_len
    if rows > cache.batch_size:
        raise InputError(f"{rows} rows do not fit a cache of batch_size {cache.batch_size}.")
    if past < 0 or past + tokens > cache.max_seq_len:
        raise CacheTooSmall(
            f"Total sequence length exceeds cache size in model.forward: {past} past and {tokens} new "
            f"tokens, room for {cache.max_seq_len}. Make the cache with max_seq_len of at least "
            f"{past + tokens}, or lower cache.current_seq_len."
        )
    return past


def _default_positions(config: FrozenConfig, ids: Tensor, past: int, embeddings: tuple[MMEmbedding, ...]) -> Tensor:
    """Consecutive positions, or M-RoPE positions where images need them."""
    rows, tokens = ids.shape
    if embeddings:
        row_positions = [prompt_mrope_positions(config.spec, row, embeddings, past) for row in ids.tolist()]
        if mrope_rows := [one for one in row_positions if one is not None]:
            return torch.stack(mrope_rows, 1)
    return torch.arange(past, past + tokens, device=ids.device).expand(rows, tokens)


def _resolve_positions(
    ids: Tensor, default: Tensor, offsets: Tensor | None, given: Tensor | None, max_length: int
) -> Tensor:
    rows, tokens = ids.shape
    for name, numbers in (("positions", given), ("position_offsets", offsets)):
        if numbers is not None and not isinstance(numbers, Tensor):
            raise InputError(f"{name} must be a tensor, found {type(numbers).__name__}.")
    if given is not None:
        if offsets is not None:
            raise InputError("Give positions or position_offsets, not both.")
        if tuple(given.shape) not in ((rows, tokens), (3, rows, tokens)):
            raise InputError(
                f"positions must be ({rows}, {tokens}) or (3, {rows}, {tokens}), found {tuple(given.shape)}."
            )
        if int(given.min()) < 0 or int(given.max()) >= max_length:
            raise InputError(
                f"positions must be from 0 to {max_length - 1}, found {int(given.min())} to {int(given.max())}."
            )
        return given.to(ids.device).long()
    if offsets is None:
        return default
    if offsets.numel() != rows:
        raise InputError(f"position_offsets needs one number for each of {rows} rows, found {offsets.numel()}.")
    shifted = (default + offsets.to(ids.device).long().view(rows, 1)).clamp(min=0)
    if int(shifted.max()) >= max_length:
        raise InputError(f"position_offsets reach beyond the configured length of {max_length}.")
    return shifted


def _visibility_mask(mask: Tensor, rows: int, total: int, cache: CacheBase | None) -> Tensor:
    """An additive (0 or -inf) or boolean mask as visibility; tokens beyond its end are visible.

    With a cache the mask may cover tokens that a later call computes.
    """
    if not isinstance(mask, Tensor) or not (mask.dtype is torch.bool or mask.is_floating_point()):
        found = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            "input_mask must be a tensor of True and False, or one that is added (0 or -inf); found "
            f"{found}. One that has 1 where a token is seen becomes the first with mask.bool()."
        )
    max_width = total if cache is None else max(total, cache.max_seq_len)
    if mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] > max_width:
        raise InputError(f"input_mask must be ({rows}, at most {max_width}), found {tuple(mask.shape)}.")
    mask = mask[:, :total]
    visible = mask if mask.dtype is torch.bool else mask > -1.0
    rest = torch.ones(rows, total - mask.shape[1], dtype=torch.bool, device=mask.device)
    return torch.cat((visible, rest), 1)
