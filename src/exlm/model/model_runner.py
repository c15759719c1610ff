"""The generator's interface to the model: ids and page tables in, logits out.

A runner turns sequences (ids and pages) into batches and runs them. It decides nothing: the scheduler says
what runs next, the sampler what a row of logits becomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import NotLoaded
from ..kernels.interface import LayerKVCache
from ..kvcache import PAGE_SIZE, CacheBase
from ..nn import Batch
from ..nn.batch import Outputs
from .cuda_graphs import CudaGraphRunner, split_state_slots
from .decoder import Decoder
from .inputs import SequenceExtras

NO_EXTRAS = SequenceExtras()


class UnloadedDecoder:
    """Replaces the decoder of an unloaded model."""

    def forward(self, batch: Batch, layers: Sequence[LayerKVCache]) -> tuple[Tensor | None, Tensor]:
        raise NotLoaded(
            "The model was unloaded, so this generator cannot continue: load the model, make a new generator."
        )


class PagedSequence(Protocol):
    """What a runner needs to know of a sequence: all its tokens so far, its page numbers in order, its extras.

    For a model with recurrent layers also the slots of the next pass: the state that it continues (-1: zeros), and
    (token, slot) for each state that it stores.
    """

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def pages(self) -> Sequence[int]: ...

    @property
    def extras(self) -> SequenceExtras | None: ...

    @property
    def state_source(self) -> int: ...

    @property
    def state_targets(self) -> Sequence[tuple[int, int]]: ...


@dataclass(frozen=True)
class PlainSequence:
    """A `PagedSequence` without extras, for measurements that run without a generator."""

    ids: list[int]
    pages: list[int]
    extras: None = None
    state_source: int = -1
    state_targets: Sequence[tuple[int, int]] = ()


class PagedModelRunner:
    """A loaded decoder over a paged cache."""

    def __init__(
        self,
        decoder: Decoder,
        cache: CacheBase,
        device: torch.device,
        uses_mrope: bool = False,
        max_graph_tokens: int = 0,
    ) -> None:
        """`uses_mrope`: positions may have three axes. `max_graph_tokens`: as in `LoadedModel`."""
        self.decoder: Decoder | UnloadedDecoder = decoder
        self.cache = cache
        self.device = device
        self.uses_mrope = uses_mrope
        self.is_recurrent = cache.state_bytes > 0
        # `forward` must not refer to this runner: a reference cycle would keep the weights in memory.
        self.graphs = (
            CudaGraphRunner(partial(all_logits, decoder, cache), device, max_graph_tokens, self.is_recurrent)
            if max_graph_tokens
            else None
        )

    def release_model(self) -> None:
        """Release the decoder, so that a generator that is still referenced does not keep the weights."""
        self.decoder, self.graphs = UnloadedDecoder(), None

    def copy_pages(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Duplicate the leading tokens of pages: (source, target, tokens)."""
        self.cache.copy(copies)

    @torch.no_grad()
    def prefill(self, sequence: PagedSequence, start: int, stop: int) -> None:
        """Compute keys and values of ids `start` to `stop`; those before are in the pages."""
        self._forward_batch([sequence], [sequence.ids[start:stop]], [start], "none")

    @torch.no_grad()
    def decode(
        self, sequences: Sequence[PagedSequence], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> list[Tensor] | Tensor:
        """Run each sequence's tokens from `past` on; for each, (tokens, vocabulary) float32 logits.

        Rows with equally many tokens run as one batch. If all have, the result is one tensor, which the
        next call may overwrite.
        """
        lengths: dict[int, list[int]] = {}
        for row, row_tokens in enumerate(tokens):
            lengths.setdefault(len(row_tokens), []).append(row)
        if len(lengths) == 1:
            return self._decode_batch(sequences, tokens, past)
        out: dict[int, Tensor] = {}
        for rows in lengths.values():
            part = self._decode_batch([sequences[r] for r in rows], [tokens[r] for r in rows], [past[r] for r in rows])
            out.update(zip(rows, part if self.graphs is None else part.clone(), strict=True))
        return [out[row] for row in range(len(sequences))]

    @torch.no_grad()
    def decode_next(self, sequences: Sequence[PagedSequence], past: Sequence[int], tokens: Tensor) -> Tensor | None:
        """Launch `decode` of one token each, (sequences,) on the device, before the host knows them.

        None without CUDA graphs, where nothing would be gained. Logits of a negative token are meaningless.
        The result overwrites the last one.
        """
        return None if self.graphs is None else self._decode_with_graph(sequences, tokens, past)

    def _decode_batch(
        self, sequences: Sequence[PagedSequence], token_rows: Sequence[Sequence[int]], past: Sequence[int]
    ) -> Tensor:
        """Logits (rows, tokens, vocabulary) of rows with equally many tokens."""
        logits = None if self.graphs is None else self._decode_with_graph(sequences, token_rows, past)
        if logits is None:
            logits = self._forward_batch(sequences, token_rows, past, "all")
        assert logits is not None
        return logits

    def _decode_with_graph(
        self, sequences: Sequence[PagedSequence], token_rows: Sequence[Sequence[int]] | Tensor, past: Sequence[int]
    ) -> Tensor | None:
        """`_decode_batch` by a CUDA graph; None if the batch cannot be captured."""
        if self.graphs is None or any([sequence.extras for sequence in sequences]):
            return None
        self.cache.last_writer = self
        count = 1 if isinstance(token_rows, Tensor) else len(token_rows[0])
        return self.graphs.decode(
            token_rows, past, [sequence.pages for sequence in sequences], self._state_slots(sequences, count)
        )

    def _state_slots(self, sequences: Sequence[PagedSequence], count: int) -> NDArray[np.int64] | None:
        """(sequences, 1 + count): each one's source slot, then the slot for the state after each token, or -1."""
        if not self.is_recurrent:
            return None
        slots = np.full((len(sequences), 1 + count), -1, np.int64)
        for row, sequence in enumerate(sequences):
            slots[row, 0] = sequence.state_source
            for token, slot in sequence.state_targets:
                slots[row, 1 + token] = slot
        return slots

    def _forward_batch(
        self,
        sequences: Sequence[PagedSequence],
        token_rows: Sequence[Sequence[int]],
        past: Sequence[int],
        outputs: Outputs,
    ) -> Tensor | None:
        self.cache.last_writer = self
        count = len(token_rows[0])
        max_kv_len = max(past) + count
        max_pages = -(-max_kv_len // PAGE_SIZE)
        table = [[*sequence.pages[:max_pages], *[0] * (max_pages - len(sequence.pages))] for sequence in sequences]
        past_array = np.array(past, np.int64)
        slots = self._state_slots(sequences, count)
        arrays = (
            np.array(token_rows, np.int64),
            past_array[:, None] + np.arange(count),
            past_array,
            np.array(table, np.int64),
            *(() if slots is None else (slots,)),
        )
        ids, positions, past_lens, page_table, *state_slots = copy_to_device(arrays, self.device)
        batch = Batch(
            ids=ids,
            positions=positions,
            past_lens=past_lens,
            page_table=page_table,
            max_kv_len=max_kv_len,
            uniform=len(set(past)) == 1,
            state_slots=split_state_slots(state_slots[0]) if state_slots else None,
            outputs=outputs,
        )
        extras = [sequence.extras for sequence in sequences]
        if any(extras):
            batch = self._with_extras(batch, [one or NO_EXTRAS for one in extras], token_rows, past)
        return self.decoder.forward(batch, self.cache.layers)[0]

    def _with_extras(
        self, batch: Batch, extras: Sequence[SequenceExtras], token_rows: Sequence[Sequence[int]], past: Sequence[int]
    ) -> Batch:
        """The batch with its rows' LoRAs, embeddings and positions."""
        positions = batch.positions
        if self.uses_mrope and any(one.mrope_positions is not None for one in extras):
            rows = [one.mrope_slice(at, at + len(row)) for one, at, row in zip(extras, past, token_rows, strict=True)]
            positions = torch.stack(rows, 1).to(self.device)
        spans = (span for row, one in enumerate(extras) for span in one.vector_spans(row, token_rows[row]))
        return replace(
            batch,
            positions=positions,
            adapters=tuple(one.adapters for one in extras) if any(one.adapters for one in extras) else (),
            vector_spans=tuple(replace(span, vectors=span.vectors.to(self.device)) for span in spans),
        )


def all_logits(decoder: Decoder, cache: CacheBase, batch: Batch) -> Tensor:
    """The logits of every token of a batch."""
    logits, _ = decoder.forward(batch, cache.layers)
    assert logits is not None
    return logits


def copy_to_device(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy integers to a device in one asynchronous copy."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    sizes = [-(-array.size // 2) * 2 for array in arrays]  # each is aligned to 16 bytes
    pinned = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    for part, array in zip(pinned.split_with_sizes(sizes), arrays, strict=True):
        part.numpy()[: array.size] = array.ravel()
    on_device = pinned.to(device, non_blocking=True).split_with_sizes(sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(on_device, arrays, strict=True)]
